"""Load a checkpoint: verify the files, compare the names, and only then change a tensor.

    state = load("checkpoints/10", model=dict(module.named_parameters()), optimizer=flat_optimizer_state)

The tensors are filled in place, on any layout: each rank reads what it needs from the saved chunks. Tools that need
plain tensors use `reading.read_tensors`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from kenotron.checkpoint.durable import refusing
from kenotron.checkpoint.folders import check_together
from kenotron.checkpoint.index import DTYPES, Entry, Index, read_index
from kenotron.checkpoint.manifest import Manifest, read_manifest
from kenotron.config.errors import CheckpointError, first_of, nearest
from kenotron.parallel.ranks import gather, raise_on_any_rank

if TYPE_CHECKING:
    from torch import Tensor

    from kenotron.checkpoint.tensors import Tensors
    from kenotron.kernels.tensor_shard import TensorShard


def load(
    path: Path | str,
    *,
    model: Tensors | None,
    optimizer: Tensors | None,
    hooks: Tensors | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Fill `model`, `optimizer` and `hooks` in place from the checkpoint folder `path` and return its `state`.

    Every rank calls it with its own tensors (DTensors or `TensorShard`s if they are sharded). The folder of an argument
    that is None is not read.

    Args:
        verify: check the files' checksums first, shared by the ranks. False only right after `newest_complete`.

    Raises:
        CheckpointError: a file is damaged, or a name, shape or dtype does not fit. No tensor was changed.
    """
    path = Path(path)
    manifest = raise_on_any_rank(lambda: read_manifest(path))
    folders = {"model": model, "optimizer": optimizer, "hooks": hooks}
    parts = {folder: part for folder, part in folders.items() if part is not None}
    if verify:
        raise_if_damaged(check_together(path, manifest.below(*parts)))
    indexes = raise_on_any_rank(lambda: {folder: open_index(path / folder, manifest) for folder in parts})
    on_all_ranks = {folder: _on_any_rank(indexes[folder], tensors) for folder, tensors in parts.items()}

    def check() -> None:
        for folder, tensors in parts.items():
            _check_fit(path / folder, indexes[folder], tensors, on_all_ranks[folder])

    def fill() -> None:
        for folder, tensors in parts.items():
            fill_tensors(path / folder, indexes[folder], tensors)

    raise_on_any_rank(check)
    from kenotron.checkpoint.tensors import fill_tensors

    raise_on_any_rank(fill)
    return manifest.state


def read_data(path: Path | str, name: str) -> bytes | None:
    """Return the content of `data/<name>` in the checkpoint folder `path`; None if there is no such file.

    Raises:
        CheckpointError: it is damaged.
    """
    file = Path(path) / "data" / name
    record = read_manifest(path).files.get(f"data/{name}")
    if record is None:
        return None
    with refusing("read", file):
        data = file.read_bytes()
    if (len(data), xxhash.xxh3_64(data).hexdigest()) != tuple(record):
        raise CheckpointError(f"{file} is damaged: its checksum is not the one in the manifest")
    return data


def open_index(folder: Path, manifest: Manifest) -> Index:
    """Return the index of a folder of tensors, such as ``model``, of the checkpoint with this `manifest`."""
    if not manifest.below(folder.name):
        raise CheckpointError(f"{folder.parent} was saved without {folder.name}")
    return read_index(folder, manifest.files)


def raise_if_damaged(problems: list[str]) -> None:
    """Raise CheckpointError with the first of `problems`, if there is one."""
    if problems:
        raise CheckpointError(first_of(problems))


def _on_any_rank(index: Index, tensors: Tensors) -> set[str]:
    """Return the index's names that any rank has; gathers a bit per name instead of a megabyte of names."""
    import numpy as np

    names = sorted(index)
    here = np.packbits(np.array([name in tensors for name in names], dtype=bool))
    anywhere = np.unpackbits(np.bitwise_or.reduce(gather(here)), count=len(names))
    return {name for name, bit in zip(names, anywhere, strict=True) if bit}


def _check_fit(folder: Path, index: Index, tensors: Tensors, names: set[str]) -> None:
    """Raise unless the index has this rank's `tensors` in their shapes, and exactly the `names` of all ranks."""
    missing = sorted(tensors.keys() - index.keys())
    extra = sorted(index.keys() - names)
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]!r}{_more(missing)}{nearest(missing[0], extra)}")
    if extra:
        raise CheckpointError(f"{folder} has {extra[0]!r}{_more(extra)}, which this run does not have")
    unfit = [problem for name, value in tensors.items() if (problem := _misfit(name, index[name], value))]
    if unfit:
        raise CheckpointError(f"{folder}: {unfit[0]}{',' * (len(unfit) > 1)}{_more(unfit)}")


def _misfit(name: str, saved: Entry, value: Tensor | TensorShard) -> str | None:
    from kenotron.kernels.tensor_shard import TensorShard

    if tuple(value.shape) != saved.shape:
        return f"{name!r} has shape {list(saved.shape)} in the checkpoint and {list(value.shape)} in this run"
    local = value.tensor if isinstance(value, TensorShard) else value
    dtype = str(local.dtype).removeprefix("torch.")
    if dtype != DTYPES[saved.dtype][0]:
        return f"{name!r} is {DTYPES[saved.dtype][0]} in the checkpoint and {dtype} in this run"
    if local.is_meta:
        return f"{name!r} is on the meta device, without memory to load into"
    return None


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
