"""Import and export Hugging Face models, and import nanotron checkpoints.

    from_hf("meta-llama/Llama-3.2-1B", "llama")      # → checkpoint llama/0
    to_hf("checkpoints/100", "exported")             # → a folder for transformers
    from_nanotron("nanotron/checkpoints", "mine")    # → checkpoint mine/<step>, optimizer included
    hf_architecture("exported", {"rope_theta": 5e5}) # model_config: {hf: exported, rope_theta: 5e5}
    initial_tensors("exported", architecture)        # init_method: {path: exported}, or a Kénotron checkpoint

`transformers` and `safetensors` are imported only by the functions that need them.
"""

from kenotron.interop.exporting import Exported, to_hf
from kenotron.interop.from_nanotron import from_nanotron
from kenotron.interop.importing import from_hf
from kenotron.interop.sources import Source, hf_architecture, initial_tensors, open_source, resolve_architecture

__all__ = [
    "Exported",
    "Source",
    "from_hf",
    "from_nanotron",
    "hf_architecture",
    "initial_tensors",
    "open_source",
    "resolve_architecture",
    "to_hf",
]
