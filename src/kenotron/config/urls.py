"""URLs where a config has no place for them: under keys of local paths, and anywhere with a password.

checkpoints.staging_path: s3://bucket/run      not supported yet: …: expected a local path
"""

import re
from collections.abc import Iterator
from typing import Any

from kenotron.config.document import Document, Keys

# Keys that name local files or folders. A URL there would be taken for a folder called `s3:`.
_LOCAL = (
    "general.benchmark_csv_path",
    "general.kill_switch_path",
    "checkpoints.staging_path",
    "checkpoints.local.path",
    "logging.log_dir",
    "profiler.profiler_export_path",
    "remote_data.cache_folder",
    "model.init_method.path",
)
# Keys that name a local path or a store that checkpoints are written to.
_STORES = ("checkpoints.checkpoints_path", "checkpoints.resume_checkpoint_path", "s3_upload.upload_s3_path")
_NO_STORES = re.compile(r"(hf|https?|file|local):/|[A-Za-z][A-Za-z0-9+.-]+:/(?!/.)")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # `s3:/bucket` too: what pathlib makes of `s3://bucket`


def misplaced(document: Document) -> Iterator[tuple[Keys, str]]:
    """Every key that names a local path and has a URL, and what is wrong with it."""
    wrong = dict.fromkeys(_LOCAL, (_URL, "a local path"))
    wrong |= dict.fromkeys(_STORES, (_NO_STORES, "a local path, or a store's URL such as s3://bucket/run"))
    for path, (pattern, expected) in wrong.items():
        keys = tuple(path.split("."))
        value = document.get(*keys)
        if isinstance(value, str) and pattern.match(value):
            yield keys, f"{value}: expected {expected}"


def with_passwords(data: Any, around: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """The keys of plain `data` with such URLs as ``https://user:password@host``, also as pathlib has them.

    ``hf://gpt2@main`` is a revision.
    """
    for name, value in data.items() if isinstance(data, dict) else enumerate(data if isinstance(data, list) else ()):
        found = [x for x in (name, value) if isinstance(x, str) and re.search(r"(?<!\bhf)://?[^/?#\s]*@", x)]
        if found:  # a mix of datasets has URLs as keys
            at = around if name in found else (*around, str(name))
            yield at, "a URL with a user or password; credentials come from the environment"
        else:
            yield from with_passwords(value, (*around, str(name)))
