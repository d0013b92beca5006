"""Measure how a checkpoint's log-probabilities differ between training, Kénotron's decoding and transformers.

    find_mismatch("checkpoints/10").distances
    [Distance(side="training", mean=0.0021, worst=0.019, text=3, token=17), …]

Texts are sampled by Kénotron's decoding at temperature 1, with its KV cache, as in reinforcement learning. The other
sides read whole texts. All are compared with transformers in fp32 on the weights that `to_hf` exports.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kenotron.checkpoint.folders import resolve
from kenotron.config import load
from kenotron.config.errors import RunFailed
from kenotron.config.parallelism import Parallelism
from kenotron.evaluation.scoring import longest_input
from kenotron.generation.decode import generate
from kenotron.generation.load import dtype_of, load_for_generation
from kenotron.generation.options import SamplingOptions
from kenotron.interop import to_hf
from kenotron.interop.whole_config import one_line
from kenotron.kernels.attentions.choice import attention_of_run
from kenotron.kernels.fused import use_kernels
from kenotron.models.context import Context
from kenotron.parallel.device import best_device

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.text.progress import Report

ROUNDING = 1e-4
"""The mean difference in nats that another order of sums may cause in fp32."""


class Distance(NamedTuple):
    """Distances of the log-probabilities of `side`, in nats: the mean, and the `worst`, at `token` of `text`."""

    side: str
    mean: float
    worst: float
    text: int
    token: int


class Mismatch(NamedTuple):
    """Distances from transformers in fp32; the last, of transformers in the run's dtype, is the effect of rounding."""

    texts: list[list[int]]
    distances: list[Distance]

    @property
    def allowed(self) -> float:
        """The mean distance that rounding explains."""
        return 2 * self.distances[-1].mean + ROUNDING

    @property
    def apart(self) -> list[Distance]:
        """The distances that are larger than rounding explains, or NaN."""
        return [distance for distance in self.distances if not distance.mean <= self.allowed]


def find_mismatch(path: str | Path, texts: int = 8, tokens: int = 64, seed: int = 0, *, report: Report) -> Mismatch:
    """Sample `texts` of `tokens` each from the checkpoint at `path`, and compare every side's log-probabilities.

    `report` gets a line before each side. Raises InputError if there is no checkpoint, or `to_hf` does not support its
    model, RunFailed if logits are not finite.
    """
    path = resolve(path)
    report(f"decoding {texts} texts")
    ids, decoded, config = _sample(path, texts, tokens, seed)
    dtype = config.model.dtype
    report("training's forward pass")
    trained = _log_probabilities(ids, _training(path, config))
    with tempfile.TemporaryDirectory(prefix="kenotron-mismatch-") as folder:
        exported = Path(folder) / "model"
        to_hf(path, exported, dtype="float32")
        report("transformers in float32")
        reference = rounded = _log_probabilities(ids, _transformers(exported, "float32"))
        if dtype != "float32":
            report(f"transformers in {dtype}")
            rounded = _log_probabilities(ids, _transformers(exported, dtype))
    sides = {"training": trained, "decoding": decoded, f"transformers in {dtype}": rounded}
    return Mismatch(ids[:, 1:].tolist(), [_distance(side, logs - reference) for side, logs in sides.items()])


def _sample(path: Path, texts: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Config]:
    """Return ids ``[texts, 1 + tokens]``, log-probabilities of all but the first, and the run's config for one rank."""
    model, tokenizer, section = load_for_generation(path)
    tokens = min(tokens, longest_input(model.config) - 1)
    bos = model.config.bos_token_id
    start = model.config.eos_token_id if bos is None else bos
    sampling = SamplingOptions(max_new_tokens=tokens, temperature=1.0, stop_at_eos=False, logprobs=True, seed=seed)
    samples = generate(model, tokenizer, [[start]] * texts, sampling)
    if any(len(sample.tokens) < tokens for sample in samples):
        raise RunFailed(f"{path}: its logits are not finite")
    config = load(path / "config.yaml").model_copy(update={"model": section, "parallelism": Parallelism()})
    ids = torch.tensor([[start, *sample.tokens] for sample in samples])
    return ids, torch.tensor([sample.logprobs for sample in samples], dtype=torch.float64), config


@torch.no_grad()
def _log_probabilities(ids: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return log-probabilities ``[texts, tokens]`` of `ids` from the second on, computed for one text at a time."""
    rows = []
    for row in ids.to(best_device()):
        logits = logits_of(row[:-1]).float()
        rows.append(logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0].double().cpu())
    return torch.stack(rows)


def _training(path: Path, config: Config) -> Callable[[Tensor], Tensor]:
    """Return training's forward pass: fp32 weights, products in the run's dtype, the run's kernels and attention."""
    device = best_device()
    model = load_for_generation(path, "float32", device).model
    model.set_compute_dtype(dtype_of(config.model.dtype))  # type: ignore[union-attr]  # a Decoder without a mesh
    attention, _ = attention_of_run(config, device)

    def logits(row: Tensor) -> Tensor:
        with use_kernels(config.model.kernels):
            return model(row, Context((1, len(row)), torch.arange(len(row), device=device), attention))  # type: ignore[operator]

    return logits


def _transformers(folder: Path, dtype: str) -> Callable[[Tensor], Tensor]:
    from transformers import AutoModelForCausalLM

    with one_line(str(folder)):
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype_of(dtype), local_files_only=True, trust_remote_code=True
        )
    model.to(best_device()).eval()
    return lambda row: model(row[None]).logits[0]


def _distance(side: str, difference: Tensor) -> Distance:
    sizes = difference.abs()
    text, token = divmod(int(sizes.argmax()), sizes.shape[1])
    return Distance(side, sizes.mean().item(), sizes.max().item(), text, token)
