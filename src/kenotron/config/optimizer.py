"""`optimizer`: the update rule, learning-rate schedule, weight decay and gradient clipping."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Tag
from pydantic_core import PydanticCustomError

from kenotron.config.section import Section, by_rule, key, our_key


def _regex(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise PydanticCustomError("expected", f"a regular expression ({error})") from error
    return value


Regex = Annotated[str, AfterValidator(_regex)]


_FACTORY_TAGS = {name: f"({name})" for name in ("adamW", "sgd", "lion", "muon", "normuon", "soap")}


def _any_case(value: Any) -> Any:
    """Return `adamW` for `AdamW` and `adamw`, and so on; other values stay as they are."""
    names = {name.lower(): name for name in _FACTORY_TAGS}
    return names.get(value.lower(), value) if isinstance(value, str) else value


ANY_CASE = BeforeValidator(_any_case)


class _AdamKeys(Section):
    adam_eps: float = key("Added to the square root of the second moment.", 1e-8, ge=0)
    adam_beta1: float = key("Decay of the first moment.", 0.9, ge=0, lt=1)
    adam_beta2: float = key("Decay of the second moment.", 0.95, ge=0, lt=1)
    torch_adam_is_fused: bool = key("Use torch's fused kernel.", True)


class AdamW(_AdamKeys):
    """Adam with decoupled weight decay (Loshchilov & Hutter, 2019)."""

    name: Annotated[Literal["adamW"], ANY_CASE] = key("Selects AdamW.", "adamW")


class SGD(Section):
    """Stochastic gradient descent."""

    name: Annotated[Literal["sgd"], ANY_CASE] = key("Selects SGD.", "sgd")
    momentum: float = our_key("Decay of the velocity; 0: plain SGD.", 0.0, ge=0, lt=1)
    nesterov: bool = our_key("Use Nesterov momentum.", False)


class Lion(Section):
    """The sign of interpolated momentum (Chen et al., 2023); half of Adam's state, a tenth to a third of its rate."""

    name: Annotated[Literal["lion"], ANY_CASE] = our_key("Selects Lion.", "lion")
    lion_beta1: float = our_key("Weight of the momentum in the direction of a step.", 0.9, ge=0, lt=1)
    lion_beta2: float = our_key("Decay of the momentum.", 0.99, ge=0, lt=1)


class Muon(_AdamKeys):
    """Orthogonalized momentum for hidden matrices (Jordan et al., 2024); AdamW for everything else."""

    name: Annotated[Literal["muon"], ANY_CASE] = our_key("Selects Muon.", "muon")
    muon_momentum: float = our_key("Momentum decay for hidden matrices.", 0.95, ge=0, lt=1)
    muon_nesterov: bool = our_key("Use Nesterov momentum for hidden matrices.", True)
    muon_ns_steps: int = our_key("Newton-Schulz iterations of the orthogonalization.", 5, ge=1)
    muon_learning_rate_scale: float = our_key(
        "Ratio of the learning rate of hidden matrices to that of all other parameters.", 1.0, gt=0
    )
    muon_scale: Literal["match_rms_adamw", "original", "unit_rms_norm"] = our_key(
        "Factor on the update of a matrix, rows x columns. match_rms_adamw: 0.2 sqrt(max(rows, columns)), the size of "
        "AdamW's steps; original: sqrt(max(1, rows / columns)); unit_rms_norm: sqrt(rows / columns).",
        "match_rms_adamw",
    )


class NorMuon(Muon):
    """Muon whose rows are divided by the root of their mean square over time (Li et al., 2025)."""

    name: Annotated[Literal["normuon"], ANY_CASE] = our_key(  # type: ignore[assignment]
        "Selects NorMuon.", "normuon"
    )
    normuon_beta2: float = our_key("Decay of the rows' mean squares.", 0.95, ge=0, lt=1)


class Soap(_AdamKeys):
    """Adam in the eigenbasis of Shampoo for hidden matrices (Vyas et al., 2024); AdamW for everything else."""

    name: Annotated[Literal["soap"], ANY_CASE] = our_key("Selects SOAP.", "soap")
    soap_beta1: float = our_key("Decay of the first moment of hidden matrices.", 0.95, ge=0, lt=1)
    soap_beta2: float = our_key("Decay of their second moment and of their covariances.", 0.95, ge=0, lt=1)
    soap_precondition_frequency: int = our_key("Steps between eigenbases.", 10, ge=1)


TORCH = ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")


