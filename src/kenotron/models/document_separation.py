"""Check that foreign code keeps the packed documents of a sequence apart, before it trains on them.

    tokens   a a a | b b b b b | c c c      gradient of c's logits by the embeddings of a and b:   zero
             a a a | b b b b b b b | c      c's logits, when a and b are replaced:                 the same

Documents begin at odd positions, where no chunk of a kernel ends, and later in each row.

The gradient finds any dependence of c's logits on a and b, however small; replacing tokens finds dependences without a
gradient, such as experts that are full, or a count of end-of-text tokens. Both use random weights, because the run's
own may hide a leak that training opens (projections that start at zero, a zero row for padding). For a family of the
user's own, blocks are checked one by one in the same two ways, starting from a block's input instead of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kenotron.config.errors import InputError
from kenotron.kernels.attention import attention
from kenotron.models.context import Context
from kenotron.models.dropout import CounterDropout
from kenotron.models.family import Family, family_of
from kenotron.models.module_state import put_back

if TYPE_CHECKING:
    from kenotron.config.decoder import DecoderArchitecture
    from kenotron.models.foreign import Foreign

# Relative tolerances in fp32: differences that come from another order of summation only.
GRADIENT, LOGITS, REPEATED = 1e-6, 1e-5, 1e-6
GRADIENT_LENGTH = 128  # tokens per sequence, few because the whole model's activations are kept for backward


def check_documents(family: Foreign[Any], ctx: Context) -> None:
    """Raise InputError unless the last document's logits are shown not to depend on the documents before it.

    Builds the whole module in fp32 on the device of `ctx`, and calls it with sequences of the shape of `ctx`.
    """
    sequences, length = min(ctx.shape[0], 2), ctx.shape[1]
    with _alive(family, ctx.positions.device) as module:
        depends = _gradient(family, module, *_documents(ctx, sequences, min(length, GRADIENT_LENGTH)))
        change = _change(family, module, *_documents(ctx, sequences, length))
    if depends <= GRADIENT and change <= LOGITS:
        return
    raise InputError(
        f"model.document_masking: {family.config.title} is not shown to keep the documents of a sequence apart: with "
        f"random weights, another document before changes logits by {change:.1g} of the largest, and their gradient by "
        f"it is {depends:.1g} of that by their own document; expected false, or a model that masks other documents"
    )


def check_repeats(family: Foreign[Any], ctx: Context) -> None:
    """Raise InputError unless the same tokens give the same logits twice, and no logits depend on later tokens.

    Later tokens are the labels. If logits were not repeatable, validation would change training, and resuming and
    recomputation would change results. Builds the whole module in fp32 on the device of `ctx`.
    """
    length, device = min(ctx.shape[1], GRADIENT_LENGTH), ctx.positions.device
    whole = replace(
        ctx,
        shape=(1, length),
        positions=torch.arange(length).to(device),
        cu_seqlens=None,
        document_starts=None,
        sample_ids=torch.zeros(1, dtype=torch.int64, device=device),
    )
    with _alive(family, device) as module:
        tokens = torch.randint(family.config.vocab_size, (1, length)).to(device)
        results = []
        for _ in range(2):
            training = family.config.training_dropout
            dropout = CounterDropout("", whole) if training else nullcontext()
            with torch.no_grad(), put_back(module.train(training), _copies(module)), dropout:
                results.append(family.logits(module, tokens, whole).float())
        module.eval()
        ahead = _gradient(family, module, whole, torch.arange(length).to(device)[None] >= (length + 1) // 2)
    if length > 1 and not ahead <= GRADIENT:
        raise InputError(
            f"model.model_config: {family.config.title} is not shown to be causal: the gradient of logits by later "
            f"tokens is {ahead:.1g} of that by earlier ones; expected a model that predicts tokens from those before"
        )
    apart = float((results[0] - results[1]).abs().max() / results[0].abs().max())
    if apart > REPEATED:
        raise InputError(
            f"model.model_config: {family.config.title} gives other logits when it reads the same tokens again (by "
            f"{apart:.1g} of the largest): it draws random numbers, or keeps state that is no buffer or attribute of "
            "its modules; expected a function of tokens, weights and buffers"
        )


def check_blocks(config: DecoderArchitecture, length: int, device: torch.device | str = "cpu") -> None:
    """Raise InputError if in a block of the family of `config` a document changes the document after it.

    Builds one block after the other in fp32 on `device`, and calls it with a sequence of `length` tokens.
    """
    family, starts = family_of(config), (0, length // 3 | 1, 2 * length // 3 | 1, length)  # odd: no chunk ends there
    positions = torch.cat([torch.arange(end - begin) for begin, end in pairwise(starts)]).to(device)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        tokens = torch.randint(config.vocab_size, (length,)).to(device)
        ctx = Context((1, length), positions, attention, starts, torch.tensor(starts, dtype=torch.int32, device=device))
        ctx = replace(ctx, sample_ids=torch.zeros(1, dtype=torch.int64, device=device), tokens=tokens)
        for layer in range(config.num_hidden_layers):
            depends, change = _of_block(family, layer, ctx)
            if not (depends <= GRADIENT and change <= LOGITS):
                raise InputError(
                    f"model.document_masking: layer {layer} of {config.family} does not keep the documents of a "
                    f"sequence apart: with random weights, another document before changes its result by {change:.1g} "
                    f"of the largest (gradient: {depends:.1g}); expected false, or a block that reads "
                    "ctx.document_starts or ctx.cu_seqlens"
                )


def _of_block(family: Family[Any], layer: int, ctx: Context) -> tuple[float, float]:
    """Return how far the last document's outputs depend on the others: relative gradient, and relative change."""
    assert ctx.cu_seqlens is not None
    assert ctx.tokens is not None
    device, length, half = ctx.positions.device, ctx.shape[1], ctx.cu_seqlens[-2]
    block = family.block(layer).eval()
    for weight in (*block.parameters(), *block.buffers()):
        weight.data.zero_()  # was uninitialized memory
    _enliven(block)
    block.to(device).compute_dtype = torch.float32  # type: ignore[assignment]
    embedded = family.positions()
    rope = None if embedded is None else embedded.to(device)(ctx.positions.view(ctx.shape))
    x, other = (torch.randn(length, family.config.hidden_size).to(device) for _ in range(2))
    with torch.enable_grad():
        result = block(x.requires_grad_(), rope, ctx)[half:].float()
        (gradient,) = torch.autograd.grad((result * torch.randn(result.shape).to(device)).sum(), x)
    other[half:] = x[half:].detach()
    tokens = torch.cat((torch.randint(family.config.vocab_size, (half,)).to(device), ctx.tokens[half:]))
    with torch.no_grad():
        change = (block(other, rope, replace(ctx, tokens=tokens))[half:] - result).abs().max() / result.abs().max()
    return float(gradient[:half].abs().max() / gradient[half:].abs().max()), float(change)


