"""Mamba by the packages mamba_ssm and causal_conv1d: their functions, played on the CPU, give what the plain ones give.

Outputs, states and gradients, across the borders of documents and from a state before; and when they are used.
"""

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kenotron.config.errors import InputError
from kenotron.kernels import mamba_packages
from kenotron.kernels.causal_conv import causal_conv
from kenotron.kernels.fused import use_kernels
from kenotron.kernels.selective_scan import selective_scan
from support import mamba_on_cpu
from support.layout_runs import Seen, expect_the_same, problem_of_family, train_alone, train_on_layout
from support.mamba_cases import CASES, KINDS, SEQUENCES, channel_inputs, everything, largest_error, random
from support.ranks import run_ranks
from support.written_tokens import write_ds

LENGTH = 70


@pytest.mark.parametrize(
    ("length", "dtype", "tolerance"),  # 2: fewer tokens than the convolution reaches back
    [(LENGTH, torch.float32, 2e-5), (2, torch.float32, 2e-5), (LENGTH, torch.bfloat16, 0.01)],
)
@pytest.mark.parametrize(("name", "documents", "goes_on"), CASES)
def test_a_package_gives_what_the_plain_function_gives(name, documents, goes_on, length, dtype, tolerance, monkeypatch):
    expected = everything(name, length, documents, goes_on, dtype)
    calls = mamba_on_cpu.install(monkeypatch)
    found = everything(name, length, documents, goes_on, dtype)
    assert calls == [name]
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in expected]
    assert largest_error(found, expected) < tolerance


def test_what_the_packages_do_not_have_is_computed_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = mamba_on_cpu.install(monkeypatch)
    x, dt, a, b, c, d, first = channel_inputs(LENGTH)
    selective_scan(x, dt, a, b, c, d, torch.zeros(SEQUENCES, LENGTH, dtype=torch.bool))
    selective_scan(x, dt, a, b, c, d, None, first)
    causal_conv(x[..., :6], random(6, 1, 4), None)  # channels not in eights
    causal_conv(x, random(8, 1, 5), None)  # too wide
    assert calls == []


def test_a_gradient_that_the_package_does_not_have_is_asked_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    mamba_on_cpu.install(monkeypatch)
    x, *rest, _ = channel_inputs(LENGTH)
    _, last = selective_scan(x.requires_grad_(), *rest)
    with pytest.raises(RuntimeError, match="has no gradient of the last state: use scan_by_chunks"):
        last.sum().backward()


def train_on_a_gpus_branch(rank: int, *given: Any) -> tuple[Seen, set[str]]:
    """`train_on_layout` with the packages, and which of their functions it called."""
    with pytest.MonkeyPatch.context() as patch:
        calls = mamba_on_cpu.install(patch)
        return train_on_layout(rank, *given), set(calls)


CONV, BOTH, HEADS_TOO = {"causal_conv"}, {"causal_conv", "selective_scan"}, {"causal_conv", "state_space_dual"}
SLOW = [
    *(("mamba", False, 1, "", BOTH), ("mamba", True, 1, "", CONV), ("mamba2", False, 1, "", HEADS_TOO)),
    ("mamba", False, 2, "tp=2 mode=REDUCE_SCATTER", BOTH),
    ("mamba", True, 2, "cp=2 method=state_passing", CONV),
    ("mamba2", True, 2, "cp=2 method=state_passing", HEADS_TOO),
    ("mamba2", False, 4, "cp=4 method=state_passing", HEADS_TOO),
    ("mamba2_in_groups", True, 2, "tp=2 mode=REDUCE_SCATTER", HEADS_TOO),
    ("nemotron_h_of_experts", True, 2, "cp=2 method=ulysses", HEADS_TOO),
]


@pytest.mark.parametrize(
    ("family", "documents", "world_size", "layout", "used"),
    [
        ("mamba2", True, 1, "recompute=true", HEADS_TOO),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_model_trains_the_same_on_a_gpus_branch(family, documents, world_size, layout, used, tmp_path):
    texts = [[(i * 7 + j) % 60 for j in range(1 + i * 11 % 37)] for i in range(150)]
    tokens = write_ds(tmp_path / "tokens" / "0.ds", texts).parent
    data = f"data_stages.0.data.dataset={{tokens: {tokens}, packing: best_fit}}"
    problem = problem_of_family(family, data, f"model.document_masking={str(documents).lower()}")
    problem = replace(problem, steps=3)
    reference = train_alone(problem, tmp_path)
    given = (problem, layout, tmp_path, reference)
    ranks = run_ranks(world_size, train_on_a_gpus_branch, *given)
    expect_the_same([seen for seen, _ in ranks], reference, 5e-6)
    assert [calls for _, calls in ranks] == [used] * world_size


def on_a_gpu(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (2, 5, 8)) -> Any:
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=shape, numel=lambda: 80)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The modules that seem to be installed: at first those of both packages."""
    modules = {module for _, module, _ in mamba_packages.PACKAGES.values()}
    monkeypatch.setattr(mamba_packages, "find_spec", lambda module: module if module in modules else None)
    for name, (_, _, path) in mamba_packages.PACKAGES.items():
        where, _, function = path.rpartition(".")
        module = ModuleType(where)
        setattr(module, function, mamba_on_cpu.KERNELS[name])
        monkeypatch.setitem(sys.modules, where, module)
    monkeypatch.setattr(mamba_packages.logger, "propagate", True)
    mamba_packages._from_package.cache_clear()
    yield modules
    mamba_packages._from_package.cache_clear()


def test_on_a_gpu_the_functions_of_installed_packages_are_found_and_logged_once(installed, caplog):
    caplog.set_level(logging.INFO, "kenotron")
    for name in [*KINDS, *KINDS]:
        kernel = mamba_packages.packaged(name, on_a_gpu())
        assert kernel.args == (mamba_on_cpu.KERNELS[name],)
    assert caplog.messages == [f"Kernel of {name}: {mamba_packages.PACKAGES[name][2]}" for name in KINDS]


def test_where_torch_computes(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = "selective_scan"
    assert mamba_packages.packaged(name, torch.ones(2, 5, 8)) is None
    assert mamba_packages.packaged(name, on_a_gpu(torch.float64)) is None
    assert mamba_packages.packaged(name, on_a_gpu(shape=(2, 1, 8))) is None
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert mamba_packages.packaged(name, on_a_gpu()) is None
    for chosen, used in (("torch", False), ("triton", True)):
        with use_kernels(chosen):
            assert (mamba_packages.packaged(name, on_a_gpu()) is not None) == used


def test_what_is_missing_or_broken_is_logged(installed, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "kenotron")
    installed.remove("selective_scan_cuda")  # mamba_ssm builds it only where MAMBA_KEEP_CUDA_BUILD=TRUE asks for it
    assert mamba_packages.packaged("selective_scan", on_a_gpu()) is None
    said = "Kernel of selective_scan: torch; selective_scan_cuda is not installed (pip install 'kenotron[mamba]')"
    assert caplog.messages == [said]
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    with pytest.raises(InputError, match=r"model.kernels: torch does without causal_conv1d: cannot import"):
        mamba_packages.packaged("causal_conv", on_a_gpu())
