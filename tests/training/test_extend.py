"""docs/extend.md: each example, as it stands on the page, trains and does what its formula says.

Its data-parallel strategy is in tests/layouts/test_extend_strategy.py.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import kenotron as kn
from kenotron.config import Config
from kenotron.data import open_run
from kenotron.parallel.mesh import Mesh
from kenotron.training.step import to_device, train_step
from support.layout_runs import prepared
from support.pages import blocks, files, read_page, sections
from support.tiny_run import losses, metrics, tiny_dict, train_quietly, weights

PAGE = read_page("extend.md")


@pytest.fixture(autouse=True)
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the user stands, with the page's files."""
    for name, text in files(PAGE).items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in files(PAGE):
        sys.modules.pop(name.removesuffix(".py"), None)


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `under`, section by section."""
    both = [key for key in over if isinstance(over[key], dict) and isinstance(under.get(key), dict)]
    return {**under, **over, **{key: merged(under[key], over[key]) for key in both}}


def example(heading: str, folder: Path, *overrides: str) -> Config:
    """A tiny run with the keys that the page gives under `heading`."""
    (text,) = blocks(sections(PAGE)[heading], "yaml")
    plain = tiny_dict(folder)
    if heading == "Optimizer":
        plain["optimizer"]["optimizer_factory"] = {}  # of AdamW's keys, none is Lion's
    return kn.load(merged(plain, yaml.safe_load(text)), overrides)


def test_the_hook_averages_the_loss_also_after_a_restart(user: Path) -> None:
    train_quietly(example("Hook", user, "tokens.train_steps=2"))
    config = train_quietly(example("Hook", user, "tokens.train_steps=5")).config
    average = losses(config)[0]
    for step in metrics(config):
        average = 0.9 * average + 0.1 * step["lm_loss"]
        assert step["smoothed_loss"] == pytest.approx(average, rel=1e-12)
    assert len(losses(config)) == 5


def test_the_hook_stops_the_run(user: Path) -> None:
    hooks = "general.hooks=[{path: my_hook.SmoothedLoss, kwargs: {target: 100}}]"
    run = train_quietly(example("Hook", user, hooks))
    assert (run.step, run.stop_reason) == (1, "the smoothed loss is below 100")


class Witness(kn.Hook):
    """Keeps the weights that training starts from, and every gradient."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_train_start(self, run: Any) -> None:
        self.before = weights(run)

    def before_update(self, run: Any) -> None:
        self.gradients.append({name: weight.grad.clone() for name, weight in run.model.named_parameters()})


def test_the_optimizer_takes_lions_steps_also_after_a_restart(user: Path) -> None:
    witness = f"general.hooks=[{__name__}.Witness]"
    runs = [train_quietly(example("Optimizer", user, f"tokens.train_steps={steps}", witness)) for steps in (2, 4)]
    first, second = (next(hook for hook in run.hooks if isinstance(hook, Witness)) for run in runs)
    after = weights(runs[1])
    for name, start in first.before.items():
        weight, momentum = start.double(), torch.zeros_like(start, dtype=torch.float64)
        for rate, gradients in zip((0.005, 0.01, 0.01, 0.01), first.gradients + second.gradients, strict=True):
            gradient = gradients[name].double()
            weight = (1 - rate * 0.1) * weight - rate * torch.sign(0.9 * momentum + 0.1 * gradient)
            momentum = 0.95 * momentum + 0.05 * gradient
        assert torch.allclose(after[name].double(), weight, rtol=0, atol=1e-6), name


def test_the_schedule_is_its_formula(user: Path) -> None:
    config = train_quietly(example("Schedule", user, "tokens.train_steps=7")).config
    expected = [0.005, 0.01, 0.01 * 0.8**2, 0.01 * 0.6**2, 0.01 * 0.4**2, 0.01 * 0.2**2, 0.0001]
    assert [step["lr"] for step in metrics(config)] == pytest.approx(expected, rel=1e-9)


def test_the_loss_is_the_focal_loss(user: Path) -> None:
    with prepared(example("Loss", user), Mesh()) as run:
        batches = run.data.batch(1)
        (batch,) = batches
        micro_batch = to_device(batch, run)
        with torch.no_grad():
            logits = run.model(micro_batch.tokens, micro_batch.ctx).double().numpy()
        result = train_step(run, batches)
    labels = batch.labels.reshape(-1)
    real = labels != -100
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    share = shares[np.arange(len(labels)), np.where(real, labels, 0)][real]
    assert result.lm_loss == pytest.approx(np.mean((1 - share) ** 2 * -np.log(share)), rel=1e-5)
    assert result.grad_norm > 0


def test_the_dataset_is_trained_on(user: Path) -> None:
    text = b"".join(b"%d bottles, " % number for number in range(400))
    (user / "my.txt").write_bytes(text)
    config = example("Dataset", user, "model.model_config.vocab_size=256", "tokens.train_steps=30")
    windows = {text[start : start + 17]: start for start in range(0, len(text) - 16, 16)}
    seen = set()
    with open_run(config, report=lambda line: None) as data:
        for step in range(1, 31):
            for batch in data.batch(step):
                for row, labels in zip(batch.tokens, batch.labels, strict=True):
                    seen.add(windows[bytes(row.tolist()) + bytes(labels[-1:].tolist())])
    assert len(seen) == 120  # 30 steps of 4 samples, none twice
    train_quietly(config)
    assert losses(config)[-1] < 0.7 * losses(config)[0]


def test_the_registered_names_are_those_of_the_groups_that_are_read() -> None:
    import tomllib

    from kenotron.config.families import GROUP
    from kenotron.data.sources import DATASETS

    (text,) = blocks(PAGE, "toml")
    assert set(tomllib.loads(text)["project"]["entry-points"]) == {DATASETS, GROUP}
