"""Sources that read folders of tokenized files: nanotron's Nanoset keys, `tokens`, and mix files.

    dataset_folder: [a, b]               ┐
    dataset_folder: {a: 3, b: 1}         ├─▶ specs ─▶ [(share, TokenPath), …] ─open─▶ TokenFiles
    tokens: mix.json    {"a": 3, "b": 1} ┘

The last `tokens.val_fraction` of the windows of a folder (`token_folder.py`) are held out.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from kenotron.config.data_stages import NanosetDataset, TokenFilesDataset, as_list
from kenotron.config.errors import InputError, counted, first_of
from kenotron.config.remote_data import RemoteData, is_remote
from kenotron.data.formats import TokenFile, open_token_files
from kenotron.data.manifest import manifests_beside
from kenotron.data.order import permute
from kenotron.data.source import Opening, RunSettings, SampleRange, SourceSpec, TokenSource, held_out_samples
from kenotron.data.sources.packed_rows import PackedRows
from kenotron.data.sources.token_folder import TokenFolder, count_windows, window_step
from kenotron.kernels.hashing import derive_key
from kenotron.storage.paths import AnyPath, as_path, one_spelling
from kenotron.text.tokenizer import TextTokenizer

# ---- from the config ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenPath(SourceSpec):
    """One path of `dataset_folder` or `tokens` (`key`), with its settings."""

    key: str
    path: str
    dtype: str | None = None
    read_path: str | None = None
    max_tokens: int | None = None
    shuffle_files: bool = False
    return_positions: bool = True
    tokenizer_name: str | None = None
    vocab_size: int | None = None
    packing: str = "windows"

    splits_files = True

    @property
    def title(self) -> str:
        """The path."""
        return self.path

    def identity(self) -> dict[str, object]:
        """Return the normalized path and how it is read."""
        return {
            "path": one_spelling(self.path),
            "dtype": self.dtype,
            "max_tokens": self.max_tokens,
            "shuffle_files": self.shuffle_files,
            "packing": self.packing,
        }

    def paths(self) -> tuple[str, Sequence[str]]:
        """Return the key and the path."""
        return self.key, [self.path]

    def check_files(self) -> None:
        """Open the files. Raises InputError if one is damaged or missing."""
        open_token_files(self.path, self.key, self.dtype)

    def open(self, opening: Opening) -> TokenSource:
        """Open the folder, check that it fits the run, and split it."""
        run, config = opening.run, opening.run.config
        folder = open_folder(self, opening.sequence_length, run.vocab_size, config.general.seed, config.remote_data)
        check_fit(folder, self, run)
        return TokenFiles(folder, self, run)


def specs(section: TokenFilesDataset) -> list[tuple[float | str, TokenPath]]:
    """Return the sources of the key `tokens`. Raises InputError if a mix file cannot be read."""
    paths = section.tokens
    if isinstance(paths, str) and paths.endswith(".json"):
        paths = read_mix(as_path(paths))
    shares = paths.items() if isinstance(paths, dict) else [(path, None) for path in as_list(paths)]
    found = [
        (share, TokenPath("dataset.tokens", path, section.token_dtype, packing=section.packing))
        for path, share in shares
    ]
    return _with_shares(found)


def nanoset_specs(section: NanosetDataset) -> list[tuple[float | str, TokenPath]]:
    """Return the sources of the key `dataset_folder`."""
    nothing = [None] * len(section.folders)
    copies = nothing if section.dataset_read_path is None else as_list(section.dataset_read_path)
    lists = (section.folders, section.dataset_weights or nothing, copies, section.dataset_max_tokens or nothing)
    size = section.token_size_in_bytes
    found = []
    for folder, share, copy, cap in zip(*lists, strict=True):
        path = TokenPath(
            key="dataset.dataset_folder",
            path=folder,
            dtype=f"uint{8 * size}" if size else None,
            read_path=copy,
            max_tokens=cap,
            shuffle_files=section.shuffle_files,
            return_positions=section.return_positions,
            tokenizer_name=section.tokenizer_name,
            vocab_size=section.vocab_size,
            packing=section.packing,
        )
        found.append((share, path))
    return _with_shares(found)


def _with_shares(found: Sequence[tuple[float | None, TokenPath]]) -> list[tuple[float | str, TokenPath]]:
    """Give paths without a share a share by their number of samples."""
    unknown: float | str = "tokens" if len(found) > 1 else 1.0
    return [(unknown if share is None else share, path) for share, path in found]


MIX = TypeAdapter(Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)])


def read_mix(file: AnyPath) -> dict[str, float]:
    """Read a mix ``{path: weight}`` from a JSON file; paths may be relative to the file's folder."""
    try:
        text = file.read_text(encoding="utf-8")
        MIX.validate_json(text, strict=True)
    except OSError as error:
        raise InputError(f"dataset.tokens: cannot read {file}: {error.strerror or 'no such file'}") from None
    except ValidationError as error:
        first = error.errors()[0]
        at = "".join(f", {each!r}" for each in first["loc"])
        raise InputError(
            f"dataset.tokens: {file}{at}: expected a map path → weight above 0: {first['msg']}, found "
            f"{first['input']!r:.40}"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"dataset.tokens: {file} is not UTF-8 at byte {error.start}") from None
    mix: dict[str, float] = {}
    pairs = json.loads(text, object_pairs_hook=list)  # a dict would keep only the last of equal keys
    for path, weight in pairs:
        absolute = path if is_remote(path) else str(file.parent / os.path.expanduser(path))
        if absolute in mix:
            raise InputError(f"dataset.tokens: {file}: {path!r} is there twice; expected each path once")
        mix[absolute] = weight
    return mix


