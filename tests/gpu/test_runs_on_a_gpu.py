"""Runs on one GPU: the CPU's losses, the same bits twice, checkpoints that change device, and what is measured."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kenotron.config import Config
from kenotron.kernels import rms_norm, rope, swiglu
from kenotron.kernels.attentions.choice import attention_of_run
from kenotron.parallel.device import vendor_peak
from kenotron.parallel.mesh import Mesh
from kenotron.planner.hardware import gpu_here
from kenotron.planner.measuring import measure
from kenotron.planner.memory import plan_memory
from kenotron.planner.rehearsal import batch_of, build_on
from kenotron.training.initial_weights import fill_weights
from kenotron.training.step import train_step
from support.device_runs import STEPS, train_on
from support.tiny_run import equal_bits, losses, metrics, saved_weights, tiny_config

CPU = torch.device("cpu")
CLOSE = 1e-4  # of losses near 4: fp32 sums in another order differ by 1e-6; Adam makes that grow with the steps
# bf16 keeps 8 bits: an activation is off by up to 0.2%, and so is the loss, a mean of its logits. fp32 masters, so
# that it does not add up over the steps. On a CPU the largest distance is 0.0024, while the loss falls from 4.3 to 0.8.
NEAR = 0.01

Run = Callable[..., list[float]]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The losses of a run in fp32 on the CPU, each trained once."""
    made: dict[tuple[str, bool], list[float]] = {}

    def get(model: str = "llama", documents: bool = False) -> list[float]:
        if (model, documents) not in made:
            folder = tmp_path_factory.mktemp("cpu")
            made[model, documents] = losses(train_on(CPU, folder, model=model, documents=documents))
        return made[model, documents]

    return get


def distance(some: list[float], others: list[float]) -> float:
    assert len(some) == len(others)
    return max(abs(a - b) for a, b in zip(some, others))


LAYOUTS = {
    "plain": (),
    "recompute": ("parallelism.recompute_layer=true",),
    "selective": ("parallelism.recompute_layer=selective",),
    "elementwise": ("parallelism.recompute_layer=elementwise",),
    "compile": ("model.compile=true",),
    "compile and selective": ("model.compile=true", "parallelism.recompute_layer=selective"),
    "compile and elementwise": ("model.compile=true", "parallelism.recompute_layer=elementwise"),
    "compile and recompute": ("model.compile=true", "parallelism.recompute_layer=true"),
    "micro-batches": ("tokens.micro_batch_size=1", "tokens.batch_accumulation_per_replica=4"),
    "eager attention": ("model.model_config._attn_implementation=eager",),
}


