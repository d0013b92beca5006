"""A compiled run compiles in its first two steps, and nothing after: new documents and new routes are only data.

The compiler's own backend is left out (`eager`): what is counted are the graphs that it would be given. Attention over
documents takes the branch of a GPU, with its kernels played (support/flash_on_cpu.py).
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.kernels.attentions import choice
from kenotron.parallel.mesh import axes, build_mesh
from kenotron.training.step import document_borders, train_step
from support import flash_on_cpu
from support.layout_runs import STATE_SPACES, prepared, problem_of_family
from support.tiny_run import text_overrides

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow]
STEPS = 40


@pytest.mark.parametrize(
    ("family", "recompute"),
    [(family, False) for family in ("llama", "mistral", "mixtral", "mamba2", "nemotron_h_of_experts")]
    + [(family, recompute) for family in ("llama", "mixtral") for recompute in (True, "selective")],
)
def test_nothing_is_compiled_after_the_second_step(
    family: str, recompute: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_on_cpu.install()
    monkeypatch.setattr(choice, "HALF", ("float32",))
    if family not in STATE_SPACES:
        monkeypatch.setattr(choice, "facts_of", lambda device: choice.DeviceFacts("nvidia", (9, 0)))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    text = [*text_overrides(tmp_path), "model.document_masking=true", "tokens.sequence_length=64"]
    text.append(f"tokens.train_steps={STEPS}")
    config = problem_of_family(family, *text).config(f"compile=true recompute={str(recompute).lower()}", tmp_path)
    counts: list[dict[str, Any]] = []
    documents: set[int] = set()
    with prepared(config, build_mesh(axes(config), 1, "cpu")) as run:
        while not run.finished:
            batches = run.data.batch(run.step + 1, 0, 1)
            documents |= {len(document_borders(batch.documents)) for batch in batches if batch.documents is not None}
            train_step(run, batches)
            run.step += 1
            found = torch._dynamo.utils.counters
            counts.append({"graphs": found["stats"]["unique_graphs"], "breaks": sum(found["graph_break"].values())})
    torch._dynamo.reset()
    assert len(counts) == STEPS
    assert len(documents) > 1
    assert counts[1]["graphs"] > 0
    assert counts[1:] == [counts[1]] * (STEPS - 1)
