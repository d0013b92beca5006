"""Small configs and texts for the tests of the data package."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from kenotron.config import Config, load
from kenotron.data import RunData, TokenBatch, open_run
from kenotron.data.sources.text import TextDataset
from kenotron.text.hash_split import hash_threshold, is_held_out

CONFIG = """
general: {project: data}
model:
  model_config: {hidden_size: 16, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 512,
    eos_token_id: 2}
  init_method: {std: 0.02}
tokenizer: {}
checkpoints: {checkpoints_path: checkpoints, checkpoint_interval: 10}
tokens: {sequence_length: 32, train_steps: 12, micro_batch_size: 2, batch_accumulation_per_replica: 2,
  val_check_interval: 5, limit_val_batches: -1, val_fraction: 0.2}
optimizer: {optimizer_factory: {name: adamW}, zero_stage: 0, weight_decay: 0.01, clip_grad: 1.0,
  accumulate_grad_in_fp32: true, learning_rate_scheduler: {learning_rate: 0.0003, lr_warmup_steps: 2}}
data_stages: []
"""


def run_config(*stages: Any, **changes: Any) -> Config:
    """A config with one stage per entry of `stages`: a dataset, or a dict with `dataset`, `start`, `length` and
    the stage's ramps.

    `changes` are keys of `tokens`, or of `model`, `tokenizer`, `data` in the form ``model__document_masking=True``.
    """
    config = yaml.safe_load(CONFIG)
    sections = {"data": {}, "arch": config["model"]["model_config"]} | config
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        sections[section or "tokens"][key] = value
    if not config["tokenizer"] and any(name in str(stages[0]) for name in ("corpus", "text_files", "hf_dataset")):
        config["tokenizer"] = {"train": {"vocab_size": 300}}
    for number, stage in enumerate(stages):
        given = stage if isinstance(stage, dict) and "dataset" in stage else {"dataset": stage}
        data = {"dataset": given["dataset"], "seed": 42} | sections["data"]
        made = {"name": f"stage {number}", "start_training_step": given.get("start", 1 + 6 * number), "data": data}
        made |= {"sequence_length": given.get("length"), "batch_size_ramp": given.get("batch_size_ramp")}
        config["data_stages"].append(made)
    return load(config)


def write_texts(folder: Path, count: int = 40, words: int = 60, seed: int = 0, accents: bool = True) -> Path:
    """A folder of `count` small text files; returns it."""
    generator = random.Random(seed)
    letters = "abcdefghijklmnop" + ("éß漢🙂" if accents else "")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        made = ["".join(generator.choice(letters) for _ in range(generator.randint(2, 6))) for _ in range(words)]
        (folder / f"{number:03}.txt").write_text(" ".join(made) + "\n", encoding="utf-8")
    return folder


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Name of each file in `folder` → its content."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def quiet(line: str) -> None:
    """What a run that says nothing reports to."""


def opened(*stages: Any, start_step: int = 1, **changes: Any) -> RunData:
    """The data of such a run."""
    return open_run(run_config(*stages, **changes), start_step, quiet)


def validation_texts(data: RunData) -> Iterator[str]:
    """The documents that validation reads as text."""
    data.held_out()
    run = data.whole_settings if data.config.tokens.val_datasets else data.settings
    reserved = data.sources.reserved
    for source, _ in data.evaluated["val"]:
        if isinstance(source.spec, TextDataset):
            texts = source.spec.documents(run.config.remote_data)
            limit = hash_threshold(texts.documents(), run.val_fraction)
            yield from (piece.text for piece in texts.documents() if is_held_out(piece.text, limit, reserved))


def batches_of(config: Config, start_step: int = 1) -> list[TokenBatch]:
    """Every batch from a step on as the loader gives them, and then those of validation."""
    with open_run(config, start_step, quiet) as data, data.loader(start_step) as loader:
        batches = [batch for step in loader for batch in step]
        return [*batches, *(batch for batch, *_ in data.validation())]


def assert_same_batches(found: Sequence[TokenBatch], expected: Sequence[TokenBatch]) -> None:
    """Equal tokens, labels and documents."""
    for one, other in zip(found, expected, strict=True):
        for name in ("tokens", "labels", "documents"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)


def assert_same_runs(here: dict[str, Any], there: dict[str, Any], start_step: int = 1, **changes: Any) -> None:
    """Runs on these datasets have the same batches, and some of validation after those of 12 steps."""
    local, remote = (batches_of(run_config(dataset, **changes), start_step) for dataset in (here, there))
    assert len(local) > 2 * (13 - start_step)
    assert_same_batches(remote, local)


def rows(batches: Sequence[TokenBatch]) -> dict[int, list[int]]:
    """Number of each sample in the run → its tokens."""
    return {int(i): row.tolist() for batch in batches for i, row in zip(batch.sample_ids, batch.tokens)}