# ---- open --------------------------------------------------------------------------------------------------


class TokenFiles(SampleRange):
    """The training samples, windows or rows of whole documents as `spec` says, and the held-out windows.

    The held-out tokens are the same for every sequence length and packing of a stage (`training_ends`). `max_tokens`
    applies only to training, so that no stage trains on tokens that another validates on.
    """

    def __init__(self, folder: TokenFolder, spec: TokenPath, run: RunSettings) -> None:
        length, files = folder.sequence_length, folder.token_files
        self.folder, self._ends = folder, training_ends(folder, run.first_sequence_length, run.val_fraction)
        border = sum(count_windows(end, file.format, length) for file, end in zip(files, self._ends))
        held_out = SampleRange(folder, border, len(folder))
        whole: TokenFolder | PackedRows = folder
        if spec.packing == "best_fit":
            parts = [_documents_before(file, end) for file, end in zip(files, self._ends)]
            whole = PackedRows(folder.name, parts, length, run.padding, run.report, folder.check)
            border = len(whole)
        if spec.max_tokens is not None:
            formats = ["datatrove"] if isinstance(whole, PackedRows) else [file.format for file in files]
            border = min(border, max(count_windows(spec.max_tokens, each, length) for each in formats))
        super().__init__(whole, 0, border, held_out)
        self.is_remote = folder.is_remote
        self.size_in_bytes = sum(file.tokens.nbytes for file in files)

    @property
    def fingerprint(self) -> str:
        """Return a key of the folder and of its packing."""
        return f"{self.folder.fingerprint} best_fit" if isinstance(self.whole, PackedRows) else self.folder.fingerprint

    def training_ends(self) -> Sequence[tuple[str, str, int]]:
        """Return (real path, name, number of training tokens) of every file."""
        return [(_real(file), str(file.path), end) for file, end in zip(self.folder.token_files, self._ends)]

    def describe(self) -> str:
        """Return documents, tokens and samples, for the console."""
        packing = f"; {self.whole.describe()}" if isinstance(self.whole, PackedRows) else ""
        samples = f"{counted(len(self), 'sample')}, {len(self.held_out):,} held out{packing}"
        return f"{self.name}: {self.folder.describe()}, {samples}"

    def found(self) -> str:
        """Return documents and tokens, for errors."""
        held = len(self.held_out)
        return self.folder.describe() + (f" (and {counted(held, 'sample')} held out)" if held else "")


def _real(file: TokenFile) -> str:
    return str(file.path) if is_remote(file.path) else os.path.realpath(str(file.path))


def open_folder(
    spec: TokenPath, sequence_length: int, vocab_size: int, seed: int, remote: RemoteData | None = None
) -> TokenFolder:
    """Open one path; `seed` is for `shuffle_files`, `vocab_size` is the model's, `remote` for remote files.

    Raises InputError as `formats.open_token_files` does, and if format, width or vocabulary are not the config's, or a
    local copy has another size.
    """
    root = as_path(spec.path, remote)
    files = open_token_files(root, spec.key, spec.dtype)
    if spec.key == "dataset.dataset_folder":
        for file in files:
            if file.format != "datatrove":
                raise InputError(
                    f"{spec.key}: expected .ds files, found {file.path} ({file.format}); "
                    f"other formats are read by the key 'tokens'"
                )
    if spec.vocab_size is not None and spec.vocab_size > vocab_size:
        raise InputError(f"dataset.vocab_size: {spec.vocab_size} is above model.model_config.vocab_size = {vocab_size}")
    for file in files if spec.dtype is None and vocab_size > 1 << 16 else ():
        if file.format == "datatrove" and file.ends is None and file.tokenizer is None:  # read as two bytes per token
            raise InputError(
                f"{file.path}: nothing says whether a token has 2 or 4 bytes, and it may well be 4: give "
                f"dataset.token_size_in_bytes (or token_dtype beside 'tokens')"
            )
    if spec.read_path is not None:
        if is_remote(spec.read_path):
            raise InputError(f"dataset.dataset_read_path: expected a folder on this machine, found {spec.read_path}")
        is_folder = root.is_dir()
        files = [_local_copy(file, root if is_folder else root.parent, Path(spec.read_path)) for file in files]
    if spec.shuffle_files:
        keys = np.full(len(files), derive_key("files", seed), dtype=np.uint64)
        files = [files[i] for i in permute(np.arange(len(files)), len(files), keys)]
    return TokenFolder(
        spec.path, files, sequence_length, min(vocab_size, spec.vocab_size or vocab_size), spec.return_positions
    )


