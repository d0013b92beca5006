"""DoReMi: the weights of algorithm 1, the losses that they weigh, on every layout and after a resume."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import kenotron as kn
from kenotron.config import Config, InputError, load
from kenotron.interop import initial_tensors
from kenotron.kernels.attention import attention
from kenotron.models import Context, build, named_parameters
from kenotron.observers.doremi import DomainWeights
from support.layout_runs import SHORT, train_here
from support.ranks import run_ranks
from support.tiny_run import losses, metrics, tiny_config, train_and_listen, train_quietly

NAMES = ("counting", "reversed")


def texts(folder: Path) -> Path:
    """A folder of text for each domain: the second is harder than the first."""
    for name in NAMES:
        (folder / name).mkdir(parents=True, exist_ok=True)
        lines = [f"The sum of {a} and {b} is {a + b}. " * 3 for a in range(12) for b in range(12)]
        lines = lines if name == NAMES[0] else [line[::-1] + str(number**3) for number, line in enumerate(lines)]
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / name / "texts.jsonl").write_text(rows)
    return folder


def config_of(folder: Path, run: str, *overrides: str) -> Config:
    mixture = ", ".join(f"{{text_files: {folder}/texts/{name}, weight: 1.0}}" for name in NAMES)
    return tiny_config(
        folder,
        *(f"general.run={run}", f"checkpoints.checkpoints_path={folder}/checkpoints/{run}"),
        *(f"data_stages.0.data.dataset={{mixture: [{mixture}]}}", f"doremi={{domain_names: [{', '.join(NAMES)}]}}"),
        "tokenizer={train: {vocab_size: 300}}",
        *("model.model_config.vocab_size=300", "model.model_config.eos_token_id=0"),
        *("tokens.train_steps=4", "tokens.micro_batch_size=2", "tokens.batch_accumulation_per_replica=4"),
        *overrides,
    )


def reference(folder: Path) -> str:
    """The override that makes a run the proxy of a reference, which this trains."""
    texts(folder / "texts")
    train_quietly(config_of(folder, "reference", "tokens.train_steps=8", "general.seed=1"))
    return f"doremi.ref_model_resume_checkpoint_path={folder}/checkpoints/reference"


def weights_of(config: Config) -> list[list[float]]:
    return [[step[f"doremi_weight/{name}"] for name in NAMES] for step in metrics(config)]


def test_weights_are_those_of_the_algorithm() -> None:
    """Computed by hand: A has excess losses of 0.4, -0.2 and 0.8, B of 0.1 twice; in step 2 A of 0.2, and no B."""
    weights = DomainWeights(2, step_size=1.0, smoothing=1e-3)
    weights.update(np.array([0.4 + 0.0 + 0.8, 0.1 + 0.1]), np.array([3.0, 2.0]))
    assert weights.alpha == pytest.approx([0.574368, 0.425632], abs=5e-7)
    weights.update(np.array([0.2, 0.0]), np.array([1.0, 0.0]))
    assert weights.excess == pytest.approx([0.2, 0.1])
    assert weights.alpha == pytest.approx([0.598516, 0.401484], abs=5e-7)
    assert weights.average == pytest.approx([0.586442, 0.413558], abs=5e-7)


def test_large_excess_losses_do_not_overflow() -> None:
    weights = DomainWeights(3, step_size=1e4)
    weights.update(np.array([1.0, 2.0, 3.0]), np.ones(3))
    assert np.isfinite(weights.alpha).all()
    assert weights.alpha.sum() == pytest.approx(1)
    assert weights.alpha.argmax() == 2


class Batches(kn.Hook):
    """Keeps the batches of a run's steps, as they are read."""

    priority = 90
    seen: list[Any] = []  # noqa: RUF012

    def before_step(self, run: Any) -> None:
        self.seen.append(run.batches)


