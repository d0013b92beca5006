"""Files of Hugging Face repositories: from the local cache, else from the hub, else one clear line."""

from __future__ import annotations

import os
from pathlib import Path

from kenotron.config.errors import InputError

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline_variable() -> str | None:
    """The first environment variable that forbids the network, or None."""
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"}:
            return name
    return None


def settle_offline() -> None:
    """One of the three variables stands for all. Call before a Hugging Face library is first imported."""
    if offline_variable():
        for name in OFFLINE_VARIABLES:
            os.environ[name] = "1"


def hub_file(
    repo: str, file: str, revision: str | None = None, repo_type: str = "model", key: str = "hub"
) -> Path | None:
    """Local path of a repository's file; None if the repository has no such file.

    Errors (InputError): the repository does not exist, or the hub cannot be asked.
    """
    settle_offline()
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        cached = hub.try_to_load_from_cache(repo, file, revision=revision, repo_type=repo_type)
        if isinstance(cached, str):
            return Path(cached)
        if offline := offline_variable():
            if cached is not None or cached_revision(repo, revision, repo_type):
                return None
            raise InputError(
                f"{key}: '{repo}' is not in the local Hugging Face cache, and {offline}=1 forbids to fetch it"
            )
        return Path(hub.hf_hub_download(repo, file, revision=revision, repo_type=repo_type))
    except errors.LocalEntryNotFoundError:
        raise InputError(f"{key}: cannot reach the Hugging Face hub for '{repo}' ({file})") from None
    except errors.EntryNotFoundError:
        return None
    except errors.RepositoryNotFoundError:
        raise InputError(f"{key}: no repository '{repo}' on the Hugging Face hub (or no access to it)") from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{key}: repository '{repo}' has no revision '{revision}'") from None
    except errors.HFValidationError:
        raise InputError(f"{key}: '{repo}' is neither a folder here nor the name of a repository") from None
    except (OSError, errors.HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{key}: cannot reach the Hugging Face hub for '{repo}' ({file}): {reason}") from None


def cached_revision(repo: str, revision: str | None, repo_type: str) -> str | None:
    """Commit of `repo` in the local hub cache, or None. Reads one small file."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"{repo_type}s--{repo.replace('/', '--')}"
    name = revision or "main"
    if (folder / "snapshots" / name).is_dir():
        return name
    ref = folder / "refs" / name
    return ref.read_text().strip() if ref.is_file() else None
