"""Tensors under Hugging Face's names and under ours, by what the family says (`Family.hf_name`, `hf_join`, `hf_split`).

Most names are the same. Where several of ours are one of theirs, as in GPT-NeoX:

    attention.query_key_value.weight  ◀──▶  self_attn.q_proj.weight, self_attn.k_proj.weight, self_attn.v_proj.weight

The matrices of a layer's experts are one tensor here, and one tensor an expert there:

    mlp.experts.0.up_proj.weight, mlp.experts.1.up_proj.weight, …  ◀──▶  mlp.experts.up_proj.weight
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.interop.hf_weights import Box, Stored, Weights
from kenotron.models.family import EMBEDDING, HEAD, Family

Shape = tuple[int, ...]
ROWS = 4096  # that are compared at a time
EXPERTS = ".experts."  # in names of ours: the matrices of all experts of a layer in one tensor


def by_hf_name(family: Family[Any], shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Their name → our names, one or several, in the order of `shapes`."""
    groups: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for theirs in their_names(family, name, shape):
            groups.setdefault(theirs, []).append(name)
    return groups | {theirs: [ours] for theirs, ours in family.hf_copies().items()}


def their_names(family: Family[Any], name: str, shape: Shape) -> list[str]:
    """What our tensor `name` is called there: one name, or for a stack of experts' matrices one of each expert."""
    layer, stacked, matrix = name.partition(EXPERTS)
    if not stacked:
        return [family.hf_name(name)]
    return [family.hf_name(f"{layer}{EXPERTS}{expert}.{matrix}") for expert in range(shape[0])]


def in_our_names(theirs: Weights, family: Family[Any], shapes: Mapping[str, Shape]) -> Weights:
    """Their tensors as ours; `shapes` are those of our model's parameters.

    Raises InputError for a tensor that the files lack, NotSupportedYet for one that the model does not have. A tied
    head may be there twice: InputError if the two differ.
    """
    groups = by_hf_name(family, shapes)
    if not set(groups) & set(theirs):
        first = next(iter(theirs), "nothing")
        raise NotSupportedYet(
            f"{theirs.where}: weights of something other than {family.hf_class} (the first: {first!r})"
        )
    missing = sorted(set(groups) - set(theirs) - set(family.hf_copies()))
    head, embedding = family.hf_name(HEAD), family.hf_name(EMBEDDING)
    unknown = set(theirs) - set(groups) - {head}
    extra = sorted(name for name in unknown if not name.endswith(family.hf_unread))
    if missing:
        raise InputError(f"{theirs.where} has no tensor {missing[0]!r}, which its config.json requires")
    if extra:
        raise NotSupportedYet(f"{theirs.where}: tensor {extra[0]!r}, which its config.json does not describe")
    # A head of its own beside a config that ties it would be dropped in silence.
    if HEAD not in shapes and head in theirs and embedding in theirs and not _same(theirs, head, embedding):
        raise untied_head(theirs.where, head, embedding)
    for copy, ours in family.hf_copies().items():
        if copy in theirs and not _same(theirs, copy, family.hf_name(ours)):
            raise NotSupportedYet(f"{theirs.where}: {copy!r} differs from {family.hf_name(ours)!r}, which it repeats")
    stored: dict[str, Stored] = {}
    for name, shape in shapes.items():
        hf_names = their_names(family, name, shape)
        together = groups[hf_names[0]]
        if len(together) > 1:
            stored[name] = Stored(shape, partial(_part, theirs, family, hf_names[0], together.index(name)))
        elif EXPERTS in name:
            stored[name] = _stack([theirs.stored(hf_name) for hf_name in hf_names])
        else:
            stored[name] = theirs.stored(hf_names[0])
    return Weights(stored, theirs.where)


def _part(theirs: Weights, family: Family[Any], hf_name: str, number: int, box: Box) -> Tensor:
    return family.hf_split(hf_name, theirs[hf_name])[number][box]


def _stack(matrices: list[Stored]) -> Stored:
    """Matrices of experts as one tensor; of a box only the experts in it are read."""

    def read(box: Box) -> Tensor:
        experts, *inside = box or (slice(None),)
        return torch.stack([matrix.read(tuple(inside)) for matrix in matrices[experts]])

    return Stored((len(matrices), *matrices[0].shape), read)


def their_tensor(ours: Weights, family: Family[Any], hf_name: str, names: list[str]) -> Tensor:
    """The tensor `hf_name` of an export, from ours of these `names`."""
    if len(names) > 1:
        return family.hf_join(hf_name, [ours[name] for name in names])
    if EXPERTS not in names[0]:
        return ours[names[0]]
    shape = ours.shape(names[0])
    return ours.block(names[0], (_experts_by_name(family, names[0], shape)[hf_name], 0, 0), (1, *shape[1:]))[0]


@lru_cache(maxsize=16)
def _experts_by_name(family: Family[Any], name: str, shape: Shape) -> dict[str, int]:
    """Numbers of the experts in our tensor `name`, by what their matrices are called there."""
    return {theirs: number for number, theirs in enumerate(their_names(family, name, shape))}


def untied_head(where: str, head: str, embedding: str) -> InputError:
    """The error of a tied config beside a head of its own."""
    return InputError(
        f"{where}: config.json ties the output head to the embedding (tie_word_embeddings), but {head!r} differs from "
        f"{embedding!r}; set tie_word_embeddings to false there, or delete the tensor"
    )


def _same(theirs: Weights, one: str, other: str) -> bool:
    """Compared by groups of rows, so that neither matrix is in memory as a whole."""
    if theirs.shape(one) != theirs.shape(other):
        return False
    rows, width = theirs.shape(one)
    for start in range(0, rows, ROWS):
        offset, shape = (start, 0), (min(ROWS, rows - start), width)
        if not theirs.block(one, offset, shape).equal(theirs.block(other, offset, shape)):
            return False
    return True
