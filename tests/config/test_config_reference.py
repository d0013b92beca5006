"""The generated pages are fresh and complete, and no key is accepted and then forgotten."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kenotron.config
from kenotron.config import decoder
from kenotron.config.schema import json_schema, json_schema_text, rows, section_at, siblings
from kenotron.config.section import EXPORT, NO_EFFECT
from support.reference_page import PAGE, mark_of, reference_page

DOCS = Path(__file__).parents[2] / "docs"
CONFIG = Path(kenotron.config.__file__).parent


def test_the_reference_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference_page(), "stale: run `make reference`"


def test_the_json_schema_is_fresh() -> None:
    stale = "stale: run `kenotron config schema > docs/config.schema.json`"
    assert (DOCS / "config.schema.json").read_text(encoding="utf-8") == json_schema_text(), stale


def test_every_key_says_what_it_does() -> None:
    written = reference_page()
    for row in {(row.section, row.name): row for row in rows()}.values():
        assert row.field.description, row.path
        assert row.field.description.endswith((".", ")")), row.path
        assert f"| `{row.name}` |" in written or f"## `{row.name}`" in written, row.path


def marked(mark: str) -> set[str]:
    return {row.name for row in rows() if mark_of(row) == mark}


def test_the_keys_without_effect_in_training_are_exactly_these() -> None:
    exported = {"initializer_range", "pretraining_tp", "use_cache", "pad_token_id", "max_position_embeddings"}
    assert marked(EXPORT) == exported | {"chunk_size", "rescale_prenorm_residual", "expand"}  # of Mamba and hybrids
    nanoset = {"skip_in_stream", "pad_samples_to_global_batch_size", "use_old_brrr_dataloader"}
    qwen2 = {"_fused_rotary_emb", "_fused_rms_norm", "_use_qkv_packed", "log_attn_probs", "pretraining_tp"}
    starcoder2 = {"grouped_query", "multi_query"}
    experts = {"token_dispatcher_type", "moe_capacity_factor", "hidden_act"}
    assert marked(NO_EFFECT) == {"s5cmd_path", *nanoset, *qwen2, *starcoder2, *experts}


def properties(schema: dict[str, Any], node: dict[str, Any], depth: int = 0) -> Iterator[set[str]]:
    """Names of the properties of a node and of its alternatives, references followed."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].split("/")[-1]]
    if "properties" in node:
        yield set(node["properties"])
    for each in [*node.get("anyOf", []), *node.get("oneOf", [])]:
        yield from properties(schema, each, depth + 1)


def test_the_json_schema_names_the_same_keys_as_the_models() -> None:
    schema = json_schema()
    json.dumps(schema)
    assert set(schema["properties"]) == siblings(())
    for name, node in schema["properties"].items():
        section = section_at((name,))
        if section is not None:
            assert siblings((name,)) in list(properties(schema, node)), name
    architectures = list(properties(schema, schema["$defs"]["Model"]["properties"]["model_config"]))
    for variant in ("(llama)", "(hf)"):
        assert siblings(("model", "model_config", variant)) in architectures


def test_the_json_schema_admits_null_and_any_case_where_the_reader_does() -> None:
    schema = json_schema()
    parallelism = schema["$defs"]["Parallelism"]["properties"]
    tp_mode, null = parallelism["tp_mode"]["anyOf"]
    assert tp_mode["enum"] == ["ALL_REDUCE", "REDUCE_SCATTER", "all_reduce", "reduce_scatter"]
    assert null == {"type": "null"}
    assert {"type": "null"} in schema["$defs"]["General"]["properties"]["seed"]["anyOf"]


NOT_READ = {
    "lr_decay_steps": "read through LearningRateScheduler.decay_steps",
    "lr_decay_starting_step": "read through LearningRateScheduler.decay_start",
}


def unread() -> set[str]:
    """Keys that no file outside of the schema names; an architecture refuses what it does not support itself."""
    files = [f for f in CONFIG.parent.rglob("*.py") if CONFIG not in f.parents] + [Path(decoder.__file__)]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    served = [row.name for row in rows() if mark_of(row) not in (NO_EFFECT, EXPORT)]
    attributes, quoted = set(re.findall(r"\.(\w+)", text)), set(re.findall(r'"(\w+)(?=")', text))
    return {name for name in served if name.lstrip("_") not in attributes and name not in quoted}


def test_every_key_is_read_somewhere_or_has_its_reason() -> None:
    assert {name for name in unread() if not re.fullmatch(r"is_\w+_config", name)} == set(NOT_READ)  # and markers


def test_the_properties_that_stand_for_keys_are_read() -> None:
    text = "\n".join(f.read_text(encoding="utf-8") for f in (CONFIG.parent / "optim").glob("*.py"))
    assert ".decay_steps(" in text
    assert ".decay_start" in text
