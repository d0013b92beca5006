"""`model.model_config`: the shapes of a model family, which is recognized by its keys.

    {is_llama_config: true, hidden_size: 64, …}     → the section of the built-in family llama
    {hidden_size: 64, …}                            → the first family that has all these keys, nanotron's first
    {family: my_module.MyFamily, …}                 → the section of that family
    {hf: org/name, rope_theta: 500000.0}            → HFArchitecture: read from there, with one value changed
    {module: my_module.MyModel, …}                  → a module of the user's, with arguments of its constructor

As in nanotron, a marker counts by its presence; its value changes nothing.
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
from kenotron.config.section import OURS, LocalPath, Section, by_rule, has, our_key


class HFArchitecture(Section):
    """An architecture read from a Hugging Face config before the run starts; keys of its family override it.

    Only then is it known which other keys exist: keys of no family here are checked then.
    """

    hf: LocalPath = our_key("Folder or hub name of a Hugging Face model.")
    overrides: dict[str, Any] = our_key("Values that replace those of the Hugging Face config.", {})

    @model_validator(mode="before")
    @classmethod
    def _gather_overrides(cls, value: Any) -> Any:
        """In YAML the overrides are beside `hf`; they are checked as keys of a family, which they are."""
        if not isinstance(value, dict) or "hf" not in value:
            return value
        overrides = {k: v for k, v in value.items() if k not in ("hf", "overrides")}
        overrides |= value.get("overrides", {})
        section = _section_of(overrides)
        known = {name: each for name, each in overrides.items() if name in yaml_keys(section)}
        checked = section.model_validate(known).model_dump(by_alias=True, exclude_unset=True)
        return {"hf": value["hf"], "overrides": overrides | checked}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        own = handler.resolve_ref_schema(handler(schema))
        own["properties"].pop("overrides")
        for section in reversed(built_in_sections().values()):
            of_section = section.model_json_schema()
            own["properties"] |= _inlined(of_section["properties"], of_section.get("$defs", {}))
        own["properties"]["family"] = {"type": "string"}
        own["additionalProperties"] = True
        return own

    @model_serializer
    def _beside(self) -> dict[str, Any]:
        return {"hf": self.hf, **self.overrides}

    def unsupported(self) -> list[str]:
        """What its overrides ask for that is not implemented yet."""
        section = _section_of(self.overrides)
        known = {name: each for name, each in self.overrides.items() if name in yaml_keys(section)}
        return list(section.model_validate(known).unsupported())


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """`node` of a JSON schema with its references replaced by what they name."""
    if isinstance(node, dict):
        if "$ref" in node:
            return _inlined(definitions[node["$ref"].split("/")[-1]], definitions)
        return {name: _inlined(each, definitions) for name, each in node.items()}
    return [_inlined(each, definitions) for each in node] if isinstance(node, list) else node


def built_in_sections() -> dict[str, type[DecoderArchitecture]]:
    """Sections of the built-in families by name; those that nanotron has first: keys without a marker are theirs."""
    sections = {name: family.section for name, family in built_in_families().items()}

    def is_ours(name: str) -> bool:
        marker = sections[name].model_fields.get(f"is_{name}_config")
        return marker is None or marker.json_schema_extra == {"mark": OURS}

    return {name: sections[name] for name in sorted(sections, key=is_ours)}


def yaml_keys(section: type[Section]) -> set[str]:
    """Names of a section's keys as YAML spells them, those of other systems included."""
    keys = {field.alias or name for name, field in section.model_fields.items()}
    return keys | set(section.other_names) if issubclass(section, DecoderArchitecture) else keys


def _section_of(keys: dict[str, Any]) -> type[DecoderArchitecture]:
    """The section that some of its keys belong to: of the family that they name, or of the one that has the most."""
    if isinstance(keys.get("family"), str):
        return find_family(keys["family"]).section
    return max(built_in_sections().values(), key=lambda section: len(yaml_keys(section) & set(keys)))


def _own_section(value: Any) -> Any:
    """The keys of a family from outside as the section that it brings."""
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
        if has(value, f"is_{name}_config"):
            return f"({name})"
    sections = built_in_sections()
    fitting = [name for name, section in sections.items() if set(value) <= yaml_keys(section)]
    return f"({(fitting or list(sections))[0]})"


_rule = by_rule(_choose, "the keys of a model family, or {hf: folder or hub name}")


def _one_of(built_in: Iterable[tuple[str, Any]]) -> Any:
    """The union of what a `model_config` may be, with tags; `built_in` are the families' names and types."""
    variants = [
        *(Annotated[kind, Tag(f"({name})")] for name, kind in built_in),
        Annotated[SerializeAsAny[DecoderArchitecture], BeforeValidator(_own_section), Tag("(family)")],
        Annotated[HFArchitecture, Tag("(hf)")],
    ]
    return Annotated[reduce(or_, variants), _rule]


def architecture_variants() -> Any:
    """Every section that a `model_config` may be, with its tag, for what shows the schema."""
    return _one_of(built_in_sections().items())


def _imported_when_named(name: str) -> Any:
    return Annotated[Any, PlainValidator(lambda value: built_in_family(name).section.model_validate(value))]


if TYPE_CHECKING:
    Architecture = DecoderArchitecture | HFArchitecture
else:

    class Architecture:
        """One of `architecture_variants`. Only the family that the config names is imported: all take 0.1 s."""

        @classmethod
        def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
            return handler.generate_schema(_one_of((name, _imported_when_named(name)) for name in built_in_names()))

        @classmethod
        def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
            return handler(TypeAdapter(architecture_variants()).core_schema)
