"""`model.model_config`: the shapes of a model, whose family is recognized by the keys.

    {is_llama_config: true, hidden_size: 64, …}     → the section of the built-in family llama
    {hidden_size: 64, …}                            → the first family that has all these keys, nanotron's first
    {family: my_module.MyFamily, …}                 → the section of that family
    {hf: org/name, rope_theta: 500000.0}            → HFArchitecture: a Hugging Face config, with one value changed
    {module: my_module.MyModel, …}                  → the user's own torch module, with its constructor's arguments

As in nanotron, only the presence of a marker such as `is_llama_config` counts; its value has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    BeforeValidator,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainValidator,
    SerializeAsAny,
    Tag,
    TypeAdapter,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from kenotron.config.decoder import DecoderArchitecture
from kenotron.config.families import USER_MODULE, built_in_families, built_in_family, built_in_names, find_family
from kenotron.config.section import OURS, LocalPath, Section, by_rule, has_key, our_key


class HFArchitecture(Section):
    """An architecture read from a Hugging Face config before the run starts; keys of its family override it.

    The family is known only then, so keys that no family of this library has are checked then.
    """

    hf: LocalPath = our_key("Folder or hub name of a Hugging Face model.")
    overrides: dict[str, Any] = our_key("Values that replace those of the Hugging Face config.", {})

    @model_validator(mode="before")
    @classmethod
    def _gather_overrides(cls, value: Any) -> Any:
        """Move the keys that YAML has beside `hf` into `overrides`, and validate them as keys of their family."""
        if not isinstance(value, dict) or "hf" not in value:
            return value
        overrides = {k: v for k, v in value.items() if k not in ("hf", "overrides")}
        overrides |= value.get("overrides", {})
        checked = _family_keys(overrides).model_dump(by_alias=True, exclude_unset=True)
        return {"hf": value["hf"], "overrides": overrides | checked}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler.resolve_ref_schema(handler(schema))
        result["properties"].pop("overrides")
        for section in reversed(built_in_sections().values()):
            section_schema = section.model_json_schema()
            result["properties"] |= _inlined(section_schema["properties"], section_schema.get("$defs", {}))
        result["properties"]["family"] = {"type": "string"}
        result["additionalProperties"] = True
        return result

    @model_serializer
    def _flatten(self) -> dict[str, Any]:
        return {"hf": self.hf, **self.overrides}

    def unsupported(self) -> list[str]:
        """Return the overrides that are not implemented yet, as ``key: value``."""
        return list(_family_keys(self.overrides).unsupported())


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Return `node` of a JSON schema with each reference replaced by its definition."""
    if isinstance(node, dict):
        if "$ref" in node:
            return _inlined(definitions[node["$ref"].split("/")[-1]], definitions)
        return {name: _inlined(child, definitions) for name, child in node.items()}
    return [_inlined(child, definitions) for child in node] if isinstance(node, list) else node


def built_in_sections() -> dict[str, type[DecoderArchitecture]]:
    """Return family name → section, for the built-in families.

    Families of nanotron come first, so that keys without a marker are theirs.
    """
    sections = {name: family.section for name, family in built_in_families().items()}

    def is_new(name: str) -> bool:
        marker = sections[name].model_fields.get(f"is_{name}_config")
        return marker is None or marker.json_schema_extra == {"mark": OURS}

    return {name: sections[name] for name in sorted(sections, key=is_new)}


def yaml_keys(section: type[Section]) -> set[str]:
    """Return the names of a section's keys in YAML, including their names in other systems."""
    keys = {field.alias or name for name, field in section.model_fields.items()}
    return keys | set(section.other_names) if issubclass(section, DecoderArchitecture) else keys


def _section_of(keys: dict[str, Any]) -> type[DecoderArchitecture]:
    """Return the section of the family that `keys` name, or of the built-in one that has most of them."""
    if isinstance(keys.get("family"), str):
        return find_family(keys["family"]).section
    return max(built_in_sections().values(), key=lambda section: len(yaml_keys(section) & set(keys)))


def _family_keys(overrides: dict[str, Any]) -> DecoderArchitecture:
    """Validate those of `overrides` that are keys of the section of their family."""
    section = _section_of(overrides)
    return section.model_validate({name: overrides[name] for name in overrides if name in yaml_keys(section)})


def _user_section(value: Any) -> Any:
    """Validate the keys of a family that is not built in with the family's own section."""
    if isinstance(value, dict) and "module" in value:
        value = {"family": USER_MODULE} | value
    if isinstance(value, dict) and isinstance(value.get("family"), str):
        return find_family(value["family"]).section.model_validate(value)
    return value


def _choose(value: Any) -> str | None:
    if isinstance(value, HFArchitecture) or (isinstance(value, dict) and "hf" in value):
        return "(hf)"
    if isinstance(value, dict) and value.get("family") in built_in_names():
        return f"({value['family']})"
    if isinstance(value, DecoderArchitecture) or (isinstance(value, dict) and {"family", "module"} & value.keys()):
        return "(family)"
    return _by_keys(value) if isinstance(value, dict) else None


def _by_keys(value: dict[str, Any]) -> str:
    for name in built_in_names():
        if has_key(value, f"is_{name}_config"):
            return f"({name})"
    sections = built_in_sections()
    matches = [name for name, section in sections.items() if set(value) <= yaml_keys(section)]
    return f"({(matches or list(sections))[0]})"


_rule = by_rule(_choose, "the keys of a model family, or {hf: folder or hub name}")


def _tagged_union(built_in: Iterable[tuple[str, Any]]) -> Any:
    """Return the tagged union of all variants of `model_config`; `built_in` has the families' names and types."""
    variants = [
        *(Annotated[kind, Tag(f"({name})")] for name, kind in built_in),
        Annotated[SerializeAsAny[DecoderArchitecture], BeforeValidator(_user_section), Tag("(family)")],
        Annotated[HFArchitecture, Tag("(hf)")],
    ]
    return Annotated[reduce(or_, variants), _rule]


def architecture_variants() -> Any:
    """Return the tagged union of every section that `model_config` may be, to show the schema."""
    return _tagged_union(built_in_sections().items())


def _lazy_family(name: str) -> Any:
    return Annotated[Any, PlainValidator(lambda value: built_in_family(name).section.model_validate(value))]


if TYPE_CHECKING:
    Architecture = DecoderArchitecture | HFArchitecture
else:

    class Architecture:
        """One of `architecture_variants`. Only the family that the config names is imported, as all take 0.1 s."""

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
            return handler.generate_schema(_tagged_union((name, _lazy_family(name)) for name in built_in_names()))

        @classmethod
        def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
            return handler(TypeAdapter(architecture_variants()).core_schema)
