"""`kenotron convert from-nanotron`: a nanotron run continues in Kénotron.

    from_nanotron("nanotron/checkpoints", "checkpoints/mine")     # the step in latest.txt; or a step's folder
    → checkpoints/mine/<step>/: weights in fp32, AdamW's moments, the step, config.yaml

Weights are nanotron's fp32 master weights where the optimizer has them, else the weights that the model computed with.
nanotron's matrices are fused and sharded over ranks (`nanotron_files`); Kénotron's are separate row ranges of them:

    attn.qkv_proj [6 heads x 16, hidden]      4 query heads  ─▶ q_proj, rows 0 … 63
                                              1 key head     ─▶ k_proj, rows 64 … 79
                                              1 value head   ─▶ v_proj, rows 80 … 95

`config.yaml` is nanotron's, read as any YAML of its schema: ``kenotron train <dst>/<step>/config.yaml`` continues the
run with its weights, moments, schedule and number of samples. From there on, samples come in Kénotron's order. Only one
tensor at a time is in memory.
"""

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from kenotron.checkpoint import engine, folders, saving
from kenotron.checkpoint.folders import NANOTRON_METADATA, Progress, Report, quiet
from kenotron.config import Config, dump, load
from kenotron.config.decoder import AttentionArchitecture, DecoderArchitecture
from kenotron.config.document import read
from kenotron.config.errors import InputError, NotSupportedYet, nearest, no_such_path
from kenotron.config.unsupported import refuse_unsupported
from kenotron.interop.nanotron_files import MASTER, Merged, OptimizerFiles, Shape, read_weights
from kenotron.interop.sources import unpadded
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models.family import EMBEDDING, HEAD
from kenotron.storage.hub import read_json
from kenotron.text.tokenizer import load_tokenizer

VERSIONS = ("1.4", "1.5")  # of checkpoint_metadata.json
FAMILIES = ("llama", "qwen2")
LEFT_OUT = ("lighteval", "s3_upload", "metrics_logging")  # sections that say nothing about the model or its data
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Rows(NamedTuple):
    """The rows of nanotron's tensor `name` that are a Kénotron tensor of shape `shape`: from row `first` on."""

    name: str
    first: int
    shape: Shape

    @property
    def last(self) -> int:
        """The index after the last row."""
        return self.first + self.shape[0]


class Position(NamedTuple):
    """How far the run had trained."""

    step: int
    samples: int
    tokens: int


def from_nanotron(
    src: str | Path, dst: str | Path, *, report: Report = quiet, progress: Progress | None = None
) -> engine.Saved:
    """Write the nanotron checkpoint `src`, a step's folder or the folder of steps, as checkpoint `<dst>/<step>`.

    `report` is called with a line for everything that is left out; `progress(done, total)` counts tensors as they are
    written.
    Raises InputError, before anything is written, if `src` has no checkpoint of nanotron 1.4 or 1.5, if the checkpoint
    is damaged or of a family other than Llama and Qwen2, if a tensor is missing, superfluous or of another shape than
    the config says, or if `dst` already holds checkpoints.
    """
    root = Path(dst).expanduser()
    if folders.list_checkpoints(root) or (root.exists() and not root.is_dir()):
        raise InputError(f"{root} holds checkpoints already (or is a file); name a new folder")
    folder = _folder(Path(src).expanduser())
    position = _position(folder)
    config = _config(folder, root, report)
    parameters = {name: tuple(each.shape) for name, each in unpadded(config.model).named_parameters()}
    weights = read_weights(folder)
    assert isinstance(config.model.decoder, AttentionArchitecture), "as all of FAMILIES"
    sources = _sources(config.model.decoder, parameters)
    _check(folder, config, sources, weights, report)
    optimizer = OptimizerFiles(folder)
    model, moments = _tensors(sources, weights, optimizer, report, progress)
    _compare_batch(config, position, report)
    return saving.save(
        root,
        position.step,
        model=model,
        optimizer=moments or None,
        state={
            "step": position.step,
            "consumed_tokens": position.tokens,
            "consumed_train_samples": position.samples,
            "imported_from": str(folder),
        },
        config_yaml=f"# Converted from {folder}, a checkpoint of nanotron.\n" + dump(config),
        model_config=config.model.decoder.model_dump(mode="json", by_alias=True),
        save_tokenizer=_save_tokenizer(config, report),
    )


