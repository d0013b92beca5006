"""Write files that start a run without Slurm, from the templates in this folder: `kenotron submit --to`."""

import re
import shlex
from collections.abc import Sequence
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from kenotron.config import Config, dump
from kenotron.config.errors import InputError
from kenotron.config.overrides import is_file
from kenotron.config.remote_data import is_remote
from kenotron.config.runs import fill_run_name
from kenotron.text.progress import Report


class _BlockDumper(yaml.SafeDumper):
    """Writes multi-line text as blocks."""


def _represent(dumper: _BlockDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockDumper.add_representer(str, _represent)


def trainjob(config: Config, nodes: int, gpus: int, image: str | None, say: Report) -> str:
    """Return YAML for Kubeflow Trainer 2: the config as a ConfigMap, a runtime and the job, for one `kubectl apply`."""
    _advise(config, "a volume that all pods see", say)
    texts, runtime, job = _template("trainjob")
    name = _name(config)
    for part in (texts, runtime, job):
        part["metadata"]["name"] = name
    texts["data"] = {"config.yaml": dump(config)}
    pod = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["volumes"][0]["configMap"]["name"] = job["spec"]["runtimeRef"]["name"] = name
    pod["containers"][0] |= {"image": image} if image else {}
    limits = {"limits": {"nvidia.com/gpu": gpus}}
    job["spec"]["trainer"] |= {"numNodes": nodes, "numProcPerNode": gpus, "resourcesPerNode": limits}
    return _text([texts, runtime, job])


def skypilot(config: Config, nodes: int, gpus: int, file: str | Path, overrides: Sequence[str], say: Report) -> str:
    """Return YAML for `sky jobs launch` of SkyPilot, in a clone of the repository that contains the config `file`."""
    _advise(config, "a bucket", say)
    (task,) = _template("skypilot")
    task["name"], task["num_nodes"], task["envs"] = _name(config), nodes, {"CONFIG": _in_folder(file)}
    task["resources"]["accelerators"] = dict.fromkeys(f"{kind}:{gpus}" for kind in ("H200", "H100", "A100-80GB"))
    changes = [_in_folder(each) if is_file(each) else each for each in overrides]
    task["run"] = f"{task['run'].rstrip()} {shlex.join(changes)}".rstrip() + "\n"
    return _text([task])


def _in_folder(file: str | Path) -> str:
    """Return the path of a file in the working folder, the one that SkyPilot copies. Raises InputError for others."""
    if not (path := Path(file).resolve()).is_relative_to(Path.cwd()):
        raise InputError(f"--to skypilot: expected a file in {Path.cwd()}, the folder that is copied; found {file}")
    return str(path.relative_to(Path.cwd()))


def _template(name: str) -> list[Any]:
    return list(yaml.safe_load_all(files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")))


def _text(documents: list[Any]) -> str:
    return yaml.dump_all(documents, Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=110)


def _name(config: Config) -> str:
    """Return the name of the run as a label of RFC 1035, short enough for the names of a TrainJob's pods."""
    run = fill_run_name(config, datetime.now(), "").general.run.lower()
    return re.sub("[^a-z0-9]+", "-", run if re.match("[a-z]", run) else f"run-{run}")[:45].strip("-")


def _advise(config: Config, where: str, say: Report) -> None:
    path = config.checkpoints.checkpoints_path
    if not is_remote(path) and not Path(path).is_absolute():
        say(f"warning: checkpoints.checkpoints_path: expected {where}, found {path}, which ends with its machine")
