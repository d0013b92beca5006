"""nanotron's files, written here by their documented format, become a checkpoint from which the run goes on."""

import itertools
import weakref
from pathlib import Path

import pytest
import torch

from kenotron.checkpoint import folders, manifest
from kenotron.config import load
from kenotron.config.errors import InputError
from kenotron.interop import from_nanotron
from kenotron.interop.nanotron_files import Merged
from kenotron.interop.sources import unpadded
from support.damage import CANARIES, harmless
from support.nanotron_files import EMBEDDING, write_nanotron
from support.tiny_run import equal_bits, losses, saved_weights, tiny_config, tiny_dict, train_quietly, weights

FAMILIES = {
    "llama": {"is_llama_config": True},
    "llama_tied": {"is_llama_config": True, "tie_word_embeddings": True},
    "llama_bias": {"is_llama_config": True, "attention_bias": True, "rope_interleaved": True},
    "qwen2": {"is_qwen2_config": True, "attention_bias": True, "_use_qkv_packed": True},
}


def nanotron_config(folder: Path, **model) -> dict:
    """The YAML of a run of nanotron, as it writes it: resolved, with the counters."""
    config = tiny_dict(folder)
    config["model"]["model_config"] |= model
    config["model"]["dtype"] = "bfloat16"
    config["parallelism"] = {"dp": 1, "tp": 1, "pp": 1, "pp_engine": "1f1b", "tp_mode": "REDUCE_SCATTER"}
    config["general"] |= {"step": 2, "consumed_train_samples": 8}
    config["lighteval"] = {"tasks": {"tasks": "x"}}
    config["checkpoints"]["checkpoints_path"] = "/nowhere/of/the/cluster"
    return config


def random_state(config: dict) -> tuple[dict, dict]:
    """Random weights and moments of the model of a config, under our names, in fp32."""
    bare = {name: value for name, value in config.items() if name != "lighteval"}
    generator = torch.Generator().manual_seed(0)
    shapes = {name: tuple(p.shape) for name, p in unpadded(load(bare).model).named_parameters()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    moments = {}
    for name, shape in shapes.items():
        moments[f"state.{name}.exp_avg"] = torch.randn(shape, generator=generator)
        moments[f"state.{name}.exp_avg_sq"] = torch.rand(shape, generator=generator)
        moments[f"state.{name}.step"] = torch.tensor(2.0)
    return tensors, moments


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"tp": 2, "pp": 2, "dp": 3, "zero": 1}),
        ("llama_tied", {"tp": 2, "pp": 2}),
        ("qwen2", {"tp": 2, "dp": 2, "zero": 1, "version": "1.4"}),
        *(
            pytest.param(family, {"tp": tp, "pp": pp, "dp": 2, "zero": zero}, marks=pytest.mark.slow)
            for family in FAMILIES
            for tp in (1, 2)
            for pp in (1, 2)
            for zero in (0, 1)
        ),
    ],
)
def test_weights_moments_and_position_are_those_that_were_written(family, layout, tmp_path):
    config = nanotron_config(tmp_path, **FAMILIES[family])
    tensors, moments = random_state(config)
    write_nanotron(tmp_path / "theirs", config, tensors, moments, **layout)
    said = []
    saved = from_nanotron(tmp_path / "theirs", tmp_path / "ours", report=said.append)
    assert saved.path == tmp_path / "ours" / "2"
    assert folders.verify(saved.path) == []
    assert equal_bits(saved_weights(saved.path), tensors)
    assert equal_bits(saved_weights(saved.path, "optimizer"), moments)
    state = manifest.read_manifest(saved.path).state
    position = {name: state[name] for name in ("step", "consumed_train_samples")}
    assert position == {"step": 2, "consumed_train_samples": 8}
    assert load(saved.path / "config.yaml").checkpoints.checkpoints_path == str(tmp_path / "ours")
    assert said == [f"{tmp_path / 'theirs' / '2' / 'config.yaml'}: lighteval is left out"]


