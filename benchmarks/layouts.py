"""What layouts cost: ranks of one machine against one rank, and against torch's own DistributedDataParallel.

    python benchmarks/layouts.py                                 every layout: some minutes on two cores
    python benchmarks/layouts.py --layouts dp2 --precisions fp32 --rounds 3

Every contender is a set of gloo ranks with one thread each, alive from the start; they take turns, a few steps each, so
that a ratio is taken within one round and the drift of a machine cancels. The work is the 17M model of
`training.py`, stepped by the trainer's own `train_step`. A bar is a share of what as many single ranks would do:

    dp2   tokens/s >= 0.9 x  2 x (one rank's tokens/s)            in bf16 0.92
    tp2   tokens/s >= 0.75 x 2 x (one rank's tokens/s)            in bf16 0.78
    pp2   tokens/s >= 0.85 x 2 x (one rank's tokens/s) x 8/9      eight micro-batches through two stages
    ep2   tokens/s >= 0.8 x  2 x (one rank's tokens/s)            both with a mixture of experts in place of the MLPs
    dp2   tokens/s >= 1.0 x  DistributedDataParallel in a plain loop
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

import environment  # noqa: E402
from ours import build_run, configure  # noqa: E402
from work import SIZES, Work  # noqa: E402

Step = Callable[[], float]  # one step of a rank; the loss of the whole layout


@dataclass(frozen=True)
class Layout:
    """`overrides` of the config; `share` is the part of its ranks' joint speed that the layout could reach at best.

    `bars`: for fp32 and for bf16. `mixture`: with experts, and compared with one rank that has them, too.
    """

    ranks: int
    overrides: tuple[str, ...] = ()
    micro_batches: int = 1
    bars: tuple[float | None, float | None] = (None, None)
    share: float = 1.0
    torch_ddp: bool = False
    mixture: bool = False


EXPERTS = {"is_mixtral_config": True, "num_local_experts": 8, "num_experts_per_tok": 2}  # each half as wide as the MLP
KEPT = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
LAYOUTS = {
    "one": Layout(1),
    "one_moe": Layout(1, mixture=True),
    "dp2": Layout(2, ("parallelism.dp=2",), bars=(0.9, 0.92)),
    "zero1": Layout(2, ("parallelism.dp=2", "optimizer.zero_stage=1")),
    "zero2": Layout(2, ("parallelism.dp=2", "optimizer.zero_stage=2")),
    "zero3": Layout(2, ("parallelism.dp=2", "optimizer.zero_stage=3")),
    "DDP": Layout(2, ("parallelism.dp=2",), torch_ddp=True),
    "tp2": Layout(2, ("parallelism.tp=2",), bars=(0.75, 0.78)),
    "pp2": Layout(
        2, ("parallelism.pp=2", "parallelism.pp_engine=1f1b"), micro_batches=8, bars=(0.85, 0.85), share=8 / 9
    ),
    "ep2": Layout(2, ("parallelism.dp=2", "parallelism.expert_parallel_size=2"), bars=(0.8, 0.8), mixture=True),
}


def main() -> None:
    arguments = parse()
    record: dict[str, Any] = {"machine": environment.machine(), "torch": torch.__version__, "rows": []}
    for precision in arguments.precisions:
        work = replace(SIZES[arguments.size], precision=precision)
        row = measure(work, arguments)
        record["rows"].append(row)
        show(row)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\nNumbers: {arguments.output}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [name for name, layout in LAYOUTS.items() if layout.ranks > 1]
    parser.add_argument("--layouts", nargs="+", choices=choices, default=choices)
    parser.add_argument("--size", choices=SIZES, default="17M")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turn-seconds", type=float, default=3.0, help="length of one turn of one contender")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "layouts.json")
    return parser.parse_args()


def measure(work: Work, arguments: argparse.Namespace) -> dict[str, Any]:
    """Start everybody, then let them take turns."""
    names = [_one(mixture) for mixture in sorted({LAYOUTS[name].mixture for name in arguments.layouts})]
    names += arguments.layouts
    if "dp2" in names and "DDP" not in names:
        names.append("DDP")
    contenders: list[Contender] = []
    try:
        for name in names:
            contenders.append(Contender(name, LAYOUTS[name], work))
        for contender in contenders:
            contender.warm_up(arguments.turn_seconds)
        for number in range(arguments.rounds):
            first = number % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                contender.take_turn()
            latest = ", ".join(f"{c.name} {c.speeds[-1]:.0f}" for c in contenders)
            print(f"  round {number + 1} of {arguments.rounds}, tokens/s: {latest}", flush=True)
    finally:
        for contender in contenders:
            contender.close()
    speeds = {contender.name: contender.speeds for contender in contenders}
    losses = {contender.name: contender.loss for contender in contenders}
    found = verdicts(speeds, work.precision)
    return {"work": vars(work), "tokens_per_sec": speeds, "first_loss": losses, "verdicts": found}


def verdicts(speeds: dict[str, list[float]], precision: str) -> list[dict[str, Any]]:
    """Each bar's ratio, the median over rounds, and its span."""

    def verdict(what: str, ratios: list[float], bar: float | None) -> dict[str, Any]:
        return {"what": what, "ratio": statistics.median(ratios), "span": [min(ratios), max(ratios)], "bar": bar}

    found = []
    for name, theirs in speeds.items():
        layout = LAYOUTS[name]
        if layout.ranks > 1:
            ideal = layout.ranks * layout.share
            ratios = [speed / (ideal * one) for speed, one in zip(theirs, speeds[_one(layout.mixture)], strict=True)]
            of = f"{layout.ranks} x one rank" + ("" if layout.share == 1 else " x the bubble's share")
            found.append(verdict(f"{name} / ({of})", ratios, layout.bars[precision == "bf16"]))
    if "dp2" in speeds:
        ratios = [ours / ddp for ours, ddp in zip(speeds["dp2"], speeds["DDP"], strict=True)]
        found.append(verdict("dp2 / DDP", ratios, 1.0))
    return found


