"""Submit a config as one or more Slurm jobs: `kenotron submit` and `kn.submit`."""

import contextlib
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kenotron.config import Config, dump, load, refuse_unsupported
from kenotron.config.errors import InputError, counted, os_errors
from kenotron.config.overrides import check_overrides
from kenotron.config.runs import fill_run_name
from kenotron.config.warnings import amount
from kenotron.launch.before_start import epochs, warnings_before_start
from kenotron.launch.slurm import jobs
from kenotron.launch.slurm.script import Job, directives_of, render
from kenotron.launch.slurm.sites import GENERIC, load_site
from kenotron.text.progress import Report

Options = Mapping[str, str | int | None]


@dataclass(frozen=True)
class Submitted:
    """The submitted jobs (none for a dry run), their script, and the folder of script and output.

    `where` describes the nodes: ``2 nodes x 8 ranks``.
    """

    jobs: list[jobs.JobRecord]
    script: str
    folder: Path
    where: str


def submit(
    file: str | Path,
    overrides: Sequence[str] = (),
    *,
    site: str = GENERIC,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    sbatch: Options | None = None,
    env: Mapping[str, str] | None = None,
    pre_launch: Sequence[str] = (),
    container: str | None = None,
    save_seconds: int = 300,
    chain: int = 1,
    array: str | None = None,
    dry_run: bool = False,
    say: Report = lambda line: print(line, file=sys.stderr),
) -> Submitted:
    """Train the config in `file` as a Slurm job, which saves before its time limit, is requeued, and resumes.

    `site` is the profile of the cluster, a name or a file. `nodes` is by default as many as the layout needs,
    `gpus_per_node` (one rank each) the site's. `sbatch` has options such as ``{"time": "20:00:00"}`` (None: a flag),
    `env` the job's environment, `pre_launch` shell lines, and `container` the image that the ranks run in. `chain` is
    the number of jobs that continue the run, one after the other. `array` is ``KEY=VALUE,VALUE``, for one run per
    value. With `dry_run` nothing is submitted. `say` gets warnings, and the number of steps and tokens.

    Raises InputError for a layout that does not fit the nodes, too short a time limit, and a refusal of Slurm.
    """
    profile, now = load_site(site), datetime.now()
    configs = [fill_run_name(config, now, "%jobid") for config in configs_of(file, overrides, array, say)]
    config = configs[0]
    name = (config.general.run if not array else Path(config.general.run).stem).replace("%jobid", "")
    name = name.replace("/", "-").strip("_-") or "kenotron"  # valid for Slurm and as a folder
    folder = Path(config.logging.log_dir).absolute() / "slurm" / f"{name}-{now:%Y%m%d_%H%M%S}"
    ranks_per_node = gpus_per_node or profile.gpus_per_node
    job = Job(
        name=name,
        nodes=nodes_of(config, nodes, ranks_per_node),
        tasks_per_node=ranks_per_node or config.parallelism.world_size,
        command=_command(folder, array is not None, container),
        folder=Path.cwd(),
        log=str(folder).replace("%", "%%") + ("/%A_%a.log" if array else "/%j.log"),
        save_seconds=save_seconds,
        array=len(configs) if array else 0,
        options=sbatch or {},
        environment=env or {},
        pre_launch=tuple(pre_launch),
        container=container,
        gpus=gpus_per_node is not None,
    )
    directives = directives_of(job, profile)
    _check_time(directives.get("time"), save_seconds)
    _advise(file, config, overrides, site, directives, say)
    script = render(job, profile)
    submitted: list[jobs.JobRecord] = []
    if not dry_run:
        _write(folder, configs, array is not None, script)
        log = str(folder / ("{id}_0.log" if array else "{id}.log"))
        metrics = [Path(run.logging.log_dir).absolute() / run.general.run / "metrics.jsonl" for run in configs]
        for _ in range(chain):
            submitted.append(jobs.submit(folder, name, log, metrics, submitted[-1].id if submitted else None))
    where = f"{counted(job.nodes, 'node')} x {counted(job.tasks_per_node, 'rank')}"
    return Submitted(submitted, script, folder, where)


def _write(folder: Path, configs: list[Config], array: bool, script: str) -> None:
    """Create the folder of a job, with its configs and script."""
    if shutil.which("sbatch") is None:
        raise InputError("sbatch was not found; run this where jobs are submitted, or add --dry-run")
    with os_errors(f"logging.log_dir: cannot create {folder}"):
        folder.mkdir(parents=True)
    for number, config in enumerate(configs):
        (folder / (f"config-{number}.yaml" if array else "config.yaml")).write_text(dump(config), encoding="utf-8")
    (folder / jobs.SCRIPT).write_text(script, encoding="utf-8")