def test_without_masters_the_weights_are_those_of_the_model(tmp_path):
    config = nanotron_config(tmp_path)
    tensors, moments = random_state(config)
    write_nanotron(tmp_path / "theirs", config, tensors, moments, masters=False, tp=2)
    saved = from_nanotron(tmp_path / "theirs", tmp_path / "ours")
    assert equal_bits(saved_weights(saved.path), {name: each.bfloat16().float() for name, each in tensors.items()})


def test_without_an_optimizer_the_weights_come_alone_and_it_is_said(tmp_path):
    """And that the batch is not the one with which the samples were counted."""
    config = nanotron_config(tmp_path)
    theirs = write_nanotron(tmp_path / "theirs", config, random_state(config)[0])
    edit(CONFIG, "micro_batch_size: 4", "micro_batch_size: 2")(theirs)
    said = []
    saved = from_nanotron(tmp_path / "theirs", tmp_path / "ours", report=said.append)
    assert "begins with a fresh one" in said[-2]
    counted = "8 samples were consumed in 2 steps, and the config's global batch of 2 makes that 4: "
    assert said[-1].startswith(counted)
    assert not (saved.path / "optimizer").exists()


def test_rows_that_pad_the_vocabulary_are_cut(tmp_path):
    config = nanotron_config(tmp_path, vocab_size=60)
    tensors, moments = random_state(config)
    padded = {name: torch.cat([t, torch.ones(4, 16)]) if t.shape[0] == 60 else t for name, t in tensors.items()}
    more = {name: torch.cat([t, torch.ones(4, 16)]) if t.shape[:1] == (60,) else t for name, t in moments.items()}
    config["model"]["make_vocab_size_divisible_by"] = 64
    write_nanotron(tmp_path / "theirs", config, padded, more)
    said = []
    saved = from_nanotron(tmp_path / "theirs", tmp_path / "ours", report=said.append)
    assert equal_bits(saved_weights(saved.path), tensors)
    assert equal_bits(saved_weights(saved.path, "optimizer"), moments)
    assert f"{EMBEDDING} is padded to 64 rows; 60, the vocabulary, are kept" in said[1]


@pytest.mark.parametrize("layout", [{"tp": 2, "pp": 2, "dp": 2, "zero": 1}, pytest.param({}, marks=pytest.mark.slow)])
def test_a_run_that_goes_on_from_nanotrons_files_is_the_run_that_went_on_from_ours(layout, tmp_path):
    settings = ["tokens.train_steps=4", "checkpoints.checkpoint_interval=2"]
    ours = train_quietly(tiny_config(tmp_path / "ours", *settings))
    second = tmp_path / "ours" / "checkpoints" / "2"
    config = tiny_dict(tmp_path / "ours")
    config["tokens"]["train_steps"] = 4
    state = saved_weights(second), saved_weights(second, "optimizer")
    write_nanotron(tmp_path / "theirs", config, *state, dtype=torch.float32, **layout)
    saved = from_nanotron(tmp_path / "theirs", tmp_path / "converted")
    again = load(saved.path / "config.yaml", [f"logging.log_dir={tmp_path / 'logs'}"])
    went_on = train_quietly(again)
    assert equal_bits(weights(went_on), weights(ours))
    assert losses(again) == losses(ours.config)[2:]
    assert went_on.consumed_samples == ours.consumed_samples


def test_no_more_than_two_tensors_are_in_memory_at_once(tmp_path, monkeypatch):
    config = nanotron_config(tmp_path)
    tensors, moments = random_state(config)
    write_nanotron(tmp_path / "theirs", config, tensors, moments, tp=2, dp=2, zero=1)
    alive, most, read = [], [], Merged.rows

    def counted(self, first, last):
        most.append(sum(each() is not None for each in alive))
        found = read(self, first, last)
        alive.append(weakref.ref(found))
        return found

    monkeypatch.setattr(Merged, "rows", counted)
    from_nanotron(tmp_path / "theirs", tmp_path / "ours")
    assert len(most) == 3 * len(tensors)
    assert max(most) <= 1


