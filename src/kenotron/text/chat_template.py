"""Render a conversation as text by a tokenizer's chat template, for fine-tuning and for `kenotron chat`.

[{role: user, content: Hi}]  ──render_chat──▶  <|im_start|>user↵Hi<|im_end|>↵
"""

import re
from functools import lru_cache
from typing import Any

from kenotron.config.errors import InputError
from kenotron.text.tokenizer import TextTokenizer


def chat_template(tokenizer: TextTokenizer) -> str | None:
    """Return the tokenizer's jinja chat template, the default one of several, or None if it has none."""
    file = tokenizer.folder / "chat_template.jinja" if tokenizer.folder else None
    if file is not None and file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"tokenizer: {file} cannot be read as text: {error}") from None
    known = tokenizer.config.get("chat_template")
    if isinstance(known, list):  # [{name, template}, …]
        named = [each for each in known if isinstance(each, dict)]
        known = {str(each.get("name")): each.get("template") for each in named}.get("default")
    if known is not None and not isinstance(known, str):
        raise InputError(f"tokenizer: {tokenizer.folder}: chat_template: expected text, found {type(known).__name__}")
    return known


def special_tokens(tokenizer: TextTokenizer) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and other special tokens, which a chat template may use."""
    named = {key: value for key, value in tokenizer.config.items() if re.fullmatch(r"[a-z]+_token", key)}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


@lru_cache
def template_variables(template: str) -> frozenset[str]:
    """Return the names that a chat template reads but does not set itself.

    It is empty for a template that jinja cannot parse; rendering reports that.
    """
    import jinja2
    from jinja2 import meta

    plain = re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)
    try:
        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        return frozenset(meta.find_undeclared_variables(environment.parse(plain)))
    except jinja2.TemplateError:
        return frozenset()


def render_chat(
    template: str, variables: dict[str, Any], where: str, messages: list[Any], prompt: bool = False, mask: bool = False
) -> tuple[str, Any]:
    """Return a conversation's text; `prompt`: up to the start of an answer; `mask`: also the answers' ranges."""
    import jinja2
    from transformers.utils import chat_template_utils

    library: Any = chat_template_utils  # its type stubs lack the mask
    try:
        texts, answers = library.render_jinja_template(
            [messages],
            chat_template=template,
            return_assistant_tokens_mask=mask,
            add_generation_prompt=prompt,
            **variables,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise InputError(f"{where}: the chat template refuses these messages: {error}") from None
    return texts[0], answers[0] if mask else None
