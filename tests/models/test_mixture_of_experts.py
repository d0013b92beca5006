"""Router and losses of a mixture of experts against formulas in float64."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kenotron.config import load, refuse_unsupported
from kenotron.config.errors import InputError
from kenotron.models import Context, build, flops_per_token
from kenotron.models.blocks.mlp import GatedMLP
from kenotron.models.blocks.moe import MixtureOfExperts, Routing, within_capacity
from kenotron.parallel.mesh import Mesh
from kenotron.training.step import train_step
from support.layout_runs import SPARSE as KEYS
from support.layout_runs import Problem, prepared
from support.plain_experts import expert_mlp_plain
from support.tiny_llamas import our_config, our_logits, our_model, random_tokens
from support.tiny_run import equal_bits, metrics, text_overrides, tiny_dict, train_and_listen, train_quietly, weights

HIDDEN, EXPERTS, WIDTH, SEQUENCES, LENGTH = 12, 6, 8, 3, 7
LOADS = torch.tensor([5.0, 0.0, 9.0, 3.0, 1.0, 6.0])  # of the global batch before


def block(routing: Routing) -> MixtureOfExperts:
    moe = MixtureOfExperts(HIDDEN, EXPERTS, WIDTH, "silu", routing)
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        parameter.data.normal_(0, 0.5, generator=generator)
    moe.previous_load.copy_(LOADS)
    return moe


def inputs() -> tuple[Tensor, Context]:
    x = torch.randn(SEQUENCES * LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))
    ctx = Context((SEQUENCES, LENGTH), torch.arange(LENGTH).repeat(SEQUENCES), lambda: x, sequence_scale=1 / 8)
    return x.requires_grad_(), ctx


def chosen(scores: Tensor, moe: MixtureOfExperts, routing: Routing) -> Tensor:
    """Each token's experts, token by token."""
    if moe.gate.e_score_correction_bias is not None:
        scores = scores + moe.gate.e_score_correction_bias
    size, found = EXPERTS // routing.groups, []
    for row in scores.tolist():
        by_group = [sum(sorted(row[g * size : (g + 1) * size])[-2:]) for g in range(routing.groups)]
        best = sorted(range(routing.groups), key=by_group.__getitem__)[-routing.top_groups :]
        allowed = [e for e in range(EXPERTS) if routing.groups == 1 or e // size in best]
        found.append(sorted(allowed, key=row.__getitem__)[-routing.top_k :])
    return torch.tensor(found)


def dropped(choice: Tensor, weights: Tensor, capacity: float | None) -> list[tuple[int, int]]:
    """(token, slot) of those beyond the capacity: sequence by sequence and expert by expert, the smallest weights."""
    if capacity is None:
        return []
    found, most = [], math.ceil(capacity * LENGTH * choice.shape[1] / EXPERTS)
    for s in range(SEQUENCES):
        for e in range(EXPERTS):
            rows = range(s * LENGTH, (s + 1) * LENGTH)
            slots = [(t, choice[t].tolist().index(e)) for t in rows if e in choice[t].tolist()]
            found += sorted(slots, key=lambda slot: -float(weights[slot]))[most:]
    return found


def objective(moe: MixtureOfExperts, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor, int]:
    """(sum of outputs, balance loss, z-loss) in float64, all that `x` and the weights have gradients of; and how many
    slots are dropped.
    """
    logits = x @ moe.gate.weight.T
    scores = logits.softmax(-1) if routing.scores == "softmax" else logits.sigmoid()
    choice = chosen(scores.detach(), moe, routing)
    weights = scores.gather(-1, choice)
    if routing.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    matrices = [moe.experts.gate_proj.weight, moe.experts.up_proj.weight, moe.experts.down_proj.weight]
    factors, without = torch.full_like(weights, routing.scale), dropped(choice, weights, routing.capacity)
    for slot in without:
        factors[slot] = 0
    y = expert_mlp_plain(x, choice, factors * weights, *matrices)
    balance = torch.zeros((), dtype=torch.float64)
    for s in range(SEQUENCES):
        rows = slice(s * LENGTH, (s + 1) * LENGTH)
        probabilities = scores[rows] / scores[rows].sum(-1, keepdim=True)
        for e in range(EXPERTS):
            share = (choice[rows] == e).sum() / (routing.top_k * LENGTH)
            share = LOADS[e].double() / LOADS.sum() if routing.over_global_batch else share
            balance = balance + EXPERTS * share * probabilities[:, e].mean()
    z = (logits.exp().sum(-1).log() ** 2).mean() * SEQUENCES
    return y.sum(), routing.balance * balance / 8, routing.z * z / 8, len(without)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(2, balance=0.5, z=0.25),
        Routing(3, normalize=True, balance=0.5),
        Routing(2, normalize=True, scores="sigmoid", scale=2.5, balance=0.3, z=0.1),
        Routing(1, normalize=True, balance=0.5),
        Routing(2, True, "sigmoid", 2.5, balance=0.3, groups=3, top_groups=2, biased=True),
        Routing(3, scores="sigmoid", groups=2, top_groups=1),
        Routing(2, normalize=True, balance=0.5, z=0.1, capacity=1.0),
        Routing(3, True, "sigmoid", 2.5, balance=0.5, over_global_batch=True, capacity=0.6),
    ],
    ids=lambda routing: f"{routing.scores}-{routing.top_k}-{routing.groups}-{routing.capacity}",
)
def test_output_losses_and_gradients_are_the_formula(routing: Routing) -> None:
    moe, (x, ctx) = block(routing).train(), inputs()
    y = moe(x, ctx)
    y.sum().backward()
    wide, wide_x = block(routing).double(), x.detach().double().requires_grad_()
    total, balance, z, without = objective(wide, wide_x, routing)
    (total + balance + z).backward()
    assert float(y.sum()) == pytest.approx(float(total), rel=1e-5)
    assert moe.router_totals.tolist() == pytest.approx([float(balance), float(z), without], rel=1e-5)
    assert (without > 0) == (routing.capacity is not None)
    pairs = zip((x, *moe.parameters()), (wide_x, *wide.parameters()), strict=True)
    for found, expected in ((a, b) for a, b in pairs if a.requires_grad):
        assert torch.allclose(found.grad.double(), expected.grad, rtol=1e-4, atol=1e-5)