# ---- metadata and config ---------------------------------------------------------------------------------------


def _folder(path: Path) -> Path:
    """Return the step's folder: `path` itself, or the folder that its `latest.txt` names."""
    if not path.is_dir():
        raise no_such_path("SRC", path)
    latest = path / "latest.txt"
    folder = path / latest.read_text(encoding="utf-8").strip() if latest.is_file() else path
    if not (folder / NANOTRON_METADATA).is_file():
        raise InputError(f"{folder} is not a checkpoint of nanotron: it has no {NANOTRON_METADATA}")
    version = str(read_json(folder / NANOTRON_METADATA).get("version"))
    if version not in VERSIONS:
        raise NotSupportedYet(f"{folder / NANOTRON_METADATA}: version {version} (supported: {', '.join(VERSIONS)})")
    return folder


def _position(folder: Path) -> Position:
    file = folder / NANOTRON_METADATA
    metas = read_json(file).get("metas")
    if not isinstance(metas, dict):
        raise InputError(f"{file}: expected the key metas")
    step, samples = (metas.get(key) for key in ("last_train_step", "consumed_train_samples"))
    if not (isinstance(step, int) and isinstance(samples, int)):
        raise InputError(
            f"{file}: metas: expected numbers as last_train_step and consumed_train_samples, found {step} and {samples}"
        )
    stages = metas.get("data_stages") or []
    tokens = metas.get("consumed_tokens_total")
    if tokens is None:
        tokens = sum(each.get("consumed_train_samples", 0) * (each.get("sequence_length") or 4096) for each in stages)
    return Position(step, samples, tokens)


def _config(folder: Path, root: Path, report: Report) -> Config:
    """Return nanotron's config.yaml as a Config whose checkpoints folder is `root`."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise InputError(f"{folder} is not a checkpoint of nanotron: it has no config.yaml")
    data = read(file).data
    for section in LEFT_OUT:
        if data.pop(section, None):
            report(f"{file}: {section} is left out")
    checkpoints = data.get("checkpoints")
    data["checkpoints"] = {
        **(checkpoints if isinstance(checkpoints, dict) else {"checkpoint_interval": 1000}),
        "checkpoints_path": str(root),
        "resume_checkpoint_path": None,
    }
    try:
        config = load(data, report=lambda line: report(f"{file}: {line}"))
    except NotSupportedYet as error:
        raise NotSupportedYet(f"{file}: {str(error).removeprefix('not supported yet: ')}") from None
    except InputError as error:
        raise InputError("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from None
    if not isinstance(config.model.architecture, DecoderArchitecture) or config.model.decoder.family not in FAMILIES:
        raise NotSupportedYet(f"{file}: a model of a family other than {' and '.join(FAMILIES)}")
    refuse_unsupported(config)
    return config


def _compare_batch(config: Config, position: Position, report: Report) -> None:
    expected = position.step * config.global_batch_size
    if position.samples != expected and not any(stage.batch_size_ramp for stage in config.data_stages):
        report(
            f"{position.samples} samples were consumed in {position.step} steps, and the config's global batch of "
            f"{config.global_batch_size} makes that {expected}: the data cannot continue from there; set "
            "checkpoints.load_lr_scheduler: false to restart them"
        )


def _save_tokenizer(config: Config, report: Report) -> Callable[[Path], None] | None:
    name = config.tokenizer.tokenizer_name_or_path
    if name is None:
        return None
    try:
        return load_tokenizer(name, config.tokenizer.tokenizer_revision).save
    except InputError as error:
        report(f"the checkpoint has no tokenizer: {error}")
        return None


# ---- tensors -------------------------------------------------------------------------------------------------


def _sources(architecture: AttentionArchitecture, shapes: Mapping[str, Shape]) -> dict[str, Rows]:
    """Return Kénotron's name of each tensor → the rows of the nanotron tensor that it is read from."""
    queries, keys = (
        heads * architecture.head_dim for heads in (architecture.num_attention_heads, architecture.kv_heads)
    )
    inner = architecture.intermediate_size
    fused = {
        "self_attn.q_proj": ("attn.qkv_proj", 0),
        "self_attn.k_proj": ("attn.qkv_proj", queries),
        "self_attn.v_proj": ("attn.qkv_proj", queries + keys),
        "self_attn.o_proj": ("attn.o_proj", 0),
        "mlp.gate_proj": ("mlp.gate_up_proj", 0),
        "mlp.up_proj": ("mlp.gate_up_proj", inner),
    }
    ends = {
        EMBEDDING: "model.token_position_embeddings.pp_block.token_embedding.weight",
        "model.norm.weight": "model.final_layer_norm.pp_block.weight",
        HEAD: "model.lm_head.pp_block.weight",
    }
    sources = {}
    for name, shape in shapes.items():
        if name in ends:
            sources[name] = Rows(ends[name], 0, shape)
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        module, _, kind = rest.rpartition(".")
        nanotron_module, first = fused.get(module, (module, 0))
        sources[name] = Rows(f"model.decoder.{layer}.pp_block.{nanotron_module}.{kind}", first, shape)
    return sources


