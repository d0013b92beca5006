"""`kenotron submit`, `status`, `logs`, `cancel`: run configs as Slurm jobs.

kenotron submit my.yaml --site jean-zay-h100 --account abc@h100 --time 20:00:00
kenotron submit my.yaml --gpus-per-node 8 --partition gpu --time 10:00:00 --chain 3
kenotron submit my.yaml --gpus-per-node 8 --array optimizer.learning_rate_scheduler.learning_rate=3e-4,1e-3
"""

import json
import subprocess
from pathlib import Path
from typing import Annotated, Literal

import typer

from kenotron.cli.tables import to_stderr
from kenotron.config.errors import InputError
from kenotron.launch.slurm import jobs

To = Literal["slurm", "trainjob", "skypilot"]
LogDir = Annotated[Path, typer.Option("--log-dir", help="The runs' logging.log_dir.")]


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
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the job's environment; repeatable.")] = None,
    pre_launch: Annotated[list[str] | None, typer.Option(help="Shell line before the run; repeatable.")] = None,
    container: Annotated[str | None, typer.Option(help="Image that the ranks run in.")] = None,
    save_seconds: Annotated[int, typer.Option(min=1, help="Save and requeue this long before the limit.")] = 300,
    chain: Annotated[int, typer.Option(min=1, help="Number of jobs that continue the run, one after the other.")] = 1,
    array: Annotated[str | None, typer.Option(help="KEY=VALUE,VALUE,…: a job array, one run per value.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the job script.")] = False,
    to: Annotated[To, typer.Option(help="With --dry-run: for Slurm, Kubeflow Trainer, or SkyPilot.")] = "slurm",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print the job's output as it arrives.")] = False,
) -> None:
    """Train a config as a Slurm job. It saves before its time limit, is requeued, and resumes."""
    from kenotron.launch.slurm.submitting import submit as submit_jobs

    if to != "slurm":
        slurm: dict[str, object] = {"--site": site != "generic", "--time": time, "--account": account, "--qos": qos}
        slurm |= {"--partition": partition, "--sbatch": sbatch, "--env": env, "--pre-launch": pre_launch}
        slurm |= {"--array": array, "--chain": chain > 1, "--save-seconds": save_seconds != 300, "--follow": follow}
        slurm |= {"--container": container if to == "skypilot" else None}
        if unused := [name for name, value in slurm.items() if value]:
            raise InputError(f"{unused[0]}: has no effect with --to {to}")
        if not dry_run:
            raise InputError(f"--to {to}: expected --dry-run: it is printed, for you to start")
        print(_cloud_job(to, file, overrides or [], nodes, gpus_per_node, container), end="")
        return
    named = {"time": time, "account": account, "partition": partition, "qos": qos}
    options: dict[str, str | None] = {name: value for name, value in named.items() if value is not None}
    submitted = submit_jobs(
        file,
        overrides or [],
        site=site,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        sbatch=dict(_pairs("--sbatch", sbatch, flags=True)) | options,
        env={key: value or "" for key, value in _pairs("--env", env)},
        pre_launch=pre_launch or [],
        container=container,
        save_seconds=save_seconds,
        chain=chain,
        array=array,
        dry_run=dry_run,
    )
    if dry_run:
        print(submitted.script, end="")
        return
    for job in submitted.jobs:
        print(f"job {job.id}: {job.name} on {submitted.where}")
    print(f"script and output: {submitted.folder}")
    if follow:
        _follow(submitted.jobs[0].log, 1_000_000)


def _cloud_job(
    to: To, file: Path, overrides: list[str], nodes: int | None, gpus_per_node: int | None, image: str | None
) -> str:
    """Return the text of the file that starts the run with Kubeflow Trainer or SkyPilot."""
    from kenotron.launch.before_start import warnings_before_start
    from kenotron.launch.clouds import skypilot, trainjob
    from kenotron.launch.slurm.submitting import configs_of, nodes_of

    (config,) = configs_of(file, overrides, None, to_stderr)
    for line in warnings_before_start(file, config, overrides):
        to_stderr(f"warning: {line}")
    gpus = gpus_per_node or min(8, config.parallelism.world_size)
    count = nodes_of(config, nodes, gpus)
    if to == "trainjob":
        return trainjob(config, count, gpus, image, to_stderr)
    return skypilot(config, count, gpus, file, overrides, to_stderr)


def status(log_dir: LogDir = Path("logs")) -> None:
    """List the submitted jobs of a log folder: their state in Slurm, and the step that each has reached."""
    records = jobs.records(log_dir)
    for record, state in zip(records, jobs.states(records)):
        lines = [line for path in record.metrics if (line := _last_step(Path(path)))]
        print("  ".join([record.id, record.name, state, *lines]))


def logs(
    job: Annotated[str | None, typer.Argument(help="Number or name of a job; default: the newest.")] = None,
    log_dir: LogDir = Path("logs"),
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="Number of lines from the end.")] = 40,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing while the job writes.")] = False,
) -> None:
    """Print the end of a job's output."""
    record = jobs.find(log_dir, job)
    if record.id != job:
        started = [link for link in jobs.chain_of(log_dir, record) if Path(link.log).exists()]
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
    """Cancel a job and the jobs that wait for it (--chain). Its run saves a checkpoint if Slurm leaves it the time."""
    record = jobs.find(log_dir, job)
    chain = [link for link in jobs.chain_of(log_dir, record) if record.id != job or int(link.id) >= int(job)]
    jobs.cancel(chain)
    for link in chain:
        print(f"job {link.id} ({link.name}) is cancelled")


def _follow(log: str, lines: int) -> None:
    """Print the log as it grows, until Ctrl-C; the file need not exist yet."""
    subprocess.run(["tail", "-n", str(lines), "-F", "--", log], stderr=subprocess.DEVNULL)


def _pairs(option: str, texts: list[str] | None, flags: bool = False) -> list[tuple[str, str | None]]:
    pairs: list[tuple[str, str | None]] = []
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not name or not (equals or flags):
            raise InputError(f"{option}: expected NAME=VALUE, found {text!r}")
        pairs.append((name, value if equals else None))
    return pairs


def _last_step(metrics: Path) -> str | None:
    """Return ``step 400`` from the last line of metrics.jsonl, or None if it has none."""
    try:
        return f"step {json.loads(metrics.read_text().splitlines()[-1])['iteration']}"
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return None