def test_loads_are_counted_in_training_and_not_when_recomputed() -> None:
    moe, (x, ctx) = block(Routing(2, balance=0.5)).train(), inputs()
    moe(x, ctx)
    counted = moe.expert_load.clone()
    assert counted.sum() == 2 * SEQUENCES * LENGTH
    moe(x, replace(ctx, counted=torch.zeros(())))
    y = moe.eval()(x, ctx)
    assert torch.equal(moe.expert_load, counted)
    assert torch.equal(block(Routing(2, balance=0.5, capacity=0.5)).eval()(x, ctx), y)  # only training has a capacity


def test_the_capacity_of_a_sequence_does_not_depend_on_what_is_beside_it() -> None:
    moe, (x, ctx) = block(Routing(2, capacity=0.7)).train(), inputs()
    alone = replace(ctx, shape=(1, LENGTH))
    assert torch.allclose(moe(x, ctx), torch.cat([moe(part, alone) for part in x.split(LENGTH)]), atol=1e-6)
    equal = torch.zeros(LENGTH, dtype=torch.long)[:, None], torch.ones(LENGTH, 1), torch.tensor([[LENGTH, 0]])
    assert within_capacity(*equal, 1.0).flatten().tolist() == [True] * 4 + [False] * 3  # of equal weights, the first


def test_a_token_that_no_expert_scores_passes_without_a_nan() -> None:
    moe, ctx = block(Routing(2, normalize=True, scores="sigmoid", balance=0.5)), inputs()[1]
    moe.gate.weight.data.fill_(-100.0)
    x = torch.ones(SEQUENCES * LENGTH, HIDDEN, requires_grad=True)
    y = moe(x, ctx)  # sigmoid(-1200) is 0 in fp32
    y.sum().backward()
    assert not y.any()
    assert not moe.router_totals[0]
    assert all(each.grad.isfinite().all() for each in (x, *moe.parameters()))  # type: ignore[union-attr]


