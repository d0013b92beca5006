"""Pydantic's errors as lines that say where, which key, what was expected and what was found.

my.yaml:12: tokens.train_steps: expected an integer, found 'abc'
my.yaml:30: unknown key 'tokens.trainsteps'; did you mean 'train_steps'?
my.yaml:54: model.init_method: 'std' belongs to the variant random, but 'path' makes this existing; …
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from kenotron.config.document import Document, Keys
from kenotron.config.errors import nearest
from kenotron.config.schema import is_tag, owner, paths_by_name, siblings
from kenotron.config.writing import inline

Location = tuple[str | int, ...]

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a map of keys",
    "model_type": "a map of keys",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of at least {ge:g}",
    "less_than": "a number below {lt:,.10g}",
    "less_than_equal": "a number of at most {le:,.10g}",
    "literal_error": "{expected}",
    "variant": "{expected}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "non-empty text",
}

# Names that other libraries have for a key, and that are spelt too differently for `nearest`.
_FIELD_NAMES = {
    theirs: ours
    for ours, names in {
        "batch_accumulation_per_replica": "gradient_accumulation_steps",
        "checkpoint_interval": "save_steps save_interval",
        "checkpoints_path": "output_dir dump_folder save_dir",
        "clip_grad": "max_grad_norm max_norm grad_clip",
        "compile": "torch_compile",
        "context_parallel_size": "context_parallel_degree cp cp_size",
        "dp": "data_parallel_replicate_degree data_parallel_shard_degree data_parallel_size dp_size",
        "dtype": "bf16 fp16 mixed_precision precision torch_dtype",
        "expert_parallel_size": "expert_parallel_degree ep ep_size",
        "hf": "model_name_or_path",
        "hidden_size": "d_model dim n_embd",
        "intermediate_size": "d_ff ffn_dim ffn_hidden_size",
        "iteration_step_info_interval": "log_freq log_interval logging_steps",
        "keep_last": "save_total_limit keep_latest_k",
        "learning_rate": "lr max_lr peak_lr",
        "lr_decay_style": "lr_scheduler_type",
        "lr_warmup_steps": "warmup_steps lr_warmup_iters",
        "micro_batch_size": "batch_size local_batch_size per_device_train_batch_size",
        "min_decay_lr": "min_lr",
        "num_attention_heads": "n_head n_heads",
        "num_hidden_layers": "n_layer n_layers",
        "num_key_value_heads": "n_kv_heads num_query_groups",
        "num_loading_workers": "dataloader_num_workers num_workers",
        "optimizer_factory": "optim",
        "pp": "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size pp_size",
        "recompute_layer": "activation_checkpoint gradient_checkpointing",
        "resume_checkpoint_path": "resume_from_checkpoint initial_load_path",
        "sequence_length": "block_size max_length max_seq_length seq_len seq_length",
        "tp": "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tp_size",
        "train_steps": "max_iters max_steps n_steps num_steps num_train_steps steps total_steps train_iters",
        "val_check_interval": "eval_steps eval_interval",
    }.items()
    for theirs in names.split()
}

_PER_STEP = "; a run is as long as tokens.train_steps says, in steps; `kenotron config check` prints its tokens"
_DROPOUT = "; there is none: pretraining sees most tokens once; optimizer.weight_decay is what regularizes"
_RESUME = "; a run resumes by itself from its newest checkpoint; checkpoints.resume_checkpoint_path names another run's"
_SHARDS = "; data-parallel ranks (parallelism.dp) shard weights, gradients and moments with optimizer.zero_stage=3"
_TRACKER = (
    "; numbers go to logging.tensorboard, logging.wandb, logging.trackio, and to others by a hook (docs/extend.md)"
)
_RANKS = "; a run has as many ranks, one a GPU, as parallelism.dp x tp x pp x context_parallel_size says"
_BETAS = "; they are two keys, optimizer.optimizer_factory.adam_beta1 and adam_beta2"
# Names of what is done another way here.
_OTHERWISE = (
    dict.fromkeys(["epochs", "num_epochs", "num_train_epochs", "n_epochs"], _PER_STEP)
    | dict.fromkeys(["max_tokens", "train_tokens", "total_tokens", "num_tokens", "token_budget"], _PER_STEP)
    | dict.fromkeys(["dropout", "attention_dropout", "hidden_dropout", "resid_pdrop", "attn_pdrop"], _DROPOUT)
    | dict.fromkeys(["fsdp", "fsdp_degree", "fsdp_size", "dp_shard", "use_fsdp", "deepspeed", "zero"], _SHARDS)
    | dict.fromkeys(["gpus", "num_gpus", "n_gpus", "nproc", "nproc_per_node", "num_processes", "world_size"], _RANKS)
    | dict.fromkeys(["betas", "adam_betas"], _BETAS)
    | dict.fromkeys(["resume", "resume_from", "resume_training", "auto_resume", "continue"], _RESUME)
    | dict.fromkeys(["wandb_project", "use_wandb", "report_to", "mlflow", "comet", "tracker"], _TRACKER)
)


def hint_of(name: str) -> str:
    """What to write for the key `name` of another library; empty if it is not known."""
    if name in _OTHERWISE:
        return _OTHERWISE[name]
    return f"; did you mean '{paths[0]}'?" if (paths := paths_of(name)) else ""


def explain(error: ValidationError, document: Document) -> list[str]:
    """One line per error, in schema order."""
    errors: list[dict[str, Any]] = [dict(each) for each in error.errors(include_url=False)]
    extra: list[Location] = [each["loc"] for each in errors if each["type"] == "extra_forbidden"]
    lines: list[str] = []
    for each in errors:
        if each["type"] != "missing" or not _misspelt(each["loc"], extra):
            lines.extend(_lines(each, extra, document))
    return list(dict.fromkeys(lines))


def _misspelt(missing: Location, extra: list[Location]) -> bool:
    """Whether an unknown key's own line already suggests this missing one."""
    unknown = [str(each[-1]) for each in extra if each[:-1] == missing[:-1]]
    return any(f"'{missing[-1]}'" in nearest(name, siblings(missing[:-1])) for name in unknown)


