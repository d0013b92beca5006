"""The first minutes on a GPU: is what it computes right, and which of torch's kernels does it get?

    python benchmarks/gpu/first_contact.py                      all checks; Kénotron need not be installed
    python benchmarks/gpu/first_contact.py upload engines       these
    python benchmarks/gpu/first_contact.py --cpu                all of them on a CPU, tiny: whether the checks work

    upload       0 wrong numbers of 200 uploads beside matrix products
    host_waits   llama-3.2-1b: none but that for the step's numbers

A check is a function that yields its lines. Where it knows the right answer, a line with another one begins with FAIL;
the rest are measurements. An error is such a line, too, and the other checks go on. All lines come again at the end.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src"), str(HERE.parents[1] / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from cases import Case  # noqa: E402
from torch import Tensor  # noqa: E402

from kenotron.kernels.fused import use_kernels  # noqa: E402
from kenotron.parallel.device import synchronize  # noqa: E402

if TYPE_CHECKING:
    from kenotron.data import TokenBatch
    from kenotron.training import Run

GIB = 2**30


def main() -> None:
    arguments = parse()
    os.environ["KENOTRON_DEVICE"] = "cpu" if arguments.cpu else ""
    if not arguments.cpu and not torch.cuda.is_available():
        sys.exit("torch finds no GPU; expected one, or --cpu, which tests these checks on a CPU")
    from kenotron.launch import set_defaults

    set_defaults()  # of the allocator, as a run does
    device = torch.device("cpu") if arguments.cpu else torch.device("cuda", 0)
    lines = [line for name in arguments.checks or CHECKS for line in run_check(name, device)]
    print("\n" + "\n".join(lines))
    failed = sum("FAIL" in line for line in lines)
    sys.exit(f"{failed} of {len(lines)} lines say FAIL" if failed else 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"default: {' '.join(CHECKS)}")
    parser.add_argument("--cpu", action="store_true", help="on a CPU, with tiny shapes")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.checks if name not in CHECKS]:
        parser.error(f"no check is called {' or '.join(unknown)}; expected some of {' '.join(CHECKS)}")
    return arguments


def run_check(name: str, device: torch.device) -> list[str]:
    """The lines of one check, which are printed as they come, and what it took. Errors do not leave it."""
    lines: list[str] = []

    def show(text: str) -> None:
        lines.append(f"{name:14} {text}")
        print(lines[-1], flush=True)

    started = time.perf_counter()
    try:
        for text in CHECKS[name](device):
            show(text)
    except Exception as error:
        show(f"FAIL {type(error).__name__}: {str(error)[:300]}")
        traceback.print_exc()
    print(f"{'':14} … {time.perf_counter() - started:.1f} s", flush=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return lines


def judged(right: bool, text: str) -> str:
    return text if right else f"FAIL {text}"


def milliseconds(step: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """The median of `repeats` runs after three, with a wait for the device after each."""
    for _ in range(3):
        step()
    taken = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        taken.append(time.perf_counter() - started)
    return 1e3 * float(np.median(taken))


def kernels(step: Callable[[], Any], device: torch.device) -> Counter[str]:
    """How often a run of `step` launches each kernel, by the beginnings of their names, in order."""
    step()
    synchronize(device)
    with torch.profiler.profile() as profile:
        step()
        synchronize(device)
    on_device = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    return Counter(each.name[:70] for each in on_device if not each.name.startswith("Mem"))


def small_run(device: torch.device, shape: str, *overrides: str, documents: bool = False) -> tuple[Run, TokenBatch]:
    """A run of one of the benchmark's shapes on sequences of 4,096 tokens, and a micro-batch for it."""
    from kenotron.parallel.mesh import Mesh
    from kenotron.training.build import build_run

    on_cpu = device.type == "cpu"
    case = Case(shape, 64 if on_cpu else 4096, documents, miniature=on_cpu)
    with tempfile.TemporaryDirectory(prefix="first-contact-") as folder:  # nothing is written while it is used
        config = case.config(Path(folder), *overrides)
        return build_run(config, Mesh(), device), case.batch(config.model.decoder.vocab_size)


def train(run: Run, batch: TokenBatch, steps: int) -> None:
    from kenotron.training.step import train_step

    for _ in range(steps):
        train_step(run, [batch])
        run.step += 1


def facts(device: torch.device) -> Iterator[str]:
    """Versions, memory, what compilers need of the machine, and whether the allocator's segments grow."""
    gpu = "CPU"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        gpu = f"{torch.cuda.get_device_name()}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    cudnn = torch.backends.cudnn.version()
    yield f"Python {platform.python_version()}, torch {torch.__version__}, cuDNN {cudnn}, {gpu}"
    header = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    yield f"Python.h: {header}; cores: {os.cpu_count()}; allocator: {os.environ.get('PYTORCH_ALLOC_CONF')}"
    if device.type == "cuda":
        held = torch.empty(2**28, device=device)
        yield f"expandable segments: {[each.get('is_expandable') for each in torch.cuda.memory_snapshot()][:3]}"
        del held


