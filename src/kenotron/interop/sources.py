"""Read weights from a Kénotron checkpoint or a Hugging Face model through one interface.

source = open_source("checkpoints/10")           # or a folder with config.json, or a hub name
source.model.architecture.hidden_size
source.weights["model.norm.weight"]
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron.checkpoint import folders, reading
from kenotron.checkpoint.folders import Report, quiet
from kenotron.checkpoint.hf_files import locate
from kenotron.checkpoint.model_files import find_config, find_model
from kenotron.config import Config
from kenotron.config.architecture import HFArchitecture
from kenotron.config.config import problems_of
from kenotron.config.decoder import DecoderArchitecture, RopeArchitecture
from kenotron.config.errors import InputError, naming
from kenotron.config.model import WEIGHT_DTYPES, Model
from kenotron.config.parallelism import Parallelism
from kenotron.config.resolved import read_resolved
from kenotron.config.weight_settings import changed_settings
from kenotron.interop.hf_config import architecture_from_hf
from kenotron.interop.hf_weights import Box, Stored, Weights, hf_weights
from kenotron.interop.rope_layout import is_rotated, to_halves, to_interleaved
from kenotron.interop.tensor_names import from_hf_names
from kenotron.interop.whole_weights import read_whole
from kenotron.models import ModelPart, named_state, skeleton
from kenotron.models.decoder import Decoder
from kenotron.models.family import EMBEDDING, HEAD, family_of
from kenotron.models.foreign import HuggingFaceArchitecture
from kenotron.storage.hub import read_json
from kenotron.text.tokenizer import GENERATION, tokenizer_in


@dataclass(frozen=True)
class Source:
    """A checkpoint or Hugging Face model: `path` is its folder, `model` its section of the config.

    `tokenizer` is the folder of its tokenizer, or None. `layout` is the layout that a checkpoint was trained on; for
    Hugging Face models all degrees are 1. `generation` is the path of the `generation_config.json` that came with the
    model, or None.
    """

    path: Path
    model: Model
    weights: Weights
    tokenizer: Path | None
    layout: Parallelism = field(default_factory=Parallelism)
    generation: Path | None = None

    @property
    def architecture(self) -> DecoderArchitecture:
        """Return the section of the model's family."""
        return self.model.decoder


def open_source(
    path: str | Path, *, report: Report = quiet, verify: bool = True, family: str | None = None, ema: bool = False
) -> Source:
    """Open a Kénotron checkpoint (a step, or the folder of steps) or a Hugging Face model, by folder or hub name.

    `family` is tried for a Hugging Face model besides the built-in families. For `ema` see `checkpoint_source`.
    Raises InputError if the source is missing, not a checkpoint, damaged (with `verify`, checksums are compared now) or
    not supported.
    """
    found = find_model(path)
    if ema and not found.ours:
        raise InputError(f"{path} has no moving average of weights: it is a Hugging Face model")
    return checkpoint_source(found.folder, verify, ema) if found.ours else hf_source(path, report, family)


def hf_source(path: str | Path, report: Report = quiet, family: str | None = None) -> Source:
    """Open a Hugging Face model by folder or hub name; `family` is the dotted path of a further family to try."""
    folder = locate(path)
    config = read_json(folder / "config.json")
    architecture = architecture_from_hf(config, str(folder / "config.json"), report, family=family)
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    if dtype not in WEIGHT_DTYPES:
        known = ", ".join(WEIGHT_DTYPES)
        raise InputError(f"{folder / 'config.json'}: dtype: expected one of {known}, found {dtype!r}")
    saved = None if isinstance(architecture, HuggingFaceArchitecture) else hf_weights(folder)
    if saved is not None:
        architecture = family_of(architecture).as_saved(config, saved)
    model = Model.model_validate({"model_config": architecture, "init_method": {"path": str(path)}, "dtype": dtype})
    shapes = {name: tuple(tensor.shape) for name, tensor in named_state(unpadded(model))}
    if saved is None:
        weights = read_whole(folder, shapes)
    else:
        weights = from_hf_names(saved, family_of(architecture), shapes)
    return Source(folder, model, weights, tokenizer_in(folder))


