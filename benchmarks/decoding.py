"""What decoding costs: against `transformers.generate`, and on two ranks against one.

    python benchmarks/decoding.py                                   about two minutes on two cores
    python benchmarks/decoding.py --dtypes float32 --rounds 3 --size 350M

The models are those of `training.py`. First one process: ours and transformers' `generate` with the same weights and
prompts, greedy, in turns.

Then ranks. Two gloo ranks with one thread each hold the model split by tp, cut by pp, and once more whole on rank 0.
They take turns, so that a ratio is taken within one round. A step of decoding is little work and, with tp, two sums a
layer, the logits and the tokens travel: splitting buys room for a model that one rank cannot hold, and speed once its
layers are large.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "peers"))

from ours import configure  # noqa: E402
from work import SIZES, Work  # noqa: E402

SIZES = SIZES | {"350M": Work("350M", 1024, 24, 16, 2816, 16384, 256, 1)}  # wide enough to be split over ranks

LAYOUTS: dict[str, dict[str, int]] = {"one": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
PROMPT, BATCHES = 32, (1, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--size", choices=SIZES, default="17M")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--only-ranks", action="store_true", help="leave transformers out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save(arguments.size, Path(folder))
        if not arguments.only_ranks:
            against_transformers(Path(folder), arguments)
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=decode, args=(rank, folder, arguments)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        sys.exit(any(rank.exitcode for rank in ranks))


def save(size: str, root: Path) -> None:
    """A checkpoint of fresh weights."""
    from kenotron.checkpoint import saving
    from kenotron.config import dump
    from kenotron.models import build, initialize_model, materialize, named_parameters

    config = configure(replace(SIZES[size], precision="fp32"), compiled=False)
    with torch.device("meta"):
        model = build(config.model)
    materialize(model, "cpu")
    initialize_model(model, std=0.02, scaling="NUM_LAYERS", seed=1)
    tensors = {name: parameter.detach() for name, parameter in named_parameters(model)}
    saving.save(root, 1, model=tensors, optimizer=None, state={}, config_yaml=dump(config), model_config={})


def against_transformers(folder: Path, arguments: argparse.Namespace) -> None:
    """The best round of both, in turns; and whether texts are the same (in bf16 rounding decides near ties)."""
    from transformers import AutoModelForCausalLM

    from kenotron.generation import SamplingOptions, generate
    from kenotron.generation.load import load_for_generation
    from kenotron.interop import to_hf

    to_hf(folder / "1", folder / "hf")
    count = arguments.new_tokens
    for dtype, batch in product(arguments.dtypes, BATCHES):
        model = load_for_generation(folder, dtype, "cpu").model
        sampling = SamplingOptions(max_new_tokens=count, stop_at_eos=False)
        peer = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=getattr(torch, dtype)).eval()
        prompts, lengths = prompts_of(batch), {"min_new_tokens": count, "max_new_tokens": count}
        ids = torch.tensor(prompts)

        def ours(model: Any = model, prompts: Any = prompts, sampling: Any = sampling) -> list[list[int]]:
            completions = generate(model, None, prompts, sampling)
            return [completion.tokens for completion in completions]

        def theirs(peer: Any = peer, ids: Any = ids, lengths: Any = lengths) -> list[list[int]]:
            mask = torch.ones_like(ids)
            found = peer.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)
            return found[:, PROMPT:].tolist()

        same = ours() == theirs()  # to warm up, too
        rounds = [(*timed(ours), *timed(theirs)) for _ in range(arguments.rounds)]
        wall, processor, peers_wall, peers_processor = (min(seconds) for seconds in zip(*rounds))
        told = f"ours {batch * count / wall:.0f} tokens/s, transformers {batch * count / peers_wall:.0f}"
        told += f" ({peers_wall / wall:.2f}x; processor time {peers_processor / processor:.2f}x, same texts: {same})"
        print(f"{dtype}, {batch} prompt(s) at once: {told}", flush=True)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and those of processors, which other work on the machine lengthens less."""
    started, before = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - before


def prompts_of(batch: int) -> list[list[int]]:
    """Token ids, PROMPT a row."""
    return [[1 + row + place for place in range(PROMPT)] for row in range(batch)]


def decode(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    """One rank. Rank 0 prints."""
    from kenotron.generation import SamplingOptions, generate
    from kenotron.generation.load import load_for_generation
    from kenotron.parallel.mesh import build_mesh
    from kenotron.parallel.shared_memory import collectives_in_memory

    sampling = SamplingOptions(max_new_tokens=arguments.new_tokens, stop_at_eos=False)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300))
    meshes = {name: build_mesh(degrees, 2, "cpu") for name, degrees in LAYOUTS.items() if degrees}
    memory = ExitStack()
    for mesh in meshes.values():
        memory.enter_context(collectives_in_memory(mesh))
    for dtype in arguments.dtypes:
        models = {name: load_for_generation(folder, dtype, "cpu", mesh).model for name, mesh in meshes.items()}
        models["one"] = load_for_generation(folder, dtype, "cpu").model if rank == 0 else None
        for batch in BATCHES:
            prompts = prompts_of(batch)

            def turn(name: str, models: Any = models, batch: int = batch, prompts: Any = prompts) -> float:
                """Tokens per second of this layout."""
                dist.barrier()
                started = time.perf_counter()
                if models[name] is not None:
                    generate(models[name], None, prompts, sampling)
                dist.barrier()
                return batch * arguments.new_tokens / (time.perf_counter() - started)

            rounds = [{name: turn(name) for name in LAYOUTS} for _ in range(arguments.rounds + 1)]
            if rank == 0:
                show(dtype, batch, rounds[1:])  # the first is to warm up
    dist.barrier()
    dist.destroy_process_group()


def show(dtype: str, batch: int, rounds: list[dict[str, float]]) -> None:
    speeds = {name: statistics.median(each[name] for each in rounds) for name in LAYOUTS}
    ratios = {name: statistics.median(each[name] / each["one"] for each in rounds) for name in LAYOUTS}
    told = ", ".join(f"{name} {speed:.0f} tokens/s ({ratios[name]:.2f}x)" for name, speed in speeds.items())
    print(f"{dtype}, {batch} prompt(s) at once: {told}", flush=True)


if __name__ == "__main__":
    main()
