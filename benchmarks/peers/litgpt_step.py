"""litgpt's GPT and the step of its `pretrain.py`: Fabric, chunked cross-entropy, clip, AdamW.

Written out from `litgpt.pretrain.fit`, which would also validate, log and time itself. Two things are better than
litgpt ships them, so that the peer is at its strongest: AdamW is fused on the CPU too, and the model may run eagerly
(litgpt always compiles).
"""

from __future__ import annotations

import lightning as L
import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy, instantiate_torch_optimizer
from torch import Tensor
from work import Work
from worker import Job, Pace


def build(work: Work) -> GPT:
    return GPT(
        Config(
            name="benchmark",
            block_size=work.sequence,
            vocab_size=work.vocab,
            padded_vocab_size=work.vocab,
            n_layer=work.layers,
            n_head=work.heads,
            n_query_groups=work.heads,
            n_embd=work.hidden,
            intermediate_size=work.intermediate,
            rotary_percentage=1.0,
            rope_base=int(work.rope_theta),
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=work.norm_eps,
            mlp_class_name="LLaMAMLP",
        )
    )


def litgpt_names(weights: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Hugging Face's names and unfused projections → litgpt's."""
    named = {
        "transformer.wte.weight": weights["model.embed_tokens.weight"],
        "transformer.ln_f.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for layer in range(layers):
        ours, theirs = f"model.layers.{layer}.", f"transformer.h.{layer}."
        projections = [weights[f"{ours}self_attn.{name}_proj.weight"] for name in "qkv"]
        named[theirs + "attn.qkv.weight"] = torch.cat(projections)
        named[theirs + "attn.proj.weight"] = weights[ours + "self_attn.o_proj.weight"]
        named[theirs + "mlp.fc_1.weight"] = weights[ours + "mlp.gate_proj.weight"]
        named[theirs + "mlp.fc_2.weight"] = weights[ours + "mlp.up_proj.weight"]
        named[theirs + "mlp.proj.weight"] = weights[ours + "mlp.down_proj.weight"]
        named[theirs + "norm_1.weight"] = weights[ours + "input_layernorm.weight"]
        named[theirs + "norm_2.weight"] = weights[ours + "post_attention_layernorm.weight"]
    return named


def train(job: Job, pace: Pace) -> None:
    work = job.work
    precision = "bf16-mixed" if work.precision == "bf16" else "32-true"
    fabric = L.Fabric(devices=1, accelerator="cpu" if work.device == "cpu" else "cuda", precision=precision)
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = build(work)
    model.load_state_dict(litgpt_names(job.weights(), work.layers))
    compiled = torch.compile(model) if job.compiled else model
    model = fabric.setup(compiled)
    settings = {
        "class_path": "torch.optim.AdamW",
        "init_args": {
            "lr": work.learning_rate,
            "betas": work.betas,
            "eps": work.eps,
            "weight_decay": work.weight_decay,
        },
    }
    optimizer = instantiate_torch_optimizer(settings, model.parameters(), fused=True)
    optimizer = fabric.setup_optimizers(optimizer)
    for batch in job.batches():
        batch = batch.to(fabric.device)
        input_ids, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        logits = model(input_ids)
        loss = chunked_cross_entropy(logits, targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=work.clip)
        optimizer.step()
        optimizer.zero_grad()
        del logits
        pace(loss.detach())
        del loss
