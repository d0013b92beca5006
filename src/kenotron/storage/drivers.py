"""fsspec's file systems. Each tries once; fetching.py handles retries, waits and errors.

    s3           s3fs               without botocore's retries, except for parts of uploads
    gs           gcsfs              likewise; Google's JSON API (google.py)
    hf           huggingface_hub    every read returns the file's version, nothing is cached (hub_filesystem.py)
    http, https  fsspec             a missing file is distinguished from a failed request
    any other    fsspec             unchanged

A driver's listing and `info` have the length of a file and its version, which changes with its content.
"""

import os
from functools import lru_cache
from typing import Any, TypeAlias

from kenotron.config.errors import InputError, nearest
from kenotron.storage.hub import HUB_CREDENTIALS, configure_hub, first_line, offline_variable

FileInfo: TypeAlias = dict[str, Any]
"""The result of fsspec's `info`: name, type, size, and the driver's own keys."""

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
"""Protocol → the extra of this package that installs its driver."""

_S3 = "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_GOOGLE = "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS"
CREDENTIALS = {"s3": _S3, "s3a": _S3, "gs": _GOOGLE, "gcs": _GOOGLE, "hf": HUB_CREDENTIALS}
"""Protocol → where its driver gets credentials."""

NAMES_OF_VERSIONS = """
    generation ETag etag md5Hash blob_id xet_hash Content-MD5 mtime LastModified last_modified Last-Modified created
"""
VERSIONS = NAMES_OF_VERSIONS.split()
"""The drivers' keys of the version, the most reliable first."""


def filesystem(url: str, part_tries: int = 1) -> Any:
    """Return fsspec's file system for `url`, one per process and protocol; S3's tries every part `part_tries` times.

    Raises InputError for an unknown protocol, if its driver is not installed, or if the network is forbidden.
    """
    protocol, _, rest = url.partition("://")
    if "@" in rest.split("/")[0]:
        raise InputError(f"{protocol}://…@…: a URL with a user or password; credentials come from the environment")
    if protocol == "hf" and (forbidden := offline_variable()):
        raise InputError(f"{url}: {forbidden}=1 forbids access to the Hugging Face hub")
    return _filesystem(protocol, part_tries)


@lru_cache
def _filesystem(protocol: str, part_tries: int) -> Any:
    import fsspec

    try:
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}  # cached until `reset`
        if part_tries > 1 and MADE.get(protocol) is _s3:
            options["tries"] = part_tries
        return MADE.get(protocol, fsspec.filesystem)(protocol, **options)
    except ValueError:
        known = fsspec.available_protocols()
        raise InputError(f"{protocol}://: no such protocol{nearest(protocol, known)}") from None
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        hint = f"pip install 'kenotron[{extra}]'" if extra else first_line(error)
        raise InputError(f"{protocol}://: its driver is not installed: {hint}") from None


def reset() -> None:
    """Reopen every file system, since a forked process has none of its parent's connections."""
    _filesystem.cache_clear()


os.register_at_fork(after_in_child=reset)


def version_of(info: FileInfo) -> str:
    """Return a file's version, which changes with its content."""
    return next((str(info[name]) for name in VERSIONS if info.get(name)), "")


def read_range(fs: Any, url: str, start: int, stop: int) -> tuple[bytes, tuple[int, str]]:
    """Return bytes [start, stop) of a file, fewer at its end, and (size, version) at the time of the read."""
    if hasattr(fs, "read_range"):
        return fs.read_range(url, start, stop)
    try:
        data = fs.cat_file(url, start=start, end=stop)
    except Exception as error:
        if "range" not in str(error).lower():
            raise
        data = b""  # the file ends before `start`
    found = fs.info(url)
    return data, (found["size"], version_of(found))


# ---- one for each protocol ---------------------------------------------------------------------------------


def _s3(protocol: str, tries: int = 1, **options: Any) -> Any:
    import fsspec

    retries = {"retries": {"total_max_attempts": tries, "mode": "standard"}}
    found = fsspec.filesystem(protocol, config_kwargs=retries, **options)
    found.retries = 1  # s3fs's own
    return found


def _google(protocol: str, **options: Any) -> Any:
    from kenotron.storage.google import GoogleFileSystem

    return GoogleFileSystem(**options)


def _web(protocol: str, **options: Any) -> Any:
    from fsspec.implementations.http import HTTPFileSystem

    class Web(HTTPFileSystem):
        """fsspec's file system with another `info`, since its own reports every failure as a missing file."""

        async def _info(self, url: str, **kwargs: Any) -> dict[str, Any]:
            try:
                return await super()._info(url, **kwargs)
            except FileNotFoundError as error:
                if error.__cause__ is None or getattr(error.__cause__, "status", None) in (404, 410):
                    raise
                raise error.__cause__ from None

    return Web(headers={"Accept-Encoding": "identity"}, **options)  # ranges must count uncompressed bytes


def _hub(protocol: str, **options: Any) -> Any:
    configure_hub()  # before the library is imported
    from kenotron.storage.hub_filesystem import HubFileSystem

    return HubFileSystem(**options)


MADE = {"s3": _s3, "s3a": _s3, "gs": _google, "gcs": _google, "http": _web, "https": _web, "hf": _hub}
