"""Read tensors of a checkpoint to the host, whole or in blocks, for tools: one process, without a process group.

read_tensors("checkpoints/10", ["model.norm.weight"])
shapes, read = block_reader("checkpoints/10")
read("model.embed_tokens.weight", (0, 0), (16, 64))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kenotron.checkpoint.folders import check_files
from kenotron.checkpoint.loading import open_index, raise_if_damaged
from kenotron.checkpoint.manifest import read_manifest
from kenotron.config.errors import CheckpointError, nearest

if TYPE_CHECKING:
    from torch import Tensor


def read_tensors(
    path: Path | str, names: Iterable[str] | None = None, *, folder: str = "model", verify: bool = True
) -> dict[str, Tensor]:
    """Return whole tensors on the host, for tools: all of a checkpoint's model, or those in `names`.

    Only this process reads and checks; no process group is used.

    Raises:
        CheckpointError: a file is damaged, or a name is missing.
    """
    path = Path(path)
    if verify:
        raise_if_damaged(check_files(path, read_manifest(path).below(folder)))
    shapes, read = block_reader(path, folder=folder)
    selected = list(shapes if names is None else names)
    for name in selected:
        if name not in shapes:
            raise CheckpointError(f"{path / folder} has no tensor {name!r}{nearest(name, shapes)}")
    return {name: read(name, (0,) * len(shapes[name]), shapes[name]) for name in selected}


def block_reader(
    path: Path | str, *, folder: str = "model"
) -> tuple[dict[str, tuple[int, ...]], Callable[[str, Sequence[int], Sequence[int]], Tensor]]:
    """Return the shapes of a folder's tensors, and ``read(name, offset, shape)``, which reads one block to the host.

    It is for tools that need blocks of tensors; checksums are not checked.
    """
    path = Path(path)
    index = open_index(path / folder, read_manifest(path))
    import torch

    from kenotron.checkpoint.tensors import MappedFiles, copy_block, torch_dtype

    files = MappedFiles(path / folder)

    def read(name: str, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        block = torch.empty(tuple(shape), dtype=torch_dtype(index[name].dtype))
        copy_block(files, index[name], offset, block)
        return block

    return {name: entry.shape for name, entry in index.items()}, read
