"""Forward and backward of Mamba and Mamba-2, compared with transformers' code for machines without its CUDA kernels.

    python benchmarks/mamba.py                        a few minutes: transformers' Mamba loops over tokens
    python benchmarks/mamba.py --families mamba2 --threads 1 --rounds 5

Both compute the same model, with the same weights, in turns. Printed are the best times, and their ratio.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from kenotron.interop.hf_config import architecture_from_hf
from kenotron.interop.hf_weights import Stored, Weights
from kenotron.interop.tensor_names import from_hf_names
from kenotron.kernels.attention import attention
from kenotron.models import Context, named_parameters
from kenotron.models.decoder import Decoder

SHAPES: dict[str, dict[str, Any]] = {
    "mamba": {"hidden_size": 256, "num_hidden_layers": 1},
    "mamba2": {
        "hidden_size": 768,
        "num_hidden_layers": 2,
        "num_heads": 24,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
    },
}
VOCAB = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    for family in arguments.families:
        theirs = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, vocab_size=VOCAB, eos_token_id=0, **SHAPES[family])
        )
        tokens = torch.randint(VOCAB, (1, arguments.length), generator=torch.Generator().manual_seed(0))
        contenders = (loss_of_ours(theirs, tokens), partial(loss_of_theirs, theirs, tokens))
        contenders[0]()  # warm
        rounds = [[seconds(each) for each in contenders] for _ in range(arguments.rounds)]
        ours, other = (min(times) for times in zip(*rounds))
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        print(
            f"{family}: {ours * 1e3:.0f} ms, transformers {other * 1e3:.0f} ms, {other / ours:.1f}x "
            f"({arguments.threads} threads, load averages {load})"
        )


def seconds(loss: Callable[[], Tensor]) -> float:
    """Of a forward and backward pass."""
    start = time.perf_counter()
    loss().backward()
    return time.perf_counter() - start


def loss_of_theirs(model: Any, tokens: Tensor) -> Tensor:
    """As a training loop computes it."""
    return model(tokens, labels=tokens, use_cache=False).loss


def loss_of_ours(theirs: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """Our model with their weights; its loss."""
    config = theirs.config.to_dict() | {"architectures": [type(theirs).__name__]}
    model = Decoder(architecture_from_hf(config, "config.json"))
    stored = {
        name: Stored(tuple(each.shape), lambda box, each=each: each[box] if box else each)  # type: ignore[misc]
        for name, each in theirs.state_dict().items()
    }
    shapes = {name: tuple(parameter.shape) for name, parameter in named_parameters(model)}
    weights = from_hf_names(Weights(stored, "memory"), model.family, shapes)
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            parameter.copy_(weights[name])
    length = tokens.shape[1]
    labels = torch.full((length,), -100)
    labels[:-1] = tokens[0, 1:]
    ctx = Context((1, length), torch.arange(length), attention, loss_scale=1 / (length - 1))
    return lambda: model(tokens.flatten(), ctx, labels)[0]


if __name__ == "__main__":
    main()