def test_the_router_decides_in_fp32_whatever_flows_through() -> None:
    moe, (x, _) = block(Routing(1)).eval(), inputs()
    rounded = x.detach().bfloat16()
    experts, _, logits, _ = moe.gate(rounded)
    exact = rounded.double() @ moe.gate.weight.bfloat16().double().T
    assert torch.allclose(logits.double(), exact, rtol=1e-5, atol=1e-5)  # bfloat16's are 1e-3 off
    assert torch.equal(experts[:, 0], exact.argmax(-1))


# ---- the keys of the families ------------------------------------------------------------------------------


def layers_of(tmp_path: Path, family: str, **keys: Any) -> Any:
    """The layers of a small model of `family`, without weights."""
    config = load(our_config(tmp_path, family=family, **keys))
    with torch.device("meta"):
        return build(config.model).model.layers


def first_layer(tmp_path: Path, family: str, **keys: Any) -> Any:
    return layers_of(tmp_path, family, **keys)["0"]


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_keys_shape_router_and_experts(family: str, tmp_path: Path) -> None:
    count = "num_local_experts" if family == "mixtral" else "num_experts"
    width = "moe_intermediate_size" if family.startswith("qwen") else "intermediate_size"
    keys = {"router_aux_loss_coef": 0.25, "router_z_loss_coef": 0.125, "router_aux_loss_scope": "global_batch"}
    keys |= {"moe_expert_capacity_factor": 1.5, "num_experts_per_tok": 3, count: 7, width: 20}
    moe = first_layer(tmp_path, family, **keys).mlp
    assert moe.gate.weight.shape == (7, 32)
    assert [tuple(matrix.shape) for matrix in moe.experts.parameters()] == [(7, 20, 32), (7, 20, 32), (7, 32, 20)]
    routing = Routing(3, balance=0.25, z=0.125, over_global_batch=True, capacity=1.5)
    assert moe.routing == replace(routing, normalize=family == "mixtral")
    with pytest.raises(InputError, match=r"expected 1 with moe_expert_capacity_factor.* found 2"):
        load(our_config(tmp_path, family=family, **keys), ["parallelism.context_parallel_size=2"])
    with pytest.raises(InputError, match="num_experts_per_tok: expected at most the 2 experts, found 3"):
        first_layer(tmp_path, family, num_experts_per_tok=3, **{count: 2})


def test_keys_of_one_family_alone(tmp_path: Path) -> None:
    assert first_layer(tmp_path, "mixtral").mlp.routing.normalize
    assert first_layer(tmp_path, "mixtral", sliding_window=4).self_attn.window == 4
    for family in ("olmoe", "qwen2_moe", "qwen3_moe"):
        assert not first_layer(tmp_path, family).mlp.routing.normalize
        assert first_layer(tmp_path, family, norm_topk_prob=True).mlp.routing.normalize
    for family in ("olmoe", "qwen3_moe"):
        assert first_layer(tmp_path, family, attention_bias=True).self_attn.o_proj.bias is not None
        assert first_layer(tmp_path, family).self_attn.q_proj.bias is None
    assert first_layer(tmp_path, "qwen2_moe").self_attn.q_proj.bias is not None
    assert first_layer(tmp_path, "qwen2_moe", qkv_bias=False).self_attn.q_proj.bias is None
    shared = first_layer(tmp_path, "qwen2_moe", shared_expert_intermediate_size=40).mlp.shared_expert
    assert shared.up_proj.weight.shape == (40, 32)


DEEPSEEK = {"num_key_value_heads": None, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 3}
DEEPSEEK |= {"n_group": 4, "topk_group": 2}


