"""A model that transformers does not know is exported with its code: `trust_remote_code` loads it, an import does not.

The independent reference is the exported code itself, plain PyTorch that shares nothing with ours.
"""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kenotron.config.errors import InputError
from kenotron.generation import SamplingOptions, generate
from kenotron.generation.load import fill, load_for_generation
from kenotron.interop import from_hf, open_source, to_hf
from kenotron.kernels.attention import attention
from kenotron.models import Context, build, named_parameters
from kenotron.models.decoder import Decoder
from support.families import hf_model, save
from support.tiny_llamas import our_logits, random_tokens
from support.tiny_run import REPOSITORY

FILES = ("configuration_kenotron_nano.py", "modeling_kenotron_nano.py")


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """The folder that `convert to-hf` makes of a random nano with all its options."""
    from_hf(save(hf_model("nano_with_value_embeddings"), tmp_path / "hf"), tmp_path / "ours")
    to_hf(tmp_path / "ours", tmp_path / "exported")
    return tmp_path / "exported"


def loaded(folder: Path) -> PreTrainedModel:
    """By transformers, from the code in the folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    assert type(model).__module__.startswith("transformers_modules.")
    return model


def trainable(folder: Path) -> Decoder:
    """By us, as training begins from it."""
    source = open_source(folder)
    model = build(source.model)
    fill(model, source)
    return model


def test_transformers_loads_an_export_and_computes_the_same(exported: Path) -> None:
    assert type(AutoConfig.from_pretrained(exported, trust_remote_code=True)).__name__ == "KenotronNanoConfig"
    theirs, ours, tokens = loaded(exported), trainable(exported), random_tokens(2, 17)
    result = theirs(tokens, labels=tokens)
    assert torch.allclose(our_logits(ours, tokens), result.logits, rtol=1e-4, atol=1e-4)
    result.loss.backward()
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    ctx = Context((2, 17), torch.arange(17).repeat(2), attention, loss_scale=1 / 32)
    loss, _ = ours(tokens.flatten(), ctx, labels.flatten())
    loss.backward()
    assert loss.item() == pytest.approx(result.loss.item(), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in named_parameters(ours):
        assert (parameter.grad - gradients[name]).abs().max() < 1e-4 * gradients[name].abs().max(), name


def test_a_cache_and_padding_change_nothing_of_what_it_continues(exported: Path) -> None:
    theirs, ours = loaded(exported), load_for_generation(exported).model
    prompts = [random_tokens(1, length, seed=length)[0].tolist() for length in (4, 9)]
    expected = [c.tokens for c in generate(ours, None, prompts, SamplingOptions(max_new_tokens=12, stop_at_eos=False))]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt, tokens in zip(prompts, expected):
        for use_cache in (True, False):
            text = theirs.generate(torch.tensor([prompt]), use_cache=use_cache, **options)
            assert text[0, len(prompt) :].tolist() == tokens
    padded = torch.tensor([[0] * 5 + prompts[0], prompts[1]])
    mask = torch.tensor([[0] * 5 + [1] * 4, [1] * 9])
    assert theirs.generate(padded, attention_mask=mask, **options)[:, 9:].tolist() == expected


def test_an_import_of_it_runs_no_code(exported: Path, tmp_path: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert sorted(f"{each.split('.')[0]}.py" for each in config["auto_map"].values()) == sorted(FILES)
    for name in FILES:
        (exported / name).write_text("raise SystemExit('this code was run')\n")
    from_hf(exported, tmp_path / "again")
    found, expected = (load_for_generation(tmp_path / name).model.state_dict() for name in ("again", "ours"))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


OWN_FAMILY = """
from kenotron.models.families.nano import Nano, NanoArchitecture
class MineArchitecture(NanoArchitecture):
    family: str = "own_family.Mine"
class Mine(Nano):
    section = MineArchitecture
    hf_model_type, hf_class = "mine", "MineForCausalLM"
    hf_code = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
"""


def test_a_family_of_ones_own_brings_its_code_along(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, tokens = loaded(exported), random_tokens(2, 17)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_family.py").write_text(OWN_FAMILY)
    config = json.loads((exported / "config.json").read_text())
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    (exported / "config.json").write_text(json.dumps(config))
    from_hf(exported, tmp_path / "mine", family="own_family.Mine")
    with pytest.raises(InputError, match=r"no file .*configuration_mine.py, which hf_code of Mine names"):
        to_hf(tmp_path / "mine", tmp_path / "out")
    (tmp_path / "hf" / "README").parent.mkdir(exist_ok=True)
    for file in FILES:
        code = (exported / file).read_text().replace("kenotron_nano", "mine").replace("KenotronNano", "Mine")
        (tmp_path / "hf" / file.replace("kenotron_nano", "mine")).write_text(code)
    to_hf(tmp_path / "mine", tmp_path / "out")
    again = loaded(tmp_path / "out")
    assert type(again).__name__ == "MineForCausalLM"
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    sys.modules.pop("own_family", None)


def test_every_file_that_is_no_module_of_a_package_is_in_the_wheel() -> None:
    pyproject = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = pyproject["tool"]["setuptools"]["package-data"]["kenotron"]
    package = REPOSITORY / "src" / "kenotron"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    packed |= {path for path in package.rglob("*.py") if (path.parent / "__init__.py").is_file()}
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files - packed == set()
