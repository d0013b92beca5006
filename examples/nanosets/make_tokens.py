"""Make two folders of `.ds` files from text that every machine has, the sources of Python's own library.

    tokens/code/*.ds     whole modules               tokens/tokenizer/    a byte-level BPE trained on both
    tokens/prose/*.ds    their docstrings

Each document ends with the tokenizer's end-of-text token. Files like these come from datatrove too.
"""

import ast
import json
from pathlib import Path

import numpy as np

from kenotron.data.formats.datatrove import TokenWriter
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.tokenizer import TextTokenizer

FOLDER = Path("tokens")
PACKAGES = ("json", "email", "http", "logging", "unittest")


def read_texts() -> dict[str, list[str]]:
    """Documents of each folder."""
    library = Path(json.__file__).parent.parent
    code = [file.read_text(encoding="utf-8") for name in PACKAGES for file in sorted((library / name).glob("*.py"))]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for text in code for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    return {"code": code, "prose": [text for node in nodes if (text := ast.get_docstring(node))]}


def write_files(folder: Path, texts: list[str], tokenizer: TextTokenizer, files: int = 2) -> None:
    """`texts` in so many `.ds` files."""
    for number in range(files):
        path = folder / f"{number:05}.ds"
        with TokenWriter(path, np.dtype("uint16"), str(FOLDER / "tokenizer")) as writer:
            for ids in tokenizer.encode_batch(texts[number::files]):
                document = np.array([*ids, tokenizer.eos_token_id])
                writer.write(document, np.array([len(document)]))
            print(f"{path}: {writer.documents:,} documents, {writer.tokens:,} tokens")


def main() -> None:
    texts = read_texts()
    tokenizer = train_byte_level_bpe([*texts["code"], *texts["prose"]], 512)
    tokenizer.save(FOLDER / "tokenizer")
    for name, documents in texts.items():
        write_files(FOLDER / name, documents, tokenizer)


if __name__ == "__main__":
    main()
