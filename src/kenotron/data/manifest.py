"""`manifest.json` says what a folder of tokens holds and how it was made; written last, it also means "done".

    {"made_by": {"inputs": […], "content": {…}, "tokenizer": {…}, "options": {…}},
     "tokenizer": "gpt2", "vocab_size": 50257, "dtype": "uint16", "eos": 50256, "bos": null,
     "documents": 8013769, "tokens": 9035582198, "bytes": 39769491688, "skipped": 0,
     "files": [{"documents": …, "tokens": …, "bytes": …, "xxh3": {"00000.ds": "…", "00000.ds.index": "…"}}]}

It contains no time or host, so the same work gives the same manifest.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from kenotron.config.errors import InputError
from kenotron.data.formats import MANIFEST
from kenotron.data.formats.token_file import TokenFile, readable
from kenotron.storage.files import replace_file
from kenotron.storage.paths import AnyPath

Json: TypeAlias = dict[str, Any]
"""A JSON object."""


def read_json(file: AnyPath, **expected: type) -> Json | None:
    """Return the object in `file`, or None if there is no such file; `expected` are required keys and their types.

    Raises InputError if the file is damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        for key, kind in expected.items():
            if not isinstance(found[key], kind):
                raise ValueError(f"'{key}' holds {type(found[key]).__name__}, expected {kind.__name__}")
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, found {type(found).__name__}")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"no key {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{file}: damaged, remove it to have the work done again: {why}") from None
    return found


def manifests_beside(files: Iterable[TokenFile], above: Iterable[AnyPath] = ()) -> Iterator[tuple[AnyPath, Json]]:
    """Yield (path, content) of each manifest beside `files` and in the folders `above`.

    Files that are no JSON object belong to other programs and are left out. Raises InputError for unreadable files.
    """
    names = ((file.path, name) for file in files for name in (MANIFEST, f"{file.path.name}.{MANIFEST}"))
    beside = (path.with_name(name) for path, name in names)
    for place in dict.fromkeys([*(folder / MANIFEST for folder in above), *beside]):
        if not place.is_file():
            continue
        try:
            with readable(place):
                made = json.loads(place.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            continue
        if isinstance(made, dict):
            yield place, made


def recorded_checksums(files: Sequence[TokenFile]) -> dict[AnyPath, str]:
    """Return the checksums, in manifests beside `files`, of these files and of their index, loss and metadata."""
    paths = {file.path for file in files}
    recorded: dict[AnyPath, str] = {}
    for place, made in manifests_beside(files):
        for sums in sums_of_files(made):
            if any(place.parent / name in paths for name in sums):
                recorded |= {place.parent / name: str(digest) for name, digest in sums.items()}
    return recorded


def sums_of_files(made: Json) -> Iterator[dict[str, Any]]:
    """Yield the checksums, by name, of each token file in a manifest and its index, loss and metadata."""
    entries = made.get("files")
    for entry in entries if isinstance(entries, list) else ():
        sums = entry.get("xxh3") if isinstance(entry, dict) else None
        if isinstance(sums, dict):
            yield sums


def write_json(file: Path, content: Json) -> None:
    """Replace `file` atomically, also if another process writes it at the same time."""
    replace_file(file, (json.dumps(content, indent=2) + "\n").encode())


def checksums(files: Iterable[AnyPath]) -> dict[str, str]:
    """Return file name → XXH3 (128 bits) of every file."""
    found = {}
    for file in sorted(files):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, xxhash.xxh3_128)  # type: ignore[arg-type]  # it can `readinto`
            found[file.name] = digest.hexdigest()
    return found


def refuse_other_work(folder: Path, recorded: Json, current: Json, where: str = "") -> None:
    """Raise InputError, with the first key that differs, unless `folder` was begun (`recorded`) like `current` work."""
    for key in [*current, *(key for key in recorded if key not in current)]:
        old, new = recorded.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict) and old.get("hash", old) == new.get("hash", new):
            continue  # the same content with another name
        if isinstance(old, dict) and isinstance(new, dict) and "hash" not in new:
            refuse_other_work(folder, old, new, f"{where}{key}.")
        elif old != new:
            raise InputError(
                f"{folder} was started with {where}{key} {_short(old)}, found {_short(new)} now; "
                "choose another --output, or remove the folder"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
