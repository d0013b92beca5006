"""Rewrite older forms of the schema to the current one before validation, with one message each.

optimizer:                            optimizer:
  adam_eps: 1.0e-8            →         optimizer_factory: {name: adamW, adam_eps: 1.0e-8, …}
data: {dataset: …}            →       data_stages: [{name: …, start_training_step: 1, data: {dataset: …}}]
dataset_folder: {a: 1, b: 2}  →       dataset_folder: [a, b], dataset_weights: [1, 2]
moe_layer_recompute: false    →       (removed)
recompute_granularity: FULL   →       recompute_layer: true
interleaved_rotary: true      →       rope_interleaved: true
initializer_range: 0.02       →       std: 0.02, and two more keys of Mamba's init_method
pad_vocab_size_multiple: 8    →       make_vocab_size_divisible_by: 8
_use_doc_masking: true        →       document_masking: true, beside model_config
datastates: {…}               →       checkpoints: {datastates: {…}}
wandb: {…}                    →       logging: {wandb: {…}}
resume_checkpoint_path: a     →       (removed, if the run's own checkpoints go to a)
lighteval: {tasks: …}         →       evaluation: {tasks: […]}
precision: bf16-mixed         →       model: {dtype: bfloat16}, optimizer: {accumulate_grad_in_fp32: true}
weight_decay_exclude_named_params: [.*token_embedding.*]  →  [.*embed_tokens.*]
"""

from collections.abc import Iterator

from kenotron.config import lighteval
from kenotron.config.document import Document, Keys
from kenotron.config.errors import nearest

_FLAT_ADAM = ("adam_eps", "adam_beta1", "adam_beta2", "torch_adam_is_fused")
_FIRST_STAGE = "Training Stage"
_PRECISIONS = {  # name in Gapetron and Lightning → dtype, and whether weights stay in fp32
    "32": ("float32", True),
    "32-true": ("float32", True),
    "bf16-mixed": ("bfloat16", True),
    "bf16-true": ("bfloat16", False),
    "16-mixed": ("float16", True),
    "16-true": ("float16", False),
}


def upgrade(document: Document) -> Iterator[str]:
    """Rewrite `document` in place and yield one message per upgraded key."""
    for rewrite in (
        _flat_adam,
        _data_without_stages,
        _folder_weights,
        _moe_recompute,
        _early_nanotron,
        _interleaved_rotary,
        _doc_masking,
        _mamba,
        _sections,
        _embedding,
        lighteval.translate,
    ):
        yield from rewrite(document)


def _moved(document: Document, old: Keys, new: Keys) -> str:
    """Move a key and return a message. Raises InputError if `new` is also set, to another value."""
    before, after = (".".join(map(str, keys)) for keys in (old, new))
    if document.get(*new) not in (None, document.get(*old)):
        raise document.error(old, f"{before} is also set in {after}; remove one of them")
    message = document.at(old, f"{before} is now {after}")
    document.move(old, new)
    return message


def _flat_adam(document: Document) -> Iterator[str]:
    optimizer, factory = document.get("optimizer"), document.get("optimizer", "optimizer_factory")
    if not isinstance(optimizer, dict) or not isinstance(factory or {}, dict):
        return
    flat = [name for name in _FLAT_ADAM if name in optimizer]
    if flat and not factory:
        document.put(("optimizer", "optimizer_factory"), {"name": "adamW"})
    for name in flat:
        yield _moved(document, ("optimizer", name), ("optimizer", "optimizer_factory", name))


def precision(document: Document, overrides: bool = False) -> Iterator[str]:
    """Replace `precision` by the two keys that it sets; they must not be set to other values unless it `overrides`."""
    if "precision" not in document.data:
        return
    name = str(document.data["precision"])
    if name not in _PRECISIONS:
        message = f"precision: expected one of {', '.join(_PRECISIONS)}, found {name}{nearest(name, _PRECISIONS)}"
        raise document.error(("precision",), message)
    dtype, fp32 = _PRECISIONS[name]
    settings: dict[Keys, object] = {("model", "dtype"): dtype, ("optimizer", "accumulate_grad_in_fp32"): fp32}
    for keys, value in settings.items():
        if document.get(*keys) not in (None, value) and not overrides:
            conflict = f"{'.'.join(map(str, keys))} is {document.get(*keys)}; remove one of them"
            raise document.error(("precision",), f"precision {name} sets {value}, but {conflict}")
        document.put(keys, value, document.place(("precision",)))
    message = f"precision {name} is model.dtype: {dtype}, optimizer.accumulate_grad_in_fp32: {str(fp32).lower()}"
    yield document.at(("precision",), message)
    del document.data["precision"]


