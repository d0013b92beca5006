"""What `kenotron init` gives trains by the command that it names, on small data of its kind, validation included."""

import json
import random
from pathlib import Path

import pytest

from kenotron.prepare.tokenize import TokenizeOptions, tokenize
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.tokenizer import load_tokenizer
from support.hub_cache import made_documents, offline_environment
from support.nursery import Nursery
from support.tiny_llamas import hf_llama, save_hf, small_tokenizer

SMALL = (
    "tokens.sequence_length=32",
    "tokens.micro_batch_size=2",
    "tokens.train_steps=3",
    "tokens.val_check_interval=2",
)


def kenotron(nursery: Nursery, *arguments: str, folder: Path, home: Path) -> str:
    """What the command prints, in a process that reads no hub."""
    done = nursery.run(*arguments, folder=folder, env=offline_environment(home))
    assert done.code == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def train(nursery: Nursery, name: str, folder: Path, home: Path, *overrides: str) -> list[dict[str, float]]:
    """``kenotron init name > my.yaml; kenotron train my.yaml …``; the run's metrics."""
    (folder / "my.yaml").write_text(kenotron(nursery, "init", name, folder=folder, home=home))
    kenotron(nursery, "train", "my.yaml", *overrides, folder=folder, home=home)
    (file,) = folder.glob("logs/*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def validated(steps: list[dict[str, float]]) -> list[float]:
    return [step["iteration"] for step in steps if step.get("val_loss")]


def test_text_folder_on_a_folder_of_two_files(nursery: Nursery, tmp_path: Path) -> None:
    generator = random.Random(2)
    (tmp_path / "texts").mkdir()
    for number in range(2):
        words = [generator.choice(["sea", "ship", "whale", "captain", "night"]) for _ in range(400)]
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(words))
    steps = train(nursery, "text-folder", tmp_path, tmp_path, "model.model_config.num_hidden_layers=1", *SMALL)
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    assert validated(steps) == [2, 3]
    assert all(step["val_bits_per_byte"] > 0 for step in steps[1:])
    said = kenotron(nursery, "generate", "checkpoints/text-folder/3", "--prompt", "sea", folder=tmp_path, home=tmp_path)
    assert said.startswith("sea")


@pytest.mark.slow
def test_tokens_on_files_that_data_tokenize_wrote(nursery: Nursery, tmp_path: Path) -> None:
    texts = made_documents(40)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_byte_level_bpe(texts, 400).save(tmp_path / "my-tokenizer")
    tokenizer = load_tokenizer(tmp_path / "my-tokenizer")
    tokenize([str(tmp_path / "texts.jsonl")], tokenizer, tmp_path / "tokens", TokenizeOptions())
    steps = train(nursery, "tokens", tmp_path, tmp_path, "model.model_config.num_hidden_layers=1", *SMALL)
    assert validated(steps) == [2, 3]


@pytest.mark.slow
def test_hf_finetune_on_a_folder_of_hugging_face(nursery: Nursery, tmp_path: Path) -> None:
    save_hf(hf_llama(), tmp_path / "model", small_tokenizer())
    (tmp_path / "rows").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in made_documents(5)]
    (tmp_path / "rows" / "train.jsonl").write_text("".join(lines))
    folders = ["tokenizer.tokenizer_name_or_path=model", "model.init_method.path=model", "model.model_config.hf=model"]
    data = "data_stages.0.data.dataset.hf_dataset_or_datasets=rows"
    steps = train(nursery, "hf-finetune", tmp_path, tmp_path / "home", *folders, data, *SMALL)
    assert validated(steps) == [2, 3]
    assert (tmp_path / "checkpoints" / "hf-finetune" / "3").is_dir()


@pytest.mark.slow
def test_tiny_llama_as_it_is_on_the_hubs_files(nursery: Nursery, tmp_path: Path, hub_home: Path) -> None:
    steps = train(nursery, "tiny-llama", tmp_path, hub_home)
    assert len(steps) == 15
    assert steps[-1]["lm_loss"] < steps[0]["lm_loss"]
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "tiny-llama").iterdir() if path.is_dir()) == [
        "10",
        "15",
    ]
