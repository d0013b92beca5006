"""Find weights and functions that a tensor-parallel plan misses, which would be silently wrong, before training.

    x ── up (column) ── half of the features ── act(·, alpha) ── down (row) ── sum over ranks
                                                       └─ alpha is whole, and its gradient is that of half the features

If a plan does not name such a weight, every rank trains its own version of it, without an error. So one pass on the
meta device follows partial tensors, of which a rank has only a shard: the output of column layers up to the next row
layer, or, on sequence shards, everything after the embedding. A whole weight that needs a gradient must not be combined
with them outside of planned modules.

A function without weights can be wrong, too: a norm, a softmax, a top-k or a half of the features uses all features in
one process, but only a shard of them on a rank. Features are the last dimension, until a view splits it into heads.
"""

from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kenotron.config.errors import InputError
from kenotron.config.families import built_in_names
from kenotron.config.model import Model
from kenotron.config.parallelism import Parallelism
from kenotron.models import skeleton
from kenotron.models.context import Context
from kenotron.models.decoder import Decoder
from kenotron.models.plan import Plan, modules

TOKENS = 4
# Whether modules of a field return shards of features (True), or whole tensors or shards of tokens (False).
RETURNS_A_PART = {"column": True, "channels": True, "inner_row": True, "row": False, "experts": False, "vocab": False}
# Functions of the whole last dimension that keep its size; others are recognized by its change, unless they are views.
MIXES = {"softmax", "log_softmax", "softmin", "normalize", "cumsum", "cumprod", "logcumsumexp", "sort", "roll", "flip"}
NORMS = {"layer_norm", "rms_norm", "group_norm"}
VIEWS = {"view", "reshape", "unflatten", "flatten", "transpose", "permute", "movedim", "swapaxes", "swapdims", "t"}
VIEWS |= {"squeeze", "unsqueeze", "matmul", "__matmul__", "__rmatmul__", "linear", "einsum", "bmm", "__get__", "expand"}
NUMBERS = {Tensor.__int__: TOKENS, Tensor.item: TOKENS, Tensor.__bool__: False}


def check_plan(model: Model, layout: Parallelism) -> None:
    """Raise InputError unless every rank of `layout` gets complete gradients of its weights. One process calls it.

    Plans of built-in families are skipped, to save 2 s of imports at the start: tests have checked them.
    """
    if layout.tp == 1 or model.decoder.family in built_in_names():
        return
    complete = skeleton(model)
    complete.plan.check(complete)
    check_gradients(complete, complete.plan, layout.tp_mode == "REDUCE_SCATTER")


def check_gradients(model: Decoder, plan: Plan, on_sequence_shards: bool) -> None:
    """Raise InputError, with the weight's name, for a gradient of the whole `model` that is incomplete on every rank.

    It runs a copy on the meta device; nothing is computed. `on_sequence_shards`: with tp_mode REDUCE_SCATTER.
    """
    with (fake := FakeTensorMode(allow_non_fake_inputs=True)):
        weights = {each: nn.Parameter(torch.empty_like(each, device="cpu")) for each in model.parameters()}
        buffers = {each: torch.empty_like(each, device="cpu") for each in model.buffers()}
    model = deepcopy(model, {id(each): other for each, other in (weights | buffers).items()})
    title = getattr(model.config, "title", model.config.family)
    flow = _Flow({id(each): name for name, each in model.named_parameters()}, on_sequence_shards)
    for field, part in RETURNS_A_PART.items():
        for name, module in modules(model, *getattr(plan, field)):
            if field in ("row", "inner_row"):
                module.register_forward_pre_hook(partial(flow.note_whole_input, name))
            flow.plan(module, part, features=field == "column")
            if field == "experts":  # the number of tokens of each is unknown
                module.forward = lambda x, *_, **__: x.clone()
    for _, module in modules(model, *plan.sequence, *plan.per_head):
        flow.plan(module)
    try:
        with fake, flow:
            tokens = torch.zeros(TOKENS, dtype=torch.int64)
            model(tokens, Context((1, TOKENS), tokens, meta_attention))
    except Exception as error:
        raise InputError(
            f"parallelism.tp: expected 1: the forward pass of {title} needs data to be followed "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        ) from error
    if flow.unsplit is not None:
        raise InputError(
            f"plan.row: {flow.unsplit} of {title} gets all features, and with parallelism.tp a rank's part of them: "
            f"expected the layers that make them in plan.column or plan.channels"
        )
    if flow.found is not None:
        raise InputError(
            f"parallelism.tp: {flow.found}, or what comes of it, is whole on every rank and meets what a rank has only "
            f"a part of: its gradient would be a part, too; expected 1, or its module in the plan of "
            f"{title} (per_head, sequence, channels or column)"
        )
    if flow.mixed is not None:
        raise InputError(
            f"parallelism.tp: the forward pass of {title} applies {flow.mixed} to all features of a layer that is "
            f"split by columns, of which a rank has a part: its result would be another one; expected 1"
        )