def checkpoint_source(path: Path, verify: bool = True, ema: bool = False) -> Source:
    """Open a Kénotron checkpoint; with `verify`, the model's files are first compared with their checksums.

    `ema` opens the moving average of the weights that its run kept (`optimizer.ema_decay`) instead of the weights.
    """
    folder = folders.resolve(path)
    stored = _stored(folder, "model", verify)
    if ema:
        stored |= _averages(folder, stored, verify)
    weights = Weights(stored, str(folder))
    tokenizer = folder / "tokenizer"
    config = read_resolved(folder / "config.yaml")
    generation = tokenizer / GENERATION if (tokenizer / GENERATION).is_file() else None
    return Source(folder, config.model, weights, tokenizer_in(tokenizer), config.parallelism, generation)


def _stored(folder: Path, part: str, verify: bool) -> dict[str, Stored]:
    """Return the tensors in a checkpoint's subfolder `part`."""
    if verify:
        reading.read_tensors(folder, [], folder=part)
    shapes, read = reading.block_reader(folder, folder=part)
    return {name: Stored(shape, partial(_read, partial(read, name), shape)) for name, shape in shapes.items()}


def _averages(folder: Path, weights: dict[str, Stored], verify: bool) -> dict[str, Stored]:
    """Return the moving averages, from the optimizer state, of those `weights` that are trained."""
    state = _stored(folder, "optimizer", verify) if (folder / "optimizer").is_dir() else {}
    averages = {name: state[f"state.{name}.ema"] for name in weights if f"state.{name}.ema" in state}
    if not averages:
        raise InputError(f"{folder} has no moving average of weights: its run had no optimizer.ema_decay")
    return averages


def _read(read: Callable[..., Tensor], shape: tuple[int, ...], box: Box) -> Tensor:
    box = box or tuple(slice(0, size) for size in shape)
    return read([extent.start for extent in box], [extent.stop - extent.start for extent in box])


def check_shape(source: Source, name: str, shape: tuple[int, ...]) -> None:
    """Raise InputError unless the source's tensor `name` has shape `shape`; the tensor is not read."""
    found = source.weights.shape(name)
    if found != shape:
        raise InputError(f"{source.path}: {name} has shape {list(found)}, and its config says {list(shape)}")


def unpadded(model: Model, tensor_parallel: int = 1, part: ModelPart | None = None) -> Decoder:
    """Return the model's `skeleton` without padding of the vocabulary."""
    return skeleton(model.model_copy(update={"make_vocab_size_divisible_by": 1}), tensor_parallel, part)


def hf_architecture(
    source: str | Path, overrides: Mapping[str, Any] | None = None, report: Report = quiet
) -> DecoderArchitecture:
    """Return the architecture of ``model_config: {hf: source, …overrides}``. Only `config.json` is read.

    `report` is called with a line for each setting that is ignored.
    Raises InputError if the model is missing, the hub is unreachable, or a family or setting is not supported.
    """
    with naming("model.model_config.hf"):
        file = find_config(source)
    return architecture_from_hf(read_json(file), str(file), report, overrides)


def resolve_architecture(config: Config, report: Report = quiet) -> Config:
    """Replace ``model_config: {hf: …}`` in a config by the architecture of the Hugging Face model that it names.

    `report` is called with a line for each setting that is ignored.

    Raises InputError as `hf_architecture` does, and for a layout that the architecture does not allow.
    """
    architecture, layout = config.model.architecture, config.parallelism
    if not isinstance(architecture, HFArchitecture):
        return config
    resolved = hf_architecture(architecture.hf, architecture.overrides, report)
    config = config.model_copy(update={"model": config.model.model_copy(update={"architecture": resolved})})
    for key, problem in problems_of(config):
        raise InputError(f"{key}: {problem} (the model of {architecture.hf})")
    if isinstance(resolved, HuggingFaceArchitecture) and layout.tp > 1 and layout.tp_mode == "REDUCE_SCATTER":
        raise InputError(
            f"parallelism.tp_mode: expected ALL_REDUCE: the code of {resolved.title} computes with all tokens on every "
            f"rank (the model of {architecture.hf})"
        )
    return config


