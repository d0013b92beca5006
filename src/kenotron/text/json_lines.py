"""Read documents from JSON lines, from any byte on."""

import json
from collections.abc import Iterator
from typing import IO

from kenotron.config.errors import InputError
from kenotron.storage.paths import AnyPath
from kenotron.text.documents import MayBeBad, NoText, texts_of_row

LONGEST_LINE = 32 << 20
"""Limit of the bytes of a JSON line, which is parsed as a whole, with several times its memory."""


def json_documents(stream: IO[bytes], file: AnyPath, start: int, stop: int | None, source: MayBeBad) -> Iterator[str]:
    """Yield the documents of the lines that begin between the bytes `start` and `stop`, without blank lines.

    `source` defines the document of a line, and whether bad lines are left out.
    """
    if start:
        stream.seek(start - 1)
        _to_line_end(stream)
    place, number = (stream.tell() if start else 0), 0
    while stop is None or place < stop:
        line = stream.readline(LONGEST_LINE + 1)
        if not line:
            return
        number += 1
        where = f"{file}: line at byte {place:,}" if start else f"{file}:{number}"
        if place == 0 and (other := _other_form(line)):  # no line of such a file could be right
            raise InputError(f"{where}: expected one JSON object a line, found {other}")
        place += len(line)
        if len(line) > LONGEST_LINE:
            place += _to_line_end(stream)
            source.bad(f"{where}: a line of more than {LONGEST_LINE >> 20} MiB (it ends at byte {place:,})")
        elif not line.isspace():
            with source.no_text_is_bad(where):
                yield from texts_of_row(_row(line), source.column, source.hook, str(file))


def _other_form(first: bytes) -> str:
    """Return what a file is whose first line is no JSON object, and how to convert it; empty if unknown."""
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "UTF-16; `iconv -f UTF-16 -t UTF-8` converts it"
    if first.lstrip().startswith(b"["):
        return "a JSON array; `jq -c '.[]'` writes it as lines"
    return "objects over several lines; `jq -c .` writes each in one" if first.strip() == b"{" else ""


def _to_line_end(stream: IO[bytes]) -> int:
    """Read the rest of a line of any length, and return its number of bytes."""
    read = 0
    while block := stream.readline(1 << 20):
        read += len(block)
        if block.endswith(b"\n"):
            break
    return read


def _row(line: bytes) -> object:
    """Return the value of a line. Raises NoText if it is not JSON."""
    try:
        return json.loads(line.rstrip(b"\r\n"))
    except UnicodeDecodeError as error:
        raise NoText(f"not UTF-8 (byte {error.start} of the line: {error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise NoText(f"expected one JSON object a line, found: {error}") from None
