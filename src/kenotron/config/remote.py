"""`remote_data`: how files on other machines (s3://, gs://, hf://, https://) are read."""

from __future__ import annotations

from kenotron.config.section import OURS, LocalPath, Section, key


class RemoteData(Section):
    """Where what was read is kept, how much of it, and how often a failed read is tried again."""

    cache_folder: LocalPath | None = key(
        "Folder on this machine for what was read, shared by its ranks; null: `remote` in $KENOTRON_CACHE, else "
        "~/.cache/kenotron/remote.",
        None,
        mark=OURS,
    )
    cache_gb: float = key(
        "Most gigabytes (10^9 bytes) it takes; what was not used for longest goes first.", 20.0, gt=0, mark=OURS
    )
    tries: int = key("Times that a read is tried, with growing waits in between.", 5, ge=1, mark=OURS)
