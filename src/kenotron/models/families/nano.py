"""Nano: a Llama-like decoder with the changes that speedruns of small GPTs found and larger models kept.

    tokens ── embed ──┬─ norm ─ attention ─(+)─┬─ norm ─ up ─ ReLU² ─ down ─(+)── … ── norm ── head ── loss
                      └────────────────────────┘└──────────────────────────┘

Differences from a Llama (modded-nanogpt, nanochat):

* queries and keys are normalized head by head (arXiv 2010.04245), so scores stay bounded at any learning rate;
* the feed-forward has no gate: ``down(relu(up(x))²)`` (arXiv 2109.08668), usually of width 4 * hidden_size;
* projections into the residual stream start at zero, so the first step sees only the embedding;
* norms have no weights, and the head is not tied to the embedding.

Two more are options:

* ``value_embeddings: true``: every other layer, including the last, has its own embedding that is added to the values
  with a gate per head: ``v + 2 sigmoid(gate(x)) E[token]``. It costs memory, but hardly any FLOPs;
* ``final_logit_softcapping: 15.0``: logits s become ``15 tanh(s / 15)`` (Gemma 2, arXiv 2408.00118).

A rotation preserves lengths, so queries and keys may be normalized before RoPE, with the same result as after it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from kenotron.config.section import key, our_key
from kenotron.models.families.llama import UNGATED_COLUMNS, LlamaStyle, LlamaStyleArchitecture
from kenotron.models.init_rules import Constant, InitRule

if TYPE_CHECKING:
    from torch import nn


class NanoArchitecture(LlamaStyleArchitecture):
    """The nano family."""

    family: Literal["nano"] = our_key("The family's name.", "nano")
    hidden_act: str = key("Activation of the feed-forward; relu2 is the square of ReLU.", "relu2")
    value_embeddings: bool = our_key(
        "Every other layer, the last among them, adds a learned vector of the token to its values, through a gate "
        "for each head.",
        False,
    )
    final_logit_softcapping: float | None = our_key(
        "Bounds logits s: c tanh(s / c) for this c; null: they are not bounded.", None, gt=0
    )

    def has_value_embedding(self, layer: int) -> bool:
        """Return whether layer `layer` has a value embedding."""
        return self.value_embeddings and (self.num_hidden_layers - 1 - layer) % 2 == 0


class Nano(LlamaStyle[NanoArchitecture]):
    """Nano; its norms have no parameters, so only matrices have to be split."""

    section = NanoArchitecture
    plan = replace(LlamaStyle.plan, column=UNGATED_COLUMNS, sequence=())
    hf_model_type = "kenotron_nano"
    hf_class = "KenotronNanoForCausalLM"
    hf_code = {  # noqa: RUF012
        "AutoConfig": "configuration_kenotron_nano.KenotronNanoConfig",
        "AutoModelForCausalLM": "modeling_kenotron_nano.KenotronNanoForCausalLM",
    }
    hf_fixed = {"attention_bias": False, "mlp_bias": False}  # noqa: RUF012

    def __init__(self, config: NanoArchitecture) -> None:
        super().__init__(config)
        if config.value_embeddings:
            added = tuple(f"model.layers.*.self_attn.{name}" for name in ("value_embedding", "value_gate"))
            self.plan = replace(self.plan, column=self.plan.column + added, kv=self.plan.kv + added)

    def block(self, layer: int) -> nn.Module:
        """Return the module of layer `layer`."""
        from kenotron.models.blocks.attention import Attention
        from kenotron.models.blocks.linear import Embedding, Linear
        from kenotron.models.blocks.mlp import MLP
        from kenotron.models.blocks.norm import PlainRMSNorm
        from kenotron.models.blocks.pre_norm import PreNormBlock

        config = self.config
        of_a_head = PlainRMSNorm(config.head_dim, config.rms_norm_eps)
        values: dict[str, nn.Module] = {}
        if config.has_value_embedding(layer):
            values["value_embedding"] = Embedding(config.vocab_size, config.kv_heads * config.head_dim)
            values["value_gate"] = Linear(config.hidden_size, config.kv_heads, together=1)
        attention = Attention.of(config, layer, q_norm=of_a_head, k_norm=of_a_head, **values)
        mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, bias=False)
        return PreNormBlock(self.final_norm(), attention, self.final_norm(), mlp)

    def final_norm(self) -> nn.Module:
        """Return the norm that is also used before attention and feed-forward."""
        from kenotron.models.blocks.norm import PlainRMSNorm

        return PlainRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def init_rules(self, std: float, scaling: str) -> list[InitRule]:
        """Return N(0, std); zeros in gates and in projections into the residual stream, for any `scaling`."""
        zeros = [InitRule(f"{pattern}.weight", Constant(0.0)) for pattern in self.plan.row]
        return [*zeros, InitRule("*.value_gate.weight", Constant(0.0)), *super().init_rules(std, scaling)]
