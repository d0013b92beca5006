"""Read and write, through transformers, the weights of transformers models that have no Kénotron family.

Only transformers knows the names of their tensors in files (prefixes, experts separate or stacked, tied heads), so a
process that reads or writes the weights holds the whole model in memory meanwhile.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kenotron.config.errors import InputError
from kenotron.interop.hf_weights import Box, Stored, Weights
from kenotron.interop.tensor_names import untied_head
from kenotron.interop.whole_config import one_line, quietly
from kenotron.models.foreign import HuggingFaceArchitecture


def read_whole(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> Weights:
    """Return the weights of `folder`; transformers reads all of them when the first is accessed.

    The first access raises InputError if a weight is missing, superfluous, damaged or of another shape than the config
    says.
    """
    tensors = cache(lambda: _tensors(folder))
    return Weights({name: Stored(shape, partial(_box, tensors, name)) for name, shape in shapes.items()}, str(folder))


def _box(tensors: Callable[[], Mapping[str, Tensor]], name: str, box: Box) -> Tensor:
    return tensors()[name][box]


def _tensors(folder: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    with one_line(str(folder)):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    model, info = loaded
    for key, what in (("missing_keys", "has no tensor"), ("unexpected_keys", "has a tensor that its model lacks:")):
        for name in sorted(info[key]):
            raise InputError(f"{folder} {what} {name!r} ({len(info[key])} in all)")
    for name, found, expected in sorted(info["mismatched_keys"]):
        raise InputError(f"{folder}: {name} has shape {list(found)}, and its config says {list(expected)}")
    _check_tied(model, str(folder))
    return dict(model.state_dict())  # with buffers, such as the correction of router scores


def _check_tied(model: Any, where: str) -> None:
    """Raise InputError if a tied head differs from the embedding: transformers would keep it, Kénotron drops it."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and head is not None and not head.weight.equal(embedding.weight):
        names = {module: name for name, module in model.named_modules()}
        raise untied_head(where, f"{names[head]}.weight", f"{names[embedding]}.weight")


def write_whole(
    weights: Weights, architecture: HuggingFaceArchitecture, folder: Path, dtype: str, size_limit: int
) -> None:
    """Fill the transformers model with these weights and call its `save_pretrained`."""
    module = _empty(architecture)
    with torch.no_grad():
        state = module.state_dict()
        for name in weights:
            state[name].copy_(weights[name])
        for parameter in module.parameters():  # buffers keep their dtype
            parameter.data = parameter.to(getattr(torch, dtype))
    with quietly():
        module.save_pretrained(folder, max_shard_size=size_limit)


def _empty(architecture: HuggingFaceArchitecture) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with one_line("model.model_config"), no_init_weights():
        module = AutoModelForCausalLM.from_config(architecture.transformers_config())
    module.tie_weights()  # no_init_weights skips this as well
    return module
