"""Evaluate checkpoints in a persistent process of low priority beside the run that saves them.

    worker = Worker(settings, Path("logs/my_run/evaluation"))
    worker.answer(None)                 # {"ready": 3.1}: lm_eval is imported, the datasets are loaded
    worker.ask(Path("checkpoints/100"))
    worker.answer()                     # None for a while; then {"results": {"hellaswag": …}, "seconds": 4.2}

The process only reads files of the checkpoint and takes part in no collective, so training never waits for it. It ends
when its stdin is closed, as after any end of its parent. Its folder has its output, and a cache of the datasets'
requests, which every evaluation of the run repeats. With srun, which forwards stdin and stdout, the same process runs
in a separate job, on a machine without training.
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
    """Starts and controls the process; `folder` is created for its output and requests."""

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
            # With the training job's variables, srun would start a step of that job; Slurm itself needs SLURM_CONF.
            of_job = [name for name in environment if name.startswith("SLURM_") and not name.startswith("SLURM_CONF")]
            environment = {name: value for name, value in environment.items() if name not in of_job}
        elif settings.device == "cpu":
            quarter = max(1, cores_by_affinity() // 4)  # leaves the other cores to training
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(quarter)}
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environment,
                start_new_session=True,  # Ctrl-C on the terminal is for the training process
                bufsize=0,  # `answer` selects on the pipe, and would not see lines in a buffer
            )

    def ask(self, checkpoint: Path) -> None:
        """Start the evaluation of a checkpoint; call `answer` for its result before the next `ask`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has ended, which `answer` reports
            self._process.stdin.write(f"{checkpoint.absolute()}\n".encode())

    def answer(self, wait_s: float | None = 0) -> dict[str, Any] | None:
        """Return the next answer, which has a "problem" after a failure; None after `wait_s` (None: wait forever)."""
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
        """Whether the process has ended."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Terminate the process."""
        self._process.terminate()  # srun forwards the signal
        self._process.communicate()


def main() -> None:
    """Run the process: its argument is the section `evaluation`, its input are paths of checkpoints."""
    stay_in_background()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # because lm_eval and datasets print to stdout
    import torch

    from kenotron.evaluation import evaluate
    from kenotron.evaluation.harness import Tasks

    settings, started = Evaluation.model_validate_json(sys.argv[1]), time.perf_counter()

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    try:
        tasks = Tasks(settings.tasks, settings.include_path, frozen=True)
        torch.empty(0, device=settings.device)
    except InputError as error:  # its message begins with a key
        answer(problem=f"evaluation.{error}")
        return
    except (RuntimeError, AssertionError) as error:  # torch has no such device
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
        except Exception as error:  # the next checkpoint may succeed
            traceback.print_exc()
            answer(problem=str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}")
        else:
            answer(results=results, seconds=time.perf_counter() - started)
