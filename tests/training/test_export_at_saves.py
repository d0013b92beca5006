"""`checkpoints.export_hf`: beside every checkpoint a folder that transformers loads, complete or not there."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import kenotron as kn
from kenotron.checkpoint import folders
from kenotron.config.errors import InputError, RunFailed
from kenotron.generation.load import load_for_generation
from kenotron.interop import background_export, to_hf
from support.tiny_llamas import hf_logits, load_hf, our_logits
from support.tiny_run import equal_bits, exported, saved_weights, text_overrides, tiny_config, train_and_listen

EXPORT = "checkpoints.export_hf=true"


def test_every_checkpoint_has_its_export_and_goes_with_it(tmp_path: Path) -> None:
    keys = ("checkpoints.checkpoint_interval=1", "checkpoints.keep_last=2", *text_overrides(tmp_path))
    train_and_listen(tiny_config(tmp_path, EXPORT, "model.dtype=bfloat16", *keys))
    steps = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert steps == ["2", "3"]
    for step in steps:
        path = tmp_path / "checkpoints" / step
        masters = {name: tensor.bfloat16() for name, tensor in saved_weights(path).items()}
        assert equal_bits(exported(path / "hf"), masters)
        assert folders.verify(path) == []
    tokens = torch.randint(300, (1, 16), generator=torch.Generator().manual_seed(0))
    ours = our_logits(load_for_generation(path / "hf", "float32").model, tokens)
    assert torch.allclose(hf_logits(load_hf(path / "hf"), tokens), ours, atol=1e-4)
    assert (path / "hf" / "tokenizer.json").read_text() == (path / "tokenizer" / "tokenizer.json").read_text()


def test_the_next_start_makes_up_for_an_export_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    keys = (EXPORT, "checkpoints.checkpoint_interval=2")
    said = r"step 2: checkpoints\.export_hf: cannot write .*2/hf: No space left on device"
    with pytest.raises(RunFailed, match=said):
        train_and_listen(tiny_config(tmp_path, *keys))
    second = tmp_path / "checkpoints" / "2"
    assert folders.verify(second) == []
    assert not list(second.glob("hf*"))
    monkeypatch.undo()
    (second / "hf.tmp-0123abcd").mkdir()  # what a killed process left
    train_and_listen(tiny_config(tmp_path, *keys))
    assert [path.name for path in second.glob("hf*")] == ["hf"]
    for step in ("2", "3"):
        path = tmp_path / "checkpoints" / step
        assert equal_bits(exported(path / "hf"), saved_weights(path))


def test_an_export_is_made_up_for_at_a_newer_local_checkpoint_and_after_the_end(tmp_path: Path) -> None:
    local = f"checkpoints.local={{path: {tmp_path}/local, interval: 1}}"
    keys = (EXPORT, "checkpoints.checkpoint_interval=2", "tokens.train_steps=4", local)
    dies = "general.hooks=[{path: support.user_parts.OnRank, kwargs: {what: raise, rank: 0, step: 4}}]"
    with pytest.raises(RuntimeError, match="this hook is broken"):
        train_and_listen(tiny_config(tmp_path, *keys, dies))
    second = tmp_path / "checkpoints" / "2"
    shutil.rmtree(second / "hf")  # the process was killed before it was complete
    _, said = train_and_listen(tiny_config(tmp_path, *keys))
    assert "Training from step 4 " in said  # the local checkpoint is that of step 3
    assert equal_bits(exported(second / "hf"), saved_weights(second))
    last = tmp_path / "checkpoints" / "4"
    shutil.rmtree(last / "hf")
    _, said = train_and_listen(tiny_config(tmp_path, *keys))
    assert said.index("is finished") < said.index(f"Exported to {last}/hf")
    assert equal_bits(exported(last / "hf"), saved_weights(last))


def test_what_transformers_has_no_class_for_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"checkpoints\.export_hf: attention_bias: false: Hugging Face's Qwen2 has"):
        train_and_listen(tiny_config(tmp_path, EXPORT, "model.model_config.is_qwen2_config=true"))
    assert not list((tmp_path / "checkpoints").glob("*/manifest.json"))


# ---- in the background ------------------------------------------------------------------------------------------

BEHIND = ("checkpoints.checkpointing_engine=async", "checkpoints.checkpoint_interval=2", EXPORT)


@pytest.mark.slow
def test_an_export_in_the_background_is_the_one_in_the_call(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *BEHIND, *text_overrides(tmp_path), "tokens.train_steps=2")
    _, said = train_and_listen(config)
    path = tmp_path / "checkpoints" / "2"
    assert f"Exported to {path}/hf: " in said
    to_hf(path, tmp_path / "2")
    found, expected = (
        {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        for folder in (path / "hf", tmp_path / "2")
    )
    assert found == expected
    assert sorted(each.name for each in path.glob("hf*")) == ["hf"]


EXPORTER = """
import json, pathlib, sys, time
end = time.monotonic() + 30
source, target = map(pathlib.Path, sys.argv[1:])
while not (source.parent / "go").exists():
    assert time.monotonic() < end, "training waits"
    time.sleep(0.01)
assert source.name != {crash!r}, "no memory"
if source.name != {refused!r}:
    target.mkdir()
print("a line of a library's")
print(json.dumps({{"problem": "no room"}} if source.name == {refused!r} else {{"bytes": 2**20}}))
"""


class Steps(kn.Hook):
    """Notes at each step which exports are there, and lets them go on after step 8."""

    priority = -56  # after the exports' own

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.seen: dict[int, list[str]] = {}

    def after_step(self, run: Any, result: Any) -> None:
        self.seen[run.step] = [path.parent.name for path in self.folder.glob("*/hf")]
        if run.step == 8:
            (self.folder / "go").touch()


def test_retention_waits_for_an_export_and_training_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_export, "MAIN", EXPORTER.format(crash="", refused=""))
    root = tmp_path / "checkpoints"
    hook = f"general.hooks=[{{path: {__name__}.Steps, kwargs: {{folder: {root}}}}}]"
    keys = ("checkpoints.checkpoint_interval=8", "checkpoints.keep_last=1", "checkpoints.save_initial_state=true")
    run, said = train_and_listen(tiny_config(tmp_path, *BEHIND, hook, *keys, "tokens.train_steps=17"))
    (steps,) = [each for each in run.hooks if type(each).__name__ == "Steps"]
    assert [steps.seen[step] for step in range(1, 9)] == [[]] * 8
    for step in (0, 8, 17):  # step 0, too, which the save of step 8 would have pruned meanwhile
        assert said.count(f"Exported to {root}/{step}/hf: 1.00MiB") == 1
    assert (root / "17" / "hf").is_dir()
    assert not (root / "0").exists()


def test_the_last_export_that_fails_in_the_background_fails_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(background_export, "MAIN", EXPORTER.format(crash="3", refused="2"))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "go").touch()
    said = "the process ended with exit code 1: AssertionError: no memory; the checkpoint is complete"
    with pytest.raises(RunFailed, match=rf"^step 3: checkpoints\.export_hf: {said}$"):
        train_and_listen(tiny_config(tmp_path, *BEHIND))
    assert folders.verify(tmp_path / "checkpoints" / "3") == []
