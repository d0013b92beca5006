"""Which tokenized files a dataset asks for: nanotron's Nanoset keys, `tokens`, and a mix file, as one kind of entry.

dataset_folder: [a, b]               ┐
dataset_folder: {a: 3, b: 1}         ├─▶ token_paths ─▶ [(share, TokenPath), ...]
tokens: mix.json    {"a": 3, "b": 1} ┘
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from kenotron.config.errors import InputError

from .remote import AnyPath, as_path, is_remote


@dataclass(frozen=True)
class TokenPath:
    """One path of `dataset_folder` or `tokens` (`key` says which), with what is asked of it."""

    key: str
    path: str
    dtype: str | None = None
    read_path: str | None = None
    max_tokens: int | None = None
    shuffle_files: bool = False
    return_positions: bool = True
    tokenizer_name: str | None = None
    vocab_size: int | None = None
    packing: str = "windows"


def token_paths(dataset: Any) -> list[tuple[float | None, TokenPath]] | None:
    """The paths of a dataset of tokenized files with their shares (None: by their length); None for other datasets.

    Errors (InputError): a mix file that cannot be read.
    """
    if getattr(dataset, "dataset_folder", None) is not None:
        return _nanoset(dataset)
    if (paths := getattr(dataset, "tokens", None)) is None:
        return None
    if isinstance(paths, str) and paths.endswith(".json"):
        paths = read_mix(as_path(paths))
    if isinstance(paths, dict):
        shares: list[tuple[float | None, str]] = [(share, path) for path, share in paths.items()]
    else:
        shares = [(None, path) for path in ([paths] if isinstance(paths, str) else paths)]
    return [
        (share, TokenPath("dataset.tokens", path, dataset.token_dtype, packing=dataset.packing))
        for share, path in shares
    ]


def _nanoset(dataset: Any) -> list[tuple[float | None, TokenPath]]:
    folders, copies = dataset.folders, dataset.dataset_read_path
    shares = dataset.dataset_weights or [None] * len(folders)
    caps = dataset.dataset_max_tokens or [None] * len(folders)
    copies = [copies] if isinstance(copies, str) else copies or [None] * len(folders)
    size = dataset.token_size_in_bytes
    return [
        (
            share,
            TokenPath(
                key="dataset.dataset_folder",
                path=folder,
                dtype=f"uint{8 * size}" if size else None,
                read_path=copy,
                max_tokens=cap,
                shuffle_files=dataset.shuffle_files,
                return_positions=dataset.return_positions,
                tokenizer_name=dataset.tokenizer_name,
                vocab_size=dataset.vocab_size,
                packing=dataset.packing,
            ),
        )
        for folder, share, cap, copy in zip(folders, shares, caps, copies, strict=True)
    ]


def read_mix(file: AnyPath) -> dict[str, float]:
    """A mix ``{path: weight}`` from a JSON file; its relative paths are relative to the file's folder."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if repeated := sorted({name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1}):
            raise InputError(f"dataset.tokens: {file} has {repeated[0]!r} twice")
        return dict(pairs)

    try:
        mix = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as error:
        raise InputError(f"dataset.tokens: cannot read {file}: {error.strerror or 'no such file'}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"dataset.tokens: {file} is not JSON: {error}") from None
    if not isinstance(mix, dict) or not mix:
        raise InputError(f"dataset.tokens: {file}: expected a map path → weight, found {json.dumps(mix):.40}")
    for path, weight in mix.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (number and 0 < weight <= sys.float_info.max):
            raise InputError(
                f"dataset.tokens: {file}: the weight of {path!r} must be a number above 0, found {weight!r:.40}"
            )
    return {_from(file.parent, path): float(weight) for path, weight in mix.items()}


def _from(folder: AnyPath, path: str) -> str:
    return path if is_remote(path) else str(folder / os.path.expanduser(path))
