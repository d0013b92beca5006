"""A proxy run of DoReMi: it learns weights of the data's domains from a comparison with a trained reference model.

Each step, for the domains d = 1 … k of its global batch (Xie et al., arXiv 2305.10429, algorithm 1):

    excess_d = mean over the tokens of d of max(loss of the proxy - loss of the reference, 0); without tokens unchanged
    alpha    = (1 - c) * softmax(log alpha + eta * excess) + c / k
    the proxy's weights follow the gradient of sum over d of alpha_d * (mean loss of d)

The result is the mean of alpha over all steps. The excess is computed on the whole global batch, before its gradients:
so weights are the same on every layout, and each step costs an additional forward pass of the proxy and of the
reference.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from kenotron.config.errors import naming
from kenotron.interop.sources import open_source
from kenotron.models.token_loss import OwnLoss
from kenotron.observers.validation import evaluate
from kenotron.parallel.collectives import all_reduce
from kenotron.parallel.data import evaluating
from kenotron.parallel.ranks import run_on_rank0
from kenotron.text.tokenizer import check_tokens, load_tokenizer
from kenotron.training.console import logger
from kenotron.training.hooks import Hook
from kenotron.training.initial_weights import load_initial_weights
from kenotron.training.model_parts import build_parts
from kenotron.training.run_folder import log_folder
from kenotron.training.step import to_device

if TYPE_CHECKING:
    from kenotron.config.doremi import DoReMi
    from kenotron.data import TokenBatch
    from kenotron.models import MicroBatch
    from kenotron.training.run import Run
    from kenotron.training.step import StepResult

REFERENCE = "doremi.ref_model_resume_checkpoint_path"
Floats = NDArray[np.float64]


class DomainWeights:
    """alpha of `count` domains, initially uniform; the last excess losses, and the sum of alpha over the steps."""

    def __init__(self, count: int, step_size: float = 1.0, smoothing: float = 1e-3) -> None:
        self.step_size, self.smoothing = step_size, smoothing
        self.alpha = np.full(count, 1 / count)
        self.excess, self.total, self.steps = np.zeros(count), np.zeros(count), 0

    def update(self, sums: Floats, tokens: Floats) -> None:
        """Update alpha from one step: `sums` of the positive excess losses of each domain, over its `tokens`."""
        self.excess = np.where(tokens > 0, sums / np.maximum(tokens, 1), self.excess)
        exponents = np.log(self.alpha) + self.step_size * self.excess
        grown = np.exp(exponents - exponents.max())
        self.alpha = (1 - self.smoothing) * grown / grown.sum() + self.smoothing / len(grown)
        self.total, self.steps = self.total + self.alpha, self.steps + 1

    @property
    def average(self) -> Floats:
        """The result: the mean of alpha over the steps so far."""
        return self.total / max(self.steps, 1)


class ProxyOfReference(Hook):
    """Weights the losses of each step's batch by domain; on all ranks, which compute the same weights."""

    def __init__(self, config: DoReMi, path: str) -> None:
        self.names, self.path = config.domain_names, path
        self.weights = DomainWeights(len(self.names), config.step_size, config.smoothing_param)
        self.reference: Run | None = None

    def on_train_start(self, run: Run) -> None:
        """Load the reference, sharded as the proxy is. Raises InputError if it is not a model of the same shape."""
        logger.info("DoReMi: %d domains, reference %s", len(self.names), self.path)
        run_on_rank0(lambda: self._check_tokenizer(run))
        parts, pipeline = build_parts(run.config, run.mesh, run.device)
        load_initial_weights(parts, self.path, REFERENCE)
        if pipeline is not None:
            pipeline.share_tied_weights()
        self.reference = replace(run, parts=parts, pipeline=pipeline)

    def _check_tokenizer(self, run: Run) -> None:
        with naming(REFERENCE):
            folder = open_source(self.path, verify=False).tokenizer
        tokenizer = load_tokenizer(folder) if folder else None
        check_tokens(tokenizer, run.tokenizer, f"{REFERENCE}: {self.path}")

    @torch.no_grad()
    def before_step(self, run: Run) -> None:
        """Compare the losses of this step's tokens with the reference's, and set the weights of its samples."""
        assert self.reference is not None
        sums = torch.zeros(2, len(self.names), dtype=torch.float64, device=run.device)
        domains = [self._domains(run, batch) for batch in run.batches]
        with evaluating(run.parts + self.reference.parts, [*run.roots, *self.reference.roots]):
            for batch, domain in zip(run.batches, domains):
                micro_batch = to_device(batch, run)
                assert micro_batch.labels is not None
                proxy, reference = _token_losses(run, micro_batch), _token_losses(self.reference, micro_batch)
                if proxy is None or reference is None:  # a pipeline rank without the head
                    continue
                one_hot = F.one_hot(torch.from_numpy(domain), len(self.names)).to(sums)
                real = micro_batch.labels != -100
                excess = torch.stack(((proxy - reference).clamp(min=0), real.to(proxy.dtype)))
                sums += excess.view(2, len(domain), -1).sum(2, dtype=torch.float64) @ one_hot
        totals = all_reduce(sums, run.mesh.group("loss")).cpu().numpy()
        if np.isfinite(totals).all():
            self.weights.update(*totals)
        tokens = totals[1]
        factors = np.where(tokens > 0, self.weights.alpha * tokens.sum() / np.maximum(tokens, 1), 0).astype(np.float32)
        run.batches = [replace(batch, weights=factors[domain]) for batch, domain in zip(run.batches, domains)]

    def _domains(self, run: Run, batch: TokenBatch) -> NDArray[np.int64]:
        stage = run.data.stage_at(run.step + 1)
        assert batch.sources is not None
        return np.array([source.group for source in stage.sources])[batch.sources]

    def after_step(self, run: Run, result: StepResult) -> None:
        """Add the step's weights and excess losses to its metrics."""
        for name, alpha, excess in zip(self.names, self.weights.alpha, self.weights.excess):
            run.record_metric(f"doremi_weight/{name}", alpha, on_console=False)
            run.record_metric(f"doremi_excess/{name}", excess, on_console=False)

    def on_train_end(self, run: Run) -> None:
        """Write the mean weights to a file for the next run's `doremi.domain_weights`."""
        if not run.mesh.is_first or not run.finished:
            return
        average = [float(weight) for weight in self.weights.average]
        file = log_folder(run.config) / "doremi.json"
        file.write_text(json.dumps({"domain_names": self.names, "domain_weights": average}, indent=1) + "\n")
        shares = ", ".join(f"{name} {weight:.4f}" for name, weight in zip(self.names, average))
        logger.info("DoReMi: mean weights of %d steps: %s", self.weights.steps, shares)
        logger.info("Train with them: doremi.domain_weights=%s", file)

    def state_dict(self) -> dict[str, Any]:
        """Return weights, excess losses, and the sum of the weights over the steps."""
        lists = {name: getattr(self.weights, name).tolist() for name in ("alpha", "excess", "total")}
        return lists | {"steps": self.weights.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        for name in ("alpha", "excess", "total"):
            setattr(self.weights, name, np.array(state[name]))
        self.weights.steps = state["steps"]


def _token_losses(run: Run, micro_batch: MicroBatch) -> Tensor | None:
    """Return cross entropies ``[tokens]`` in fp32, 0 without a label; None on pipeline ranks without the head."""
    losses: list[Tensor] = []

    def keep(logits: Tensor, labels: Tensor) -> Tensor:
        losses.append(F.cross_entropy(logits, labels, reduction="none"))
        return losses[0]

    evaluate(run, replace(micro_batch, ctx=replace(micro_batch.ctx, loss=OwnLoss(keep))))
    return losses[0] if losses else None
