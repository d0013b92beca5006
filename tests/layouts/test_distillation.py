"""Distillation: the loss is that of its definition, on every layout, from a teacher of another shape."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import kenotron as kn
from kenotron.config.errors import InputError
from kenotron.config.model import Distillation
from kenotron.generation.load import load_for_generation
from kenotron.interop import to_hf
from kenotron.kernels.attention import attention
from kenotron.models import Context, MicroBatch
from kenotron.models.token_loss import OwnLoss
from kenotron.training import distillation
from kenotron.training.distillation import teaching, token_losses
from kenotron.training.teacher_cache import distance, top_k_of
from support.layout_runs import Problem, expect_the_same, train_alone, train_on_layout
from support.ranks import run_ranks
from support.tiny_run import text_overrides, tiny_config, train_quietly

VOCAB = 64


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrower model of fewer heads, in Hugging Face's format."""
    folder = tmp_path_factory.mktemp("teacher")
    narrow = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    shape = [f"model.model_config.{key}={value}" for key, value in narrow.items()]
    train_quietly(tiny_config(folder, *shape, "model.init_method={std: 0.5}", "tokens.train_steps=1"))
    to_hf(folder / "checkpoints", folder / "hf")
    return folder / "hf"


def definition(logits: Any, theirs: Any, labels: Any, weight: float, temperature: float) -> Any:
    """In float64, token by token, by sums over the vocabulary."""
    losses = torch.zeros(len(labels), dtype=torch.float64)
    for i, label in enumerate(labels):
        if label < 0:
            continue
        p, q = logits[i].exp() / logits[i].exp().sum(), (theirs[i] / temperature).exp()
        soft, q = (logits[i] / temperature).exp(), q / q.sum()
        distance = (q * (q / (soft / soft.sum())).log()).sum()
        losses[i] = -(1 - weight) * p[label].log() + weight * temperature**2 * distance
    return losses


@pytest.mark.parametrize(("weight", "temperature"), [(0.5, 1.0), (0.25, 2.0), (1.0, 0.7)])
@pytest.mark.parametrize("more", [0, 8])
def test_the_loss_is_that_of_the_definition(weight: float, temperature: float, more: int) -> None:
    """Of a teacher with `more` tokens, those that the model lacks are left out."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    theirs = torch.randn(6, 5 + more, generator=generator, dtype=torch.float64)
    labels, rows = torch.tensor([0, 4, -100, 2, 1, -100]), torch.tensor([0.5, 2.0])
    settings = Distillation(name="distillation", teacher="…", weight=weight, temperature=temperature)
    loss = OwnLoss(lambda logits, labels: token_losses(settings, logits, theirs, labels))
    ctx = Context((2, 3), torch.arange(6), attention, loss_scale=0.25)
    losses = definition(logits, theirs[:, :5], labels, weight, temperature)
    weighted = (losses * rows.double().repeat_interleave(3)).sum()
    for each, total in ((ctx, losses.sum()), (replace(ctx, sequence_weights=rows), weighted)):
        expected = total / 4
        found, z_loss = loss.of_logits(logits, labels, each)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        assert z_loss == 0
        (ours,) = torch.autograd.grad(found, logits)
        (exact,) = torch.autograd.grad(expected, logits, retain_graph=True)
        assert torch.allclose(ours, exact, rtol=1e-4, atol=1e-7)


def test_softmax_is_in_fp32() -> None:
    """Of a model near its teacher, with logits in bf16, gradients are those of these logits in fp32."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 50, generator=generator).bfloat16()
    theirs = logits + 0.02 * torch.randn(4, 50, generator=generator)
    settings = Distillation(name="distillation", teacher="…", weight=1.0)
    gradients = []
    for each in (logits, logits.float()):
        each.requires_grad_()
        loss = OwnLoss(lambda logits, labels: token_losses(settings, logits, theirs, labels))
        ctx = Context((1, 4), torch.arange(4), attention)
        gradients += torch.autograd.grad(loss.of_logits(each, torch.zeros(4, dtype=torch.int64), ctx)[0], each)
    rounded, exact = (each.float() for each in gradients)
    assert (rounded - exact).norm() < 0.005 * exact.norm()  # of its own rounding to bf16 alone


def of_groups(logits: Any, theirs: Any, k: int, temperature: float) -> Any:
    """The divergence over the k most probable tokens of `theirs`, each by itself, and the others as one; in float64."""
    found = []
    for ours, given in zip(logits.double() / temperature, theirs.double() / temperature):
        p, q = ours.exp() / ours.exp().sum(), given.exp() / given.exp().sum()
        best = q.argsort(descending=True)[:k]
        others = [i for i in range(len(q)) if i not in best]
        pairs = [(q[i], p[i]) for i in best] + [(q[others].sum(), p[others].sum())]
        found.append(sum(a * (a / b).log() for a, b in pairs))
    return torch.stack(found)