def _local_copy(file: TokenFile, folder: Any, copies: Path) -> TokenFile:
    """Return `file` of `folder`, with its tokens read from the copy in `copies` if there is one."""
    copy = copies / file.path.relative_to(folder)
    if not copy.is_file():
        return file
    size = copy.stat().st_size
    if size != file.tokens.nbytes:
        raise InputError(
            f"dataset.dataset_read_path: {copy} has {size:,} bytes, but {file.path} has {file.tokens.nbytes:,}"
        )
    return replace(file, path=copy, tokens=np.asarray(np.memmap(copy, dtype=file.tokens.dtype, mode="r")))


def training_ends(folder: TokenFolder, length: int, val_fraction: float) -> list[int]:
    """Return each file's number of tokens before the held-out ones, the last `val_fraction` of all files' windows.

    They are counted in windows of the first stage's `length`, which every validation reads.
    """
    counts = [count_windows(len(file.tokens), file.format, length) for file in folder.token_files]
    left = sum(counts) - held_out_samples(sum(counts), val_fraction)
    ends = [0] * len(counts)
    for number, (file, count) in enumerate(zip(folder.token_files, counts)):
        if left < count:  # up to the last token of the last window trained on
            ends[number] = (left - 1) * window_step(file.format, length) + length + 1 if left else 0
            break
        ends[number], left = len(file.tokens), left - count
    return ends


def _documents_before(file: TokenFile, end: int) -> TokenFile:
    """Return the file with only its documents up to the token `end`, where the last one may be cut."""
    if file.ends is None or end == len(file.tokens):
        return file
    whole = file.ends[: np.searchsorted(file.ends, np.uint64(end), side="right")]
    is_cut = end > (whole[-1] if len(whole) else 0)
    return replace(file, ends=np.append(whole, np.uint64(end)) if is_cut else whole)


def check_fit(folder: TokenFolder, spec: TokenPath, run: RunSettings) -> None:
    """Warn, in one line each, if a tokenizer has another name, or documents to be masked have unknown ends.

    Raises InputError if ids are too narrow for the run's tokenizer, or a manifest has another tokenizer's hash.
    """
    files, tokenizer = folder.token_files, run.tokenizer
    if tokenizer is not None:
        _check_manifests(folder, tokenizer)
    copies = spec.read_path and Path(spec.read_path).expanduser()
    if copies and not any(Path(str(file.path)).is_relative_to(copies) for file in files):
        run.report(
            f"warning: {copies} (dataset_read_path) has none of the files of {folder.name}: the originals are read"
        )
    unknown = [str(file.path) for file in files if file.ends is None]
    if run.config.model.document_masking and spec.return_positions and unknown:
        run.report(
            f"warning: {first_of(unknown)} does not have the ends of documents: under model.document_masking each of "
            "its sequences counts as one document"
        )
    for file in files:
        most = 1 << (8 * file.tokens.itemsize)
        if file.format == "datatrove" and tokenizer is not None and tokenizer.vocab_size > most:
            raise InputError(
                f"{file.path}: tokens of {file.tokens.itemsize} bytes are not those of the run's tokenizer "
                f"{tokenizer.name}, which has {tokenizer.vocab_size:,} entries"
            )
    expected = run.config.tokenizer.tokenizer_name_or_path or spec.tokenizer_name
    made_with = dict.fromkeys([*(file.tokenizer for file in files), spec.tokenizer_name])
    for name in filter(None, made_with):
        if expected is not None and _short(name) != _short(expected):
            run.report(
                f"warning: {folder.name} was tokenized with '{name}', and the tokenizer of the run is '{expected}'"
            )


def _check_manifests(folder: TokenFolder, run: TextTokenizer) -> None:
    """Raise InputError if a manifest of `kenotron data` beside the files has the hash of another tokenizer."""
    for place, made in manifests_beside(folder.token_files):
        found = made.get("tokenizer_hash")
        if found not in (None, run.hash):
            raise InputError(
                f"{place}: its tokens were made with {made.get('tokenizer')} (hash {found}), and the tokenizer of the "
                f"run is {run.name} (hash {run.hash}): give that one as tokenizer.tokenizer_name_or_path (or, if ids "
                f"mean the same in both, take tokenizer_hash out of the manifest)"
            )


def _short(name: str) -> str:
    """Return a tokenizer's name without its folder."""
    path = Path(name)
    return (path.parent if path.name == "tokenizer.json" else path).name
