"""The scripts in benchmarks/ import what there is, and their README lists them."""

from __future__ import annotations

import sys
from importlib import import_module
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
    try:
        assert hasattr(import_module(script.stem), "main") == (script.name not in MODULES)
    finally:
        for name in set(sys.modules) - before:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(FOLDER)):
                del sys.modules[name]


def test_the_readme_lists_every_script() -> None:
    readme = (FOLDER / "README.md").read_text()
    assert {script.name for script in SCRIPTS if f"`{script.name}`" not in readme} == MODULES
