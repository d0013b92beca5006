"""The manifest is a JSON file that lists what a checkpoint consists of, and proves that it is complete.

It is written last, so a folder without one is not a checkpoint. It holds the size and the XXH3 of every other
file, every scalar of the run (`state`), and, as its last entry, the XXH3 of itself:

    {
     "format": "kenotron-checkpoint",
     "version": 1,
     "step": 10,
     "saved_at": 1763625600.25,
     "state": {"consumed_tokens": 2560},
     "files": {"config.yaml": {"bytes": 1201, "xxh3": "a64f..."}, "model/rank0.safetensors": {...}},
     "xxh3": "06b1..."
    }

Every content has exactly one text, so a change of any byte, even a space, is found by rendering the content again.
"""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from kenotron.checkpoint.durable import FileRecord, refusal
from kenotron.config.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "kenotron-checkpoint"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The content of one checkpoint. `saved_at` is in seconds since 1970, and increases with every save."""

    step: int
    saved_at: float
    state: dict[str, Any]
    files: dict[str, FileRecord]

    @property
    def bytes(self) -> int:
        """The size of the checkpoint without the manifest itself."""
        return sum(record.bytes for record in self.files.values())

    def below(self, *folders: str) -> dict[str, FileRecord]:
        """Return the files in the named folders."""
        return {name: record for name, record in self.files.items() if name.split("/")[0] in folders}


def render(manifest: Manifest) -> bytes:
    """Return the text of a manifest."""
    files = {name: record._asdict() for name, record in manifest.files.items()}
    return _seal({"format": FORMAT, "version": VERSION, **vars(manifest), "files": files})


def _seal(content: dict[str, Any]) -> bytes:
    checksum = xxhash.xxh3_64(json.dumps(content).encode()).hexdigest()
    return (json.dumps(content | {"xxh3": checksum}, indent=1) + "\n").encode()


def _unseal(data: bytes) -> dict[str, Any]:
    """Return the content of a sealed text. Raises ValueError if any of its bytes was changed."""
    content = json.loads(data)
    if not isinstance(content, dict) or "xxh3" not in content:
        raise ValueError("no checksum")
    if _seal({key: value for key, value in content.items() if key != "xxh3"}) != data:
        raise ValueError("wrong checksum")
    return content


def read_manifest(path: Path | str) -> Manifest:
    """Read and check the manifest of the checkpoint folder `path`.

    Raises:
        CheckpointError: there is none, it is damaged, or a newer version wrote it.
    """
    file = Path(path) / MANIFEST
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {MANIFEST}") from None
    except OSError as error:
        raise refusal("read", file, error) from error
    return parse(data, file)


def parse(data: bytes, file: Path | str) -> Manifest:
    """Return the manifest whose text is `data`, read from `file`. Raises like `read_manifest`."""
    try:
        content = _unseal(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: its checksum does not match its content") from error
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not the manifest of a {FORMAT}: its format is {content.get('format')!r}")
    try:
        if content["version"] > VERSION:
            raise CheckpointError(
                f"{file} has version {content['version']}; this kenotron reads up to {VERSION}: update it"
            )
        files = {name: FileRecord(int(each["bytes"]), str(each["xxh3"])) for name, each in content["files"].items()}
        manifest = Manifest(int(content["step"]), float(content["saved_at"]), dict(content["state"]), files)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{file} is not a valid manifest: {error}") from error
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise CheckpointError(f"{file} names a file outside its folder: {name!r}")
    return manifest


def plain(value: object, where: str) -> Any:
    """Return `value` as JSON returns it (tuples become lists); raise an error that names what JSON cannot hold.

    >>> plain({"betas": (0.9, 0.95)}, "state")
    {'betas': [0.9, 0.95]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{where}: key {key!r} is {type(key).__name__}; JSON allows only text as a key")
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise CheckpointError(f"{where} is {kind}; JSON holds None, bool, int, float, text, list and dict")
