"""Translate the flags of nanotron's `slurm_launcher.py` to a config and the arguments of `kenotron submit`.

python slurm_launcher.py --run pretrain --model 1b --dp 8 --tp 2 --partition hopper --time_limit 20:00:00
python slurm_launcher.py --run pretrain --config my.yaml --partition hopper --dry-run
"""

import argparse
import shlex
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from kenotron.config.document import Document
from kenotron.config.packaged import packaged_yaml

SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size")


@cache
def _tables() -> dict[str, Any]:
    """Return the content of nanotron.yaml: presets, flags, the config that they change, and refused flags."""
    return cast(dict[str, Any], packaged_yaml("kenotron.launch.slurm", "nanotron.yaml"))


def parser() -> argparse.ArgumentParser:
    """Return a parser of nanotron's flags with nanotron's defaults."""
    flags = argparse.ArgumentParser(prog="slurm_launcher.py", description="Train on Slurm, with nanotron's flags.")
    for name, (value, *_) in _tables()["flags"].items():
        if isinstance(value, bool):
            flags.add_argument(f"--{name}", action="store_true")
        else:
            kind = str if value is None else type(value)
            flags.add_argument(f"--{name}", type=kind, default=value, required=name == "run")
    for name in SIZES:
        flags.add_argument(f"--{name.replace('_', '-')}", type=int)
    flags.add_argument("--model", choices=[*_tables()["presets"], "custom"], default="custom")
    for name in _tables()["refused"]:
        flags.add_argument(f"--{name}", nargs="?", const=True, help=argparse.SUPPRESS)
    return flags


def config_of(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the config that the flags describe. Flags of sizes override the preset's."""
    tables = deepcopy(_tables())
    config = Document(tables["config"])
    for name, (_, *keys) in tables["flags"].items():
        for key in keys:
            _put(config, key, getattr(flags, name.replace("-", "_")))
    preset = tables["presets"][flags.model if flags.model != "custom" else "160m"]
    for name, default, key in zip(SIZES, preset, tables["sizes"]):
        size = getattr(flags, name)
        _put(config, key, default if size is None else size)
    config.put(("data_stages", 0, "data", "seed"), flags.seed)
    _put(config, "checkpoints.checkpoints_path", f"{flags.checkpoints_path}/{flags.run}")
    if flags.dataset:
        dataset = {
            "hf_dataset_or_datasets": flags.dataset,
            "hf_dataset_splits": "train",
            "text_column_name": flags.text_column,
        }
        config.put(("data_stages", 0, "data", "dataset"), dataset)
        _put(config, "tokenizer.tokenizer_name_or_path", flags.tokenizer)
    return config.data


def _put(config: Document, key: str, value: object) -> None:
    """Set the key of a dotted path, unless `value` is None."""
    if value is not None:
        config.put(tuple(key.split(".")), value)


def submit_arguments(command: Sequence[str]) -> list[str]:
    """Return the arguments of `kenotron submit` for nanotron's in `command`, and write the config they describe."""
    nanotron = parser()
    flags = nanotron.parse_args(command)
    for name, hint in _tables()["refused"].items():
        if getattr(flags, name.replace("-", "_")) is not None:
            nanotron.error(f"--{name} is not supported: {hint}")
    path = flags.config
    if path is None:
        path = str(Path(flags.configs_path) / f"{flags.run}.yaml")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(yaml.safe_dump(config_of(flags), sort_keys=False), encoding="utf-8")
    arguments = ["submit", path] + ([f"general.run={flags.run}"] if flags.config else [])
    arguments += ["--gpus-per-node", str(flags.gpus_per_node)]
    for name, value in (("partition", flags.partition), ("qos", flags.qos), ("time", flags.time_limit)):
        arguments += [f"--{name}", value] if value else []
    if flags.email:
        arguments += ["--sbatch", f"mail-user={flags.email}", "--sbatch", "mail-type=BEGIN,END,FAIL"]
    if flags.tmp_dir:
        arguments += ["--env", f"TMPDIR={flags.tmp_dir}"]
    for pair in shlex.split(flags.extra_env.replace(";", " ")):  # `export A=1; export B=2`, on one line or several
        arguments += ["--env", pair] if pair != "export" else []
    if flags.pre_launch_commands:
        arguments += ["--pre-launch", flags.pre_launch_commands]
    return arguments + (["--dry-run"] if flags.dry_run else []) + (["--follow"] if flags.show_logs else [])
