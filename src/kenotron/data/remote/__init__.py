"""Files on other machines, read as if they were here.

    "s3://bucket/code/0.ds" ──as_path──▶ RemotePath ──▶ RemoteArray ──▶ tokens
                                          paths.py       arrays.py        ▲
                       blocks of the file, fetched side by side ─────────┤  fetching.py, drivers.py
                       the same blocks on this machine's disk, bounded ──┘  blocks.py

Whatever fsspec opens is read: s3, gs, hf, https. A `RemotePath` has those methods of `pathlib.Path` that readers of
files use, so that one piece of code reads both.
"""

from __future__ import annotations

from .arrays import RemoteArray, fetch_ahead, read_rows
from .paths import AnyPath, RemotePath, RemoteStat, as_path, is_remote

__all__ = ["AnyPath", "RemoteArray", "RemotePath", "RemoteStat", "as_path", "fetch_ahead", "is_remote", "read_rows"]
