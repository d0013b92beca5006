"""The scripts in benchmarks/ import what there is, their README lists them, and the weights of peers are ours."""

import sys
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.config.loading import load
from kenotron.kernels.rope import apply_rope
from support.tiny_run import REPOSITORY

FOLDER = REPOSITORY / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))
MODULES = {"process_memory.py", "slow_disk.py"}  # which scripts import
NEEDED = {"draw.py": "matplotlib", "litdata_reading.py": "litdata"}


@pytest.mark.budget(10, reason="imports torch, and transformers' models")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_a_script_imports_exists(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if script.name in NEEDED:
        pytest.importorskip(NEEDED[script.name])
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    spec = spec_from_file_location(f"benchmark_{script.stem}", script)  # a folder of tests is called `kernels`, too
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    try:
        spec.loader.exec_module(module)
        assert hasattr(module, "main") == (script.name not in MODULES)
    finally:
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(FOLDER)):
                del sys.modules[name]


def test_the_readme_lists_every_script() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert {script.name for script in SCRIPTS if f"`{script.name}`" not in readme} == MODULES


@pytest.mark.budget(10, reason="imports torch's pipelining")
@pytest.mark.parametrize("engine", ["afab", "1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_the_picture_of_a_schedule_waits_as_long_as_the_docs_say(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formula of the papers, and by torch's order of work with every piece as early as it can be."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import diagrams
    from kenotron.parallel.pipeline import SCHEDULES
    from kenotron.parallel.pipeline_layout import bubble

    parts = 1 if engine in ("afab", "1f1b") else 2
    spans = diagrams.order_of(SCHEDULES[engine])
    end = max(start + length for _, start, length, *_ in spans)
    waiting = 1 - 3 * diagrams.MICRO_BATCHES / end
    assert waiting == pytest.approx(bubble(engine, diagrams.RANKS, diagrams.MICRO_BATCHES, parts))


@pytest.mark.budget(10, reason="trains, and starts the process that writes checkpoints")
def test_the_picture_of_a_lazy_checkpoint_has_the_times_of_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Copies are between the call and the fence, and the manifest is written between the last tensor and the rename."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import diagrams

    small = "hidden_size: 64, intermediate_size: 128, num_attention_heads: 2, num_hidden_layers: 1, vocab_size: 512"
    overrides = [f"model.model_config={{family: llama, {small}}}", "tokens.sequence_length=32"]
    spans, size = diagrams.times_of_run(tmp_path, [*overrides, "tokens.micro_batch_size=1"], disk=1e7)
    found = diagrams.second_save(spans)
    checkpoint = tmp_path / "checkpoints" / str(2 * diagrams.EVERY)
    assert size == pytest.approx(sum(file.stat().st_size for file in checkpoint.rglob("*")), rel=0.1)
    call, published, logged = found["save"][0], found["published"][0].end, found["logged"][0].end
    assert len(found["forward"]) == len(found["backward"]) == len(found["update"]) == diagrams.EVERY
    fence = next(span for span in found["fence"] if span.start > found["backward"][0].end)
    assert 0 == call.start < found["copy"][0].start
    assert max(span.end for span in found["copy"]) <= fence.end < found["update"][0].end
    second = sorted(span.start for span in spans if span.what == "save")[1]
    clocks = time.time() - time.monotonic()
    manifest = (checkpoint / "manifest.json").stat().st_mtime - clocks - second
    assert found["write"][-1].end < manifest + 0.02  # a file's time is that of the kernel's last tick
    assert manifest < published + 0.02
    assert published < logged


@pytest.mark.parametrize("file", sorted((FOLDER / "leaderboard").glob("*.yaml")), ids=lambda file: file.stem)
def test_an_entry_of_the_leaderboard_is_a_valid_run_on_its_texts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import leaderboard

    leaderboard.check(file)
    assert load(file).general.run == file.stem


def test_a_run_that_validates_on_other_text_cannot_enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import leaderboard

    text = (REPOSITORY / "examples" / "quickstart.yaml").read_text(encoding="utf-8")
    file = tmp_path / "entry.yaml"
    file.write_text(text.replace("val_fraction: 0.05", "val_fraction: 0.01"), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"entry.yaml: tokens.val_fraction: expected 0.05, found 0.01"):
        leaderboard.check(file)


# ---- peers that are imported from a checkout ----

PEERS = ("checkout", "work", "worker", "picotron_step", "lingua_step")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the folder, by name."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "peers"))
    before = set(sys.modules)
    yield {name: __import__(name) for name in PEERS}
    for name in set(PEERS) - before:
        sys.modules.pop(name, None)


def test_every_weight_has_a_name_of_its_own_there(peers: Any) -> None:
    names = peers["work"].SIZES["17M"].shapes()
    for module in ("picotron_step", "lingua_step"):
        theirs = {peers[module].renamed(name) for name in names}
        assert len(theirs) == len(names)
        assert not any("self_attn" in name or "model." in name for name in theirs)
    assert peers["lingua_step"].renamed("model.layers.3.self_attn.q_proj.weight") == "layers.3.attention.wq.weight"
    assert peers["picotron_step"].renamed("model.layers.3.self_attn.o_proj.weight") == (
        "decoder_layers.3.attention.out_proj.weight"
    )


def test_queries_of_pairs_side_by_side_are_those_of_halves_in_another_order(peers: Any) -> None:
    """The scores of queries and keys, rotated as each library rotates them, are the same."""
    heads, head_dim, tokens = 2, 8, 5
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 12, generator=draw)
    q, k = (torch.randn(heads * head_dim, 12, generator=draw) for _ in range(2))
    angles = torch.rand(1, tokens, head_dim // 2, generator=draw)

    def scores(q: torch.Tensor, k: torch.Tensor, interleaved: bool) -> torch.Tensor:
        rows = ((x @ weight.T).view(1, tokens, heads, head_dim) for weight in (q, k))
        turned = [apply_rope(each, angles.cos(), angles.sin(), interleaved)[0].transpose(0, 1) for each in rows]
        return turned[0] @ turned[1].transpose(1, 2)

    q_there, k_there = (peers["lingua_step"].pairs_side_by_side("q_proj", weight, heads) for weight in (q, k))
    assert torch.allclose(scores(q, k, False), scores(q_there, k_there, True), atol=1e-5)
    assert torch.equal(peers["lingua_step"].pairs_side_by_side("v_proj", q, heads), q)
