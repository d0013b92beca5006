"""What each `checkpoints.load_mode` takes from another run's checkpoint, in numbers, and that it survives a kill.

The parent counts up for 5 steps (sample i is i, i + 1, … modulo 64), then counts down; its checkpoint is after step 4.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from kenotron.checkpoint.folders import list_checkpoints
from kenotron.checkpoint.restart import start_elsewhere
from kenotron.config import Config, InputError, dump, load
from kenotron.config.checkpoints import LOAD_MODES
from kenotron.data import open_run
from kenotron.launch.data_which import start_of
from support.nursery import Nursery
from support.pages import blocks, files, read_page, sections
from support.tiny_run import (
    Shell,
    equal_bits,
    losses,
    metrics,
    numbers,
    saved_weights,
    text_overrides,
    tiny_config,
    train_and_listen,
    train_quietly,
    weights,
)
from support.user_parts import Gradients
from training.test_local_checkpoints import on_rank

AT, STEPS, BATCH, WARMUP, PEAK, FLOOR = 4, 8, 4, 2, 0.01, 0.001
SCHEDULE = {"learning_rate": PEAK, "lr_warmup_steps": WARMUP, "lr_decay_style": "linear", "min_decay_lr": FLOOR}
STAGES = [
    {"name": name, "start_training_step": start, "data": {"dataset": {"source": f"support.user_parts.{source}"}}}
    for name, start, source in (("up", 1, "counting"), ("down", 6, "counting_down"))
]
RUN = (
    f"optimizer.learning_rate_scheduler={json.dumps(SCHEDULE)}",
    f"data_stages={json.dumps(STAGES)}",
    f"tokens.train_steps={STEPS}",
    "checkpoints.checkpoint_interval=2",
)

# mode: its weights and moments are the checkpoint's; step of data and of schedule that its first step, the last number
# but one, has; its last step
MODES: dict[str, tuple[bool, bool, int, int, int, int]] = {
    "continue": (True, True, 5, 5, 5, 8),
    "model_only": (True, False, 1, 1, 1, 8),
    "optimizer_only": (False, True, 1, 1, 1, 8),
    "model_data": (True, False, 5, 1, 1, 8),
    "model_opt_data": (True, True, 5, 1, 1, 8),
    "transfer": (True, True, 1, 1, 1, 8),
    "transfer_with_lr": (True, True, 1, 5, 5, 8),
    "cooldown": (True, True, 5, 1, 5, 12),
    "[model, scheduler]": (True, False, 1, 5, 1, 4),
    "[model, data, scheduler, step]": (True, False, 5, 5, 5, 8),
}


def rate(t: int) -> float:
    """The schedule's formula: two steps of warm-up, then linear over the other six."""
    return PEAK * t / WARMUP if t <= WARMUP else FLOOR + (PEAK - FLOOR) * (1 - (t - WARMUP) / (STEPS - WARMUP))


