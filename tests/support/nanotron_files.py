"""A small writer of nanotron's checkpoints, by its documented format and nothing of the reader's.

    write_nanotron(folder, config, weights, moments, step=2, tp=2, pp=2, dp=2, zero=1)

`weights` are ours, whole and in fp32; they are fused, cut and named here as nanotron's ranks do.
"""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

EMBEDDING = "model.token_position_embeddings.pp_block.token_embedding.weight"
HEAD = "model.lm_head.pp_block.weight"

# (nanotron's module, our modules in it, how tp cuts it: every chunk by rows, the columns, or not at all)
MODULES = [
    ("input_layernorm", ["input_layernorm"], None),
    ("attn.qkv_proj", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "rows"),
    ("attn.o_proj", ["self_attn.o_proj"], "columns"),
    ("post_attention_layernorm", ["post_attention_layernorm"], None),
    ("mlp.gate_up_proj", ["mlp.gate_proj", "mlp.up_proj"], "rows"),
    ("mlp.down_proj", ["mlp.down_proj"], "columns"),
]


def write_nanotron(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    moments: dict[str, Tensor] | None = None,
    *,
    step: int = 2,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    zero: int = 0,
    masters: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    version: str = "1.5",
) -> Path:
    """Checkpoint `<folder>/<step>`, and `latest.txt`; `moments` are `state.<our name>.<key>`. Returns its folder."""
    root = folder / str(step)
    layers = config["model"]["model_config"]["num_hidden_layers"]
    cuts = _cuts(layers, set(weights))
    for name, (ours, how, stage) in cuts.items():
        _write_weight(root, name, [weights[each].to(dtype) for each in ours], how, (stage * pp // (layers + 1), pp), tp)
    if moments is not None:
        _write_optimizer(root, cuts, weights, moments, layers, (pp, tp, dp), zero, masters)
    root.mkdir(parents=True, exist_ok=True)
    samples = step * config["tokens"]["micro_batch_size"] * config["tokens"]["batch_accumulation_per_replica"]
    stage = {"name": "only", "start_training_step": 1, "consumed_train_samples": samples}
    metas = {"last_train_step": step, "consumed_train_samples": samples, "last_stage_idx": 0, "data_stages": [stage]}
    if version == "1.5":
        metas["consumed_tokens_total"] = samples * config["tokens"]["sequence_length"]
    meta = {"version": version, "tp": tp, "dp": dp, "custom_metas": None, "metas": metas}
    (root / "checkpoint_metadata.json").write_text(json.dumps(meta, indent=2, sort_keys=True))
    (root / "config.yaml").write_text(yaml.dump(config))
    (root / "model_config.json").write_text(json.dumps(config["model"]["model_config"]))
    (folder / "latest.txt").write_text(str(step))
    return root


def _cuts(layers: int, names: set[str]) -> dict[str, tuple[list[str], str | None, int]]:
    """nanotron's name → our names in it, how tp cuts it, and its place in the pipeline (the last: norm and head)."""
    cuts: dict[str, tuple[list[str], str | None, int]] = {EMBEDDING: (["model.embed_tokens.weight"], "rows", 0)}
    for layer in range(layers):
        for theirs, ours, how in MODULES:
            for kind in ("weight", "bias"):
                found = [f"model.layers.{layer}.{module}.{kind}" for module in ours]
                cut = None if kind == "bias" and how == "columns" else how
                if found[0] in names:
                    cuts[f"model.decoder.{layer}.pp_block.{theirs}.{kind}"] = (found, cut, layer)
    cuts["model.final_layer_norm.pp_block.weight"] = (["model.norm.weight"], None, layers)
    if "lm_head.weight" in names:
        cuts[HEAD] = (["lm_head.weight"], "rows", layers)
    return cuts


def _of_rank(chunks: list[Tensor], how: str | None, rank: int, tp: int) -> tuple[Tensor, list[tuple[str, str]]]:
    """What a rank has of the fused matrix, and the slices: (here, there)."""
    if how is None:
        return torch.cat(chunks), []
    if how == "columns":
        (whole,) = chunks
        width = whole.shape[1] // tp
        rows = f"0,{whole.shape[0]},None"
        pair = f"{rows}|0,{width},None", f"{rows}|{rank * width},{(rank + 1) * width},None"
        return whole[:, rank * width : (rank + 1) * width].contiguous(), [pair]
    parts, pairs, here, there = [], [], 0, 0
    for chunk in chunks:
        size = chunk.shape[0] // tp
        columns = "".join(f"|0,{width},None" for width in chunk.shape[1:])
        parts.append(chunk[rank * size : (rank + 1) * size])
        begin = there + rank * size
        pairs.append((f"{here},{here + size},None{columns}", f"{begin},{begin + size},None{columns}"))
        here, there = here + size, there + chunk.shape[0]
    return torch.cat(parts), pairs


def _write_weight(
    root: Path, name: str, chunks: list[Tensor], how: str | None, stage: tuple[int, int], tp: int
) -> None:
    *folders, kind = name.split(".")
    folder = root.joinpath("model", *folders)
    folder.mkdir(parents=True, exist_ok=True)
    if how is None:
        save_file({"data": torch.cat(chunks)}, folder / f"model_{kind}.safetensors")
        return
    for rank in range(tp):
        part, pairs = _of_rank(chunks, how, rank, tp)
        rows, *columns = (sum(chunk.shape[0] for chunk in chunks), *chunks[0].shape[1:])
        shape = f"(np.int64({rows}),{''.join(f' {width},' for width in columns).rstrip(',')})"
        slices = ";".join("#".join(pair) for pair in pairs)
        notes = {"version": "1.5", "local_global_slices_pairs": slices, "unsharded_shape": shape}
        file = f"model_{kind}_pp-rank-{stage[0]}-of-{stage[1]}_tp-rank-{rank}-of-{tp}.safetensors"
        save_file({"data": part.clone()}, folder / file, metadata=notes)


def _write_optimizer(
    root: Path,
    cuts: dict[str, tuple[list[str], str | None, int]],
    weights: dict[str, Tensor],
    moments: dict[str, Tensor],
    layers: int,
    degrees: tuple[int, int, int],
    zero: int,
    masters: bool,
) -> None:
    folder = root / "optimizer"
    folder.mkdir(parents=True)
    pps, tps, dps = degrees
    sizes = {"tp_size": str(tps), "dp_size": str(dps), "pp_size": str(pps), "expert_parallel_size": "1"}
    kind = "ZeroDistributedOptimizer" if zero else "OptimizerFromGradientAccumulator"
    (folder / "optimizer_config.json").write_text(json.dumps({"type": kind, "parallelism": sizes, "configs": {}}))
    tied = HEAD not in cuts
    for pp in range(pps):
        mine = [name for name, (_, _, stage) in cuts.items() if stage * pps // (layers + 1) == pp]
        if tied and pp == pps - 1 and EMBEDDING not in mine:
            mine.append(EMBEDDING)  # the last stage has the shared matrix, too, and updates it alike
        for tp in range(tps):
            for dp in range(dps if zero else 1):
                content = _rank_content(mine, cuts, weights, moments, (tp, tps), (dp, dps) if zero else None, masters)
                of_dp = f"_dp-{dp}-of-{dps}" if zero else ""
                torch.save(content, folder / f"optimizer_pp-{pp}-of-{pps}{of_dp}_tp-{tp}-of-{tps}_exp-0-of-1.pt")


def _rank_content(
    names: list[str],
    cuts: dict[str, tuple[list[str], str | None, int]],
    weights: dict[str, Tensor],
    moments: dict[str, Tensor],
    tp: tuple[int, int],
    dp: tuple[int, int] | None,
    masters: bool,
) -> dict[str, Any]:
    content: dict[str, Any] = {"state": {}, "names": {}, "param_groups": [{"lr": 0.01, "params": []}]}
    if masters:
        content["gradient_accumulator"] = {}
    for name in names:
        ours, how, _ = cuts[name]

        def cut(tensors: list[Tensor], how: str | None = how) -> Tensor:
            part = _of_rank(tensors, how, *tp)[0]
            return part if dp is None else _flat_share(part, *dp)

        if cut([weights[each] for each in ours]).numel() == 0:
            continue
        index = len(content["names"])
        content["names"][index] = name
        content["state"][index] = {
            "step": moments[f"state.{ours[0]}.step"].clone(),
            **{key: cut([moments[f"state.{each}.{key}"] for each in ours]) for key in ("exp_avg", "exp_avg_sq")},
        }
        if masters:
            content["gradient_accumulator"][name] = cut([weights[each] for each in ours]).requires_grad_()
    return content


def _flat_share(tensor: Tensor, rank: int, size: int) -> Tensor:
    """ZeRO-1's share of a flat tensor: equal ones, the last of them one element shorter where they do not fit."""
    most = (tensor.numel() - 1) // size + 1
    short = most * size - tensor.numel()
    shares = [most - (number >= size - short) for number in range(size)]
    return tensor.flatten().split(shares)[rank].clone()