# ---- what is wrong with the files -----------------------------------------------------------------------------


@pytest.fixture
def theirs(tmp_path):
    """A step's folder on tp 2, ZeRO-1 on dp 2."""
    config = nanotron_config(tmp_path)
    return write_nanotron(tmp_path / "theirs", config, *random_state(config), tp=2, dp=2, zero=1)


LAYER = "model/model/decoder/0/pp_block"
SECOND = "model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"
OPTIMIZER = "optimizer/optimizer_pp-0-of-1_dp-1-of-2_tp-0-of-2_exp-0-of-1.pt"
CONFIG, METADATA = "config.yaml", "checkpoint_metadata.json"


def remove(file):
    return lambda folder: (folder / file).unlink()


def cut(file):
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:-10])


def edit(file, old, new):
    return lambda folder: (folder / file).write_text((folder / file).read_text().replace(old, new))


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (remove(f"{LAYER}/input_layernorm/model_weight.safetensors"), r"has no tensor \S*input_layernorm\.weight"),
        (remove(f"{LAYER}/attn/o_proj/{SECOND}"), "weight of 2 tensor-parallel ranks, found none of rank 1"),
        (remove(METADATA), "is not a checkpoint of nanotron: it has no checkpoint_metadata.json"),
        (edit(CONFIG, "size: 24", "size: 20"), r"gate_up_proj\.weight has shape \[48, 16\], and .* says \[40, 16\]"),
        (edit(CONFIG, "hidden_size", "hiden_size"), r"config\.yaml: .*hiden_size.* did you mean"),
        (edit(METADATA, '"1.5"', '"1.2"'), r"not supported yet: .*version 1\.2 \(supported: 1\.4, 1\.5\)"),
        (cut(f"{LAYER}/mlp/down_proj/{SECOND}"), r"down_proj.*rank-1-of-2\.safetensors is damaged"),
        (cut(OPTIMIZER), r"dp-1-of-2_tp-0-of-2_exp-0-of-1\.pt is damaged"),
        (lambda folder: (folder / LAYER / "x.datastates").touch(), "not supported yet: .*DataStates engine"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it_and_nothing_is_written(break_it, message, theirs, tmp_path):
    break_it(theirs)
    with pytest.raises(InputError, match=message) as error:
        from_nanotron(theirs, tmp_path / "ours")
    assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "ours").exists()


def test_no_file_s_code_is_run(theirs, tmp_path):
    """Every kind of file in turn is a pickle, or YAML with a tag, that calls a function where it is loaded as such."""
    whole = {path: path.read_bytes() for path in (theirs / OPTIMIZER, theirs / CONFIG, theirs / METADATA)}
    whole[theirs / LAYER / "attn" / "o_proj" / SECOND] = (theirs / LAYER / "attn" / "o_proj" / SECOND).read_bytes()
    for path, canary in itertools.product(whole, CANARIES):
        path.write_bytes(CANARIES[canary])
        assert harmless(lambda: from_nanotron(theirs, tmp_path / "ours"), lines=True) is None, (path, canary)
        path.write_bytes(whole[path])
    from_nanotron(theirs, tmp_path / "ours")


def test_moments_of_another_shape_name_both_shapes(theirs, tmp_path):
    for dp in range(2):
        file = theirs / "optimizer" / f"optimizer_pp-0-of-1_dp-{dp}-of-2_tp-1-of-2_exp-0-of-1.pt"
        content = torch.load(file)
        content["state"][0]["exp_avg"] = torch.zeros(7)
        torch.save(content, file)
    with pytest.raises(InputError, match=r"exp_avg of .*token_embedding\.weight has shape \[14\] .* has \[32, 16\]"):
        from_nanotron(theirs, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_folder_with_checkpoints_is_not_written_into(theirs, tmp_path):
    from_nanotron(theirs, tmp_path / "ours")
    with pytest.raises(InputError, match="holds checkpoints already"):
        from_nanotron(theirs, tmp_path / "ours")