def upload(device: torch.device) -> Iterator[str]:
    """Arrays that are dropped at once arrive whole, while the device is busy and their memory is used again."""
    from kenotron.parallel import device as devices

    size = 64 if device.type == "cpu" else 4096
    busy, wrong = torch.randn(size, size, device=device), 0
    for number in range(200):
        for _ in range(4):
            busy = busy @ busy * 1e-3
        there = devices.upload(np.full(4096 + number, number), device)
        result = there + 1
        del there
        if number % 10 == 0:
            torch.full((4096,), -1, device=device)
            wrong += int((result != number + 1).sum())
    yield judged(wrong == 0, f"{wrong} wrong numbers of 200 uploads beside matrix products")


def initial_bits(device: torch.device) -> Iterator[str]:
    """Initial weights are the CPU's."""
    from kenotron.kernels.random import fill_normal_
    from kenotron.kernels.tensor_shard import TensorShard

    here, there = (torch.empty(1_000_003, device=each) for each in (torch.device("cpu"), device))
    for tensor in (here, there):
        fill_normal_(TensorShard.full(tensor), 42)
    equal = torch.equal(here, there.cpu())
    yield judged(equal, f"equal to the CPU's: {equal}")


def products(device: torch.device) -> Iterator[str]:
    """Speed of the matrix products of 1B and 8B; of the head with as many tokens as a chunk has, and a round number."""
    shapes = [(8192, 2048, 2048), (8192, 2048, 8192), (8192, 8192, 2048), (8192, 4096, 14336)]
    shapes += [(2092, 2048, 128256), (2048, 2048, 128256)]
    for m, k, n in shapes if device.type == "cuda" else [(64, 64, 64)]:
        x, w, y = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n)))
        parts = {"y": partial(torch.mm, x, w.t()), "dx": partial(torch.mm, y, w), "dw": partial(torch.mm, y.t(), x)}
        speeds = {name: 2e-9 * m * k * n / milliseconds(part, device) for name, part in parts.items()}
        yield f"{m}x{k}x{n}: {', '.join(f'{name} {speed:.0f}' for name, speed in speeds.items())} TFLOP/s"


def attention(device: torch.device) -> Iterator[str]:
    """Forward and backward of whole sequences, and which kernel computes them."""
    from kenotron.kernels.attention import attention as sdpa

    heads, kv_heads, length = (32, 8, 4096) if device.type == "cuda" else (4, 2, 64)
    for head_dim in (64, 128) if device.type == "cuda" else (16,):
        shapes = [(2, each, length, head_dim) for each in (heads, kv_heads, kv_heads)]
        inputs = [torch.randn(each, device=device, dtype=torch.bfloat16, requires_grad=True) for each in shapes]
        step = attention_step(sdpa, inputs)
        taken = milliseconds(step, device)
        flops = 3.5 * 2 * 2 * 2 * heads * length * length * head_dim / 2  # half a square; backward is 2.5 forwards
        names = ", ".join(list(kernels(step, device))[:3])
        yield f"head_dim {head_dim}, whole: {taken:.2f} ms, {flops / taken / 1e9:.0f} TFLOP/s; {names or 'no kernels'}"
        if device.type == "cuda":
            for line in other_attention(inputs, device):
                yield f"head_dim {head_dim}, {line}"


