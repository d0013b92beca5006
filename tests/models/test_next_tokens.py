"""Blocks that predict further tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2), beside transformers' layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_families_equal_transformers import close
from torch import Tensor
from transformers import PreTrainedModel

from kenotron.config import load
from kenotron.config.errors import InputError, NotSupportedYet
from kenotron.generation.load import load_for_generation
from kenotron.interop import from_hf, initial_tensors, to_hf
from kenotron.kernels.attention import attention
from kenotron.models import Context, flops_per_token, named_parameters
from kenotron.models.decoder import Decoder, one_further
from support.families import hf_model, ours_of, save
from support.layout_runs import SPARSE, Problem
from support.tiny_llamas import our_config, our_logits, random_tokens
from support.tiny_run import metrics, train_quietly

LAYERS, FURTHER, WEIGHT = 2, 2, 0.4
SEQUENCES, LENGTH = 2, 9
OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")


def both(**keys: Any) -> tuple[PreTrainedModel, Decoder]:
    """transformers' model with a layer for every block of ours; ours predicts further tokens with the last ones."""
    theirs = hf_model("deepseek_v3", num_hidden_layers=LAYERS + FURTHER)
    deeper = ours_of(theirs)
    shapes = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": FURTHER, "next_token_loss_weight": WEIGHT}
    model = Decoder(deeper.config.model_copy(update=shapes | {"router_aux_loss_coef": 0.0} | keys))
    weights, generator = dict(named_parameters(deeper)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in named_parameters(model):
            if name.endswith(OWN):
                parameter.normal_(0.5, 0.3, generator=generator)
            else:
                parameter.copy_(weights[name])
    return theirs, model


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def reference(theirs: PreTrainedModel, model: Decoder, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss of the next token, and those of further ones, means over all `tokens`, by transformers' layers."""
    inner: Any = theirs.model
    own = {name: parameter for name, parameter in named_parameters(model) if name.endswith(OWN)}
    eps = theirs.config.rms_norm_eps
    positions = torch.arange(tokens.shape[1])[None]
    mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]

    def through(layer: int, x: Tensor) -> Tensor:
        rope = inner.rotary_emb(x, positions)
        out = inner.layers[layer](x, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        return out if isinstance(out, Tensor) else out[0]

    def loss(hidden: Tensor, further: int) -> Tensor:
        logits = theirs.lm_head(hidden)[:, : tokens.shape[1] - 1 - further]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1 + further :].flatten(), reduction="sum")

    hidden = inner.embed_tokens(tokens)
    for layer in range(LAYERS):
        hidden = through(layer, hidden)
    hidden = inner.norm(hidden)
    found = [loss(hidden, 0)]
    for number in range(FURTHER):
        here = f"model.layers.{LAYERS + number}"
        following = inner.embed_tokens(tokens.roll(-1 - number, dims=1))  # the last ones are nobody's
        joined = (rms(following, own[f"{here}.enorm.weight"], eps), rms(hidden, own[f"{here}.hnorm.weight"], eps))
        x = torch.cat(joined, -1) @ own[f"{here}.eh_proj.weight"].T
        hidden = rms(through(LAYERS + number, x), own[f"{here}.shared_head.norm.weight"], eps)
        found.append(loss(hidden, 1 + number))
    count = tokens.shape[0] * (tokens.shape[1] - 1)
    return found[0] / count, [each / count for each in found[1:]]


def context(positions: Tensor, **more: Any) -> Context:
    return Context((SEQUENCES, LENGTH), positions, attention, loss_scale=1 / (SEQUENCES * (LENGTH - 1)), **more)


def labels_of(tokens: Tensor) -> Tensor:
    return F.pad(tokens[:, 1:], (0, 1), value=-100).flatten()


def test_losses_and_gradients_are_those_of_transformers_layers() -> None:
    theirs, model = both()
    tokens = random_tokens(SEQUENCES, LENGTH)
    main, further = reference(theirs, model, tokens)
    mine = [parameter for name, parameter in named_parameters(model) if name.endswith(OWN)]
    shared = [theirs.model.embed_tokens.weight, theirs.lm_head.weight, theirs.model.layers[0].self_attn.o_proj.weight]
    last = theirs.model.layers[LAYERS + 1].self_attn.o_proj.weight
    total = main + WEIGHT * torch.stack(further).mean()
    *expected, of_last = torch.autograd.grad(total, [*mine, *shared, last])

    model.train()
    ctx = context(torch.arange(LENGTH).repeat(SEQUENCES))
    loss, _ = model(tokens.flatten(), ctx, labels_of(tokens))
    loss.backward()
    close(loss.detach(), main.detach())  # that of the next token alone
    close(model.further_loss, torch.stack(further).mean().detach())
    named = dict(named_parameters(model))
    ours = [*mine, named["model.embed_tokens.weight"], named["lm_head.weight"]]
    ours.append(named["model.layers.0.self_attn.o_proj.weight"])
    for parameter, gradient in zip(ours, expected, strict=True):
        close(parameter.grad, gradient)
    close(named[f"model.layers.{LAYERS + 1}.self_attn.o_proj.weight"].grad, of_last)


