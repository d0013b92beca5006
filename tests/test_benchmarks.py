"""The scripts in benchmarks/ import what there is, and their README lists them."""

import sys
import time
from collections import Counter
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from kenotron.config.loading import load
from support.tiny_run import REPOSITORY, tiny_config

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


@pytest.mark.slow
def test_the_picture_of_zero_has_the_shares_of_its_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """4 bytes a parameter of weights and 8 of moments with AdamW; the ranks of a group have equal shares."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import diagrams

    hidden, between, heads, layers, vocabulary, ranks = 64, 128, 4, 2, 96, 8
    of_layer = 4 * hidden * hidden + 3 * hidden * between + 2 * hidden
    count = layers * of_layer + 2 * vocabulary * hidden + hidden
    sizes = f"hidden_size: {hidden}, intermediate_size: {between}, num_attention_heads: {heads}"
    sizes += f", num_key_value_heads: {heads}, num_hidden_layers: {layers}, vocab_size: {vocabulary}"
    overrides = [f"model.model_config={{{sizes}, tie_word_embeddings: false}}", "model.dtype=bfloat16"]
    for stage, share in {"zero_stage 1": 1 / 8, "hybrid, dp_shard 4": 1 / 4}.items():
        layout = [f"parallelism.dp={ranks}", *diagrams.STAGES[stage]]
        held = diagrams.bytes_of_rank(tiny_config(tmp_path, *overrides, *layout))
        expected = [4 * count * share, 8 * count * share]
        assert [held["weights"], held["optimizer"]] == pytest.approx(expected, rel=0.01), stage


@pytest.mark.budget(10, reason="imports torch's process groups")
def test_the_picture_of_the_mesh_has_the_groups_of_arithmetic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """rank = 8 pp + 4 dp + 2 cp + tp: a group has the ranks that differ in the bits of its axes alone."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import diagrams

    places, groups = diagrams.ranks_and_groups(tiny_config(tmp_path, *diagrams.LAYOUT, "optimizer.zero_stage=1"), 8)
    assert [8 * at["pp"] + 4 * at["dp_shard"] + 2 * at["cp"] + at["tp"] for at in places] == list(range(16))
    bits = {"pp": 8, "dp_shard": 4, "cp": 2, "tp": 1, "batch": 4, "loss": 14, "gradient": 6, "shard": 6, "model": 9}
    assert groups.keys() == {*bits, "world"}
    for name, mask in {**bits, "world": 15}.items():
        alike = ({other for other in range(16) if other & ~mask == rank & ~mask} for rank in range(16))
        assert groups[name] == {tuple(sorted(group)) for group in alike}, name


def test_the_picture_of_a_mixture_has_the_shares_of_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After every step of a stage to within two samples, as docs/data.md says."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import diagrams

    found = iter(diagrams.samples_of_steps(tmp_path))
    for steps, weights in diagrams.MIXTURES.values():
        so_far = Counter[str]()
        for step in range(1, steps + 1):
            so_far += next(found)
            total = step * diagrams.BATCH
            assert so_far.total() == total
            for name, weight in weights.items():
                assert abs(so_far[name] - total * weight / sum(weights.values())) <= 2, (name, step)
    assert next(found, None) is None


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
