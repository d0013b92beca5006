"""The mistakes of a first hour: each is answered with an exit code and one line that says what to do."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kenotron as kn
from kenotron.config.errors import InputError, RunFailed, nearest_sibling
from support.tiny_run import (
    Shell,
    environment,
    metrics,
    text_overrides,
    tiny_config,
    tiny_dict,
    tiny_yaml,
    train_and_listen,
    train_quietly,
    write_texts,
)


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell) -> Shell:
    """``kenotron <arguments>`` in a folder with `tiny.yaml` and `texts.jsonl`: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny_yaml(tmp_path)
    write_texts(tmp_path)
    return shell


STAGE = "data_stages.0.data.dataset"
LR = "optimizer.learning_rate_scheduler"

REFUSED = [  # as people write them
    ("wandb.project=mine", "unknown key 'wandb'; did you mean 'logging.wandb'?"),
    ("tokens.val_fraction=0", "tokens.val_fraction: expected a number above 0 (1e-9 holds out one document, or"),
    ("optimizer.optimizer_factory.name=adam", "'adam_eps' belong to the variant adamW, but this is custom, by 'name'"),
    ("optimizer.optimizer_factory={name: adagradd}", "found 'adagradd'; did you mean 'Adagrad'?"),
    ("general.run=../../evil", "general.run: expected a name whose folder is inside logging.log_dir, found"),
    ("model.model_config={hf:gpt2}", "unknown key 'model.model_config.hf:gpt2'; write 'hf: gpt2', with a space after"),
    ("tokens=train_steps:3", "tokens: expected a map of keys, found 'train_steps:3'; write 'train_steps: 3', with a"),
    # what the config names is not here
    (f"{STAGE}={{text_files: text.jsonl}}", f"{STAGE}.text_files: no such file or folder: text.jsonl; did you mean"),
    (f"{STAGE}={{source: nowhere.Source}}", f"{STAGE}.source: cannot import 'nowhere' of 'nowhere.Source': No module"),
    ("tokenizer.tokenizer_name_or_path=./a", "tokenizer.tokenizer_name_or_path: no such file or folder: ./a"),
    ("checkpoints.resume_checkpoint_path=a", "checkpoints.resume_checkpoint_path: no such file or folder: a"),
    (f"{LR}.lr_decay_style=math.sine", "lr_decay_style: module 'math' has no 'sine'; did you mean 'sin'?"),
    ("lr=1e-3", f"unknown key 'lr'; did you mean '{LR}.learning_rate'?"),
    (f"{STAGE}=texts.jsonl", f"{STAGE}: expected a dataset: null, or a map with one of the keys "),
    (f"{STAGE}={{text_files: texts.jsonl}}", "missing: the stage 'only' reads text (set it, or tokenizer.train)"),
    ("optimizer.param_groups=[{pattern: nothere}]", "optimizer.param_groups: 'nothere' matches no parameter's name"),
]


@pytest.mark.parametrize(("override", "line"), REFUSED, ids=[override for override, _ in REFUSED])
def test_config_check_refuses_in_one_line(override: str, line: str, tell: Shell) -> None:
    more = ["tokenizer.tokenizer_name_or_path=gpt2"] if "hf_dataset" in override or "text.jsonl" in override else []
    code, _, stderr = tell("config", "check", "tiny.yaml", override, *more)
    assert (code, stderr[:7], stderr.count("\n")) == (2, "error: ", 1)
    assert line in stderr


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("model.dtype=BF16", "model.dtype", "bfloat16"),
        ("model.dtype=torch.float32", "model.dtype", "float32"),
        ("optimizer.optimizer_factory.name=AdamW", "optimizer.optimizer_factory.name", "adamW"),
        ("tokens.train_steps=1e3", "tokens.train_steps", 1000),
        ("logging.wandb={}", "logging.wandb.mode", "online"),
    ],
)
def test_usual_spellings_are_taken(override: str, key: str, value: object, tmp_path: Path) -> None:
    found: Any = tiny_config(tmp_path, override)
    for part in key.split("."):
        found = getattr(found, part)
    assert (type(found), found) == (type(value), value)


