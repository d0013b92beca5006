"""`kenotron convert to-hf`: a checkpoint becomes a folder that `transformers` loads.

    to_hf("checkpoints/100", "exported", dtype="bfloat16", max_shard_size="5GB")
    → exported/config.json, generation_config.json, model.safetensors (or shards and an index), tokenizer files,
      and for a family that transformers does not have, the code of its model

The files are written to a temporary folder next to `exported`, which is renamed when it is complete. At most one shard
is in memory. During training all ranks call `to_hf` (`checkpoints.export_hf`), and each writes some of the shards. It
reads their tensors from the checkpoint, whose files do not depend on the layout, so no rank ever gathers the model.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ByteSize, Field, TypeAdapter, ValidationError

from kenotron.checkpoint.folders import Progress, Report, quiet
from kenotron.checkpoint.hf_files import INDEX
from kenotron.config.decoder import DecoderArchitecture, RopeArchitecture
from kenotron.config.errors import InputError, nearest
from kenotron.config.model import WEIGHT_DTYPES
from kenotron.interop.hf_code import copy_code
from kenotron.interop.hf_config import hf_config
from kenotron.interop.older_readers import with_older_class, with_older_keys
from kenotron.interop.sources import Source, checkpoint_source, fitted, unpadded
from kenotron.interop.tensor_names import by_hf_name, hf_names_of, hf_tensor
from kenotron.interop.whole_weights import write_whole
from kenotron.models.family import Family, family_of
from kenotron.models.foreign import HuggingFaceArchitecture
from kenotron.parallel.ranks import raise_on_any_rank, rank_and_size, run_on_rank0
from kenotron.storage.files import publish_folder, temporary_beside
from kenotron.storage.hub import read_json
from kenotron.text.tokenizer import GENERATION, TextTokenizer, end_of_text, load_tokenizer


@dataclass(frozen=True)
class Exported:
    """What an export wrote: the folder, its safetensors files, their total size in bytes, and the dtype."""

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
    verify: bool = True,
    ema: bool = False,
    report: Report = quiet,
    progress: Progress | None = None,
) -> Exported:
    """Write checkpoint `src` as a Hugging Face model in the new folder `dst`; all ranks of a run call it together.

    `dtype` None stands for the config's `model.dtype`. Set `verify` to False if the checkpoint's checksums have been
    compared already. `ema` exports the moving average of the weights that the run kept (`optimizer.ema_decay`) instead
    of the weights. `progress(done, total)` counts bytes.
    Raises InputError if `src` has no checkpoint, a damaged one or, with `ema`, one without a moving average, if `dst`
    is not empty, if the dtype or size is unknown, or if the disk is full.
    """
    from safetensors import SafetensorError

    final = Path(dst).expanduser()
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise InputError(f"{final} exists and is not an empty folder; name a new one")
    rank, ranks = rank_and_size()
    source = raise_on_any_rank(lambda: checkpoint_source(Path(src).expanduser(), verify and rank == 0, ema))
    name = dtype or source.model.dtype
    if name not in WEIGHT_DTYPES:
        known = ", ".join(WEIGHT_DTYPES)
        raise InputError(f"dtype: expected one of {known}, found {name!r}{nearest(name, WEIGHT_DTYPES)}")
    size_limit, architecture = _size(max_shard_size), source.architecture
    plan = None if isinstance(architecture, HuggingFaceArchitecture) else _Plan(source, name, size_limit)
    temporary = run_on_rank0(lambda: temporary_beside(final))
    try:
        run_on_rank0(lambda: temporary.mkdir(parents=True))
        if isinstance(architecture, HuggingFaceArchitecture):  # it has no family: transformers writes it
            run_on_rank0(lambda: write_whole(source.weights, architecture, temporary, name, size_limit))
        run_on_rank0(lambda: write_configs(source, temporary, name))
        if plan is not None:
            raise_on_any_rank(lambda: _write_shards(plan, temporary, rank, ranks, progress))
        run_on_rank0(lambda: _finish(source, temporary, final, report))
    except (OSError, SafetensorError) as error:  # safetensors wraps errors of the operating system
        raise InputError(f"cannot write {final}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    if plan is not None:
        return Exported(final, list(plan.files), sum(plan.sizes.values()), name)
    sizes = run_on_rank0(lambda: {file.name: file.stat().st_size for file in sorted(final.glob("*.safetensors"))})
    return Exported(final, list(sizes), sum(sizes.values()), name)


class _Plan:
    """The tensors of an export: the Kénotron tensors that make up each, its size in bytes, and the file it goes to."""

    def __init__(self, source: Source, dtype: str, size_limit: int) -> None:
        self.weights, self.dtype = fitted(source, _in_halves(source.architecture)), dtype
        self.family = family = family_of(source.architecture)
        shapes = {parameter: tuple(value.shape) for parameter, value in unpadded(source.model).named_parameters()}
        self.groups = by_hf_name(family, shapes)
        itemsize = {hf_name: 4 if _dtype(hf_name, family, dtype) == "float32" else 2 for hf_name in self.groups}
        numel = {name: math.prod(shape) // len(hf_names_of(family, name, shape)) for name, shape in shapes.items()}
        self.sizes = {
            hf_name: sum(numel[name] for name in names) * itemsize[hf_name] for hf_name, names in self.groups.items()
        }
        self.files = _shards(self.sizes, size_limit)


def _write_shards(plan: _Plan, folder: Path, rank: int, ranks: int, progress: Progress | None) -> None:
    """Write the shards of this rank, every `ranks`-th one; rank 0 also writes the index."""
    if rank == 0 and len(plan.files) > 1:
        weight_map = {name: file for file, names in plan.files.items() for name in names}
        index = {"metadata": {"total_size": sum(plan.sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    done, total = 0, sum(plan.sizes.values())
    for file in list(plan.files)[rank::ranks]:
        _write_shard(folder / file, plan, plan.files[file])
        done += sum(plan.sizes[hf_name] for hf_name in plan.files[file])
        if progress:
            progress(done, total)


def _finish(source: Source, temporary: Path, final: Path, report: Report) -> None:
    """Add the tokenizer, and rename the temporary folder to `final`."""
    if source.tokenizer:
        load_tokenizer(source.tokenizer).save(temporary)
        _rewrite(temporary / "tokenizer_config.json", with_older_class)
    else:
        report(f"{source.path} has no tokenizer, so {final} has none")
    publish_folder(temporary, final)


def _in_halves(architecture: DecoderArchitecture) -> DecoderArchitecture:
    """Return the same architecture with RoPE's channels in transformers' order (halves, not interleaved)."""
    rope = isinstance(architecture, RopeArchitecture)
    return architecture.model_copy(update={"rope_interleaved": False}) if rope else architecture


def _shards(sizes: dict[str, int], size_limit: int) -> dict[str, list[str]]:
    """Return file → its tensors, in order: a file has at most `size_limit` bytes, unless it holds a single tensor."""
    from huggingface_hub import split_state_dict_into_shards_factory

    split = split_state_dict_into_shards_factory(
        sizes,  # type: ignore[type-var]
        get_storage_size=lambda size: size,  # type: ignore[arg-type, return-value]
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=size_limit,
    )
    return split.filename_to_tensors


def _write_shard(file: Path, plan: _Plan, names: list[str]) -> None:
    """Write one safetensors file with the Hugging Face tensors `names`."""
    import torch
    from safetensors.torch import save_file

    shard = {}
    for hf_name in names:
        target: torch.dtype = getattr(torch, _dtype(hf_name, plan.family, plan.dtype))
        shard[hf_name] = hf_tensor(plan.weights, plan.family, hf_name, plan.groups[hf_name]).to(target).contiguous()
    save_file(shard, file, metadata={"format": "pt"})
    shutil.copymode(file.with_name("config.json"), file)  # save_file makes files that only their owner can read


def _dtype(hf_name: str, family: Family[Any], dtype: str) -> str:
    """Return the dtype of the tensor `hf_name` in an export whose dtype is `dtype`."""
    return "float32" if hf_name.endswith(family.hf_fp32) else dtype


def write_configs(source: Source, folder: Path, dtype: str) -> None:
    """Write `config.json` and `generation_config.json`; the latter is copied if the run's model came with one."""
    from transformers import GenerationConfig

    architecture = source.architecture
    carried = read_json(source.generation) if source.generation else {}
    ids = _token_ids(architecture, load_tokenizer(source.tokenizer) if source.tokenizer else None, carried)
    config = hf_config(architecture, dtype, ids["eos_token_id"])
    config.save_pretrained(folder)
    _rewrite(folder / "config.json", lambda written: with_older_keys(written, config) | ids)
    copy_code(family_of(architecture), folder)
    if source.generation:
        shutil.copyfile(source.generation, folder / GENERATION)
    else:
        GenerationConfig(**ids).save_pretrained(folder)


