"""A model ready to decode, from a checkpoint of ours or from a Hugging Face folder.

    model, tokenizer, config = load_for_generation("checkpoints/10")      # or "checkpoints": the newest there
    model, tokenizer, config = load_for_generation("exported/")           # config.json and safetensors

A checkpoint holds fp32 masters; what was trained in bf16 is decoded in bf16, with half the memory. Weights
come one tensor at a time, so the host never holds the model twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from kenotron.config.errors import NotSupportedYet
from kenotron.config.model import WEIGHT_DTYPES, Model
from kenotron.data.tokenizer import Tokenizer, load_tokenizer
from kenotron.interop.sources import Source, fitting, open_source, skeleton
from kenotron.parallel.device import best_device


class Loaded(NamedTuple):
    """`tokenizer` is None where the checkpoint has none; `config` is the config's model section."""

    model: nn.Module
    tokenizer: Tokenizer | None
    config: Model


def load_for_generation(
    path: str | Path, dtype: str | torch.dtype | None = None, device: str | torch.device | None = None
) -> Loaded:
    """Build the model of `path` with its weights, in eval mode.

    `dtype` None is the config's `model.dtype`; `device` None the accelerator, or the CPU where there is none.
    Errors (InputError): nothing at `path` (names what is near), not a checkpoint, damaged, not a family that
    can decode.
    """
    source = open_source(path)
    model = skeleton(source)
    target = torch.device(device) if device is not None else best_device()
    fill(model, source, _dtype(dtype or source.model.dtype), target)
    tokenizer = load_tokenizer(source.tokenizer) if source.tokenizer else None
    return Loaded(model.eval(), tokenizer, source.model)


def fill(model: nn.Module, source: Source, dtype: torch.dtype, device: torch.device) -> None:
    """Replace every parameter of a meta-device `model` by the source's, cast and moved. A tied head stays tied."""
    for name, parameter in list(model.named_parameters(remove_duplicate=True)):
        tensor = fitting(source, name, tuple(parameter.shape))
        owner, _, leaf = name.rpartition(".")
        weight = nn.Parameter(tensor.to(device=device, dtype=dtype), requires_grad=False)
        setattr(model.get_submodule(owner), leaf, weight)
    model.tie_weights()  # type: ignore[operator]


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in WEIGHT_DTYPES:
        raise NotSupportedYet(f"generation in dtype {dtype!r} (there are {', '.join(WEIGHT_DTYPES)})")
    return getattr(torch, dtype)
