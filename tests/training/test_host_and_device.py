"""The host waits for the device once a step, and batches reach an accelerator from pinned memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kenotron.config.errors import InputError
from kenotron.kernels import linear_cross_entropy
from kenotron.optim import clip
from kenotron.parallel.device import best_device, upload
from kenotron.parallel.mesh import Mesh
from kenotron.training.step import train_step
from support.host_reads import HostReads
from support.layout_runs import prepared
from support.tiny_run import tiny_config


@pytest.mark.parametrize(
    "overrides",
    [(), ("parallelism.recompute_layer=true",), ("model.model_config.z_loss_enabled=true",)],
)
def test_a_step_reads_from_the_device_once(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_batch_goes_to_an_accelerator_from_pinned_memory_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    plain = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        asked.append(kwargs)
        return plain(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append("pinned") or tensor)
    monkeypatch.setattr(torch.Tensor, "to", to)
    found = upload(np.arange(6, dtype=np.uint16).reshape(2, 3), torch.device("meta"))
    assert asked == ["pinned", {"non_blocking": True}]
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