def other_attention(inputs: list[Tensor], device: torch.device) -> Iterator[str]:
    """The same by FlashAttention 2, and packed documents with both bounds for the longest. On NVIDIA GPUs."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    from kenotron.kernels.attention import attention as sdpa
    from kenotron.kernels.attentions.packed import ASKS_FOR_GROUPS, torch_flash

    sequences, _, length, _ = inputs[0].shape
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield f"whole, by FlashAttention 2: {milliseconds(attention_step(sdpa, inputs), device):.2f} ms"
    yield f"whole, by varlen: {milliseconds(attention_step(torch_flash, inputs), device):.2f} ms"
    end = sequences * length
    inner = np.random.default_rng(0).integers(1, end, 40).tolist()
    borders = tuple(sorted({0, *range(length, end, length), *inner, end}))
    taken = milliseconds(attention_step(torch_flash, inputs, borders), device)
    yield f"{len(borders) - 1} documents, bound {length}: {taken:.2f} ms"
    starts = torch.tensor(borders, dtype=torch.int32, device=device)
    longest = int(np.diff(borders).max())
    flat = [each.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for each in inputs]
    grouped: dict[str, Any] = {"enable_gqa": True} if ASKS_FOR_GROUPS else {}

    def bounded() -> None:
        out = varlen_attn(*flat, starts, starts, longest, longest, window_size=(-1, 0), **grouped)
        out.backward(torch.ones_like(out))

    yield f"{len(borders) - 1} documents, bound {longest}: {milliseconds(bounded, device):.2f} ms"


def attention_step(
    function: Callable[..., Tensor], inputs: list[Tensor], borders: tuple[int, ...] | None = None
) -> Callable[[], None]:
    """Forward and backward of an attention function, as a step to be timed."""
    from kenotron.kernels.attention import Borders

    gradient = torch.randn_like(inputs[0])
    return lambda: function(*inputs, Borders(borders)).backward(gradient)


def decoding(device: torch.device) -> Iterator[str]:
    """A token's attention as the keys get longer: cuDNN makes a plan for each length."""
    q = torch.randn(4, 8, 4, 64, device=device, dtype=torch.bfloat16)
    keys, values = torch.randn(2, 4, 8, 600, 64, device=device, dtype=torch.bfloat16)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        for cudnn in (True, False):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            synchronize(device)
            started = time.perf_counter()
            for length in range(300, 364):
                F.scaled_dot_product_attention(q, keys[:, :, :length], values[:, :, :length])
            synchronize(device)
            taken = 1e3 * (time.perf_counter() - started) / 64
            yield f"{'with' if cudnn else 'without'} cuDNN: {taken:.2f} ms for each new length of keys"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def loss(device: torch.device) -> Iterator[str]:
    """The loss of 1B's head by torch's operators and by our kernel, and two ways to its weight's gradient."""
    from kenotron.kernels.linear_cross_entropy import linear_cross_entropy

    on_gpu = device.type == "cuda"
    tokens, width, vocabulary = (8192, 2048, 128256) if on_gpu else (64, 32, 500)
    hidden = torch.randn(tokens, width, device=device).to(torch.bfloat16)
    weight = torch.randn(vocabulary, width, device=device).mul_(0.02).to(torch.bfloat16)
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    labels[::7] = -100
    logits = hidden[:64].float() @ weight.float().t()
    exact = float(F.cross_entropy(logits, labels[:64], reduction="sum"))
    a, b = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

    def step() -> None:
        linear_cross_entropy(a, b, labels, scale=1e-4)[0].backward()

    for kind in ("torch", "triton") if on_gpu else ("torch",):
        with use_kernels(kind):
            off = abs(float(linear_cross_entropy(hidden[:64], weight, labels[:64], scale=1.0)[0]) / exact - 1)
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated() if on_gpu else 0
            taken = milliseconds(step, device, 5)
            more = torch.cuda.max_memory_allocated() - held if on_gpu else 0
        yield judged(off < 1e-3, f"{kind}: {taken:.1f} ms, off by {off:.1e}, {more / GIB:.1f} GiB more")
    if on_gpu:
        gradient, total = (
            torch.randn(2048, vocabulary, device=device).to(torch.bfloat16),
            torch.zeros_like(weight).float(),
        )
        x = hidden[:2048]
        added = milliseconds(lambda: total.add_(gradient.t() @ x), device)
        fused = milliseconds(lambda: torch.addmm(total, gradient.t(), x, out_dtype=torch.float32), device)
        yield f"dw of 2048 tokens: bf16 product added in fp32 {added:.2f} ms, addmm with an fp32 result {fused:.2f} ms"


def linears(device: torch.device) -> Iterator[str]:
    """q, k and v of 1B forward and backward, by autograd's sums and casts and with sums inside products."""
    from kenotron.kernels.products import ALONE, Linears

    tokens, widths = (8192, (2048, 512, 512, 2048)) if device.type == "cuda" else (64, (32, 8, 8, 32))
    x = torch.randn(tokens, widths[-1], device=device, dtype=torch.bfloat16).requires_grad_()
    weights = [torch.randn(width, widths[-1], device=device).mul_(0.02).requires_grad_() for width in widths[:3]]
    upstream = [torch.randn(tokens, width, device=device, dtype=torch.bfloat16) for width in widths[:3]]
    ways = {
        "by autograd": lambda: [F.linear(x, weight.to(x.dtype)) for weight in weights],
        "inside products": lambda: Linears.apply(x, ALONE, *weights, *[None] * 3),
    }
    exact = [dy.double().t() @ x.detach().double() for dy in upstream]

    def step(forward: Callable[[], Any]) -> tuple[Any, ...]:
        return torch.autograd.grad(forward(), (*weights, x), upstream)

    for name, forward in ways.items():
        found = step(forward)
        off = max(float((one - other).norm() / other.norm()) for one, other in zip(found, exact))
        taken = milliseconds(partial(step, forward), device)
        yield judged(off < 5e-3, f"{name}: {taken:.2f} ms, gradients of weights off by {off:.1e}")


