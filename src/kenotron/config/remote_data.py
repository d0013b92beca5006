"""`remote_data`: how remote files (s3://, gs://, hf://, https://) are read."""

from kenotron.config.section import LocalPath, Section, our_key


class RemoteData(Section):
    """The local cache of remote files, its size, and retries."""

    cache_folder: LocalPath | None = our_key(
        "Local cache folder, shared by the ranks of a machine; null: `remote` in $KENOTRON_CACHE, else "
        "~/.cache/kenotron/remote.",
        None,
    )
    cache_gb: float = our_key(
        "Maximum size of the cache in gigabytes (10^9 bytes); the least recently used blocks are evicted first.",
        20.0,
        gt=0,
    )
    tries: int = our_key("Number of attempts per read, with increasing delays.", 5, ge=1)


def is_remote(path: object) -> bool:
    """Return whether a path is a URL."""
    return "://" in str(path)
