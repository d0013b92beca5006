"""The attention functions that a run can choose, against the definition in float64; the branch of a GPU on a CPU."""

import sys
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st

from kenotron.kernels.attention import Borders, attention
from kenotron.kernels.attentions import choice
from kenotron.kernels.attentions.documents import bound_of_documents, document_numbers, document_starts
from kenotron.kernels.attentions.masked import eager, sdpa_with_mask
from support import flash_on_cpu
from support.plain_attention import numbers_of, plain_attention, relative_errors

SEQUENCES, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 24, 4, 2, 16
DOCUMENTS = (0, 5, 24, 40, 41, 48)
SCALE = 0.3  # not that of a head of 16, which a function takes that is given none
H100 = choice.DeviceFacts("nvidia", (9, 0), "bfloat16", 64)


def by_definition(q, k, v, cu_seqlens, window=None, softcap=None):
    """In float64."""
    return plain_attention(*(x.double() for x in (q, k, v)), SCALE, numbers_of(cu_seqlens, SEQUENCES), window, softcap)


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(SEQUENCES, LENGTH, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    *qkv, grad = (torch.randn(shape, dtype=dtype).transpose(1, 2) for shape in shapes)
    return [x.requires_grad_() for x in qkv], grad


def error(function, ctx, **options):
    """The largest relative error of the output and of the three gradients."""
    definition = {"scale": SCALE, "documents": numbers_of(ctx.cu_seqlens, SEQUENCES)} | options
    return max(relative_errors(lambda *qkv: function(*qkv, ctx, 0, SCALE, **options), *inputs(), **definition))


@pytest.fixture
def flash():
    """Torch's flash attention, played on the CPU."""
    calls = flash_on_cpu.install()
    calls.clear()
    return SimpleNamespace(attention=choice.load("flash"), calls=calls)


@pytest.mark.parametrize("cu_seqlens", [None, DOCUMENTS, (0, 10, 30, 48)])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_functions_equal_the_definition(flash, cu_seqlens, window):
    for function in (attention, eager, sdpa_with_mask, flash.attention):
        assert error(function, Borders(cu_seqlens), window=window) < 2e-6, function
    assert flash.calls == [len({*(cu_seqlens or ()), 0, 24, 48}) - 1]  # one launch, whatever the documents
    assert error(eager, Borders(cu_seqlens), window=window, softcap=0.5) < 2e-6


def test_the_package_flash_attn_is_called_by_its_signature(flash, monkeypatch):
    given = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        flash_on_cpu.check(q, k, v, cu_seqlens_q, max_seqlen_q, True)
        given.append((softcap, deterministic))
        return flash_on_cpu.by_definition(q, k, v, cu_seqlens_q, causal, softmax_scale, list(window_size))[0]

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    assert error(choice.load("flash_attn"), Borders(DOCUMENTS), window=6) < 2e-6
    assert error(choice.load("flash_attn"), Borders(DOCUMENTS)) < 2e-6
    (q, k, v), _ = inputs()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)  # general.deterministic
    choice.load("flash_attn")(q, k, v, Borders(DOCUMENTS), 0, SCALE, softcap=30.0)
    assert given == [(0.0, False), (0.0, False), (30.0, True)]


def test_borders_on_the_device_are_those_of_the_documents_cut_at_sequences():
    cpu = torch.device("cpu")
    starts = document_starts(Borders((0, 10, 30, 48)), 2, 24, cpu)
    assert (starts.dtype, starts.tolist()) == (torch.int32, [0, 10, 24, 30, 48])
    assert document_starts(Borders(None), 3, 8, cpu).tolist() == [0, 8, 16, 24]
    given = torch.tensor([0, 4, 8], dtype=torch.int32)
    assert document_starts(Borders((0, 99), given), 1, 8, cpu) is given
    assert document_numbers(given, 2, 4).tolist() == [[1] * 4, [2] * 4]


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("cu_seqlens", [None, DOCUMENTS])
def test_flex_attention_masks_documents_windows_and_caps_scores(cu_seqlens, window, softcap):
    q, k, v = (x.detach() for x in inputs()[0])
    options = {"window": window, "softcap": softcap}
    with torch.no_grad():  # torch has no backward of it on a CPU
        ours = choice.load("flex_attention")(q, k, v, Borders(cu_seqlens), 0, SCALE, **options)
        expected = by_definition(q, k, v, cu_seqlens, **options)
    assert (ours.double() - expected).norm() / expected.norm() < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flash", "flex_attention", "sdpa_with_mask"])
def test_compiled_attention_over_documents_is_one_graph_for_every_batch(flash, name):
    (q, k, v), grad = inputs()
    if name == "flex_attention":
        q, k, v = (x.detach() for x in (q, k, v))
    from torch._dynamo.testing import CompileCounterWithBackend

    function = choice.by_documents(attention, choice.load(name))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager" if name == "flash" else "eager")
    options = {"backend": counter, "fullgraph": True}
    compiled = torch.compile(lambda q, k, v, ctx: function(q, k, v, ctx, 0, SCALE, window=6), **options)
    for documents in range(1, 13):
        cu_seqlens = (0, *sorted({24, *range(3, 3 + 3 * documents, 3)}), 48)
        starts = torch.tensor(cu_seqlens, dtype=torch.int32)
        # Without host integers: compiled code must not look at them.
        out = compiled(q, k, v, SimpleNamespace(cu_seqlens=None, document_starts=starts, longest=LENGTH))
        expected = by_definition(q, k, v, cu_seqlens, window=6)
        assert (out.double() - expected).norm() / expected.norm() < 2e-6
        if out.requires_grad:
            ours, theirs = (torch.autograd.grad(x, q, grad.to(x.dtype))[0] for x in (out, expected))
            assert (ours - theirs).norm() / theirs.norm() < 2e-6
    assert counter.frame_count <= 2  # the first size, then any
    torch._dynamo.reset()


