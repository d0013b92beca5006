"""Real training on any layout, and what a run is compared by.

    problem = Problem("llama", overrides)                 # what is trained: the same on every layout
    reference = train_alone(problem, folder)              # one process
    differences = run_ranks(8, train_on_layout, problem, "dp=2 tp=2 pp=2", folder)

A layout is written as overrides of the config: short names for the degrees, whole paths for the rest.
"""

import contextlib
import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import kenotron as kn
from kenotron.config import Config, refuse_unsupported
from kenotron.launch import training as launch_training
from kenotron.models import named_parameters
from kenotron.parallel.mesh import Mesh, axes, build_mesh
from kenotron.parallel.shards import shard_of
from kenotron.parallel.shared_memory import collectives_in_memory
from kenotron.training.build import build_run
from kenotron.training.hooks import Hook
from kenotron.training.run import Run, close
from kenotron.training.step import StepResult, train_step
from support.tiny_run import tiny_dict

SAMPLES = 16  # of every global batch, whatever the layout
LENGTH = 16
STEPS = 5
# Keys of families whose layers have more than a Llama's, which layouts have to treat by themselves.
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"is_mistral_config": True, "num_key_value_heads": 2, "sliding_window": 5},
    "qwen2": {"is_qwen2_config": True, "num_key_value_heads": 2, "attention_bias": True},
    "olmo2": {"is_olmo2_config": True, "num_key_value_heads": 2},
    "qwen3": {"is_qwen3_config": True, "head_dim": 6, "num_key_value_heads": 2},
    "smollm3": {"is_smollm3_config": True, "no_rope_layer_interval": 2, "num_key_value_heads": 2},
    "starcoder2": {"is_starcoder2_config": True, "num_key_value_heads": 2},
    "gpt_neox": {"is_gpt_neox_config": True, "rotary_pct": 0.5, "num_key_value_heads": None},
    "nano": {"family": "nano", "num_key_value_heads": 2},
}
_VALUES = {"value_embeddings": True, "final_logit_softcapping": 2.0}
FAMILIES["nano_with_value_embeddings"] = FAMILIES["nano"] | _VALUES
ATTENTION = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_HEADS = {"is_mamba2_config": True, "num_heads": 8, "head_dim": 8, "state_size": 6}
_ROUTER = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.01, "num_experts_per_tok": 2}
_EXPERTS = {"num_experts": 8, "moe_intermediate_size": 16} | _ROUTER
SPARSE: dict[str, dict[str, Any]] = {  # families with experts
    "mixtral": {"is_mixtral_config": True, "num_local_experts": 4} | _ROUTER,
    "olmoe": {"is_olmoe_config": True, "num_experts": 8} | _ROUTER,
    "qwen2_moe": _EXPERTS
    | {"is_qwen2_moe_config": True, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
    "qwen3_moe": {"is_qwen3_moe_config": True, "head_dim": 6, "mlp_only_layers": [1], **_EXPERTS},
    "deepseek_v3": _ROUTER
    | yaml.safe_load("""{is_deepseek_v3_config: true, num_key_value_heads: null, q_lora_rank: 12, kv_lora_rank: 10,
        qk_nope_head_dim: 4, qk_rope_head_dim: 2, v_head_dim: 5, attention_bias: true, first_k_dense_replace: 1,
        n_routed_experts: 8, moe_intermediate_size: 16, n_group: 4, topk_group: 2, router_bias_update_rate: 0.02}"""),
}
STATE_SPACES: dict[str, dict[str, Any]] = {  # without the keys of ATTENTION
    "mamba": {"is_mamba_config": True, "state_size": 4, "time_step_rank": 3, "use_bias": True},
    "mamba2": _HEADS | {"n_groups": 1, "tie_word_embeddings": True},
    "mamba2_in_groups": _HEADS | {"n_groups": 4},
}
_HYBRID = yaml.safe_load("""{is_nemotron_h_config: true, head_dim: 6, num_key_value_heads: 2, mamba_num_heads: 8,
    mamba_head_dim: 8, n_groups: 4, ssm_state_size: 6}""")
HYBRIDS: dict[str, dict[str, Any]] = {  # of Mamba-2 and attention
    "nemotron_h": _HYBRID | {"hybrid_override_pattern": "M*-M", "mlp_bias": True},
    "nemotron_h_of_experts": _HYBRID
    | _ROUTER
    | yaml.safe_load("""{hybrid_override_pattern: ME*E, n_routed_experts: 8, moe_intermediate_size: 16,
        moe_shared_expert_intermediate_size: 24, router_bias_update_rate: 0.02}"""),
}

SHORT = yaml.safe_load("""{dp: parallelism.dp, shard: parallelism.dp_shard, tp: parallelism.tp, pp: parallelism.pp,
    ep: parallelism.expert_parallel_size, cp: parallelism.context_parallel_size, zero: optimizer.zero_stage,
    strategy: parallelism.strategy, mode: parallelism.tp_mode, async: parallelism.tp_linear_async_communication,
    engine: parallelism.pp_engine, method: parallelism.context_parallel_method,
    accum: tokens.batch_accumulation_per_replica, recompute: parallelism.recompute_layer, compile: model.compile}""")

SHAPES = yaml.safe_load("""{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 4, num_attention_heads: 8,
    num_key_value_heads: 4, vocab_size: 61, z_loss_enabled: true, z_loss_coefficient: 0.001}""")


def on(world_size: int, *layouts: str) -> list[tuple[int, str]]:
    """A line of a table of layouts: those of so many ranks."""
    return [(world_size, layout) for layout in layouts]


@dataclass(frozen=True)
class Problem:
    """What is trained. `overrides` change the model or the data, never the layout.

    `model` are keys of its shapes besides those of a small Llama, without those that are `absent`. `compared`: the step
    whose gradients are compared; the second where at first some are zero.
    """

    name: str
    overrides: tuple[str, ...] = ()
    steps: int = STEPS
    model: dict[str, Any] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    compared: int = 1

    def config(self, layout: str, folder: Path) -> Config:
        """The config of this problem on `layout`, at the one global batch size."""
        given = [part.split("=", 1) for part in layout.split()]
        wanted = {SHORT.get(name, name): value for name, value in given}
        accumulation = int(wanted.setdefault("tokens.batch_accumulation_per_replica", "2"))
        micro, rest = divmod(SAMPLES, int(wanted.get("parallelism.dp", 1)) * accumulation)
        assert not rest, f"{layout}: {SAMPLES} samples do not divide"
        wanted["tokens.micro_batch_size"] = str(micro)
        plain = tiny_dict(folder / layout.replace(" ", "_").replace("=", "-"))
        plain["model"]["model_config"] |= SHAPES | self.model
        for name in self.absent:
            del plain["model"]["model_config"][name]
        plain["tokens"] |= {"sequence_length": LENGTH, "train_steps": self.steps}
        plain["optimizer"]["zero_stage"] = None
        # Adam turns the rounding of a gradient near 0 into a step of full size: small steps keep that below the bounds.
        plain["optimizer"]["learning_rate_scheduler"]["learning_rate"] = 0.001
        return kn.load(plain, [*self.overrides, *(f"{path}={value}" for path, value in wanted.items())])


def problem_of_family(family: str, *overrides: str) -> Problem:
    """The small model of any family above, a Llama included."""
    shapes = ({"llama": {}} | FAMILIES | SPARSE | STATE_SPACES | HYBRIDS)[family]
    return Problem(family, overrides, model=shapes, absent=ATTENTION if family in STATE_SPACES else ())


@contextmanager
def prepared(config: Config, mesh: Mesh) -> Iterator[Run]:
    """A run of `config` on this rank, at step 0."""
    refuse_unsupported(config)
    logger = logging.getLogger("kenotron")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        run = build_run(config, mesh, torch.device("cpu"))
        try:
            yield run
        finally:
            close(run)
    finally:
        logger.setLevel(level)


@contextmanager
def heard(level: int) -> Iterator[list[str]]:
    """The messages of Kénotron's loggers on this rank from `level` on."""
    lines: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("kenotron")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def train_here(config: Config) -> Run:
    """The whole training of one rank of `config`'s layout, as `kenotron train` does it, its console kept away."""
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
    with contextlib.redirect_stdout(io.StringIO()):
        run = launch_training.train(config, mesh, torch.device("cpu"))
    assert run is not None
    return run


def steps(run: Run, gradients: dict[str, torch.Tensor] | None = None, compared: int = 1) -> list[StepResult]:
    """Train from where `run` is to the end, without hooks; clipped gradients of the step `compared` into the dict."""
    results = []
    while not run.finished:
        batches = run.data.batch(run.step + 1, run.mesh.rank("batch"), run.mesh.degree("batch"))
        if gradients is not None and run.step + 1 == compared:
            run.hooks = [_Keep(gradients)]
        results.append(train_step(run, batches))
        run.hooks = []
        run.step += 1
    return results


class _Keep(Hook):
    """A hook of one moment: copies of this rank's gradients."""

    def __init__(self, into: dict[str, torch.Tensor]) -> None:
        self.into = into

    def before_update(self, run: Run) -> None:
        for name, parameter in named_parameters(*run.parts):
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None, f"{name} has no gradient"
            self.into[name] = shard_of(parameter.grad).tensor.clone()


def train_alone(problem: Problem, folder: Path) -> Path:
    """Train in this process; a file with weights, gradients and numbers of every step."""
    config = problem.config("", folder / "alone")
    gradients: dict[str, torch.Tensor] = {}
    with prepared(config, Mesh()) as run:
        before = _pieces(run)
        results = steps(run, gradients, problem.compared)
        numbers = [(result.lm_loss, result.z_loss, result.grad_norm) for result in results]
        samples = [_samples(run, step) for step in (1, 2, problem.steps)]
        after = {name: tensor.clone() for name, (tensor, _) in _pieces(run).items()}
        loads, router = _loads(results), _router(results)
    path = folder / f"{problem.name}.pt"
    started = {name: tensor for name, (tensor, _) in before.items()}
    found = {"before": started, "gradients": gradients, "numbers": numbers, "after": after}
    torch.save(found | {"samples": samples, "loads": loads, "router": router}, path)
    return path


@lru_cache(8)
def reference_of(path: Path) -> dict[str, Any]:
    """What `train_alone` has written. Ranks that compare several layouts with it read it once; do not change it."""
    return torch.load(path, weights_only=False)


@dataclass
class Seen:
    """What one rank saw of a layout, against the run of one process."""

    numbers: list[tuple[float, float, float]]  # lm_loss, z_loss, grad_norm of every step
    samples: list[list[int]]  # that this rank's data-parallel place read, at some steps
    unequal_at_start: list[str]  # parameters whose first bits differ
    gradient_errors: dict[str, float]  # squared norm of this rank's difference over that of the whole gradient
    weight_error: float  # largest absolute difference after the last step
    loads: list[list[float]]  # slots of each expert of each layer over all steps, where a family has experts
    router: list[float]  # balance loss, z-loss and dropped slots, each summed over layers and steps
    local_numbers: int  # elements of this rank's parameters


def train_on_layout(rank: int, problem: Problem, layout: str, folder: Path, reference: Path) -> Seen:
    """One rank of `layout`."""
    config = problem.config(layout, folder)
    mesh = build_mesh(axes(config), config.parallelism.world_size, "cpu")
    expected = reference_of(reference)
    gradients: dict[str, torch.Tensor] = {}
    with collectives_in_memory(mesh), prepared(config, mesh) as run:
        before = _pieces(run)
        unequal = [name for name, (tensor, box) in before.items() if not tensor.equal(expected["before"][name][box])]
        local = sum(tensor.numel() for tensor, _ in before.values())
        results = steps(run, gradients, problem.compared)
        errors = {}
        for name, gradient in gradients.items():
            whole = expected["gradients"][name]
            box = before[name][1]
            cut = _real(gradient, whole[box].shape)
            errors[name] = float((cut - whole[box]).square().sum() / whole.square().sum())
        after = _pieces(run)
        differences = [t - expected["after"][name][box] for name, (t, box) in after.items() if t.numel()]
        weight_error = max((float(each.abs().max()) for each in differences), default=0.0)
        return Seen(
            numbers=[(result.lm_loss, result.z_loss, result.grad_norm) for result in results],
            samples=[_samples(run, step) for step in (1, 2, problem.steps)],
            unequal_at_start=unequal,
            gradient_errors=errors,
            weight_error=weight_error,
            loads=_loads(results),
            router=_router(results),
            local_numbers=local,
        )


def _loads(results: list[StepResult]) -> list[list[float]]:
    """Slots of each expert of each layer over all steps; empty without experts."""
    slots = [result.expert_loads.slots for result in results if result.expert_loads is not None]
    return torch.stack(slots).sum(0).tolist() if slots else []


def _router(results: list[StepResult]) -> list[float]:
    totals = [result.expert_loads.totals for result in results if result.expert_loads is not None]
    return torch.stack(totals).sum(0).tolist() if totals else []


def expect_the_same(ranks: list[Seen], reference: Path, rounding: float = 1e-6) -> None:
    """Numbers, samples, first gradients (to `rounding`) and last weights are those of one process."""
    expected = reference_of(reference)
    for seen in ranks:
        assert seen.unequal_at_start == []
        for (loss, z_loss, norm), (loss0, z_loss0, norm0) in zip(seen.numbers, expected["numbers"], strict=True):
            assert loss == pytest.approx(loss0, rel=1e-5)
            assert z_loss == pytest.approx(z_loss0, rel=1e-5)
            assert norm == pytest.approx(norm0, rel=1e-5)
        assert seen.weight_error < 1e-4
        assert seen.loads == expected["loads"]
        assert seen.router == pytest.approx(expected["router"], rel=1e-5)
    for number, samples in enumerate(expected["samples"]):
        assert {sample for seen in ranks for sample in seen.samples[number]} == set(samples)
        if reference.stem != "ramped":
            assert len(samples) == SAMPLES
    for name in expected["gradients"]:
        parts = [seen.gradient_errors[name] for seen in ranks if name in seen.gradient_errors]
        assert parts, f"no rank has {name}"
        assert sum(parts) ** 0.5 < rounding * len(parts) ** 0.5, name  # replicas count once each


def _samples(run: Run, step: int) -> list[int]:
    batches = run.data.batch(step, run.mesh.rank("batch"), run.mesh.degree("batch"))
    return [int(sample) for batch in batches for sample in batch.sample_ids]


def _pieces(run: Run) -> dict[str, tuple[torch.Tensor, tuple[slice, ...]]]:
    """Name → this rank's block of a parameter, and where it lies; rows that pad the vocabulary are cut off."""
    vocab = run.parts[0].config.vocab_size
    pieces = {}
    for name, parameter in named_parameters(*run.parts):
        shard = shard_of(parameter.detach())
        limit = [vocab if name in run.parts[0].vocab_parameters and d == 0 else n for d, n in enumerate(shard.shape)]
        places = zip(shard.offset, shard.tensor.shape, limit)
        box = tuple(slice(min(start, most), min(start + size, most)) for start, size, most in places)
        pieces[name] = (_real(shard.tensor, [part.stop - part.start for part in box]).clone(), box)
    return pieces


def _real(tensor: torch.Tensor, shape: Any) -> torch.Tensor:
    return tensor[tuple(slice(0, size) for size in shape)]
