"""Both directions, every variant: our logits and transformers' agree to 1e-4 of the logit scale, in fp32."""

import pytest

from kenotron.generation.load import load_for_generation
from kenotron.interop import from_hf, to_hf
from support.tiny_llamas import (
    VARIANTS,
    hf_llama,
    hf_logits,
    load_hf,
    our_logits,
    our_model,
    random_tokens,
    save_hf,
    save_ours,
)

LENGTH = 40  # beyond the `dynamic` variant's max_position_embeddings and every variant's original context


def assert_close(found, expected):
    assert expected.std() > 0.1, "logits too flat to tell anything"
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_hugging_face_model_imported_gives_its_logits(variant, tmp_path):
    theirs = hf_llama(**VARIANTS[variant])
    save_hf(theirs, tmp_path / "hf")
    from_hf(tmp_path / "hf", tmp_path / "checkpoints")
    model, tokenizer, config = load_for_generation(tmp_path / "checkpoints", dtype="float32")
    tokens = random_tokens(2, LENGTH)
    assert tokenizer is None
    assert config.architecture.tie_word_embeddings == (variant == "tied")
    assert_close(our_logits(model, tokens), hf_logits(theirs, tokens))


@pytest.mark.cases(6)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_checkpoint_exported_gives_its_logits_in_transformers(variant, interleaved, tmp_path):
    changes = VARIANTS[variant] | {"rope_interleaved": interleaved}
    ours = our_model(tmp_path, **changes)
    save_ours(ours, tmp_path / "checkpoints", **changes)
    to_hf(tmp_path / "checkpoints" / "10", tmp_path / "hf", dtype="float32")
    tokens = random_tokens(2, LENGTH)
    assert_close(hf_logits(load_hf(tmp_path / "hf"), tokens), our_logits(ours, tokens))
