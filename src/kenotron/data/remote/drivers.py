"""The drivers behind URLs. Each asks once: tries and waits, and what an error means, are ours (fetching.py).

    s3           s3fs               with botocore's own tries off
    gs           gcsfs              likewise; over Google's JSON API
    hf           huggingface_hub    bytes come with the version of their file, and no answer is kept
    http, https  fsspec             what is not there is told from what cannot be asked
    any other    fsspec             as it is

A driver's listing and `info` tell how long a file is, and its version: what changes with its content.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from kenotron.config.errors import InputError, nearest

from ..hub import first_line, offline_variable, settle_hub

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
"""Protocols whose driver is an extra of this package."""

_S3 = "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_GOOGLE = "`gcloud auth application-default login`, or GOOGLE_APPLICATION_CREDENTIALS"
CREDENTIALS = {"s3": _S3, "s3a": _S3, "gs": _GOOGLE, "gcs": _GOOGLE, "hf": "`hf auth login`, or HF_TOKEN"}
"""What tells each driver who asks."""

VERSIONS = (
    "generation",
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "xet_hash",
    "Content-MD5",
    "mtime",
    "LastModified",
    "last_modified",
    "Last-Modified",
    "created",
)
"""What drivers call the version, the surest first."""

WAIT = 60.0
"""Seconds after which an answer of the hub counts as failed."""


def filesystem(url: str) -> Any:
    """fsspec's file system for `url`, one a process and protocol.

    Errors (InputError): no such protocol; its driver is not installed; the network is forbidden.
    """
    protocol, _, place = url.partition("://")
    if not place:
        raise InputError(f"{url}: names no place; expected a path behind {protocol}://")
    if protocol == "hf" and (forbidden := offline_variable()):
        raise InputError(f"{url}: {forbidden}=1 forbids to ask the Hugging Face hub")
    return _filesystem(protocol)


@lru_cache
def _filesystem(protocol: str) -> Any:
    import fsspec

    try:
        options = {"use_listings_cache": False, "skip_instance_cache": True}  # kept here, until `forget`
        return MADE.get(protocol, fsspec.filesystem)(protocol, **options)
    except ValueError:
        known = fsspec.available_protocols()
        raise InputError(f"{protocol}://: no such protocol{nearest(protocol, known)}") from None
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        hint = f"pip install kenotron[{extra}]" if extra else first_line(error)
        raise InputError(f"{protocol}://: its driver is not installed: {hint}") from None


def forget() -> None:
    """Open every file system anew: a forked process has none of its parent's connections."""
    _filesystem.cache_clear()


def version_of(info: dict[str, Any]) -> str:
    """What changes with the content of a file."""
    return next((str(info[name]) for name in VERSIONS if info.get(name)), "")


def read_range(fs: Any, url: str, start: int, stop: int) -> tuple[bytes, tuple[int, str]]:
    """Bytes [start, stop) of a file, fewer where it ends before, and the size and version that it has now."""
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


def _s3(protocol: str, **options: Any) -> Any:
    import fsspec

    once = {"retries": {"total_max_attempts": 1}}
    found = fsspec.filesystem(protocol, config_kwargs=once, **options)
    found.retries = 1  # s3fs's own
    return found