@dataclass
class Seen:
    """What a run has in hand at its steps: weights and moments of the first, first tokens of every batch, rates."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    samples: list[list[int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    last_step: int = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    from kenotron.models import named_parameters
    from kenotron.optim.state import state_tensors
    from kenotron.training import run as loop

    seen, step = Seen(), loop.train_step

    def watched(run: Any, batches: Any) -> Any:
        if not seen.samples:
            seen.last_step = run.last_step  # a terminal shows it before the first step
            seen.weights = weights(run)
            moments = state_tensors(named_parameters(*run.parts), run.optimizer)
            seen.moments = {name: tensor.clone() for name, tensor in moments.items()}
        seen.samples.append([row for batch in batches for row in batch.tokens[:, :2].tolist()])
        result = step(run, batches)
        seen.rates.append(run.optimizer.param_groups[0]["lr"])
        return result

    monkeypatch.setattr(loop, "train_step", watched)
    return seen


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return train_quietly(tiny_config(tmp_path_factory.mktemp("parent"), *RUN)).config


def checkpoint_of(config: Config, step: int = AT) -> Path:
    return Path(config.checkpoints.checkpoints_path) / str(step)


def restarted(parent: Config, folder: Path, mode: str, *overrides: str) -> Config:
    source = f"checkpoints.resume_checkpoint_path={checkpoint_of(parent)}"
    return tiny_config(folder, *RUN, source, f"checkpoints.load_mode={mode}", *overrides)


def samples_of(config: Config, step: int) -> list[list[int]]:
    """The first two tokens of every sample of a step of the config's data, from the data alone."""
    with open_run(config, step, report=lambda line: None) as data:
        return [row for batch in data.batch(step) for row in batch.tokens[:, :2].tolist()]


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_takes_what_it_says_and_nothing_else(
    mode: str, parent: Config, seen: Seen, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, data, schedule, first, last = MODES[mode]
    config = restarted(parent, tmp_path, mode)
    # For `data which`, which answers the same before the run has saved anything
    caplog.clear()
    before = start_of(config, None).in_run_steps(config)
    assert not caplog.messages  # what a run would warn of
    with open_run(before, last, report=lambda line: None) as opened, pytest.raises(InputError) as missing:
        opened.stage_at(last + 1)
    begins = max(1, before.data_stages[0].start_training_step)
    assert f"step {last + 1} is not in the run: its steps are {begins} to {last}" in str(missing.value)
    train_quietly(config)

    path, initial = checkpoint_of(parent), train_start(parent)
    assert equal_bits(seen.weights, saved_weights(path) if model else initial)
    moments = saved_weights(path, "optimizer")
    assert equal_bits(seen.moments, moments) if optimizer else seen.moments == {}
    lines = metrics(config)
    assert [line["iteration"] for line in lines] == list(range(first, last + 1))
    times = range(schedule, schedule + last - first + 1)
    assert [line["lr"] for line in lines] == pytest.approx([rate(t) for t in times])
    assert seen.rates == pytest.approx([rate(t) for t in times])
    for number in (0, 1):  # data steps 5 and 6 are of two stages
        assert seen.samples[number] == samples_of(parent, data + number)
        tokens = (data + number) * BATCH * parent.tokens.sequence_length
        assert lines[number]["consumed_tokens"] == tokens
    assert seen.last_step == last
    # For `data which` and `replay`
    read = start_of(config, list_checkpoints(config.checkpoint_folder)[-1]).in_run_steps(config)
    assert [samples_of(read, step) for step in range(first, last + 1)] == seen.samples
    assert before.data_stages == read.data_stages
    assert before.tokens.train_steps == read.tokens.train_steps


def test_a_rate_that_rises_at_a_resume_is_said(parent: Config, tmp_path: Path) -> None:
    """More steps after the decay: step 9 is the second of 14, not the ninth of 8. Annealing them on falls further."""
    config = train_quietly(tiny_config(tmp_path, *RUN)).config
    _, said = train_and_listen(load(config, ["tokens.train_steps=16"]))
    ninth = FLOOR + (PEAK - FLOOR) * (1 - (9 - WARMUP) / (16 - WARMUP))
    assert f"learning rate of step 9: {ninth:.3g} (step 8 had {FLOOR:.3g}); the decay now ends at step 16" in said
    assert "kenotron branch FILE --at 8 --cooldown 8" in said
    _, said = train_and_listen(load(config, ["tokens.train_steps=17"]))  # one more step at the end of the decay
    assert "learning rate of" not in said
    for mode, rises in (("cooldown", True), ("continue", False), ("transfer", False)):  # cooldown at the peak
        warmup = f"optimizer.learning_rate_scheduler.lr_warmup_steps={0 if mode == 'cooldown' else WARMUP}"
        _, said = train_and_listen(restarted(parent, tmp_path / mode, mode, warmup))
        assert ("learning rate of step" in said) == rises, mode
    peak = "optimizer.learning_rate_scheduler.lr_decay_style=cosine"
    with pytest.raises(InputError, match="kenotron branch"):
        train_quietly(load(config, [peak]))


def train_start(config: Config) -> dict[str, Tensor]:
    from kenotron.models import build, initialize_model, named_parameters

    model = build(config.model)
    initialize_model(model, std=0.05, scaling="NUM_LAYERS", seed=config.general.seed)
    return {name: parameter.detach() for name, parameter in named_parameters(model)}


@pytest.mark.parametrize(
    "mode",
    [
        *("model_data", "transfer_with_lr", "cooldown", "[model, scheduler]"),
        *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("model_only", "optimizer_only", "model_opt_data")),
        pytest.param("transfer", marks=pytest.mark.slow),
    ],
)
def test_a_restart_that_is_killed_goes_on_exactly(mode: str, parent: Config, tmp_path: Path) -> None:
    whole = restarted(parent, tmp_path / "whole", mode)
    final = weights(train_quietly(whole))
    killed = (parent, tmp_path / "killed", mode)
    fourth = MODES[mode][4] + 3  # its checkpoint is not saved
    with pytest.raises(RuntimeError, match="this hook is broken"):
        train_quietly(restarted(*killed, on_rank("raise", fourth)))
    config = restarted(*killed)
    again = train_quietly(config)
    assert again.start.step == fourth - 2
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert equal_bits(weights(again), final)
    _, said = train_and_listen(config)
    assert f"This run is finished: {checkpoint_of(config, MODES[mode][-1])} has all" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [("parallelism.dp=2",), ("parallelism.pp=2", "tokens.batch_accumulation_per_replica=2")]
)
def test_a_restart_is_the_same_on_another_layout(layout: Any, parent: Config, nursery: Nursery, tmp_path: Path) -> None:
    one = restarted(parent, tmp_path / "one", "cooldown")
    other = restarted(parent, tmp_path / "other", "cooldown", "tokens.micro_batch_size=2", *layout)
    train_quietly(one)
    file = tmp_path / "other.yaml"
    file.write_text(dump(other))
    assert nursery.run("train", file, folder=tmp_path).code == 0
    assert losses(other) == pytest.approx(losses(one), rel=1e-5)
    assert [line["lr"] for line in metrics(other)] == [line["lr"] for line in metrics(one)]


