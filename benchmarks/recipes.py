"""Write the recipes of examples/recipes: layouts of a model on so many GPUs, the fastest that fit, by `kenotron plan`.

python benchmarks/recipes.py                        # all: half an hour on two cores
python benchmarks/recipes.py llama-3.1-8b 64        # one
python benchmarks/recipes.py --headers              # the same layouts, planned anew: ten minutes

A recipe is a second YAML beside that of its model. What is planned stands in its header, and a test plans it anew
(tests/planner/test_recipes.py).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from kenotron.config import Config, load  # noqa: E402
from kenotron.planner.hardware import GIB, GPUS  # noqa: E402
from kenotron.planner.memory import plan_memory  # noqa: E402
from kenotron.planner.search import Layout, best_of  # noqa: E402
from kenotron.planner.speed import Speed, speed_of  # noqa: E402
from kenotron.planner.verdict import usable  # noqa: E402

MODELS, RECIPES = ROOT / "examples" / "models", ROOT / "examples" / "recipes"
GPU, BATCH, LENGTH = GPUS["h100"], 1024, 4096
USABLE = usable(int(GPU.memory_gib * GIB), GPU)

# dp, tp, pp, ep, ZeRO stage: those of which the fastest is taken.
SHAPES: dict[tuple[str, int], list[tuple[int, int, int, int, int]]] = {
    ("llama-3.2-1b", 1): [(1, 1, 1, 1, 0)],
    ("llama-3.2-1b", 8): [(8, 1, 1, 1, 1)],
    ("llama-3.2-1b", 64): [(64, 1, 1, 1, 1)],
    ("gaperon-1.5b", 1): [(1, 1, 1, 1, 0)],
    ("gaperon-1.5b", 8): [(8, 1, 1, 1, 1)],
    ("gaperon-1.5b", 64): [(64, 1, 1, 1, 1)],
    ("llama-3.1-8b", 8): [(8, 1, 1, 1, 3), (4, 2, 1, 1, 1)],
    ("llama-3.1-8b", 64): [(64, 1, 1, 1, 1), (64, 1, 1, 1, 3), (32, 2, 1, 1, 1)],
    ("llama-3.1-8b", 512): [(512, 1, 1, 1, 1), (256, 2, 1, 1, 1), (128, 2, 2, 1, 1)],
    ("llama-3.1-70b", 64): [(8, 8, 1, 1, 3), (4, 8, 2, 1, 1), (2, 8, 4, 1, 1)],
    ("llama-3.1-70b", 512): [(32, 8, 2, 1, 1), (16, 8, 4, 1, 1), (32, 4, 4, 1, 1)],
    ("mixtral-8x7b", 64): [(64, 1, 1, 8, 1)],
    ("mixtral-8x7b", 512): [(512, 1, 1, 8, 1), (256, 1, 2, 8, 1)],
    ("olmoe-1b-7b", 8): [(8, 1, 1, 8, 1), (8, 1, 1, 1, 1)],
    ("olmoe-1b-7b", 64): [(64, 1, 1, 8, 1), (64, 1, 1, 1, 1)],
    ("nemotron-h-8b", 8): [(8, 1, 1, 1, 3)],
    ("nemotron-h-8b", 64): [(64, 1, 1, 1, 1), (64, 1, 1, 1, 3)],
}


def fastest(model: str, gpus: int) -> Layout:
    """The fastest of the shapes that are tried, each with as little recomputation as fits."""
    found = []
    for dp, tp, pp, ep, stage in SHAPES[model, gpus]:
        overrides = [f"parallelism.dp={dp}", f"parallelism.tp={tp}", f"parallelism.pp={pp}"]
        overrides += [f"parallelism.expert_parallel_size={ep}"] if ep > 1 else []
        overrides += ["parallelism.tp_mode=REDUCE_SCATTER"] if tp > 1 else []
        overrides += ["parallelism.pp_engine=1f1b"] if pp > 1 else []
        overrides += [f"optimizer.zero_stage={stage}", "tokens.micro_batch_size=1"]
        overrides += [f"tokens.batch_accumulation_per_replica={BATCH // dp}", f"tokens.sequence_length={LENGTH}"]

        def changed(more: list[str]) -> Config:
            return load(MODELS / f"{model}.yaml", more)

        found.append(best_of(overrides, changed(overrides), changed, GPU, USABLE))
    fits = [(each.speed.seconds, each) for each in found if each.speed is not None]
    if not fits:
        sys.exit(f"{model} on {gpus} GPUs: nothing fits, {[each.peak / GIB for each in found]} GiB")
    return min(fits, key=lambda pair: pair[0])[1]


def predicted(model: Path, recipe: Path) -> tuple[int, Speed]:
    """The bytes of the largest rank and the speed of a recipe."""
    config = load(model, [str(recipe)])
    plans = plan_memory(config, GPU)
    return max(each.peak.bytes for each in plans), speed_of(config, GPU, plans)


def header(model: str, gpus: int, peak: int, speed: Speed) -> str:
    """What a recipe says of itself."""
    title = (MODELS / f"{model}.yaml").read_text().splitlines()[0].removeprefix("# ").split(":")[0].split(" (")[0]
    title = title.split(",")[0]
    files = f"examples/models/{model}.yaml examples/recipes/{model}-{gpus}.yaml"
    waits = {name: sum(rank.of.get(name, 0.0) for rank in speed.ranks) for rank in speed.ranks for name in rank.of}
    bubble = waits.get("waits for pp", 0.0) / (len(speed.ranks) * speed.seconds)
    days = 1e12 / speed.tokens_per_second / 86400
    machines = f"{gpus // 8} machines of 8 " if gpus > 8 else f"{gpus} " if gpus > 1 else "one "
    return (
        f"# {title} on {machines}H100 80 GB, {BATCH * LENGTH:,} tokens a step:\n"
        f"#     kenotron train {files}\n"
        f"# Planned, not measured: {peak / GIB:.1f} GiB of {GPU.memory_gib}, {speed.tokens_per_second:,.0f} tokens/s "
        f"({speed.of_a_gpu:,.0f} a GPU), MFU {speed.mfu:.1%}, bubble {bubble:.1%},\n"
        f"# 1e12 tokens in {days:,.1f} days, by\n"
        f"#     kenotron plan {files} --gpu h100\n"
    )


def write(model: str, gpus: int) -> str:
    """Write a recipe; returns what it says."""
    layout = fastest(model, gpus)
    assert layout.speed is not None
    sections: dict[str, dict[str, str]] = {}
    for override in layout.overrides:
        path, value = override.split("=")
        section, key = path.split(".")
        sections.setdefault(section, {})[key] = value
    lines = [
        f"{section}: {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}\n"
        for section, keys in sections.items()
    ]
    text = header(model, gpus, layout.peak, layout.speed) + "\n" + "".join(lines)
    (RECIPES / f"{model}-{gpus}.yaml").write_text(text)
    return text


def plan_anew(model: str, gpus: int) -> str:
    """Write a recipe's header again, of its layout as it is; returns what it says."""
    recipe = RECIPES / f"{model}-{gpus}.yaml"
    layout = recipe.read_text().partition("\n\n")[2]
    text = header(model, gpus, *predicted(MODELS / f"{model}.yaml", recipe)) + "\n" + layout
    recipe.write_text(text)
    return text


SAID = re.compile(
    r"measured: (\S+) GiB of \S+, (\S+) tokens/s \((\S+) a GPU\), MFU (\S+), bubble (\S+),\n# 1e12 tokens in (\S+) days"
)


def table() -> str:
    """The rows of the README, from the headers."""
    rows = []
    for model, gpus in SHAPES:
        name = f"{model}-{gpus}.yaml"
        found = SAID.search((RECIPES / name).read_text())
        assert found is not None
        rows.append(f"| {' | '.join((f'[`{name}`]({name})', str(gpus), *found.groups()))} |\n")
    return "".join(rows)


def main() -> None:
    """Write the recipes of the arguments, or all, and print the rows of the README."""
    chosen = [(sys.argv[1], int(sys.argv[2]))] if len(sys.argv) > 2 else list(SHAPES)
    for name, count in chosen:
        print((plan_anew if "--headers" in sys.argv else write)(name, count), flush=True)
    if len(chosen) == len(SHAPES):
        print(table())


if __name__ == "__main__":
    main()
