"""`kenotron submit`, `status`, `logs`, `cancel`: runs as jobs of Slurm.

kenotron submit my.yaml --site jean-zay-h100 --account abc@h100 --time 20:00:00
kenotron submit my.yaml --gpus-per-node 8 --partition gpu --time 10:00:00 --chain 3
kenotron submit my.yaml --gpus-per-node 8 --array optimizer.learning_rate_scheduler.learning_rate=3e-4,1e-3
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kenotron.config.errors import InputError, counted

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.launch.slurm.sites import Site

LogDir = Annotated[Path, typer.Option("--log-dir", help="The runs' logging.log_dir.")]
JobName = Annotated[str | None, typer.Argument(help="Number or name of a job; default: the newest.")]
Values = Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE for the job's environment; repeatable.")]


def submit(
    file: Annotated[Path, typer.Argument(help="The YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Keys by their dotted paths, as for train.")] = None,
    site: Annotated[str, typer.Option(help="Profile of the cluster: a built-in name or a YAML file.")] = "generic",
    nodes: Annotated[int | None, typer.Option(min=1, help="Default: as many as the layout needs.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="One rank per GPU; default: the site's.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, for example 20:00:00.")] = None,
    account: Annotated[str | None, typer.Option(help="Account to charge.")] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    qos: Annotated[str | None, typer.Option(help="Quality of service.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="Another option of sbatch, NAME=VALUE; repeatable.")] = None,
    env: Values = None,
    pre_launch: Annotated[list[str] | None, typer.Option(help="Shell line before the run; repeatable.")] = None,
    container: Annotated[str | None, typer.Option(help="Image that the ranks run in.")] = None,
    save_seconds: Annotated[int, typer.Option(min=1, help="Save and requeue this long before the limit.")] = 300,
    chain: Annotated[int, typer.Option(min=1, help="Number of jobs that continue the run, one after the other.")] = 1,
    array: Annotated[str | None, typer.Option(help="KEY=VALUE,VALUE,…: a job array, one run per value.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the job script.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print the job's output as it arrives.")] = False,
) -> None:
    """Train a config as a job of Slurm. It saves before its time limit, is requeued, and resumes."""
    from kenotron.config import dump
    from kenotron.config.runs import fill_run_name
    from kenotron.launch.slurm import jobs
    from kenotron.launch.slurm.script import Job, directives_of, render
    from kenotron.launch.slurm.sites import load_site

    profile = load_site(site)
    now = datetime.now()
    configs = [fill_run_name(config, now, "%jobid") for config in _configs(file, overrides or [], array)]
    config = configs[0]
    name = (config.general.run if not array else Path(config.general.run).stem).replace("%jobid", "")
    name = name.replace("/", "-").strip("_-") or "kenotron"  # a name of Slurm's, and of a folder
    folder = Path(config.logging.log_dir).absolute() / "slurm" / f"{name}-{now:%Y%m%d_%H%M%S}"
    ranks_here = gpus_per_node or profile.gpus_per_node
    options: dict[str, str | int | None] = dict(_pairs("--sbatch", sbatch, flags=True))
    given = {"time": time, "account": account, "partition": partition, "qos": qos}
    options |= {key: value for key, value in given.items() if value is not None}
    job = Job(
        name=name,
        nodes=_nodes(config, profile, nodes, ranks_here),
        tasks_per_node=ranks_here or config.parallelism.world_size,
        command=_command(folder, array is not None, container),
        folder=Path.cwd(),
        log=str(folder).replace("%", "%%") + ("/%A_%a.log" if array else "/%j.log"),
        save_seconds=save_seconds,
        array=len(configs) if array else 0,
        options=options,
        environment={key: value or "" for key, value in _pairs("--env", env)},
        pre_launch=tuple(pre_launch or ()),
        container=container,
        gpus=gpus_per_node is not None,
    )
    directives = directives_of(job, profile)
    _check_time(directives.get("time"), save_seconds)
    _advise(file, config, overrides or [], site, directives)
    script = render(job, profile)
    if dry_run:
        print(script, end="")
        return
    if shutil.which("sbatch") is None:
        raise InputError("sbatch was not found; run this where jobs are submitted, or add --dry-run")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"logging.log_dir: cannot create {folder}: {error.strerror}") from None
    for number, each in enumerate(configs):
        (folder / (f"config-{number}.yaml" if array else "config.yaml")).write_text(dump(each), encoding="utf-8")
    (folder / jobs.SCRIPT).write_text(script, encoding="utf-8")
    log = str(folder / ("{id}_0.log" if array else "{id}.log"))
    metrics = [Path(each.logging.log_dir).absolute() / each.general.run / "metrics.jsonl" for each in configs]
    submitted: list[jobs.JobRecord] = []
    for _ in range(chain):
        submitted.append(jobs.submit(folder, name, log, metrics, submitted[-1].id if submitted else None))
        where = f"{counted(job.nodes, 'node')} x {counted(job.tasks_per_node, 'rank')}"
        print(f"job {submitted[-1].id}: {name} on {where}")
    print(f"script and output: {folder}")
    if follow:
        _follow(submitted[0].log, 1_000_000)


def status(log_dir: LogDir = Path("logs")) -> None:
    """List the jobs submitted from here: their state in Slurm, and the step that each has reached."""
    from kenotron.launch.slurm import jobs

    found = jobs.records(log_dir)
    if not found:
        raise InputError(f"no job was submitted with logging.log_dir {log_dir}; --log-dir names another")
    for record, state in zip(found, jobs.states(found)):
        lines = [line for path in record.metrics if (line := _last_step(Path(path)))]
        print("  ".join([record.id, record.name, state, *lines]))


def logs(
    job: JobName = None,
    log_dir: LogDir = Path("logs"),
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="Number of lines from the end.")] = 40,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing while the job writes.")] = False,
) -> None:
    """Print the end of a job's output."""
    from kenotron.launch.slurm import jobs

    record = jobs.find(log_dir, job)
    if record.id != job:
        started = [each for each in jobs.chain_of(log_dir, record) if Path(each.log).exists()]
        record = started[-1] if started else record
    if not Path(record.log).exists():
        raise InputError(f"job {record.id} has no output yet ({jobs.states([record])[0]})")
    if follow:
        _follow(record.log, lines)
        return
    for line in Path(record.log).read_text(errors="replace").splitlines()[-lines:]:
        print(line)


