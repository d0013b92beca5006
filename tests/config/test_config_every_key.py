"""No key is accepted and then forgotten: each is read by another package, refused, or listed here with its reason."""

import re
from pathlib import Path

import kenotron.config
from kenotron.config import decoder
from kenotron.config.schema import rows
from kenotron.config.section import EXPORT, NO_EFFECT
from support.reference_page import mark_of

CONFIG = Path(kenotron.config.__file__).parent


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
