"""Decoding from a checkpoint: prompts in, texts out.

from kenotron.generate import generate, load_for_generation
model, tokenizer, _ = load_for_generation("checkpoints/10")
generate(model, tokenizer, ["def main("], max_new_tokens=32)[0].text

decode.py      the loop: one for all layouts
kv_cache.py    what it remembers; sampling.py, text.py: from logits to tokens to text
ranks.py       a model that several ranks hold together
load.py        from a checkpoint onto a layout; layout.py: the layout as a config
"""

from kenotron.generate.decode import Completion, generate
from kenotron.generate.layout import layout_config
from kenotron.generate.load import load_for_generation
from kenotron.generate.ranks import ModelOnRanks

__all__ = ["Completion", "ModelOnRanks", "generate", "layout_config", "load_for_generation"]