def meta_attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return a tensor of attention's shape that depends on all inputs, for passes on the meta device."""
    return q * (k.sum() + v.sum())


class _Flow(TorchFunctionMode):
    """Follows tensors by identity. `found`: the weight of the first whole tensor combined with a partial one."""

    def __init__(self, weights: dict[int, str], on_sequence_shards: bool) -> None:
        super().__init__()
        self.on_sequence_shards = on_sequence_shards
        self.split: set[int] = set()  # the `parts` that are shards of features, not of tokens
        self.unsplit: str | None = None  # the first row layer whose input is not split
        self.weight_of = dict(weights)  # id of a tensor that needs a gradient → the weight it comes from
        self.parts: set[int] = set()
        self.alive: list[Any] = []  # keeps tensors alive, so that ids are unique
        self.found: str | None = None
        self.widths: dict[int, int] = {}  # id of a part → features in its last dimension
        self.mixed: str | None = None  # the first function over all features
        self.inside = 0  # the number of planned modules around the call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NUMBERS:  # numbers that depend on data, which do not exist on meta
            return NUMBERS[func]
        result = func(*args, **(kwargs or {}))
        inputs = [each for each in tree_leaves((args, kwargs)) if _is_float(each)]
        learned = [each for each in inputs if id(each) in self.weight_of]
        whole = [each for each in learned if id(each) not in self.parts]
        has_part = any(id(each) in self.parts for each in inputs)
        is_split = any(id(each) in self.split for each in inputs)
        if has_part and whole and not self.inside:
            self.found = self.found or self.weight_of[id(whole[-1])]
        self._follow_widths(func, args, kwargs or {}, result, inputs)
        for each in tree_leaves(args[0] if result is None and args else result):  # None: __setitem__
            if _is_float(each):
                self.alive.append(each)
                if has_part:
                    self.parts.add(id(each))
                if is_split:
                    self.split.add(id(each))
                if learned:  # the last one: weights come after activations
                    self.weight_of[id(each)] = self.weight_of[id(learned[-1])]
        return result

    def _follow_widths(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Tensor]) -> None:
        wide = [each for each in inputs if id(each) in self.widths]
        if not wide or self.inside:
            return
        name, width = getattr(func, "__name__", str(func)), wide[0].shape[-1]
        mixed = name in NORMS or (name in MIXES and _takes_last(wide[0], args, kwargs))
        for each in filter(_is_float, tree_leaves(result)):
            if each.dim() and each.shape[-1] == width:
                if each.dim() < 3 or each.shape[-2] > 1 or name not in VIEWS:  # else one head, whose view is as wide
                    self.widths[id(each)] = width
            else:
                mixed = mixed or not (name in VIEWS or name.startswith("new_"))
        self.mixed = self.mixed or (name if mixed else None)

    def note_whole_input(self, name: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Check the input of a row layer, which must be split by features, before it runs."""
        if not any(id(each) in self.split for each in inputs):
            self.unsplit = self.unsplit or name

    def plan(self, module: nn.Module, split: bool | None = None, features: bool = False) -> None:
        """Skip the inside of `module`; its output is `split` or not (None: like its input), by `features`."""
        part = split or self.on_sequence_shards

        def enter(*_: Any) -> None:
            self.inside += 1

        def leave(_: Any, __: Any, output: Any) -> None:
            self.inside -= 1
            for each in tree_leaves(output) if split is not None else ():
                (self.parts.add if part else self.parts.discard)(id(each))
                (self.split.add if split else self.split.discard)(id(each))
                self.widths.pop(id(each), None)
                if features:
                    self.widths[id(each)] = each.shape[-1]

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)


def _takes_last(x: Tensor, args: Any, kwargs: Any) -> bool:
    """Return whether the last argument, or dim, names the last dimension of x, or there is no such argument."""
    dims = kwargs.get("dim", kwargs.get("dims", args[-1] if len(args) > 1 else -1))
    return bool({-1, x.dim() - 1} & {*(dims if isinstance(dims, tuple | list) else [dims])})


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
