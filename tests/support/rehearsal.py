"""Steps of training on an accelerator that is not there; run as a program, because a process has one such device.

    python -m support.rehearsal "llama|tp=2|model.dtype=bfloat16" …    # a line of JSON for each

They are those of the planner (`kenotron.planner.rehearsal`), with batches of documents and a hook.
"""

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kenotron.config import Config
from kenotron.data.batch import TokenBatch
from kenotron.kernels.attention import attention as sdpa
from kenotron.kernels.attentions.choice import by_documents
from kenotron.kernels.attentions.packed import torch_flash
from kenotron.observers.consistency import StateHash
from kenotron.planner.rehearsal import build_on, on_fake_rank
from kenotron.training.step import train_step
from support import stand_in
from support.layout_runs import problem_of_family

STEPS = 3


def rehearse(family: str, layout: str, overrides: Sequence[str], device: torch.device) -> list[stand_in.HostWaits]:
    """What the host waited for in each of `STEPS` steps."""
    config = problem_of_family(family, *overrides).config(layout, Path("never-written"))
    micro_batches, waited = config.tokens.batch_accumulation_per_replica, []
    with on_fake_rank(config, 0, device) as mesh:
        hook = StateHash()
        run = build_on(config, mesh, device, by_documents(sdpa, torch_flash))
        run.hooks.append(hook)
        for _ in range(STEPS):
            with stand_in.HostWaits() as waits:
                hook.before_step(run)
                result = train_step(run, [_batch(config, number) for number in range(micro_batches)])
                run.step += 1
                hook.after_step(run, result)
                for loads in result.expert_loads or ():
                    loads.tolist()  # `observers.expert_load` computes with them on the host
            waited.append(waits)
            run.recorded.clear()
    return waited


def _batch(config: Config, number: int) -> TokenBatch:
    """Another one each time, with documents of other lengths where the config has documents."""
    sequences, length = config.tokens.micro_batch_size, config.tokens.sequence_length
    drawn = np.random.default_rng(number)
    tokens = drawn.integers(0, config.model.decoder.vocab_size, (sequences, length + 1))
    documents = np.cumsum(drawn.random((sequences, length)) < 0.2, axis=1) if config.model.document_masking else None
    return TokenBatch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), np.arange(sequences), documents=documents)


def mistakes(device: torch.device) -> dict[str, str]:
    """What stops or counts each of the mistakes that a rehearsal is for."""
    x, here = torch.ones(4, device=device), torch.ones(4)
    attempts: dict[str, Callable[[], Any]] = {
        "tensors of two devices": lambda: x + here,
        "a result as long as the data say": lambda: x.nonzero(),
        "bincount": lambda: torch.bincount(x.long(), minlength=8),
        "item": lambda: x.sum().item(),
        "a tensor as a condition": lambda: bool(x.sum()),
        "tolist": lambda: x.tolist(),
        "cpu": lambda: x.cpu(),
        "a copy from ordinary memory": lambda: here.to(device, non_blocking=True),
        "a blocking copy": lambda: here.pin_memory().to(device),
        "synchronize": lambda: torch.get_device_module(device).synchronize(),
        "a product in float64": lambda: torch.ones(4, device=device, dtype=torch.float64) * 2,
        "a NumPy number as a tensor": lambda: torch.as_tensor(np.ones(4), device=device),
        "a Fourier transform": lambda: torch.fft.rfft(x),
        "a number of Python": lambda: x * 2.0,
        "a copy from pinned memory": lambda: here.pin_memory().to(device, non_blocking=True),
        "a copy to the host": lambda: x.to("cpu", non_blocking=True),
        "its value at once": lambda: x.sum().to("cpu", non_blocking=True).item(),
    }
    found = {}
    for name, attempt in attempts.items():
        with stand_in.HostWaits() as waits:
            try:
                attempt()
                found[name] = " ".join(waits.sites) or "nothing"
            except Exception as error:
                found[name] = type(error).__name__
    return found


def main(cases: Sequence[str]) -> None:
    """A line of JSON for each case: the list of `rehearse`, or the traceback."""
    device = stand_in.install()
    for case in cases:
        family, layout, *overrides = case.split("|")
        try:
            if family == "mistakes":
                with stand_in.memoryless():
                    found: Any = mistakes(device)
            elif family.startswith("order of "):
                found = [waits.order for waits in rehearse(family.removeprefix("order of "), layout, overrides, device)]
            else:
                found = [dict(waits.sites) for waits in rehearse(family, layout, overrides, device)]
        except Exception:
            found = traceback.format_exc()[-8000:]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
