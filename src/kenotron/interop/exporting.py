"""`kenotron convert to-hf`: a checkpoint becomes a folder that `transformers` loads.

    to_hf("checkpoints/100", "exported", dtype="bfloat16", max_shard_size="5GB")
    → exported/config.json, generation_config.json, model.safetensors (or shards and an index), tokenizer files

The folder is written beside its place and renamed when it is complete. At most one shard is in memory.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.config.decoder import DecoderArchitecture, RopeArchitecture
from kenotron.config.errors import InputError, nearest
from kenotron.config.model import WEIGHT_DTYPES
from kenotron.interop.hf_config import Report, hf_config, quiet
from kenotron.interop.hf_weights import INDEX, Weights
from kenotron.interop.sources import Source, checkpoint_source, fitted, skeleton
from kenotron.interop.tensor_names import by_hf_name, their_tensor
from kenotron.models.family import Family, family_of
from kenotron.storage.files import publish_folder, temporary_beside
from kenotron.text.tokenizer import end_of_text, load_tokenizer

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Exported:
    """What was written: the folder, its safetensors files and their bytes, and the dtype."""

    path: Path
    files: list[str]
    bytes: int
    dtype: str


def to_hf(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    report: Report = quiet,
    progress: Progress | None = None,
) -> Exported:
    """Write checkpoint `src` as a Hugging Face model in the new folder `dst`.

    `dtype` None is the config's `model.dtype`. `progress(done, total)` counts bytes.
    Errors (InputError): no checkpoint at `src` or a damaged one, `dst` not empty, an unknown dtype or size,
    disk full.
    """
    final = Path(dst).expanduser()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise InputError(f"{final} is not empty; name a new folder")
    source = checkpoint_source(Path(src).expanduser())
    name = dtype or source.model.dtype
    if name not in WEIGHT_DTYPES:
        known = ", ".join(WEIGHT_DTYPES)
        raise InputError(f"dtype: expected one of {known}, found {name!r}{nearest(name, WEIGHT_DTYPES)}")
    weights = fitted(source, _in_halves(source.architecture))
    shapes = {parameter: tuple(value.shape) for parameter, value in skeleton(source.model).named_parameters()}
    size_limit = _size(max_shard_size)
    temporary = temporary_beside(final)
    try:
        temporary.mkdir(parents=True)
        _write_configs(source, temporary, name)
        files, size = _write_weights(
            weights, family_of(source.architecture), shapes, temporary, name, size_limit, progress
        )
        if source.tokenizer:
            load_tokenizer(source.tokenizer).save(temporary)
        else:
            report(f"{source.path} has no tokenizer, so {final} has none")
        publish_folder(temporary, final)
    except OSError as error:
        raise InputError(f"cannot write {final}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(final, files, size, name)


def _in_halves(architecture: DecoderArchitecture) -> DecoderArchitecture:
    """The same with RoPE's channels in the order of transformers."""
    rope = isinstance(architecture, RopeArchitecture)
    return architecture.model_copy(update={"rope_interleaved": False}) if rope else architecture


def _write_weights(
    weights: Weights,
    family: Family[Any],
    shapes: dict[str, tuple[int, ...]],
    folder: Path,
    dtype: str,
    size_limit: int,
    progress: Progress | None,
) -> tuple[list[str], int]:
    """Shards of at most `size_limit` bytes, and an index when there are several. Returns file names and bytes."""
    import torch
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.torch import save_file

    target: torch.dtype = getattr(torch, dtype)
    groups = by_hf_name(family, shapes)
    sizes = {
        theirs: sum(math.prod(shapes[name]) for name in names) * target.itemsize for theirs, names in groups.items()
    }
    split = split_state_dict_into_shards_factory(
        sizes,  # type: ignore[type-var]
        get_storage_size=lambda size: size,  # type: ignore[arg-type, return-value]
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=size_limit,
    )
    done = 0
    for file, names in split.filename_to_tensors.items():
        shard = {name: their_tensor(weights, family, name, groups[name]).to(target).contiguous() for name in names}
        save_file(shard, folder / file, metadata={"format": "pt"})
        shutil.copymode(folder / "config.json", folder / file)  # save_file makes files that only their owner reads
        done += sum(sizes[name] for name in names)
        if progress:
            progress(done, sum(sizes.values()))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return list(split.filename_to_tensors), done


def _write_configs(source: Source, folder: Path, dtype: str) -> None:
    """`config.json` and `generation_config.json`; one that came with an import goes out as it came."""
    from transformers import GenerationConfig

    architecture = source.architecture
    eos = end_of_text(load_tokenizer(source.tokenizer) if source.tokenizer else None, architecture)
    hf_config(architecture, dtype, eos).save_pretrained(folder)
    carried = source.tokenizer / GENERATION if source.tokenizer else None
    if carried and carried.is_file():
        shutil.copyfile(carried, folder / GENERATION)
        return
    generation = GenerationConfig(
        bos_token_id=architecture.bos_token_id, eos_token_id=eos, pad_token_id=architecture.pad_token_id
    )
    generation.save_pretrained(folder)


UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _size(text: str | int) -> int:
    """Bytes of "5GB", "500 MB" or a number."""
    digits = str(text).strip().rstrip("BbKkMmGgTt ")
    unit = str(text).strip()[len(digits) :].strip().upper()
    try:
        size = int(float(digits) * UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        size = 0
    if size < 1:
        raise InputError(f"max_shard_size: expected a size such as 5GB or 500MB, found {text!r}")
    return size