def test_keys_of_deepseek_shape_its_router_its_experts_and_the_costs_of_its_attention(tmp_path: Path) -> None:
    keys = DEEPSEEK | {"num_hidden_layers": 3, "first_k_dense_replace": 2, "moe_intermediate_size": 20}
    keys |= {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
    layers = layers_of(tmp_path, "deepseek_v3", n_shared_experts=3, **keys)
    assert [isinstance(layers[layer].mlp, GatedMLP) for layer in "012"] == [True, True, False]
    moe = layers["2"].mlp
    assert moe.experts.up_proj.weight.shape == (8, 20, 32)
    assert moe.shared_expert.up_proj.weight.shape == (60, 32)
    assert moe.routing == Routing(3, True, "sigmoid", 2.5, 0.0001, groups=4, top_groups=2, biased=True, bias_rate=0.001)
    assert layers["2"].self_attn.flops_per_token(16, causal=False) == 2 * 16 * 4 * (10 + 7)
    other = {"first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.5}
    other |= {"router_bias_update_rate": 0, "router_aux_loss_coef": 0.5}
    routing = first_layer(tmp_path, "deepseek_v3", **DEEPSEEK | other).mlp.routing
    assert routing == Routing(3, False, "sigmoid", 1.5, 0.5, groups=4, top_groups=2, biased=True)


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_biases_follow_the_loads_of_every_step(recompute: str, tmp_path: Path) -> None:
    config = Problem("biases", steps=4, model=KEYS["deepseek_v3"]).config(f"recompute={recompute}", tmp_path)
    counts: dict[str, Tensor] = {}

    def count(layer: str, router: Any, inputs: Any, output: Any) -> None:
        counts[layer] = counts.get(layer, 0) + torch.bincount(output[0].flatten(), minlength=8)

    with prepared(config, Mesh()) as run:
        routers = {layer: block.mlp.gate for layer, block in run.model.model.layers.items() if layer != "0"}
        expected = {layer: torch.zeros(8, dtype=torch.float64) for layer in routers}
        for layer, router in routers.items():
            router.register_forward_hook(partial(count, layer))
        for step in range(1, 5):
            train_step(run, run.data.batch(step, 0, 1))
            for layer, router in routers.items():
                seen = counts.pop(layer).double()  # with recomputation twice each, which changes no sign
                expected[layer] += 0.02 * (seen.mean() - seen).sign()
                assert torch.allclose(router.e_score_correction_bias.double(), expected[layer], atol=1e-6)
    assert max(bias.abs().max() for bias in expected.values()) > 0.03


def sparse_run(folder: Path, **keys: Any) -> dict[str, Any]:
    """A tiny mixtral of eight experts, on synthetic tokens."""
    plain = tiny_dict(folder)
    plain["model"]["model_config"] |= {"is_mixtral_config": True, "num_local_experts": 8} | keys
    return plain


def test_a_balance_loss_over_the_global_batch_takes_its_loads_in_the_next_step(tmp_path: Path) -> None:
    """f of step t's batch, P of step t+1's."""
    keys = {"router_aux_loss_coef": 1.0, "router_aux_loss_scope": "global_batch"}
    config = load(sparse_run(tmp_path, **keys), ["tokens.train_steps=5"])
    means: list[Tensor] = []
    with prepared(config, Mesh()) as run:
        for block in run.model.model.layers.values():
            block.mlp.gate.register_forward_hook(lambda *call: means.append(call[2][3].detach().double().mean(0)))
        for step in range(1, 5):
            shares = [block.mlp.previous_load / 128 for block in run.model.model.layers.values()]
            means.clear()
            loads = train_step(run, run.data.batch(step, 0, 1)).expert_loads
            expected = sum(8 * float(f.double() @ p) for f, p in zip(shares, means))
            assert float(loads.totals[0]) == pytest.approx(expected, rel=1e-5)
            for block, slots in zip(run.model.model.layers.values(), loads.slots):
                assert slots.sum() == 128
                assert torch.equal(block.mlp.previous_load, slots)


def test_after_validation_the_router_learns_to_balance_as_before(tmp_path: Path) -> None:
    validated = ("tokens.val_check_interval=1", "tokens.limit_val_batches=1")
    config = load(sparse_run(tmp_path, router_aux_loss_coef=1.0), ["tokens.train_steps=3", *validated])
    train_quietly(config)
    assert all(step["router_balance_loss"] > 0.5 for step in metrics(config))
    assert len(metrics(config)) == 3


def test_those_loads_survive_a_restart(tmp_path: Path) -> None:
    keys = {"router_aux_loss_coef": 1.0, "router_aux_loss_scope": "global_batch", "moe_expert_capacity_factor": 0.8}
    logged = ["tokens.train_steps=4", "logging.expert_loads=true"]
    straight = train_quietly(load(sparse_run(tmp_path / "straight", **keys), logged))
    for last in (2, 4):
        resumed = train_quietly(load(sparse_run(tmp_path / "resumed", **keys), [f"tokens.train_steps={last}"]))
    assert resumed.step == straight.step == 4
    assert equal_bits(weights(resumed), weights(straight))
    seen = metrics(straight.config)
    found, expected = ([step["router_balance_loss"] for step in each] for each in (metrics(resumed.config), seen))
    assert found == expected
    assert all(0 < step["expert_dropped"] < 0.5 for step in seen)
    loads = [seen[-1][f"expert_load/1/{expert}"] for expert in range(8)]
    assert sum(loads) == pytest.approx(8)
    assert max(loads) <= seen[-1]["expert_load_max"]


def test_a_run_that_stops_after_a_return_of_the_spike_guard_resumes_with_the_loads_of_the_snapshot(tmp_path):
    """After step 7 a weight is wrong: 8 and 9 spike, and the weights and loads of 5 return; 10 is the next update."""
    keys = {"router_aux_loss_coef": 1.0, "router_aux_loss_scope": "global_batch"}
    guard = "optimizer.spikes={z_score: 60, window: 3, snapshot_every: 5, max_rollbacks: 1}"
    damage = "general.hooks=[{path: support.user_parts.Damage, kwargs: {step: 7, factor: -40.0}}]"
    common = [guard, damage, "checkpoints.checkpoint_interval=5", "checkpoints.save_final_state=true"]
    straight = train_quietly(load(sparse_run(tmp_path / "straight", **keys), [*common, "tokens.train_steps=11"]))
    for last in (9, 11):
        changes = [*common, f"tokens.train_steps={last}"]
        resumed = train_quietly(load(sparse_run(tmp_path / "resumed", **keys), changes))
    assert [line["iteration"] for line in metrics(straight.config) if line["skipped"]] == [8, 9]
    assert equal_bits(weights(resumed), weights(straight))
    found, expected = metrics(resumed.config)[-2:], metrics(straight.config)[-2:]
    assert [x["router_balance_loss"] for x in found] == [x["router_balance_loss"] for x in expected]


def test_an_expert_without_tokens_is_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenotron.observers.expert_load.STARVING_STEPS", 3)
    plain = sparse_run(tmp_path, num_experts_per_tok=1, router_aux_loss_coef=0)
    plain["tokens"] |= {"sequence_length": 2, "micro_batch_size": 1, "train_steps": 5}  # two slots for eight experts
    _, said = train_and_listen(load(plain))
    warnings = [line for line in said.splitlines() if "got no token in 3 steps" in line]
    assert 2 <= len(warnings) == len(set(warnings))
    assert "expert_dropped" not in said


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads: expected null or num_attention_heads 4, found 2"),
        ({"n_group": 3}, "n_group: expected a divisor of n_routed_experts 8, found 3"),
        ({"topk_group": 5}, "topk_group: expected at most n_group 4, found 5"),
        ({"n_group": 8}, "n_group: expected at least two experts per group, found 8 groups of 8"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most the 4 experts of topk_group 2 groups"),
        ({"qk_rope_head_dim": 5}, "qk_rope_head_dim: expected an even number, found 5"),
        ({"first_k_dense_replace": 2}, "expected a layer with experts, found none"),
    ],
)
def test_shapes_of_a_deepseek_that_do_not_fit_are_named(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load(our_config(tmp_path, family="deepseek_v3", **DEEPSEEK | keys))
    for key, value in (("rope_interleaved", True), ("head_dim", 8)):
        config = load(our_config(tmp_path, family="deepseek_v3", **DEEPSEEK, **{key: value}))
        with pytest.raises(InputError, match=f"model_config.{key}: {value}"):
            refuse_unsupported(config)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_some_layers_of_a_qwen_are_dense(family: str, tmp_path: Path) -> None:
    def dense(**keys: Any) -> list[int]:
        layers = layers_of(tmp_path, family, num_hidden_layers=6, **keys)
        return [int(layer) for layer, block in layers.items() if isinstance(block.mlp, GatedMLP)]

    assert dense() == []
    assert dense(mlp_only_layers=[0, 5]) == [0, 5]
    assert dense(decoder_sparse_step=2) == [0, 2, 4]
    assert dense(decoder_sparse_step=3, mlp_only_layers=[5]) == [0, 1, 3, 4, 5]
    with pytest.raises(InputError, match="expected a layer with experts, found none"):
        dense(decoder_sparse_step=7)


def test_flops_are_those_of_the_experts_that_a_token_goes_through(tmp_path: Path) -> None:
    keys = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "qkv_bias": False}
    config = load(our_config(tmp_path, family="qwen2_moe", shared_expert_intermediate_size=40, **keys))
    hidden, length = 32, 16
    attention = 2 * hidden * (2 * 32 + 2 * 16) + 4 * length * 32
    experts = 2 * 7 * hidden + 3 * 6 * hidden * 20 + 6 * hidden * 40 + 2 * hidden
    with torch.device("meta"):
        model = build(config.model)
    assert flops_per_token(model, length, causal=False) == 2 * (attention + experts) + 2 * hidden * 300


# ---- nanotron's mixtures -------------------------------------------------------------------------------------


EXPERTS_OF_QWEN = {"num_experts": 6, "top_k": 3, "moe_intermediate_size": 20, "token_dispatcher_type": "alltoall"}


def test_nanotrons_qwen_with_experts_is_a_qwen2_moe(tmp_path: Path) -> None:
    shared = {"enable_shared_expert": True, "shared_expert_intermediate_size": 24, "router_aux_loss_coef": 0.5}
    one = our_model(tmp_path, is_qwen2_config=True, moe_config=EXPERTS_OF_QWEN | shared | {"layers": [1]})
    keys = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "router_aux_loss_coef": 0.5}
    keys |= {"qkv_bias": False, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}
    other = our_model(tmp_path, is_qwen2_moe_config=True, **keys)
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in other.named_parameters()]
    other.load_state_dict(one.state_dict())
    tokens = random_tokens(2, 16)
    assert torch.equal(our_logits(one, tokens), our_logits(other, tokens))
    assert one.model.layers["1"].mlp.routing == other.model.layers["1"].mlp.routing


