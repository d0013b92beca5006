"""Small random models of transformers that have no family here, as folders, and training problems of them."""

from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from kenotron.config import Config, load, to_dict
from kenotron.interop import resolve_architecture
from support.layout_runs import Problem
from support.tiny_run import tiny_dict

_TOKENS = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    # Learned positions, Conv1D, tied head, dropout of 0.1 by default.
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32},
    # Fused projections, rotary positions.
    "phi3": _LLAMA | {"num_hidden_layers": 3, "tie_word_embeddings": False},
    # Windows, two rotary bases, scaled embedding, norms of queries and keys; transformers has a plan for tp.
    "gemma3_text": _LLAMA
    | {"num_hidden_layers": 3, "head_dim": 8, "sliding_window": 5}
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    # ALiBi: no positions to tell documents by.
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "hidden_dropout": 0.1},
}


def random_model(which: str, **keys: Any) -> PreTrainedModel:
    """A model of transformers, fp32, in eval mode, with weights so large that every part of the maths shows."""
    logging.set_verbosity_error()
    config = AutoConfig.for_model(which, **deepcopy(_TOKENS | MODELS.get(which, {}) | keys))
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = name.endswith("weight") and any(part in name for part in ("norm", "ln_"))
            parameter.normal_(1.0 if is_norm and which != "gemma3_text" else 0.0, 0.2, generator=generator)
    return model.eval()


def folder_of(which: str, folder: Path, **keys: Any) -> Path:
    """`save_pretrained` of `random_model`."""
    logging.disable_progress_bar()
    random_model(which, **keys).save_pretrained(folder / which)
    return folder / which


def plain_config(folder: Path, model: dict[str, Any], init: dict[str, Any]) -> dict[str, Any]:
    """A tiny run of `model`, a model_config."""
    plain = tiny_dict(folder)
    plain["model"] |= {"model_config": model, "init_method": init}
    return plain


@dataclass(frozen=True)
class ForeignProblem(Problem):
    """`Problem` of another model_config, `model`; the weights are those of `init`."""

    init: dict[str, Any] = field(default_factory=lambda: {"std": 0.1, "scaling_method": "NONE"})

    def config(self, layout: str, folder: Path) -> Config:
        """As of `Problem`, its architecture resolved."""
        theirs = Problem(self.name, self.overrides, self.steps).config(layout, folder)
        plain = to_dict(theirs)
        plain["model"] |= {"model_config": self.model, "init_method": self.init}
        return resolve_architecture(load(plain))
