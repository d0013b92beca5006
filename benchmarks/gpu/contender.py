"""One contender on one case, in a process of its own: builds, warms up, is timed and profiled, prints a line of JSON.

python benchmarks/gpu/contender.py kenotron "llama-3.2-1b 4096" cuda 10

build ── first step ── 2 steps ──┬─ steps for 10 s: time, peak memory ──┬─ 1 step: kernels, host time
         (compiles)             └ clock starts             clock stops ┘   (torch.profiler)
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from cases import TINY, Case, find

Step = Callable[[], float]
STEP = "benchmark step"


class Unavailable(Exception):
    """This contender cannot run here; the message says why."""


def ours(case: Case, device: Any, folder: Path, *overrides: str) -> tuple[Step, str]:
    """The trainer's own step on the trainer's own model."""
    from kenotron.parallel.mesh import Mesh
    from kenotron.training.build import build_run
    from kenotron.training.step import train_step

    config = case.config(folder, *overrides)
    run = build_run(config, Mesh(), device)
    batches = [case.batch(config.model.decoder.vocab_size)] * case.accumulation

    def step() -> float:
        result = train_step(run, batches)
        run.step += 1
        return result.lm_loss

    return step, ""


def ours_without_triton(case: Case, device: Any, folder: Path) -> tuple[Step, str]:
    """The same with torch's operators in the place of our kernels in Triton."""
    if device.type == "cpu":
        raise Unavailable("on a CPU there are no kernels in Triton")
    from kenotron.kernels.fused import use_kernels

    use_kernels("torch").__enter__()  # to the end of the process, which has one contender
    return ours(case, device, folder)