def cancel(
    job: Annotated[str, typer.Argument(help="Number or name of a job.")], log_dir: LogDir = Path("logs")
) -> None:
    """Cancel a job and those that wait for it (--chain). Its run saves a checkpoint if Slurm leaves it the time."""
    from kenotron.launch.slurm import jobs

    record = jobs.find(log_dir, job)
    chain = [each for each in jobs.chain_of(log_dir, record) if record.id != job or int(each.id) >= int(job)]
    jobs.cancel(chain)
    for each in chain:
        print(f"job {each.id} ({each.name}) is cancelled")


def _follow(log: str, lines: int) -> None:
    """Until Ctrl-C; also where there is no output yet."""
    subprocess.run(["tail", "-n", str(lines), "-F", "--", log], stderr=subprocess.DEVNULL)


# ---- what is submitted -------------------------------------------------------------------------------------


def _configs(file: Path, overrides: list[str], array: str | None) -> list[Config]:
    """The config, or those of an array: each with a value of its key, a run and a folder of checkpoints of its own."""
    from kenotron.config import load, refuse_unsupported

    def checked(more: list[str]) -> Config:
        config = load(file, [*overrides, *more], report=lambda line: print(line, file=sys.stderr))
        refuse_unsupported(config)
        return config

    if array is None:
        return [checked([])]
    key, _, values = array.partition("=")
    if not key or not values:
        raise InputError(f"--array: expected KEY=VALUE,VALUE,…, found {array!r}")
    plain = checked([])
    upload = plain.s3_upload
    own = {
        "checkpoints.checkpoints_path": plain.checkpoints.checkpoints_path,
        "checkpoints.staging_path": plain.checkpoints.staging_path,
        "s3_upload.upload_s3_path": upload.upload_s3_path if upload is not None else None,
    }
    return [
        checked(
            [
                f"{key}={value}",
                f"general.run={plain.general.run}-{number}",
                *(f"{place}={path.rstrip('/')}/{number}" for place, path in own.items() if path is not None),
            ]
        )
        for number, value in enumerate(values.split(","))
    ]