def _one(mixture: bool) -> str:
    """The layout of one rank with the same model."""
    return "one_moe" if mixture else "one"


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['work']['name']} {row['work']['precision']}, one thread a rank, tokens/s (median of rounds)")
    for name, speeds in row["tokens_per_sec"].items():
        print(f"  {name:6} {statistics.median(speeds):8.0f}   first loss {row['first_loss'][name]:.5f}")
    for verdict in row["verdicts"]:
        low, high = verdict["span"]
        bar = ""
        if verdict["bar"] is not None:
            bar = f"  bar {verdict['bar']}: {'met' if verdict['ratio'] >= verdict['bar'] else 'MISSED'}"
        print(f"  {verdict['what']:42} {verdict['ratio']:.3f}  ({low:.3f} to {high:.3f}){bar}")


@dataclass
class Contender:
    """The ranks of one layout, forked from this process, waiting for their turn."""

    name: str
    layout: Layout
    work: Work
    steps: int = 1
    loss: float = 0.0
    speeds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(self.layout.ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, self.layout, self.work, self.folder.name, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, steps: int) -> tuple[float, float]:
        """(seconds, loss) of some steps: those of the slowest rank."""
        for pipe in self.pipes:
            pipe.send(steps)
        answers = [pipe.recv() for pipe in self.pipes]
        for answer in answers:
            if isinstance(answer, str):
                raise RuntimeError(f"{self.name}: a rank failed\n{answer}")
        return max(seconds for seconds, _ in answers), answers[0][1]

    def warm_up(self, turn_seconds: float) -> None:
        _, self.loss = self.ask(1)
        seconds, _ = self.ask(1)
        self.steps = max(1, round(turn_seconds / seconds))

    def take_turn(self) -> None:
        seconds, _ = self.ask(self.steps)
        dp = 2 if "parallelism.dp=2" in self.layout.overrides else 1
        tokens = self.work.tokens * self.layout.micro_batches * dp
        self.speeds.append(self.steps * tokens / seconds)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def serve(rank: int, layout: Layout, work: Work, folder: str, pipe: Any) -> None:
    """A rank: build, then do as many steps as it is told, again and again."""
    try:
        torch.set_num_threads(work.threads)
        if layout.ranks > 1:
            store = dist.FileStore(f"{folder}/store", layout.ranks)
            timeout = timedelta(seconds=300)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.ranks, timeout=timeout)
        step = torch_ddp(rank, work) if layout.torch_ddp else kenotron(layout, work)
        while True:
            steps = pipe.recv()
            if layout.ranks > 1:
                dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                loss = step()
            pipe.send((time.perf_counter() - begin, loss))
    except BaseException:
        pipe.send(traceback.format_exc())


