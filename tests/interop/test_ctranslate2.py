"""A program with its own mathematics reads an export: CTranslate2 decodes the same tokens, on the CPU.

Its own limits: a tokenizer needs a token that begins a text, and the original length of `llama3` scaling is fixed.
Seen: 4.8.5.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from kenotron.interop import to_hf
from kenotron.text.tokenizer import TextTokenizer
from support.tiny_llamas import our_logits, our_model, save_ours, small_tokenizer

ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
pytestmark = pytest.mark.slow
PROMPT, NEW = [7, 20, 33, 250], 24


def greedy(model: torch.nn.Module) -> list[int]:
    """Ids after PROMPT, each from a forward pass of its own."""
    tokens = list(PROMPT)
    for _ in range(NEW):
        tokens.append(int(our_logits(model, torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "tie_word_embeddings": True},
        {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    ],
    ids=["plain", "theta", "tied", "linear"],
)
def test_greedy_tokens_are_ours(changes: dict[str, Any], tmp_path: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    plain = small_tokenizer()
    tokenizer = TextTokenizer(plain.backend, plain.config | {"bos_token": plain.config["eos_token"]})
    model = our_model(tmp_path, **changes)
    to_hf(save_ours(model, tmp_path / "checkpoints", tokenizer, **changes), tmp_path / "out", dtype="float32")
    logging.disable_progress_bar()
    TransformersConverter(str(tmp_path / "out")).convert(str(tmp_path / "converted"))
    generator = ctranslate2.Generator(str(tmp_path / "converted"), device="cpu", compute_type="float32")
    prompt = [tokenizer.backend.id_to_token(token) for token in PROMPT]
    (found,) = generator.generate_batch(
        [prompt], beam_size=1, sampling_topk=1, max_length=NEW, include_prompt_in_result=False
    )
    expected = greedy(model)
    assert tokenizer.eos_token_id not in expected
    assert found.sequences_ids[0] == expected
