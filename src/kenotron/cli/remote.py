"""Fetch checkpoints in a store to the local cache, for commands that read them."""

import sys
from pathlib import Path

from kenotron.config.remote_data import is_remote


def fetch_checkpoint(path: str) -> Path:
    """Return the local path of a command's argument; a checkpoint in a store is fetched first. Raises InputError."""
    if not is_remote(path):
        return Path(path)
    from kenotron.checkpoint.remote import local_copy

    copy = local_copy(path)
    print(f"{path}: read from {copy}", file=sys.stderr)
    return copy


def fetch_model(path: str) -> Path:
    """Fetch a checkpoint or check that a Hugging Face model exists, before torch takes seconds to import.

    Raises InputError.
    """
    from kenotron.checkpoint.model_files import find_model

    local = fetch_checkpoint(path)
    find_model(local if is_remote(path) else path)  # "./name" is no name of the hub, and Path drops the "./"
    return local
