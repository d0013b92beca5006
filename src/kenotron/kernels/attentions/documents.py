"""Document borders as tensors, created without waiting for the device.

Two sequences of 4 tokens, the second of two documents:

    cu_seqlens        (0, 4, 6, 8)              host integers, from the loader
    starts            [0, 4, 6, 8]              int32 on the device: what varlen kernels read
    numbers           [[1, 1, 1, 1],            a document's tokens share a number
                       [2, 2, 3, 3]]
"""

from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from kenotron.kernels.attention import Documents, document_lengths


def has_documents(ctx: Documents) -> bool:
    """Return whether there are borders. Checks the tensor first: compiled code must not read the host integers."""
    return ctx.document_starts is not None or ctx.cu_seqlens is not None


def document_starts(ctx: Documents, sequences: int, length: int, device: torch.device) -> Tensor:
    """Return the flat offsets of documents, and the end, as int32 ``[documents + 1]`` on `device`.

    Every sequence begins a document. Compiled code uses the tensor in `ctx`, because host integers would be constants
    of the graph.
    """
    if not has_documents(ctx):
        return torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device=device)
    if ctx.document_starts is not None:
        return ctx.document_starts
    assert ctx.cu_seqlens is not None
    lengths = chain.from_iterable(document_lengths(ctx.cu_seqlens, sequences, length))
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def bound_of_documents(cu_seqlens: tuple[int, ...], length: int) -> int:
    """Return an upper bound of the documents' lengths, rounded up to few values: powers of two times length / 8."""
    longest, bound = max(end - begin for begin, end in pairwise(cu_seqlens)), max(1, length // 8)
    while bound < longest:
        bound *= 2
    return min(bound, length)


def document_numbers(starts: Tensor, sequences: int, length: int) -> Tensor:
    """Return each token's document, ``[sequences, length]``, from `document_starts`."""
    tokens = torch.arange(sequences * length, dtype=starts.dtype, device=starts.device)
    return torch.searchsorted(starts, tokens, right=True).view(sequences, length)
