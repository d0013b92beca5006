"""Tensors of a nanotron checkpoint, whole again: its files hold what one tensor-parallel rank had of each.

    model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors

has one tensor, `data`, and in its metadata where the rows of it belong. Four heads of 16 channels, on the second of
two ranks (a comma within a slice, a bar between dimensions):

    0,32,None|0,64,None # 32,64,None|0,64,None       its queries are rows 32 to 63 of all queries, keys and values
    32,64,None|0,64,None # 96,128,None|0,64,None     its keys are rows 96 to 127 (the values: one more pair)

The optimizer is a pickle for each rank, read with `weights_only=True`: tensors and plain values, no code. Its tensors
have the shape of the rank's part of the weight, with ZeRO-1 flat and cut once more, over the data-parallel ranks:

    optimizer_pp-0-of-1_dp-1-of-2_tp-1-of-2_exp-0-of-1.pt
        names                 {0: "model.decoder.0.pp_block.attn.qkv_proj.weight", …}
        state                 {0: {step, exp_avg, exp_avg_sq}, …}
        gradient_accumulator  {name: the weight in fp32}, with accumulate_grad_in_fp32
"""

import math
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenotron.config.errors import InputError, NotSupportedYet, nearest
from kenotron.interop.hf_weights import Box

Shape = tuple[int, ...]
WEIGHT_FILE = re.compile(
    r"model_(?P<kind>weight|bias)(?:_pp-rank-\d+-of-\d+_tp-rank-(?P<tp>\d+)-of-(?P<tps>\d+)(?P<experts>_exp-rank-.*)?)?"
    r"\.safetensors"
)
OPTIMIZER_FILE = re.compile(
    r"optimizer_pp-(?P<pp>\d+)-of-(?P<pps>\d+)(?:_dp-(?P<dp>\d+)-of-(?P<dps>\d+))?"
    r"_tp-(?P<tp>\d+)-of-(?P<tps>\d+)(?:_exp-\d+-of-(?P<exps>\d+))?"
)


class SlicesPair(NamedTuple):
    """A box of a rank's tensor, and where it belongs in the whole one."""

    here: Box
    there: Box


@dataclass(frozen=True)
class RankTensor:
    """What one tensor-parallel rank has of a tensor: `read(box)` gives the elements of a box of it."""

    file: Path
    shape: Shape
    pairs: tuple[SlicesPair, ...]
    read: Callable[[Box], Tensor]


