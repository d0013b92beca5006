"""Random small configs with another layout each: pairs on which `kenotron compare` must agree.

pair(17, folder)   # the same config and layout every time
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kenotron as kn
from kenotron.config import Config
from kenotron.config.errors import InputError
from support.tiny_run import tiny_dict

STEPS = 5


@dataclass(frozen=True)
class Pair:
    """Two configs that mean the same, and in words what they are."""

    plain: Config
    other: Config
    words: str


def pair(number: int, folder: Path) -> Pair:
    """Pair `number`. Every sixth has steps of one sample."""
    draw = random.Random(number)
    while True:
        samples = 1 if number % 6 == 5 else draw.choice([2, 4, 8, 8, 16])
        content, words = _config(draw, folder, samples)
        layout = _layout(draw, samples)
        try:
            plain = kn.load(content, _batch(draw, samples, 1))
            other = kn.load(content, [*layout, *_batch(draw, samples, _degree(layout, "dp"))])
        except InputError:
            continue  # the model does not divide like that
        return Pair(plain, other, f"{words}, {samples} samples: {' '.join(layout)}")


def _config(draw: random.Random, folder: Path, samples: int) -> tuple[dict[str, Any], str]:
    content = tiny_dict(folder)
    heads = draw.choice([2, 4, 4, 8])
    dtype = draw.choice(["float32", "bfloat16"])
    model = {
        "hidden_size": heads * draw.choice([4, 8, 16]),
        "intermediate_size": draw.choice([24, 48, 96]),
        "num_hidden_layers": draw.randint(1, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([1, 2, heads]),
        "vocab_size": draw.choice([61, 64, 300]),
        "tie_word_embeddings": draw.random() < 0.4,
        "attention_bias": draw.random() < 0.3,
        "max_position_embeddings": 64,
    }
    if draw.random() < 0.3:
        model |= {"z_loss_enabled": True, "z_loss_coefficient": 0.001}
    content["model"]["model_config"] = model
    content["model"] |= {"dtype": dtype, "init_method": {"std": draw.choice([0.02, 0.05, 0.1, 0.2])}}
    content["general"]["seed"] = draw.randint(1, 1000)
    content["tokens"] |= {"sequence_length": draw.choice([8, 16, 32, 64]), "train_steps": STEPS}
    optimizer = content["optimizer"]
    optimizer["clip_grad"] = draw.choice([None, 1.0, 1.0, 0.1])
    optimizer["learning_rate_scheduler"] |= {
        "learning_rate": draw.choice([1e-4, 1e-3, 1e-2]),
        "lr_warmup_steps": draw.choice([0, 2]),
    }
    name = draw.choice(["adamW", "adamW", "muon"])
    if name == "muon":
        optimizer["optimizer_factory"] = {"name": "muon"}
    clip = optimizer["clip_grad"]
    words = (
        f"{dtype} {name} layers {model['num_hidden_layers']} hidden {model['hidden_size']} clip {clip}"
        f"{' tied' * model['tie_word_embeddings']}{' biased' * model['attention_bias']}"
    )
    return content, words


def _layout(draw: random.Random, samples: int) -> list[str]:
    """Overrides of a layout on two to eight ranks."""
    while True:
        degrees = {name: draw.choice([1, 1, 2, 2, 4]) for name in ("dp", "tp", "pp", "context_parallel_size")}
        world = 1
        for degree in degrees.values():
            world *= degree
        if 2 <= world <= (4 if draw.random() < 0.9 else 8) and samples % degrees["dp"] == 0:
            break
    layout = [f"parallelism.{name}={degree}" for name, degree in degrees.items() if degree > 1]
    layout += ["optimizer.zero_stage=0"]
    if degrees["dp"] * degrees["context_parallel_size"] > 1:
        layout[-1] = f"optimizer.zero_stage={draw.choice([0, 1, 2, 3])}"
    if degrees["tp"] > 1:
        layout += [f"parallelism.tp_mode={draw.choice(['ALL_REDUCE', 'REDUCE_SCATTER'])}"]
        layout += [f"parallelism.tp_linear_async_communication={draw.choice(['true', 'false'])}"]
    if degrees["pp"] > 1:
        layout += [f"parallelism.pp_engine={draw.choice(['afab', '1f1b'])}"]
    if degrees["context_parallel_size"] > 1:
        layout += [f"parallelism.context_parallel_method={draw.choice(['ring', 'ulysses', 'allgather'])}"]
    return [*layout, f"parallelism.recompute_layer={draw.choice(['true', 'false', 'false'])}"]


def _batch(draw: random.Random, samples: int, dp: int) -> list[str]:
    """One of the splits of a step into micro-batches."""
    each = samples // dp
    micro = draw.choice([size for size in (1, 2, 4, 8, 16) if each % size == 0])
    return [f"tokens.micro_batch_size={micro}", f"tokens.batch_accumulation_per_replica={each // micro}"]


def _degree(layout: list[str], name: str) -> int:
    return next((int(part.split("=")[1]) for part in layout if part.startswith(f"parallelism.{name}=")), 1)
