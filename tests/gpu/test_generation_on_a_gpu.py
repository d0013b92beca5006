"""Generation on a GPU: the tokens that the CPU chooses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kenotron.generation import SamplingOptions, generate
from kenotron.generation.load import load_for_generation
from support.device_runs import train_on
from support.tiny_llamas import our_model, random_tokens, save_ours


@pytest.mark.parametrize("variant", [{}, {"attention_bias": True, "tie_word_embeddings": True}])
def test_greedy_tokens_are_those_of_the_cpu(variant: dict[str, bool], device: torch.device, tmp_path: Path) -> None:
    path = save_ours(our_model(tmp_path, **variant), tmp_path / "checkpoints", **variant)
    prompts = [random_tokens(1, length, length)[0].tolist() for length in (9, 1, 14)]
    expect_the_cpus_tokens(path, prompts, device)


@pytest.mark.parametrize("model", ["mixtral", "mamba2"])
def test_a_model_trained_there_writes_the_same_on_both(model: str, device: torch.device, tmp_path: Path) -> None:
    config = train_on(device, tmp_path, "tokens.train_steps=8", model=model)
    expect_the_cpus_tokens(config.checkpoint_folder / "8", [[5, 6, 7, 8], [40], list(range(20, 40))], device)


def expect_the_cpus_tokens(path: Path, prompts: list[list[int]], device: torch.device) -> None:
    found, expected = (
        generate(
            load_for_generation(path, device=where).model,
            None,
            prompts,
            SamplingOptions(max_new_tokens=24, stop_at_eos=False),
        )
        for where in (device, torch.device("cpu"))
    )
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert {len(one.tokens) for one in found} == {24}
    assert len({token for one in found for token in one.tokens}) > 3  # not one token over and over
