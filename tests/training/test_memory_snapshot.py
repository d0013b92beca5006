"""`profiler.memory_snapshot_path`, with stand-ins for what torch records on a GPU (tests/gpu has the real ones)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import kenotron as kn
from kenotron.config import InputError
from kenotron.config.profiler import Profiler
from kenotron.observers.profiler import MemorySnapshot
from support.tiny_run import tiny_config, train_quietly


class OnAGpu(MemorySnapshot):
    """Takes the device for a GPU."""

    def __init__(self, path: str) -> None:
        super().__init__(Profiler(memory_snapshot_path=path))

    def on_train_start(self, run: kn.Run) -> None:
        run.device, device = torch.device("cuda"), run.device
        super().on_train_start(run)
        run.device = device


@pytest.mark.parametrize(("fails_in", "steps", "expected"), [(99, 9, 6), (99, 4, 4), (2, 9, 2)])
def test_a_snapshot_is_written_once(fails_in: int, steps: int, expected: int, tmp_path: Path, monkeypatch: Any) -> None:
    """After the steps of the trace, or at the end."""
    recorded: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: recorded.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).write_bytes(b"snapshot"))
    on_a_gpu = f"{{path: {__name__}.OnAGpu, kwargs: {{path: {tmp_path}/memory}}}}"
    fails = f"{{path: support.user_parts.OnRank, kwargs: {{what: raise, rank: 0, step: {fails_in}}}}}"
    config = tiny_config(tmp_path, f"tokens.train_steps={steps}", f"general.hooks=[{on_a_gpu}, {fails}]")
    with pytest.raises(RuntimeError, match="this hook is broken") if fails_in < steps else nullcontext():
        train_quietly(config)
    assert [file.name for file in (tmp_path / "memory").iterdir()] == [f"tiny-step{expected}-rank0.pickle"]
    assert recorded == [{"max_entries": MemorySnapshot.EVENTS}, {"enabled": None}]


def test_without_a_gpu_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"profiler\.memory_snapshot_path: expected a run on GPUs, found one on cpu"):
        train_quietly(tiny_config(tmp_path, "profiler={memory_snapshot_path: memory}"))
