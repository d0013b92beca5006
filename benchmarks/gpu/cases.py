"""What is measured on one GPU: shapes, lengths, packed documents or whole sequences, with and without recomputation.

    Case("llama-3.2-1b", 4096, documents=True)                             "llama-3.2-1b 4096 packed"
    Case("llama-3.1-8b", 4096, recompute="recompute", accumulation=4)      "llama-3.1-8b 4096 recompute accumulation 4"

Shapes come from the configs in examples/; weights are random and tokens synthetic, so nothing is downloaded.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "src"))  # where Kénotron is not installed

from kenotron.config import Config, load  # noqa: E402
from kenotron.data import TokenBatch  # noqa: E402

TOKENS = 8192  # of a micro-batch, in one or two sequences
MIXTRAL = """{is_mixtral_config: true, hidden_size: 2048, intermediate_size: 3072, num_hidden_layers: 16,
    num_attention_heads: 32, num_key_value_heads: 8, vocab_size: 50304, max_position_embeddings: 8192,
    num_local_experts: 8, num_experts_per_tok: 2}"""  # 0.9e9 parameters active of 2.7e9, embeddings not counted
MAMBA2 = """{is_mamba2_config: true, hidden_size: 2048, num_hidden_layers: 8, num_heads: 64, head_dim: 64,
    state_size: 128, n_groups: 1, vocab_size: 50304}"""
LLAMA_1B, LLAMA_8B = "examples/models/llama-3.2-1b.yaml", "examples/models/llama-3.1-8b.yaml"
TINY, WHOLE_8B = "tiny-llama", "llama-3.1-8b"
SHAPES: dict[str, tuple[str, tuple[str, ...]]] = {  # name → config, what is changed in it
    "llama-3.2-1b": (LLAMA_1B, ()),
    "llama-3.1-8b, 8 of 32 layers": (LLAMA_8B, ("model.model_config.num_hidden_layers=8",)),
    WHOLE_8B: (LLAMA_8B, ()),  # 16 bytes a parameter for AdamW and gradients: 120 GiB
    "mixtral, 0.9e9 active": (LLAMA_1B, (f"model.model_config={MIXTRAL}",)),
    "mamba-2, 8 layers": (LLAMA_1B, (f"model.model_config={MAMBA2}",)),
    TINY: ("examples/llama/config_tiny_llama.yaml", ()),  # the seeds' own: 256 tokens, two sequences
}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16, "num_heads": 8, "state_size": 16}
Recompute = Literal["", "recompute", "selective", "elementwise"]
RECOMPUTE_LAYER: dict[Recompute, str] = {  # in the YAML
    "": "false",
    "recompute": "true",
    "selective": "selective",
    "elementwise": "elementwise",
}


@dataclass(frozen=True)
class Case:
    """`accumulation`: micro-batches of a step. `miniature`: the same with shapes for a CPU, in fp32, 64 tokens long."""

    shape: str
    sequence: int
    documents: bool = False
    recompute: Recompute = ""
    accumulation: int = 1
    miniature: bool = False

    @property
    def name(self) -> str:
        """As `--only` matches it and tables show it."""
        accumulation = f"accumulation {self.accumulation}" if self.accumulation > 1 else ""
        parts = [self.shape, str(self.sequence), "packed" * self.documents, self.recompute, accumulation]
        return " ".join(filter(None, parts))

    @property
    def micro_batch(self) -> int:
        """Sequences of a micro-batch."""
        return 2 if self.miniature or self.shape == TINY else TOKENS // self.sequence

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.accumulation * self.micro_batch * self.sequence

    def config(self, folder: Path, *overrides: str) -> Config:
        """The YAML of its shape on one device, in bf16 with fp32 masters, its files in `folder`."""
        path, changed = SHAPES[self.shape]
        given = (
            *changed,
            "general={project: benchmark, run: gpu}",
            f"parallelism={{dp: 1, tp: 1, pp: 1, recompute_layer: {RECOMPUTE_LAYER[self.recompute]}}}",
            "tokenizer=null",
            "data_stages=[{name: all, start_training_step: 1, data: {dataset: null}}]",
            f"tokens.sequence_length={self.sequence}",
            f"tokens.micro_batch_size={self.micro_batch}",
            f"tokens.batch_accumulation_per_replica={self.accumulation}",
            f"model.document_masking={str(self.documents).lower()}",
            "optimizer.zero_stage=0",
            f"checkpoints={{checkpoints_path: {folder / 'checkpoints'}, checkpoint_interval: 1000000}}",
            f"logging={{log_dir: {folder / 'logs'}, tensorboard: false}}",
            *overrides,
        )
        plain = load(ROOT / path, given)
        if not self.miniature or self.shape == TINY:
            return plain
        known = type(plain.model.decoder).model_fields
        small = [f"model.model_config.{key}={value}" for key, value in SMALL.items() if key in known]
        return load(ROOT / path, (*given, *small, "model.dtype=float32"))

    def batch(self, vocabulary: int) -> TokenBatch:
        """Random tokens of a micro-batch; packed documents are of 16 to 1,024 tokens, as many to each octave."""
        rng = np.random.default_rng(0)
        shape = (self.micro_batch, self.sequence)
        tokens = (rng.random((shape[0], shape[1] + 1)) ** 3 * vocabulary).astype(np.int64)
        batch = (*map(np.ascontiguousarray, (tokens[:, :-1], tokens[:, 1:])), np.arange(shape[0]))
        if not self.documents:
            return TokenBatch(*batch)
        longest = min(1024, self.sequence // 2)
        documents, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row in range(shape[0]):
            lengths = 2 ** rng.uniform(np.log2(min(16, longest)), np.log2(longest), self.sequence // 8)
            starts = [0, *itertools.takewhile(lambda at: at < self.sequence, np.cumsum(lengths.astype(int)))]
            documents[row] = np.searchsorted(starts, np.arange(self.sequence), side="right")
            positions[row] = np.arange(self.sequence) - np.asarray(starts)[documents[row] - 1]
        return TokenBatch(*batch, positions=positions, documents=documents)


def cases(miniature: bool) -> list[Case]:
    """All, the plainest of every shape first: a run that is cut has something of each.

    The whole of 8B is also there as others publish it: four micro-batches of two sequences of 4,096 tokens.
    """
    lengths = (64,) if miniature else (4096, 8192)
    grid = itertools.product(lengths, (False, True), ("", "recompute"))
    found = [Case(shape, *option, miniature=miniature) for option in grid for shape in SHAPES if shape != TINY]
    fits = [case for case in found if case.recompute or case.shape != WHOLE_8B]
    # Without recomputation it needs more than 139.8 GiB; elementwise fits only where no gradients lie there in forward.
    options = (("elementwise", 1), ("selective", 1), ("recompute", 4), ("selective", 4))
    whole = [Case(WHOLE_8B, lengths[0], False, *option, miniature) for option in options]

    def added(case: Case) -> int:
        return (case.sequence != lengths[0]) + case.documents + bool(case.recompute)

    return [Case(TINY, 256, miniature=miniature), *sorted(whole + fits, key=added)]


def find(name: str) -> Case:
    """The case of a `name`, marked ``miniature: `` for those."""
    small = name.startswith("miniature: ")
    return next(case for case in cases(small) if case.name == name.removeprefix("miniature: "))


if __name__ == "__main__":
    sys.stdout.writelines(f"{case.name}\n" for case in cases(False))
