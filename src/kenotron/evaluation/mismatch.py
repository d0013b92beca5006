"""How far a checkpoint's log-probabilities are apart in training, in our decoding and in transformers.

    find_mismatch("checkpoints/10").distances
    [Distance(side="training", mean=0.0021, worst=0.019, text=3, token=17), …]

Texts are drawn by our decoding at temperature 1, with its cache, as reinforcement learning draws them. The others read
them whole. All are compared with transformers in fp32, which computes from the weights of `to_hf`.
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
from kenotron.interop.whole_weights import quietly
from kenotron.kernels.attentions.choice import attention_of_run
from kenotron.kernels.fused import use_kernels
from kenotron.models.context import Context
from kenotron.parallel.device import best_device

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.text.progress import Report

ROUNDING = 1e-4
"""Nats that sums in another order may make in fp32."""


class Distance(NamedTuple):
    """Of the log-probabilities of `side`, in nats: over all tokens, and the `worst`, that of a `token` of a `text`."""

    side: str
    mean: float
    worst: float
    text: int
    token: int


class Mismatch(NamedTuple):
    """Distances from transformers in fp32, last that of transformers in the run's dtype, which rounding explains."""

    texts: list[list[int]]
    distances: list[Distance]

    @property
    def allowed(self) -> float:
        """The mean distance that rounding explains."""
        return 2 * self.distances[-1].mean + ROUNDING

    @property
    def apart(self) -> list[Distance]:
        """Those of a side that is farther away than rounding explains."""
        return [each for each in self.distances if not each.mean <= self.allowed]


def find_mismatch(path: str | Path, texts: int = 8, tokens: int = 64, seed: int = 0, *, say: Report) -> Mismatch:
    """Draw `texts` of `tokens` each from the checkpoint at `path`, and ask every side for their log-probabilities.

    `say` is told which side is asked. Raises InputError: no checkpoint, or of a model that `to_hf` cannot write;
    RunFailed: logits that are not finite.
    """
    path = resolve(path)
    say(f"decoding {texts} texts")
    ids, decoded, config = _drawn(path, texts, tokens, seed)
    name = config.model.dtype
    say("training's forward pass")
    trained = _of(ids, _training(path, config))
    with tempfile.TemporaryDirectory(prefix="kenotron-mismatch-") as folder:
        exported = Path(folder) / "model"
        to_hf(path, exported, dtype="float32")
        say("transformers in float32")
        reference = theirs = _of(ids, _transformers(exported, "float32"))
        if name != "float32":
            say(f"transformers in {name}")
            theirs = _of(ids, _transformers(exported, name))
    sides = {"training": trained, "decoding": decoded, f"transformers in {name}": theirs}
    return Mismatch(ids[:, 1:].tolist(), [_distance(side, each - reference) for side, each in sides.items()])


def _drawn(path: Path, texts: int, tokens: int, seed: int) -> tuple[Tensor, Tensor, Config]:
    """Ids ``[texts, 1 + tokens]``, log-probabilities of all but the first ones, and the run's config for one rank."""
    model, tokenizer, section = load_for_generation(path)
    tokens = min(tokens, longest_input(model.config) - 1)
    bos = model.config.bos_token_id
    start = model.config.eos_token_id if bos is None else bos
    sampling = SamplingOptions(max_new_tokens=tokens, temperature=1.0, stop_at_eos=False, logprobs=True, seed=seed)
    done = generate(model, tokenizer, [[start]] * texts, sampling)
    if any(len(each.tokens) < tokens for each in done):
        raise RunFailed(f"{path}: its logits are not finite")
    config = load(path / "config.yaml").model_copy(update={"model": section, "parallelism": Parallelism()})
    ids = torch.tensor([[start, *each.tokens] for each in done])
    return ids, torch.tensor([each.logprobs for each in done], dtype=torch.float64), config


@torch.no_grad()
def _of(ids: Tensor, logits_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Log-probabilities ``[texts, tokens]`` of `ids` from the second on, one text after the other."""
    rows = []
    for row in ids.to(best_device()):
        logits = logits_of(row[:-1]).float()
        rows.append(logits.log_softmax(-1).gather(-1, row[1:, None])[:, 0].double().cpu())
    return torch.stack(rows)


def _training(path: Path, config: Config) -> Callable[[Tensor], Tensor]:
    """The forward pass of training: fp32 weights, products in the run's dtype, its kernels and attention."""
    device = best_device()
    model = load_for_generation(path, "float32", device).model
    model.set_compute_dtype(dtype_of(config.model.dtype))  # type: ignore[union-attr]  # a whole one: no mesh
    attention, _ = attention_of_run(config, device)

    def logits(row: Tensor) -> Tensor:
        with use_kernels(config.model.kernels):
            return model(row, Context((1, len(row)), torch.arange(len(row), device=device), attention))  # type: ignore[operator]

    return logits


def _transformers(folder: Path, dtype: str) -> Callable[[Tensor], Tensor]:
    from transformers import AutoModelForCausalLM

    with one_line(str(folder)), quietly():
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype_of(dtype), local_files_only=True, trust_remote_code=True
        )
    model.to(best_device()).eval()
    return lambda row: model(row[None]).logits[0]


def _distance(side: str, difference: Tensor) -> Distance:
    sizes = difference.abs()
    text, token = divmod(int(sizes.argmax()), sizes.shape[1])
    return Distance(side, sizes.mean().item(), sizes.max().item(), text, token)
