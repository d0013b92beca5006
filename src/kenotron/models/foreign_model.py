"""Give a foreign module the interface of a `Decoder`.

    ForeignModel ── forward(tokens [tokens], ctx, labels) ──▶ loss
        │  folds tokens into [sequences, length]; the loss is Kénotron's sum over tokens
        └─ module ── its own forward ──▶ logits [sequences, length, vocab]

Parameters keep the names that they have in the module. The wrapper takes care of what is easily wrong:

* Buffers, such as rotary frequencies, keep the values that the constructor computed, although weights are built on the
  meta device. Buffers in the module's state_dict are saved and loaded; only a training step changes them.
* No other state lasts from call to call: attributes and other buffers that forward changes are restored.
* The module is in eval mode, or uses `CounterDropout`: its own dropout would draw from torch's global generator.
* Tied weights are tied again whenever parameters were replaced.
* In bfloat16 the module runs under autocast, with fp32 weights in every layout.
* Before the first step on packed documents, a check shows whether the module keeps them apart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from kenotron.config.errors import InputError
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models.context import Context
from kenotron.models.decoder import Decoder, check_positions
from kenotron.models.document_separation import check_documents, check_repeats
from kenotron.models.dropout import CounterDropout
from kenotron.models.foreign_decoding import next_logits
from kenotron.models.init_rules import FilledBy, InitRule
from kenotron.models.module_state import Recomputed, check_state, put_back, recomputed
from kenotron.models.part import ModelPart
from kenotron.models.plan import modules
from kenotron.models.recomputation import Recompute, checkpoint_options
from kenotron.models.token_loss import OwnLoss

if TYPE_CHECKING:
    from kenotron.models.foreign import Foreign, ForeignArchitecture


class ForeignModel(Decoder):
    """A model whose `family` builds and calls the module. Weights are not allocated yet, but buffers are computed."""

    config: ForeignArchitecture

    def __init__(self, config: ForeignArchitecture, family: Foreign[Any]) -> None:
        nn.Module.__init__(self)
        self.config, self.family, self.foreign = config, family, family
        self.part = ModelPart.whole(config.num_hidden_layers)
        self.compute_dtype, self.separates_documents = torch.float32, False
        self.repeats = not (family.has_state or config.training_dropout)
        # Within, new parameters are on the meta device, and buffers are computed.
        with torch.device("cpu"), register_module_parameter_registration_hook(_to_meta):  # type: ignore[arg-type]
            module = family.make().train(config.training_dropout)
        self._module = (module,)  # a tuple, so that it is no submodule; sharing dictionaries keeps its names
        for own in ("_parameters", "_modules", "_buffers"):
            self.__dict__[own] = module.__dict__[own]
        self._fresh_buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self._logged: set[str] = set()
        self._saved = [name for name in module.state_dict() if name in self._fresh_buffers]
        check_state(module)
        family.plan = family.plan_of(module)
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        self._tied = [tied for tied in names.values() if len(tied) > 1]
        self._check_ties()
        for name, block in modules(self, self.plan.blocks) if config.training_dropout else ():
            block.forward = self._with_dropout(name, block.forward)  # type: ignore[method-assign]

    def _with_dropout(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.dropout(name, self._ctx):  # same `_ctx` in recomputation: no other forward runs before it
                return forward(*args, **kwargs)

        return call

    def dropout(self, name: str, ctx: Context) -> AbstractContextManager[Any]:
        """Return the context manager that the submodule `name` runs under."""
        return CounterDropout(name, ctx) if self.training and self.config.training_dropout else nullcontext()

    def _check_ties(self) -> None:
        blocks = [name for name, _ in modules(self, self.plan.blocks)]
        for tied in self._tied:
            if len({next((block for block in blocks if name.startswith(f"{block}.")), "") for name in tied}) > 1:
                raise InputError(
                    f"model.model_config: {tied[0]} and {tied[1]} are one weight, but in different blocks "
                    f"({self.plan.blocks}); expected tied weights in one block, or outside of all"
                )

    def forward(self, tokens: Tensor, ctx: Context, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """As in `Decoder`. Raises InputError if documents are packed and the module does not keep them apart."""
        if ctx.states is not None:
            return next_logits(self, tokens, ctx)
        check_positions(self.config, ctx)
        if labels is not None and not self.repeats:
            self._warn_of_dropout()
            with torch.compiler.set_stance("force_eager"):
                check_repeats(self.foreign, ctx)
            self.repeats = True
        if ctx.has_documents and not self.separates_documents:
            with torch.compiler.set_stance("force_eager"):
                check_documents(self.foreign, ctx)
            self.separates_documents = True
        logits = self.logits(tokens.view(ctx.shape), ctx, self.compute_dtype).flatten(0, 1)
        if labels is None:
            return logits if ctx.logits_to_keep is None else logits[ctx.logits_to_keep]
        return (ctx.loss or OwnLoss(partial(F.cross_entropy, reduction="none"))).of_logits(logits, labels, ctx)

    def logits(self, tokens: Tensor, ctx: Context, dtype: torch.dtype) -> Tensor:
        """Return logits ``[sequences, length, vocab]`` of tokens ``[sequences, length]``, computed in `dtype`."""
        self._ctx = ctx
        with self.autocast(tokens.device, dtype), self.state_kept(), self.dropout("", ctx):
            return self.foreign.logits(self.foreign_module, tokens, ctx)

    def autocast(self, device: torch.device, dtype: torch.dtype | None = None) -> torch.autocast:
        """Return the context that the module runs under: autocast to `dtype` (None: the compute dtype)."""
        dtype = dtype or self.compute_dtype
        # Autocast's cache would keep a copy of every weight until the end of the pass.
        return torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)

    @property
    def foreign_module(self) -> nn.Module:
        """The module itself."""
        return self._module[0]

    def train(self, mode: bool = True) -> ForeignModel:
        """Set the mode; without `training_dropout` the module itself stays in eval mode."""
        self.training = mode
        if self.config.training_dropout:
            self.foreign_module.train(mode)
        return self

    def _warn_of_dropout(self) -> None:
        dropouts = {name for name, each in self.named_modules() if isinstance(each, nn.Dropout) and each.p}
        if dropouts and not self.config.training_dropout:
            logging.getLogger("kenotron").warning(
                "model.model_config: %s of %s is off: training_dropout: true trains with it",
                min(dropouts),
                self.config.title,
            )

    def reset_buffers(self, device: torch.device | str) -> None:
        """Reset buffers to the values and dtypes that the module's constructor computed."""
        for name, value in self._fresh_buffers.items():
            self._set_buffer(name, value.to(device, copy=True))

    def saved_buffers(self) -> dict[str, Tensor]:
        """Return the buffers in the module's state_dict; forward may write them, in place or by assignment."""
        return {name: self.get_buffer(name) for name in self._saved}

    @contextmanager
    def state_kept(self) -> Iterator[None]:
        """Undo what forward changes, except saved buffers in a training step; other changes are logged once by name."""
        with put_back(self.foreign_module, self._values("", self.training)) as changed:
            yield
        if unsaved := sorted(set(changed) - set(self._saved) - self._logged):
            self._logged.update(unsaved)
            logging.getLogger("kenotron").warning(
                "model.model_config: forward of %s changes %s, which no checkpoint holds: put back after every call "
                "(register_buffer is for state that lasts)",
                self.foreign.config.title,
                ", ".join(unsaved),
            )

    def _values(self, prefix: str, without_saved: bool = False) -> dict[str, Tensor]:
        """Return the values that buffers below `prefix` are restored to; for saved buffers their current values."""
        fresh = {name: value for name, value in self._fresh_buffers.items() if name.startswith(prefix)}
        now = {} if without_saved else {name: self.get_buffer(name).clone() for name in self._saved if name in fresh}
        kept = {name: value for name, value in fresh.items() if name not in self._saved} | now
        return {name.removeprefix(prefix): value for name, value in kept.items()}

    def _set_buffer(self, name: str, value: Tensor) -> None:
        parent, _, leaf = name.rpartition(".")
        self.get_submodule(parent)._buffers[leaf] = value

    def tie_weights(self) -> None:
        """Share the weights that the module ties."""
        for owner, *copies in self._tied:
            for name in copies:
                parent, _, leaf = name.rpartition(".")
                setattr(self.get_submodule(parent), leaf, self.get_parameter(owner))

    def ties(self) -> dict[str, str]:
        """As in `Decoder`."""
        return {name: owner for owner, *copies in self._tied for name in copies}

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Set autocast's dtype. Weights are gathered in fp32, so that every layout rounds the same."""
        self.compute_dtype, self.weight_dtype = dtype, torch.float32

    def set_recompute(self, recompute: Recompute, tp: int = 1, attention: bool = True) -> None:
        """As in `Decoder`."""
        how = checkpoint_options(recompute, self.config, tp, attention)
        for name, block in modules(self, self.plan.blocks) if recompute else ():
            changes = self.foreign.has_state or any(True for _ in block.buffers())
            block.forward = (  # type: ignore[method-assign]
                Recomputed(block, partial(self._values, f"{name}."), how) if changes else recomputed(block.forward, how)
            )

    def compile_blocks(self) -> None:
        """As in `Decoder`; of a `Recomputed` block only the inner forward is compiled, else state is written twice."""
        if self.config.training_dropout:
            raise InputError("model.compile: expected false with model.model_config.training_dropout: true")
        for _, block in modules(self, self.plan.blocks):
            (block.forward if isinstance(block.forward, Recomputed) else block).compile()

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Return the module's own initialization: every rank builds the whole module on the host and takes its shards.

        Raises InputError for a `scaling`, which the module decides itself.
        """
        if scaling != "NONE":
            raise InputError(
                f"model.init_method.scaling_method: expected NONE: {self.foreign.config.title} scales its initial "
                f"weights by its own rules; found {scaling}"
            )
        fresh: dict[str, Tensor] = {}

        def fill(name: str, shard: TensorShard, key: int) -> None:
            if not fresh:  # all are drawn at once, with the key of the first
                fresh.update(self._draw(std, key))
            box = tuple(slice(start, start + size) for start, size in zip(shard.offset, shard.tensor.shape))
            shard.tensor.copy_(fresh[name][box])

        return [InitRule(name, FilledBy(partial(fill, name))) for name, _ in self.named_parameters()]

    def _draw(self, std: float, key: int) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(key % 2**63)
            return {name: parameter.detach() for name, parameter in self.foreign.make(std).named_parameters()}

    def flops_per_token(self, sequence_length: int, causal: bool) -> float:
        """Return an estimate: two for every matrix weight that is not a lookup, and attention of the model's width.

        Experts count as if every token went through all of them. Return 0 if submodules count their own FLOPs.
        """
        if any(hasattr(each, "flops_per_token") for each in self.modules() if each is not self):
            return 0.0
        lookups = [p for each in self.modules() if isinstance(each, nn.Embedding) for p in each.parameters()]
        tied = {name for names in self._tied for name in names}
        looked_up = sum(each.numel() for each in lookups)
        heads = sum(p.numel() for name, p in self.named_parameters() if name in tied)
        matrices = sum(p.numel() for p in self.parameters() if p.dim() > 1)
        attended = 4.0 * self.config.num_hidden_layers * self.config.hidden_size * sequence_length
        return 2.0 * (matrices - looked_up + heads) + attended / (2 if causal else 1)


def _to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """Return the parameter on the meta device, or None to keep one that already is there, since it may be tied."""
    if parameter is None or parameter.is_meta:
        return None
    return nn.Parameter(parameter.to("meta"), parameter.requires_grad)