def test_a_restart_of_a_restart_takes_up_its_positions(parent: Config, seen: Seen, tmp_path: Path) -> None:
    """model_data, then from its step 2, which reads the parent's step 6, cooldown."""
    first = restarted(parent, tmp_path / "first", "model_data")
    train_quietly(first)
    seen.samples.clear()
    source = f"checkpoints.resume_checkpoint_path={checkpoint_of(first, 2)}"
    config = tiny_config(tmp_path / "second", *RUN, source, "checkpoints.load_mode=cooldown", "tokens.train_steps=3")
    train_quietly(config)
    assert [line["iteration"] for line in metrics(config)] == [3, 4, 5]
    assert seen.samples[0] == samples_of(parent, 7)


@pytest.mark.parametrize("mode", ["model_data", "transfer"])
def test_streams_follow_the_data(mode: str, seen: Seen, tmp_path: Path) -> None:
    """The position of a stream is state."""
    (tmp_path / "parent").mkdir()
    text = [*text_overrides(tmp_path / "parent"), "data_stages.0.data.dataset.streaming={shuffle_buffer: 8}"]
    parent = train_quietly(tiny_config(tmp_path / "parent", *RUN[2:], *text)).config
    read, seen.samples = seen.samples, []
    source = f"checkpoints.resume_checkpoint_path={checkpoint_of(parent)}"
    config = tiny_config(tmp_path / "new", *RUN[2:], *text, source, f"checkpoints.load_mode={mode}")
    train_quietly(config)
    assert seen.samples[:3] == (read[4:7] if mode == "model_data" else read[:3])