def _dotted(name: Any) -> Any:
    """Return ``torch.optim.RMSprop`` for `rmsprop` and `RMSprop`, and so on; other names stay as they are."""
    matches = [optimizer for optimizer in TORCH if isinstance(name, str) and optimizer.lower() == name.lower()]
    return f"torch.optim.{matches[0]}" if matches else name


class CustomOptimizer(Section):
    """Any `torch.optim.Optimizer` class: of torch by its name, of another package or your own by dotted path."""

    name: Annotated[str, BeforeValidator(_dotted)] = our_key(
        f"{', '.join(TORCH)}, or the dotted path of a class. Under tp, ZeRO and a padded vocabulary it must be "
        "elementwise: known to be, or a class with `elementwise = True`."
    )
    kwargs: dict[str, Any] = our_key("Keyword arguments in addition to params, lr and weight_decay.", {})


def _choose_factory(value: Any) -> str | None:
    if not isinstance(value, dict):
        tag = _FACTORY_TAGS.get(getattr(value, "name", ""))
        return "(custom)" if tag is None and isinstance(value, CustomOptimizer) else tag
    name = value.get("name")
    if name is None:  # nanotron's rule: AdamW if there are Adam's keys, else SGD
        return "(adamW)" if any(k in value for k in _AdamKeys.model_fields) else "(sgd)"
    if isinstance(name, str) and "." in _dotted(name):
        return "(custom)"
    return _FACTORY_TAGS.get(_any_case(name)) if isinstance(name, str) else None


_factory_rule = by_rule(
    _choose_factory,
    f"a name among {', '.join((*_FACTORY_TAGS, *TORCH))}, or the dotted path of an optimizer class",
    (*_FACTORY_TAGS, *TORCH),
)
OptimizerFactory = Annotated[
    Annotated[AdamW, Tag("(adamW)")]
    | Annotated[SGD, Tag("(sgd)")]
    | Annotated[Lion, Tag("(lion)")]
    | Annotated[Muon, Tag("(muon)")]
    | Annotated[NorMuon, Tag("(normuon)")]
    | Annotated[Soap, Tag("(soap)")]
    | Annotated[CustomOptimizer, Tag("(custom)")],
    _factory_rule,
]


DECAY_STYLES = ("linear", "cosine", "1-sqrt", "sqrt", "constant", "step")


def _choose_decay(value: Any) -> str | None:
    if value in DECAY_STYLES:
        return "(style)"
    return "(dotted)" if isinstance(value, str) and "." in value else None


DecayStyle = Annotated[
    Annotated[Literal["linear", "cosine", "1-sqrt", "sqrt", "constant", "step"], Tag("(style)")]
    | Annotated[str, Tag("(dotted)")],
    by_rule(_choose_decay, f"one of {', '.join(DECAY_STYLES)}, or the dotted path of a function", DECAY_STYLES),
]


class LearningRateScheduler(Section):
    """Warm up, hold until `lr_decay_starting_step`, decay for `lr_decay_steps`, stay at `min_decay_lr`.

    WSD (warm-up, stable, decay) is any decay style with a late `lr_decay_starting_step`.
    """

    learning_rate: float = key("Highest learning rate.", gt=0)
    lr_warmup_steps: int = key("Steps of the warm-up.", 0, ge=0)
    lr_warmup_style: Literal["linear", "constant"] = key(
        "linear: warm up from zero; constant: the full rate from the start.", "linear"
    )
    lr_decay_style: DecayStyle = key(
        "Shape of the decay; sqrt (inverse square root), constant and step are not in nanotron. Or the dotted path of "
        "a function f(elapsed, decay_steps) that returns the factor on learning_rate `elapsed` steps into the decay.",
        "linear",
    )
    lr_decay_steps: int | None = key("Steps of the decay; null: until the end of the run.", None, ge=0)
    lr_decay_starting_step: int | None = key("First step of the decay; null: the end of the warm-up.", None, ge=0)
    min_decay_lr: float | None = key(
        "Learning rate after the decay; null: learning_rate (no decay), or 0 with sqrt, step and a dotted path.",
        None,
        ge=0,
    )
    lr_step_size: int | None = our_key("Steps between drops, for lr_decay_style step.", None, ge=1)
    lr_step_gamma: float = our_key("Factor of each drop, for lr_decay_style step.", 0.1, gt=0, le=1)

    @property
    def decay_start(self) -> int:
        """`lr_decay_starting_step`, with its default filled in."""
        return self.lr_warmup_steps if self.lr_decay_starting_step is None else self.lr_decay_starting_step

    @property
    def final_lr(self) -> float:
        """`min_decay_lr`, with its default filled in."""
        return self.learning_rate if self.min_decay_lr is None else self.min_decay_lr

    def decay_steps(self, train_steps: int) -> int:
        """Return `lr_decay_steps`, with its default for a run of `train_steps` filled in."""
        return max(train_steps - self.decay_start, 0) if self.lr_decay_steps is None else self.lr_decay_steps


