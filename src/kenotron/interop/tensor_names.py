"""Tensors under Hugging Face's names and under ours, by what the family says (`Family.hf_name`, `hf_join`, `hf_split`).

Most go over as they are. Where several of ours are one of theirs, as in GPT-NeoX:

    attention.query_key_value.weight  ◀──▶  self_attn.q_proj.weight, self_attn.k_proj.weight, self_attn.v_proj.weight
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.interop.hf_weights import Box, Stored, Weights
from kenotron.models.family import HEAD, Family

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


def by_hf_name(family: Family[Any], names: Iterable[str]) -> dict[str, list[str]]:
    """Their name → our names, one or several, in the order of `names`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(family.hf_name(name), []).append(name)
    return groups


def in_our_names(theirs: Weights, family: Family[Any], shapes: Mapping[str, Shape]) -> Weights:
    """Their tensors as ours; `shapes` are those of our model's parameters.

    Errors: the files lack a tensor (InputError), or hold one that the model does not have (NotSupportedYet). A tied
    head may be there twice.
    """
    groups = by_hf_name(family, shapes)
    if not set(groups) & set(theirs):
        first = next(iter(theirs), "nothing")
        raise NotSupportedYet(
            f"{theirs.where}: weights of something else than {family.hf_class} (the first: {first!r})"
        )
    missing = sorted(set(groups) - set(theirs))
    unknown = set(theirs) - set(groups) - {family.hf_name(HEAD)}
    extra = sorted(name for name in unknown if not name.endswith(family.hf_unread))
    if missing:
        raise InputError(f"{theirs.where} has no tensor {missing[0]!r}, which its config.json requires")
    if extra:
        raise NotSupportedYet(f"{theirs.where}: tensor {extra[0]!r}, which its config.json does not describe")
    stored: dict[str, Stored] = {}
    for hf_name, names in groups.items():
        if len(names) == 1:
            stored[names[0]] = theirs.stored(hf_name)
        else:
            for number, name in enumerate(names):
                stored[name] = Stored(shapes[name], partial(_part, theirs, family, hf_name, number))
    return Weights(stored, theirs.where)


def _part(theirs: Weights, family: Family[Any], hf_name: str, number: int, box: Box) -> Tensor:
    part = family.hf_split(hf_name, theirs[hf_name])[number]
    return part[box] if box else part


def their_tensor(ours: Mapping[str, Tensor], family: Family[Any], hf_name: str, names: list[str]) -> Tensor:
    """The tensor `hf_name` of an export, from ours of these `names`."""
    return ours[names[0]] if len(names) == 1 else family.hf_join(hf_name, [ours[name] for name in names])
