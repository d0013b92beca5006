"""What one sees of a run: console lines, plain and in nanotron's form, metrics.jsonl, TensorBoard, samples, traces."""

import errno
import io
import json
import math
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kenotron as kn
from kenotron.config import InputError
from kenotron.config.errors import RunFailed, human_format
from kenotron.runs.logged import tag_of
from kenotron.training.metrics import drop_later_steps
from kenotron.training.step import to_device
from support.data_runs import validation_texts
from support.pages import files, read_page
from support.tiny_run import losses, metrics, text_overrides, tiny_config, train_and_listen, train_quietly

PREFIX = re.compile(r"^\d\d/\d\d/\d{4} \d\d:\d\d:\d\d \[(DEBUG|INFO|WARNING|ERROR)\|DP=0\|PP=0\|TP=0\]: ")
# Line 1 and line 5 of the seeds' log.
SEEDS_FIRST = (
    "iteration: 1 / 15 | consumed_tokens: 512 | elapsed_time_per_iteration_ms: 4.71K | tokens_per_sec: 109 | "
    "tokens_per_sec_per_gpu: 109 | global_batch_size: 2 | lm_loss: 5.32 | lr: 0.00015 | "
    "model_tflops_per_gpu: 1.87e-05 | hardware_tflops_per_gpu: 1.87e-05 | grad_norm: 2.96 | "
    "cuda_memory_allocated: 67.4M | cuda_max_memory_reserved: 520M | hd_total_memory_tb: 2.13T | "
    "hd_used_memory_tb: 952G | hd_free_memory_tb: 1.18T"
)
SEEDS_FIFTH = (
    "iteration: 5 / 15 | consumed_tokens: 2.56K | elapsed_time_per_iteration_ms: 9.15 | tokens_per_sec: 55.9K | "
    "tokens_per_sec_per_gpu: 55.9K | global_batch_size: 2 | lm_loss: 5.27 | lr: 0.000264 | "
    "model_tflops_per_gpu: 0.00962 | hardware_tflops_per_gpu: 0.00962 | grad_norm: 3.2"
)


def names(line: str) -> list[str]:
    return [field.split(": ")[0].replace("cuda_", "cpu_") for field in line.split(" | ")]


def iteration_lines(said: str) -> list[str]:
    lines = [PREFIX.sub("", line) for line in said.splitlines()]
    return [line for line in lines if line.startswith("iteration: ")]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, str]:
    """A run of 8 steps with a save after step 6, and what it said."""
    steps = ("tokens.train_steps=8", "checkpoints.checkpoint_interval=6")
    validation = ("tokens.val_check_interval=4", "tokens.limit_val_batches=2")
    logs = ("logging.tensorboard=true", "logging.format=nanotron")
    config = tiny_config(tmp_path_factory.mktemp("watched"), *steps, *validation, *logs)
    _, said = train_and_listen(config)
    return config, said


def test_a_plain_log_has_no_prefix_no_config_and_lines_of_at_most_120_columns(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, "checkpoints.checkpoint_interval=2", "model.model_config.z_loss_enabled=true")
    _, said = train_and_listen(config)
    said = said.replace("warning: data_stages.0.data.dataset is null: random tokens, from which nothing is learnt", "")
    lines = said.splitlines()
    assert lines[0] == "project: tests"
    assert len(lines) < 20
    a_step = config.global_batch_size * config.tokens.sequence_length
    assert f"{human_format(3 * a_step)} tokens in all, {human_format(a_step)} a step" in lines
    assert "\n".join(lines).count("number of parameters") == 1
    for absent in ("[INFO", "Local number", "Peak reserved", "warning", "Saving checkpoint"):
        assert absent not in said, absent
    steps = [line for line in lines if line.startswith("step ")]
    assert [re.sub(r"[\d.]+(e-\d+)?[KM]?", "#", line) for line in steps] == [
        "step #/# | loss # | z_loss # | lr # | grad_norm # | # tokens/s | # ms | # tokens"
    ] * 3
    assert max(map(len, steps)) <= 120


def test_a_parser_of_the_seeds_lines_reads_ours(watched) -> None:
    """Fields have the order of the seeds' log, memory at first and after a save, and the metrics to three digits."""
    factors = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    steps = metrics(watched[0])
    assert [step["iteration"] for step in steps] == list(range(1, 9))
    for line, raw in zip(iteration_lines(watched[1]), steps, strict=True):
        seeds = SEEDS_FIRST if raw["iteration"] in (1, 2, 3, 4, 7) else SEEDS_FIFTH
        assert names(line) == names(seeds) == [name for name in raw if name in names(line)], line
        for field in line.split(" | "):
            name, shown = field.split(" / ")[0].split(": ")
            number, suffix = re.fullmatch(r"(-?[\d.]+(?:e[-+]\d+)?)([KMGT]?)", shown).groups()
            assert float(number) * factors[suffix] == pytest.approx(raw[name], rel=6e-3), field


