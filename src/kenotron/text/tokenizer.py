"""Convert text to token ids and back, only with the `tokenizers` library if there is a tokenizer.json.

    tokenizer = load_tokenizer("gpt2")
    tokenizer.encode("def main")      [4299, 1388]
    tokenizer.decode([4299, 1388])    'def main'

A name is a folder, a tokenizer.json, or a Hugging Face repository. A repository is looked up in the local hub cache,
and only missing files are fetched from the hub (never, if one of HF_HUB_OFFLINE, HF_DATASETS_OFFLINE,
TRANSFORMERS_OFFLINE is set). `transformers`, which takes a second to import, is imported only if there is no
tokenizer.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kenotron.config.errors import InputError, is_a_path
from kenotron.config.remote_data import is_remote
from kenotron.storage.hub import configure_hub, first_line, hub_file, read_json

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
TEMPLATES = "additional_chat_templates"  # a folder with a file for every named chat template except the default
GENERATION = "generation_config.json"
KEEP_ALL = {"ByteLevel", "Split", "Digits", "Punctuation", "UnicodeScripts", "Sequence"}
"""Pre-tokenizers that lose no byte of a text, unless they remove their matches."""


class TextTokenizer:
    """A tokenizer with the interface that training and generation need.

    `vocab_size` is the largest id plus one. `hash` depends on the content: equal hashes mean equal ids.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path | None = None) -> None:
        self.backend = backend
        self.folder = folder
        self.config = config
        self.name = str(folder) if folder else "tokenizer"
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        self.eos_token_id = self._special("eos_token")
        self.bos_token_id = self._special("bos_token")
        self.pad_token_id = self._special("pad_token")
        self._json = backend.to_str()
        self.hash = hashlib.blake2b(self._json.encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """Return the whole tokenizer as the text of a tokenizer.json."""
        return self._json

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of every text, with the special tokens that the tokenizer adds itself."""
        return library_ids(self.backend, texts, special=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text, as `encode_batch`."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of the ids."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    @property
    def is_byte_level(self) -> bool:
        """Whether every token stands for fixed bytes of the text."""
        from tokenizers.pre_tokenizers import ByteLevel

        spec = json.loads(self._json)
        before = spec["pre_tokenizer"] or {}
        parts = [before, *before.get("pretokenizers", [])]
        whole = spec["normalizer"] is None and (spec["decoder"] or {}).get("type") == "ByteLevel"
        adds_space = any(part.get("type") == "ByteLevel" and part.get("add_prefix_space") for part in parts)
        drops = any(part.get("type") not in KEEP_ALL or part.get("behavior") == "Removed" for part in parts if part)
        trims = any(added["lstrip"] or added["rstrip"] for added in spec["added_tokens"])
        every_byte = set(ByteLevel.alphabet()) <= self.backend.get_vocab(with_added_tokens=False).keys()
        return whole and every_byte and not (adds_space or drops or trims)

    def token_bytes(self) -> NDArray[np.int64] | None:
        """Return every token's length in UTF-8 bytes, ``[vocab_size]``, or None if the tokenizer is not byte-level.

        A byte-level vocabulary has each byte as one character. Tokens that are added before a text have no bytes; other
        special tokens have the bytes of their names, because a text may contain them.
        """
        if not self.is_byte_level:
            return None
        around = {self.bos_token_id, *self.encode("")} - {self.eos_token_id}
        length = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self.backend.get_vocab(with_added_tokens=False).items():
            length[number] = len(token)
        for number, added in self.backend.get_added_tokens_decoder().items():
            length[number] = 0 if number in around else len(added.content.encode())
        return length

    def save(self, folder: str | Path) -> None:
        """Write the files from which `transformers.AutoTokenizer` and `load_tokenizer` load it again."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self.folder is not None:
            for name in TOKENIZER_FILES:
                if (self.folder / name).is_file() and not (folder / name).exists():
                    shutil.copyfile(self.folder / name, folder / name)
            if (self.folder / TEMPLATES).is_dir():
                shutil.copytree(self.folder / TEMPLATES, folder / TEMPLATES, dirs_exist_ok=True)
        if not (folder / "tokenizer.json").exists():
            (folder / "tokenizer.json").write_text(self._json, encoding="utf-8")
        if not (folder / "tokenizer_config.json").exists():
            config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self.config
            (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

    def _special(self, key: str) -> int | None:
        token = self.config.get(key)
        text = token.get("content") if isinstance(token, dict) else token
        return self.backend.token_to_id(text) if isinstance(text, str) else None


def library_ids(backend: tokenizers.Tokenizer, texts: Sequence[str], special: bool) -> list[list[int]]:
    """Return the ids of every text, with `special` also the tokens that the tokenizer adds around a text.

    Raises InputError for a text that the tokenizer has no ids for.
    """
    with encoding_errors():
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=special)]


