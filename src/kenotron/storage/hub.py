"""Get files of Hugging Face repositories from the local cache or the hub, or raise an error of one line."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from ssl import SSLError
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kenotron.config.errors import InputError, nearest_sibling, os_errors

if TYPE_CHECKING:
    from kenotron.storage.paths import AnyPath

OFFLINE_VARIABLES = ("HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_OFFLINE")
HUB_CREDENTIALS = "`hf auth login`, or HF_TOKEN"
"""The ways to set credentials of the hub, for messages."""

ANSWER_S = 10.0
"""Seconds within which the hub must answer a first request."""

PROXY_VARIABLES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")


def offline_variable() -> str | None:
    """Return the first environment variable that forbids the network, or None."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return name
    return None


def configure_hub() -> None:
    """Apply any of the three offline variables to all libraries, and silence the hub's library.

    Call it before a Hugging Face library is first imported, because they read the variables only then. All follow
    HF_HUB_OFFLINE, except `datasets` if its own is set.
    """
    if offline_variable():
        os.environ["HF_HUB_OFFLINE"] = "1"
        if "HF_DATASETS_OFFLINE" in os.environ:
            os.environ["HF_DATASETS_OFFLINE"] = "1"
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def hub_file(repo: str, file: str, revision: str | None, key: str, optional: bool = False) -> Path | None:
    """Return the local path of a file of the model repository `repo`; None if it has no such file.

    `key` is the config key for errors. With `optional`, return None also without the hub.
    Raises InputError if the repository or revision does not exist, or the hub is unreachable or forbidden.
    """
    configure_hub()
    import huggingface_hub as hub

    try:
        cached = hub.try_to_load_from_cache(repo, file, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        if cached is not None or (offline_variable() and cached_revision(repo, revision, "model")):
            return None
        if refusal := without_hub(repo, key):
            if optional:
                return None
            raise refusal
        return Path(hub.hf_hub_download(repo, file, revision=revision))
    except hub.errors.LocalEntryNotFoundError:
        raise InputError(f"{key}: cannot reach the Hugging Face hub for '{repo}' ({file})") from None
    except hub.errors.EntryNotFoundError:
        return None
    except hub.errors.RepositoryNotFoundError:
        raise InputError(f"{key}: no repository '{repo}' on the Hugging Face hub (or no access to it)") from None
    except hub.errors.RevisionNotFoundError:
        raise InputError(f"{key}: repository '{repo}' has no revision '{revision}'") from None
    except hub.errors.HFValidationError:
        raise InputError(f"{key}: '{repo}' is neither a local folder nor the name of a repository") from None
    except OSError as error:  # includes httpx errors
        raise InputError(f"{key}: fetching '{repo}' ({file}) failed: {first_line(error)}") from None


def without_hub(name: str, key: str) -> InputError | None:
    """Return the error about the repository `name`, which is not cached, if the hub is forbidden or unreachable."""
    if forbidden := offline_variable():
        return InputError(
            f"{key}: '{name}' is not in the local Hugging Face caches, and {forbidden}=1 forbids fetching it"
        )
    if reason := unreachable():
        return InputError(
            f"{key}: cannot reach the Hugging Face hub for '{name}', and it is not cached here ({reason}); "
            f"no local folder has that name{nearest_sibling(Path(name))}"
        )
    return None


def unreachable() -> str | None:
    """Return why the hub is unreachable, after one try; None if it answers, or a proxy is used.

    Libraries would retry for minutes, also on an open connection that never answers.
    """
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    from huggingface_hub import constants

    if any(os.environ.get(name) or os.environ.get(name.lower()) for name in PROXY_VARIABLES):
        return None
    address = urlsplit(constants.ENDPOINT)
    connect = HTTPConnection if address.scheme == "http" else HTTPSConnection
    connection = connect(address.hostname or "", address.port, timeout=ANSWER_S)
    try:
        connection.request("HEAD", address.path or "/")
        connection.getresponse()
    except (SSLError, HTTPException):
        return None  # it answers; the library reports what is wrong
    except TimeoutError:
        return f"{address.hostname}: no answer in {ANSWER_S:g} s"
    except OSError as error:
        return f"{address.hostname}: {error.strerror or error}"
    finally:
        connection.close()
    return None


def cached_revision(repo: str, revision: str | None, repo_type: str) -> str | None:
    """Return the commit of `repo` in the local hub cache, or None. Reads one small file."""
    configure_hub()
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{repo_type}s--{repo.replace('/', '--')}"
    name = revision or "main"
    if (folder / "snapshots" / name).is_dir():
        return name
    ref = folder / "refs" / name
    return ref.read_text().strip() if ref.is_file() else None


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_json(file: AnyPath) -> dict[str, Any]:
    """Return the JSON object in `file`. Raises InputError if there is none."""
    try:
        with os_errors(f"cannot read {file}"):
            content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: expected a JSON object, found {type(content).__name__}")
    return content