def _lines(error: dict[str, Any], extra: list[Location], document: Document) -> Iterator[str]:
    location, context = error["loc"], error.get("ctx", {})
    keys = _without_tags(location)
    if error["type"] == "checks":
        for path, message in context["problems"]:
            yield document.at(_parts(path), f"{path}: {message}")
    elif error["type"] == "check":
        keys = keys + _parts(context["path"])
        yield document.at(keys, f"{dotted(keys)}: {context['message']}")
    elif error["type"] == "missing":
        yield document.at(keys[:-1], f"missing key '{dotted(keys)}'")
    elif error["type"] == "extra_forbidden" and owner(location[:-1], str(location[-1])):
        yield _mixed_variants(location, extra, document)
    elif error["type"] == "extra_forbidden":
        yield document.at(keys, _unknown(location, error["input"]))
    else:
        if error["type"] == "variant" and isinstance(error["input"], dict) and "name" in error["input"]:
            keys, error = (*keys, "name"), error | {"input": error["input"]["name"]}
        name, asked = error["input"], dotted(keys)
        if asked.endswith("optimizer_factory") and isinstance(name, str):
            yield document.at(keys, f"{asked}: expected a map of keys, found {name!r}; set {asked}.name={name}")
            return
        words = _names(error["input"]) if isinstance(error["input"], dict | str) else []
        hint = next(filter(None, (_space_missing(word, location) for word in words)), "")
        yield document.at(keys, f"{dotted(keys)}: {_expected(error, context)}{hint}")


def dotted(keys: Keys) -> str:
    """Keys as a dotted path; `config` for the root."""
    return ".".join(map(str, keys)) or "config"


