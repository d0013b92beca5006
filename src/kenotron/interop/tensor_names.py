"""Translate tensor names between Hugging Face and Kénotron, with the family's `hf_name`, `hf_join` and `hf_split`.

Most names are the same. Some Hugging Face tensors are the concatenation of several Kénotron tensors, as in GPT-NeoX:

    attention.query_key_value.weight  ◀──▶  self_attn.q_proj.weight, self_attn.k_proj.weight, self_attn.v_proj.weight

Hugging Face stores one tensor per expert; Kénotron stacks the matrices of all experts of a layer in one tensor:

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
ROWS = 4096  # number of rows compared at a time
EXPERTS = ".experts."  # in a Kénotron name: the tensor stacks the matrices of all experts of a layer


def by_hf_name(family: Family[Any], shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Return a map from each Hugging Face name to the Kénotron tensors that it holds, in the order of `shapes`."""
    groups: dict[str, list[str]] = {}
    for name, shape in shapes.items():
        for hf_name in hf_names_of(family, name, shape):
            groups.setdefault(hf_name, []).append(name)
    return groups | {copy: [original] for copy, original in family.hf_copies().items()}


def hf_names_of(family: Family[Any], name: str, shape: Shape) -> list[str]:
    """Return the Hugging Face name of the tensor `name`; for a stack of experts' matrices, one name per expert."""
    layer, stacked, matrix = name.partition(EXPERTS)
    if not stacked:
        return [family.hf_name(name)]
    return [family.hf_name(f"{layer}{EXPERTS}{expert}.{matrix}") for expert in range(shape[0])]


def from_hf_names(hf_weights: Weights, family: Family[Any], shapes: Mapping[str, Shape]) -> Weights:
    """Return Hugging Face weights under Kénotron's names; `shapes` has the shape of every parameter of the model.

    Raises InputError if the files lack a tensor, or if they hold both the embedding and a head that is tied to it, and
    the two differ. Raises NotSupportedYet if they have a tensor that the model does not have.
    """
    groups = by_hf_name(family, shapes)
    if not set(groups) & set(hf_weights):
        first = next(iter(hf_weights), "nothing")
        raise NotSupportedYet(
            f"{hf_weights.where}: weights of something other than {family.hf_class} (the first: {first!r})"
        )
    missing = sorted(set(groups) - set(hf_weights) - set(family.hf_copies()))
    head, embedding = family.hf_name(HEAD), family.hf_name(EMBEDDING)
    unknown = set(hf_weights) - set(groups) - {head}
    extra = sorted(name for name in unknown if not name.endswith(family.hf_unread))
    if missing:
        raise InputError(f"{hf_weights.where} has no tensor {missing[0]!r}, which its config.json requires")
    if extra:
        raise NotSupportedYet(f"{hf_weights.where}: tensor {extra[0]!r}, which its config.json does not describe")
    # Without this check, a separate head would be dropped silently where the config ties it to the embedding.
    if HEAD not in shapes and head in hf_weights and embedding in hf_weights and not _same(hf_weights, head, embedding):
        raise untied_head(hf_weights.where, head, embedding)
    for copy, name in family.hf_copies().items():
        if copy in hf_weights and not _same(hf_weights, copy, original := family.hf_name(name)):
            raise NotSupportedYet(f"{hf_weights.where}: {copy!r} differs from {original!r}, which it repeats")
    stored: dict[str, Stored] = {}
    for name, shape in shapes.items():
        hf_names = hf_names_of(family, name, shape)
        joined = groups[hf_names[0]]
        if len(joined) > 1:
            stored[name] = Stored(shape, partial(_split, hf_weights, family, hf_names[0], joined.index(name)))
        elif EXPERTS in name:
            stored[name] = _stack([hf_weights.stored(hf_name) for hf_name in hf_names])
        else:
            stored[name] = hf_weights.stored(hf_names[0])
    return Weights(stored, hf_weights.where)


def _split(hf_weights: Weights, family: Family[Any], hf_name: str, index: int, box: Box) -> Tensor:
    return family.hf_split(hf_name, hf_weights[hf_name])[index][box]


def _stack(matrices: list[Stored]) -> Stored:
    """Return the experts' matrices as one tensor; reading a box of it reads only the experts in that box."""

    def read(box: Box) -> Tensor:
        experts, *inside = box or (slice(None),)
        return torch.stack([matrix.read(tuple(inside)) for matrix in matrices[experts]])

    return Stored((len(matrices), *matrices[0].shape), read)


def hf_tensor(weights: Weights, family: Family[Any], hf_name: str, names: list[str]) -> Tensor:
    """Return the tensor `hf_name` of an export, made of the Kénotron tensors `names`."""
    if len(names) > 1:
        return family.hf_join(hf_name, [weights[name] for name in names])
    if EXPERTS not in names[0]:
        return weights[names[0]]
    shape = weights.shape(names[0])
    return weights.block(names[0], (_experts_by_name(family, names[0], shape)[hf_name], 0, 0), (1, *shape[1:]))[0]


@lru_cache(maxsize=16)
def _experts_by_name(family: Family[Any], name: str, shape: Shape) -> dict[str, int]:
    """Return the index of each expert in the stacked tensor `name`, by the Hugging Face name of its matrix."""
    return {hf_name: expert for expert, hf_name in enumerate(hf_names_of(family, name, shape))}


def untied_head(where: str, head: str, embedding: str) -> InputError:
    """Return the error for a config that ties the head to the embedding while the files hold a different head."""
    return InputError(
        f"{where}: config.json ties the output head to the embedding (tie_word_embeddings), but {head!r} differs from "
        f"{embedding!r}; set tie_word_embeddings to false there, or delete the tensor"
    )


def _same(hf_weights: Weights, one: str, other: str) -> bool:
    """Compare two matrices a chunk of rows at a time, so that neither is in memory as a whole."""
    if hf_weights.shape(one) != hf_weights.shape(other):
        return False
    rows, width = hf_weights.shape(one)
    for start in range(0, rows, ROWS):
        offset, shape = (start, 0), (min(ROWS, rows - start), width)
        if not hf_weights.block(one, offset, shape).equal(hf_weights.block(other, offset, shape)):
            return False
    return True
