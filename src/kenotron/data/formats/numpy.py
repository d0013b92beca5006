"""Plain arrays of ids: numpy's `.npy`, and raw ids with or without llm.c's header.

    tokens.npy     one-dimensional, integers
    fineweb.bin    llm.c's and modded-nanogpt's, with a header of 256 int32
    train.bin      raw (nanoGPT's): its dtype comes from the config, usually uint16
    part-0.npy     may be raw as well (OLMo's): without numpy's magic it is read with the config's dtype

These files do not record where documents end.
"""

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from kenotron.config.errors import InputError
from kenotron.data.formats.token_file import TokenFile, check_width, map_array, readable
from kenotron.storage.paths import AnyPath

SUFFIX = ".npy"

LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
"""Magic number of the header of llm.c and modded-nanogpt → version of the header, dtype of the ids. Data for GPT-2's
tokenizer begin with 20240520, data for Llama 3's with 20240801."""

LLM_C_EVALUATION = 20240522
"""The magic number of llm.c's multiple-choice examples, which are no sequence of tokens."""

LLM_C_BYTES = 1024


def open_file(path: AnyPath, where: str, dtype: np.dtype | None = None) -> list[TokenFile]:
    """Open one `.npy` or raw file.

    Raises InputError for a file without header if there is no dtype, an unreadable header, and arrays that are not
    one-dimensional integers.
    """
    with readable(path), path.open("rb") as file:
        head = file.read(LLM_C_BYTES).ljust(LLM_C_BYTES, b"\0")
    has_header = head.startswith(npy.MAGIC_PREFIX)
    if has_header:  # independent of its name
        tokens = _npy(path, where, dtype)
    elif _is_llm_c(path, head):
        tokens = _llm_c(path, head, where, dtype)
    elif dtype is None:
        missing = "has no numpy header" if path.suffix == SUFFIX else f"has no {path.stem}.idx (Megatron's) beside it"
        give = "give their dtype (token_dtype, or --dtype; usually uint16)"
        raise InputError(f"{where}: {path} {missing}; to read it as raw ids, {give}")
    else:
        tokens = map_array(path, dtype)
        check_width(path, tokens, where)
    return [TokenFile(path, "numpy", tokens, None)]


def _is_llm_c(path: AnyPath, head: bytes) -> bool:
    """Return whether the first bytes are llm.c's header.

    Raises InputError for unsupported versions or contents of it, and for a chunk of litdata, which looks like a raw
    file without its index.
    """
    first, second = (int(number) for number in np.frombuffer(head, "<u4", 2))
    if second == 4 * (first + 2) and first:
        raise InputError(f"{path} is a chunk of litdata ({first:,} items); its index.json is missing beside it")
    if first == LLM_C_EVALUATION:
        raise InputError(f"{path} has llm.c's header of an evaluation's examples, not of tokens to train on")
    if first in LLM_C and second not in (version for version, _ in LLM_C.values()):
        raise InputError(f"{path} has llm.c's header in version {second}; expected version {LLM_C[first][0]}")
    return first in LLM_C


def _llm_c(path: AnyPath, head: bytes, where: str, dtype: np.dtype | None) -> NDArray[np.integer]:
    """Return the ids after llm.c's header of 256 int32: magic number, version, number of ids."""
    header = np.frombuffer(head, "<i4")
    found = np.dtype(LLM_C[int(header[0])][1])
    if dtype is not None and dtype != found:
        raise InputError(f"{where}: {dtype.name} asked for, but {path} has llm.c's header for {found.name}")
    return _to_the_end(path, found, LLM_C_BYTES, int(header[2]), "llm.c's header says ")


def _npy(path: AnyPath, where: str, dtype: np.dtype | None) -> NDArray[np.integer]:
    with readable(path), path.open("rb") as file:
        try:
            version = npy.read_magic(file)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"unknown version {version}")
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, found = read(file)
        except Exception as error:  # numpy parses the header as Python, so a damaged one raises anything
            raise InputError(f"{path}: damaged numpy header at byte 0 ({str(error).splitlines()[:1]})") from None
        start = file.tell()
    if len(shape) != 1 or found.kind not in "iu" or shape[0] < 0:
        raise InputError(f"{path}: expected a one-dimensional array of integers, found {found} of shape {list(shape)}")
    if dtype is not None and dtype != found:
        raise InputError(f"{where}: {dtype.name} asked for, but {path} says {found.name}")
    return _to_the_end(path, found, start, shape[0])


def _to_the_end(path: AnyPath, dtype: np.dtype, start: int, count: int, says: str = "") -> NDArray[np.integer]:
    """Return the `count` ids that a header announces at byte `start`. Raises InputError for another file size."""
    with readable(path):
        size = path.stat().st_size
    end = start + count * dtype.itemsize
    if end != size:
        raise InputError(
            f"{path}: {says}{count} ids of {dtype.name} from byte {start} on end at byte {end}, but the file ends at "
            f"byte {size}"
        )
    return map_array(path, dtype, start)
