"""Write tensors to disk: the files that `write_plan.py` assigns to this rank, and that `tensors.py` reads."""

from pathlib import Path

import torch
from torch import Tensor

from kenotron.checkpoint.durable import FileRecord, write_file
from kenotron.checkpoint.file_writer import OpenFile
from kenotron.checkpoint.write_plan import Parts, WritePlan


def write_files(checkpoint: Path, plan: WritePlan, parts: Parts, open_file: OpenFile) -> dict[str, FileRecord]:
    """Write the files of `plan` below the folder `checkpoint`, and return their records by name.

    It needs extra host memory for at most one tensor, a copy of one that is on a device or not contiguous.
    """
    records: dict[str, FileRecord] = {}
    for file in plan.files:
        with open_file(checkpoint / file.name, len(file.header) + file.bytes) as opened:
            opened.write(file.header)
            for block in file.blocks:
                opened.write(_bytes_of(parts[block.folder][block.name].elements()))
        records[file.name] = opened.record
    return records | {name: write_file(checkpoint / name, content) for name, content in plan.indexes.items()}


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the tensor's elements in row-major order as bytes, without a copy if it is contiguous and on the host."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
