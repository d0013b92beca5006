"""Tasks of lm_eval on a checkpoint: metrics by hand from the likelihoods of `our_logits`, errors in one line."""

import math
from pathlib import Path

import pytest
import torch

import kenotron as kn
from kenotron.config import InputError
from kenotron.generation.load import load_for_generation
from support.evaluation_tasks import QUESTIONS, TEXTS, write_tasks
from support.tiny_llamas import our_logits, our_model, save_ours, small_tokenizer

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

SHAPE = {"max_position_embeddings": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    save_ours(our_model(folder, **SHAPE), folder / "checkpoints", small_tokenizer(), **SHAPE)
    write_tasks(folder)
    return folder


def log_likelihood(checkpoint: Path, tokens: list[int], first: int) -> float:
    """By the definition, of the tokens from `first` on after those before them."""
    model, _, _ = load_for_generation(checkpoint, "float32", "cpu")
    logs = our_logits(model, torch.tensor([tokens]))[0].double().log_softmax(-1)
    return math.fsum(float(logs[place - 1, tokens[place]]) for place in range(first, len(tokens)))


def test_the_metrics_are_those_of_the_likelihoods(folder: Path) -> None:
    encode, checkpoint = small_tokenizer().encode, folder / "checkpoints"
    found = kn.evaluate(checkpoint, ["choices", "texts", "written"], include_path=folder / "tasks")
    right, bits = [], []
    for row in QUESTIONS:
        texts, border = [f"{row['question']} {choice}" for choice in row["choices"]], len(encode(str(row["question"])))
        scores = [log_likelihood(checkpoint, encode(text), border) for text in texts]
        right.append(float(scores.index(max(scores)) == row["answer"]))
        answer = " " + row["choices"][row["answer"]]
        bits.append(-scores[row["answer"]] / len(answer.encode()) / math.log(2))
    assert found["choices"]["acc"].value == pytest.approx(sum(right) / 3)
    value, stderr = found["choices"]["bits_per_byte"]
    mean = sum(bits) / 3
    assert value == pytest.approx(mean, rel=1e-5)
    assert stderr == pytest.approx(math.sqrt(sum((each - mean) ** 2 for each in bits) / 2 / 3), rel=1e-5)

    total = 0.0
    for text in TEXTS:  # each token once; the model reads 128, and those that are left come after as many as fit
        tokens = [0, *encode(text)]
        total += log_likelihood(checkpoint, tokens[:129], 1)
        left = len(tokens) - 129
        assert left < 128
        total += log_likelihood(checkpoint, tokens[-129:], 129 - left) if left > 0 else 0.0
    size = sum(len(text.encode()) for text in TEXTS)
    assert found["texts"]["bits_per_byte"].value == pytest.approx(-total / size / math.log(2), rel=1e-5)
    assert found["written"]["exact_match"].value == 0.0


def test_wrong_names_end_in_one_line(folder: Path, tmp_path: Path) -> None:
    checkpoint = folder / "checkpoints"
    with pytest.raises(InputError, match=r"^include_path: no such file or folder: .*/task; did you mean"):
        kn.evaluate(checkpoint, "choices", include_path=folder / "task")
    (folder / "choices.jsonl").rename(folder / "away.jsonl")
    try:
        with pytest.raises(InputError, match=r"^tasks: cannot load 'choices': ") as caught:
            kn.evaluate(checkpoint, "choices", include_path=folder / "tasks")
        assert len(str(caught.value).splitlines()) == 1
    finally:
        (folder / "away.jsonl").rename(folder / "choices.jsonl")
    bare = save_ours(our_model(tmp_path, **SHAPE), tmp_path / "bare", None, **SHAPE)
    with pytest.raises(InputError, match="has no tokenizer, which evaluation needs"):
        kn.evaluate(bare, "choices", include_path=folder / "tasks")


@pytest.mark.slow
def test_an_unknown_task_gets_the_nearest(folder: Path) -> None:
    with pytest.raises(InputError, match=r"lm_eval has no task 'choises'; did you mean 'choices'\?; `lm_eval ls"):
        kn.evaluate(folder / "checkpoints", "choises", include_path=folder / "tasks")
