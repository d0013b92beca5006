"""nanotron's `slurm_launcher.py`, flag by flag: a config from a preset, and a job for it.

python slurm_launcher.py --run pretrain --model 1b --dp 8 --tp 2 --partition hopper --time_limit 20:00:00
python slurm_launcher.py --run pretrain --config my.yaml --partition hopper --dry-run
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

# layers, hidden, heads, key-value heads, feed-forward
PRESETS = {
    "160m": (12, 768, 12, 12, 3072),
    "410m": (24, 1024, 16, 16, 4096),
    "1b": (16, 2048, 16, 16, 5632),
    "3b": (28, 3072, 32, 32, 8192),
    "7b": (32, 4096, 32, 32, 11008),
    "13b": (40, 5120, 40, 40, 13824),
    "30b": (60, 6656, 52, 52, 17920),
    "70b": (80, 8192, 64, 8, 28672),
}
CUSTOM = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "intermediate_size")
REFUSED = {
    "enable-wandb": "metrics are in metrics.jsonl and for TensorBoard",
    "run-train-script": "the job runs `kenotron train`",
    "slurm-scripts-dir": "job scripts are beside their output, in slurm/ of --slurm-logs-path",
}


def parser() -> argparse.ArgumentParser:
    """nanotron's flags with nanotron's defaults."""
    flags = argparse.ArgumentParser(prog="slurm_launcher.py", description="Train on Slurm, with nanotron's flags.")
    text: dict[str, str | None] = {
        "run": None,
        "partition": None,
        "qos": None,
        "time_limit": None,
        "email": None,
        "tmp_dir": None,
        "config": None,
        "bench": None,
        "dataset": None,
        "text-column": "text",
        "tokenizer": "robot-test/dummy-tokenizer-wordlevel",
        "project": "nanotron",
        "configs-path": "logs/configs",
        "slurm-logs-path": "logs",
        "checkpoints-path": "checkpoints",
        "profiler_export_path": None,
        "log-lvl": "info",
        "pre_launch_commands": "",
        "extra_env": "",
    }
    whole = {"gpus_per_node": 8, "vocab-size": 65536, "seq": 4096, "seed": 42, "steps": 10000, "mbs": 2, "acc": 8}
    whole |= {"warmup-steps": 1000, "dp": 8, "pp": 1, "tp": 2, "cp": 1, "ep": 1, "zero": 0, "save-interval": 1000}
    real = {"learning-rate": 3e-4, "min-lr": 3e-5, "weight-decay": 0.01, "grad-clip": 1.0}
    for name, value in text.items():
        flags.add_argument(f"--{name}", default=value, required=name == "run")
    for name, number in whole.items():
        flags.add_argument(f"--{name}", type=int, default=number)
    for name, rate in real.items():
        flags.add_argument(f"--{name}", type=float, default=rate)
    for name in CUSTOM:
        flags.add_argument(f"--{name.replace('_', '-')}", type=int)
    flags.add_argument("--model", choices=[*PRESETS, "custom"], default="custom")
    for name in ("save-initial-state", "no-sanity", "dry-run", "show-logs"):
        flags.add_argument(f"--{name}", action="store_true")
    for name in REFUSED:
        flags.add_argument(f"--{name}", nargs="?", const=True, help=argparse.SUPPRESS)
    return flags


def config_of(flags: argparse.Namespace) -> dict[str, Any]:
    """The config that the flags describe. Sizes that are given win over the preset's."""
    sizes = dict(zip(CUSTOM, PRESETS[flags.model if flags.model != "custom" else "160m"]))
    sizes |= {name: given for name in CUSTOM if (given := getattr(flags, name)) is not None}
    dataset = None
    if flags.dataset:
        dataset = {
            "hf_dataset_or_datasets": flags.dataset,
            "hf_dataset_splits": "train",
            "text_column_name": flags.text_column,
        }
    config: dict[str, Any] = {
        "general": {
            "project": flags.project,
            "run": flags.run,
            "seed": flags.seed,
            "ignore_sanity_checks": flags.no_sanity,
            "benchmark_csv_path": flags.bench,
        },
        "checkpoints": {
            "checkpoints_path": f"{flags.checkpoints_path}/{flags.run}",
            "checkpoint_interval": flags.save_interval,
            "save_initial_state": flags.save_initial_state,
        },
        "parallelism": {
            "dp": flags.dp,
            "pp": flags.pp,
            "tp": flags.tp,
            "context_parallel_size": flags.cp,
            "expert_parallel_size": flags.ep,
            "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER",
            "tp_linear_async_communication": True,
        },
        "model": {
            "dtype": "bfloat16",
            "init_method": {"std": 0.02},
            "model_config": {
                "is_llama_config": True,
                "num_hidden_layers": sizes["num_layers"],
                "hidden_size": sizes["hidden_size"],
                "num_attention_heads": sizes["num_heads"],
                "num_key_value_heads": sizes["num_kv_heads"],
                "intermediate_size": sizes["intermediate_size"],
                "vocab_size": flags.vocab_size,
                "max_position_embeddings": flags.seq,
            },
        },
        "tokens": {
            "sequence_length": flags.seq,
            "train_steps": flags.steps,
            "micro_batch_size": flags.mbs,
            "batch_accumulation_per_replica": flags.acc,
        },
        "optimizer": {
            "optimizer_factory": {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
            "zero_stage": flags.zero,
            "weight_decay": flags.weight_decay,
            "clip_grad": flags.grad_clip,
            "accumulate_grad_in_fp32": True,
            "learning_rate_scheduler": {
                "learning_rate": flags.learning_rate,
                "lr_warmup_steps": flags.warmup_steps,
                "lr_warmup_style": "linear",
                "lr_decay_style": "cosine",
                "min_decay_lr": flags.min_lr,
            },
        },
        "logging": {"log_level": flags.log_lvl, "log_dir": flags.slurm_logs_path},
        "data_stages": [
            {"name": "Training", "start_training_step": 1, "data": {"dataset": dataset, "seed": flags.seed}}
        ],
    }
    if dataset:
        config["tokenizer"] = {"tokenizer_name_or_path": flags.tokenizer}
    if flags.profiler_export_path:
        config["profiler"] = {"profiler_export_path": flags.profiler_export_path}
    return config


def submit_arguments(given: Sequence[str]) -> list[str]:
    """The arguments of `kenotron submit` for nanotron's; writes the config that they describe."""
    of_nanotron = parser()
    flags = of_nanotron.parse_args(given)
    for name, instead in REFUSED.items():
        if getattr(flags, name.replace("-", "_")) is not None:
            of_nanotron.error(f"--{name} is not supported: {instead}")
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
