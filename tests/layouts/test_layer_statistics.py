"""`metrics_logging`: against transformers in float64, the same on every layout, and of no effect on training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_doremi import Batches

import kenotron as kn
from kenotron.config import InputError
from kenotron.observers.layer_statistics import LOGITS, QUERIES, _spread
from support.layout_runs import SHORT, train_here
from support.ranks import run_ranks
from support.tiny_run import losses, metrics, saved_weights, tiny_config, train_quietly

EVERY_TWO = "metrics_logging={log_level: 1, log_detail_interval: 2}"
FOUR = ("tokens.train_steps=4", "tokens.micro_batch_size=2", "tokens.batch_accumulation_per_replica=4")
CLIPPED = "optimizer.clip_grad=0.1"


def statistics(config: kn.Config) -> list[dict[str, float]]:
    """What each step has of `metrics_logging`."""
    return [
        {name: value for name, value in step.items() if "/" in name or name in ("logit_max", "gradient_noise_scale")}
        for step in metrics(config)
    ]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[kn.Config, list[Any]]:
    """A run with documents, whose every step has a checkpoint, and its batches."""
    Batches.seen.clear()
    config = tiny_config(
        tmp_path_factory.mktemp("alone"),
        *(*FOUR, EVERY_TWO, CLIPPED, "general.hooks=[test_doremi.Batches]"),
        *("checkpoints.checkpoint_interval=1", "checkpoints.export_hf=true"),
    )
    train_quietly(config)
    return config, list(Batches.seen)


def test_training_computes_the_same_bits_without_them(logged: tuple[kn.Config, list[Any]], tmp_path: Path) -> None:
    plain = tiny_config(tmp_path, *FOUR, CLIPPED)
    train_quietly(plain)
    assert losses(plain) == losses(logged[0])
    assert [len(step) for step in statistics(logged[0])] == [0, 22, 0, 22]
    hashes = [[step["state_hash"] for step in metrics(config)] for config in (plain, logged[0])]
    assert hashes[0] == hashes[1]


def test_norms_are_those_of_the_checkpoints_and_add_up_to_the_global_one(logged: tuple[kn.Config, list[Any]]) -> None:
    config, _ = logged
    before, after = (saved_weights(config.checkpoint_folder / str(step)) for step in (1, 2))
    found = statistics(config)[1]
    for layer in ("layers.1", "embed_tokens", "norm"):
        names = [name for name in after if name.startswith(f"model.{layer}.")]
        old, new = (torch.cat([each[name].flatten() for name in names]).double() for each in (before, after))
        weight, update = float(new.norm()), float((new - old).norm())
        assert found[f"weight_norm/{layer}"] == pytest.approx(weight, rel=1e-9)
        assert found[f"update_ratio/{layer}"] == pytest.approx(update / weight, rel=1e-6)
    squares = [value**2 for name, value in found.items() if name.startswith("grad_norm/")]
    assert len(squares) == 5
    assert math.sqrt(sum(squares)) == pytest.approx(metrics(config)[1]["grad_norm"], rel=1e-5)  # clipped to a sixth


def test_activations_are_those_of_transformers(logged: tuple[kn.Config, list[Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    config, batches = logged
    folder = config.checkpoint_folder / "2" / "hf"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    hidden: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda module, given, out, number=number: hidden[number].append(out))
    tokens = torch.cat([torch.from_numpy(batch.tokens) for batch in batches[1]])
    with torch.no_grad():
        out = model(tokens, output_attentions=True)
    found = statistics(config)[1]
    length = tokens.shape[1]
    rows, kept = (_spread(length, count, torch.device("cpu")) for count in (QUERIES, LOGITS))
    for number in range(2):
        rms = hidden[number][0].square().mean().sqrt()
        entropy = torch.special.entr(out.attentions[number][:, :, rows]).sum(-1).mean()
        assert found[f"activation_rms/layers.{number}"] == pytest.approx(float(rms), rel=1e-5)
        assert found[f"attention_entropy/layers.{number}"] == pytest.approx(float(entropy), rel=1e-5)
    assert found["logit_max"] == pytest.approx(float(out.logits[:, kept].max()), rel=1e-5)


def test_scores_and_masks_are_those_of_attention() -> None:
    """With a window, documents and grouped heads, against the plain softmax of each query alone."""
    from kenotron.kernels.attention import Borders
    from kenotron.kernels.attentions.masked import eager
    from kenotron.observers.layer_statistics import _ActivationStatistics

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 100, 8, generator=generator) for heads in (4, 2))
    ctx = Borders((0, 30, 100, 150, 200))
    statistics = object.__new__(_ActivationStatistics)
    statistics.sums = torch.zeros(1, 4, dtype=torch.float64)
    statistics.largest = torch.full((2,), -math.inf, dtype=torch.float64)
    statistics._add_scores(0, q, k, ctx, scale=0.7, window=20)  # type: ignore[arg-type]
    rows = _spread(100, QUERIES, q.device)
    weights = torch.zeros(2, 4, 100, 100, dtype=torch.float64)
    for key in range(100):  # by the attention of values that tell one key from the others
        values = torch.zeros(2, 2, 100, 8, dtype=torch.float64)
        values[:, :, key] = 1.0
        weights[..., key] = eager(q.double(), k.double(), values, ctx, scale=0.7, window=20)[..., 0]
    entropy = torch.special.entr(weights[:, :, rows]).sum(-1)
    assert float(statistics.sums[0, 2]) == pytest.approx(float(entropy.sum()), rel=1e-5)
    assert float(statistics.sums[0, 3]) == entropy.numel()
    scores = 0.7 * q.double() @ k.double().repeat_interleave(2, dim=1).mT
    largest = scores.masked_fill(weights == 0, -math.inf)[:, :, rows].max()
    assert float(statistics.largest[0]) == pytest.approx(float(largest))


def trained(rank: int, folder: Path, overrides: tuple[str, ...]) -> None:
    train_here(tiny_config(folder, *overrides))


EXPERTS = (
    "model.model_config={family: qwen3_moe, num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, "
    "head_dim: 8, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, "
    "vocab_size: 64, max_position_embeddings: 32}",
)
LAYOUTS = [
    *((each, ()) for each in ("tp=2", "tp=2 mode=REDUCE_SCATTER async=true", "pp=2", "dp=2 zero=3", "dp=2 tp=2")),
    ("dp=2 ep=2", EXPERTS),
]


@pytest.mark.cases(3)
@pytest.mark.parametrize(("layout", "model"), LAYOUTS)
def test_every_layout_logs_the_same(layout: str, model: tuple[str, ...], tmp_path: Path) -> None:
    overrides = (*FOUR, EVERY_TWO, CLIPPED, *model)
    alone = tiny_config(tmp_path / "alone", *overrides)
    train_quietly(alone)
    degrees = dict(part.split("=") for part in layout.split())
    more = tuple(f"{SHORT[name]}={value}" for name, value in degrees.items())
    if "dp" in degrees:
        more += ("tokens.batch_accumulation_per_replica=2",)
    size = math.prod(int(degrees.get(axis, 1)) for axis in ("dp", "tp", "pp"))
    run_ranks(size, trained, tmp_path / "ranks", (*overrides, *more))
    found, expected = statistics(tiny_config(tmp_path / "ranks")), statistics(alone)
    assert [len(step) for step in expected][1] >= 22
    for step, each in zip(found, expected, strict=True):
        assert step.keys() == each.keys()
        for name, value in each.items():
            assert step[name] == pytest.approx(value, rel=2e-5, abs=1e-7), name


def test_context_parallelism_has_all_but_the_scores_of_attention(tmp_path: Path) -> None:
    overrides = (*FOUR, EVERY_TWO)
    alone = tiny_config(tmp_path / "alone", *overrides)
    train_quietly(alone)
    run_ranks(2, trained, tmp_path / "ranks", (*overrides, "parallelism.context_parallel_size=2"))
    found, expected = statistics(tiny_config(tmp_path / "ranks"))[1], statistics(alone)[1]
    assert {name for name in expected if name.startswith("attention_")} == expected.keys() - found.keys()
    for name in found.keys() - {"logit_max"}:
        assert found[name] == pytest.approx(expected[name], rel=2e-5), name


class Recomputes(kn.Hook):
    """The two gradient norms of a step by hand: of its first micro-batch, and of all."""

    seen: list[float] = []  # noqa: RUF012

    def before_step(self, run: kn.Run) -> None:
        from kenotron.training.step import to_device

        for batches in (run.batches[:1], run.batches):
            real = sum(int((batch.labels != -100).sum()) for batch in batches)
            for batch in batches:
                each = to_device(batch, run, 1 / real)
                run.model(each.tokens, each.ctx, each.labels)[0].backward()
            self.seen.append(sum(float(p.grad.double().square().sum()) for p in run.model.parameters()))
            run.optimizer.zero_grad()


NOISE = "metrics_logging={log_level: 1, log_detail_interval: 1, gradient_noise_scale: true}"


def test_the_noise_scale_is_that_of_the_paper_and_resumes(tmp_path: Path) -> None:
    Recomputes.seen.clear()
    kept = ("checkpoints.checkpoint_interval=2", f"general.hooks=[{__name__}.Recomputes]")
    config = tiny_config(tmp_path, *FOUR, NOISE, *kept)
    train_quietly(config)
    trace = squared = 0.0
    for step, (small, big) in enumerate(zip(Recomputes.seen[::2], Recomputes.seen[1::2])):
        trace = 0.9 * trace + 0.1 * (small - big) / (1 / 2 - 1 / 8)
        squared = 0.9 * squared + 0.1 * (8 * big - 2 * small) / 6
        assert statistics(config)[step]["gradient_noise_scale"] == pytest.approx(trace / squared, rel=1e-4)
    halves = [tiny_config(tmp_path / "b", *FOUR, NOISE, *kept, f"tokens.train_steps={steps}") for steps in (2, 4)]
    for half in halves:
        train_quietly(half)
    assert statistics(halves[1]) == statistics(config)
    plain = tiny_config(tmp_path / "plain", *FOUR)
    train_quietly(plain)
    assert losses(plain) == losses(config)


def test_the_noise_scale_of_float16_is_that_of_float32(tmp_path: Path) -> None:
    """Gradients are multiplied by the loss scale there, 65536 at first."""
    found = []
    for dtype in ("float32", "float16"):
        config = tiny_config(tmp_path / dtype, *FOUR, NOISE, f"model.dtype={dtype}")
        train_quietly(config)
        found.append([step["gradient_noise_scale"] for step in statistics(config)])
    assert found[1] == pytest.approx(found[0], rel=0.05)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("metrics_logging={gradient_noise_scale: true}", r"expected metrics_logging\.log_level: 1"),
        (NOISE, "batch_accumulation_per_replica of at least 2"),  # a tiny run has 1
        ("metrics_logging={log_level: 2}", "metrics_logging.log_level: expected 0 or 1, found 2"),
        ("metrics_logging={log_detail_interval: 0}", "log_detail_interval: expected a number of at least 1, found 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(override: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=expected):
        tiny_config(tmp_path, override)


def test_what_a_hook_records_is_reduced_over_the_ranks(tmp_path: Path) -> None:
    overrides = ("parallelism.dp=2", "tokens.micro_batch_size=2", "general.hooks=[support.user_parts.Measures]")
    run_ranks(2, trained, tmp_path, overrides)
    steps = metrics(tiny_config(tmp_path))
    assert len(steps) == 3
    for step in steps:
        assert (step["mean_rank"], step["highest_rank"]) == (0.5, 1)
        assert step["twice_the_loss"] == 2 * step["lm_loss"]