def _data_without_stages(document: Document) -> Iterator[str]:
    if not isinstance(document.get("data"), dict) or "data_stages" in document.data:
        return
    yield document.at(("data",), "data is now data_stages, a list of stages (here one, starting at step 1)")
    document.places[("data_stages",)] = document.place(("data",))
    document.data["data_stages"] = [{"name": _FIRST_STAGE, "start_training_step": 1}]
    document.move(("data",), ("data_stages", 0, "data"))


def _datasets(document: Document) -> Iterator[Keys]:
    """Yield the keys of all datasets, including datasets inside mixtures."""
    stages = document.get("data_stages")
    for i in range(len(stages) if isinstance(stages, list) else 0):
        keys: Keys = ("data_stages", i, "data", "dataset")
        yield keys
        mixture = document.get(*keys, "mixture")
        yield from ((*keys, "mixture", j) for j in range(len(mixture) if isinstance(mixture, list) else 0))


def _folder_weights(document: Document) -> Iterator[str]:
    for keys in _datasets(document):
        folder = (*keys, "dataset_folder")
        weights = document.get(*folder)
        if not isinstance(weights, dict):
            continue
        if document.get(*keys, "dataset_weights") is not None:
            raise document.error(folder, "dataset_folder has weights, and so has dataset_weights; remove one of them")
        place = document.place(folder)
        yield document.at(folder, "dataset_folder {folder: weight} is now dataset_folder and dataset_weights")
        document.put(folder, list(weights), place)
        document.put((*keys, "dataset_weights"), list(weights.values()), place)


def _moe_recompute(document: Document) -> Iterator[str]:
    parallelism = document.get("parallelism")
    if isinstance(parallelism, dict) and "moe_layer_recompute" in parallelism:
        keys = ("parallelism", "moe_layer_recompute")
        message = "parallelism.moe_layer_recompute is ignored: recompute_layer recomputes layers with experts, too"
        yield document.at(keys, message)
        del parallelism["moe_layer_recompute"]


def _early_nanotron(document: Document) -> Iterator[str]:
    """Rewrite keys of nanotron up to version 0.2."""
    old: Keys = ("parallelism", "recompute_granularity")
    name, parallelism = "parallelism.recompute_granularity", document.get("parallelism")
    if isinstance(parallelism, dict) and "recompute_granularity" in parallelism:
        value = parallelism["recompute_granularity"]
        if value is not None and str(value).upper() not in ("FULL", "SELECTIVE"):
            raise document.error(old, f"{name}: expected FULL, SELECTIVE or null, found {value!r}")
        if value is not None and str(value).upper() == "FULL":
            yield document.at(old, f"{name} FULL is now parallelism.recompute_layer: true")
            document.put(("parallelism", "recompute_layer"), True, document.place(old))
        elif value is not None:
            yield document.at(old, f"{name} SELECTIVE is left out: no kernel keeps the scores of attention")
        del parallelism["recompute_granularity"]
    csv = "benchmark_csv_path"
    if csv in document.data and document.get("general", csv) is None and isinstance(document.get("general"), dict):
        yield _moved(document, (csv,), ("general", csv))
    seed: Keys = ("model", "init_method", "seed")
    if document.get(*seed) is not None and document.get("general", "seed") in (None, document.get(*seed)):
        yield _moved(document, seed, ("general", "seed"))
    for keys in _datasets(document):
        dataset = document.get(*keys)
        if isinstance(dataset, dict) and "dataset_path" in dataset and "tokens" not in dataset:
            yield _moved(document, (*keys, "dataset_path"), (*keys, "tokens"))


