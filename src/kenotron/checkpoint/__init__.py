"""Checkpoints: atomic, loadable on any layout, in plain files that other tools can read.

    saved = save("checkpoints", 10, model=parameters, optimizer=flat_state, state={"consumed_tokens": 2560},
                 config_yaml=text, model_config={"hidden_size": 64})
    tidy("checkpoints")                                            # at the next start
    path = newest_complete("checkpoints", report=print)               # names and skips what is damaged
    state = load(path, model=parameters, optimizer=flat_state, verify=False)

    <root>/latest.txt               the newest step, written last
    <root>/<step>/manifest.json     step, state, and the size and XXH3 of every other file
    <root>/<step>/config.yaml, model_config.json, tokenizer/
    <root>/<step>/model/, optimizer/     index.json and one safetensors file a rank (see `tensors.py`)

`remote.py` downloads checkpoints from a bucket, `upload.py` uploads them; both are loaded where a config has a URL.

Tensors go through `torch.distributed.checkpoint`; everything else is JSON or YAML; nothing is a pickle.
Neither torch nor DCP is imported before a tensor is touched.
"""

from kenotron.checkpoint.durable import in_use
from kenotron.checkpoint.engine import Saved
from kenotron.checkpoint.folders import Found, list_checkpoints, newest_complete, resolve, verify, verify_together
from kenotron.checkpoint.index import Index, read_index
from kenotron.checkpoint.leftovers import tidy
from kenotron.checkpoint.loading import load, read_config, read_data
from kenotron.checkpoint.manifest import Manifest, read_manifest
from kenotron.checkpoint.reading import block_reader, read_tensors
from kenotron.checkpoint.retention import prune, to_prune
from kenotron.checkpoint.saving import save
from kenotron.config.errors import CheckpointError

__all__ = [
    "CheckpointError",
    "Found",
    "Index",
    "Manifest",
    "Saved",
    "block_reader",
    "in_use",
    "list_checkpoints",
    "load",
    "newest_complete",
    "prune",
    "read_config",
    "read_data",
    "read_index",
    "read_manifest",
    "read_tensors",
    "resolve",
    "save",
    "tidy",
    "to_prune",
    "verify",
    "verify_together",
]
