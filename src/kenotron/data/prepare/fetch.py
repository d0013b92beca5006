"""`kenotron data fetch`: what a run needs from elsewhere, brought here before it begins.

    tokenizer    gpt2                      hub    fetched into the hub's cache
    dataset      org/corpus (train)        hub    fetched, and prepared as `datasets` reads it
    path         data/code                 here   has to exist
    remote       s3://bucket/tokens               has to exist; read while training

The needs are read off the config; each is met by the very function that the run itself calls, so that what worked here
works there, with HF_HUB_OFFLINE=1. With that variable set already, nothing is fetched: it is a check.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kenotron.config.errors import InputError, no_such_path

from ..hub import cached_revision, offline_variable, unreachable
from ..plan import datasets_of, whole_keys
from ..progress import Report
from ..remote import RemotePath, as_path, is_remote
from ..token_paths import token_paths

CLOCK = 0.02
"""Seconds by which the times of files may lag behind the clock."""


@dataclass(frozen=True)
class Need:
    """One thing that a run needs. `bring` fetches it where it is missing and returns the files that it lies in; what
    is read where it is has none, and `look` tells its bytes."""

    kind: str
    name: str
    key: str
    bring: Callable[[], Iterable[Path]] | None = field(default=None, compare=False)
    look: Callable[[], int] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Found:
    """A need that is met: the file or folder it lies in, its bytes, and how many of them were brought now."""

    need: Need
    place: Path | None
    size: int
    brought: int


def fetch(needs: Iterable[Need], report: Report) -> list[Found]:
    """Meet every need; `report` gets a line before each that may take long.

    Errors (InputError): a line for each that cannot be met, after all others are.
    """
    found, problems = [], []
    for need in dict.fromkeys(needs):
        if need.kind != "path" and (need.bring or need.look):
            report(f"{need.kind} {need.name} …")
        start = time.time() - CLOCK
        try:
            if need.bring is None:
                found.append(Found(need, None, need.look() if need.look else 0, 0))
                continue
            files = sorted({file.resolve(): file for file in need.bring()}.values())
        except InputError as error:
            problems.append(str(error))
            continue
        sizes = {file: file.stat() for file in files}
        new = sum(stat.st_size for stat in sizes.values() if stat.st_ctime >= start)
        place = Path(os.path.commonpath(files)) if files else None
        found.append(Found(need, place, sum(stat.st_size for stat in sizes.values()), new))
    if problems:
        raise InputError("\n".join(problems))
    return found


def data_needs(config: Any) -> Iterator[Need]:
    """What the tokenizer and the data of `config` need.

    Errors (InputError): a mix file of token paths that cannot be read.
    """
    name = config.tokenizer.tokenizer_name_or_path
    if name:
        bring = partial(_tokenizer, name, config.tokenizer.tokenizer_revision)
        yield Need("tokenizer", name, "tokenizer.tokenizer_name_or_path", bring)
    for number, stage in enumerate(config.data_stages):
        for key, dataset in datasets_of(stage.data.dataset, number):
            with whole_keys(key):
                yield from _dataset_needs(dataset, key)


def _dataset_needs(dataset: Any, key: str) -> Iterator[Need]:
    if (names := getattr(dataset, "hf_dataset_or_datasets", None)) is not None:
        splits = dataset.hf_dataset_splits
        for name in [names] if isinstance(names, str) else names:
            for split in [splits] if isinstance(splits, str) else splits:
                yield _rows_need(name, split, dataset.hf_dataset_config_name, f"{key}.hf_dataset_or_datasets")
    elif (paths := getattr(dataset, "text_files", None)) is not None:
        for path in [paths] if isinstance(paths, str) else paths:
            yield path_need(path, f"{key}.text_files")
    elif (tokens := token_paths(dataset)) is not None:
        for _, token_path in tokens:
            yield path_need(token_path.path, token_path.key.replace("dataset", key, 1))
    elif (source := getattr(dataset, "source", None)) is not None:
        yield Need("own code", source, f"{key}.source")


def _rows_need(name: str, split: str, config_name: str | None, key: str) -> Need:
    if Path(name).expanduser().exists() or name.startswith(("/", ".", "~")):
        return path_need(name, key)
    told = ", ".join(filter(None, (config_name, split)))
    return Need("dataset", f"{name} ({told})", key, partial(_rows, key, name, config_name, split))


def path_need(path: str, key: str) -> Need:
    """A file or folder that the config names by `key`."""
    if is_remote(path):
        return Need("remote", path, key, look=partial(_bytes_elsewhere, path, key))
    return Need("path", path, key, partial(_existing, path, key))


# ---- bringing ----------------------------------------------------------------------------------------------


def _tokenizer(name: str, revision: str | None) -> list[Path]:
    from ..tokenizer import TOKENIZER_FILES, load_tokenizer

    folder = load_tokenizer(name, revision).folder
    if folder is None:  # converted by transformers, from whatever files the repository has
        return _snapshot_files(name, revision)
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _rows(key: str, name: str, config_name: str | None, split: str) -> list[Path]:
    from ..hub_texts import load_rows

    if not offline_variable() and cached_revision(name, None, "dataset") is None and (reason := unreachable()):
        # Now: the library would find that out by trying again and again.
        raise InputError(
            f"{key}: cannot reach the Hugging Face hub for '{name}', and it is not cached here ({reason}); "
            "no folder here has that name"
        )
    with whole_keys(key.removesuffix(".hf_dataset_or_datasets")):
        rows = load_rows(name, config_name, split)
    return [Path(file["filename"]) for file in rows.cache_files]


def _existing(path: str, key: str) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if not place.is_dir():
        raise no_such_path(key, path)
    found = [Path(folder, name) for folder, _, names in os.walk(place, followlinks=True) for name in names]
    if not any(file.is_file() for file in found):
        raise InputError(f"{key}: folder {path} is empty")
    return [file for file in found if file.is_file()]


def _bytes_elsewhere(path: str, key: str) -> int:
    place = as_path(path)
    if not isinstance(place, RemotePath) or not place.exists():
        raise no_such_path(key, path)
    return sum(file.stat().st_size for file in ([place] if place.is_file() else place.walk()))


def _snapshot_files(name: str, revision: str | None) -> list[Path]:
    """What the hub's cache holds of a revision of a model repository."""
    from huggingface_hub import constants

    commit = cached_revision(name, revision, "model")
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots" / (commit or "")
    return [file for file in folder.rglob("*") if file.is_file()]
