"""Where a Hugging Face model is, and its tensors, read when they are used.

folder = locate("meta-llama/Llama-3.2-1B")        # a folder, or a hub name: local cache first
weights = hf_weights(folder)
weights["model.norm.weight"]                      # only these bytes are read
weights.block("lm_head.weight", (4, 0), (2, 64))  # rows 4 and 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kenotron.config.errors import InputError, nearest
from kenotron.interop.hf_config import read_json
from kenotron.storage.hub import hub_file
from kenotron.text.tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HUB = "no such folder here"  # so each of the hub's errors begins


Box = tuple[slice, ...]  # from and to, of each dimension; () is everything


class Stored(NamedTuple):
    """A tensor that is still on the disk: its shape, and how to read a box of it."""

    shape: tuple[int, ...]
    read: Callable[[Box], Tensor]


class Weights(Mapping[str, "Tensor"]):
    """Tensors by name; each is read anew when it is asked for, so none stays in memory by itself."""

    def __init__(self, stored: Mapping[str, Stored], where: str) -> None:
        self._stored, self.where = dict(stored), where

    def stored(self, name: str) -> Stored:
        """Shape and reader of tensor `name`. Raises InputError that names the nearest if there is none."""
        if name not in self._stored:
            raise InputError(f"{self.where} has no tensor {name!r}{nearest(name, self._stored)}")
        return self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of tensor `name`."""
        return self.stored(name).shape

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The elements of tensor `name` from `offset` on, `shape` of them: only they are read."""
        return self.stored(name).read(tuple(slice(start, start + size) for start, size in zip(offset, shape)))

    def __getitem__(self, name: str) -> Tensor:
        return self.stored(name).read(())

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def is_hub_name(source: str | Path) -> bool:
    """Could this be ``owner/name``, and is it not a folder here?"""
    text = str(source)
    return not Path(text).expanduser().exists() and text.count("/") <= 1 and text[:1] not in (".", "/", "~")


def find_config(source: str | Path) -> Path:
    """The `config.json` of a folder or a hub name."""
    if is_hub_name(source):
        file = hub_file(str(source), "config.json", None, HUB)
        if file is None:
            raise InputError(f"{HUB}: repository '{source}' has no config.json")
        return file
    folder = Path(source).expanduser()
    if folder.is_file():
        raise InputError(f"{folder} is a file; expected the folder of a Hugging Face model")
    if not folder.is_dir():
        parent = next(parent for parent in folder.absolute().parents if parent.is_dir())
        hint = nearest(folder.name, [entry.name for entry in parent.iterdir()])
        raise InputError(f"no folder {folder}; the nearest that exists is {parent}{hint}")
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a Hugging Face model: it has no config.json")
    return folder / "config.json"


def locate(source: str | Path) -> Path:
    """The folder of a Hugging Face model with its weights and tokenizer, fetched where they are missing."""
    folder = find_config(source).parent
    if not is_hub_name(source):
        return folder
    repo = str(source)
    index = hub_file(repo, INDEX, None, HUB)
    shards = _shards(index) if index else [SINGLE]
    for name in shards:
        if hub_file(repo, name, None, HUB) is None:
            raise InputError(f"{HUB}: repository '{repo}' has no {name} (only safetensors are read)")
    for name in (*TOKENIZER_FILES, "generation_config.json"):
        hub_file(repo, name, None, HUB, optional=True)
    return folder


def hf_weights(folder: Path) -> Weights:
    """The tensors of a folder with one safetensors file or several and an index."""
    from safetensors import SafetensorError, safe_open

    names = _shards(folder / INDEX) if (folder / INDEX).is_file() else [SINGLE]
    stored: dict[str, Stored] = {}
    for name in names:
        file = folder / name
        if not file.is_file():
            raise InputError(_missing(folder, name))
        try:
            opened = safe_open(str(file), framework="pt")
            keys = list(opened.keys())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} is damaged or not a safetensors file: {error}") from None
        stored |= {key: _stored(opened, key) for key in keys if not key.endswith("rotary_emb.inv_freq")}
    return Weights(stored, str(folder))


def _stored(opened: Any, key: str) -> Stored:
    part = opened.get_slice(key)
    return Stored(tuple(part.get_shape()), lambda box: part[box] if box else opened.get_tensor(key))


def _shards(index: Path) -> list[str]:
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise InputError(f"{index}: expected a weight_map")
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise InputError(f"{index}: expected names of files beside it, found {name!r}")
    return sorted(set(files.values()))


def _missing(folder: Path, name: str) -> str:
    if name == SINGLE and list(folder.glob("pytorch_model*.bin")):
        return f"{folder} has its weights as pickles (pytorch_model.bin), and only safetensors are read"
    return f"{folder} has no {name}" + (f", which its {INDEX} names" if name != SINGLE else "")
