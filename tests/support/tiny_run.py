"""A run of seconds, and what tests look at afterwards.

config = tiny_config(tmp_path, "tokens.train_steps=4", "model.dtype=bfloat16")
run = train_quietly(config)
losses(config)            # [5.53, 5.47, …] out of metrics.jsonl
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

import kenotron as kn

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

    from kenotron.config import Config
    from kenotron.training import Run

os.environ["KENOTRON_DEVICE"] = "cpu"  # the same tests on a machine with an accelerator

REPOSITORY = Path(__file__).resolve().parents[2]
Shell = Callable[..., tuple[int, str, str]]  # the fixture `shell`
KENOTRON = [sys.executable, "-c", "from kenotron.cli import main; main()"]


def wait_until(condition: Callable[[], object], seconds: float, explain: Callable[[], str] = str) -> None:
    """Fails with what `explain` says if the condition does not hold within this time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.05)


def tiny_dict(folder: Path) -> dict[str, Any]:
    """Two layers of 16 on synthetic tokens; all files below `folder`."""
    return {
        "general": {"project": "tests", "run": "tiny", "seed": 7},
        "model": {
            "model_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 64,
                "max_position_embeddings": 32,
            },
            "init_method": {"std": 0.05},
            "dtype": "float32",
        },
        "checkpoints": {"checkpoints_path": str(folder / "checkpoints"), "checkpoint_interval": 1000},
        "logging": {"log_dir": str(folder / "logs"), "tensorboard": False},
        "tokens": {"sequence_length": 16, "train_steps": 3, "micro_batch_size": 4, "batch_accumulation_per_replica": 1},
        "optimizer": {
            "optimizer_factory": {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8},
            "zero_stage": 0,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            "accumulate_grad_in_fp32": True,
            "learning_rate_scheduler": {"learning_rate": 0.01, "lr_warmup_steps": 2, "lr_decay_style": "constant"},
        },
        "data_stages": [{"name": "only", "start_training_step": 1, "data": {"dataset": None, "seed": 3}}],
    }


def tiny_config(folder: Path, *overrides: str) -> Config:
    return kn.load(tiny_dict(folder), overrides)


def tiny_yaml(folder: Path, **replaced: Any) -> Path:
    """The same as a file `tiny.yaml` in `folder`; `replaced` sections go on top."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**tiny_dict(folder), **replaced}))
    return path


TEXTS = [f"The sum of {a} and {b} is {a + b}. " * 3 for a in range(12) for b in range(12)]


def write_texts(folder: Path) -> str:
    """A jsonl file of small documents, and the override that makes a run read it with a tokenizer of its own."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return str(path)


def text_overrides(folder: Path) -> list[str]:
    """Overrides that make the run read text, with a byte-level tokenizer of 300 entries trained on it."""
    return [
        f"data_stages.0.data.dataset={{text_files: {write_texts(folder)}}}",
        "tokenizer={train: {vocab_size: 300}}",
        "model.model_config.vocab_size=300",
        "model.model_config.eos_token_id=0",
    ]


def train_quietly(config: Config, **options: Any) -> Run:
    """`kn.train`, its console kept away."""
    with contextlib.redirect_stdout(io.StringIO()):
        run = kn.train(config, **options)
    assert run is not None
    return run


def train_and_listen(config: Config, **options: Any) -> tuple[Run | None, str]:
    """`kn.train` and what it printed."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run = kn.train(config, **options)
    return run, said.getvalue()


def slow_copies(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.1) -> None:
    """Copies that begin so late that the next step has reached its update."""
    from kenotron.checkpoint.engines import staging

    plain = staging.Copier.copy

    def copy(self: staging.Copier, *given: Any) -> None:
        time.sleep(seconds)
        plain(self, *given)

    monkeypatch.setattr(staging.Copier, "copy", copy)


def metrics(config: Config) -> list[dict[str, Any]]:
    """The objects of metrics.jsonl."""
    folder = Path(config.logging.log_dir) / config.general.run
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[list[Any]]:
    """What two equal runs in `tiny_config` folders have in common: a list for each line of metrics.jsonl."""
    names = ("iteration", "lm_loss", "grad_norm", "lr", "consumed_tokens", "state_hash")
    return [[line[name] for name in names] for line in metrics(tiny_config(folder))]


def losses(config: Config) -> list[float]:
    return [step["lm_loss"] for step in metrics(config)]


def weights(run: Run) -> dict[str, Tensor]:
    """Every parameter as it would be saved, copied."""
    from kenotron.training.saved_state import model_tensors

    return {name: shard.tensor.clone() for name, shard in model_tensors(run.model).items()}


def saved_weights(path: Path, folder: str = "model") -> dict[str, Tensor]:
    """The tensors of a checkpoint folder."""
    from kenotron.checkpoint import reading

    return reading.read_tensors(path, folder=folder)


def same_saved(one: Path, other: Path, folder: str = "model") -> bool:
    """Whether two checkpoints have the same tensors with the same bits."""
    return equal_bits(saved_weights(one, folder), saved_weights(other, folder))


def exported(folder: Path) -> dict[str, Tensor]:
    """The tensors of a Hugging Face folder."""
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """The same names with the same bytes: NaN equals NaN, 0.0 is not -0.0."""
    raw = [[each.flatten().view(torch.uint8).numpy().tobytes() for _, each in sorted(some.items())] for some in (a, b)]
    return a.keys() == b.keys() and raw[0] == raw[1]


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest distance between two tensors of one name."""
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def environment(folder: Path, **more: str) -> dict[str, str]:
    """For a subprocess: one thread, the CPU, caches of its own, no distributed variables."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"OMP_NUM_THREADS": "1", "KENOTRON_DEVICE": "cpu", "COLUMNS": "200", "TERM": "dumb"} | more


def command(*arguments: str | Path, folder: Path, timeout: float = 300, **more: str) -> subprocess.CompletedProcess:
    """``kenotron <arguments>`` in `folder`, in a process of its own."""
    return subprocess.run(
        [*KENOTRON, *map(str, arguments)],
        cwd=folder,
        env=environment(folder, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
