"""Weights whose gradient, under tensor parallelism, would be one rank's summand: found before anything trains.

    x ── up (column) ── half of the features ── act(·, alpha) ── down (row) ── sum over ranks
                                                       └─ alpha is whole, and its gradient is that of half the features

A plan that does not name such a weight trains it apart on every rank, without an error. So one pass without memory
follows what a rank has only a part of: the output of column layers up to the next row layer, or, on sequence shards,
all that follows the embedding. Nothing that is whole and needs a gradient may meet it outside of planned modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kenotron.config.errors import InputError
from kenotron.models.context import Context
from kenotron.models.decoder import Decoder
from kenotron.models.module_state import put_back
from kenotron.models.plan import modules

if TYPE_CHECKING:
    from kenotron.models.plan import Plan

TOKENS = 4
# What modules of a field return: a part (True), the whole, or shards of tokens if the model works on them (False).
RETURNS_A_PART = {"column": True, "channels": True, "inner_row": True, "row": False, "experts": False, "vocab": False}
NUMBERS = {Tensor.__int__: TOKENS, Tensor.item: TOKENS, Tensor.__bool__: False}


def check_gradients(model: Decoder, plan: Plan, on_sequence_shards: bool) -> None:
    """Raise InputError, naming the weight, for a gradient of the complete `model` that no rank would have whole.

    Weights may be on the meta device; nothing is computed. `on_sequence_shards`: with tp_mode REDUCE_SCATTER.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), put_back(model, {}), ExitStack() as stack:
        weights = {name: nn.Parameter(torch.empty_like(each, device="cpu")) for name, each in model.named_parameters()}
        buffers = {name: torch.empty_like(each, device="cpu") for name, each in model.named_buffers()}
        flow = _Flow({id(each): name for name, each in weights.items()})
        for field, part in RETURNS_A_PART.items():
            for _, module in modules(model, *getattr(plan, field)):
                stack.enter_context(flow.planned(module, part or on_sequence_shards, field == "experts"))
        for _, module in modules(model, *plan.sequence, *plan.per_head):
            stack.enter_context(flow.planned(module))
        tokens = torch.zeros(TOKENS, dtype=torch.int64)
        try:
            with flow:
                functional_call(model, {**weights, **buffers}, (tokens, Context((1, TOKENS), tokens, _attention)))
        except Exception as error:
            raise InputError(
                f"parallelism.tp: expected 1: the forward pass of {model.config.family} needs data to be followed "
                f"({type(error).__name__}: {' '.join(str(error).split())[:200]})"
            ) from error
    if flow.found is not None:
        raise InputError(
            f"parallelism.tp: {flow.found}, or what comes of it, is whole on every rank and meets what a rank has only "
            f"a part of: its gradient would be a part, too; expected 1, or its module in the plan of "
            f"{model.config.family} (per_head, sequence, channels or column)"
        )


def _attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    return q * (k.sum() + v.sum())


class _Flow(TorchFunctionMode):
    """Follows tensors by identity. `found`: the weight behind the first one that is whole and meets a part."""

    def __init__(self, weights: dict[int, str]) -> None:
        super().__init__()
        self.weight_of = dict(weights)  # of all that needs a gradient: the weight that it comes of, by id
        self.parts: set[int] = set()
        self.alive: list[Any] = []  # ids are those of living tensors
        self.found: str | None = None
        self.inside = 0  # of how many planned modules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NUMBERS:  # a number that depends on data, of which there are none
            return NUMBERS[func]
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if _is_float(each)]
        learned = [each for each in given if id(each) in self.weight_of]
        whole = [each for each in learned if id(each) not in self.parts]
        has_part = any(id(each) in self.parts for each in given)
        if has_part and whole and not self.inside:
            self.found = self.found or self.weight_of[id(whole[-1])]
        for each in tree_leaves(args[0] if result is None and args else result):  # None: __setitem__
            if _is_float(each):
                self.alive.append(each)
                if has_part:
                    self.parts.add(id(each))
                if learned:  # of activations and a weight, the weight: it comes last
                    self.weight_of[id(each)] = self.weight_of[id(learned[-1])]
        return result

    @contextmanager
    def planned(self, module: nn.Module, part: bool | None = None, skip: bool = False) -> Iterator[None]:
        """Check nothing within `module`. `part`: its output is one (None: as its input); `skip`: do not call it."""

        def enter(*_: Any) -> None:
            self.inside += 1

        def leave(_: Any, __: Any, output: Any) -> None:
            self.inside -= 1
            for each in tree_leaves(output):
                if part is not None:
                    (self.parts.add if part else self.parts.discard)(id(each))

        handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        if skip:
            module.forward = lambda x, *_, **__: x.clone()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            if skip:
                del module.forward


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