@pytest.mark.parametrize(("k", "temperature"), [(1, 1.0), (3, 2.0), (8, 0.7)])
def test_of_the_most_probable_tokens_it_is_that_of_the_definition(k: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 9, generator=generator, requires_grad=True)
    theirs = 2 * torch.randn(5, 9, generator=generator)
    found = distance(logits / temperature, top_k_of(theirs / temperature, k))
    expected = of_groups(logits, theirs, k, temperature)
    assert torch.allclose(found.double(), expected, rtol=2e-3, atol=1e-5)  # they are kept in fp16
    ours, exact = (torch.autograd.grad(each.sum(), logits)[0] for each in (found, expected))
    assert torch.allclose(ours, exact, rtol=1e-2, atol=1e-3)
    same = distance(theirs / temperature, top_k_of(theirs / temperature, k))
    assert float(same.abs().max()) < 1e-5


def problem(teacher: Path) -> Problem:
    loss = f"model.loss={{name: distillation, teacher: {teacher}, weight: 0.75, temperature: 2.0}}"
    return Problem("distilled", (loss,), steps=2, model={"z_loss_enabled": False, "vocab_size": VOCAB})


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "layout", ["tp=2", "tp=2 mode=REDUCE_SCATTER", "pp=2 engine=1f1b accum=4", "dp=2 zero=3", "dp=2 accum=1"]
)
def test_it_is_the_same_on_every_layout(layout, teacher, like_one_process):
    like_one_process(2, problem(teacher), layout)


def distilled(folder: Path, teacher: Path, *overrides: str) -> Any:
    loss = f"model.loss={{name: distillation, teacher: {teacher}, weight: 1.0}}"
    return train_quietly(tiny_config(folder, loss, *overrides))


def test_a_model_becomes_its_teacher(tmp_path: Path) -> None:
    """With the teacher's own weights the loss is 0; with others it falls."""
    first = train_quietly(tiny_config(tmp_path / "first", "model.init_method={std: 0.5}", "tokens.train_steps=1"))
    checkpoint = tmp_path / "first" / "checkpoints" / "1"
    assert first.last_metrics["lm_loss"] > 1
    same = distilled(tmp_path / "same", checkpoint, f"model.init_method={{path: {checkpoint}}}", "tokens.train_steps=1")
    assert abs(same.last_metrics["lm_loss"]) < 1e-6
    rate = "optimizer.learning_rate_scheduler.learning_rate=0.02"
    one, many = (distilled(tmp_path / str(n), checkpoint, rate, f"tokens.train_steps={n}") for n in (1, 60))
    assert many.last_metrics["lm_loss"] < 0.95 * one.last_metrics["lm_loss"]


def cached(folder: Path, teacher: Path, *overrides: str) -> Any:
    """A run of two steps with a cache of its teacher's answers, in `folder`."""
    loss = f"model.loss={{name: distillation, teacher: {teacher}, weight: 0.75, top_k: 5, cache: {folder}/answers}}"
    return tiny_config(folder, loss, "tokens.train_steps=2", *overrides)