def test_metrics_are_numbers_of_their_step(watched) -> None:
    steps = metrics(watched[0])
    assert steps[0]["consumed_tokens"] == 64
    hidden, kv, width, length, layers, inner, vocab = 16, 2, 4, 16, 2, 24, 64
    attention = 2 * hidden * (4 + 2 * kv) * width + 4 * length * hidden + 2 * hidden * hidden
    token = layers * (attention + 6 * hidden * inner) + 2 * hidden * vocab
    # Rates are of this step's own time, and FLOPs those of three forward passes.
    for step in steps:
        assert all(isinstance(value, int | float) for value in step.values())
        seconds = step["elapsed_time_per_iteration_ms"] / 1000
        assert step["tokens_per_sec"] == pytest.approx(64 / seconds)
        assert step["model_tflops_per_gpu"] == pytest.approx(step["hardware_tflops_per_gpu"])
        assert step["model_tflops_per_gpu"] == pytest.approx(3 * token * step["tokens_per_sec"] / 1e12)
        assert step["data_wait_ms"] <= step["elapsed_time_per_iteration_ms"]
        assert 0 < step["matmul_share_causal"] < step["matmul_share"] < 1


def test_recomputation_counts_for_the_hardware_and_not_for_the_model(tmp_path: Path) -> None:
    config = train_quietly(tiny_config(tmp_path, "parallelism.recompute_layer=true")).config
    for step in metrics(config):
        # A token's products in two blocks: q, o 16x16; k, v 16x8; gate, up, down 16x24; attention's square 16 x 16 x 2.
        blocks = 2 * 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16 * 16)
        head = 2 * 16 * 64
        share = (4 * blocks + 3 * head) / (3 * blocks + 3 * head)
        assert step["hardware_tflops_per_gpu"] == pytest.approx(step["model_tflops_per_gpu"] * share)


def test_validation_is_part_of_the_line_of_its_step(watched) -> None:
    steps = metrics(watched[0])
    assert [step["iteration"] for step in steps if "val_loss" in step] == [4, 8]
    assert steps[3]["val_loss"] == pytest.approx(math.log(64), rel=0.05)  # random tokens cannot be predicted
    assert watched[1].count("validation: 4 / 8 | val_loss: ") == 1


@pytest.mark.parametrize(
    ("interval", "unit", "steps"),
    [
        (4, "steps", [4, 8, 9]),
        (150, "tokens", [3, 5, 8, 9]),  # 64 tokens a step
        (2, "epochs", [5, 9]),  # 9 samples, one is held out; 4 a step
        (1, "epochs", [3, 5, 7, 9]),
    ],
)
def test_validations_by_each_unit_and_at_the_end(interval: int, unit: str, steps: list[int], tmp_path: Path) -> None:
    rows = "data_stages.0.data.dataset={source: support.user_parts.counting, kwargs: {rows: 10}}"
    held_out = ("tokens.val_datasets=[{source: support.user_parts.counting}]", "tokens.limit_val_batches=1")
    when = (f"tokens.val_check_interval={interval}", f"tokens.val_check_unit={unit}", "tokens.train_steps=9")
    config = train_quietly(tiny_config(tmp_path, rows, *held_out, *when)).config
    assert [step["iteration"] for step in metrics(config) if "val_loss" in step] == steps


def test_a_run_is_tested_after_its_last_step(tmp_path: Path) -> None:
    """On the same samples a test finds what a validation does; resumed for more steps, it tests again at its end."""
    rows = "[{source: support.user_parts.counting, kwargs: {rows: 10}}, {source: support.user_parts.counting_down}]"
    own = (f"tokens.val_datasets={rows}", "tokens.val_check_interval=2", "tokens.limit_val_batches=3")
    test = (f"tokens.test_datasets={rows}", "tokens.limit_test_batches=3", "optimizer.ema_decay=0.5")
    for steps in (4, 6):
        run = train_quietly(tiny_config(tmp_path, *own, *test, f"tokens.train_steps={steps}"))
        lines = metrics(run.config)
        assert [line["iteration"] for line in lines if "test_loss" in line] == ([4] if steps == 4 else [4, 6])
        found = {name: value for name, value in lines[-1].items() if name.startswith("test_")}
        assert found["test_tokens"] == 3 * 4 * 16
        assert set(found) >= {"test_loss", "test_loss/support.user_parts.counting", "test_loss_ema"}
        for name in set(found) - {"test_seconds"}:
            assert found[name] == lines[-1][name.replace("test", "val")], name


