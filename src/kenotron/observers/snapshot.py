"""A copy in host memory of the state that a step changes: this rank's shards of weights and optimizer.

    snapshot = Snapshot()
    snapshot.take(run)             # after step 50
    …                              # steps 51 to 57
    snapshot.restore(run)          # weights, moments and counters of step 50, to the bit; `run.step` stays 57

Data order and randomness need no copy: they are functions of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kenotron.models import named_parameters
from kenotron.observers.expert_load import ExpertLoad
from kenotron.observers.module_buffers import saved_buffers
from kenotron.parallel import data as data_parallel
from kenotron.parallel.shards import shard_of
from kenotron.training.expert_loads import mixtures

if TYPE_CHECKING:
    from kenotron.training.run import Run


class Snapshot:
    """The state after step `step`, which `take` replaces in place: memory is allocated once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.optimizer: dict[str, dict[str, Any]] = {}

    @torch.no_grad()
    def take(self, run: Run) -> None:
        """Copy the current state."""
        self.step = run.step
        for name, tensor in _tensors(run):
            self._copy(name, tensor)
        self.optimizer = {
            name: {
                key: self._copy(f"state.{name}.{key}", value) if isinstance(value, Tensor) else deepcopy(value)
                for key, value in run.optimizer.state[parameter].items()
            }
            for name, parameter in named_parameters(*run.parts)
            if parameter in run.optimizer.state
        }

    @torch.no_grad()
    def restore(self, run: Run) -> None:
        """Restore the copied state, after pending copies of a checkpoint."""
        run.checkpoints.fence()
        for name, tensor in _tensors(run):
            tensor.copy_(self.tensors[name])
        for name, parameter in named_parameters(*run.parts):
            if name not in self.optimizer:  # copied before the first update, which creates the state
                run.optimizer.state.pop(parameter, None)
                continue
            state = run.optimizer.state[parameter]
            for key, value in self.optimizer[name].items():
                if isinstance(value, Tensor):
                    _local(state[key]).copy_(value)
                else:
                    state[key] = deepcopy(value)
        if run.pipeline is not None:
            run.pipeline.share_tied_weights()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = _local(tensor)
        if name not in self.tensors:
            self.tensors[name] = torch.empty_like(local, device="cpu", memory_format=torch.contiguous_format)
        return self.tensors[name].copy_(local)


def _tensors(run: Run) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's shards of the weights, the experts' loads for the next step's loss, and modules' buffers."""
    for module in run.roots:
        data_parallel.reshard_params(module)
    for name, parameter in named_parameters(*run.parts):
        yield name, _local(parameter)
    for layer, mixture in mixtures(run):
        yield f"previous load of layer {layer}", mixture.previous_load
    for hook in run.hooks:  # the loads of all pipeline stages, for checkpoints
        if isinstance(hook, ExpertLoad) and hook.previous_load is not None:
            yield "previous loads", hook.previous_load
    yield from saved_buffers(run).items()


def _local(tensor: Tensor) -> Tensor:
    return shard_of(tensor.detach()).tensor