def _google(protocol: str, **options: Any) -> Any:
    from gcsfs.core import GCSFileSystem
    from gcsfs.retry import HttpError

    class Once(GCSFileSystem):
        """gcsfs without its tries. Its default class asks by gRPC, at every call, of which kind a bucket is."""

        async def _request(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await GCSFileSystem._request.__wrapped__(self, *args, **kwargs)
            except (OSError, HttpError) as error:
                words = " ".join(str(error).split())
                expired = "Invalid Credentials" in words  # which the next try refreshes
                if words.startswith("Forbidden") or (getattr(error, "code", None) == 401 and not expired):
                    raise PermissionError(words) from None
                raise

    return Once(**options)


def _web(protocol: str, **options: Any) -> Any:
    from fsspec.implementations.http import HTTPFileSystem

    class Web(HTTPFileSystem):
        """fsspec's, but for `info`, which says of whatever goes wrong that the file is not there."""

        async def _info(self, url: str, **kwargs: Any) -> dict[str, Any]:
            try:
                return await super()._info(url, **kwargs)
            except FileNotFoundError as error:
                if error.__cause__ is None or getattr(error.__cause__, "status", None) in (404, 410):
                    raise
                raise error.__cause__ from None

    return Web(headers={"Accept-Encoding": "identity"}, **options)  # ranges count the bytes of the file itself


def _hub(protocol: str, **options: Any) -> Any:
    settle_hub()
    from huggingface_hub import HfFileSystem, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    class Hub(HfFileSystem):
        """huggingface_hub's, which keeps what it was told of files, tries again by itself, and reads ahead."""

        def resolve_path(self, path: str, revision: str | None = None) -> Any:
            try:
                return super().resolve_path(path, revision)
            except FileNotFoundError as error:
                self._repo_and_revision_exists_cache.clear()
                place = f"hf://{self._strip_protocol(path)}"
                if isinstance(error.__cause__, RevisionNotFoundError):
                    raise InputError(f"{place}: its repository has no such revision") from None
                if isinstance(error.__cause__, RepositoryNotFoundError):
                    raise InputError(
                        f"{place}: no such repository on the Hugging Face hub, or no access to it "
                        f"(access comes from {CREDENTIALS['hf']})"
                    ) from None
                raise

        def info(self, path: str, *_: Any, **kwargs: Any) -> dict[str, Any]:
            at = self.resolve_path(path)
            if not hasattr(at, "path_in_repo"):  # a bucket
                return super().info(path, refresh=True)
            if not at.path_in_repo:
                return {"name": path, "type": "directory", "size": 0}
            try:
                found = get_hf_file_metadata(self._url(at), timeout=WAIT)
                return {"name": path, "type": "file", "size": found.size, "etag": found.etag}
            except EntryNotFoundError:
                next(self._listed(at, recursive=False), None)  # raises where there is no such folder either
                return {"name": path, "type": "directory", "size": 0}

        def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
            at = self.resolve_path(path)
            if not hasattr(at, "path_in_repo"):
                return super().find(path, *args, **kwargs | {"refresh": True})
            root, below = self._strip_protocol(path).rstrip("/"), len(at.path_in_repo)
            found = {}
            for entry in self._listed(at, recursive=True):
                name = f"{root}/{entry['path'][below:].lstrip('/')}"
                etag = entry.get("lfs", entry)["oid"]  # as `info` and every read tell it
                found[name] = {"name": name, "type": entry["type"], "size": entry["size"], "etag": etag}
            return found

        def _listed(self, at: Any, recursive: bool) -> Iterator[dict[str, Any]]:
            """What a folder holds, as the hub's API tells it. (HfApi's waits for an answer however long it takes.)"""
            place = f"{at.repo_type}s/{at.repo_id}/tree/{quote(at.revision, safe='')}/{quote(at.path_in_repo)}"
            url: str | None = f"{self.endpoint}/api/{place.rstrip('/')}?recursive={str(recursive).lower()}"
            while url:
                answer = get_session().get(url, headers=build_hf_headers(), timeout=WAIT)
                try:
                    hf_raise_for_status(answer)
                except EntryNotFoundError:
                    raise FileNotFoundError(at.unresolve()) from None
                yield from answer.json()
                url = answer.links.get("next", {}).get("url")

        def read_range(self, path: str, start: int, stop: int) -> tuple[bytes, tuple[int, str]]:
            at = self.resolve_path(path)
            wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
            answer = get_session().get(self._url(at), headers=build_hf_headers() | wanted, timeout=WAIT)
            size = answer.headers.get("Content-Range", "/").rpartition("/")[2] or len(answer.content)
            # A large file lies elsewhere: the hub's own answer, which sends us there, tells its version.
            tags = (each.headers.get("X-Linked-Etag") for each in (*answer.history, answer))
            version = next(filter(None, tags), answer.headers.get("ETag", "")).removeprefix("W/").strip('"')
            if answer.status_code == 416:
                return b"", (int(size), version)
            try:
                hf_raise_for_status(answer)
            except EntryNotFoundError:
                raise FileNotFoundError(path) from None
            return answer.content, (int(size), version)

        def _url(self, at: Any) -> str:
            return hf_hub_url(
                at.repo_id, at.path_in_repo, repo_type=at.repo_type, revision=at.revision, endpoint=self.endpoint
            )

    return Hub(**options)


MADE = {"s3": _s3, "s3a": _s3, "gs": _google, "gcs": _google, "http": _web, "https": _web, "hf": _hub}