def _without_tags(location: Location) -> Keys:
    return tuple(part for part in location if not is_tag(part))


def _parts(path: str) -> Keys:
    return tuple(int(part) if part.isdecimal() else part for part in path.split(".") if part)


def _expected(error: dict[str, Any], context: dict[str, Any]) -> str:
    kind, found = error["type"], error["input"]
    if kind == "expected":
        return f"expected {error['msg']}, found {shown(found)}"
    if kind not in _EXPECTED:
        return str(error["msg"])
    if kind == "too_short" and isinstance(found, dict):
        return f"expected a map of at least {context['min_length']}, found {shown(found)}"
    hint = ""
    if kind == "literal_error" and isinstance(found, str):
        hint = nearest(found, re.findall(r"'([^']*)'", context["expected"]))
    elif kind == "variant" and isinstance(found, dict | str):
        hint = next(filter(None, (nearest(str(name), context["keys"]) for name in _names(found))), "")
    elif kind == "string_type" and isinstance(found, int | float):
        hint = " (write it in quotes)"
    wanted = re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), _EXPECTED[kind].format(**context))
    return f"expected {wanted}, found {shown(found)}{hint}"


def _names(found: dict[str, Any] | str) -> list[str]:
    return [found] if isinstance(found, str) else [str(name) for name in found]


def _unknown(location: Location, value: object) -> str:
    name = str(location[-1])
    around = dotted(_without_tags(location[:-1]))
    message = f"unknown key '{dotted(_without_tags(location))}'"
    elsewhere = paths_of(name)
    exact = name in _FIELD_NAMES or name in _OTHERWISE or any(path.startswith(f"{around}.") for path in elsewhere)
    near = _space_missing(name, location[:-1]) or nearest(name, siblings(location[:-1]))
    if near and not exact:
        return message + near
    if elsewhere or name in _OTHERWISE:
        return message + hint_of(name)
    known = {str(key): paths[0] for key in value if (paths := paths_of(str(key)))} if isinstance(value, dict) else {}
    return message + next((f"; its '{key}' is '{path}' here" for key, path in known.items()), "")


def paths_of(name: str) -> list[str]:
    """The paths of keys of this name, or of the one that other libraries call so."""
    return paths_by_name().get(_FIELD_NAMES.get(name, name), [])


def _space_missing(text: str, location: Location) -> str:
    """A hint for ``train_steps:100``, which YAML takes for one word; empty if that is not the problem."""
    key, colon, value = text.partition(":")
    known = bool(colon) and (key in siblings(location) or key in paths_by_name())
    return f"; write '{key}: {value}', with a space after the colon" if known else ""


def _mixed_variants(location: Location, extra: list[Location], document: Document) -> str:
    """One line for a map with keys of two variants, for example after an override."""
    around = location[:-1]
    other = owner(around, str(location[-1]))
    foreign = [str(each[-1]) for each in extra if each[:-1] == around and owner(around, str(each[-1])) == other]
    keys = _without_tags(around)
    own = {name: value for name, value in document.get(*keys).items() if name in siblings(around)}
    overriding = [name for name in foreign if document.place((*keys, name)).startswith("override ")]
    keep = {name: document.get(*keys, name) for name in overriding} or own
    theirs, ours = (", ".join(f"'{name}'" for name in names) for names in (foreign, own))
    message = (
        f"{dotted(keys)}: {theirs} {'belongs' if len(foreign) == 1 else 'belong'} to the variant "
        f"{str(other).strip('()')}, but {ours or 'the rest'} makes this {str(around[-1]).strip('()')}; "
        f"to switch, set the complete map: {dotted(keys)}={inline(keep)}"
    )
    return document.at((*keys, foreign[0]), message)


def shown(value: object) -> str:
    """A value as written in YAML, abbreviated."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "a map with " + (", ".join(f"'{k}'" for k in list(value)[:4]) if value else "no keys")
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