def initial_tensors(
    path: str | Path, architecture: DecoderArchitecture | None = None, report: Report = quiet, verify: bool = True
) -> Weights:
    """Return the weights for ``init_method: {path}``: tensors on the host, in the dtype they are stored in.

    Each tensor, or a block of it, is read when it is accessed. `path` is a Kénotron checkpoint, a Hugging Face folder
    or a hub name. With `architecture`, the weights are adapted to it: q and k are in its order of RoPE's channels, and
    the head is separate or tied. Shapes are checked, and other settings that differ are reported.

    Raises InputError if `path` is missing or damaged, and, with the key, if a shape differs from `architecture`.
    """
    family = None if architecture is None else architecture.family
    with naming("model.init_method.path"):
        source = open_source(path, report=report, verify=verify, family=family)
    if architecture is None:
        return source.weights
    weights = fitted(source, architecture)
    for line in changed_settings(source.architecture, architecture, source.path):
        report(line)
    return weights


def fitted(source: Source, target: DecoderArchitecture) -> Weights:
    """Return the source's weights adapted to the architecture `target`. Raises InputError if shapes differ."""
    have = source.architecture
    for key in target.shape_keys:
        if (found := getattr(have, key, "none")) != getattr(target, key):
            name = "num_key_value_heads" if key == "kv_heads" else key
            raise InputError(
                f"model.model_config.{name}: the weights in {source.path} have {found}, "
                f"the config says {getattr(target, key)}"
            )
    _check_extra(source, target)
    stored = {name: source.weights.stored(name) for name in source.weights}
    if isinstance(target, RopeArchitecture) and getattr(have, "rope_interleaved", False) != target.rope_interleaved:
        turn = to_interleaved if target.rope_interleaved else to_halves
        for name in filter(is_rotated, source.weights):
            whole = stored[name]
            stored[name] = Stored(whole.shape, partial(_turned, whole, turn, target.head_dim, target.rotary_dim))
    if target.tie_word_embeddings:
        if not have.tie_word_embeddings:
            raise InputError(
                "model.model_config.tie_word_embeddings: true, "
                f"but the weights in {source.path} have a separate output head"
            )
        stored.pop(HEAD, None)  # some files hold the shared matrix twice
    elif have.tie_word_embeddings and EMBEDDING in stored:
        stored[HEAD] = stored[EMBEDDING]
    return Weights(stored, str(source.path))


def _check_extra(source: Source, target: DecoderArchitecture) -> None:
    """Raise InputError if the source has weights that a model of `target` lacks, such as biases.

    Weights of blocks that predict further tokens may be dropped: no other layer reads their output.
    """
    if source.architecture == target:
        return
    expected = dict(named_state(unpadded(source.model.model_copy(update={"architecture": target}))))
    further = tuple(f"model.layers.{layer}." for layer in source.architecture.next_token_layers)
    extra = sorted(name for name in set(source.weights) - set(expected) - {HEAD} if not name.startswith(further))
    if extra:
        raise InputError(
            f"model.model_config: the weights in {source.path} have {extra[0]!r}, which the config's model lacks"
        )


def _turned(
    stored: Stored, turn: Callable[[Tensor, int, int], Tensor], head_dim: int, rotary_dim: int, box: Box
) -> Tensor:
    """Read a box of a tensor whose rows are permuted within each head; whole heads are read for it."""
    rows, *columns = box or tuple(slice(0, size) for size in stored.shape)
    first, last = rows.start // head_dim * head_dim, -(-rows.stop // head_dim) * head_dim
    heads = turn(stored.read((slice(first, last), *columns)), head_dim, rotary_dim)
    return heads[rows.start - first : rows.stop - first]
