"""Open files of tokens in common formats. A format's module is imported when a file of it is opened.

    for file in open_token_files("data/fineweb", "data.dataset_folder"):
        file.tokens[:10], file.ends

Folders may be nested; files are ordered by path. A file's suffix tells its format, and its content must match.
"""

from importlib import import_module
from pathlib import Path

from kenotron.config.errors import InputError, no_such_path
from kenotron.data.formats.token_file import TokenFile, integer_dtype
from kenotron.storage.paths import AnyPath, as_path, walk

SUFFIX = ".ds"
"""Suffix of the files that Kénotron writes, in datatrove's format, with ends of documents and a loss mask."""

UNFINISHED, PLAN, MANIFEST = ".unfinished", "plan.json", "manifest.json"
"""Names in a tokenization's folder: the folder of unfinished work, its plan, and the manifest of finished work."""

EXPECTED = ".ds, .bin with .idx, litdata's index.json, .npy, raw .bin"


def open_token_files(path: str | AnyPath, where: str, dtype: str | None = None) -> list[TokenFile]:
    """Return the token files at `path`, a file or a folder, local or remote, in order of path.

    `dtype` is the type of the ids in files that do not record it, ``uint16`` for example. `where` names the config's
    key or the command's argument in errors.

    Raises InputError for a missing or invalid file, a folder without token files, and files of several formats.
    """
    id_type = integer_dtype(dtype, where) if dtype else None
    files: list[TokenFile] = []
    for found, name in find_token_files(path, where):
        files += import_module(f".{name}", __name__).open_file(found, where, id_type)
    return files


def find_token_files(path: str | AnyPath, where: str) -> list[tuple[AnyPath, str]]:
    """Return the token files at `path` and their formats, in order of path, without opening them.

    Raises InputError for a missing file or folder, a folder without token files, and files of several formats.
    """
    path = as_path(path)
    if not path.exists():
        raise no_such_path(where, path)
    files = set(filter(None, map(_recognised, walk(path) if path.is_dir() else [path])))
    found = sorted(files, key=lambda each: str(each[0]).split("/"))  # by path components: the same order as in a URL
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
    """Return whether `output` is a file of tokens, not a folder. Raises InputError for formats that are only read."""
    if output.suffix in (".bin", ".npy"):
        raise InputError(f"--output: expected a folder, or a file that ends in {SUFFIX}, found {output}")
    return output.suffix == SUFFIX


def _recognised(file: AnyPath) -> tuple[AnyPath, str] | None:
    """Return the file to open and its format, or None for a file that holds no tokens."""
    if (lower := file.suffix.lower()) != file.suffix and lower in (".ds", ".idx", ".npy", ".bin"):
        raise InputError(f"{file}: expected the suffix {lower} in lower case, found {file.suffix}: rename the file")
    if file.suffix == ".ds":
        return file, "datatrove"
    if file.name == "index.json":
        return file, "litdata"
    if file.suffix == ".idx":  # a missing .bin is reported when it is opened
        return file.with_suffix(".bin"), "megatron"
    if file.suffix == ".npy":
        return file, "numpy"
    if file.suffix == ".bin":
        if file.with_suffix(".idx").exists():
            return file, "megatron"
        return (file, "numpy") if not file.with_name("index.json").exists() else None  # a chunk of litdata's
    return None
