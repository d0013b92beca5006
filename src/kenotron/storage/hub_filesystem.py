"""huggingface_hub's file system without caches, retries and read-ahead; every read returns the file's version."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from huggingface_hub import HfFileSystem, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from kenotron.config.errors import InputError
from kenotron.storage.hub import HUB_CREDENTIALS

TIMEOUT = 60.0
"""Seconds after which a request to the hub has failed."""


class HubFileSystem(HfFileSystem):
    """A file system that always queries the hub, once, and reads only the requested bytes."""

    def resolve_path(self, path: str, revision: str | None = None) -> Any:
        """Return repository, revision and path of a URL. Raises InputError if repository or revision does not exist."""
        try:
            return super().resolve_path(path, revision)
        except FileNotFoundError as error:
            self.invalidate_cache()
            place = f"hf://{self._strip_protocol(path)}"
            if isinstance(error.__cause__, RevisionNotFoundError):
                raise InputError(f"{place}: its repository has no such revision") from None
            if isinstance(error.__cause__, RepositoryNotFoundError):
                raise InputError(
                    f"{place}: no such repository on the Hugging Face hub, or no access to it "
                    f"(access comes from {HUB_CREDENTIALS})"
                ) from None
            raise

    def info(self, path: str, *_: Any, **kwargs: Any) -> dict[str, Any]:
        """Return type, size and etag of a file or folder."""
        at = self.resolve_path(path)
        if not hasattr(at, "path_in_repo"):  # a bucket
            return super().info(path, refresh=True)
        if not at.path_in_repo:
            return {"name": path, "type": "directory", "size": 0}
        try:
            found = get_hf_file_metadata(self._url(at), timeout=TIMEOUT)
            return {"name": path, "type": "file", "size": found.size, "etag": found.etag}
        except EntryNotFoundError:
            next(self._listed(at, recursive=False), None)  # raises if there is no such folder either
            return {"name": path, "type": "directory", "size": 0}

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        """Return every file below a folder, by name."""
        at = self.resolve_path(path)
        if not hasattr(at, "path_in_repo"):
            return super().find(path, *args, **kwargs | {"refresh": True})
        root, below = self._strip_protocol(path).rstrip("/"), len(at.path_in_repo)
        found = {}
        for entry in self._listed(at, recursive=True):
            name = f"{root}/{entry['path'][below:].lstrip('/')}"
            etag = entry.get("lfs", entry)["oid"]  # the same as from `info` and every read
            found[name] = {"name": name, "type": entry["type"], "size": entry["size"], "etag": etag}
        return found

    def _listed(self, at: Any, recursive: bool) -> Iterator[dict[str, Any]]:
        """Yield the entries of a folder by the hub's API. (HfApi has no timeout.)"""
        place = f"{at.repo_type}s/{at.repo_id}/tree/{quote(at.revision, safe='')}/{quote(at.path_in_repo)}"
        url: str | None = f"{self.endpoint}/api/{place.rstrip('/')}?recursive={str(recursive).lower()}"
        while url:
            answer = get_session().get(url, headers=build_hf_headers(), timeout=TIMEOUT)
            try:
                hf_raise_for_status(answer)
            except EntryNotFoundError:
                raise FileNotFoundError(at.unresolve()) from None
            yield from answer.json()
            url = answer.links.get("next", {}).get("url")

    def read_range(self, path: str, start: int, stop: int) -> tuple[bytes, tuple[int, str]]:
        """Return bytes [start, stop) of a file, and (size, version) at the time of the read."""
        at = self.resolve_path(path)
        ranged = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        answer = get_session().get(self._url(at), headers=build_hf_headers() | ranged, timeout=TIMEOUT)
        size = answer.headers.get("Content-Range", "/").rpartition("/")[2] or len(answer.content)
        # A large file is stored elsewhere: the version is in the hub's own response, which redirects there.
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