def transformers(case: Case, device: Any, folder: Path, compiled: bool = False) -> tuple[Step, str]:
    """A plain loop as its users write it: autocast for bf16, fused AdamW, clip; the best attention it has here.

    A mixture has its weights in bf16: autocast leaves grouped products in fp32.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from kenotron.interop.hf_config import hf_config

    if case.recompute not in ("", "recompute"):
        raise Unavailable("transformers recomputes all of a layer or nothing")
    logging.set_verbosity_error()
    config = case.config(folder)
    flash = importlib.util.find_spec("flash_attn") is not None and device.type == "cuda"
    plain = hf_config(config.model.decoder, "float32", 0)
    plain.use_cache = False
    options = {"attn_implementation": "flash_attention_2" if flash else "sdpa"} if plain.model_type != "mamba2" else {}
    in_bf16 = config.model.dtype == "bfloat16"
    all_in_bf16 = in_bf16 and hasattr(plain, "num_local_experts")
    with device:
        dtype = torch.bfloat16 if all_in_bf16 else torch.float32
        model = AutoModelForCausalLM.from_config(plain, dtype=dtype, **options).train()
    if case.recompute:
        model.gradient_checkpointing_enable()
    factory = config.optimizer.optimizer_factory
    betas = (factory.adam_beta1, factory.adam_beta2)
    rate, decay = config.optimizer.learning_rate_scheduler.learning_rate, config.optimizer.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas, factory.adam_eps, decay, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=in_bf16 and not all_in_bf16)
    batch = case.batch(config.model.decoder.vocab_size)
    given = {"input_ids": batch.tokens, "labels": batch.labels, "shift_labels": batch.labels}
    if batch.positions is not None and options:  # transformers masks documents where positions begin again
        given["position_ids"] = batch.positions
        if flash:  # there only of a batch of one
            given = {name: array.reshape(1, -1) for name, array in given.items()}
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        total = torch.zeros((), device=device)
        for _ in range(case.accumulation):
            on_device = {name: torch.as_tensor(array).to(device) for name, array in given.items()}
            with autocast:
                loss = forward(**on_device).loss / case.accumulation
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    notes = [options.get("attn_implementation", "no masks: documents are not kept apart" * case.documents)]
    return step, ", ".join(filter(None, [*notes, "weights and AdamW in bf16" * all_in_bf16]))


def command(case: Case, device: Any, folder: Path) -> dict[str, Any]:
    """`kenotron train` for 15 steps, with its data, hooks and metrics: the median of the last eleven."""
    import kenotron as kn

    config = case.config(folder, "tokens.train_steps=15")
    kn.train(config)
    lines = (folder / "logs" / config.general.run / "metrics.jsonl").read_text().splitlines()
    taken = [json.loads(line)["elapsed_time_per_iteration_ms"] / 1000 for line in lines]
    return {"seconds": statistics.median(taken[4:]), "first_seconds": taken[0], "note": f"{len(taken)} steps"}


CONTENDERS: dict[str, Callable[..., tuple[Step, str]]] = {
    "kenotron": ours,
    "kenotron compiled": lambda *given: ours(*given, "model.compile=true"),
    "kenotron without triton": ours_without_triton,
    "transformers": transformers,
    "transformers compiled": partial(transformers, compiled=True),
}
COMMAND, CEILING = "kenotron train", "matmul ceiling"


def timed(case: Case, device: Any, build: Callable[..., tuple[Step, str]], seconds: float, folder: Path) -> dict:
    """The numbers of a turn, times in seconds, memory in bytes."""
    import torch

    from kenotron.parallel import device as devices

    started = time.perf_counter()
    step, note = build(case, device, folder)
    first_loss = step()
    devices.synchronize(device)
    numbers: dict[str, Any] = {"first_seconds": time.perf_counter() - started, "loss": first_loss, "note": note}
    for _ in range(2):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    devices.synchronize(device)
    steps, started = 0, time.perf_counter()
    while steps < 3 or time.perf_counter() - started < seconds:
        step()
        steps += 1
    devices.synchronize(device)
    numbers |= {"seconds": (time.perf_counter() - started) / steps, "steps": steps}
    memory = devices.memory(device)
    return numbers | {name: memory[name] for name in ("peak_allocated", "peak_reserved")} | profiled(step, device)


def profiled(step: Step, device: Any) -> dict[str, float]:
    """Kernels of one step, and what the host did in it but wait for the device; the profiler adds to that."""
    import torch
    from torch.autograd import DeviceType

    from kenotron.parallel.device import synchronize

    with torch.profiler.profile() as profile:
        with torch.profiler.record_function(STEP):
            step()
        synchronize(device)
    events = profile.events()
    kernels = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.name.startswith(("Mem", "mem", STEP, "Optimizer."))  # copies, and ranges that have a name
        and not getattr(event, "is_user_annotation", False)
    ]
    on_host = [event for event in events if event.device_type == DeviceType.CPU]
    (whole,) = (event.time_range for event in on_host if event.name == STEP)
    # cudaStreamSynchronize and the like; and a copy from the device into memory that is not pinned waits for it.
    waits = [event.time_range for event in on_host if event.name.endswith(("Synchronize", "MemcpyAsync"))]
    waited = sum(wait.elapsed_us() for wait in waits if whole.start <= wait.start <= whole.end)
    return {"kernels": len(kernels), "host_seconds": (whole.elapsed_us() - waited) / 1e6}


def flops(case: Case, folder: Path) -> dict[str, Any]:
    """Model FLOPs of a token, forward and backward, by both conventions (docs/metrics.md)."""
    import torch

    from kenotron.models import build, flops_per_token

    config = case.config(folder)
    with torch.device("meta"):
        model = build(config.model)
    both = {causal: 3 * flops_per_token(model, case.sequence, causal) for causal in (False, True)}
    return {"flops": both[False], "flops_causal": both[True], "parameters": sum(p.numel() for p in model.parameters())}


def facts(device: Any) -> dict[str, Any]:
    """The device, its data sheet's and its measured bf16 FLOP/s, and the packages."""
    from kenotron.parallel.device import matmul_ceiling, name, vendor_peak

    packages = ("torch", "transformers", "triton", "flash-attn", "kenotron")
    found = {each: version(each) for each in packages}
    # The fastest of several turns: each is short, and what else the machine does disturbs some of them.
    ceiling = {dtype: max(matmul_ceiling(device, dtype) for _ in range(10)) for dtype in ("bfloat16", "float32")}
    return {"device": name(device), "vendor_peak": vendor_peak(device), "ceiling": ceiling, "versions": found}


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def main() -> None:
    contender, name, kind, seconds = sys.argv[1:5]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed meanwhile
    import torch

    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cpu":
        os.environ["KENOTRON_DEVICE"] = "cpu"
    from kenotron.launch import set_defaults

    set_defaults()  # as a run does; of the allocator, for the peers, too
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        try:
            if kind == "cuda" and not torch.cuda.is_available():
                raise Unavailable("torch finds no GPU; on a CPU: --device cpu --miniature")
            if contender == CEILING:
                answer = facts(device)
            else:
                case = find(name)
                answer = flops(case, Path(folder))
                if contender == COMMAND:
                    answer |= command(case, device, Path(folder))
                else:
                    answer |= timed(case, device, CONTENDERS[contender], float(seconds), Path(folder))
        except torch.OutOfMemoryError:
            answer = {"problem": "out of memory"}
        except Unavailable as error:
            answer = {"problem": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


def contenders_of(case: Case) -> list[str]:
    """Who takes part; `kenotron train` only where a step is so short that what surrounds it shows."""
    return [*CONTENDERS, *([COMMAND] if case.shape == TINY else [])]


if __name__ == "__main__":
    main()
