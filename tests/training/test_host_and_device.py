"""The host waits for the device once a step; batches go to an accelerator from pinned memory, beside queued work."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kenotron.config.errors import InputError
from kenotron.kernels import linear_cross_entropy
from kenotron.launch.environment import accelerators
from kenotron.optim import clip
from kenotron.parallel.device import best_device, upload
from kenotron.parallel.mesh import Mesh
from kenotron.training.step import train_step
from support.host_reads import HostReads
from support.layout_runs import prepared
from support.tiny_run import tiny_config


@pytest.mark.parametrize(
    "overrides", [(), ("parallelism.recompute_layer=true",), ("model.model_config.z_loss_enabled=true",)]
)
def test_a_step_reads_from_the_device_once(overrides: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    """Counted on a CPU, with the two shortcuts off that are taken only where a read is free."""
    for module in (clip, linear_cross_entropy):
        monkeypatch.setattr(module, "reads_are_free", lambda x: False)
    with prepared(tiny_config(tmp_path, *overrides), Mesh()) as run:
        train_step(run, run.data.batch(1))  # the first step makes the optimizer's state
        run.step = 1
        batches = run.data.batch(2)
        with HostReads() as reads:
            result = train_step(run, batches)
    assert reads.count == 1
    assert not result.skipped


class Accelerator:
    """What `upload` asks of `torch.cuda`; `asked`: what was asked, in order, with the stream in which it happens."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.now = "work"

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(name="copies")

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(name=self.now, wait_stream=lambda other: self.ask("waits for", other.name))

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before

    def ask(self, *what: str) -> None:
        self.asked.append((self.now, *what))


def test_a_batch_goes_to_an_accelerator_from_pinned_memory_beside_queued_work(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator()
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        accelerator.ask("copies", str(non_blocking))
        return plain(tensor, device)

    def record(tensor: torch.Tensor, stream: Any) -> None:
        accelerator.ask("keeps its memory for", stream.name)

    monkeypatch.setattr(torch, "get_device_module", lambda device: accelerator)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: accelerator.ask("pins") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    found = upload(np.arange(6, dtype=np.uint16).reshape(2, 3), torch.device("meta"))
    assert accelerator.asked == [
        ("copies", "pins"),
        ("copies", "copies", "True"),
        ("work", "waits for", "copies"),
        ("work", "keeps its memory for", "work"),
    ]
    assert (found.shape, found.dtype, found.device.type) == ((2, 3), torch.int64, "meta")


def test_on_a_cpu_a_batch_is_the_arrays_own_memory() -> None:
    array = np.arange(6)
    assert upload(array, torch.device("cpu")).data_ptr() == array.ctypes.data


def test_an_intel_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda number: "Intel Data Center GPU Max 1550")
    monkeypatch.delenv("KENOTRON_DEVICE", raising=False)
    with pytest.raises(InputError, match=r"Max 1550: Intel GPUs \(XPU\) are not supported; .*KENOTRON_DEVICE=cpu"):
        best_device()
    monkeypatch.setenv("KENOTRON_DEVICE", "cpu")
    assert best_device() == torch.device("cpu")


def test_another_device_than_the_cpu_is_not_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KENOTRON_DEVICE", "cuda")
    for used in (best_device, accelerators):
        with pytest.raises(InputError, match=r"^KENOTRON_DEVICE: expected cpu, or unset .*, found 'cuda'$"):
            used()
