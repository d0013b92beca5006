"""Decoding from a checkpoint: prompts in, texts out.

from kenotron.generate import generate, load_for_generation
model, tokenizer, _ = load_for_generation("checkpoints/10")
generate(model, tokenizer, ["def main("], max_new_tokens=32)[0].text
"""

from kenotron.generate.decode import Completion, generate
from kenotron.generate.load import load_for_generation

__all__ = ["Completion", "generate", "load_for_generation"]