def token_losses(config: Config, path: Path, batches: list[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """(domain, losses of its tokens) of every sequence, by a model of the weights in `path`."""
    model = build(config.model)
    read = initial_tensors(path, config.model.decoder)
    for name, parameter in named_parameters(model):
        parameter.data = read.block(name, (0,) * parameter.dim(), tuple(parameter.shape)).clone()
    for batch in batches:
        for row, source in enumerate(batch.sources):
            one, labels = batch[row : row + 1], torch.from_numpy(batch.labels[row])
            positions = torch.arange(len(labels))
            logits = model(torch.from_numpy(one.tokens[0]), Context((1, len(labels)), positions, attention), None)
            yield int(source), F.cross_entropy(logits, labels, reduction="none").detach()


def test_a_step_weighs_the_mean_loss_of_each_domain(tmp_path: Path) -> None:
    """Excess, weights and loss of the first step against losses of whole models, token by token."""
    keys = ("tokens.train_steps=1", "checkpoints.save_initial_state=true", f"general.hooks=[{__name__}.Batches]")
    keys += ("doremi.step_size=3.0", "doremi.smoothing_param=0.1", "data_stages.0.data.dataset.mixture.0.weight=3.0")
    proxy = config_of(tmp_path, "proxy", reference(tmp_path), *keys)
    Batches.seen.clear()
    train_quietly(proxy)
    (batches,) = Batches.seen
    ours = list(token_losses(proxy, tmp_path / "checkpoints" / "proxy" / "0", batches))
    theirs = list(token_losses(proxy, tmp_path / "checkpoints" / "reference", batches))
    assert {domain for domain, _ in ours} == {0, 1}
    excess, means = np.zeros(2), np.zeros(2)
    for domain in range(2):
        of_proxy, of_reference = (torch.cat([x for d, x in each if d == domain]).double() for each in (ours, theirs))
        excess[domain], means[domain] = (of_proxy - of_reference).clamp(min=0).mean(), of_proxy.mean()
    expected = np.exp(3.0 * excess) / np.exp(3.0 * excess).sum() * (1 - 0.1) + 0.1 / 2
    (step,) = metrics(proxy)
    assert [step[f"doremi_excess/{name}"] for name in NAMES] == pytest.approx(excess, rel=1e-5)
    assert [step[f"doremi_weight/{name}"] for name in NAMES] == pytest.approx(expected, rel=1e-5)
    assert step["lm_loss"] == pytest.approx(float((expected * means).sum()), rel=1e-5)
    assert abs(float(expected[0]) - 0.5) > 1e-3


def proxy_on(rank: int, layout: str, folder: Path, overrides: tuple[str, ...]) -> list[list[float]]:
    """[loss, gradient norm, weights of the domains] of each step."""
    keys = (each.split("=") for each in layout.split())
    changes = [f"{SHORT.get(name, name)}={value}" for name, value in keys]
    config = config_of(folder, layout.replace("=", "").replace(" ", "-") or "one", *overrides, *changes)
    train_here(config)
    if rank:
        return []
    return [[step["lm_loss"], step["grad_norm"], *each] for step, each in zip(metrics(config), weights_of(config))]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "layout",
    [
        *("dp=2 accum=2", "tp=2", "pp=2", "cp=2", "dp=2 accum=2 zero=3", "tp=2 mode=REDUCE_SCATTER"),
        "pp=2 tp=2 engine=1f1b",
    ],
)
def test_every_layout_learns_the_same_weights(layout: str, tmp_path: Path) -> None:
    overrides = (reference(tmp_path), "doremi.step_size=5.0")
    expected = proxy_on(0, "", tmp_path, overrides)
    found, *_ = run_ranks(4 if "pp=2 tp=2" in layout else 2, proxy_on, layout, tmp_path, overrides)
    assert len(found) == 4
    assert np.array(found) == pytest.approx(np.array(expected), rel=1e-6)


def test_a_proxy_that_goes_on_is_one_that_was_not_stopped(tmp_path: Path) -> None:
    overrides = (reference(tmp_path), "tokens.train_steps=6")
    whole = config_of(tmp_path, "whole", *overrides)
    train_quietly(whole)
    for steps in (2, 6):
        parts = config_of(tmp_path, "parts", *overrides, f"tokens.train_steps={steps}")
        train_quietly(parts)
    assert losses(parts) == losses(whole)
    assert weights_of(parts) == weights_of(whole)
    written = [json.loads((tmp_path / "logs" / run / "doremi.json").read_text()) for run in ("whole", "parts")]
    assert written[0] == written[1]
    assert written[0]["domain_weights"] == pytest.approx(np.mean(weights_of(whole), 0))


def test_the_next_run_reads_its_data_in_the_learned_shares(tmp_path: Path) -> None:
    _, said = train_and_listen(config_of(tmp_path, "proxy", reference(tmp_path), "tokens.train_steps=2"))
    file = tmp_path / "logs" / "proxy" / "doremi.json"
    assert f"Train with them: doremi.domain_weights={file}" in said
    learned = json.loads(file.read_text())["domain_weights"]
    large = config_of(tmp_path, "large", f"doremi.domain_weights={file}")
    assert [dataset.weight for dataset in large.data_stages[0].data.datasets] == learned
    folder = config_of(tmp_path, "folder", f"data_stages.0.data.dataset={{text_files: {tmp_path}/texts}}")
    assert [each.weight for each in folder.data_stages[0].data.datasets] == ["tokens", "tokens"]
    assert [each.text_files for each in folder.data_stages[0].data.datasets] == [f"{tmp_path}/texts/{n}" for n in NAMES]
    assert load(folder) == folder
    text = config_of(tmp_path, "text", "doremi={domain_names: 'counting, reversed', domain_weights: '0.25, 0.75'}")
    assert [dataset.weight for dataset in text.data_stages[0].data.datasets] == [0.25, 0.75]
    train_quietly(large)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("doremi.domain_names=[a]", "doremi.domain_names: expected two different names or more, found a"),
        ("doremi.domain_names=[a, a]", "doremi.domain_names: expected two different names or more, found a, a"),
        ("doremi.domain_names='a, b, c'", "data_stages.0.data.dataset: expected a mixture of 3, one dataset a domain"),
        ("doremi={domain_names: [], domain_weights: []}", "expected 0 numbers above 0 whose sum is 1, found []"),
        ("doremi.domain_weights=[0.5, 0.2]", "expected 2 numbers above 0 whose sum is 1, found [0.5, 0.2]"),
        ("doremi.domain_weights=[0.5, 0.2, 0.3]", "expected 2 numbers above 0 whose sum is 1"),
        ("doremi.domain_weights=nothing.json", "doremi.domain_weights: no such file or folder: nothing.json"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(override: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        config_of(tmp_path, "wrong", override)


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    for content, said in (
        ("[1, 2]", "expected the doremi.json that a proxy run writes"),
        ('{"domain_names": 5, "domain_weights": [1.0]}', "expected the doremi.json that a proxy run writes"),
        ('{"domain_names": ["a"], "domain_weights": [null]}', "expected the doremi.json that a proxy run writes"),
        ('{"domain_names": ["a", "b"], "domain_weights": [0.5, 0.5]}', "is of the domains a, b; found"),
    ):
        (tmp_path / "doremi.json").write_text(content)
        with pytest.raises(InputError, match=said):
            config_of(tmp_path, "wrong", f"doremi.domain_weights={tmp_path}/doremi.json")


def test_a_reference_that_does_not_fit_is_refused_before_the_first_step(tmp_path: Path) -> None:
    proxy = reference(tmp_path)
    for override, said in (
        (f"{proxy}-nothing", "doremi.ref_model_resume_checkpoint_path: no checkpoint at"),
        ("model.model_config.hidden_size=32", "hidden_size: the weights in"),
        ("tokenizer.train.vocab_size=290", "was trained with another tokenizer than the run's"),
    ):
        with pytest.raises(InputError, match=said):
            train_quietly(config_of(tmp_path, "wrong", proxy, override))
        assert not list((tmp_path / "checkpoints").glob("wrong/[0-9]*"))
