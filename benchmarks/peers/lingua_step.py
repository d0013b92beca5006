"""lingua's Llama, its optimizer and the step of its `apps/main/train.py`, on one rank.

lingua keeps fp32 master weights by FSDP, which here is autocast. Compiled: the whole model, as lingua does.
"""

from __future__ import annotations

import torch
from checkout import add_to_path, replace_if_missing
from torch import Tensor, nn
from work import Work
from worker import Job, Pace

PLACES = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def build(work: Work, weights: dict[str, Tensor]) -> nn.Module:
    replace_if_missing("xformers", ops=("fmha", "AttentionBias"))
    add_to_path("lingua")
    from apps.main.transformer import LMTransformer, LMTransformerArgs

    model = LMTransformer(
        LMTransformerArgs(
            dim=work.hidden,
            n_layers=work.layers,
            n_heads=work.heads,
            vocab_size=work.vocab,
            max_seqlen=work.sequence,
            norm_eps=work.norm_eps,
            rope_theta=work.rope_theta,
            multiple_of=work.intermediate,
        )
    )
    model.load_state_dict(
        {renamed(name): pairs_side_by_side(name, weight, work.heads) for name, weight in weights.items()}
    )
    return model.to(work.device).train()


def renamed(name: str) -> str:
    """Hugging Face's name of a weight → lingua's."""
    for theirs, here in PLACES.items():
        name = name.replace(theirs, here)
    return name


def pairs_side_by_side(name: str, weight: Tensor, heads: int) -> Tensor:
    """lingua rotates neighbouring channels, Hugging Face those of the two halves of a head."""
    if "q_proj" not in name and "k_proj" not in name:
        return weight
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def train(job: Job, pace: Pace) -> None:
    work = job.work
    model = build(work, job.weights())
    from lingua.optim import OptimArgs, build_optimizer

    (beta1, beta2), rate = work.betas, work.learning_rate
    settings = OptimArgs(rate, work.weight_decay, work.eps, beta1, beta2, work.clip, scheduler="constant")
    optimizer, scheduler = build_optimizer(model, settings, n_steps=1_000_000)
    if job.compiled:
        model.compile()
    autocast = torch.autocast(work.device, torch.bfloat16, enabled=work.precision == "bf16")
    for batch in job.batches():
        tokens, labels = batch[:, :-1].to(work.device), batch[:, 1:].to(work.device).contiguous()
        with autocast:
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=settings.clip, foreach=True).item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        pace(loss.detach())
        del loss
