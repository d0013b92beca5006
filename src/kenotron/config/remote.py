"""`remote_data`: how remote files (s3://, gs://, hf://, https://) are read."""

from kenotron.config.section import OURS, LocalPath, Section, key


class RemoteData(Section):
    """The local cache of remote files, its size, and retries."""

    cache_folder: LocalPath | None = key(
        "Local cache folder, shared by the ranks of a machine; null: `remote` in $KENOTRON_CACHE, else "
        "~/.cache/kenotron/remote.",
        None,
        mark=OURS,
    )
    cache_gb: float = key(
        "Maximum size of the cache in gigabytes (10^9 bytes); the least recently used blocks are evicted first.",
        20.0,
        gt=0,
        mark=OURS,
    )
    tries: int = key("Number of attempts per read, with increasing delays.", 5, ge=1, mark=OURS)


def is_remote(path: object) -> bool:
    """Whether a path, in a config for example, is a URL."""
    return "://" in str(path)
