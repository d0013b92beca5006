"""Where bfloat16 is fast: by what the processor says, and a run that picks the slower one hears of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.kernels.bfloat16 import bfloat16_is_fast
from kenotron.optim.muon import matmul_dtype
from support.tiny_run import tiny_config, train_and_listen

AMX = {"amx_bf16": True, "avx512_bf16": True, "cpu_name": "Intel Xeon"}
MASKED = AMX | {"amx_bf16": False}
EPYC = {"amx_bf16": False, "avx512_bf16": True, "cpu_name": "AMD EPYC"}


@pytest.mark.parametrize(
    ("capabilities", "fast"),
    [(AMX, True), (MASKED, False), (EPYC, True), (EPYC | {"avx512_bf16": False}, False), ({}, False)],
)
def test_it_is_fast_with_amx_and_on_amd_with_the_instruction(
    capabilities: dict[str, Any], fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    device = torch.device("cpu")
    assert bfloat16_is_fast(device) is fast
    assert matmul_dtype(device) == (torch.bfloat16 if fast else torch.float32)
    assert bfloat16_is_fast(torch.device("cuda"))


def test_a_run_in_the_slower_dtype_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = (
        "warning: model.dtype bfloat16: this CPU multiplies float32 faster, and model.dtype=float32 trains faster here"
    )
    for dtype, capabilities, times in (("bfloat16", MASKED, 1), ("bfloat16", AMX, 0), ("float32", MASKED, 0)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found, raising=False)
        folder = tmp_path / f"{dtype}-{times}"
        _, said = train_and_listen(tiny_config(folder, f"model.dtype={dtype}", "tokens.train_steps=1"))
        assert said.splitlines().count(line) == times
