"""Decoding from a checkpoint: prompts in, texts out.

from kenotron.generation import SamplingOptions, generate
from kenotron.generation.load import load_for_generation

model, tokenizer, _ = load_for_generation("checkpoints/10")
generate(model, tokenizer, ["def main("], SamplingOptions(max_new_tokens=32))[0].text

options.py     how prompts are continued, checked
decode.py      the loop: one for all layouts
kv_cache.py    what it remembers; sampling.py, text.py: from logits to tokens to text
chat.py        turns of a conversation
ranks.py       a model that several ranks hold together
load.py        from a checkpoint onto a layout; layout.py: which layouts a model can be decoded on
request.py     what `kenotron generate` asks of every rank; printing.py: what rank 0 prints
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kenotron.generation.options import SamplingOptions

if TYPE_CHECKING:
    from kenotron.generation.decode import Completion, generate
    from kenotron.generation.ranks import ModelOnRanks

# Imported when first used: the options are checked before torch is imported, which takes longer than the answer may.
_MODULES = {"Completion": "decode", "generate": "decode", "ModelOnRanks": "ranks"}
__all__ = ["Completion", "ModelOnRanks", "SamplingOptions", "generate"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"kenotron.generation.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'kenotron.generation' has no attribute {name!r}")
