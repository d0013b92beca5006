"""`kenotron data fetch`: download everything a run needs before it starts.

    tokenizer    gpt2                      hub      downloaded into the hub's cache
    dataset      org/corpus (train)        hub      downloaded, and prepared in the form that `datasets` reads
    path         data/code                 local    must exist
    remote       s3://bucket/tokens                 must exist; read during training

The requirements come from the config. Each is resolved by the same function that the run calls, so what succeeds
here succeeds in the run with HF_HUB_OFFLINE=1. With that variable set, nothing is downloaded: the command only checks.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kenotron.config import Config
from kenotron.config.data_stages import CustomSource, PlainDataset, PretrainDataset, SFTDataset, as_list
from kenotron.config.errors import InputError, no_such_path
from kenotron.config.remote_data import is_remote
from kenotron.data.sources import specs_of
from kenotron.data.stage_plan import all_datasets_of, complete_keys
from kenotron.storage.hub import cached_revision
from kenotron.storage.paths import AnyPath, as_path, walk
from kenotron.text.progress import Report


@dataclass(frozen=True)
class RequiredFile:
    """One input of a run. `files` returns its files, and fetches those that are missing here, unless they are read in
    place; None where it has none that are known."""

    kind: str
    name: str
    key: str
    files: Callable[[], Iterable[AnyPath]] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class ResolvedFile:
    """A resolved input: its file or folder on this machine, and its size in bytes."""

    required: RequiredFile
    place: Path | None
    size: int


def fetch(requirements: Iterable[RequiredFile], report: Report) -> list[ResolvedFile]:
    """Resolve every requirement; `report` gets a line before each that may take long.

    Raises InputError: one line for each requirement that cannot be resolved, after all others were.
    """
    found, problems = [], []
    for required in dict.fromkeys(requirements):
        if required.kind != "path" and required.files:
            report(f"{required.kind} {required.name} …")
        try:
            files = list(required.files()) if required.files else []
        except InputError as error:
            problems.append(str(error))
            continue
        sizes = {os.path.realpath(file) if isinstance(file, Path) else file: file.stat().st_size for file in files}
        here = [file for file in files if isinstance(file, Path)]
        found.append(ResolvedFile(required, Path(os.path.commonpath(here)) if here else None, sum(sizes.values())))
    if problems:
        raise InputError("\n".join(problems))
    return found


def data_requirements(config: Config) -> Iterator[RequiredFile]:
    """Yield what tokenizer and data of `config` require.

    Raises InputError: a mix file of token paths that cannot be read.
    """
    name = config.tokenizer.tokenizer_name_or_path
    if name:
        download = partial(_tokenizer, name, config.tokenizer.tokenizer_revision)
        yield RequiredFile("tokenizer", name, "tokenizer.tokenizer_name_or_path", download)
    for key, dataset in all_datasets_of(config):
        with complete_keys(key):
            yield from _dataset_requirements(dataset, key)


def _dataset_requirements(dataset: PlainDataset | None, key: str) -> Iterator[RequiredFile]:
    if isinstance(dataset, PretrainDataset | SFTDataset):
        names = dataset.hf_dataset_or_datasets
        for name in [names] if isinstance(names, str) else names:
            for split in as_list(dataset.hf_dataset_splits):
                yield _rows_requirement(name, split, dataset.hf_dataset_config_name, f"{key}.hf_dataset_or_datasets")
    elif isinstance(dataset, CustomSource):
        yield RequiredFile("own code", dataset.source, f"{key}.source")
    else:
        for _, spec in specs_of(dataset):
            own_key, paths = spec.paths()
            for path in paths:
                yield required_path(path, own_key.replace("dataset", key, 1))


def _rows_requirement(name: str, split: str, config_name: str | None, key: str) -> RequiredFile:
    if Path(name).expanduser().exists() or name.startswith(("/", ".", "~")):
        return required_path(name, key)
    subset = ", ".join(filter(None, (config_name, split)))
    return RequiredFile("dataset", f"{name} ({subset})", key, partial(_rows, key, name, config_name, split))


def required_path(path: str, key: str) -> RequiredFile:
    """Return the requirement that a path of the config exists; `key` names its config key in errors."""
    return RequiredFile("remote" if is_remote(path) else "path", path, key, partial(_existing, path, key))


# ---- downloading -------------------------------------------------------------------------------------------


def _tokenizer(name: str, revision: str | None) -> list[Path]:
    from kenotron.text.tokenizer import TOKENIZER_FILES, load_tokenizer

    folder = load_tokenizer(name, revision).folder
    if folder is None:  # converted by transformers from other files of the repository
        return _snapshot_files(name, revision)
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _rows(key: str, name: str, config_name: str | None, split: str) -> list[Path]:
    from kenotron.text.hub_datasets import load_rows

    with complete_keys(key.removesuffix(".hf_dataset_or_datasets")):
        rows = load_rows(name, config_name, split)
    return [Path(file["filename"]) for file in rows.cache_files]


def _existing(path: str, key: str) -> list[AnyPath]:
    place = as_path(path)
    if not place.exists():
        raise no_such_path(key, path)
    files = [file for file in (walk(place) if place.is_dir() else [place]) if file.is_file()]
    if not files:
        raise InputError(f"{key}: folder {path} is empty")
    return files


def _snapshot_files(name: str, revision: str | None) -> list[Path]:
    """Return the cached files of a revision of a model repository."""
    from huggingface_hub import constants

    commit = cached_revision(name, revision, "model")
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}" / "snapshots" / (commit or "")
    return [file for file in folder.rglob("*") if file.is_file()]
