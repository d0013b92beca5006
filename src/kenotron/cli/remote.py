"""Checkpoints of another machine as arguments: fetched to the cache, and read from there."""

import sys
from pathlib import Path

from kenotron.config.remote import is_remote


def at_hand(path: str) -> Path:
    """The local path of a command's argument; a checkpoint in a store is fetched first. Raises InputError."""
    if not is_remote(path):
        return Path(path)
    from kenotron.checkpoint.remote import local_copy

    copy = local_copy(path)
    print(f"{path}: read from {copy}", file=sys.stderr)
    return copy


def model_at_hand(path: str) -> Path:
    """`at_hand`, of a checkpoint or a Hugging Face model, and its errors before torch takes its seconds to import."""
    from kenotron.checkpoint.model_files import find_model

    here = at_hand(path)
    find_model(here if is_remote(path) else path)  # "./name" is no name of the hub, and Path drops the "./"
    return here