def grouped(device: torch.device) -> Iterator[str]:
    """Products of experts, some without tokens: against each expert's own product in fp32."""
    sizes = [0, 5, 300, 0, 1, 206]
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    shapes = ((512, 256), (6, 128, 256), (512, 128))
    x, w, y = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    out, dw = F.grouped_mm(x, w.transpose(1, 2), offs=ends), F.grouped_mm(y.t(), x, offs=ends)
    tokens = list(zip(x.float().split(sizes), y.float().split(sizes), w.float()))
    exact = (torch.cat([rows @ expert.t() for rows, _, expert in tokens]), [up.t() @ rows for rows, up, _ in tokens])
    off = float((out - exact[0]).abs().max()), float((dw - torch.stack(exact[1])).abs().max())
    yield judged(max(off) < 1, f"outputs off by {off[0]:.2f}, gradients by {off[1]:.2f} (expected in bf16: below 1)")


def host_waits(device: torch.device) -> Iterator[str]:
    """In which lines the host waits for the device in a step, beside the one wait for an event in `Numbers.read`."""
    for shape, documents in (("llama-3.2-1b", True), ("mixtral, 0.9e9 active", False)):
        run, batch = small_run(device, shape, "model.model_config.num_hidden_layers=2", documents=documents)
        train(run, batch, 2)
        if device.type == "cpu":
            yield f"{shape}: a CPU is not waited for"
            continue
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                train(run, batch, 1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [each for each in caught if "synchroniz" in str(each.message)]
        sites = dict(Counter(f"{Path(each.filename).name}:{each.lineno}" for each in waits))
        yield judged(not waits, f"{shape}: {sites or 'none'} but that for the step's numbers")
        del run
        torch.cuda.empty_cache()


def compiled(device: torch.device) -> Iterator[str]:
    """Twelve layers share their compiled code, whole; on a CPU documents are left to Python, so it breaks there."""
    from torch._dynamo.utils import counters

    for documents in (False, True):
        torch._dynamo.reset()
        counters.clear()
        overrides = ("model.model_config.num_hidden_layers=12", "model.compile=true")
        run, batch = small_run(device, "llama-3.2-1b", *overrides, documents=documents)
        started = time.perf_counter()
        train(run, batch, 3)
        graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
        right = (breaks == 0 and graphs <= 2) or (documents and device.type == "cpu")
        found = f"{graphs} graphs (expected: 1 or 2), {breaks} breaks (0), {time.perf_counter() - started:.0f} s"
        yield judged(right, f"{'packed' if documents else 'whole'}: {found}")
        del run


def engines(device: torch.device) -> Iterator[str]:
    """Every checkpoint engine saves the same bits of a run that goes on meanwhile."""
    saved: dict[str, list[dict[str, Tensor]]] = {}
    overrides = ("checkpoints.checkpoint_interval=2", "tokens.train_steps=6", "model.dtype=bfloat16")
    with tempfile.TemporaryDirectory(prefix="first-contact-") as folder, patch.dict(os.environ):
        from support.device_runs import train_on  # which sets KENOTRON_DEVICE
        from support.tiny_run import equal_bits, saved_weights

        for engine in ("torch", "async", "datastates"):
            config = train_on(device, Path(folder, engine), f"checkpoints.checkpointing_engine={engine}", *overrides)
            folders = [config.checkpoint_folder / str(step) for step in (2, 4, 6)]
            saved[engine] = [saved_weights(each, part) for each in folders for part in ("model", "optimizer")]
    for engine in ("async", "datastates"):
        equal = all(map(equal_bits, saved["torch"], saved[engine]))
        yield judged(equal, f"{engine}: the bits that torch saves: {equal}")


def optimizer(device: torch.device) -> Iterator[str]:
    """How fast fused AdamW and the gradient norm move memory."""
    count = 300_000_000 if device.type == "cuda" else 10_000
    parameter = torch.nn.Parameter(torch.randn(count, device=device))
    parameter.grad = gradient = torch.randn_like(parameter)
    adamw = torch.optim.AdamW([parameter], fused=True)
    norm = partial(torch._foreach_norm, [gradient], 2.0, dtype=torch.float32)
    for name, size, step in (("fused AdamW", 28, adamw.step), ("norm", 4, norm)):
        yield f"{name}: {size * count / milliseconds(step, device, 5) / 1e9:.2f} TB/s"


CHECKS: dict[str, Callable[[torch.device], Iterator[str]]] = {
    check.__name__: check
    for check in (
        *(facts, upload, initial_bits, products, linears, attention, decoding, loss, grouped),
        *(host_waits, compiled, engines, optimizer),
    )
}

if __name__ == "__main__":
    main()
