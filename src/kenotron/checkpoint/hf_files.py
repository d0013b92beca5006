"""Fetch the files of a Hugging Face model: its weights and tokenizer. Does not import torch.

locate("HuggingFaceTB/SmolLM2-135M")              # the folder, in the local cache of the hub
"""

from pathlib import Path

from kenotron.checkpoint.model_files import HUB, find_config, is_hub_name
from kenotron.config.errors import InputError
from kenotron.storage.hub import hub_file, read_json
from kenotron.text.tokenizer import GENERATION, TOKENIZER_FILES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_config.json"


def locate(source: str | Path) -> Path:
    """Return the folder of a Hugging Face model with its weights and tokenizer, which are fetched if missing."""
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


def shard_names(index: Path) -> list[str]:
    """Return the safetensors files that the index of a model names."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise InputError(f"{index}: expected a weight_map")
    for name in files.values():
        if not isinstance(name, str) or Path(name).name != name or "\0" in name:
            raise InputError(f"{index}: expected names of files beside it, found {name!r}")
    return sorted(set(files.values()))
