"""Whether a module that others wrote keeps the packed documents of a sequence apart: decided before it trains on them.

    tokens   a a a a | b b b b      gradient of b's logits by what the module looked up for the tokens a:   zero
                                    b's logits, with other tokens in the place of a:                      the same

The gradient finds whatever b's logits compute from a, however little it is; other tokens find what has no gradient,
such as experts that are full. Both are taken of fresh random weights: the run's own may hide a leak (projections that
begin at zero, a row of zeros for padding) that training opens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kenotron.config.errors import InputError
from kenotron.models.context import Context

if TYPE_CHECKING:
    from kenotron.models.foreign import Foreign

# Relative, in fp32: what sums in another order may change, whose size does not depend on the documents before.
GRADIENT, LOGITS = 1e-6, 1e-5
GRADIENT_LENGTH = 128  # tokens of a sequence: activations are kept for backward, of the whole model


def check_documents(family: Foreign[Any], ctx: Context) -> None:
    """Raise InputError unless the second document's logits are shown not to depend on the first.

    Makes the whole module on the device of `ctx`, in fp32, and calls it with sequences of the shape of `ctx`.
    """
    sequences, length = min(ctx.shape[0], 2), ctx.shape[1]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = _random(family, ctx.positions.device)
        depends = _gradient(family, module, _two_documents(ctx, sequences, min(length, GRADIENT_LENGTH)))
        change = _change(family, module, _two_documents(ctx, sequences, length))
    if depends <= GRADIENT and change <= LOGITS:
        return
    raise InputError(
        f"model.document_masking: {family.config.title} is not shown to keep the documents of a sequence apart: with "
        f"random weights, another document before changes logits by {change:.1g} of the largest, and their gradient by "
        f"it is {depends:.1g} of that by their own document; expected false, or a model that masks other documents"
    )


def _random(family: Foreign[Any], device: torch.device) -> nn.Module:
    """Every weight is alive: its own initial value and noise that keeps the size of activations."""
    with torch.device("cpu"):
        module = family.make().eval()
    for parameter in module.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
        parameter.requires_grad_(False).data = parameter.float() + torch.randn(parameter.shape) * fan_in**-0.5
    return module.to(device)


def _two_documents(ctx: Context, sequences: int, length: int) -> Context:
    half, device = length // 2, ctx.positions.device
    positions = torch.cat([torch.arange(half), torch.arange(length - half)]).repeat(sequences).to(device)
    starts = (*(row * length + start for row in range(sequences) for start in (0, half)), sequences * length)
    return replace(
        ctx,
        shape=(sequences, length),
        positions=positions,
        cu_seqlens=starts,
        document_starts=torch.tensor(starts, dtype=torch.int32, device=device),
    )


def _tokens(family: Foreign[Any], ctx: Context) -> Tensor:
    return torch.randint(family.config.vocab_size, ctx.shape).to(ctx.positions.device)


def _gradient(family: Foreign[Any], module: nn.Module, ctx: Context) -> float:
    """The largest gradient of the second documents' logits by the first ones, of that by their own; nan: unknown."""
    (sequences, length), half = ctx.shape, ctx.shape[1] // 2
    first = (torch.arange(length) < half).expand(sequences, length).to(ctx.positions.device)
    with torch.enable_grad():
        with _Lookups(first) as lookups:
            logits = family.logits(module, _tokens(family, ctx), ctx)[:, half:].float()
        if not logits.requires_grad:
            return torch.nan
        projected = (logits * torch.randn(logits.shape).to(logits.device)).sum()
        found = torch.autograd.grad(projected, [x for x, _ in lookups.found], allow_unused=True)
    pairs = [(each.abs(), before) for each, (_, before) in zip(found, lookups.found) if each is not None]
    largest = [torch.stack([each[where ^ own].max() for each, where in pairs]).max() for own in (False, True)]
    return float(largest[0] / largest[1])  # 0 / 0 is nan: logits that depend on no token show nothing


def _change(family: Foreign[Any], module: nn.Module, ctx: Context) -> float:
    """How much the second documents' logits change with other first documents, of the largest logit."""
    half = ctx.shape[1] // 2
    tokens, others = _tokens(family, ctx), _tokens(family, ctx)
    others[:, half:] = tokens[:, half:]
    with torch.no_grad():
        one, two = (family.logits(module, each, ctx)[:, half:] for each in (tokens, others))
    return float((one - two).abs().max() / one.abs().max())


class _Lookups(TorchFunctionMode):
    """Makes what is looked up for tokens, or is a float of them, require a gradient, and keeps it in `found`.

    first: bool ``[sequences, length]``, True at the first documents. `found`: pairs of such a tensor and `first` in
    its layout, sequence or token first, or flat.
    """

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        layouts = (first, first.T, first.flatten(), first.flatten()[None])
        self.layouts = {tuple(each.shape): each for each in reversed(layouts)}
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.requires_grad:
            return result
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        layout = self.layouts.get(tuple(result.shape[:2]), self.layouts.get(tuple(result.shape[:1])))
        if layout is None or all(each.is_floating_point() or each.is_complex() for each in given):
            return result
        self.found.append((result.detach().requires_grad_(), layout))
        return self.found[-1][0].clone()  # what forward may write in place