def _enliven(module: nn.Module) -> None:
    """Add noise to the module's weights, scaled so that the size of activations stays the same."""
    for parameter in module.parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 4
        parameter.requires_grad_(False).data = parameter.float() + torch.randn(parameter.shape) * fan_in**-0.5


@contextmanager
def _alive(family: Foreign[Any], device: torch.device) -> Iterator[nn.Module]:
    """Yield a new module with its own initial weights plus noise (`_enliven`).

    At the end, variables of classes and files that its calls changed, which other modules see, are restored.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        with torch.device("cpu"):
            module = family.make().eval()
        _enliven(module)
        with put_back(module.to(device), _copies(module)):
            yield module


def _copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def _documents(ctx: Context, sequences: int, length: int) -> tuple[Context, Tensor]:
    """Return a context of up to three documents a sequence, and the tokens before each last one, bool of its shape."""
    starts, positions = [0], []
    before = torch.zeros(sequences, length, dtype=torch.bool)
    for row in range(sequences):
        borders = sorted({each for each in (length // 3 | 1, (2 * length // 3 | 1) + 2 * row) if each < length})
        before[row, : borders[-1]] = True
        for begin, end in pairwise((0, *borders, length)):
            positions.append(torch.arange(end - begin))
            starts.append(row * length + end)
    device = ctx.positions.device
    documents = torch.tensor(starts, dtype=torch.int32, device=device)
    packed, shape = torch.cat(positions).to(device), (sequences, length)
    whole = replace(ctx, shape=shape, positions=packed, cu_seqlens=tuple(starts), document_starts=documents)
    return whole, before.to(device)


def _gradient(family: Foreign[Any], module: nn.Module, ctx: Context, others: Tensor) -> float:
    """Return the largest gradient of logits by the tokens `others`, relative to that by their own tokens; nan: unknown.

    `others` is bool ``[sequences, length]``; the logits are those of all other tokens.
    """
    with torch.enable_grad():
        with _Lookups(others) as lookups:
            logits = family.logits(module, torch.randint(family.config.vocab_size, ctx.shape).to(others.device), ctx)
        if not logits.requires_grad:
            return torch.nan
        read = logits[~others].float()
        projected = (read * torch.randn(read.shape).to(read.device)).sum()
        found = torch.autograd.grad(projected, [x for x, _ in lookups.found], allow_unused=True)
    pairs = [(each.abs(), where) for each, (_, where) in zip(found, lookups.found) if each is not None]
    largest = [torch.stack([each[where ^ own].max() for each, where in pairs]).max() for own in (False, True)]
    return float(largest[0] / largest[1])  # 0 / 0 is nan: logits that depend on no token prove nothing


def _change(family: Foreign[Any], module: nn.Module, ctx: Context, before: Tensor) -> float:
    """Return the change of the last documents' logits when those before are replaced, relative to the largest logit."""
    tokens = torch.randint(family.config.vocab_size, ctx.shape).to(before.device)
    others = torch.where(before, _telling_tokens(family.config, ctx.shape[1]).to(before.device), tokens)
    with torch.no_grad():
        one, two = (family.logits(module, each, ctx)[~before] for each in (tokens, others))
    return float((one - two).abs().max() / one.abs().max())


