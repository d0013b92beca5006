"""Training as ranks run it: with what reads Hugging Face models and decodes, which the training loop does not know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kenotron import interop, training
from kenotron.launch.export_hook import ExportHook
from kenotron.parallel.ranks import run_on_rank0
from kenotron.training import compare

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh
    from kenotron.training.run import Run


def train(config: Config, mesh: Mesh, device: torch.device, *, fresh: bool = False, reopen: bool = False) -> Run | None:
    """`kenotron.training.train`, the architecture resolved first."""
    config = run_on_rank0(lambda: interop.resolve_architecture(config))
    return training.train(
        config,
        mesh,
        device,
        fresh=fresh,
        reopen=reopen,
        open_weights=interop.initial_tensors,
        complete=complete,
        export=ExportHook(),
    )


def complete(run: Run, prompts: Sequence[str]) -> list[str]:
    """A short continuation of each of `prompts` by the model that `run` trains.

    All ranks of the run decode the same prompts in lockstep: sharded weights are gathered by all of them at once.
    """
    from kenotron.generation import ModelOnRanks, generate

    model = ModelOnRanks(run.parts, run.mesh, run.device, run.pipeline, lockstep=True)
    seed = run.config.general.seed
    completions = generate(model, run.tokenizer, prompts, max_new_tokens=64, temperature=0.8, top_p=0.95, seed=seed)
    return [completion.text for completion in completions]


def record(config: Config, mesh: Mesh, device: torch.device, *, steps: int, seed: int, folder: str) -> None:
    """`kenotron.training.compare.record`, the architecture resolved first."""
    config = run_on_rank0(lambda: interop.resolve_architecture(config))
    compare.record(config, mesh, device, steps=steps, seed=seed, folder=folder, open_weights=interop.initial_tensors)
