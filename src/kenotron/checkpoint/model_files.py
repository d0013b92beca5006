"""Find a model: in a Kénotron checkpoint, a Hugging Face folder, or the hub. Does not import torch.

find_model("checkpoints")                         # ModelFolder(folder=PosixPath('checkpoints/20'), ours=True)
find_model("HuggingFaceTB/SmolLM2-135M")          # config.json is fetched, local cache first: ours=False
"""

from pathlib import Path
from typing import NamedTuple

from kenotron.checkpoint import folders
from kenotron.checkpoint.manifest import MANIFEST
from kenotron.config.errors import InputError, nearest
from kenotron.storage.hub import hub_file

HUB = "no such model"  # the beginning of the hub's errors


class ModelFolder(NamedTuple):
    """The folder of a Kénotron checkpoint (`ours`), or that of a Hugging Face model's `config.json`."""

    folder: Path
    ours: bool


def find_model(path: str | Path) -> ModelFolder:
    """Return the model at `path`: a step's folder, a folder of steps, a Hugging Face model's folder or hub name.

    Raises InputError if the path does not exist; the message names the nearest one.
    """
    if not isinstance(path, str | Path):
        raise InputError(f"path: expected a checkpoint or a Hugging Face model, by its path, found {path!r:.60}")
    folder = Path(path).expanduser()
    is_checkpoint = (folder / MANIFEST).exists() or (folder / folders.LATEST).exists()
    if not is_checkpoint and (folder / "config.json").is_file():
        return ModelFolder(folder, ours=False)
    if not is_checkpoint and is_hub_name(path):
        return ModelFolder(_find_in_hub(path), ours=False)
    return ModelFolder(folders.resolve(folder), ours=True)


def _find_in_hub(path: str | Path) -> Path:
    """Return the folder of a hub model's `config.json`. The error names a near folder, if there is one."""
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
    """Return whether this looks like ``owner/name``, and is not an existing folder."""
    text = str(source)
    return not Path(text).expanduser().exists() and text.count("/") <= 1 and text[:1] not in (".", "/", "~")


def find_config(source: str | Path) -> Path:
    """Return the path of the `config.json` of a folder or a hub name."""
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
        hint = " (it is a checkpoint: `kenotron convert to-hf` converts it)" if (folder / MANIFEST).exists() else ""
        raise InputError(f"{folder} is not a Hugging Face model: it has no config.json{hint}")
    return folder / "config.json"
