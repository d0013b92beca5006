"""`kenotron data tokenize --executor`: the shards of one command spread over datatrove's tasks.

    here           plan.json, N tasks ──▶ datatrove: processes (local), an array of jobs (Slurm), actors (Ray)
    task r of N    shards r, r + N, r + 2N … ──▶ 00000.ds and .unfinished/00000.json, as the plain command makes them
    the last one   all shards have notes ──▶ manifest.json

A shard is a function of the input, so the bytes are the plain command's for any number of tasks. What a task left
undone the same command makes, on any executor or on none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datatrove.executor import LocalPipelineExecutor, SlurmPipelineExecutor
from datatrove.executor.base import PipelineExecutor
from datatrove.pipeline.base import PipelineStep

from kenotron.config.errors import InputError, counted, nearest
from kenotron.data.manifest import Json
from kenotron.prepare.tokenize import (
    Tokenization,
    TokenizeOptions,
    begin,
    finish,
    finished,
    lock_output,
    make_folder,
    make_shards,
    missing_shards,
)
from kenotron.text.progress import Report
from kenotron.text.tokenizer import load_tokenizer

EXECUTORS = ("local", "slurm", "ray")
FAILED = "failed"  # the folder of the logs where a task that fails says why


@dataclass(frozen=True)
class Cluster:
    """Where tasks run. `tasks` 0: one a shard; `workers`: tasks at once, 0: all."""

    executor: str
    tasks: int = 0
    workers: int = 0
    partition: str | None = None
    time: str | None = None
    sbatch: dict[str, str] = field(default_factory=dict)
    """More of sbatch's options, without dashes."""


def tokenize_on(
    cluster: Cluster,
    inputs: Sequence[str],
    tokenizer: str,
    output: Path,
    options: TokenizeOptions,
    report: Report = print,
) -> Json | None:
    """As `tokenize.tokenize`, by datatrove's tasks; None where they go on without this process.

    Datatrove's logs lie in ``<output>.logs``. Raises InputError for what is wrong with the inputs or the cluster's
    options; a shard that was not made.
    """
    _check(cluster)
    work = Tokenization.plan(inputs, load_tokenizer(tokenizer), output, options)
    if (done := finished(work, output)) is not None:
        report(f"{output} is done already")
        return done
    make_folder(output)
    with lock_output(output, report):
        begin(work, output)
    logs = output.absolute().with_name(f"{output.name}.logs")
    shutil.rmtree(logs / FAILED, ignore_errors=True)
    step = ShardTokenizer(inputs, tokenizer, output, options, logs / FAILED)
    tasks = min(cluster.tasks or len(work.shards), len(work.shards))
    executor = _executor(cluster, step, tasks, logs)
    try:
        executor.run()
    except subprocess.CalledProcessError as error:  # its message is on the terminal
        raise InputError(f"--executor {cluster.executor}: {error.cmd[0]} refused the job") from None
    finally:
        if cluster.executor == "ray":
            import ray

            ray.shutdown()  # which prints what is left of the tasks' output: an error comes after it
    if cluster.executor == "slurm":
        report(f"{counted(tasks, 'task')} submitted to Slurm; {output}/manifest.json is written when all are done")
        return None
    if (done := finished(work, output)) is None:
        missing = len(missing_shards(work, output))
        raise InputError(
            f"{output}: {missing} of {counted(len(work.shards), 'shard')} missing{_first_failure(logs / FAILED)}; run "
            f"the same command again to continue; logs: {logs}"
        )
    return done


def _first_failure(failed: Path) -> str:
    """What the first task that failed left in `failed`: Ray's executor tells no more than how many did."""
    notes = sorted(failed.glob("*"))
    if not notes:
        return ""
    return f"; {counted(len(notes), 'task')} failed, the first (task {int(notes[0].name)}): {notes[0].read_text()}"