def _token_ids(
    architecture: DecoderArchitecture, tokenizer: TextTokenizer | None, carried: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the special ids for `config.json`; None for a token that neither the tokenizer nor `carried` has.

    `carried` is the content of the `generation_config.json` that came with the model; a list of `eos_token_id` in it is
    kept. Without a tokenizer, the ids are the architecture's.
    """
    eos, pad = end_of_text(tokenizer, architecture), architecture.pad_token_id
    bos: int | None = architecture.bos_token_id
    if tokenizer and (tokenizer.bos_token_id is not None or bos != carried.get("bos_token_id")):
        bos = tokenizer.bos_token_id
    if tokenizer and pad is not None and pad >= tokenizer.vocab_size:
        pad = tokenizer.pad_token_id
    several = carried.get("eos_token_id")
    if isinstance(several, list) and eos in several:
        ends: int | list[int] = [eos, *(each for each in several if each != eos)]
    else:
        ends = eos
    return {"bos_token_id": bos, "eos_token_id": ends, "pad_token_id": pad}


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the content of a JSON file by `change` of it."""
    content = change(read_json(file))
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


SIZE = TypeAdapter(Annotated[ByteSize, Field(ge=1)])


def _size(text: str | int) -> int:
    """Return the number of bytes in "5GB", "500 MB" or a number."""
    try:
        return SIZE.validate_python(text)
    except ValidationError:
        raise InputError(f"max_shard_size: expected a size such as 5GB or 500MB, found {text!r}") from None
