"""Generate texts from prompts with a checkpoint.

from kenotron.generation import SamplingOptions, generate
from kenotron.generation.load import load_for_generation

model, tokenizer, _ = load_for_generation("checkpoints/10")
generate(model, tokenizer, ["def main("], SamplingOptions(max_new_tokens=32))[0].text

options.py           the sampling options, with their checks
decode.py            the decode loop, the same for all layouts
kv_cache.py          its keys and values; sampling.py, text.py: from logits to tokens to text
chat.py              conversations
model_on_ranks.py    a model that several ranks hold together
load.py              loads a checkpoint onto a layout; layout.py: the layouts that a model can be decoded on
request.py           the request of `kenotron generate` to every rank; printing.py: the output of rank 0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kenotron.generation.options import SamplingOptions

if TYPE_CHECKING:
    from kenotron.generation.decode import Completion, generate
    from kenotron.generation.model_on_ranks import ModelOnRanks

# Imported at first use, so that options are checked before torch is imported, which takes seconds.
_MODULES = {"Completion": "decode", "generate": "decode", "ModelOnRanks": "model_on_ranks"}
__all__ = ["Completion", "ModelOnRanks", "SamplingOptions", "generate"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"kenotron.generation.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'kenotron.generation' has no attribute {name!r}")
