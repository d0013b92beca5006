"""Find URLs that a config must not have: under keys of local paths, and with a password anywhere.

checkpoints.staging_path: s3://bucket/run      not supported yet: …: expected a local path
"""

import re
from collections.abc import Iterator
from typing import Any

from kenotron.config.document import Document, Keys
from kenotron.config.writing import items

# Keys of local files or folders. A URL there would become a folder called `s3:`.
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
# Keys of a local path or a store for checkpoints.
_STORES = ("checkpoints.checkpoints_path", "checkpoints.resume_checkpoint_path", "s3_upload.upload_s3_path")
_NO_STORES = re.compile(r"(hf|https?|file|local):/|[A-Za-z][A-Za-z0-9+.-]+:/(?!/.)")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # also `s3:/bucket`, which pathlib makes of `s3://bucket`


def misplaced_urls(document: Document) -> Iterator[tuple[Keys, str]]:
    """Yield (keys, message) for every key of a path that has a URL, or a URL of another kind than a store's."""
    forbidden = dict.fromkeys(_LOCAL, (_URL, "a local path"))
    forbidden |= dict.fromkeys(_STORES, (_NO_STORES, "a local path, or a store's URL such as s3://bucket/run"))
    for path, (pattern, expected) in forbidden.items():
        keys = tuple(path.split("."))
        value = document.get(*keys)
        if isinstance(value, str) and pattern.match(value):
            yield keys, f"{value}: expected {expected}"


def urls_with_passwords(data: Any, around: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Yield (keys, message) for URLs such as ``https://user:password@host`` in plain `data`, also in pathlib's form.

    ``hf://gpt2@main`` is a revision.
    """
    for name, value in items(data):
        urls = [x for x in (name, value) if isinstance(x, str) and re.search(r"(?<!\bhf)://?[^/?#\s]*@", x)]
        if urls:  # the keys of a mixture of datasets are URLs
            at = around if name in urls else (*around, str(name))
            yield at, "a URL with a user or password; credentials come from the environment"
        else:
            yield from urls_with_passwords(value, (*around, str(name)))