def _telling_tokens(config: Any, count: int) -> Tensor:
    """Return tokens that code may treat specially, ``[count]``: end of text, and the smallest ids."""
    described, names = getattr(config, "hf_config", {}), ("eos_token_id", "bos_token_id", "pad_token_id")
    special = [getattr(config, name, None) or described.get(name) for name in names]
    first = [each for each in special if isinstance(each, int) and 0 <= each < config.vocab_size]
    return torch.tensor([*first, *range(count)])[:count] % config.vocab_size


class _Lookups(TorchFunctionMode):
    """Makes float tensors that are looked up by token, or converted from tokens, require a gradient.

    `marked` is bool ``[sequences, length]``, True at some tokens. `found` collects pairs of such a tensor and `marked`
    in its layout: sequence first, token first, or flat.
    """

    def __init__(self, marked: Tensor) -> None:
        super().__init__()
        layouts = (marked, marked.T, marked.flatten(), marked.flatten()[None])
        self.layouts = {tuple(each.shape): each for each in reversed(layouts)}
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.requires_grad:
            return result
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        layout = self.layouts.get(tuple(result.shape[:2]), self.layouts.get(tuple(result.shape[:1])))
        if layout is None or all(each.is_floating_point() or each.is_complex() for each in inputs):
            return result
        self.found.append((result.detach().requires_grad_(), layout))
        return self.found[-1][0].clone()  # a clone, because forward may write into it