def configs_of(file: str | Path, overrides: Sequence[str], array: str | None, say: Report) -> list[Config]:
    """Return the config, or one config per value of an array, each with its own run name and checkpoint folders."""

    check_overrides(overrides)

    def checked(more: list[str]) -> Config:
        config = load(file, [*overrides, *more], report=say)
        refuse_unsupported(config)
        return config

    if array is None:
        return [checked([])]
    key, _, values = array.partition("=")
    if not key or not values:
        raise InputError(f"--array: expected KEY=VALUE,VALUE,…, found {array!r}")
    plain = checked([])
    upload = plain.s3_upload
    folders = {
        "checkpoints.checkpoints_path": plain.checkpoints.checkpoints_path,
        "checkpoints.staging_path": plain.checkpoints.staging_path,
        "s3_upload.upload_s3_path": upload.upload_s3_path if upload is not None else None,
    }
    configs = []
    for number, value in enumerate(values.split(",")):
        places = [f"{place}={path.rstrip('/')}/{number}" for place, path in folders.items() if path is not None]
        configs.append(checked([f"{key}={value}", f"general.run={plain.general.run}-{number}", *places]))
    return configs


def _advise(
    file: str | Path, config: Config, overrides: Sequence[str], site: str, directives: Options, say: Report
) -> None:
    """Print the number of steps and tokens, and warnings.

    Raises InputError if the run in the same folder has another global batch.
    """
    lines = warnings_before_start(file, config, overrides)
    if site == GENERIC and (missing := [name for name in ("cpus-per-task", "exclusive") if name not in directives]):
        options = " ".join(f"--sbatch {name}{'=N' * (name != 'exclusive')}" for name in missing)
        lines.append(
            f"--site generic asks for no {' or '.join(missing)}: Slurm may give every rank one core and share the "
            f"nodes; add {options}, or use a profile of the cluster (docs/multi-node-training.md), which has them"
        )
    for line in lines:
        say(f"warning: {line}")
    data = ""
    with contextlib.suppress(InputError):  # the data may be only on the machine where the job will run
        data = epochs(config)
    say(f"{config.tokens.train_steps} steps: {amount(config)}{data}")


def _check_time(limit: str | int | None, save_seconds: int) -> None:
    """Raise InputError for a time limit that Slurm does not accept, or that leaves no time to train before the save."""
    if limit is None or str(limit).upper() in ("UNLIMITED", "INFINITE", "-1", "0"):
        return
    days, dash, rest = str(limit).rpartition("-")
    units = (3600, 60, 1) if dash or rest.count(":") == 2 else (60, 1)  # D-H, D-H:M, D-H:M:S, H:M:S; M, M:S
    parts = rest.split(":")
    if len(parts) > len(units) or not all(part.isdecimal() for part in [*parts, days or "0"]):
        raise InputError(f"--time: expected minutes, H:M:S or D-H:M:S, found {str(limit)!r}")
    seconds = int(days or 0) * 86400 + sum(int(part) * unit for part, unit in zip(parts, units))
    if seconds <= save_seconds:
        raise InputError(
            f"--time: {limit} is {seconds} s, and --save-seconds {save_seconds} before its end the job is saved and "
            f"requeued: it would never train; raise --time or lower --save-seconds"
        )


def nodes_of(config: Config, nodes: int | None, ranks_per_node: int) -> int:
    """Return the number of nodes. Raises InputError if they do not have as many ranks as the layout needs."""
    layout = config.parallelism
    needed = layout.world_size
    if not ranks_per_node:
        if nodes not in (None, 1):
            raise InputError("--gpus-per-node: missing; expected the number of ranks per node")
        return 1
    count = nodes or max(1, needed // ranks_per_node)
    ranks = count * ranks_per_node
    if ranks != needed:
        degrees = " x ".join(f"{name} {degree}" for name, degree in layout.degrees.items())
        dp, rest = divmod(ranks, needed // layout.dp)
        advice = f"; parallelism.dp={dp} would fit" if dp and not rest else ""
        raise InputError(
            f"parallelism: {degrees} needs {counted(needed, 'rank')}, but {counted(count, 'node')} of {ranks_per_node} "
            f"have {ranks}{advice}"
        )
    return count


def _command(folder: Path, array: bool, container: str | None) -> tuple[str, ...]:
    """Return the command of a rank; the script of an array appends the number of the task."""
    python = "python" if container else sys.executable
    if not array:
        return (python, "-m", "kenotron", "train", str(folder / "config.yaml"))
    # The folder is an argument ($0), so that the shell does not interpret it.
    return ("bash", "-c", f'exec {shlex.quote(python)} -m kenotron train "$0/config-$1.yaml"', str(folder))