def test_a_teacher_is_asked_once(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another student of the same samples needs no teacher; without a cache the losses are the same bits."""

    def loss(name: str, *overrides: str) -> float:
        config = cached(tmp_path, teacher, f"checkpoints.checkpoints_path={tmp_path}/{name}", *overrides)
        return float(train_quietly(config).last_metrics["lm_loss"])

    found = loss("without", "model.loss.cache=null"), loss("with")
    assert found[0] == found[1]
    monkeypatch.setattr(distillation, "load_for_generation", None)
    assert loss("again") == found[0]
    assert loss("another", "model.model_config.hidden_size=32") != found[0]
    with pytest.raises(InputError, match=r"model\.loss\.cache: sample \d+ has other tokens in the cache; expected a"):
        loss("seed", "data_stages.0.data.seed=7")
    with pytest.raises(InputError, match=r"model\.loss\.cache: .* was made with temperature 1\.0; expected 2\.0"):
        loss("temperature", "model.loss.temperature=2.0")
    with pytest.raises(InputError, match=r"model\.loss\.cache: .* was made with top_k 5; expected 4"):
        loss("top_k", "model.loss.top_k=4")
    (tmp_path / "answers" / "top_k.json").write_text("{")
    with pytest.raises(InputError, match=r"answers/top_k\.json is not JSON: "):
        loss("damaged")


def test_a_missing_teacher_is_an_error_before_the_first_step_if_samples_are_left(teacher: Path, tmp_path: Path) -> None:
    """A longer run, beyond the two steps whose answers there are."""
    train_quietly(cached(tmp_path, teacher))
    file = tmp_path / "answers" / "top_k.json"
    file.write_text(file.read_text().replace(str(teacher), str(tmp_path / "gone")))
    train_quietly(cached(tmp_path, tmp_path / "gone", f"checkpoints.checkpoints_path={tmp_path}/as-long"))
    longer = cached(tmp_path, tmp_path / "gone", f"checkpoints.checkpoints_path={tmp_path}/longer")
    longer = kn.load(longer, ["tokens.train_steps=3", "general.run=longer"])
    with pytest.raises(InputError, match=r"^model\.loss\.teacher: .*gone"):
        train_quietly(longer)
    assert not (tmp_path / "logs" / "longer" / "metrics.jsonl").exists()


def test_a_record_that_was_cut_is_written_again(teacher: Path, tmp_path: Path) -> None:
    """Where a disk was full, and records behind it were written later."""
    first = train_quietly(cached(tmp_path, teacher)).last_metrics["lm_loss"]
    file = tmp_path / "answers" / "top_k.bin"
    whole = file.read_bytes()
    size = len(whole) // (2 * tiny_config(tmp_path).global_batch_size)  # of the records of two steps
    file.write_bytes(whole[: size // 2] + bytes(size - size // 2) + whole[size:])
    again = cached(tmp_path, teacher, f"checkpoints.checkpoints_path={tmp_path}/again")
    assert train_quietly(again).last_metrics["lm_loss"] == first
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2 zero=3",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("tp=2 mode=REDUCE_SCATTER", "pp=2 engine=1f1b")),
    ],
)
def test_answers_serve_every_layout(layout: str, teacher: Path, tmp_path: Path) -> None:
    """Those of one process, and where ranks write them."""
    plain = problem(teacher)
    of_one, of_ranks = (
        replace(plain, overrides=(*plain.overrides, "model.loss.top_k=5", f"model.loss.cache={tmp_path}/{name}"))
        for name in ("one", "ranks")
    )
    alone = train_alone(of_one, tmp_path)
    before = (tmp_path / "one" / "top_k.bin").read_bytes()
    for number, each in enumerate((of_one, of_ranks, of_ranks)):
        expect_the_same(run_ranks(2, train_on_layout, each, layout, tmp_path / str(number), alone), alone)
    assert (tmp_path / "one" / "top_k.bin").read_bytes() == before
    assert len((tmp_path / "ranks" / "top_k.bin").read_bytes()) == len(before)


def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path) -> None:
    """A tokenizer of as many tokens is not the same one."""
    (tmp_path / "a").mkdir()
    text = text_overrides(tmp_path / "a")
    train_quietly(tiny_config(tmp_path / "a", *text, "tokens.train_steps=1"))
    distilled(tmp_path / "b", tmp_path / "a" / "checkpoints", *text, "tokens.train_steps=1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0.txt").write_text("zebra zulu zigzag " * 500)
    other = f"data_stages.0.data.dataset.text_files={tmp_path}/other"
    with pytest.raises(InputError, match=r"^model\.loss\.teacher: .*a/checkpoints was trained with another tokenizer"):
        distilled(tmp_path / "c", tmp_path / "a" / "checkpoints", *text, other, "tokens.val_fraction=0.0001")


def test_documents_are_apart_for_the_teacher_too(teacher: Path, tmp_path: Path) -> None:
    model: Any = load_for_generation(teacher, "float32").model
    loss = f"model.loss={{name: distillation, teacher: {teacher}, weight: 1.0}}"
    teach = teaching(tiny_config(tmp_path, loss), [model], torch.device("cpu"))
    tokens = torch.arange(12) % VOCAB
    logits, labels = torch.zeros(12, VOCAB), torch.ones(12, dtype=torch.int64)
    labels[:5] = -100
    packed = Context((1, 12), torch.cat([torch.arange(5), torch.arange(7)]), attention, cu_seqlens=(0, 5, 12))
    alone = Context((1, 7), torch.arange(7), attention)
    found = []
    for rows, ctx in ((slice(0, 12), packed), (slice(5, 12), alone)):
        taught = teach(MicroBatch(tokens[rows], labels[rows], ctx)).ctx
        found.append(taught.loss.of_logits(logits[rows], labels[rows], taught)[0].item())
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("model.model_config.vocab_size=65", r"model.loss.teacher: expected a vocabulary of 65 or more"),
        ("parallelism.context_parallel_size=2", r"context_parallel_size: expected 1: the teacher"),
        ("model.model_config.z_loss_enabled=true", r"z_loss_enabled.*expected false with model.loss"),
        ("model.loss.teacher=/nowhere/none", r"^model.loss.teacher: .*none"),
        ("model.loss.weight=0", r"model.loss.weight: expected"),
        ("model.loss.top_k=64", r"model.loss.top_k: expected fewer than the 64 tokens of the model"),
        ("model.loss.cache=answers", r"model.loss.top_k: missing: model.loss.cache keeps so many"),
    ],
)
def test_what_cannot_be_taught_is_refused(change, line, teacher, tmp_path):
    with pytest.raises(InputError, match=line):
        distilled(tmp_path, teacher, change)