@dataclass(frozen=True)
class Merged:
    """A whole tensor, put together from the ranks' when rows of it are asked for."""

    name: str
    shape: Shape
    ranks: tuple[RankTensor, ...]

    def check(self) -> None:
        """Raise InputError unless the ranks' slices make up the shape, each element once."""
        sizes = [math.prod(_size(part) for part in pair.there) for rank in self.ranks for pair in rank.pairs]
        inside = all(
            _size(here) == _size(there) and here.stop <= own and there.stop <= whole
            for rank in self.ranks
            for pair in rank.pairs
            for here, there, own, whole in zip(pair.here, pair.there, rank.shape, self.shape, strict=True)
        )
        if not inside or sum(sizes) != math.prod(self.shape):
            files = ", ".join(sorted({rank.file.name for rank in self.ranks}))
            raise InputError(
                f"{self.ranks[0].file.parent}: the slices of {files} hold {sum(sizes)} elements of {self.name}, and "
                f"its shape {list(self.shape)} has {math.prod(self.shape)}: a file is missing or damaged"
            )

    def rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` (not included) of the whole tensor, in fp32: nothing else is read."""
        merged = torch.empty((last - first, *self.shape[1:]))
        for rank in self.ranks:
            for (here, *columns), (there, *whole_columns) in rank.pairs:
                start, stop = max(there.start, first), min(there.stop, last)
                if start < stop:
                    rows = slice(start - there.start + here.start, stop - there.start + here.start)
                    merged[(slice(start - first, stop - first), *whole_columns)] = rank.read((rows, *columns))
        return merged


# ---- weights -------------------------------------------------------------------------------------------------


def read_weights(folder: Path) -> dict[str, Merged]:
    """nanotron's name → tensor, of all files below `<folder>/model`; only headers are read.

    Raises InputError: no files, one that is damaged, or slices that do not make up a tensor; NotSupportedYet:
    weights of experts, or files of the DataStates engine.
    """
    root = folder / "model"
    ranks: dict[str, dict[int, tuple[RankTensor, Shape]]] = {}
    sizes: dict[str, int] = {}
    for file in sorted(root.rglob("*")):
        if file.suffix == ".datastates":
            raise NotSupportedYet(f"{file}: checkpoints of the DataStates engine; save one with the torch engine")
        match = WEIGHT_FILE.fullmatch(file.name)
        if match is None:
            continue
        if match["experts"]:
            raise NotSupportedYet(f"{file}: weights of experts")
        name = ".".join([*file.parent.relative_to(root).parts, match["kind"]])
        ranks.setdefault(name, {})[int(match["tp"] or 0)] = _weight_file(file)
        sizes[name] = int(match["tps"] or 1)
    if not ranks:
        raise InputError(f"{root}: expected model_weight*.safetensors of a nanotron checkpoint, found none")
    return {name: _merged(name, found, sizes[name]) for name, found in ranks.items()}


def _weight_file(file: Path) -> tuple[RankTensor, Shape]:
    """The rank's tensor in `file`, and the shape of the whole one."""
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(str(file), framework="pt")
        part = opened.get_slice("data")
        notes = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is damaged or not a nanotron file: {error}") from None
    shape = tuple(part.get_shape())
    whole = tuple(slice(0, size) for size in shape)
    pairs: tuple[SlicesPair, ...] = (SlicesPair(whole, whole),)
    unsharded = shape
    if "local_global_slices_pairs" in notes:
        try:
            unsharded = tuple(int(number) for number in re.findall(r"\d+(?=[,)])", notes["unsharded_shape"]))
            pairs = tuple(_pairs(notes["local_global_slices_pairs"], shape, unsharded))
        except (KeyError, ValueError) as error:
            raise InputError(f"{file}: its metadata are not nanotron's: {error}") from None
    return RankTensor(file, shape, pairs, lambda box: part[box]), unsharded


def _pairs(text: str, shape: Shape, whole: Shape) -> Iterator[SlicesPair]:
    for pair in text.split(";"):
        here, there = pair.split("#")
        yield SlicesPair(_box(here, shape), _box(there, whole))


def _box(text: str, shape: Shape) -> Box:
    """``0,32,None|0,64,None`` → slices with numbers."""
    found = []
    for part, size in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if number.strip() == "None" else int(number) for number in part.split(","))
        if step not in (None, 1):
            raise ValueError(f"a slice with step {step}")
        found.append(slice(start or 0, size if stop is None else stop))
    return tuple(found)


def _size(part: slice) -> int:
    return part.stop - part.start


def _merged(name: str, ranks: dict[int, tuple[RankTensor, Shape]], size: int) -> Merged:
    folder = next(iter(ranks.values()))[0].file.parent
    if missing := sorted(set(range(size)) - set(ranks)):
        raise InputError(f"{folder}: expected {name} of {size} tensor-parallel ranks, found none of rank {missing[0]}")
    shapes = {shape for _, shape in ranks.values()}
    if len(shapes) > 1:
        found = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise InputError(f"{folder}: the files of {name} are of tensors of different shapes: {found}")
    merged = Merged(name, shapes.pop(), tuple(ranks[number][0] for number in sorted(ranks)))
    merged.check()
    return merged


# ---- optimizer -----------------------------------------------------------------------------------------------

Rank = tuple[int, int, int]  # pp, tp, dp
MASTER = "master"  # the key of the weights in fp32, beside Adam's


class OptimizerFiles:
    """The optimizer's state of all ranks; files are mapped, so that only what is used is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "optimizer"
        self.sizes = {"pp": 1, "tp": 1, "dp": 1}
        self.states = self._open()
        # name → key → the first pipeline rank that has it: a tied weight is on two, with equal states
        self.places: dict[str, dict[str, int]] = {}
        for (pp, _, _), state in sorted(self.states.items()):
            for name, tensors in state.items():
                for key in tensors:
                    self.places.setdefault(name, {}).setdefault(key, pp)

    @property
    def keys(self) -> set[str]:
        """What there is of any weight: step, exp_avg, exp_avg_sq, `MASTER`."""
        return {key for places in self.places.values() for key in places}

    def step(self, name: str) -> float:
        """How often Adam has updated this weight."""
        return float(next(state[name]["step"] for state in self.states.values() if "step" in state.get(name, {})))

    def tensor(self, weight: Merged, key: str) -> Merged:
        """The tensor `key` of a weight, cut as the weight is. Raises InputError if a rank's does not fit."""
        if key not in self.places.get(weight.name, {}):
            raise InputError(f"{self.folder} has no {key} of {weight.name}{nearest(weight.name, self.places)}")
        ranks = [self._rank_tensor(weight, key, tp, part) for tp, part in enumerate(weight.ranks)]
        return Merged(f"{key} of {weight.name}", weight.shape, tuple(ranks))

    def _rank_tensor(self, weight: Merged, key: str, tp: int, part: RankTensor) -> RankTensor:
        """The parts that data-parallel ranks have (one without ZeRO), in their order, are the rank's tensor."""
        pp = self.places[weight.name][key]
        if tp >= self.sizes["tp"]:
            raise InputError(
                f"{self.folder}: expected files of {len(weight.ranks)} tensor-parallel ranks, as {weight.name} has, "
                f"found {self.sizes['tp']}"
            )
        states = [self.states[pp, tp, dp].get(weight.name, {}) for dp in range(self.sizes["dp"])]
        parts = [state[key] for state in states if key in state]
        elements = sum(each.numel() for each in parts)
        flat = all(each.dim() == 1 for each in parts)
        if elements != math.prod(part.shape) or not (flat or tuple(parts[0].shape) == part.shape):
            found = list(parts[0].shape) if len(parts) == 1 else [elements]
            raise InputError(
                f"{self.folder}: {key} of {weight.name} has shape {found} on tensor-parallel rank {tp}, and the weight "
                f"has {list(part.shape)}"
            )

        def read(box: Box) -> Tensor:
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            return whole.reshape(part.shape)[box]

        return RankTensor(self.folder, part.shape, part.pairs, read)

    def _open(self) -> dict[Rank, dict[str, dict[str, Any]]]:
        found: dict[Rank, Path] = {}
        for file in sorted(self.folder.glob("optimizer_*.pt")):
            match = OPTIMIZER_FILE.fullmatch(file.stem)
            if match is None or int(match["exps"] or 1) > 1:
                raise NotSupportedYet(f"{file}: an optimizer of experts")
            self.sizes = {axis: int(match[f"{axis}s"] or 1) for axis in ("pp", "tp", "dp")}
            found[int(match["pp"]), int(match["tp"]), int(match["dp"] or 0)] = file
        pps, tps, dps = (range(self.sizes[axis]) for axis in ("pp", "tp", "dp"))
        for pp, tp, dp in ((pp, tp, dp) for pp in pps for tp in tps for dp in dps):
            if found and (pp, tp, dp) not in found:
                raise InputError(
                    f"{self.folder}: expected files of {self.sizes}, and pp {pp}, tp {tp}, dp {dp} has none"
                )
        return {rank: _optimizer_file(file) for rank, file in found.items()}


def _optimizer_file(file: Path) -> dict[str, dict[str, Any]]:
    """name → key → tensor of one rank."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        refused = str(error).partition("\n")[0]
        raise InputError(f"{file}: expected tensors and plain values, found something else: {refused}") from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise InputError(f"{file} is damaged or not a file of torch.save: {str(error).partition('.')[0]}") from None
    if not isinstance(content, dict) or not {"state", "names"} <= content.keys():
        raise InputError(f"{file}: expected the optimizer of a nanotron checkpoint, with the keys state and names")
    tensors: dict[str, dict[str, Any]] = {}
    for index, name in content["names"].items():
        tensors[name] = dict(content["state"].get(index, {}))
    for name, master in content.get("gradient_accumulator", {}).items():
        tensors.setdefault(name, {})[MASTER] = master.detach()
    return {name.removeprefix("module."): state for name, state in tensors.items()}
