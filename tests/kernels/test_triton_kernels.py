"""The kernels in Triton without a GPU: numbers in the interpreter, compiled ahead of time, and when they are used."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from kenotron.config.errors import InputError
from kenotron.kernels.fused import _measured, fused, use_kernels
from support.tiny_run import REPOSITORY

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton: pip install 'kenotron[triton]'")


def run(*arguments, **environment):
    paths = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    options = {"capture_output": True, "text": True, "env": environment, "timeout": 500, "check": False}
    done = subprocess.run([sys.executable, *arguments], **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter_they_equal_their_formulas_and_their_plain_twins():
    found = json.loads(run("-m", "support.triton_numbers", TRITON_INTERPRET="1"))
    assert len(found) == 17  # the last two are whole models, with their gradients
    assert {name: errors for name, errors in found.items() if max(errors) > 2e-6} == {}


@needs_triton
@pytest.mark.slow
def test_they_compile_for_every_gpu_that_is_supported(tmp_path):
    lines = run("-m", "support.triton_compile", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    compiled = {tuple(line.split()[:2]) for line in lines}
    kernels = ("rms_norm.forward_kernel", "rms_norm.backward_kernel", "rope.kernel")
    kernels += ("swiglu.forward_kernel", "swiglu.backward_kernel", "cross_entropy.kernel")
    kernels += ("experts.forward_kernel", "experts.backward_kernel", "experts.sum_kernel")
    targets = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942")
    assert compiled == {(kernel, target) for kernel in kernels for target in targets}
    assert len(lines) == 70  # rope twice: by halves, interleaved; RMSNorm with rows of three widths


def on_a_gpu(dtype=torch.bfloat16, count=8):
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, numel=lambda: count)


def test_they_compute_on_nvidias_gpus_and_where_they_are_asked_for(monkeypatch):
    module = SimpleNamespace(apply_rope="the kernel", __name__="rope")
    monkeypatch.setitem(sys.modules, "kenotron.kernels.triton.rope", module)
    monkeypatch.setitem(sys.modules, "kenotron.kernels.triton", SimpleNamespace(__path__=[]))
    for triton, hip, expected in (("there", None, "the kernel"), (None, None, None), ("there", "7.0", None)):
        monkeypatch.setattr("kenotron.kernels.fused.find_spec", lambda name, found=triton: found)
        monkeypatch.setattr("torch.version.hip", hip)
        _measured.cache_clear()
        assert fused("rope.apply_rope", on_a_gpu()) == expected
    _measured.cache_clear()
    assert fused("rope.apply_rope", torch.ones(3)) is None
    with use_kernels("torch"):
        assert fused("rope.apply_rope", on_a_gpu()) is None
    with use_kernels("triton"):
        assert fused("rope.apply_rope", on_a_gpu()) == "the kernel"
        assert fused("rope.apply_rope", on_a_gpu(torch.float64)) is None
        assert fused("rope.apply_rope", on_a_gpu(count=0)) is None
        assert fused("rope.apply_rope", torch.ones(3)) is None


def test_a_missing_triton_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "kenotron.kernels.triton.swiglu", raising=False)
    with use_kernels("triton"), pytest.raises(InputError, match=r"model.kernels: triton: cannot import .*triton"):
        fused("swiglu.silu_and_multiply", on_a_gpu())