def _check(
    folder: Path, config: Config, sources: Mapping[str, Rows], weights: Mapping[str, Merged], report: Report
) -> None:
    """Raise InputError unless the files hold exactly the tensors of the config's model, in their shapes."""
    expected: dict[str, Shape] = {}
    for source in sources.values():
        rows = max(source.last, expected.get(source.name, (0,))[0])
        expected[source.name] = (rows, *source.shape[1:])
    where = folder / "model"
    if missing := sorted(set(expected) - set(weights)):
        near = nearest(missing[0], set(weights) - set(expected))
        raise InputError(f"{where} has no tensor {missing[0]}, which the model of its config.yaml has{near}")
    if extra := sorted(set(weights) - set(expected)):
        raise InputError(f"{where} has the tensor {extra[0]}, which the model of its config.yaml lacks")
    vocab = config.model.decoder.vocab_size
    multiple = config.model.make_vocab_size_divisible_by * config.parallelism.tp
    padded = -(-vocab // multiple) * multiple
    for name, shape in expected.items():
        found = weights[name].shape
        by_vocabulary = name in (sources[EMBEDDING].name, sources[HEAD].name if HEAD in sources else None)
        if found != shape and not (by_vocabulary and found == (padded, *shape[1:])):
            raise InputError(f"{where}: {name} has shape {list(found)}, and its config.yaml says {list(shape)}")
        if found != shape:
            report(f"{where}: {name} is padded to {found[0]} rows; {vocab}, the vocabulary, are kept")


def _tensors(
    sources: Mapping[str, Rows],
    weights: Mapping[str, Merged],
    optimizer: OptimizerFiles,
    report: Report,
    progress: Progress | None,
) -> tuple[dict[str, TensorShard], dict[str, TensorShard]]:
    """Return the model's tensors and the optimizer state (empty if there is none), which are read when saved."""
    keys = optimizer.keys
    if unknown := keys - {*MOMENTS, MASTER}:
        raise NotSupportedYet(f"{optimizer.folder}: the optimizer state {sorted(unknown)[0]!r} (supported: AdamW's)")
    if not keys & set(MOMENTS):
        report(f"{optimizer.folder}: no optimizer state; a run that resumes from here begins with a fresh one")
    averages = sorted(keys & {"exp_avg", "exp_avg_sq"})
    done, total = itertools.count(1), len(sources) * (1 + len(averages))

    def later(tensor: Merged, source: Rows) -> TensorShard:
        def rows() -> Tensor:
            if progress:
                progress(next(done), total)
            return tensor.rows(source.first, source.last)

        return TensorShard.later(source.shape, torch.float32, rows)

    model, moments = {}, {}
    for name, source in sources.items():
        weight = weights[source.name]
        model[name] = later(optimizer.tensor(weight, MASTER) if MASTER in keys else weight, source)
        for key in averages:
            moments[f"state.{name}.{key}"] = later(optimizer.tensor(weight, key), source)
        if "step" in keys:
            moments[f"state.{name}.step"] = TensorShard.full(torch.tensor(optimizer.step(source.name)))
    return model, moments
