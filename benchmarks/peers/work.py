"""The work that every contender does: one shape, one set of first weights, one stream of tokens.

The parent writes a folder once, each worker reads it, so that all of them start from the same numbers and must report
the same first loss:

    <folder>/work.json            the shape, as below
    <folder>/weights.safetensors  fp32, Hugging Face's Llama names
    <folder>/tokens.npy           [batches, micro_batch, sequence + 1] int64; inputs are [..., :-1], labels [..., 1:]

numpy only: the parent needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Work:
    """A Llama without grouped-query attention or tied embeddings, and how it is trained."""

    name: str
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    sequence: int
    micro_batch: int
    precision: str = "fp32"  # or "bf16": compute in bf16, master weights in fp32
    threads: int = 1
    device: str = "cpu"
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.micro_batch * self.sequence

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes().values())

    @property
    def state_bytes(self) -> int:
        """What any AdamW with fp32 masters holds: weight, gradient and two moments, 4 bytes each."""
        return 16 * self.parameters

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's shape under its Hugging Face name."""
        square, vector = (self.hidden, self.hidden), (self.hidden,)
        wide, vocabulary = (self.intermediate, self.hidden), (self.vocab, self.hidden)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": vocabulary}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                shapes[f"{prefix}self_attn.{name}.weight"] = square
            shapes[f"{prefix}mlp.gate_proj.weight"] = wide
            shapes[f"{prefix}mlp.up_proj.weight"] = wide
            shapes[f"{prefix}mlp.down_proj.weight"] = wide[::-1]
            shapes[f"{prefix}input_layernorm.weight"] = vector
            shapes[f"{prefix}post_attention_layernorm.weight"] = vector
        return shapes | {"model.norm.weight": vector, "lm_head.weight": vocabulary}

    def write(self, folder: Path, batches: int = 16) -> None:
        """Make the folder; the same bytes every time."""
        from safetensors.numpy import save_file

        rng = np.random.default_rng(0)
        weights = {
            name: np.ones(shape, np.float32)
            if len(shape) == 1
            else rng.standard_normal(shape, np.float32) * np.float32(0.02)
            for name, shape in self.shapes().items()
        }
        # Cubing a uniform number makes small ids frequent, as in text: embedding rows repeat within a batch.
        uniform = rng.random((batches, self.micro_batch, self.sequence + 1))
        folder.mkdir(parents=True, exist_ok=True)
        save_file(weights, folder / "weights.safetensors")
        np.save(folder / "tokens.npy", (uniform**3 * self.vocab).astype(np.int64))
        (folder / "work.json").write_text(json.dumps(asdict(self)))


def read(folder: Path) -> Work:
    return Work(**json.loads((folder / "work.json").read_text()))


SIZES = {
    "6M": Work("6M", 256, 4, 4, 768, 4096, 256, 16),
    "17M": Work("17M", 384, 6, 6, 1024, 8192, 256, 8),
    "135M": Work("135M", 768, 12, 12, 2048, 32768, 1024, 1),
}