def test_one_further_stops_at_the_end_of_a_document() -> None:
    x, positions = torch.tensor([5, 6, 7, 8, 9, 1]), torch.tensor([0, 1, 2, 0, 1, 0])
    assert one_further(x, positions, -100).tolist() == [6, 7, -100, 9, -100, -100]
    assert one_further(one_further(x, positions, 0), positions, 0).tolist() == [7, 0, 0, 0, 0, 0]


def test_validation_and_decoding_do_without_them() -> None:
    _, model = both()
    tokens = random_tokens(SEQUENCES, LENGTH)
    model.eval()
    _, alone = both(num_nextn_predict_layers=0)
    close(our_logits(model, tokens), our_logits(alone.eval(), tokens))
    model(tokens.flatten(), context(torch.arange(LENGTH).repeat(SEQUENCES)), labels_of(tokens))
    assert model.further_loss is None


def test_flops_count_their_products_and_the_head_once_more() -> None:
    _, model = both()
    _, alone = both(num_nextn_predict_layers=0)
    _, deeper = both(num_nextn_predict_layers=0, num_hidden_layers=LAYERS + FURTHER)
    of_further = 2 * model.config.hidden_size * (2 * model.config.hidden_size + model.config.vocab_size)
    expected = flops_per_token(deeper, LENGTH, causal=False) + FURTHER * of_further
    assert flops_per_token(model, LENGTH, causal=False) == expected
    assert flops_per_token(alone, LENGTH, causal=False) < expected


# ---- runs ----


def test_a_run_logs_their_loss_and_learns(tmp_path: Path) -> None:
    keys = SPARSE["deepseek_v3"] | {"num_nextn_predict_layers": 1}
    fast = "optimizer.learning_rate_scheduler.learning_rate=0.02"
    config = Problem("further", steps=8, model=keys).config(f"accum=2 recompute=true {fast}", tmp_path)
    train_quietly(config)
    steps = metrics(config)
    assert len(steps) == 8
    assert steps[-1]["next_token_loss"] < steps[0]["next_token_loss"]
    assert steps[0]["next_token_loss"] == pytest.approx(steps[0]["lm_loss"], rel=0.2)  # less: ends have none


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallelism.pp=2", r"parallelism\.pp: expected 1"),
        ("parallelism.context_parallel_size=2", "context_parallel_size: expected 1"),
        ("model.loss={name: distillation, teacher: somewhere}", r"model\.loss: expected null"),
    ],
)
def test_layouts_that_part_what_they_need_and_other_losses_are_refused(override, message, tmp_path):
    keys = SPARSE["deepseek_v3"] | {"num_nextn_predict_layers": 1, "num_key_value_heads": 4}
    with pytest.raises(InputError, match=f"{message} with num_nextn_predict_layers"):
        load(our_config(tmp_path, **keys), [override, "tokens.batch_accumulation_per_replica=2"])


# ---- files ----


def as_published(folder: Path, model: Decoder) -> Path:
    """A folder as DeepSeek publishes one: the model of transformers, and the tensors of blocks behind its layers."""
    theirs = hf_model("deepseek_v3", num_hidden_layers=LAYERS)
    theirs.config.num_nextn_predict_layers = FURTHER
    save(theirs, folder)
    tensors = load_file(folder / "model.safetensors")
    for number in range(LAYERS, LAYERS + FURTHER):
        stem, like = f"model.layers.{number}.", f"model.layers.{LAYERS - 1}."
        tensors |= {stem + name[len(like) :]: 1.5 * t for name, t in tensors.items() if name.startswith(like)}
        for name in OWN:
            tensors[stem + name] = dict(named_parameters(model))[stem + name].detach().clone()
        tensors[stem + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[stem + "shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_import_exported_again_has_the_same_tensors(tmp_path: Path) -> None:
    folder = as_published(tmp_path / "hf", both()[1])
    from_hf(folder, tmp_path / "ours")
    loaded = load_for_generation(tmp_path / "ours").model
    assert len(loaded.config.next_token_layers) == FURTHER
    to_hf(tmp_path / "ours", tmp_path / "again")
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_a_run_may_begin_without_them(tmp_path: Path) -> None:
    _, model = both(num_nextn_predict_layers=0)
    folder, said = as_published(tmp_path / "hf", both()[1]), []
    weights = initial_tensors(str(folder), model.config, said.append)
    assert {name for name, _ in named_parameters(model)} <= set(weights)
    assert any(line.startswith("model.model_config.num_nextn_predict_layers is 0, but the weights") for line in said)


def test_a_head_of_their_own_is_refused(tmp_path: Path) -> None:
    folder = as_published(tmp_path / "hf", both()[1])
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.{LAYERS}.shared_head.head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotSupportedYet, match=r"shared_head\.head\.weight' differs from 'lm_head\.weight'"):
        initial_tensors(str(folder))
