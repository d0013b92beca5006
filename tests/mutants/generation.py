"""Bugs of decoding: texts that read well, and are not what was asked for."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        name="a-penalty-that-rewards-unlikely-tokens",
        file="generation/sampling.py",
        find="torch.where(logits < 0, logits * penalty, logits / penalty)",
        replace="logits / penalty",
        why="a logit below zero rises when it is divided: what was repeated and unlikely becomes likelier",
        tests=("generation/test_sampling.py",),
    ),
    Mutant(
        name="a-stop-string-over-two-tokens-missed",
        file="generation/text.py",
        find="        text = self.held + piece\n",
        replace="        text = piece\n",
        why="a stop string that comes in two pieces does not stop, and its beginning is lost",
        tests=("generation/test_text_stream.py",),
    ),
    Mutant(
        name="positions-that-count-the-padding",
        file="models/foreign.py",
        find="(mask.cumsum(-1) - 1).clamp(min=0)",
        replace="(mask.new_ones(mask.shape).cumsum(-1) - 1)",
        why="shorter prompts of a batch begin at the position of their padding's length",
        tests=("models/test_foreign_models.py::test_decoding_with_its_cache_is_generate_of_transformers",),
    ),
]
