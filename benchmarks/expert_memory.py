"""What a rank holds with expert parallelism: tensor bytes counted by storage, beside the formula.

    python benchmarks/expert_memory.py                  dp 4 with expert_parallel_size 1, 2 and 4, ZeRO 0, 1 and 3

Two moments of a step of two micro-batches, as in `zero_memory.py`, in fp32. N parameters are in no expert, E in the
experts of all layers; D = dp ranks share them, ep of them the experts, and D / ep hold the same ones:

    moment                       stage 0             stage 1                        stage 3
    between two steps            12 (N + E/ep)       12 (N + E)/D                   12 (N + E)/D     masters, moments
    before the last micro-batch  + 4 (N + E/ep)      + 4 (N + E/ep)                 + 4 (N + E)/D    gradients
                                                     + 4 N + (4 E/ep if ep < D)                      weights at work

Without ZeRO a rank's experts are an ep-th. With it masters and moments are the D-th part anyway, and what falls is what
is whole at work: with ep = D a rank's experts have no copies elsewhere, and none is made of them.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from kenotron.config import dump, load  # noqa: E402
from kenotron.models import build  # noqa: E402
from kenotron.parallel.mesh import axes, build_mesh  # noqa: E402
from zero_memory import DP, MOMENTS, TOLERANCE, WORK, Live, build_run, configure, steps  # noqa: E402

EXPERTS = 8
SPARSE = (
    "model.model_config={family: mixtral, hidden_size: 128, intermediate_size: 352, num_hidden_layers: 4, "
    f"num_attention_heads: 4, num_key_value_heads: 4, vocab_size: 1024, num_local_experts: {EXPERTS}, "
    "num_experts_per_tok: 2, tie_word_embeddings: false}"
)
SHOWN = MOMENTS[:2]


def main() -> None:
    worst = 0.0
    print(f"dp {DP}, {EXPERTS} experts a layer, fp32: MiB on the fullest rank, measured (formula)")
    print("  zero_stage  ep  " + "  ".join(f"{moment:>28}" for moment in SHOWN))
    for stage in (0, 1, 3):
        for ep in (1, 2, 4):
            found = measure(stage, ep)
            expected = formula(stage, ep, *found["sizes"])
            cells = [(found["bytes"][moment], expected[moment]) for moment in SHOWN]
            worst = max([worst, *(abs(a / b - 1) for a, b in cells)])
            print(
                f"  {stage:10}  {ep:2}  " + "  ".join(f"{a / 2**20:16.2f} ({b / 2**20:8.2f}) " for a, b in cells),
                flush=True,
            )
    verdict = "holds" if worst <= TOLERANCE else "MISSED"
    print(f"\nFarthest from the formula: {worst:.1%} (bar {TOLERANCE:.0%}: {verdict})")


def formula(stage: int, ep: int, others: int, experts: int) -> dict[str, float]:
    """The table above."""
    on_rank, share = others + experts / ep, (others + experts) / DP
    between = 12 * (on_rank if stage == 0 else share)
    gradients = 4 * (share if stage == 3 else on_rank)
    at_work = 4 * others + (4 * experts / ep if ep < DP else 0) if stage == 1 else 0
    return dict(zip(SHOWN, (between, between + gradients + at_work), strict=True))


def measure(stage: int, ep: int) -> dict[str, dict[str, int]]:
    """Sizes of the model, and bytes of the rank that is fullest between steps."""
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(on_rank, args=(stage, ep, folder), nprocs=DP, start_method="fork")
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(DP)]
    return max(ranks, key=lambda rank: rank["bytes"][MOMENTS[0]])


def on_rank(rank: int, stage: int, ep: int, folder: str) -> None:
    torch.set_num_threads(1)
    logging.getLogger("kenotron").setLevel(logging.ERROR)
    store = dist.FileStore(f"{folder}/store", DP)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=DP, timeout=timedelta(seconds=300))
    layout = [f"parallelism.dp={DP}", f"parallelism.expert_parallel_size={ep}", f"optimizer.zero_stage={stage}"]
    overrides = [SPARSE, *layout, "tokens.batch_accumulation_per_replica=2"]
    config = load(yaml.safe_load(dump(configure(WORK, compiled=False))), overrides)
    mesh = build_mesh(axes(config, DP), DP, "cpu")
    with Live() as live:
        run = build_run(config, mesh)
        found = steps(run, live)
    with torch.device("meta"):
        whole = {name: parameter.numel() for name, parameter in build(config.model).named_parameters()}
    experts = sum(size for name, size in whole.items() if ".experts." in name)
    Path(folder, f"{rank}.json").write_text(
        json.dumps({"sizes": [sum(whole.values()) - experts, experts], "bytes": found})
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
