"""The average of checkpoints of one model, as a checkpoint: `kenotron checkpoint average`.

    average(["run/8000", "run/9000", "run/10000"], "mean")                 mean/10000: the mean of their weights
    average(["code/5000", "text/5000"], "merged", weights=[3, 1])          merged/5000: 3/4 and 1/4 of them
    average(["run/10000"], "smooth", ema=True)                             smooth/10000: what `optimizer.ema_decay` kept

Sums are float64, over blocks of rows, and one tensor of the result is in memory at a time. The result has the step,
config and tokenizer of the checkpoint with the highest step (the first of several), and no optimizer state: it can be
decoded from, exported, and trained on by a new run without the optimizer.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.checkpoint.folders import Progress, check_files, list_checkpoints, resolve
from kenotron.checkpoint.index import Entry, read_index
from kenotron.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from kenotron.checkpoint.reading import block_reader
from kenotron.checkpoint.saving import Saved, save
from kenotron.config.errors import CheckpointError, InputError
from kenotron.config.writing import ABSENT, flatten

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1 << 20
"""Elements that are summed at a time."""


@dataclass(frozen=True)
class _Part:
    """One of the checkpoints, and its share of the result."""

    path: Path
    share: float
    manifest: Manifest
    tensors: dict[str, Entry]
    model_config: dict[str, Any]
    read: Callable[[str, Sequence[int], Sequence[int]], Tensor]


def average(
    paths: Sequence[Path | str],
    output: Path | str,
    weights: Sequence[float] | None = None,
    progress: Progress | None = None,
    ema: bool = False,
) -> Saved:
    """Write the weighted mean of the checkpoints `paths` as the checkpoint `<output>/<step>`.

    `weights` are divided by their sum; None: all are equal. `progress(done, total)` counts tensors. `ema`: the weights
    of a checkpoint are the moving average that its run kept (`optimizer.ema_decay`); one is enough then.

    Raises InputError (CheckpointError) where there are too few, one has no moving average, a weight is not above 0,
    `output` holds checkpoints, one is damaged, or their models, tensors or tokenizers differ.
    """
    from kenotron.checkpoint.tensors import torch_dtype
    from kenotron.kernels.tensor_shard import TensorShard

    root = Path(output)
    if (root / MANIFEST).exists():
        raise InputError(f"{root} is a checkpoint; name a new folder")
    if list_checkpoints(root) or (root.exists() and not root.is_dir()):
        raise InputError(f"{root} holds checkpoints already (or is a file); name a new folder")
    shares = _shares(len(paths), weights, least=1 if ema else 2)
    parts = [_open(resolve(path), share, ema) for path, share in zip(paths, shares, strict=True)]
    for part in parts[1:]:
        _check_same_model(parts[0], part)
    newest = max(parts, key=lambda part: part.manifest.step)
    done = count(1)

    def mean(name: str, entry: Entry) -> Tensor:
        if progress:
            progress(next(done), len(newest.tensors))
        if torch_dtype(entry.dtype).is_floating_point:
            return _mean(parts, name, entry)
        return newest.read(name, (0,) * len(entry.shape), entry.shape)  # counters and masks have no mean

    tokenizer = newest.path / "tokenizer"
    sources = [{"path": str(part.path), "weight": part.share} for part in parts]
    return save(
        root,
        newest.manifest.step,
        model={
            name: TensorShard.later(entry.shape, torch_dtype(entry.dtype), partial(mean, name, entry))
            for name, entry in newest.tensors.items()
        },
        optimizer=None,
        state={**newest.manifest.state, "hooks": {}, "averaged_from": sources},
        config_yaml=(newest.path / "config.yaml").read_text(encoding="utf-8"),
        model_config=newest.model_config,
        save_tokenizer=partial(shutil.copytree, tokenizer, dirs_exist_ok=True) if tokenizer.is_dir() else None,
    )


def _shares(number: int, weights: Sequence[float] | None, least: int) -> list[float]:
    """The weights, divided by their sum."""
    if number < least:
        raise InputError(f"expected two checkpoints or more to average, found {number}")
    weights = [1.0] * number if weights is None else weights
    if len(weights) != number:
        raise InputError(f"weights: expected {number}, one for each checkpoint, found {len(weights)}")
    if wrong := [weight for weight in weights if not (weight > 0 and math.isfinite(weight))]:
        raise InputError(f"weights: expected numbers above 0, found {wrong[0]:g}")
    weights = [weight / max(weights) for weight in weights]  # before the sum, which may be beyond a float
    return [weight / math.fsum(weights) for weight in weights]


def _open(path: Path, share: float, ema: bool) -> _Part:
    """The checkpoint `path`, its files compared with their checksums."""
    manifest = read_manifest(path)
    folders = ("model", "optimizer") if ema else ("model",)
    if problems := check_files(path, manifest.below(*folders, "tokenizer", "config.yaml", "model_config.json")):
        raise CheckpointError(problems[0])
    model_config = json.loads((path / "model_config.json").read_text(encoding="utf-8"))
    index = read_index(path / "model", manifest.files)
    read = _ema_reader(path) if ema else block_reader(path)[1]
    return _Part(path, share, manifest, index, model_config, read)


def _ema_reader(path: Path) -> Callable[[str, Sequence[int], Sequence[int]], Tensor]:
    """Reads the moving average of each weight in the optimizer's state; what is not trained, as it is."""
    of_model = block_reader(path)[1]
    shapes, of_optimizer = block_reader(path, folder="optimizer") if (path / "optimizer").is_dir() else ({}, of_model)
    if not any(name.endswith(".ema") for name in shapes):
        raise InputError(f"{path} has no moving average of weights: its run had no optimizer.ema_decay")

    def read(name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        kept = f"state.{name}.ema"
        return of_optimizer(kept, offset, shape) if kept in shapes else of_model(name, offset, shape)

    return read


def _check_same_model(one: _Part, other: _Part) -> None:
    """Raise InputError, which names the first difference, unless both are checkpoints of one model."""
    here, there = _identity(one), _identity(other)
    for key in dict.fromkeys([*here, *there]):
        if (expected := here.get(key, ABSENT)) != (found := there.get(key, ABSENT)):
            raise InputError(f"{other.path} holds a different model from {one.path}: {key} is {found}, not {expected}")


def _identity(part: _Part) -> dict[str, object]:
    """What the parts of an average have in common: settings, tensors, and the checksum of the vocabulary."""
    tokenizer = part.manifest.below("tokenizer")
    vocabulary = tokenizer.get("tokenizer/tokenizer.json")
    hashes = [record.xxh3 for record in ([vocabulary] if vocabulary else tokenizer.values())]
    tensors = {name: f"{entry.dtype} {list(entry.shape)}" for name, entry in part.tensors.items()}
    return {**dict(flatten(part.model_config)), **tensors, "the hash of its tokenizer": " ".join(hashes)}


def _mean(parts: Sequence[_Part], name: str, entry: Entry) -> Tensor:
    """The tensor `name` of the result, in the dtype of the parts."""
    import torch

    from kenotron.checkpoint.tensors import torch_dtype

    result = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
    rows = result.view(1) if result.dim() == 0 else result
    at_once = max(1, BLOCK // max(1, rows[:1].numel()))
    for first in range(0, len(rows), at_once):
        block = rows[first : first + at_once]
        total = torch.zeros(block.shape, dtype=torch.float64)
        for part in parts:
            offset, shape = ((first, *[0] * (block.dim() - 1)), tuple(block.shape)) if entry.shape else ((), ())
            total += part.share * part.read(name, offset, shape).to(torch.float64)
        block.copy_(total)
    return result
