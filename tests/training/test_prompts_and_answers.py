"""A run on prompts and answers: it learns the answers' tokens and no others, and goes on exactly where it stopped."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from support.hub_cache import make_tokenizer_repository
from support.tiny_run import losses, metrics, saved_weights, tiny_config, train_quietly

ROWS = [{"prompt": f"word{a} word{b} ", "completion": f"word{a + b} word{b}"} for a in range(9) for b in range(9)]
DATASET = "data_stages.0.data.dataset"


def overrides(folder: Path) -> list[str]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = make_tokenizer_repository(folder / "hub", "robot/words")
    return [
        f"{DATASET}={{text_files: {file}, sft_dataloader: true}}",
        f"tokenizer.tokenizer_name_or_path={words}",
        *("model.model_config.vocab_size=200", "model.model_config.eos_token_id=2"),
        *("checkpoints.save_initial_state=true", "tokens.train_steps=1"),
    ]


def test_the_loss_is_that_of_the_answers_of_each_example_alone(tmp_path: Path) -> None:
    from test_train_step import hf_model

    config = tiny_config(tmp_path, *overrides(tmp_path))
    run = train_quietly(config)
    model = hf_model(config, saved_weights(tmp_path / "checkpoints" / "0"))
    total, count = 0.0, 0
    for batch in run.data.batch(1):
        for row in batch.tokens.tolist():
            # Two words, two words with a loss, the end; what follows the last example is padding: the end, too.
            for first in range(0, len(row) - 3, 5):
                example = torch.tensor([*row[first : first + 4], 2])
                if example[0] == 2:
                    continue
                logits = model(example[None, :-1]).logits[0]
                total += F.cross_entropy(logits[1:], example[2:], reduction="sum").item()
                count += 3
    assert count == metrics(config)[0]["real_tokens"]
    assert losses(config)[0] == pytest.approx(total / count, rel=1e-6)