@contextmanager
def encoding_errors() -> Iterator[None]:
    """Turn errors of `tokenizers`, which are all plain Exceptions, into an InputError of one line."""
    try:
        yield
    except Exception as error:
        raise InputError(f"tokenizer: cannot encode a text: {first_line(error)}") from None


def end_of_text(tokenizer: TextTokenizer | None, architecture: Any) -> int:
    """Return the token that ends a text in training, generation and exports: the tokenizer's or else the config's."""
    eos = tokenizer.eos_token_id if tokenizer else None
    return architecture.eos_token_id if eos is None else eos


def check_tokens(known: TextTokenizer | None, tokenizer: TextTokenizer | None, what: str) -> None:
    """Raise InputError if the two tokenizers differ in tokens or ids; do nothing if one is None."""
    if known is not None and tokenizer is not None and known.backend.get_vocab() != tokenizer.backend.get_vocab():
        raise InputError(f"{what} was trained with another tokenizer than the run's")


def tokenizer_in(folder: Path) -> Path | None:
    """Return `folder` if there is a file of a tokenizer in it, else None."""
    return folder if any((folder / name).is_file() for name in TOKENIZER_FILES) else None


def load_tokenizer(name_or_path: str | Path, revision: str | None = None) -> TextTokenizer:
    """Load from a folder, a tokenizer.json, or a Hugging Face repository.

    Raises InputError if it is missing or unreadable, or the hub is unreachable.
    """
    if is_remote(name_or_path):
        raise InputError(
            "tokenizer.tokenizer_name_or_path: expected a folder or tokenizer.json on this machine, or a name of the "
            f"Hugging Face hub, found {name_or_path}; download it first"
        )
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return _read(path, path.parent)
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return _read(path / "tokenizer.json", path)
        if tokenizer_in(path) is None:
            near = f"; did you mean {path}/tokenizer?" if (path / "tokenizer" / "tokenizer.json").is_file() else ""
            raise InputError(
                f"tokenizer.tokenizer_name_or_path: the folder {path} has no tokenizer; expected tokenizer.json, or "
                f"other files that `transformers` reads, in it{near}"
            )
        converted = _from_transformers(str(path), None)
        converted.folder = path
        return converted
    if is_a_path(name_or_path):
        raise InputError(f"tokenizer.tokenizer_name_or_path: no such file or folder: {name_or_path}")
    name = str(name_or_path)
    key = "tokenizer.tokenizer_name_or_path"
    file = hub_file(name, "tokenizer.json", revision, key)
    if file is None:
        return _from_transformers(name, revision)
    for extra in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", GENERATION):
        hub_file(name, extra, revision, key, optional=True)
    tokenizer = _read(file, file.parent)
    tokenizer.name = name
    return tokenizer


def _read(file: Path, folder: Path) -> TextTokenizer:
    import tokenizers

    quiet_parallelism()
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for everything
        why = first_line(error)
        raise InputError(f"tokenizer: {file} is not a tokenizer.json that `tokenizers` reads: {why}") from None
    if not backend.get_vocab_size(with_added_tokens=True):
        raise InputError(f"tokenizer: {file} has no tokens")
    backend.no_truncation()
    backend.no_padding()
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).exists():
            config |= read_json(folder / name)
    return TextTokenizer(backend, config, folder)


def _from_transformers(name: str, revision: str | None) -> TextTokenizer:
    """Convert a tokenizer in other files than tokenizer.json by `transformers`."""
    configure_hub()
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise InputError(f"tokenizer.tokenizer_name_or_path: cannot load '{name}': {first_line(error)}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError(
            f"tokenizer.tokenizer_name_or_path: '{name}' has no fast (tokenizers) version, which is needed here"
        )
    config = {key: str(token) for key, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    loaded = TextTokenizer(backend, config)
    loaded.name = name
    return loaded


def quiet_parallelism() -> None:
    """Turn off `tokenizers`' threads, so that a later fork of this process neither warns nor deadlocks."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def all_cores() -> Iterator[None]:
    """Within this block `tokenizers` uses every core."""
    quiet_parallelism()
    before = os.environ["TOKENIZERS_PARALLELISM"]
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = before
