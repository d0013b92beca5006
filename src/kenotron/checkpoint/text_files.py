"""Write the files about text into a checkpoint: the tokenizer, and the `generation_config.json` of a first model."""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from shutil import copyfile

from kenotron.checkpoint.model_files import find_model
from kenotron.config import Config
from kenotron.config.errors import InputError
from kenotron.config.model import ExistingCheckpointInit
from kenotron.text.tokenizer import GENERATION, TextTokenizer, load_tokenizer


def save_text_files(folder: Path, tokenizer: TextTokenizer | None, starts: list[str]) -> None:
    """Write the tokenizer and the `generation_config.json` of the model that the run began with.

    The latter comes from the tokenizer's folder, or from the first of the models `starts` that has one with the same
    tokenizer, so that no ids of another tokenizer are copied.
    """
    if tokenizer:
        tokenizer.save(folder)
        if tokenizer.folder:
            carry_generation(tokenizer.folder, folder)
    for start in starts:
        if (folder / GENERATION).exists():
            return
        with suppress(InputError):  # it has no tokenizer, or has been removed
            found = find_model(start)
            source = found.folder / "tokenizer" if found.ours else found.folder
            if tokenizer is None or _hash(source) == tokenizer.hash:
                carry_generation(source, folder)


def text_files_of(config: Config, tokenizer: TextTokenizer | None) -> Callable[[Path], None]:
    """Return `save_text_files` for a run, with the models that it resumed from or took its first weights from."""
    init, resumed = config.model.init_method, config.checkpoints.resume_checkpoint_path
    first = [init.path] if isinstance(init, ExistingCheckpointInit) else []
    return partial(save_text_files, tokenizer=tokenizer, starts=[*([resumed] if resumed else []), *first])


def carry_generation(source: Path, folder: Path) -> None:
    """Copy the `generation_config.json` of the model in `source` into `folder`, unless `folder` has one.

    If the model has none and its config.json names several end-of-text ids, write a file with these.
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
