"""A Hugging Face home as it lies on disk after a dataset and a tokenizer have been fetched.

    home/hub/datasets--stas--openwebtext-10k/refs/main, snapshots/<commit>/data/train-*.parquet
    home/hub/models--robot-test--dummy-tokenizer-wordlevel/refs/main, snapshots/<commit>/tokenizer.json
    home/datasets/stas___openwebtext-10k/default/0.0.0/<hash>/*.arrow      (what `datasets` prepared)

With ``HF_HOME=home HF_HUB_OFFLINE=1`` in the environment of a fresh process,
``datasets.load_dataset("stas/openwebtext-10k")`` and the tokenizer load, and no socket is needed.
"""

import json
import random
from pathlib import Path

DATASET = "stas/openwebtext-10k"
TOKENIZER = "robot-test/dummy-tokenizer-wordlevel"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VOCABULARY = ["[UNK]", "<s>", "</s>", "[PAD]"] + [f"word{number}" for number in range(196)]


def made_documents(count: int = 400, words: int = 120, seed: int = 0) -> list[str]:
    """DocumentSource of words that the tokenizer knows, a little predictable."""
    generator = random.Random(seed)
    known = VOCABULARY[4:]
    documents = []
    for _ in range(count):
        at = generator.randrange(len(known))
        text = []
        for _ in range(words):
            at = (at + generator.choice([1, 1, 1, 7])) % len(known)
            text.append(known[at])
        documents.append(" ".join(text))
    return documents


def offline_environment(home: Path) -> dict[str, str]:
    """Environment variables of a process that reads `home` and nothing else."""
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}


def make_hub_cache(home: Path, documents: list[str] | None = None, prepared: bool = True) -> Path:
    """Fill `home`; with `prepared`, also with the copy that `datasets` keeps for itself. Returns `home`."""
    texts = made_documents() if documents is None else documents
    make_dataset_repository(home, DATASET, texts)
    if prepared:
        make_prepared_dataset(home, DATASET, texts)
    make_tokenizer_repository(home, TOKENIZER)
    return home


def repository(home: Path, kind: str, name: str) -> Path:
    """The snapshot folder of a repository in the hub cache, with its ref."""
    root = home / "hub" / f"{kind}s--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    return snapshot


def make_dataset_repository(home: Path, name: str, documents: list[str]) -> Path:
    """One parquet file of the split `train`."""
    import pyarrow
    from pyarrow import parquet

    snapshot = repository(home, "dataset", name)
    splits = "configs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n"
    (snapshot / "README.md").write_text(f"---\n{splits}---\n")
    (snapshot / "data").mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table({"text": documents}), snapshot / "data" / "train-00000-of-00001.parquet")
    return snapshot


def make_prepared_dataset(home: Path, name: str, documents: list[str]) -> Path:
    """The arrow files that ``load_dataset(name)`` left."""
    from datasets import DatasetInfo, Features, SplitDict, SplitInfo, Value
    from datasets.arrow_writer import ArrowWriter

    namespace, short = name.split("/")
    folder = home / "datasets" / f"{namespace}___{short}" / "default" / "0.0.0" / COMMIT
    folder.mkdir(parents=True, exist_ok=True)
    features = Features({"text": Value("string")})
    with ArrowWriter(path=str(folder / f"{short}-train.arrow"), features=features) as writer:
        for document in documents:
            writer.write({"text": document})
        rows, size = writer.finalize()
    split = SplitInfo("train", num_bytes=size, num_examples=rows, dataset_name=short)
    names = {"builder_name": "parquet", "dataset_name": short, "config_name": "default", "version": "0.0.0"}
    splits = SplitDict({"train": split}, dataset_name=short)
    DatasetInfo(features=features, splits=splits, **names).write_to_directory(str(folder))
    return folder


def make_tokenizer_repository(home: Path, name: str) -> Path:
    """A word-level tokenizer of 200 words that has no end-of-text token."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    snapshot = repository(home, "model", name)
    vocabulary = {word: number for number, word in enumerate(VOCABULARY)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[UNK]"])
    backend.save(str(snapshot / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(config))
    (snapshot / "special_tokens_map.json").write_text(json.dumps({"unk_token": "[UNK]"}))
    # What the hub answered "no such file" to; without it transformers asks again.
    missing = snapshot.parents[1] / ".no_exist" / COMMIT
    missing.mkdir(parents=True, exist_ok=True)
    (missing / "config.json").touch()
    return snapshot
