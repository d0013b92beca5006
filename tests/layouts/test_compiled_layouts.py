"""Twelve compiled layers stay within torch's own limit of compilations, which they met with every method that shares
sequences and with packed documents: beyond it a layer ran uncompiled, after one warning."""

from functools import partial
from pathlib import Path

import pytest
import torch

from kenotron.parallel.mesh import axes, build_mesh
from kenotron.training import model_parts
from kenotron.training.step import train_step
from support.foreign_models import ForeignProblem, folder_of
from support.layout_runs import HYBRIDS, SPARSE, STATE_SPACES, Problem, prepared, problem_of_family
from support.ranks import run_ranks
from support.tiny_run import text_overrides

TORCHS_LIMIT = 8
TWELVE = "model.model_config.num_hidden_layers=12"
PATTERN = "model.model_config.hybrid_override_pattern"
LAYERS = {"nemotron_h": (f"{PATTERN}=M*-MM*-MM*-M",), "nemotron_h_of_experts": (f"{PATTERN}=ME*EME*EME*E",)}
METHODS = ["ring", "allgather", "ulysses"]

pytestmark = pytest.mark.slow


def train_compiled(problem: Problem, layout: str, folder: Path, ranks: int) -> int:
    """Graphs that two steps and a third need; torch raises an error at its limit, which no step may meet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
        patch.setattr(model_parts, "COMPILATIONS", TORCHS_LIMIT)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        config = problem.config(f"compile=true {layout}", folder)
        with prepared(config, build_mesh(axes(config), ranks, "cpu")) as run:
            assert torch._dynamo.config.recompile_limit == TORCHS_LIMIT
            assert torch._dynamo.config.fail_on_recompile_limit_hit
            place = run.mesh.rank("batch"), run.mesh.degree("batch")
            for step in (1, 2, 3):
                train_step(run, run.data.batch(step, *place))
                run.step += 1
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        torch._dynamo.reset()
        return int(graphs)


def on_rank(rank: int, layout: str, folder: Path) -> int:
    return train_compiled(problem_of_family("llama", TWELVE), layout, folder, 2)


@pytest.mark.parametrize(
    ("method", "recompute"), [*((each, "false") for each in METHODS), ("ring", "true"), ("ring", "selective")]
)
def test_with_context_parallelism(method: str, recompute: str, tmp_path: Path) -> None:
    layout = f"cp=2 method={method} recompute={recompute}"
    graphs = run_ranks(2, on_rank, layout, tmp_path)
    assert all(0 < each <= TORCHS_LIMIT for each in graphs), graphs


@pytest.mark.parametrize(
    ("family", "recompute"),
    [(family, "false") for family in ("llama", "mistral", "smollm3", "gpt_neox", *SPARSE, *STATE_SPACES, *HYBRIDS)]
    + [(family, recompute) for family in ("llama", "mixtral", "mamba2") for recompute in ("true", "selective")],
)
def test_with_packed_documents(family: str, recompute: str, tmp_path: Path) -> None:
    text = [*text_overrides(tmp_path), "model.document_masking=true", "tokens.sequence_length=64"]
    problem = problem_of_family(family, TWELVE, *LAYERS.get(family, ()), *text)
    assert 0 < train_compiled(problem, f"recompute={recompute}", tmp_path, 1) < 12


@pytest.mark.parametrize("recompute", ["false", "true", "selective", "elementwise"])
def test_a_model_of_transformers(recompute: str, tmp_path: Path) -> None:
    problem = ForeignProblem("gpt2", model={"hf": str(folder_of("gpt2", tmp_path, n_layer=12))})
    assert 0 < train_compiled(problem, f"recompute={recompute}", tmp_path, 1) <= TORCHS_LIMIT
