"""Evaluations in a process of their own that stays warm, at low priority, beside the run that saves the checkpoints.

    worker = Worker(settings, Path("logs/my_run/evaluation"))
    worker.answer(None)                 # {"ready": 3.1}: lm_eval is imported, the datasets are loaded
    worker.ask(Path("checkpoints/100"))
    worker.answer()                     # None for a while; then {"results": {"hellaswag": …}, "seconds": 4.2}

The process reads only files of the checkpoint and takes part in no collective, so training never waits for it. It ends
when its stdin does: with the process that started it, however that ends. Its folder has what it prints, and the
requests that were made of the datasets, which every evaluation of the run repeats. By srun, which passes on its stdin
and stdout, it is the same process in a job of its own, on a machine that trains nothing.
"""

import json
import os
import select
import shutil
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from kenotron.config.dotted import search_path
from kenotron.config.errors import InputError
from kenotron.config.evaluation import Evaluation
from kenotron.kernels.cores import cores_by_affinity
from kenotron.storage.background import stay_in_background
from kenotron.storage.hub import first_line

MAIN = "from kenotron.evaluation.worker import main; main()"
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Worker:
    """The process; `folder` is made for its output and requests."""

    def __init__(self, settings: Evaluation, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "output.log"
        environment = {name: value for name, value in os.environ.items() if name not in OF_RANKS}
        environment |= {"PYTHONPATH": search_path(), "LM_HARNESS_CACHE_PATH": str(folder.absolute())}
        command = [sys.executable, "-c", MAIN, settings.model_dump_json()]
        if settings.srun is not None:
            if shutil.which("srun") is None:
                raise InputError("evaluation.srun: srun was not found on rank 0's machine; expected Slurm, or null")
            options = (name if value is None else f"{name}={value}" for name, value in settings.srun.items())
            command = ["srun", "--ntasks=1", *(f"--{option}" for option in options), *command]
            # With those of the job that trains srun would start a step of that; SLURM_CONF says where Slurm is.
            of_job = [name for name in environment if name.startswith("SLURM_") and not name.startswith("SLURM_CONF")]
            environment = {name: value for name, value in environment.items() if name not in of_job}
        elif settings.device == "cpu":
            quarter = max(1, cores_by_affinity() // 4)  # the others are for training
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(quarter)}
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C on the terminal is for the training process
                bufsize=0,  # what is buffered is no longer in the pipe, where `answer` looks
            )

    def ask(self, checkpoint: Path) -> None:
        """Let it evaluate a checkpoint; `answer` tells what became of it, before the next one is asked for."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `answer` says so
            self._process.stdin.write(f"{checkpoint.absolute()}\n".encode())

    def answer(self, wait_s: float | None = 0) -> dict[str, Any] | None:
        """The next of its answers, "problem" says what went wrong; None: not within `wait_s` (None: without end)."""
        stdout = self._process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], wait_s)[0]:
            return None
        if line := stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        return {"problem": f"the process ended with exit code {code}; {self.output} has what it printed"}

    @property
    def ended(self) -> bool:
        """Whether the process is no more."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """End it now."""
        self._process.terminate()  # which srun passes on
        self._process.communicate()


def main() -> None:
    """The process: its argument is the section `evaluation`, its input the paths of checkpoints."""
    stay_in_background()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # lm_eval and datasets print, too
    import torch

    from kenotron.evaluation import evaluate
    from kenotron.evaluation.harness import Tasks

    settings, started = Evaluation.model_validate_json(sys.argv[1]), time.perf_counter()

    def answer(**found: object) -> None:
        print(json.dumps(found), file=answers, flush=True)

    try:
        tasks = Tasks(settings.tasks, settings.include_path, frozen=True)
        torch.empty(0, device=settings.device)
    except InputError as error:  # which names a key
        answer(problem=f"evaluation.{error}")
        return
    except (RuntimeError, AssertionError) as error:  # of torch
        answer(problem=f"evaluation.device: {settings.device}: {first_line(error)}")
        return
    answer(ready=time.perf_counter() - started)
    for line in sys.stdin:
        started = time.perf_counter()
        try:
            results = evaluate(
                line.rstrip("\n"),
                tasks,
                num_fewshot=settings.num_fewshot,
                limit=settings.limit,
                batch_size=settings.batch_size,
                device=settings.device,
                ema=settings.ema,
            )
        except Exception as error:  # of one checkpoint: the next may go well
            traceback.print_exc()
            answer(problem=str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}")
        else:
            answer(results=results, seconds=time.perf_counter() - started)