def _advise(
    file: Path, config: Config, overrides: list[str], site: str, directives: dict[str, str | int | None]
) -> None:
    """Say how much is trained on, and what is probably not meant.

    Raises InputError: the run in the same folder has another global batch.
    """
    from kenotron.cli.before_start import epochs, warnings_before_start
    from kenotron.config.warnings import amount
    from kenotron.launch.slurm.sites import GENERIC

    lines = warnings_before_start(file, config, overrides)
    if site == GENERIC and (missing := [name for name in ("cpus-per-task", "exclusive") if name not in directives]):
        options = " ".join(f"--sbatch {name}{'=N' * (name != 'exclusive')}" for name in missing)
        lines.append(
            f"--site generic asks for no {' or '.join(missing)}: Slurm may give every rank one core and share the "
            f"nodes; add {options}, or use a profile of the cluster (docs/multi-node-training.md), which has them"
        )
    for line in lines:
        print(f"warning: {line}", file=sys.stderr)
    read = ""
    with contextlib.suppress(InputError):  # the data may be where the job will run, and only there
        read = epochs(config)
    print(f"{config.tokens.train_steps} steps: {amount(config)}{read}", file=sys.stderr)


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


def _nodes(config: Config, site: Site, nodes: int | None, ranks_here: int) -> int:
    """The number of nodes. Raises InputError unless they have as many ranks as the layout needs."""
    layout = config.parallelism
    needed = layout.world_size
    if not ranks_here:
        if nodes not in (None, 1):
            raise InputError("--gpus-per-node: missing; expected the number of ranks per node")
        return 1
    found = nodes or max(1, needed // ranks_here)
    if found * ranks_here != needed:
        degrees = " x ".join(f"{name} {degree}" for name, degree in layout.degrees.items())
        whole = needed // layout.dp
        fitting = found * ranks_here // whole if found * ranks_here % whole == 0 else 0
        advice = f"; parallelism.dp={fitting} would fit" if fitting else ""
        raise InputError(
            f"parallelism: {degrees} needs {counted(needed, 'rank')}, but {counted(found, 'node')} of {ranks_here} "
            f"have {found * ranks_here}{advice}"
        )
    return found


def _command(folder: Path, array: bool, container: str | None) -> tuple[str, ...]:
    """What a rank runs; of an array, with the number of its task as last argument."""
    python = "python" if container else sys.executable
    if not array:
        return (python, "-m", "kenotron", "train", str(folder / "config.yaml"))
    # The folder is an argument ($0), so that nothing of it is read as shell.
    return ("bash", "-c", f'exec {shlex.quote(python)} -m kenotron train "$0/config-$1.yaml"', str(folder))


def _pairs(option: str, texts: list[str] | None, flags: bool = False) -> list[tuple[str, str | None]]:
    pairs: list[tuple[str, str | None]] = []
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not name or not (equals or flags):
            raise InputError(f"{option}: expected NAME=VALUE, found {text!r}")
        pairs.append((name, value if equals else None))
    return pairs


def _last_step(metrics: Path) -> str | None:
    """``step 400`` of the last line of metrics."""
    try:
        return f"step {json.loads(metrics.read_text().splitlines()[-1])['iteration']}"
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return None
