"""What a rank holds with expert parallelism: tensor bytes counted by storage, beside the formula.

    python benchmarks/expert_memory.py                  dp 4 with expert_parallel_size 1, 2 and 4, ZeRO 0, 1 and 3

Two moments of a step of two micro-batches, as in `zero_memory.py`, in fp32. N parameters are in no expert, E in the
experts of all layers; D = dp ranks share them, ep of them the experts, and D / ep hold the same ones:

    moment                       stage 0             stage 1                        stage 3
    between two steps            12 (N + E/ep)       12 (N + E)/D                   12 (N + E)/D     masters, moments
    before the last micro-batch  + 4 (N + E/ep)      + 4 (N + E/ep)                 + 4 (N + E)/D    gradients
                                                     + 4 N + (4 E/ep if ep < D)                      weights at work

Without ZeRO a rank holds 1/ep of the experts. With ZeRO it holds 1/D of the masters and moments for any ep, and a
larger ep only reduces the weights that are whole during a step: with ep = D no other rank has a rank's experts, so they
are not gathered.
"""

from __future__ import annotations

import torch

from kenotron.models import build
from kenotron.training.run import Run
from zero_memory import DP, MOMENTS, measure, report

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
            overrides = [SPARSE, f"parallelism.expert_parallel_size={ep}", f"optimizer.zero_stage={stage}"]
            found = measure(sizes_of, DP, "fp32", overrides)
            expected = formula(stage, ep, *found["sizes"])
            cells = [(found["bytes"][moment], expected[moment]) for moment in SHOWN]
            worst = max([worst, *(abs(a / b - 1) for a, b in cells)])
            print(
                f"  {stage:10}  {ep:2}  " + "  ".join(f"{a / 2**20:16.2f} ({b / 2**20:8.2f}) " for a, b in cells),
                flush=True,
            )
    report(worst)


def formula(stage: int, ep: int, others: int, experts: int) -> dict[str, float]:
    """The table above."""
    on_rank, share = others + experts / ep, (others + experts) / DP
    between = 12 * (on_rank if stage == 0 else share)
    gradients = 4 * (share if stage == 3 else on_rank)
    at_work = 4 * others + (4 * experts / ep if ep < DP else 0) if stage == 1 else 0
    return dict(zip(SHOWN, (between, between + gradients + at_work), strict=True))


def sizes_of(run: Run) -> tuple[int, int]:
    """Numbers of parameters of the whole model: those in no expert, and those of the experts."""
    with torch.device("meta"):
        whole = {name: parameter.numel() for name, parameter in build(run.config.model).named_parameters()}
    experts = sum(size for name, size in whole.items() if ".experts." in name)
    return sum(whole.values()) - experts, experts


if __name__ == "__main__":
    main()
