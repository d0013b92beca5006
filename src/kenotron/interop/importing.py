"""`kenotron convert from-hf`: a Hugging Face model becomes checkpoint 0 of a folder.

    from_hf("meta-llama/Llama-3.2-1B", "llama")
    → llama/latest.txt, llama/0/: model (in the dtype it came in), tokenizer, config.yaml

Tensors are stored under Kénotron's names. `config.yaml` is complete, so that every Kénotron command opens the folder;
its data and optimizer are placeholders. To train from the weights, set ``model.init_method: {path: llama}`` in your
own config. Only one tensor at a time is in memory.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from kenotron.checkpoint import engine, folders, saving
from kenotron.checkpoint.folders import Progress, Report, quiet
from kenotron.checkpoint.text_files import save_text_files
from kenotron.config import Config, dump, load
from kenotron.config.errors import InputError
from kenotron.config.packaged import packaged_yaml
from kenotron.interop.sources import Source, check_shape, hf_source, unpadded
from kenotron.kernels.tensor_shard import TensorShard
from kenotron.models import named_state
from kenotron.text.tokenizer import load_tokenizer


def from_hf(
    src: str | Path,
    dst: str | Path,
    *,
    family: str | None = None,
    report: Report = quiet,
    progress: Progress | None = None,
) -> engine.Saved:
    """Write `src`, a folder or a hub name, as checkpoint `<dst>/0`.

    `family` is the dotted path of your own family, tried besides the built-in ones. `report` is called with a line for
    every choice that was made; `progress(done, total)` counts tensors as they are read.
    Raises InputError if there is nothing at `src`, the hub is unreachable, the model is not supported, or `dst` already
    holds checkpoints.
    """
    root = Path(dst).expanduser()
    if folders.list_checkpoints(root) or (root.exists() and not root.is_dir()):
        raise InputError(f"{root} holds checkpoints already (or is a file); name a new folder")
    source = hf_source(src, report, family)
    expected = dict(named_state(unpadded(source.model)))
    done = itertools.count(1)

    def read(name: str) -> Tensor:
        if progress:
            progress(next(done), len(expected))
        return source.weights[name].contiguous()

    tensors = {}
    for name, tensor in expected.items():
        check_shape(source, name, tuple(tensor.shape))
        one = source.weights.block(name, (0,) * tensor.dim(), (1,) * tensor.dim())  # one element tells the dtype
        tensors[name] = TensorShard.later(tuple(tensor.shape), one.dtype, partial(read, name))
    config = _config(source, str(src), root)
    return saving.save(
        root,
        0,
        model=tensors,
        optimizer=None,
        state={"step": 0, "consumed_tokens": 0, "consumed_train_samples": 0, "imported_from": str(src)},
        config_yaml=f"# Imported from {src}. Data, optimizer and steps are placeholders.\n" + dump(config),
        model_config=source.architecture.model_dump(by_alias=True),
        save_tokenizer=_copy_tokenizer(source, report),
    )


def _copy_tokenizer(source: Source, report: Report) -> Callable[[Path], None]:
    """Return a function that saves the tokenizer's files and `generation_config.json`, which an export needs again."""
    if source.tokenizer is None:
        report(f"{source.path} has no tokenizer: prompts must be token ids")
        return partial(save_text_files, tokenizer=None, starts=[str(source.path)])
    tokenizer = load_tokenizer(source.tokenizer)
    if tokenizer.vocab_size > source.architecture.vocab_size:
        report(
            f"{source.path}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"the model only {source.architecture.vocab_size}"
        )
    return partial(save_text_files, tokenizer=tokenizer, starts=[])


def _config(source: Source, name: str, root: Path) -> Config:
    """Return a complete config for the model, which loads; the name of its data stage says that it is a placeholder."""
    config: dict[str, Any] = packaged_yaml("kenotron.interop", "imported.yaml")
    config["general"] = {"project": "imported", "run": Path(name).name or "imported"}
    config["model"] = source.model.model_dump(by_alias=True)
    config["checkpoints"] = {"checkpoints_path": str(root), "checkpoint_interval": 1000}
    config["tokens"]["sequence_length"] = min(source.architecture.longest_text, 2048)
    return load(config)