class ParamGroup(Section):
    """Settings of the parameters whose name matches a pattern; the first match wins."""

    pattern: Regex = our_key("Regular expression that is searched for in the parameter's name.")
    learning_rate_scale: float = our_key("Factor on the learning rate; 0 freezes the parameters.", 1.0, ge=0)
    init_std_scale: float = our_key(
        "Factor on the standard deviation that its initial weights are drawn with.", 1.0, ge=0
    )
    weight_decay: float | None = our_key("Weight decay of the group; null: the optimizer's.", None, ge=0)
    optimizer_factory: OptimizerFactory | None = our_key(
        "Update rule of the group; null: optimizer.optimizer_factory.", None
    )
    learning_rate_scheduler: LearningRateScheduler | None = our_key(
        "Learning rate of the group over time; null: optimizer.learning_rate_scheduler.", None
    )


class Spikes(Section):
    """Skip the update of a step whose loss or gradient norm is far above that of the steps before."""

    z_score: float = our_key("A spike is this many standard deviations above the window's mean.", 6.0, gt=0)
    window: int = our_key("Previous steps that a step is compared with; before that many, no check.", 128, ge=2)
    snapshot_every: int = our_key("Steps between copies of weights and optimizer in host memory.", 50, ge=1)
    max_rollbacks: int = our_key("How often a run returns to the same copy before it ends.", 3, ge=0)


class Optimizer(Section):
    """Update rule, weight decay, clipping and learning-rate schedule."""

    optimizer_factory: OptimizerFactory = key("The update rule.")
    zero_stage: Literal[0, 1, 2, 3, "hybrid"] | None = key(
        "What is sharded over data-parallel ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also weights, "
        "hybrid all of it within groups of parallelism.dp_shard ranks. No effect at dp 1. null: 0, or as set by "
        "parallelism.strategy.",
        None,
    )
    weight_decay: float = key("Decoupled weight decay; sgd and optimizers by dotted path use torch's own.", ge=0)
    clip_grad: float | None = key("Maximum global gradient norm; null: no clipping.", gt=0)
    accumulate_grad_in_fp32: bool = key(
        "Keep weights, gradients and the optimizer's state in fp32 while the model computes in model.dtype; false: all "
        "in model.dtype."
    )
    stochastic_rounding: bool = our_key(
        "Round updates of bf16 weights up or down at random, in proportion: small ones are not lost. For adamW.", False
    )
    ema_decay: float | None = our_key(
        "Decay of an exponential moving average of the weights; null: keep none.", None, gt=0, lt=1
    )
    learning_rate_scheduler: LearningRateScheduler = key("The learning rate over time.")
    weight_decay_exclude_named_params: list[Regex] | None = key(
        "Regular expressions, matched from the start of the parameter name; matching parameters get no weight decay.",
        None,
    )
    param_groups: list[ParamGroup] | None = our_key(
        "Settings for groups of parameters; the first pattern that matches wins.", None
    )
    skip_nonfinite_steps: int = our_key(
        "Consecutive steps with a non-finite loss or gradient that are skipped before the run stops.", 10, ge=0
    )
    spikes: Spikes | None = our_key("Skip steps with spikes of loss or gradient norm; null: never.", None)

    def group_of(self, name: str) -> ParamGroup:
        """Return the first group whose pattern matches the parameter `name`, or a group of defaults."""
        matches = (group for group in self.param_groups or () if re.search(group.pattern, name))
        return next(matches, ParamGroup(pattern=""))

    @property
    def factories(self) -> list[tuple[str, OptimizerFactory]]:
        """(config key, update rule) of all parameters, then of the groups that have their own."""
        return [("optimizer.optimizer_factory", self.optimizer_factory), *self._of_groups("optimizer_factory")]

    @property
    def schedules(self) -> list[tuple[str, LearningRateScheduler]]:
        """(config key, schedule) of all parameters, then of the groups that have their own."""
        key = "learning_rate_scheduler"
        return [(f"optimizer.{key}", self.learning_rate_scheduler), *self._of_groups(key)]

    def _of_groups(self, name: str) -> list[tuple[str, Any]]:
        values = [getattr(group, name) for group in self.param_groups or ()]
        return [(f"optimizer.param_groups.{i}.{name}", value) for i, value in enumerate(values) if value is not None]