# The rule -----------------------------------------------------------------------------------------


def picked(facts, **changes):
    return choice.choose("auto", facts._replace(**changes))


def test_on_a_cpu_torchs_kernels_by_document():
    cpu = choice.DeviceFacts("cpu")
    assert {picked(cpu), picked(cpu, documents=True), picked(cpu, window=True, dtype="bfloat16")} == {"sdpa"}
    assert picked(cpu, softcap=True) == "eager"
    assert choice.by_documents(attention, choice.load("sdpa")) is attention


def test_on_an_nvidia_gpu_packed_documents_and_windows_are_one_launch():
    assert picked(H100) == "sdpa"
    assert picked(H100, documents=True) == picked(H100, window=True) == "flash"
    assert picked(H100, documents=True, softcap=True) == "flex_attention"
    assert picked(H100, softcap=True, installed=frozenset({"flash_attn"})) == "flash_attn"
    assert picked(H100, documents=True, capability=(7, 5)) == "flex_attention"
    assert picked(H100, documents=True, dtype="float32") == "flex_attention"
    assert picked(H100, documents=True, head_dim=264) == picked(H100, documents=True, head_dim=20) == "flex_attention"
    assert picked(H100, documents=True, dtype="float32", installed=frozenset()) == "sdpa_with_mask"
    assert picked(H100, softcap=True, installed=frozenset()) == "eager"


def test_on_an_amd_gpu_flex_attention():
    mi250 = choice.DeviceFacts("amd", dtype="bfloat16")
    assert (picked(mi250), picked(mi250, documents=True)) == ("sdpa", "flex_attention")


@pytest.mark.parametrize("name", ["sdpa", "eager", "flex_attention", "flash_attention_2"])
@pytest.mark.parametrize("documents", [True, False])
def test_no_choice_on_a_gpu_loops_over_documents(name, documents):
    assert choice.choose(name, H100._replace(documents=documents, window=True)) != "sdpa"


@pytest.mark.parametrize(
    ("name", "facts", "said"),
    [
        ("flash_attention_3", H100, "needs the package flash_attn_interface, which is not installed"),
        ("flash_attention_3", H100._replace(capability=(8, 0)), "needs compute capability 9.x, found 8.0"),
        ("flash_attention_3", choice.DeviceFacts("cpu"), "needs an NVIDIA GPU, found cpu; expected one of auto"),
        ("flash_attention_4", H100._replace(capability=(10, 0)), "needs the package flash_attn.cute"),
        ("flash_attention_4", H100._replace(dtype="float32"), "needs model.dtype bfloat16, found float32"),
        ("flex_attention", choice.DeviceFacts("cpu"), "flex_attention has no backward on a CPU"),
        ("sdpa", H100._replace(softcap=True), "sdpa has no softcap; expected one of auto, flash_attention_2, flex"),
    ],
)
def test_what_is_missing_is_said_in_one_line(name, facts, said):
    with pytest.raises(choice.InputError) as caught:
        choice.choose(name, facts)
    line = str(caught.value)
    assert line.startswith(f"model.model_config._attn_implementation: {name}")
    assert said in line
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize(("name", "version"), [("flash_attention_3", "FA3"), ("flash_attention_4", "FA4")])
def test_flash_attention_3_and_4_take_the_place_of_torchs_own(monkeypatch, flash, name, version):
    from torch.nn import attention as torch_attention

    activated = []
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", activated.append)
    chosen = choice.choose(name, H100._replace(installed=frozenset({"flash_3", "flash_4"})))
    assert choice.load(chosen) is flash.attention
    assert activated == [version]


@pytest.mark.parametrize("lacks", [None, "triton", "gcc and clang", "Python.h"])
def test_flex_is_offered_where_triton_can_compile(lacks, monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    headers = tmp_path / "nothing" if lacks == "Python.h" else tmp_path
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(choice.shutil, "which", lambda name: None if lacks == "gcc and clang" else f"/bin/{name}")
    monkeypatch.setattr(choice.sysconfig, "get_paths", lambda: {"include": str(headers)})
    monkeypatch.setattr(choice, "find_spec", lambda name: None if name != "triton" or lacks == "triton" else "found")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    facts = choice.facts_of(torch.device("cuda"))._replace(documents=True)  # in fp32: no flash attention
    assert choice.choose("auto", facts) == ("flex_attention" if lacks is None else "sdpa_with_mask")
    if lacks is not None:
        with pytest.raises(choice.InputError, match=r"needs triton, gcc or clang, and Python.h; not all"):
            choice.choose("flex_attention", facts)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=20))
def test_the_bound_of_documents_takes_few_values(lengths):
    borders = (0, *accumulate(lengths))
    bound = bound_of_documents(borders, 300)
    assert bound in (37, 74, 148, 296, 300)
    assert max(lengths) <= bound < max(2 * max(lengths), 38)