def test_tensorboard_reads_every_scalar_back(watched) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = watched[0]
    events = EventAccumulator(str(Path(config.logging.log_dir) / "tiny"))
    events.Reload()
    steps = metrics(config)
    assert set(events.Tags()["scalars"]) == {tag_of(name) for step in steps for name in step} - {"train/iteration"}
    groups = {"train", "val", "optimizer", "data", "speed", "memory"}
    assert {tag.split("/")[0] for tag in events.Tags()["scalars"]} == groups
    assert min(tag for tag in events.Tags()["scalars"] if tag.startswith("train/")) == "train/lm_loss"
    assert {"train/lm_loss", "val/loss", "speed/tokens_per_sec"} < set(events.Tags()["scalars"])
    for name in ("lm_loss", "lr", "grad_norm", "consumed_tokens", "val_loss", "tokens_per_sec"):
        found = [(event.step, event.value) for event in events.Scalars(tag_of(name))]
        expected = [(step["iteration"], step[name]) for step in steps if name in step]
        assert [step for step, _ in found] == [step for step, _ in expected], name
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6), name
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("config/text_summary"))
    assert "hidden_size: 16" in text
    (project,) = events.Tensors("project/text_summary")
    assert project.tensor_proto.string_val == [b"tests"]


# ---- keys of logging ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("interval", "shown"), [(1, [1, 2, 3, 4, 5, 6]), (3, [1, 4, 6]), (10, [1, 6])])
def test_lines_come_every_so_many_steps_and_at_the_last(interval: int, shown: list[int], tmp_path: Path) -> None:
    config = tiny_config(tmp_path, f"logging.iteration_step_info_interval={interval}", "tokens.train_steps=6")
    _, said = train_and_listen(config)
    assert [int(found) for found in re.findall(r"^step (\d+)/6 \|", said, re.MULTILINE)] == shown
    assert len(metrics(config)) == 6  # what is written does not depend on what is shown


def test_log_level_is_the_least_severe_that_is_shown(tmp_path: Path) -> None:
    seen = {}
    for level in ("debug", "info", "warning", "error"):
        keys = (f"logging.log_level={level}", "logging.format=nanotron")
        _, said = train_and_listen(tiny_config(tmp_path / level, *keys))
        seen[level] = {PREFIX.match(line).group(1) for line in said.splitlines()}
    assert seen["warning"] == {"WARNING"}
    assert seen["error"] == set()
    assert seen["info"] == {"INFO", "WARNING"}
    assert seen["debug"] >= seen["info"]


def test_log_level_passive_leaves_the_logger_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    logger = logging.getLogger("kenotron")
    monkeypatch.setattr(logger, "level", logging.CRITICAL)
    _, said = train_and_listen(tiny_config(tmp_path, "logging.log_level=passive"))
    assert (said, logger.level) == ("", logging.CRITICAL)


def test_sample_prompts_are_continued_at_the_start_and_at_the_end(tmp_path: Path) -> None:
    prompts = 'logging.sample_prompts=["The sum", "of 3"]'
    config = tiny_config(tmp_path, *text_overrides(tmp_path), prompts, "logging.format=nanotron")
    _, said = train_and_listen(config)
    assert all(PREFIX.match(line) for line in said.splitlines())
    for when in ("before training", "after step 3"):
        for prompt in ("The sum", "of 3"):
            assert said.count(f"Sample {when}, continuing {prompt!r}:") == 1
    lines = [PREFIX.sub("", line) for line in said.splitlines()]
    after = lines[lines.index("Sample after step 3, continuing 'The sum':") + 1]
    assert after.startswith("The sum")
    assert len(after) > len("The sum")


def test_sampling_does_not_change_the_run(tmp_path: Path) -> None:
    found = []
    for name, prompts in (("without", []), ("with", ['logging.sample_prompts=["The sum"]'])):
        config = tiny_config(tmp_path / name, *text_overrides(tmp_path), *prompts, "model.dtype=bfloat16")
        found.append(losses(train_quietly(config).config))
    assert found[0] == found[1]