def test_a_trained_tokenizer_follows_the_weights_to_other_texts(tmp_path: Path) -> None:
    """One trained on what the new run reads would give their tokens another meaning."""

    def tokenizer_after(name: str, *overrides: str) -> Path:
        config = tiny_config(tmp_path / name, "tokens.train_steps=1", *text_overrides(tmp_path), *overrides)
        train_quietly(config)
        return checkpoint_of(config, 1) / "tokenizer" / "tokenizer.json"

    trained = tokenizer_after("parent")
    (tmp_path / "others.jsonl").write_text('{"text": "tomorrow and tomorrow and tomorrow"}\n' * 200)
    others = f"data_stages.0.data.dataset={{text_files: {tmp_path}/others.jsonl}}"
    weights = (f"checkpoints.resume_checkpoint_path={trained.parents[1]}", "checkpoints.load_mode=transfer")
    assert tokenizer_after("new", others, *weights).read_bytes() == trained.read_bytes()
    assert tokenizer_after("alone", others).read_bytes() != trained.read_bytes()


# ---- whose hyper-parameters --------------------------------------------------------------------------------


def test_the_configs_hyper_parameters_hold_and_are_said(parent: Config, tmp_path: Path) -> None:
    factory = "optimizer.optimizer_factory={name: adamW, adam_beta1: 0.8, adam_beta2: 0.9, adam_eps: 1.0e-6}"
    new = ("optimizer.weight_decay=0.05", factory, "optimizer.learning_rate_scheduler.learning_rate=0.02")
    config = restarted(parent, tmp_path, "transfer_with_lr", *new)
    run, said = train_and_listen(config)
    (line,) = [line for line in said.splitlines() if "Resumed with" in line]
    changes = "weight_decay 0.05 0.1, adam_beta1 0.8 0.9, adam_beta2 0.9 0.95, adam_eps 1e-06 1e-08"
    for name, now, before in map(str.split, f"{changes}, learning_rate 0.02 0.01".split(", ")):
        assert f"{name} {now} (the checkpoint had {before})" in line
    (group,) = run.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.05, (0.8, 0.9), 1e-6)
    assert metrics(config)[0]["lr"] == pytest.approx(FLOOR + (0.02 - FLOOR) * (1 - (5 - WARMUP) / (STEPS - WARMUP)))
    # The first update, from the checkpoint's moments, in float64: AdamW's formula with the config's numbers.
    hooks = "general.hooks=[support.user_parts.Gradients, {path: support.user_parts.StopAt, kwargs: {step: 5}}]"
    one = train_quietly(restarted(parent, tmp_path / "one", "transfer_with_lr", *new, hooks))
    gradients, after = next(hook for hook in one.hooks if isinstance(hook, Gradients)), weights(one)
    old, state = saved_weights(checkpoint_of(parent)), saved_weights(checkpoint_of(parent), "optimizer")
    b1, b2, eps, decay, lr = 0.8, 0.9, 1e-6, 0.05, metrics(config)[0]["lr"]
    for name, weight in old.items():
        w, g = weight.double(), gradients.first[name].double()
        m = b1 * state[f"state.{name}.exp_avg"].double() + (1 - b1) * g
        v = b2 * state[f"state.{name}.exp_avg_sq"].double() + (1 - b2) * g * g
        expected = w * (1 - lr * decay) - lr * (m / (1 - b1**5)) / ((v / (1 - b2**5)).sqrt() + eps)
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-5, atol=1e-7)


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["load_mode=cooldown"], "resume_checkpoint_path: missing: checkpoints.load_mode needs it"),
        (["load_mode=cooldwn"], r"load_mode: expected 'continue', .*found 'cooldwn'; did you mean 'cooldown'\?"),
        (["load_mode=[model, weights]"], r"load_mode.1: expected 'model', .* or 'step', found 'weights'"),
        (["load_mode=[]"], "load_mode: expected a list of at least 1"),
        (
            ["resume_checkpoint_path=a", "load_mode=cooldown", "load_lr_scheduler=false"],
            "load_mode: cooldown has data, but load_lr_scheduler: false; remove one of them",
        ),
    ],
)
def test_choices_that_contradict_each_other_are_one_error(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as caught:
        tiny_config(tmp_path, *(f"checkpoints.{text}" for text in overrides))
    assert "\n" not in str(caught.value)


def test_nanotrons_keys_are_modes(tmp_path: Path) -> None:
    def loads(*keys: str) -> frozenset[str]:
        path = "checkpoints.resume_checkpoint_path=a"
        return tiny_config(tmp_path, path, *(f"checkpoints.{key}" for key in keys)).checkpoints.loads

    assert loads("load_lr_scheduler=false") == loads("load_mode=transfer")
    assert loads("load_lr_scheduler=false", "load_optimizer=false") == loads("load_mode=model_only")
    assert loads("load_optimizer=false") == loads("load_mode=[model, data, scheduler, step]")
    assert loads() == loads("load_mode=continue")


def test_another_optimizer_or_batch_is_refused_before_the_model_is_built(parent: Config, tmp_path: Path) -> None:
    lion = "optimizer.param_groups=[{pattern: mlp, optimizer_factory: {name: lion}}]"
    batch, sgd = "tokens.micro_batch_size=8", "optimizer.optimizer_factory={name: sgd}"
    for mode, override, message in (
        ("transfer", sgd, r"optimizer_factory.name is adamW in .* and sgd in this config.*model_only"),
        ("transfer", lion, r"param_groups.0.optimizer_factory.name is .absent. in .* and lion in"),
        ("transfer", "optimizer.ema_decay=0.9", r"ema_decay is None in .* and 0\.9 in this config.*model_only"),
        ("model_data", batch, r"16 samples in 4 steps, but this config's global batch of 8 makes that 32"),
    ):
        with pytest.raises(InputError, match=message):
            start_elsewhere(restarted(parent, tmp_path, mode, override), checkpoint_of(parent))
    train_quietly(restarted(parent, tmp_path, "transfer", batch))


# ---- docs/checkpoints.md -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_examples_of_the_page_run(parent: Config, tmp_path: Path, monkeypatch: Any, shell: Shell) -> None:
    """Its commands as they stand, with steps of hundreds in the place of units."""
    monkeypatch.chdir(tmp_path)
    section = sections(read_page("checkpoints.md"))["Starting from another run's checkpoint"]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "my_run").symlink_to(checkpoint_of(parent).parent)
    content = yaml.safe_load(dump(restarted(parent, tmp_path, "continue")))
    content["checkpoints"] |= yaml.safe_load(files(section)["next.yaml"].replace("/2000", "/4"))["checkpoints"]
    content["optimizer"]["learning_rate_scheduler"]["min_decay_lr"] = 1e-5
    (tmp_path / "next.yaml").write_text(yaml.safe_dump(content))
    commands = [shlex.split(line, comments=True) for line in blocks(section, "bash")[0].splitlines()]
    taken = []
    for command in filter(None, commands):
        keys = dict(argument.split("=", 1) for argument in command[3:])
        mode = keys.get("checkpoints.load_mode", "continue")
        taken.append(mode)
        steps = {"3000": 10, "500": 3}.get(keys.pop("tokens.train_steps", ""), STEPS)
        arguments = [*command[1:3], *(f"{key}={value}" for key, value in keys.items()), f"tokens.train_steps={steps}"]
        code, said, errors = shell(*arguments, "--fresh")
        assert code == 0, errors
        first, last = MODES[mode][4:]
        assert f"Training from step {first} to {last + steps - STEPS}:" in said
    assert taken == list(LOAD_MODES)
    table = dict(re.findall(r"^\| `(\w+)` \|(.*)\|.*\|$", section, re.MULTILINE))
    for mode, parts in LOAD_MODES.items():
        cells = zip(LOAD_MODES["continue"], table[mode].split("|"))
        assert parts == tuple(part for part, cell in cells if cell.strip())
