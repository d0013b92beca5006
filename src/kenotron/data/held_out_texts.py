"""The documents that validation reads, as text, and what general compressors make of it.

    compression_baselines(data)      {"gzip_bits_per_byte": 2.31, "xz_bits_per_byte": 1.74}

A model's bits per byte on the same text say what it has learned beyond them.
"""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from collections.abc import Iterable, Iterator

from kenotron.data.run import RunData
from kenotron.data.source import TextSpec
from kenotron.data.stage_plan import complete_keys

BASELINE_LIMIT = 64 * 2**20
"""Most bytes of text that is compressed at the end of a run."""


def validation_texts(data: RunData) -> Iterator[str]:
    """The documents that validation reads as text."""
    for source, _ in data.validated:
        if isinstance(source.spec, TextSpec):
            with complete_keys(source.at):
                yield from source.spec.held_out_texts(data.validation_settings, data.sources.reserved)


def compression_baselines(data: RunData) -> dict[str, float]:
    """Bits per byte of gzip and xz on the very text that ``data.validation`` reads.

    Empty where it reads no text, only a part of it, or more than is compressed in a minute.
    """
    limit, samples = data.settings.validation_samples, len(data.held_out())
    sizes = [source.held_out_text_bytes for _, source in data.validated]
    cut = (limit is not None and limit < samples) or data.settings.max_document_tokens is not None
    if cut or None in sizes or sum(size for size in sizes if size) > BASELINE_LIMIT:
        return {}
    return bits_per_byte(validation_texts(data))


def bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Bits per byte of two general compressors: ``gzip -9`` text by text, ``xz -9`` on all in one tar archive.

    Both sums are over the bytes of the texts alone; the archive's headers are compressed along with them.
    """
    raw = gzipped = 0
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for number, text in enumerate(texts):
            data = text.encode("utf-8")
            raw += len(data)
            gzipped += len(gzip.compress(data, 9, mtime=0))
            entry = tarfile.TarInfo(f"{number}.txt")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    if not raw:
        return {}
    packed = len(lzma.compress(archive.getvalue(), preset=9))
    return {"gzip_bits_per_byte": 8 * gzipped / raw, "xz_bits_per_byte": 8 * packed / raw}
