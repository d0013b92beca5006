"""What a user might bring: hooks, an optimizer, a token source. Named in configs as ``user_parts.…``."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kenotron.checkpoint.durable import HashedFile
from kenotron.config.errors import InputError
from kenotron.training import Hook


def open_file(path: Path, size: int) -> HashedFile:
    """A writer of checkpoints' files."""
    return HashedFile(path)


class SlowStep(Hook):
    """Sleeps within every step, after its line of metrics was written."""

    priority = -15

    def __init__(self, seconds: float = 120) -> None:
        self.seconds = seconds

    def after_step(self, run: Any, result: Any) -> None:
        time.sleep(self.seconds)


class Leisurely(SlowStep):
    """Takes a tenth of a second after every step."""

    def __init__(self) -> None:
        super().__init__(0.1)


class Poison(Hook):
    """Puts NaN into a weight's gradient (by a hook on the tensor) at the given steps."""

    def __init__(self, steps: list[int], value: float = float("nan")) -> None:
        self.steps, self.value = steps, value
        self.handle: Any = None

    def before_step(self, run: Any) -> None:
        if run.step + 1 in self.steps:
            parameter = next(run.model.parameters())
            self.handle = parameter.register_post_accumulate_grad_hook(self._spoil)

    def _spoil(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.fill_(self.value)

    def after_step(self, run: Any, result: Any) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


def counting(sequence_length: int, seed: int, start: int = 0, rows: int = 1000) -> list[np.ndarray]:
    """A token source: sample i is i, i + 1, … modulo 64, from `start` on."""
    base = np.arange(sequence_length + 1, dtype=np.int64)
    return [(base + row + start) % 64 for row in range(rows)]


def counting_with_garbage(sequence_length: int, seed: int, garbage: list[int]) -> list[np.ndarray]:
    """The same with random tokens as the samples of these indices."""
    rows = counting(sequence_length, seed)
    for index in garbage:
        rows[index] = np.random.default_rng(index).integers(0, 64, sequence_length + 1)
    return rows


class Damage(Hook):
    """Multiplies a weight after the given step: every later loss is high."""

    priority = 70

    def __init__(self, step: int, factor: float = -4.0) -> None:
        self.step, self.factor = step, factor

    def after_step(self, run: Any, result: Any) -> None:
        if run.step == self.step:
            with torch.no_grad():
                run.model.get_parameter("model.norm.weight").mul_(self.factor)


class Spy(Hook):
    """Looks at what is computed in which type, and at which rate weights change."""

    def __init__(self) -> None:
        self.compute: set[torch.dtype] = set()
        self.gradients: set[torch.dtype] = set()
        self.rates: list[list[float]] = []

    def on_train_start(self, run: Any) -> None:
        from kenotron.models.blocks.linear import Linear

        for module in run.model.modules():
            if isinstance(module, Linear):
                module.register_forward_hook(self._look)

    def _look(self, module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self.compute |= {inputs[0].dtype, output.dtype}

    def before_update(self, run: Any) -> None:
        self.gradients |= {parameter.grad.dtype for parameter in run.model.parameters()}
        self.rates.append(sorted(group["lr"] for group in run.optimizer.param_groups))


class Gradients(Hook):
    """Keeps the gradients of the first step that it sees."""

    def __init__(self) -> None:
        self.first: dict[str, torch.Tensor] = {}

    def before_update(self, run: Any) -> None:
        self.first = self.first or {name: weight.grad.clone() for name, weight in run.model.named_parameters()}


class _NanInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


class SpoilModule(Hook):
    """In one step, on one rank, a module makes NaN of every second micro-batch, in forward or backward.

    `times` is how often; None: whenever the step is computed.
    """

    def __init__(self, module: str, step: int, where: str = "forward", rank: int = 0, times: int | None = None) -> None:
        self.module, self.step, self.where, self.times = module, step, where, times
        self.rank, self.calls = rank, 0
        self.handle: Any = None

    def before_step(self, run: Any) -> None:
        if run.mesh.rank("world") == self.rank and run.step + 1 == self.step:
            self.handle = run.model.get_submodule(self.module).register_forward_hook(self._spoil)

    def _spoil(self, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2 or (self.times is not None and self.calls > 2 * self.times):
            return output
        return _NanInBackward.apply(output) if self.where == "backward" else output * float("nan")

    def after_step(self, run: Any, result: Any) -> None:
        if self.handle is not None:
            self.handle.remove()
            self.handle = None


class InPlace(Hook):
    """The last norm changes its input in place, the output of the last block."""

    def on_train_start(self, run: Any) -> None:
        run.model.get_submodule("model.norm").register_forward_pre_hook(lambda module, inputs: inputs[0].add_(0.0))


class FlipBit(Hook):
    """Flips the lowest bit of a weight's first element on one rank after a step."""

    def __init__(self, weight: str, step: int, rank: int = 1) -> None:
        self.weight, self.step, self.rank = weight, step, rank

    def after_step(self, run: Any, result: Any) -> None:
        if run.step == self.step and run.mesh.rank("world") == self.rank:
            parameter = run.model.get_parameter(self.weight).detach()
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.view(torch.int32).view(-1)[0] ^= 1


class AtStep(Hook):
    """What the hooks below do in one step."""

    def __init__(self, step: int) -> None:
        self.step = step


class PoisonWeight(AtStep):
    """Puts NaN into a weight after the given step: every later loss is NaN."""

    def after_step(self, run: Any, result: Any) -> None:
        if run.step == self.step:
            with torch.no_grad():
                next(run.model.parameters()).fill_(float("nan"))


class LittleRoom(Hook):
    """From the given step on no file may grow beyond `bytes`, as on a full disk."""

    def __init__(self, step: int, bytes: int) -> None:
        self.step, self.bytes = step, bytes

    def before_step(self, run: Any) -> None:
        if run.step + 1 == self.step:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.bytes, self.bytes))


def counting_down(sequence_length: int, seed: int, rows: int = 1000) -> list[np.ndarray]:
    """Another token source, the other way."""
    return [63 - row for row in counting(sequence_length, seed, rows=rows)]


class Slow:
    """A token source that keeps a thread busy for a while."""

    seconds = 0.05

    def __init__(self, sequence_length: int, seed: int) -> None:
        self.rows, self.reads = counting(sequence_length, seed), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> np.ndarray:
        time.sleep(self.seconds)
        return self.rows[index]


class Trickle(Slow):
    """30 ms a sample."""

    seconds = 0.03


class LateOnce(Slow):
    """The tenth read takes some seconds."""

    def __init__(self, sequence_length: int, seed: int, seconds: float) -> None:
        super().__init__(sequence_length, seed)
        self.seconds = seconds

    def __getitem__(self, index: int) -> np.ndarray:
        self.reads += 1
        if self.reads == 10:
            time.sleep(self.seconds)
        return self.rows[index]


class Hanging(Slow):
    """Reads hang after the twelfth, perhaps on one rank only, and leave the file `hanging`."""

    def __init__(self, sequence_length: int, seed: int, rank: int | None = None) -> None:
        super().__init__(sequence_length, seed)
        self.hangs = rank is None or int(os.environ.get("RANK", "0")) == rank

    def __getitem__(self, index: int) -> np.ndarray:
        self.reads += 1
        if self.hangs and self.reads > 12:
            Path("hanging").touch()
            time.sleep(1000)
        return self.rows[index]


class Threads(Hook):
    """Counts the loader's threads while the run goes on."""

    def __init__(self) -> None:
        self.most = 0

    def before_step(self, run: Any) -> None:
        names = [thread.name for thread in threading.enumerate()]
        self.most = max(self.most, sum(name.startswith("kenotron-loader") for name in names))


class OftenStopped(Hook):
    """Another process stops rank 1 again and again: most of the time."""

    def on_train_start(self, run: Any) -> None:
        if run.mesh.rank("world") == 1:
            stop = "import os, signal, sys, time\npid = int(sys.argv[1])\nwhile os.getppid() == pid:\n"
            for name, seconds in (("SIGSTOP", 0.02), ("SIGCONT", 0.002)):
                stop += f"    os.kill(pid, signal.{name}); time.sleep({seconds})\n"
            self.process = subprocess.Popen([sys.executable, "-c", stop, str(os.getpid())])

    def on_train_end(self, run: Any) -> None:
        if run.mesh.rank("world") == 1:
            self.process.kill()
            self.process.wait()
            os.kill(os.getpid(), signal.SIGCONT)


class Broken(Hook):
    def after_step(self, run: Any, result: Any) -> None:
        raise RuntimeError("this hook is broken")


class Measures(Hook):
    """Records a number in every step, another at the start of the run, and one of all ranks."""

    def __init__(self, name: str = "twice_the_loss") -> None:
        self.name = name

    def on_train_start(self, run: Any) -> None:
        run.record_metric("parameters", sum(parameter.numel() for parameter in run.model.parameters()))

    def after_step(self, run: Any, result: Any) -> None:
        run.record_metric(self.name, 2 * result.lm_loss)
        run.record_metric("mean_rank", run.mesh.rank("batch"), reduce="mean")
        run.record_metric("highest_rank", run.mesh.rank("batch"), reduce="max")


class StopAt(AtStep):
    """Asks the run to stop after a step."""

    def after_step(self, run: Any, result: Any) -> None:
        if run.step == self.step:
            run.stop("enough")


class Recorder(Hook):
    """Writes every moment down, with the step; `seen` survives a restart."""

    def __init__(self, name: str = "") -> None:
        self.name, self.moments, self.seen = name, [], 0

    def on_train_start(self, run: Any) -> None:
        self.moments.append(f"on_train_start {run.step}")

    def before_step(self, run: Any) -> None:
        self.moments.append(f"before_step {run.step}")

    def before_update(self, run: Any) -> None:
        self.norm = float(torch.stack([p.grad.square().sum() for p in run.model.parameters()]).sum().sqrt())
        self.moments.append(f"before_update {run.step}")

    def after_step(self, run: Any, result: Any) -> None:
        assert all(parameter.grad is None for parameter in run.model.parameters())
        self.seen += 1
        self.moments.append(f"after_step {run.step}")

    def after_validation(self, run: Any, result: Any) -> None:
        self.moments.append(f"after_validation {run.step}")

    def on_save(self, run: Any, path: Any) -> None:
        assert (path / "manifest.json").exists()
        self.moments.append(f"on_save {path.name}")

    def on_train_end(self, run: Any) -> None:
        self.moments.append(f"on_train_end {run.step}")

    def on_error(self, run: Any, error: Exception) -> None:
        self.moments.append(f"on_error {run.step} {error}")

    def on_close(self, run: Any) -> None:
        self.moments.append("on_close")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["name"] == self.name
        self.seen = state["seen"]


class Averages(Hook):
    """A moving average of the weights, in whose state there are tensors at several places. Changed in `before_step`,
    while an engine in the background copies."""

    def __init__(self) -> None:
        self.average: dict[str, torch.Tensor] = {}
        self.count = 0

    def before_step(self, run: Any) -> None:
        self.count += 1
        for name, parameter in run.model.named_parameters():
            value = parameter.detach().to(torch.float32, copy=True)
            self.average[name] = self.average[name].mul_(0.5).add_(value, alpha=0.5) if name in self.average else value

    def state_dict(self) -> dict[str, Any]:
        count = torch.tensor(self.count, dtype=torch.int32)
        return {"average": self.average, "counts": [self.count, (count, None)], "a.b": count, "a": {"b": count + 1}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, (self.count, (count, nothing)) = state["average"], state["counts"]
        assert (nothing, count.dtype, count.shape) == (None, torch.int32, ())
        assert (int(state["a.b"]), int(state["a"]["b"])) == (int(count), int(count) + 1) == (self.count, self.count + 1)


def slowly(sequence_length: int, seed: int) -> list[np.ndarray]:
    """A token source that takes its time to open, and leaves the file `opening` when it begins."""
    Path("opening").touch()
    time.sleep(200)
    return counting(sequence_length, seed)


class TerminateIn(AtStep):
    """Sends SIGTERM to its own process within a step."""

    def before_step(self, run: Any) -> None:
        if run.step + 1 == self.step:
            signal.raise_signal(signal.SIGTERM)


class OnRank(Hook):
    """On one rank, after a step, once if that is a path: raise an error, die by a signal, or sleep for ever."""

    def __init__(self, what: str, rank: int = 1, step: int = 2, once: str | None = None) -> None:
        self.what, self.step, self.once = what, step, once
        self.here = int(os.environ.get("RANK", "0")) == rank

    def after_step(self, run: Any, result: Any) -> None:
        if not self.here or run.step != self.step or (self.once is not None and Path(self.once).exists()):
            return
        if self.once is not None:
            Path(self.once).touch()
        if self.what == "raise":
            raise RuntimeError("this hook is broken on one rank")
        if self.what == "sleep":
            time.sleep(1000)
        os.kill(os.getpid(), getattr(signal, self.what))


class HangOnSignal(Hook):
    """Hangs in Python, at whatever line that is, when its process receives SIGUSR2."""

    def on_train_start(self, run: Any) -> None:
        signal.signal(signal.SIGUSR2, lambda *_: time.sleep(1000))


class CutShort(Hook):
    """On rank 1, after the second step: a file that is mapped is cut short, and read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def after_step(self, run: Any, result: Any) -> None:
        if os.environ.get("RANK") == "1" and run.step == 2:
            mapped = np.memmap(self.path, mode="r")
            os.truncate(self.path, 1000)
            mapped.sum()


class WaitsForTheWriter(Hook):
    """Waits after every step until its checkpoint is complete: tiny steps are shorter than a save in the background."""

    priority = -60

    def after_step(self, run: Any, result: Any) -> None:
        while not run.checkpoints.engine.settled():
            time.sleep(0.01)


class WrongInput(Hook):
    """Every rank finds that the input is wrong."""

    def on_train_start(self, run: Any) -> None:
        raise InputError("general.hooks: expected another one, found this one")


def late(sequence_length: int, seed: int, rank: int, seconds: float) -> list[np.ndarray]:
    """A token source that one rank needs a while to open."""
    if int(os.environ.get("RANK", "0")) == rank:
        time.sleep(seconds)
    return counting(sequence_length, seed)


def forgets_to_sum(root, blocks, mesh, *, zero_stage, compute_dtype, cpu_offload, bucket_cap_mb):
    """A data-parallel strategy with a mistake: no gradient is summed over the ranks."""


def halves_a_gradient(root, blocks, mesh, *, zero_stage, compute_dtype, cpu_offload, bucket_cap_mb):
    """A data-parallel strategy with a mistake: backward loses half of what reaches the first layer's first norm."""
    norm = blocks[0].get_submodule("input_layernorm")
    norm.register_forward_hook(lambda module, inputs, output: output / 2 + output.detach() / 2)


def smoothed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss: cross entropy with some probability for every other token."""
    return torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """A loss that returns the mean, where one number for every token is expected."""
    return torch.nn.functional.cross_entropy(logits, labels)


def half_life(elapsed: int, decay_steps: int) -> float:
    """A decay: half after every two steps."""
    return 0.5 ** (elapsed / 2)
