"""What `kenotron plan` predicts beside what others have published of their runs on up to 512 GPUs.

    python benchmarks/plan_published.py                  # all: a quarter of an hour on two cores
    python benchmarks/plan_published.py --only "h100 7b"

Sources, both with the commands and configs of their runs, read for no rate and no share of the planner:

    llm-foundry   scripts/train/benchmarking/README.md at 8c8dd48f7: MPT on H100 and A100, torch 2.1, FSDP
    torchtitan    benchmarks/llama3_h100_202412_torchtitan.md and asyncTP_llama3_h100_2025-06_torchtitan.md: Llama 3.1

MPT is planned as StarCoder2, which has rotary positions in place of learned ones and is the same block otherwise.
The picture (docs/pictures/plan-published-*.svg) is drawn when all rows were planned.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from kenotron.config import Config, load  # noqa: E402
from kenotron.planner.hardware import GIB, GPUS, Gpu  # noqa: E402
from kenotron.planner.memory import plan_memory  # noqa: E402
from kenotron.planner.speed import speed_of  # noqa: E402
from pictures import THEMES, drawing  # noqa: E402

MPT = {  # hidden_size, layers; heads have 128 channels
    "1b": (2048, 24),
    "3b": (2560, 32),
    "7b": (4096, 32),
    "13b": (5120, 40),
    "30b": (7168, 48),
    "70b": (8192, 80),
}
# GPU, model, GPUs in all, tensor parallel, sequence length, micro-batch, accumulation, ZeRO stage, recomputation,
# tokens/s of a GPU.
TABLE = """
h100      1b    8    1  2048   14  1   3  false      45455
h100      1b    64   1  2048   20  1   3  false      44402
h100      1b    512  1  2048   12  1   2  false      39837
h100      3b    16   1  2048   10  3   3  false      24142
h100      3b    64   1  2048   6   3   3  false      22525
h100      3b    512  1  2048   8   1   2  false      21664
h100      7b    8    1  2048   6   1   3  false      10643
h100      7b    128  1  2048   6   1   3  false      10475
h100      7b    512  1  2048   6   1   3  false      9670
h100      13b   8    1  2048   2   1   3  false      4792
h100      13b   64   1  2048   2   1   3  false      4800
h100      13b   512  1  2048   16  1   3  true       4952
h100      30b   8    1  2048   3   21  3  true       2002
h100      30b   512  1  2048   8   1   3  true       2115
h100      70b   64   1  2048   8   4   3  true       1039
h100      70b   512  1  2048   8   1   3  true       1007
h100      1b    8    1  8192   3   4   3  false      29157
h100      7b    8    1  8192   8   2   3  true       6935
h100      7b    8    1  32768  2   2   3  true       3318
a100      1b    8    1  2048   14  4   3  false      20513
a100      3b    8    1  2048   10  2   3  false      10811
a100      7b    8    1  2048   6   2   3  false      4641
a100      13b   8    1  2048   2   3   3  false      2262
a100      30b   8    1  2048   3   21  3  true       916
a100      3b    8    1  8192   3   6   3  false      7695
a100      7b    8    1  8192   8   2   3  true       3206
a100-40gb 1b    128  1  2048   10  1   3  false      18647
a100-40gb 3b    128  1  2048   6   1   3  false      9538
a100-40gb 7b    128  1  2048   18  1   3  true       3623
a100-40gb 13b   128  1  2048   16  1   3  true       1972
a100-40gb 30b   128  1  2048   6   1   3  true       865
h100-500w llama-3.1-8b  8   1 8192 2  1 3 selective  5762
h100-500w llama-3.1-8b  128 1 8192 2  1 3 selective  5605
h100-500w llama-3.1-8b  64  8 8192 12 1 3 selective  4378
h100-500w llama-3.1-70b 256 8 8192 16 1 3 true       597
"""
# torchtitan's H100s have other memory than those of the data sheet, and 500 W of 700.
COLOURS = {"h100": "#d1495b", "h100-500w": "#edae49", "a100": "#2e86ab", "a100-40gb": "#66a182"}
KINDS: dict[str, Gpu] = GPUS | {"h100-500w": GPUS["h100"]._replace(bandwidth=2.4e12, memory_gib=95.0, watts=500)}


class Row(NamedTuple):
    """A published run."""

    gpu: str
    model: str
    gpus: int
    tp: int
    length: int
    micro_batch: int
    accumulation: int
    zero: int
    recompute: str
    published: float

    def config(self) -> Config:
        """The same model and layout as a config of ours."""
        overrides = [
            f"parallelism={{dp: {self.gpus // self.tp}, tp: {self.tp}, recompute_layer: {self.recompute}}}",
            f"optimizer.zero_stage={self.zero}",
            f"tokens.micro_batch_size={self.micro_batch}",
            f"tokens.batch_accumulation_per_replica={self.accumulation}",
            f"tokens.sequence_length={self.length}",
            *(["parallelism.tp_mode=REDUCE_SCATTER"] if self.tp > 1 else []),
        ]
        if self.model in MPT:
            hidden, layers = MPT[self.model]
            keys = (
                f"{{family: starcoder2, hidden_size: {hidden}, num_hidden_layers: {layers}, use_bias: false,"
                f" num_attention_heads: {hidden // 128}, num_key_value_heads: {hidden // 128}, vocab_size: 50368,"
                f" max_position_embeddings: {self.length}}}"
            )
            return load(ROOT / "examples" / "models" / "starcoder2-3b.yaml", [f"model.model_config={keys}", *overrides])
        return load(ROOT / "examples" / "models" / f"{self.model}.yaml", overrides)


def row_of(cells: list[str]) -> Row:
    """A line of the table."""
    gpu, model, *numbers, recompute, published = cells
    gpus, tp, length, micro_batch, accumulation, zero = map(int, numbers)
    return Row(gpu, model, gpus, tp, length, micro_batch, accumulation, zero, recompute, float(published))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows that contain these words")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder of the picture")
    given = parser.parse_args()
    rows = [row_of(line.split()) for line in TABLE.strip().splitlines() if given.only in " ".join(line.split())]
    print(f"{'GPU':10} {'model':14} GPUs  tp length  micro  planned  published  ratio    GiB")
    found: dict[str, list[tuple[int, float]]] = {}  # GPU → number of them, planned over published
    begun = time.monotonic()
    for done, row in enumerate(rows, start=1):
        config, gpu = row.config(), KINDS[row.gpu]
        plans = plan_memory(config, gpu)
        planned = speed_of(config, gpu, plans).of_a_gpu
        found.setdefault(row.gpu, []).append((row.gpus, planned / row.published))
        batch = f"{row.micro_batch:3}x{row.accumulation:<3}"
        print(
            f"{row.gpu:10} {row.model:14} {row.gpus:4} {row.tp:3} {row.length:6} {batch} {planned:7,.0f}"
            f" {row.published:10,.0f} {planned / row.published:6.2f} {plans[0].peak.bytes / GIB:6.1f}",
            flush=True,
        )
        left = (time.monotonic() - begun) / done * (len(rows) - done)
        print(f"{done} of {len(rows)}, {left / 60:.0f} min left", file=sys.stderr)
    for name, pairs in found.items():
        ratios = [ratio for _, ratio in pairs]
        print(f"{name}: {statistics.median(ratios):.2f} of published, from {min(ratios):.2f} to {max(ratios):.2f}")
    if not given.only:
        for theme, colours in THEMES.items():
            draw(found, colours, given.out / f"plan-published-{theme}.svg")


def draw(found: dict[str, list[tuple[int, float]]], colours: dict[str, str], file: Path) -> None:
    """Draw planned over published speed by the number of GPUs."""
    with drawing(file, colours, (7.5, 3.2)) as figure:
        axes = figure.subplots()
        for name, pairs in found.items():
            gpus: list[Any] = [gpus for gpus, _ in pairs]
            axes.plot(gpus, [ratio for _, ratio in pairs], "o", color=COLOURS[name], markersize=4, label=name)
        axes.axhline(1, color=colours["grid"], linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks([8 << power for power in range(7)], [str(8 << power) for power in range(7)])
        axes.set_ylim(0.8, 2)
        axes.set_xlabel("GPUs")
        axes.set_ylabel("planned / published")
        axes.legend(frameon=False, labelcolor=colours["ink"], ncols=4)


if __name__ == "__main__":
    main()