def test_the_profiler_writes_its_trace_for_the_steps_it_names(tmp_path: Path) -> None:
    keys = f"profiler_export_path: {tmp_path}/traces, wait: 1, warmup: 1, active: 2, repeat: 1, skip_first: 1"
    profiler = f"profiler={{{keys}, export_chrome_trace: true, with_stack: false}}"
    config = tiny_config(tmp_path, profiler, "tokens.train_steps=6", "general.run=traced_%date")
    run, said = train_and_listen(config)
    (folder,) = (tmp_path / "traces").iterdir()
    assert folder.name == run.config.general.run  # with the date filled in
    (chrome,) = folder.glob("chrome_trace_step_*.json")
    (board,) = folder.glob("*.pt.trace.json")
    assert said.count(f"Wrote the profiler's trace to {folder}") == 1
    events = json.loads(chrome.read_text())["traceEvents"]
    assert json.loads(board.read_text())["traceEvents"]
    steps = sorted({event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")})
    assert len(steps) == 2, steps
    assert any(event.get("name") == "aten::mm" for event in events)


def test_a_run_over_text_validates_in_bits_per_byte(tmp_path: Path) -> None:
    validate = ("tokens.val_check_interval=3", "tokens.limit_val_batches=-1", "tokens.val_fraction=0.2")
    config = tiny_config(tmp_path, *text_overrides(tmp_path), *validate)
    run, said = train_and_listen(config)
    step = metrics(config)[-1]
    # Independently: every held-out token's loss in bits over the bytes of the held-out documents.
    texts = list(validation_texts(run.data))
    total = 0.0
    for batch, *_ in run.data.validation():
        micro = to_device(batch, run)
        with torch.no_grad():
            logits = run.model(micro.tokens, micro.ctx).double()
        total += float(torch.nn.functional.cross_entropy(logits, micro.labels, ignore_index=-100, reduction="sum"))
    size = sum(len(text.encode()) for text in texts)
    first = len(texts[0].encode()) and run.tokenizer.encode(texts[0])[0]
    without_first = size - len(run.tokenizer.decode([first]).encode())  # the very first token is no label
    assert step["val_bits_per_byte"] == pytest.approx(total / math.log(2) / without_first, rel=1e-5)
    assert f"val_bits_per_byte: {step['val_bits_per_byte']:.4f}" in said


# ---- human_format ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        *[(4710, "4.71K"), (10.0, "10"), (9.15, "9.15"), (1024, "1.02K"), (4096, "4.1K"), (54976, "55K"), (1, "1")],
        *[(0.000296, "0.000296"), (7.26e-05, "7.26e-05"), (1e-05, "1e-05"), (0.0101, "0.0101"), (2.13e12, "2.13T")],
        *[(999.6, "1K"), (999_950, "1M"), (0.9999, "1"), (0, "0"), (-2840, "-2.84K"), (-0.5, "-0.5")],
        *[(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")],
    ],
)
def test_numbers_are_shown_as_in_the_seeds_log(number: float, shown: str) -> None:
    assert human_format(number) == shown


@given(st.floats(min_value=-9e17, max_value=9e17).filter(lambda x: abs(x) > 1e-300))
def test_what_is_shown_is_the_number_to_three_digits(number: float) -> None:
    shown = human_format(number)
    factors = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    factor = factors.get(shown[-1], 1.0)
    value = float(shown.rstrip("KMGTP")) * factor
    assert value == pytest.approx(number, rel=0.0051)
    digits = re.sub(r"e.*", "", shown.rstrip("KMGTP")).replace(".", "").lstrip("-0")
    assert len(digits) <= 3
    if 1 <= abs(number) < 999e15:
        assert 1 <= abs(float(shown.rstrip("KMGTP"))) < 1000


# ---- metrics.jsonl after a kill ----------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe\n", b"\0\0\0\n", b"7\n", b'{"iteration": null}\n'])
def test_steps_that_will_be_done_again_are_dropped_with_a_line_cut_short(damaged: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = "".join(json.dumps({"iteration": k, "lm_loss": k / 7}) + "\n" for k in range(1, 6))
    path.write_bytes(damaged + lines.encode() + b'{"iterat')
    (tmp_path / "metrics.jsonl.tmp-00000000").touch()  # of a start that was killed while it did this
    drop_later_steps(path, 3)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"iteration": k, "lm_loss": k / 7} for k in (1, 2, 3)
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_a_resumed_run_has_every_step_once_in_metrics_and_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys = ("logging.tensorboard=true", "checkpoints.checkpoint_interval=2", "checkpoints.save_final_state=false")
    train_quietly(tiny_config(tmp_path, *keys, "tokens.train_steps=3"))
    config = tiny_config(tmp_path, *keys, "tokens.train_steps=5")
    train_quietly(config)  # from 2: step 3 is done again
    assert [step["iteration"] for step in metrics(config)] == [1, 2, 3, 4, 5]
    events = EventAccumulator(str(tmp_path / "logs" / "tiny"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/lm_loss")] == [1, 2, 3, 4, 5]
    assert not [*(tmp_path / "logs" / "tiny").glob("replaced-*")]


def test_a_full_disk_under_tensorboard_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer is a thread, whose own traceback says nothing more."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    shown: list[Any] = []
    monkeypatch.setattr(RecordWriter, "write", full)
    monkeypatch.setattr(threading, "excepthook", shown.append)
    folder = tmp_path / "logs" / "tiny"
    expected = f"^TensorBoard's file in {folder}: cannot write the metrics of step 1: No space.*free space there"
    with pytest.raises(RunFailed, match=expected):
        train_quietly(tiny_config(tmp_path, "logging.tensorboard=true"))
    threading.excepthook(threading.ExceptHookArgs((OSError, OSError(), None, threading.current_thread())))
    assert len(shown) == 1  # of any other thread


def test_a_run_goes_on_when_the_reader_of_its_lines_goes_away(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """As `head` does; without a traceback."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            if self.getvalue().count("\n") > 1:
                raise BrokenPipeError
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Gone())
    assert kn.train(tiny_config(tmp_path)).finished
    assert "Traceback" not in capsys.readouterr().err


def test_time_left_is_reckoned_from_the_steps_of_this_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps were done before: the third takes a minute, and two more are left."""
    from kenotron.observers.progress import Pace

    stop = "general.hooks=[{path: support.user_parts.StopAt, kwargs: {step: 2}}]"
    train_quietly(tiny_config(tmp_path, "tokens.train_steps=5", stop))
    clock = iter(range(100))
    monkeypatch.setattr(Pace, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr("kenotron.observers.progress.time", SimpleNamespace(perf_counter=lambda: 60.0 * next(clock)))
    _, said = train_and_listen(tiny_config(tmp_path, "tokens.train_steps=5"))
    assert re.findall(r"training: .*", said) == ["training: 60% | ETA 0:02:00", "training: 80% | ETA 0:01:00"]


def test_the_page_on_metrics_has_every_field(watched) -> None:
    page = read_page("metrics.md")
    assert [name for step in metrics(watched[0]) for name in step if f"`{name}`" not in page] == []


def test_the_hook_of_the_page_sends_every_line_to_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package of MLflow, which keeps what it is given."""
    monkeypatch.syspath_prepend(tmp_path)
    calls: list[Any] = []
    mlflow = SimpleNamespace(set_experiment=calls.append, end_run=lambda: calls.append("finished"))
    mlflow.start_run = lambda run_name: calls.append(run_name)
    mlflow.log_metrics = lambda line, step: calls.append((step, line))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for name, text in files(read_page("metrics.md")).items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    config = train_quietly(tiny_config(tmp_path, "general.hooks=[my_tracker.Tracker]")).config
    project, name, *lines, end = calls
    assert (project, name) == ("tests", config.general.run)
    assert lines == [(line["iteration"], line) for line in metrics(config)]
    assert end == "finished"


def test_a_metric_that_is_no_number_is_one_clear_error(tmp_path: Path) -> None:
    run = train_quietly(tiny_config(tmp_path))
    for value in ("hello", None, [1, 2]):
        with pytest.raises(InputError, match="record_metric: note: expected a number, found "):
            run.record_metric("note", value)
    with pytest.raises(InputError, match="record_metric: expected a name, found 3"):
        run.record_metric(3, 1.0)  # type: ignore[arg-type]


class Kill(kn.Hook):
    """Makes the file of `general.kill_switch_path` in step 2."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def before_step(self, run: Any) -> None:
        if run.step == 1:
            self.path.touch()


def test_a_file_stops_a_run_which_goes_on_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenotron.observers.signals.KillSwitch.EVERY_S", 0.0)
    path = tmp_path / "stop"
    keys = (f"general.kill_switch_path={path}", "tokens.train_steps=5")
    hook = f"general.hooks=[{{path: {__name__}.Kill, kwargs: {{path: {path}}}}}]"
    _, said = train_and_listen(tiny_config(tmp_path, *keys, hook))
    assert f"general.kill_switch_path: {path} exists: saving after step 2 and stopping" in said
    config = tiny_config(tmp_path, *keys)
    assert [entry.name for entry in config.checkpoint_folder.iterdir() if entry.name.isdigit()] == ["2"]
    with pytest.raises(InputError, match=f"kill_switch_path: {path} exists, which stops a run; remove it to train"):
        train_quietly(config)
    path.unlink()
    train_quietly(config)
    assert [step["iteration"] for step in metrics(config)] == [1, 2, 3, 4, 5]