def kenotron(layout: Layout, work: Work) -> Step:
    """The trainer's own step on the layout that the overrides name."""
    from kenotron.config import dump, load
    from kenotron.data import TokenBatch
    from kenotron.parallel.mesh import axes, build_mesh
    from kenotron.parallel.shared_memory import collectives_in_memory
    from kenotron.training.step import train_step

    settings = yaml.safe_load(dump(configure(work, compiled=False)))
    if layout.mixture:
        model = settings["model"]["model_config"]
        kept = {key: model[key] for key in KEPT}
        settings["model"]["model_config"] = kept | EXPERTS | {"intermediate_size": work.intermediate // 2}
    accumulation = f"tokens.batch_accumulation_per_replica={layout.micro_batches}"
    config = load(settings, [accumulation, *layout.overrides])
    mesh = build_mesh(axes(config, layout.ranks), layout.ranks, "cpu")
    run, memory = build_run(config, mesh), ExitStack()
    memory.enter_context(collectives_in_memory(mesh))

    def step(memory: ExitStack = memory) -> float:  # which stays open as long as the step is in use
        batches = []
        for _ in range(layout.micro_batches):
            tokens = draw(work, len(batches) * mesh.degree("batch") + mesh.rank("batch"))
            batches.append(TokenBatch(tokens[:, :-1], tokens[:, 1:], np.arange(len(tokens))))
        return train_step(run, batches).lm_loss

    return step


def torch_ddp(rank: int, work: Work) -> Step:
    """Torch's wrapper around the same model, in the loop that its documentation shows."""
    from torch.nn.parallel import DistributedDataParallel

    from kenotron.kernels.attention import attention
    from kenotron.models import Context
    from kenotron.parallel.mesh import build_mesh
    from kenotron.training.initial_weights import fill_weights
    from kenotron.training.model_parts import build_parts

    config = configure(work, compiled=False)
    parts, _ = build_parts(config, build_mesh({}, 1, "cpu"), torch.device("cpu"))
    fill_weights(parts, config.model.init_method, config.general.seed)
    model = DistributedDataParallel(parts[0], gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), work.learning_rate, work.betas, work.eps, work.weight_decay, fused=True
    )
    positions = torch.arange(work.sequence).repeat(work.micro_batch)
    ctx = Context((work.micro_batch, work.sequence), positions, attention, loss_scale=1 / work.tokens)

    def step() -> float:
        tokens = torch.from_numpy(draw(work, rank))
        loss, _ = model(tokens[:, :-1].reshape(-1), ctx, tokens[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    return step


def draw(work: Work, number: int) -> np.ndarray:
    """Micro-batch `number`: ``[micro_batch, sequence + 1]`` int64, the same in every step."""
    uniform = np.random.default_rng(number).random((work.micro_batch, work.sequence + 1))
    return (uniform**3 * work.vocab).astype(np.int64)


if __name__ == "__main__":
    main()
