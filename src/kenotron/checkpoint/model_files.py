"""Where a model's files are: our checkpoint, a Hugging Face folder, or a hub name. Nothing here imports torch.

find_model("checkpoints")                         # ModelFolder(folder=PosixPath('checkpoints/20'), ours=True)
find_model("HuggingFaceTB/SmolLM2-135M")          # config.json is fetched, local cache first: ours=False
locate("HuggingFaceTB/SmolLM2-135M")              # the folder, with weights and tokenizer fetched
"""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from shutil import copyfile
from typing import NamedTuple

from kenotron.checkpoint import folders
from kenotron.checkpoint.manifest import MANIFEST
from kenotron.config import Config
from kenotron.config.errors import InputError, nearest
from kenotron.config.model import ExistingCheckpointInit
from kenotron.storage.hub import hub_file, read_json
from kenotron.text.tokenizer import GENERATION, TOKENIZER_FILES, TextTokenizer, load_tokenizer

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"
HUB = "no such folder here"  # so each of the hub's errors begins


class ModelFolder(NamedTuple):
    """The folder of a checkpoint of ours, or the one that holds a Hugging Face model's `config.json`."""

    folder: Path
    ours: bool


def find_model(path: str | Path) -> ModelFolder:
    """What `path` names: a step's folder, a folder of steps, a Hugging Face model's folder or hub name.

    Raises InputError if the path is missing; the message names the nearest.
    """
    if not isinstance(path, str | Path):
        raise InputError(f"path: expected a checkpoint or a Hugging Face model, by its path, found {path!r:.60}")
    folder = Path(path).expanduser()
    ours = (folder / MANIFEST).exists() or (folder / folders.LATEST).exists()
    if not ours and (folder / "config.json").is_file():
        return ModelFolder(folder, ours=False)
    if not ours and is_hub_name(path):
        return ModelFolder(_find_in_hub(path), ours=False)
    return ModelFolder(folders.resolve(folder), ours=True)


def _find_in_hub(path: str | Path) -> Path:
    """The folder of a hub model's `config.json`. The error names what is near among folders, if something is."""
    try:
        return find_config(path).parent
    except InputError as in_hub:
        try:
            folders.resolve(Path(path))
        except InputError as here:
            in_a_folder = Path(path).parent != Path() and Path(path).parent.is_dir()
            if in_a_folder or "did you mean" in str(here):
                raise here from None
        raise in_hub from None


def is_hub_name(source: str | Path) -> bool:
    """Could this be ``owner/name``, and is it not a folder here?"""
    text = str(source)
    return not Path(text).expanduser().exists() and text.count("/") <= 1 and text[:1] not in (".", "/", "~")


def find_config(source: str | Path) -> Path:
    """The `config.json` of a folder or a hub name."""
    if is_hub_name(source):
        file = hub_file(str(source), "config.json", None, HUB)
        if file is None:
            raise InputError(f"{HUB}: repository '{source}' has no config.json")
        return file
    folder = Path(source).expanduser()
    if folder.is_file():
        raise InputError(f"{folder} is a file; expected the folder of a Hugging Face model")
    if not folder.is_dir():
        parent = next(parent for parent in folder.absolute().parents if parent.is_dir())
        hint = nearest(folder.name, [entry.name for entry in parent.iterdir()])
        raise InputError(f"no folder {folder}; the nearest that exists is {parent}{hint}")
    if not (folder / "config.json").is_file():
        ours = " (it is a checkpoint: `kenotron convert to-hf` converts it)" if (folder / MANIFEST).exists() else ""
        raise InputError(f"{folder} is not a Hugging Face model: it has no config.json{ours}")
    return folder / "config.json"


def locate(source: str | Path) -> Path:
    """The folder of a Hugging Face model with its weights and tokenizer, fetched where they are missing."""
    folder = find_config(source).parent
    if not is_hub_name(source):
        return folder
    repo = str(source)
    index = hub_file(repo, INDEX, None, HUB)
    shards = shard_names(index) if index else [SINGLE]
    if SINGLE not in shards and hub_file(repo, SINGLE, None, HUB, optional=True):  # as in a folder (hf_weights)
        raise InputError(
            f"repository '{repo}' has both {SINGLE} and {INDEX}, which names other files; download the ones that are "
            "meant into a folder and name that"
        )
    for name in shards:
        if hub_file(repo, name, None, HUB) is None:
            raise InputError(f"{HUB}: repository '{repo}' has no {name} (only safetensors are read)")
    for name in (*TOKENIZER_FILES, GENERATION):
        hub_file(repo, name, None, HUB, optional=True)
    return folder


def save_text_files(folder: Path, tokenizer: TextTokenizer | None, starts: list[str]) -> None:
    """Write what a checkpoint has besides tensors: the tokenizer, and how the model it came with generates.

    That lies beside the tokenizer, or is the first of the models `starts` that says it. Ids of another tokenizer are
    not taken from there.
    """
    if tokenizer:
        tokenizer.save(folder)
        if tokenizer.folder:
            carry_generation(tokenizer.folder, folder)
    for start in starts:
        if (folder / GENERATION).exists():
            return
        with suppress(InputError):  # it has no tokenizer, or is not there any more
            found = find_model(start)
            source = found.folder / "tokenizer" if found.ours else found.folder
            if tokenizer is None or _hash(source) == tokenizer.hash:
                carry_generation(source, folder)


def text_files_of(config: Config, tokenizer: TextTokenizer | None) -> Callable[[Path], None]:
    """What writes them for a run: it began with the checkpoint it resumed from, or that its first weights are of."""
    init, resumed = config.model.init_method, config.checkpoints.resume_checkpoint_path
    first = [init.path] if isinstance(init, ExistingCheckpointInit) else []
    return partial(save_text_files, tokenizer=tokenizer, starts=[*([resumed] if resumed else []), *first])


def carry_generation(source: Path, folder: Path) -> None:
    """Put the `generation_config.json` of the model in `source` into `folder`, unless there is one.

    Where a model has none and its config.json names several ends of text, they are what goes into the file.
    """
    if (folder / GENERATION).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if (source / GENERATION).is_file():
        copyfile(source / GENERATION, folder / GENERATION)
        return
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    except (OSError, ValueError, TypeError):  # not beside a model
        return
    if isinstance(ids.get("eos_token_id"), list):
        (folder / GENERATION).write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


@cache
def _hash(folder: Path) -> str:
    return load_tokenizer(folder).hash


def shard_names(index: Path) -> list[str]:
    """The files that the index of a model in several safetensors files names."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise InputError(f"{index}: expected a weight_map")
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise InputError(f"{index}: expected names of files beside it, found {name!r}")
    return sorted(set(files.values()))
