"""An exported checkpoint scores the same in `lm_eval` as here: log-likelihoods of a local task, document by document.

The task of docs/evaluation.md: a text file of questions with choices, scored by the likelihood of each choice, and
texts as a whole, for perplexity. Skipped where lm_eval is not installed (`pip install "lm_eval[hf]"`). Seen: 0.4.13.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

import kenotron as kn
from evaluation.test_harness import SHAPE, log_likelihood
from kenotron.evaluation.harness import results_of
from kenotron.interop import to_hf
from kenotron.text.tokenizer import TextTokenizer
from support.evaluation_tasks import TASKS, write_tasks
from support.notebook import DOCS
from support.tiny_llamas import our_model, save_ours, small_tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed")
pytest.importorskip("accelerate", reason="lm_eval is installed without its extra hf")
pytestmark = pytest.mark.slow
QUESTIONS = [
    {"question": "return the cat that", "choices": ["sat", "main", "on the mat"], "answer": 0},
    {"question": "def main", "choices": ["(argument):", "é", "中文 naïve"], "answer": 0},
]
TEXTS = [{"text": "def main(argument):\n    return the cat\n"}, {"text": "naïve é 中文; the mat sat on the cat"}]


def lm_evaluate(exported: Path, tasks: Path, names: list[str], **options: Any) -> dict[str, Any]:
    """What lm_eval's own backend finds in tasks of a folder."""
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(exported), "dtype": "float32"},
        tasks=names,
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        **options,
    )
    return found


def write_tasks_of_the_page(folder: Path) -> None:
    """The tasks that docs/evaluation.md prints, on our questions and texts."""
    page = (DOCS / "evaluation.md").read_text(encoding="utf-8")
    files = re.findall(r"```yaml\n# (tasks/\S+\.yaml)\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in files] == ["tasks/my_choices.yaml", "tasks/my_texts.yaml"]
    (folder / "tasks").mkdir()
    for name, text in files:
        (folder / name).write_text(text.replace("data/", f"{folder}/"), encoding="utf-8")
    for name, rows in (("questions", QUESTIONS), ("texts", TEXTS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_log_likelihoods_of_a_local_task_are_ours(tmp_path: Path) -> None:
    """Of random weights, large enough that likelihoods of choices are far apart."""
    checkpoint = save_ours(our_model(tmp_path, **SHAPE), tmp_path / "checkpoints", small_tokenizer(), **SHAPE)
    to_hf(checkpoint, tmp_path / "exported")
    write_tasks_of_the_page(tmp_path)
    found = lm_evaluate(tmp_path / "exported", tmp_path / "tasks", ["my_choices", "my_texts"], log_samples=True)

    right, encode = 0, small_tokenizer().encode
    for row, sample in zip(QUESTIONS, found["samples"]["my_choices"], strict=True):
        texts, border = [f"{row['question']} {choice}" for choice in row["choices"]], len(encode(row["question"]))
        expected = [log_likelihood(checkpoint, encode(text), border) for text in texts]
        assert [response[0][0] for response in sample["resps"]] == pytest.approx(expected, abs=1e-4, rel=0)
        right += expected.index(max(expected)) == row["answer"]
    assert found["results"]["my_choices"]["acc,none"] == right / len(QUESTIONS)

    wholes = [log_likelihood(checkpoint, [0, *encode(row["text"])], 1) for row in TEXTS]  # after the end of text
    responses = [sample["resps"][0][0] for sample in found["samples"]["my_texts"]]
    assert [one if isinstance(one, float) else one[0] for one in responses] == pytest.approx(wholes, abs=1e-4, rel=0)
    size = sum(len(row["text"].encode()) for row in TEXTS)
    bits = found["results"]["my_texts"]["bits_per_byte,none"]
    assert bits == pytest.approx(-math.fsum(wholes) / size / math.log(2), rel=1e-5)


def with_start_of_text() -> TextTokenizer:
    """A tokenizer that puts a token before every text, as Llama's does."""
    tokenizer = small_tokenizer()
    end = tokenizer.decode([0])
    template = TemplateProcessing(single=f"{end} $A", special_tokens=[(end, 0)])
    tokenizer.backend.post_processor = template
    return TextTokenizer(tokenizer.backend, {"eos_token": end, "bos_token": end})


@pytest.mark.parametrize("examples", [None, 2])
@pytest.mark.parametrize("tokenizer", [small_tokenizer, with_start_of_text])
def test_all_metrics_are_those_of_its_own_backend(tokenizer: Any, examples: int | None, tmp_path: Path) -> None:
    checkpoint = save_ours(our_model(tmp_path, **SHAPE), tmp_path / "checkpoints", tokenizer(), **SHAPE)
    to_hf(checkpoint, tmp_path / "exported")
    folder = write_tasks(tmp_path)
    options = {"num_fewshot": examples, "bootstrap_iters": 1000}
    found = lm_evaluate(tmp_path / "exported", folder, list(TASKS), **options)
    theirs = results_of(found)
    ours = kn.evaluate(checkpoint, list(TASKS), include_path=folder, num_fewshot=examples)
    assert theirs.keys() == ours.keys() == TASKS.keys()
    for task, metrics in theirs.items():
        assert {name: each.value for name, each in ours[task].items()} == pytest.approx(
            {name: each.value for name, each in metrics.items()}, abs=1e-4
        )
    written = [sample["filtered_resps"][0] for sample in found["samples"]["written"]]
    prompts = [sample["arguments"][0][0] for sample in found["samples"]["written"]]
    completions = kn.generate(checkpoint, prompts, max_new_tokens=6, stop=["\n"])
    assert [each.text for each in completions] == written