LATE = """data_stages=[{name: all, start_training_step: 1, data: {dataset: null}},
    {name: late, start_training_step: 5, data: {dataset: null}}]"""


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["tokens.train_steps=20", f"{LR}.lr_warmup_steps=50"],
            f"{LR}.lr_warmup_steps is 50, but tokens.train_steps only 20: the learning rate ends at 0.004 and never "
            "reaches 0.01",
        ),
        ([f"{LR}.learning_rate=30"], f"{LR}.learning_rate is 30: training is likely to diverge; common rates are"),
        (
            [LATE],
            "data_stages.1.start_training_step is 5, but tokens.train_steps only 3: the stage 'late' is never trained "
            "on",
        ),
        (["tokens.sequence_length=64"], "tokens.sequence_length is 64, but model_config.max_position_embeddings only"),
    ],
)
def test_what_is_valid_but_hardly_meant_is_a_warning(overrides: list[str], line: str, tell: Shell) -> None:
    code, stdout, stderr = tell("config", "check", "tiny.yaml", *overrides)
    assert code == 0
    assert ": valid: " in stdout
    (warning,) = [each for each in stderr.splitlines() if "random tokens" not in each]
    assert warning.startswith(f"warning: {line}")


def test_a_run_logs_the_same_warnings(tmp_path: Path) -> None:
    _, said = train_and_listen(tiny_config(tmp_path, f"{LR}.learning_rate=1.5", "tokens.train_steps=1"))
    assert said.count("warning: ") == 3  # the third is of random tokens
    assert "learning_rate is 1.5: training is likely to diverge" in said
    assert "the learning rate ends at 0.75 and never reaches 1.5" in said


