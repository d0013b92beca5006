"""Kénotron's nano models for transformers (trust_remote_code), in plain PyTorch: nothing of Kénotron is needed.

A Llama with these differences: RMSNorms without weights, one of every head's queries and keys before RoPE, and a
feed-forward without a gate, whose activation is the square of ReLU. With `value_embeddings`, every other layer adds a
vector of the token to its values; with `final_logit_softcapping`, logits are bounded.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from .configuration_kenotron_nano import KenotronNanoConfig


def norm(x, eps):
    """x divided by its root mean square over the last dimension, in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class KenotronNanoAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.has_value_embedding = config.value_embeddings and (config.num_hidden_layers - 1 - layer) % 2 == 0
        if self.has_value_embedding:
            self.value_embedding = nn.Embedding(config.vocab_size, keys)
            self.value_gate = nn.Linear(config.hidden_size, config.num_key_value_heads, bias=False)

    def forward(self, x, rope, mask, cache, tokens):
        heads = (*x.shape[:2], -1, self.config.head_dim)
        q, k, v = (project(x).view(heads).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.has_value_embedding:
            gate = 2 * torch.sigmoid(self.value_gate(x)).transpose(1, 2).unsqueeze(-1)
            v = v + gate * self.value_embedding(tokens).view(heads).transpose(1, 2)
        q, k = (norm(each, self.config.rms_norm_eps) for each in (q, k))
        q, k = apply_rotary_pos_emb(q, k, *rope)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        groups = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(groups, dim=1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class KenotronNanoMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.activation = ACT2FN[config.hidden_act]

    def forward(self, x):
        return self.down_proj(self.activation(self.up_proj(x)))


class KenotronNanoLayer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = KenotronNanoAttention(config, layer)
        self.mlp = KenotronNanoMLP(config)

    def forward(self, x, rope, mask, cache, tokens):
        x = x + self.self_attn(norm(x, self.eps), rope, mask, cache, tokens)
        return x + self.mlp(norm(x, self.eps))


class KenotronNanoPreTrainedModel(PreTrainedModel):
    config_class = KenotronNanoConfig
    base_model_prefix = "model"
    _no_split_modules = ["KenotronNanoLayer"]  # noqa: RUF012
    _supports_sdpa = True


class KenotronNanoModel(KenotronNanoPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(KenotronNanoLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.post_init()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        if input_ids is None and self.config.value_embeddings:
            raise ValueError("value_embeddings look tokens up: expected input_ids, found inputs_embeds alone")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        at = torch.arange(past, past + x.shape[1], device=x.device)
        if position_ids is None:
            position_ids = at[None]
        keys = torch.arange(past + x.shape[1], device=x.device)
        mask = (keys <= at[:, None])[None, None]
        if attention_mask is not None:  # padding sees itself alone, so that no row is empty
            mask = mask & (attention_mask.bool()[:, None, None] | (keys == at[:, None]))
        rope = self.rotary_emb(x, position_ids)
        for layer in self.layers:
            x = layer(x, rope, mask, past_key_values, input_ids)
        x = norm(x, self.config.rms_norm_eps)
        return BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past_key_values)


class KenotronNanoForCausalLM(KenotronNanoPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = KenotronNanoModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids=None, labels=None, logits_to_keep=0, **kwargs):
        """labels as input_ids, shifted here; -100 has no loss."""
        outputs = self.model(input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        softcap = self.config.final_logit_softcapping
        if softcap is not None:
            logits = (softcap * torch.tanh(logits.float() / softcap)).to(logits.dtype)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)