@pytest.mark.parametrize("documents", [False, True], ids=["whole sequences", "packed documents"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_in_fp32_are_those_of_the_cpu(
    layout: str, documents: bool, device: torch.device, on_cpu: Run, tmp_path: Path
) -> None:
    found = losses(train_on(device, tmp_path, *LAYOUTS[layout], documents=documents))
    assert len(found) == STEPS
    assert found[-1] < found[0] - 0.5
    assert distance(found, on_cpu(documents=documents)) <= CLOSE


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_torchs_operators_have_the_cpus_losses(model: str, device: torch.device, on_cpu: Run, tmp_path: Path) -> None:
    by_torch = losses(train_on(device, tmp_path, "model.kernels=torch", model=model))  # else those in Triton compute
    assert distance(by_torch, on_cpu(model)) <= CLOSE


@pytest.mark.parametrize("documents", [False, True], ids=["whole sequences", "packed documents"])
@pytest.mark.parametrize("layout", ["plain", "compile and recompute"])
@pytest.mark.parametrize("model", ["mixtral", "mamba2"])
def test_experts_and_state_spaces_have_the_cpus_losses(
    model: str, layout: str, documents: bool, device: torch.device, on_cpu: Run, tmp_path: Path
) -> None:
    found = losses(train_on(device, tmp_path, *LAYOUTS[layout], model=model, documents=documents))
    assert distance(found, on_cpu(model, documents)) <= CLOSE


@pytest.mark.parametrize("documents", [False, True], ids=["whole sequences", "packed documents"])
@pytest.mark.parametrize("layout", ["plain", "compile"])
def test_bf16_stays_near_fp32(layout: str, documents: bool, device: torch.device, on_cpu: Run, tmp_path: Path) -> None:
    found = losses(train_on(device, tmp_path, "model.dtype=bfloat16", *LAYOUTS[layout], documents=documents))
    exact = on_cpu(documents=documents)
    assert exact[0] - exact[-1] > 10 * NEAR  # what is learnt is far more than what may differ
    assert 0 < distance(found, exact) <= NEAR


# At 512, a flash kernel's backward adds up over blocks of keys, in a fixed order only if that is asked for.
@pytest.mark.parametrize("length", [64, 512])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("documents", [False, True], ids=["whole sequences", "packed documents"])
def test_two_runs_are_equal_bit_by_bit(
    dtype: str, length: int, documents: bool, device: torch.device, tmp_path: Path
) -> None:
    changes = [f"model.dtype={dtype}", f"tokens.sequence_length={length}", "tokens.train_steps=5"]
    if dtype == "bfloat16" and length == 512:
        changes.append("general.deterministic=true")
    first, second = (train_on(device, tmp_path / name, *changes, documents=documents) for name in "ab")
    assert numbers(first) == numbers(second)
    assert equal_bits(*(saved_weights(config.checkpoint_folder / "5") for config in (first, second)))


@pytest.mark.parametrize("engine", ["torch", "async", "datastates"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(
    dtype: str, engine: str, device: torch.device, tmp_path: Path
) -> None:
    saves = (f"checkpoints.checkpointing_engine={engine}", "checkpoints.checkpoint_interval=3")
    changes = (f"model.dtype={dtype}", *saves)
    whole = train_on(device, tmp_path / "whole", *changes, "tokens.train_steps=6")
    train_on(device, tmp_path / "cut", *changes, "tokens.train_steps=3")
    resumed = train_on(device, tmp_path / "cut", *changes, "tokens.train_steps=6")
    assert numbers(whole) == numbers(resumed)
    for part in ("model", "optimizer"):
        assert equal_bits(*(saved_weights(config.checkpoint_folder / "6", part) for config in (whole, resumed)))


def test_a_step_that_is_not_finite_changes_no_bit(device: torch.device, tmp_path: Path) -> None:
    poison = "general.hooks=[{path: support.user_parts.Poison, kwargs: {steps: [2]}}]"  # the device leaves it out
    config = train_on(device, tmp_path, poison, "checkpoints.checkpoint_interval=1", "tokens.train_steps=3")
    assert [step["skipped"] for step in metrics(config)] == [False, True, False]
    for part in ("model", "optimizer"):
        before, after, later = (saved_weights(config.checkpoint_folder / str(step), part) for step in (1, 2, 3))
        assert equal_bits(before, after)
        assert not equal_bits(after, later)


def numbers(config: Config) -> list[tuple[float, float]]:
    return [(step["lm_loss"], step["grad_norm"]) for step in metrics(config)]


@pytest.mark.parametrize("saved_on", ["the CPU", "the GPU"])
def test_a_checkpoint_is_resumed_on_the_other_device(
    saved_on: str, device: torch.device, on_cpu: Run, tmp_path: Path
) -> None:
    first, then = (CPU, device) if saved_on == "the CPU" else (device, CPU)
    train_on(first, tmp_path, "tokens.train_steps=6")
    resumed = train_on(then, tmp_path)
    assert [step["iteration"] for step in metrics(resumed)] == list(range(1, STEPS + 1))
    assert distance(losses(resumed), on_cpu()) <= CLOSE


def test_memory_and_utilization_are_measured(device: torch.device, tmp_path: Path) -> None:
    steps = metrics(train_on(device, tmp_path, "model.dtype=bfloat16", "tokens.train_steps=6"))
    in_use, peak = f"{device.type}_memory_allocated", f"{device.type}_max_memory_reserved"
    with_memory = [step for step in steps if in_use in step]
    assert [step["iteration"] for step in with_memory] == [1, 2, 3, 4]
    weights = sum(tensor.nbytes for tensor in saved_weights(tmp_path / "checkpoints" / "6").values())
    for step in with_memory:
        assert step[in_use] > 3 * weights  # in fp32, and two moments
        assert step[peak] >= 0.99 * step[in_use]  # Linux counts a process's peak some pages late
    for step in steps:
        assert step["matmul_share"] > 0
        if known := vendor_peak(device):
            assert step["mfu"] == pytest.approx(step["model_tflops_per_gpu"] * 1e12 / known)
            assert 0 < step["mfu_causal"] < step["mfu"] < 1
        else:
            assert "mfu" not in step  # docs/metrics.md: only on known accelerators


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", CLOSE), ("bfloat16", NEAR)])
def test_a_run_with_the_kernels_in_triton_has_the_same_losses(
    dtype: str, tolerance: float, gpu_only: torch.device, on_cpu: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    used: list[str] = []
    for module in (rms_norm, rope, swiglu):

        def counted(name: str, x: torch.Tensor, plain: Callable = module.fused) -> Callable | None:
            kernel = plain(name, x)
            used.extend([name] if kernel else [])
            return kernel

        monkeypatch.setattr(module, "fused", counted)
    found = losses(train_on(gpu_only, tmp_path, f"model.dtype={dtype}", "model.kernels=triton"))
    assert set(used) == {"rms_norm.rms_norm", "rope.apply_rope", "swiglu.silu_and_multiply"}
    assert distance(found, on_cpu()) <= tolerance


def test_a_memory_snapshot_has_the_allocations_of_the_first_steps(device: torch.device, tmp_path: Path) -> None:
    train_on(device, tmp_path, f"profiler={{memory_snapshot_path: {tmp_path}/memory}}", "tokens.train_steps=8")
    (file,) = (tmp_path / "memory").iterdir()
    snapshot = pickle.loads(file.read_bytes())
    assert len(snapshot["device_traces"][0]) > 1000


@pytest.mark.parametrize("layout", ["plain", "compile"])
def test_statistics_of_layers_are_the_cpus(layout: str, device: torch.device, tmp_path: Path) -> None:
    every_two = ("metrics_logging={log_level: 1, log_detail_interval: 2}", "tokens.train_steps=2")
    found = metrics(train_on(device, tmp_path / "gpu", *every_two, *LAYOUTS[layout]))[1]
    expected = metrics(train_on(CPU, tmp_path / "cpu", *every_two))[1]
    names = [name for name in expected if "/layers." in name]
    assert len(names) > 10
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.parametrize("overrides", [(), ("parallelism.recompute_layer=true",)], ids=["plain", "recompute"])
def test_the_planned_peak_is_near_that_of_the_allocator(overrides: tuple[str, ...], gpu_only: torch.device) -> None:
    """Within 5%: the allocator rounds up to 512 bytes, and kernels have workspaces."""
    sizes = ("hidden_size=1024", "intermediate_size=2816", "num_hidden_layers=4", "num_attention_heads=16")
    shapes = [f"model.model_config.{each}" for each in (*sizes, "num_key_value_heads=16", "vocab_size=32000")]
    lengths = ("model.model_config.max_position_embeddings=1024", "tokens.sequence_length=1024")
    batch = ("tokens.micro_batch_size=4", "model.dtype=bfloat16", "tokens.batch_accumulation_per_replica=2")
    config = tiny_config(Path("never-written"), *shapes, *lengths, *batch, *overrides)
    (plan,) = plan_memory(config, gpu_here())
    attention, _ = attention_of_run(config, gpu_only)
    run = build_on(config, Mesh(), gpu_only, attention)
    fill_weights(run.parts, config.model.init_method, config.general.seed)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        train_step(run, [batch_of(config)] * 2)
        run.step += 1
    assert torch.cuda.max_memory_allocated() == pytest.approx(plan.peak.bytes, rel=0.05)


def test_measured_rates_are_shares_of_the_data_sheet(gpu_only: torch.device) -> None:
    known = gpu_here()
    assert known is not None
    found = measure(known, gpu_only)
    assert 0.3 < found.products <= 1
    assert 0.3 < found.memory <= 1
    assert all(0.1 < share < found.products for share in found.attention.values())
