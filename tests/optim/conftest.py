"""A model small enough for formulas, and config sections in one line."""

from typing import Any

import pytest
import torch
from torch import nn

from kenotron.config.optimizer import Optimizer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Linear(8, 24, bias=True)
        self.down_proj = nn.Linear(24, 8, bias=False)
        self.input_layernorm = nn.RMSNorm(8)


class Tiny(nn.Module):
    """Parameters under Hugging Face's names: embedding, two layers, norm, head."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(16, 8)
        self.model.layers = nn.ModuleList([Layer(), Layer()])
        self.model.norm = nn.RMSNorm(8)
        self.lm_head = nn.Linear(8, 16, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = x + layer.down_proj(torch.tanh(layer.up_proj(layer.input_layernorm(x))))
        return self.lm_head(self.model.norm(x))


@pytest.fixture
def tiny():
    """tiny(tied=False): the same weights at every call."""

    def make(tied: bool = False) -> Tiny:
        torch.manual_seed(3)
        return Tiny(tied)

    return make


@pytest.fixture
def section():
    """section(factory, **optimizer): a validated `optimizer` section of the config."""

    def make(factory: dict[str, Any] | None = None, **keys: Any) -> Optimizer:
        defaults = {"zero_stage": 0, "weight_decay": 0.1, "clip_grad": 1.0, "accumulate_grad_in_fp32": True}
        defaults["learning_rate_scheduler"] = {"learning_rate": 1e-2}
        return Optimizer.model_validate(defaults | {"optimizer_factory": factory or {"name": "adamW"}} | keys)

    return make


@pytest.fixture
def set_gradients():
    """set_gradients(parameters, step): the same gradients for the same step, whatever the wrapper."""

    def fill(parameters: Any, step: int) -> None:
        from torch.distributed.tensor import DTensor

        for index, parameter in enumerate(parameters):
            generator = torch.Generator().manual_seed(1000 * step + index)
            value = torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                value = DTensor.from_local(value, parameter.device_mesh, parameter.placements)
            parameter.grad = value.to(parameter.dtype)

    return fill
