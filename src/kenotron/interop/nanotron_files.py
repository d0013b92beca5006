"""Read the tensors of a nanotron checkpoint, whose files hold the shards of the tensor-parallel ranks.

    model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors

has one tensor, `data`; its metadata says to which rows of the whole tensor its rows belong. With four heads of 16
channels, the second of two ranks has (a comma within a slice, a bar between dimensions):

    0,32,None|0,64,None # 32,64,None|0,64,None       its queries are rows 32 to 63 of all queries, keys and values
    32,64,None|0,64,None # 96,128,None|0,64,None     its keys are rows 96 to 127 (the values: one more pair)

The optimizer is one pickle per rank, read with `weights_only=True`: tensors and plain values, no code. Its tensors have
the shape of the rank's shard of the weight; with ZeRO-1 they are flat and sharded again over the data-parallel ranks:

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
    """A box of a rank's tensor, and the box of the whole tensor that it is."""

    here: Box
    there: Box


@dataclass(frozen=True)
class RankTensor:
    """One tensor-parallel rank's shard of a tensor; `read(box)` returns the elements of a box of the shard."""

    file: Path
    shape: Shape
    pairs: tuple[SlicesPair, ...]
    read: Callable[[Box], Tensor]


@dataclass(frozen=True)
class Merged:
    """A whole tensor, whose rows are read from the ranks' shards when they are needed."""

    name: str
    shape: Shape
    ranks: tuple[RankTensor, ...]

    def check(self) -> None:
        """Raise InputError unless the ranks' slices lie in the shape and have as many elements as it."""
        sizes = [math.prod(_size(extent) for extent in pair.there) for rank in self.ranks for pair in rank.pairs]
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
        """Return rows `first` to `last` (exclusive) of the whole tensor in fp32; only these rows are read."""
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
    """Return nanotron's name → tensor for all files below `<folder>/model`; only headers are read.

    Raises InputError if there are no files, one is damaged, or the slices do not make up a tensor, and NotSupportedYet
    for weights of experts and files of the DataStates engine.
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
    """Return the rank's tensor in `file`, and the shape of the whole tensor."""
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(str(file), framework="pt")
        data = opened.get_slice("data")
        metadata = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is damaged or not a nanotron file: {error}") from None
    shape = tuple(data.get_shape())
    whole = tuple(slice(0, size) for size in shape)
    pairs: tuple[SlicesPair, ...] = (SlicesPair(whole, whole),)
    unsharded = shape
    if "local_global_slices_pairs" in metadata:
        try:
            unsharded = tuple(int(number) for number in re.findall(r"\d+(?=[,)])", metadata["unsharded_shape"]))
            pairs = tuple(_pairs(metadata["local_global_slices_pairs"], shape, unsharded))
        except (KeyError, ValueError) as error:
            raise InputError(f"{file}: its metadata are not nanotron's: {error}") from None
    return RankTensor(file, shape, pairs, lambda box: data[box]), unsharded


def _pairs(text: str, shape: Shape, whole: Shape) -> Iterator[SlicesPair]:
    for pair in text.split(";"):
        here, there = pair.split("#")
        yield SlicesPair(_box(here, shape), _box(there, whole))


def _box(text: str, shape: Shape) -> Box:
    """Parse a box such as ``0,32,None|0,64,None``; None as start or stop means the bound of `shape`."""
    found = []
    for extent, size in zip(text.split("|"), shape, strict=True):
        start, stop, step = (None if number.strip() == "None" else int(number) for number in extent.split(","))
        if step not in (None, 1):
            raise ValueError(f"a slice with step {step}")
        found.append(slice(start or 0, size if stop is None else stop))
    return tuple(found)


def _size(extent: slice) -> int:
    return extent.stop - extent.start


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
MASTER = "master"  # the key of the fp32 master weights, beside Adam's


class OptimizerFiles:
    """The optimizer state of all ranks; files are memory-mapped, so only the tensors that are used are read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "optimizer"
        self.sizes = {"pp": 1, "tp": 1, "dp": 1}
        self.states = self._open()
        # name → key → the first pipeline rank that has it: a tied weight is on two ranks, with equal states
        self.pp_ranks: dict[str, dict[str, int]] = {}
        for (pp, _, _), state in sorted(self.states.items()):
            for name, tensors in state.items():
                for key in tensors:
                    self.pp_ranks.setdefault(name, {}).setdefault(key, pp)

    @property
    def keys(self) -> set[str]:
        """Return the keys that any weight has: step, exp_avg, exp_avg_sq, `MASTER`."""
        return {key for pp_ranks in self.pp_ranks.values() for key in pp_ranks}

    def step(self, name: str) -> float:
        """Return how often Adam has updated the weight `name`."""
        return float(next(state[name]["step"] for state in self.states.values() if "step" in state.get(name, {})))

    def tensor(self, weight: Merged, key: str) -> Merged:
        """Return the state tensor `key` of a weight, sharded like the weight. Raises InputError for another shape."""
        if key not in self.pp_ranks.get(weight.name, {}):
            raise InputError(f"{self.folder} has no {key} of {weight.name}{nearest(weight.name, self.pp_ranks)}")
        ranks = [self._rank_tensor(weight, key, tp, shard) for tp, shard in enumerate(weight.ranks)]
        return Merged(f"{key} of {weight.name}", weight.shape, tuple(ranks))

    def _rank_tensor(self, weight: Merged, key: str, tp: int, weight_shard: RankTensor) -> RankTensor:
        """Return rank `tp`'s state tensor: the data-parallel ranks' shards of it (one without ZeRO), concatenated."""
        pp = self.pp_ranks[weight.name][key]
        if tp >= self.sizes["tp"]:
            raise InputError(
                f"{self.folder}: expected files of {len(weight.ranks)} tensor-parallel ranks, as {weight.name} has, "
                f"found {self.sizes['tp']}"
            )
        states = [self.states[pp, tp, dp].get(weight.name, {}) for dp in range(self.sizes["dp"])]
        shards = [state[key] for state in states if key in state]
        elements = sum(each.numel() for each in shards)
        flat = all(each.dim() == 1 for each in shards)
        if elements != math.prod(weight_shard.shape) or not (flat or tuple(shards[0].shape) == weight_shard.shape):
            found = list(shards[0].shape) if len(shards) == 1 else [elements]
            raise InputError(
                f"{self.folder}: {key} of {weight.name} has shape {found} on tensor-parallel rank {tp}, and the weight "
                f"has {list(weight_shard.shape)}"
            )

        def read(box: Box) -> Tensor:
            whole = shards[0] if len(shards) == 1 else torch.cat(shards)
            return whole.reshape(weight_shard.shape)[box]

        return RankTensor(self.folder, weight_shard.shape, weight_shard.pairs, read)

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
    """Return name → key → tensor of one rank's file."""
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
