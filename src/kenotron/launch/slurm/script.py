"""Write the job script from job.sh: plain bash that you can read, change and submit by hand.

Before the time limit Slurm sends SIGUSR1 to the script, which forwards it to all ranks and requeues the job when they
have saved; the job keeps its number, and resumes from that checkpoint. After the failure of a node Slurm itself
requeues the job.

Only a site's `setup` and ``--pre-launch`` are shell code; every other value is quoted.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from kenotron.config.errors import InputError
from kenotron.launch.slurm.sites import Site


@dataclass(frozen=True)
class Job:
    """A job of `tasks_per_node` ranks on each of `nodes`; each rank runs `command`.

    The run is stopped and saved `save_seconds` before the time limit. `array` is the number of configs of a job array.
    `log` may contain Slurm's ``%j``, ``%A`` and ``%a``.
    """

    name: str
    nodes: int
    tasks_per_node: int
    command: tuple[str, ...]
    folder: Path
    log: str
    save_seconds: int = 300
    array: int = 0
    options: Mapping[str, str | int | None] = field(default_factory=dict)
    """More options of sbatch, which override the site's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    pre_launch: tuple[str, ...] = ()
    container: str | None = None
    gpus: bool = False
    """Whether each rank needs a GPU, whatever the site says; no effect with KENOTRON_DEVICE=cpu."""


def render(job: Job, site: Site) -> str:
    """Return the job script. Raises InputError for a value that Slurm's directives cannot hold."""
    environment = {**site.environment, **job.environment}
    exports = [f"export {_variable(name)}={shlex.quote(value)}" for name, value in environment.items()]
    directives = directives_of(job, site)
    srun: dict[str, str | int | None] = {"kill-on-bad-exit": 1}
    if cpus := directives.get("cpus-per-task"):  # not inherited from sbatch by every version of Slurm
        srun["cpus-per-task"] = cpus
    prefix = site.container.replace("{image}", shlex.quote(job.container)) + " " if job.container else ""
    task = ' "$SLURM_ARRAY_TASK_ID"' if job.array else ""
    template = files(__package__).joinpath("job.sh").read_text(encoding="utf-8")
    return template.format(
        directives="\n".join(f"#SBATCH {_option(name, value)}" for name, value in directives.items()),
        folder=shlex.quote(str(job.folder)),
        setup="\n".join([*site.setup, *job.pre_launch, *exports]),
        srun=" ".join(_option(name, value) for name, value in (srun | site.srun).items()),
        command=prefix + shlex.join(job.command) + task,
        seconds=job.save_seconds,
        # The id of an array task includes its index: the id of the array would requeue all tasks.
        requeued="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.array else "$SLURM_JOB_ID",
    )


def directives_of(job: Job, site: Site) -> dict[str, str | int | None]:
    """Return the options of sbatch, in the order of the script."""
    options: dict[str, str | int | None] = {"job-name": job.name, "nodes": job.nodes}
    options["ntasks-per-node"] = job.tasks_per_node
    custom = site.sbatch | dict(job.options)
    on_cpu = (site.environment | dict(job.environment)).get("KENOTRON_DEVICE") == "cpu"
    if (site.gpus_per_node or job.gpus) and not on_cpu and not any(name.startswith(("gpu", "gres")) for name in custom):
        options["gres"] = f"gpu:{job.tasks_per_node}"
    if site.cpus_per_rank:
        options["cpus-per-task"] = site.cpus_per_rank
    options |= {"output": job.log, "open-mode": "append", "requeue": None, "signal": f"B:USR1@{job.save_seconds}"}
    if job.array:
        options["array"] = f"0-{job.array - 1}"
    return options | custom


def _option(name: str, value: str | int | None) -> str:
    if not re.fullmatch(r"[a-z][a-z-]*", name):
        raise InputError(f"expected an option of Slurm without dashes, such as constraint, found {name!r}")
    if value is None:
        return f"--{name}"
    if re.search(r"[\x00-\x1f\x7f]", str(value)):
        raise InputError(f"--{name}: expected printable characters, found {str(value)!r}")
    return f"--{name}={shlex.quote(str(value))}"


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise InputError(f"--env: expected the name of a variable, found {name!r}")
    return name