def _interleaved_rotary(document: Document) -> Iterator[str]:
    around: Keys = ("model", "model_config")
    keys = document.get(*around)
    if isinstance(keys, dict) and "interleaved_rotary" in keys and "family" not in keys:
        yield _moved(document, (*around, "interleaved_rotary"), (*around, "rope_interleaved"))


def _doc_masking(document: Document) -> Iterator[str]:
    old: Keys = ("model", "model_config", "_use_doc_masking")
    if document.get(*old) is not True:
        return
    if document.get("model", "document_masking") is False:
        raise document.error(old, "_use_doc_masking is true and model.document_masking false")
    yield document.at(old, "model.model_config._use_doc_masking is now model.document_masking")
    document.put(("model", "document_masking"), True, document.place(old))
    del document.get("model", "model_config")["_use_doc_masking"]


def _mamba(document: Document) -> Iterator[str]:
    """Rewrite nanotron's keys for Mamba other than the shapes, which `models.families.mamba` reads."""
    init, keys = document.get("model", "init_method"), document.get("model", "model_config")
    if isinstance(init, dict) and "initializer_range" in init and "std" not in init:
        at: Keys = ("model", "init_method", "initializer_range")
        yield _moved(document, at, ("model", "init_method", "std")) + "; rescale_prenorm_residual is scaling_method"
        if init.pop("n_residuals_per_layer", 1) != 1:
            raise document.error(at, "n_residuals_per_layer: expected 1, the branches of a Mamba layer")
        init.setdefault("scaling_method", "NUM_LAYERS" if init.pop("rescale_prenorm_residual", True) else "NONE")
    if not isinstance(keys, dict) or "is_mamba_config" not in keys:
        return
    dtype = keys.pop("dtype", None)
    if dtype is not None and dtype != document.get("model", "dtype"):
        at = ("model", "model_config", "dtype")
        raise document.error(at, f"model.model_config.dtype {dtype}: expected that of model.dtype; remove it")
    if "pad_vocab_size_multiple" in keys:
        at, new = ("model", "model_config", "pad_vocab_size_multiple"), ("model", "make_vocab_size_divisible_by")
        if document.get(*new) not in (None, 1, keys["pad_vocab_size_multiple"]):
            raise document.error(at, "pad_vocab_size_multiple is also model.make_vocab_size_divisible_by; remove one")
        yield document.at(at, "pad_vocab_size_multiple is now model.make_vocab_size_divisible_by")
        document.put(new, keys.pop("pad_vocab_size_multiple"), document.place(at))


def _sections(document: Document) -> Iterator[str]:
    """Move sections that the first Kénotron's example, or users, have at the top level."""
    for name, parent in (("datastates", "checkpoints"), ("wandb", "logging")):
        if name not in document.data:
            continue
        if name == "wandb" and document.get(parent) is None:
            document.put((parent,), {})
        if document.get(name) is None or not isinstance(document.get(parent), dict):
            del document.data[name]
            continue
        yield _moved(document, (name,), (parent, name))


def _embedding(document: Document) -> Iterator[str]:
    """Rename the embedding in patterns: SmolLM3's, the only parameter that nanotron's published configs name."""
    keys = document.get("model", "model_config")
    if isinstance(keys, dict) and {"family", "hf", "module"} & keys.keys():  # their parameters have other names
        return
    at = ("optimizer", "weight_decay_exclude_named_params")
    patterns = document.get(*at)
    for i, pattern in enumerate(patterns if isinstance(patterns, list) else ()):
        if "token_embedding" in str(pattern):
            patterns[i] = str(pattern).replace("token_embedding", "embed_tokens")
            yield document.at((*at, i), f"{'.'.join(at)}: token_embedding is now embed_tokens")


def resume_from_itself(document: Document) -> Iterator[str]:
    """Remove a `resume_checkpoint_path` that is the run's own folder, from which a run resumes without this key.

    nanotron resumes only from this key's checkpoint, or starts afresh if there is none.
    """
    at = ("checkpoints", "resume_checkpoint_path")
    folders = (document.get("checkpoints", "checkpoints_path"), document.get("s3_upload", "upload_s3_path"))
    if document.get(*at) and document.get(*at) in folders:
        yield document.at(at, "a run resumes from its own checkpoints; checkpoints.resume_checkpoint_path ignored")
        document.put(at, None)