class ShardTokenizer(PipelineStep):
    """Task `rank` of `world_size` makes every `world_size`-th shard, and the manifest if it is the last."""

    name = "shards"
    type = "Kénotron"

    def __init__(
        self, inputs: Sequence[str], tokenizer: str, output: Path, options: TokenizeOptions, failed: Path | None = None
    ) -> None:
        super().__init__()
        self.inputs, self.tokenizer, self.output, self.options = list(inputs), tokenizer, output, options
        self.folder = os.getcwd()  # what the paths are relative to
        self.failed = failed

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Called by datatrove in every task; a file in `failed` keeps why one ended."""
        os.chdir(self.folder)
        try:
            return self._run(data, rank, world_size)
        except Exception as error:
            if self.failed is not None:
                self.failed.mkdir(parents=True, exist_ok=True)
                name = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
                (self.failed / f"{rank:05d}").write_text(f"{name}{error}")
            raise

    def _run(self, data: Any, rank: int, world_size: int) -> Any:
        work = Tokenization.plan(self.inputs, load_tokenizer(self.tokenizer), self.output, self.options)
        if finished(work, self.output) is not None:
            return data
        begin(work, self.output)
        mine = [shard for shard in missing_shards(work, self.output) if shard.number % world_size == rank]
        if mine:
            make_shards(work, self.output, mine, 1, _say)
        try:
            with lock_output(self.output, _say):
                if finished(work, self.output) is None and not missing_shards(work, self.output):
                    finish(work, self.output)
        except FileNotFoundError:  # by then another task had finished all
            if finished(work, self.output) is None:
                raise
        return data


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- datatrove's executors ---------------------------------------------------------------------------------


def _check(cluster: Cluster) -> None:
    name = cluster.executor
    if name not in EXECUTORS:
        raise InputError(f"--executor: expected {', '.join(EXECUTORS)}, found '{name}'{nearest(name, EXECUTORS)}")
    slurm = {"--partition": cluster.partition, "--time": cluster.time, "--sbatch": cluster.sbatch}
    for option, value in slurm.items():
        if name != "slurm" and value:
            raise InputError(f"{option}: expected only with --executor slurm, found with {name}")
        if name == "slurm" and option != "--sbatch" and not value:
            raise InputError(f"{option}: missing; --executor slurm needs it")
    if name == "slurm" and shutil.which("sbatch") is None:
        raise InputError("--executor slurm: sbatch was not found; run the command on a machine that submits jobs")
    if name == "ray" and find_spec("ray") is None:
        raise InputError("--executor ray: ray is not installed; pip install ray")


def _executor(cluster: Cluster, step: PipelineStep, tasks: int, logs: Path) -> PipelineExecutor:
    """Finished tasks are recognized by their shards, not by datatrove's completion files."""
    common: dict[str, Any] = {"pipeline": [step], "tasks": tasks, "logging_dir": str(logs), "skip_completed": False}
    if cluster.executor == "local":
        return LocalPipelineExecutor(workers=min(cluster.workers or tasks, tasks), **common)
    if cluster.executor == "slurm":
        return SlurmPipelineExecutor(
            workers=cluster.workers or -1,
            partition=str(cluster.partition),
            time=str(cluster.time),
            job_name="kenotron-tokenize",
            qos=None,  # type: ignore[arg-type]
            # The tasks find this Python's commands, whether or not its environment is active here.
            env_command=f'export PATH="{Path(sys.executable).parent}:$PATH"',
            sbatch_args=cluster.sbatch,
            **common,
        )
    import ray
    from datatrove.executor import RayPipelineExecutor

    try:
        ray.init(ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        where = os.environ.get("RAY_ADDRESS", "this machine")
        reason = str(error).splitlines()[0]
        raise InputError(f"--executor ray: no cluster at {where} (RAY_ADDRESS): {reason}") from None
    return RayPipelineExecutor(workers=cluster.workers or -1, **common)