def test_a_window_of_nanotrons_qwen_does_not_count_the_token_itself(tmp_path: Path) -> None:
    assert first_layer(tmp_path, "qwen2", sliding_window_size=7).self_attn.window == 8
    with pytest.raises(InputError, match=r"moe_config.layers: expected \[-1\], or layers from 0 to 1, found \[2\]"):
        first_layer(tmp_path, "qwen2", moe_config={"layers": [2]})
    with pytest.raises(InputError, match=r"moe_config.top_k: expected at most num_experts 2, found 3"):
        first_layer(tmp_path, "qwen2", moe_config={"num_experts": 2, "top_k": 3})


@pytest.mark.parametrize(
    "keys",
    [
        {"is_llamoe_config": True, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_capacity_factor": 1},
        {"is_qwen2_config": True, "sliding_window_size": 8, "moe_config": EXPERTS_OF_QWEN | {"top_k": 1}},
    ],
    ids=["llamoe", "qwen2"],
)
def test_nanotrons_mixtures_train(keys: dict[str, Any], tmp_path: Path) -> None:
    shapes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain = tiny_dict(tmp_path)
    plain["model"]["model_config"] = keys | shapes
    config = load(plain, [*text_overrides(tmp_path), "tokens.train_steps=10"])
    _, said = train_and_listen(config)
    first, *_, last = metrics(config)
    assert last["lm_loss"] < first["lm_loss"] - 0.3
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert all("expert_load_max" in line and "entropy" not in line and len(line) <= 130 for line in steps)
    assert 0 < last["expert_load_entropy"] <= 1


def test_experts_of_a_llamoe_have_no_gate_and_gelu(tmp_path: Path) -> None:
    moe = first_layer(tmp_path, "llamoe", moe_num_experts=3, num_experts_per_tok=2, router_aux_loss_coef=0.5).mlp
    assert [name for name, _ in moe.experts.named_parameters()] == ["up_proj.weight", "down_proj.weight"]
    assert (moe.experts.activation, moe.routing) == ("gelu_pytorch_tanh", Routing(2, balance=0.5))
