"""Convert the state of a run to and from the format in which a checkpoint saves it: named tensors and JSON values.

The data position is the step, randomness is counter-based, the schedule is arithmetic: there is no other state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import Parameter

from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models import named_state
from kenotron.models.decoder import Decoder
from kenotron.parallel.ranks import run_on_rank0
from kenotron.parallel.shards import shard_of
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run

TENSOR = "kenotron.tensor"
"""The only key of a tensor's placeholder in a hook's JSON state; its value is the tensor's name."""


def model_tensors(*parts: Decoder, copy_buffers: bool = False) -> dict[str, TensorShard]:
    """Return name → this rank's block of a weight or saved buffer, sharing its memory, without vocabulary padding.

    `copy_buffers`: copy buffers, so that the next forward pass does not change the result.
    """
    tensors = dict(named_state(*parts))
    if copy_buffers:
        tensors |= {name: tensor.clone() for name, tensor in tensors.items() if not isinstance(tensor, Parameter)}
    return {name: _without_padding(name, tensor, parts[0]) for name, tensor in tensors.items()}


def optimizer_tensors(tensors: dict[str, Tensor], parts: Sequence[Decoder]) -> dict[str, TensorShard]:
    """Return ``state.<parameter>.<key>`` → this rank's block, sharing its memory, without vocabulary padding."""
    parameters = {key: key.removeprefix("state.").rpartition(".")[0] for key in tensors}
    return {key: _without_padding(parameters[key], tensor, parts[0]) for key, tensor in tensors.items()}


def _without_padding(name: str, tensor: Tensor, model: Decoder) -> TensorShard:
    """Return this rank's block of `tensor` without the rows beyond the vocabulary, whose number depends on tp.

    For 50 tokens padded to 64 rows, over 4 ranks: 16, 16, 16 and 2 rows of a [50, hidden] tensor.
    """
    shard = shard_of(tensor.detach())
    rows = model.config.vocab_size
    if name not in model.vocab_parameters or len(shard.shape) != 2 or shard.shape[0] <= rows:
        return shard
    return shard.up_to(rows)


def manifest_state(run: Run) -> dict[str, Any]:
    """Return the JSON values of `run` for a checkpoint's manifest: counters, data fingerprints. All ranks call it.

    `val_loss` is included on rank 0, which writes the manifest, if this step had a validation.
    """
    return {
        "step": run.step,
        "consumed_tokens": run.consumed_tokens,
        "consumed_train_samples": run.consumed_samples,
        "schedule_start": run.start.schedule_start,
        "data_start": run.start.data_start,
        "data": run_on_rank0(run.data.fingerprints),  # reads from every file, so not on a thousand ranks
        "held_out": run.data.held_out_hashes(),
        **{name: value for name, value in run.last_metrics.items() if name == "val_loss"},
    }


def hook_states(run: Run) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the states of hooks as JSON values, and the tensors in them by name.

    The state ``{"mean": tensor}`` of package.Class becomes ``{"mean": {"kenotron.tensor": "package.Class.mean"}}`` and
    ``{"package.Class.mean": tensor}``. Only rank 0's state is saved; other ranks add only their blocks of DTensors. For
    an engine in the background tensors are copied, because a hook may change its tensors at any time.
    """
    tensors: dict[str, Tensor] = {}

    def split(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: split(item, f"{name}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [split(item, f"{name}.{number}") for number, item in enumerate(value)]
        if not isinstance(value, Tensor):
            return value
        while name in tensors:  # a key with a dot in it
            name += "'"
        tensors[name] = value
        return {TENSOR: name}

    states = {name: state for name, hook in named_hooks(run.hooks) if (state := hook.state_dict())}
    described = {name: split(state, name) for name, state in states.items()}
    copy = Tensor.clone if run.checkpoints.engine.in_background else Tensor.detach
    saved = {name: value for name, value in tensors.items() if run.mesh.is_first or hasattr(value, "placements")}
    return described, {name: copy(value.detach()) for name, value in saved.items()}


def load_hook_states(hooks: Sequence[Hook], saved: dict[str, dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    """Load the states that `hook_states` returned into their hooks; hooks without a saved state are unchanged."""
    for name, hook in named_hooks(hooks):
        if name in saved:
            hook.load_state_dict(_joined(saved[name], tensors))


def _joined(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_joined(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        return tensors[value[TENSOR]]
    return {key: _joined(item, tensors) for key, item in value.items()}


def named_hooks(hooks: Sequence[Hook]) -> Iterator[tuple[str, Hook]]:
    """Yield every hook with its class's dotted path; a second hook of the same class is ``package.Class#2``."""
    seen: Counter[str] = Counter()
    for hook in hooks:
        name = f"{type(hook).__module__}.{type(hook).__qualname__}"
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), hook
