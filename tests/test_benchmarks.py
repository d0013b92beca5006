"""The scripts in benchmarks/ import what there is, and their README lists them."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

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


@pytest.mark.budget(15, reason="imports torch's pipelining")
@pytest.mark.parametrize("engine", ["afab", "1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_the_picture_of_a_schedule_waits_as_long_as_the_docs_say(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the formula of the papers, and by torch's order of work with every piece as early as it can be."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import pictures
    from kenotron.parallel.pipeline import SCHEDULES
    from kenotron.parallel.pipeline_layout import bubble

    parts = 1 if engine in ("afab", "1f1b") else 2
    spans = pictures.order_of(SCHEDULES[engine])
    end = max(start + length for _, start, length, *_ in spans)
    waiting = 1 - 3 * pictures.MICRO_BATCHES / end
    assert waiting == pytest.approx(bubble(engine, pictures.RANKS, pictures.MICRO_BATCHES, parts))
