"""Tokens on disk, in the formats people have. A format's module is imported when a file of it is opened.

    for file in open_token_files("data/fineweb", "data.dataset_folder"):
        file.tokens[:10], file.ends

A folder may be nested; its files come in order of path. A file's suffix says what it is, and its content must match.
"""

from importlib import import_module
from pathlib import Path

from kenotron.config.errors import InputError, no_such_path
from kenotron.data.formats.token_file import TokenFile, integer_dtype
from kenotron.storage.paths import AnyPath, as_path, walk

SUFFIX = ".ds"
"""Of the files that are written: datatrove's, which hold the ends of documents and a loss mask."""

UNFINISHED, PLAN, MANIFEST = ".unfinished", "plan.json", "manifest.json"
"""A folder in that of a tokenization, with a file that says what is being done; and what says that it is done."""

EXPECTED = ".ds, .bin with .idx, litdata's index.json, .npy, raw .bin"


def open_token_files(path: str | AnyPath, where: str, dtype: str | None = None) -> list[TokenFile]:
    """The token files at `path`, a file or a folder, here or on another machine, in order of path.

    `dtype` is the type of the ids in files that do not say, ``uint16`` for example. `where` names the config's key or
    the command's argument in errors.

    Raises InputError: no such file, none in the folder, files of several formats, an invalid file.
    """
    given = integer_dtype(dtype, where) if dtype else None
    files: list[TokenFile] = []
    for found, name in find_token_files(path, where):
        files += import_module(f".{name}", __name__).open_file(found, where, given)
    return files


def find_token_files(path: str | AnyPath, where: str) -> list[tuple[AnyPath, str]]:
    """The token files at `path` and their formats, in order of path; nothing is opened.

    Raises InputError: no such file or folder, none in it, files of several formats.
    """
    path = as_path(path)
    if not path.exists():
        raise no_such_path(where, path)
    files = set(filter(None, map(_recognised, walk(path) if path.is_dir() else [path])))
    found = sorted(files, key=lambda each: str(each[0]).split("/"))  # by folders: the same order in a URL
    if not found:
        none = f"no token file in {path}" if path.is_dir() else f"{path} is not a token file"
        raise InputError(f"{where}: {none}; expected {EXPECTED}")
    for folder in {each.parent for each, _ in found if isinstance(each, Path)}:
        if (folder / UNFINISHED / PLAN).exists() and not (folder / MANIFEST).exists():
            raise InputError(f"{where}: {folder} is not complete: run the same kenotron data tokenize command again")
    formats = sorted({name for _, name in found})
    if len(formats) > 1:
        raise InputError(
            f"{where}: {path} holds files of several formats ({', '.join(formats)}); name a file or folder of one"
        )
    return found


def is_one_file(output: Path) -> bool:
    """Whether `output` names one file of tokens, not a folder. Raises InputError: a file that is only read."""
    if output.suffix in (".bin", ".npy"):
        raise InputError(f"--output: expected a folder, or a file that ends in {SUFFIX}, found {output}")
    return output.suffix == SUFFIX


def _recognised(file: AnyPath) -> tuple[AnyPath, str] | None:
    """The file to open and its format, or None for a file that does not hold tokens."""
    if (lower := file.suffix.lower()) != file.suffix and lower in (".ds", ".idx", ".npy", ".bin"):
        raise InputError(f"{file}: expected the suffix {lower} in lower case, found {file.suffix}: rename the file")
    if file.suffix == ".ds":
        return file, "datatrove"
    if file.name == "index.json":
        return file, "litdata"
    if file.suffix == ".idx":  # its .bin may be missing, which is reported when it is opened
        return file.with_suffix(".bin"), "megatron"
    if file.suffix == ".npy":
        return file, "numpy"
    if file.suffix == ".bin":
        if file.with_suffix(".idx").exists():
            return file, "megatron"
        return (file, "numpy") if not file.with_name("index.json").exists() else None  # a chunk of litdata's
    return None