def test_modules_are_found_beside_the_yaml_file(tell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    tiny_yaml(folder)
    (folder / "beside_the_yaml.py").write_text("import kenotron as kn\nclass Mine(kn.Hook):\n    pass\n")
    assert tell("config", "check", "runs/tiny.yaml", "general.hooks=[beside_the_yaml.Mine]")[0] == 0
    assert tell("train", "runs/tiny.yaml", "general.hooks=[beside_the_yaml.Mine]", "tokens.train_steps=1")[0] == 0


# ---- from Python -------------------------------------------------------------------------------------------


def test_kn_train_takes_the_path_of_a_yaml_file_or_a_dict(tmp_path: Path) -> None:
    path = tiny_yaml(tmp_path)
    assert train_quietly(str(path)).config == kn.load(path) == train_quietly(tiny_dict(tmp_path), fresh=True).config


@pytest.mark.parametrize("overrides", ["tokens.train_steps=5", [5]])
def test_overrides_are_a_list_of_texts(overrides: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"overrides: expected a list such as \['tokens.train_steps=100'\], found "):
        kn.load(tiny_yaml(tmp_path), overrides)


@pytest.mark.parametrize("source", [None, ["my.yaml"]])
def test_a_config_is_a_path_a_dict_or_a_config(source: Any) -> None:
    for take in (kn.load, kn.train):
        with pytest.raises(InputError, match=r"^config: expected the path of a YAML file, .* found"):
            take(source)


def test_a_config_says_how_to_change_it(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    with pytest.raises(AttributeError, match=r"config = kn\.load\(config, \['….train_steps=5'\]\)"):
        config.tokens.train_steps = 5
    assert kn.load(config, ["tokens.train_steps=5"]) == tiny_config(tmp_path, "tokens.train_steps=5")


def test_a_finished_run_is_returned_with_its_last_numbers(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    first = train_quietly(config)
    again, said = train_and_listen(config)
    assert again is not None
    assert "This run is finished" in said
    assert again.step == 3
    assert again.last_metrics == metrics(config)[-1]
    assert all((a == b).all() for a, b in zip(again.model.parameters(), first.model.parameters()))


# ---- a machine that is too small ---------------------------------------------------------------------------


class OutOfMemory(kn.Hook):
    """Asks for more memory than there is, as a too large batch does."""

    def before_step(self, run: Any) -> None:
        import torch

        torch.empty(2**60, dtype=torch.uint8)


class FullDisk(kn.Hook):
    """The disk of `metrics.jsonl` is full."""

    priority = -11

    def on_train_start(self, run: Any) -> None:
        (metrics_hook,) = [hook for hook in run.hooks if type(hook).__name__ == "Metrics"]
        metrics_hook.file = open("/dev/full", "w", buffering=1)  # noqa: SIM115


@pytest.mark.parametrize(
    ("hook", "line"),
    [
        (OutOfMemory, r"^out of memory \(.*\); try tokens.micro_batch_size=2 tokens.batch_accumulation_per_replica=2"),
        (FullDisk, r"^/dev/full: cannot write the metrics of step 1: No space left on device; free space there, or"),
    ],
)
def test_a_machine_that_is_too_small_is_one_line_with_the_keys_to_change(hook: type, line: str, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=line):
        train_and_listen(tiny_config(tmp_path, f"general.hooks=[{hook.__module__}.{hook.__name__}]"))


# ---- the command line --------------------------------------------------------------------------------------

ADAFACTOR = "optimizer.optimizer_factory={name: torch.optim.Adafactor}"
COMMANDS = [
    (("generate", "gpt2"), "error: no such model: 'gpt2' is not in the local Hugging Face caches, and"),
    (("train", "tiny.yaml", "--tokens.train_steps=5"), "error: No such option: --tokens.train_steps; a key is set"),
    (("train", "tiny.yaml", "tokens.train_steps", "=", "5"), "error: tokens.train_steps: expected an override of the"),
    (("compare", "tiny.yaml", "tokens.train_steps=2"), "error: --steps: expected at most tokens.train_steps 2, found"),
    (("compare", "tiny.yaml", "pp2"), "error: pp2: expected an override of the form section.key=value"),
    (("compare", "tiny.yaml", "tinny.yaml"), "error: tinny.yaml: no such file; did you mean 'tiny.yaml'?"),
    (("train", "run"), "error: run: expected a YAML file, found a folder; did you mean 'run/config.yaml'?"),
    (("train", "tiny.yaml", "checkpoints.resume_checkpoint_path=a"), "error: checkpoints.resume_checkpoint_path: no c"),
    (("train", "tiny.yaml", "model.init_method={path: ./a}"), "error: model.init_method.path: no checkpoint at a: "),
    (("train", "tiny.yaml", "model.init_method={path: a}"), "error: model.init_method.path: no such model: 'a' is not"),
    (("generate", "texts.jsonx/10"), "error: no checkpoint at texts.jsonx/10: the current folder has no"),
    (
        ("train", "tiny.yaml", ADAFACTOR, "model.make_vocab_size_divisible_by=1024"),
        "error: optimizer.optimizer_factory.name: torch.optim.Adafactor is not known to be elementwise, which it has "
        "to be with rows that pad the vocabulary (model.make_vocab_size_divisible_by); expected adamW, sgd, lion",
    ),
    (("train", "tiny.yaml", "parallelism.dp=64"), "error: parallelism: 64 ranks on 2 cores, but at most 8 are started"),
]


@pytest.mark.parametrize(("arguments", "line"), COMMANDS, ids=[" ".join(arguments) for arguments, _ in COMMANDS])
def test_a_wrong_command_is_one_line(arguments: tuple[str, ...], line: str, tell: Shell, monkeypatch: Any) -> None:
    monkeypatch.setattr("kenotron.launch.environment.cores", lambda: 2)
    Path("run").mkdir()
    Path("run", "config.yaml").write_text("")
    code, _, stderr = tell(*arguments)
    (said,) = [each for each in stderr.splitlines() if not each.startswith("Try ")]
    assert (code, said[: len(line)]) == (2, line)


def test_wrong_models_options_and_layouts_are_answered_before_torch_is_imported(tmp_path: Path) -> None:
    """torch alone takes up to two seconds of an answer."""
    tiny_yaml(tmp_path)
    code = """
import sys
sys.modules["torch"] = None
from kenotron.cli import main
for arguments in (
    ["generate", "./gpt2"], ["chat", "nowhere/run/10"], ["convert", "from-hf", "./gpt2", "out"],
    ["convert", "to-hf", "nowhere", "out"], ["convert", "from-nanotron", "nowhere", "out"],
    ["train", "tiny.yaml", "parallelism.dp=4000"], ["generate", "x", "--max-new-tokens", "0"],
    ["plan", "tiny.yaml", "parallelism.dp=x"],
):
    try:
        main(arguments)
    except SystemExit as ended:
        assert ended.code == 2
main(["--help"])
"""
    options: dict[str, Any] = {"env": environment(tmp_path), "cwd": tmp_path, "timeout": 60}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert process.returncode == 0, process.stderr
    for name in ("init", "train", "generate", "config", "checkpoint", "convert", "--debug"):
        assert re.search(rf"(?<!\S){name}\b", process.stdout)
    assert [line.split(":")[1].strip() for line in process.stderr.splitlines()] == [
        "no checkpoint at gpt2",
        "no checkpoint at nowhere/run/10",
        "no folder gpt2; the nearest that exists is " + str(tmp_path),
        "no checkpoint at nowhere",
        "SRC",
        "parallelism",
        "max_new_tokens",
        "override parallelism.dp=x",
    ]


def test_an_option_without_its_value_leads_to_the_help_of_its_command(tell: Shell) -> None:
    assert tell("chat", "x", "--system")[2].endswith("\nTry 'kenotron chat --help'.\n")


def test_the_version_and_the_bare_command(tell: Shell) -> None:
    assert tell("--version") == (0, f"kenotron {kn.__version__}\n", "")
    for command in ((), ("data",)):
        code, stdout, stderr = tell(*command)
        assert (code, stderr, "Usage: kenotron" in stdout) == (2, "", True)


def test_a_lost_latest_txt_costs_nothing_and_unnamed_prompts_are_named(tell: Shell, tmp_path: Path) -> None:
    train_quietly(tiny_config(tmp_path, *text_overrides(tmp_path), "tokens.train_steps=1"))
    (tmp_path / "checkpoints" / "latest.txt").unlink()
    code, stdout, stderr = tell("generate", "checkpoints", "--max-new-tokens", "2")
    assert (code, stderr) == (0, "no --prompt: continuing 'The future of AI is' and 'def fib(n)'\n")
    assert stdout.startswith("The future of AI is")


def test_a_folder_of_runs_and_a_misspelt_folder_are_named(tell: Shell, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "mine").mkdir(parents=True)
    (tmp_path / "checkpoints" / "mine" / "latest.txt").write_text("10")
    line = "error: checkpoints is not a checkpoint: it has folders of checkpoints: checkpoints/mine\n"
    assert tell("generate", "checkpoints") == (2, "", line)
    assert nearest_sibling(tmp_path / "checkpoint" / "mine") == "; did you mean 'checkpoints/mine'?"
    assert nearest_sibling(tmp_path / "checkpoint" / "other") == ""
    assert nearest_sibling(tmp_path / "checkpoints" / "mine") == ""  # itself


def test_two_runs_of_one_name_keep_their_curves_apart(tmp_path: Path) -> None:
    tensorboard = "logging.tensorboard=true"
    train_quietly(tiny_config(tmp_path, tensorboard))
    train_quietly(tiny_config(tmp_path, tensorboard), fresh=True)
    curves = [path.relative_to(tmp_path / "logs").parts[:-1] for path in tmp_path.glob("logs/**/*tfevents*")]
    assert [(*found[:1], *(part.partition("-")[0] for part in found[1:])) for found in sorted(curves)] == [
        ("tiny",),  # TensorBoard's name for the run
        ("tiny", "replaced"),
    ]


def test_a_run_too_short_for_its_trace_says_so(tmp_path: Path) -> None:
    profiler = f"profiler={{profiler_export_path: {tmp_path / 'traces'}, skip_first: 0}}"
    train_quietly(tiny_config(tmp_path, "tokens.train_steps=3"))
    _, said = train_and_listen(tiny_config(tmp_path, profiler, "tokens.train_steps=4"))
    assert "profiler: no trace was written: it needs 3 steps of one process" in said


# ---- a machine without a network ---------------------------------------------------------------------------


def test_a_url_of_an_unknown_host_is_not_tried_again(tell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kenotron.storage.fetching.time.sleep", pytest.fail)
    code, _, stderr = tell("data", "inspect", "https://nowhere.invalid/a.ds")
    assert (code, stderr.count("\n")) == (2, 1)
    assert stderr.startswith("error: https://nowhere.invalid/a.ds: cannot be read (")
