"""`kn.load`, `kn.train` and `kn.generate` from Python: a script, a notebook, a thread, a server."""

import signal
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import kenotron as kn
import kenotron.training
from kenotron.config import Config, InputError
from support.tiny_run import REPOSITORY, environment, losses, tiny_config, tiny_dict, tiny_yaml, train_quietly


def test_the_functions_of_kenotron_work_whatever_was_imported_before() -> None:
    """The import of a module puts it in the place of the package's attribute of its name."""
    assert not [name for name in kn.__all__ if find_spec(f"kenotron.{name}")]
    assert kn.Hook is kenotron.training.Hook


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]


def test_a_run_inside_a_thread_leaves_signals_alone(tmp_path: Path) -> None:
    before = handlers()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(train_quietly(tiny_config(tmp_path))))
    thread.start()
    during = handlers()
    thread.join(60)
    assert found[0].step == 3
    assert during == before


def test_a_run_puts_signal_handlers_back_even_when_it_fails(tmp_path: Path) -> None:
    before = handlers()
    (tmp_path / "fails").mkdir()
    train_quietly(tiny_config(tmp_path))
    with pytest.raises(RuntimeError, match="this hook is broken"):
        train_quietly(tiny_config(tmp_path / "fails", "general.hooks=[support.user_parts.Broken]"))
    assert handlers() == before


def test_no_thread_of_a_run_outlives_it(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # of other tests' remote files, say
    train_quietly(tiny_config(tmp_path, "data_stages.0.data.num_loading_workers=3"))
    assert not [thread.name for thread in set(threading.enumerate()) - before if thread.name.startswith("kenotron")]


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, "dp 1 x pp 1 x tp 1 x cp 1 needs 1 process, but 2 were started"),
        ({"RANK": "first"}, "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: expected integers, found first, 1, 0, 1"),
    ],
)
def test_an_environment_that_does_not_fit_the_layout_is_said(
    variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=said):
        train_quietly(tiny_config(tmp_path))


def test_processes_for_dp_times_ep_make_dp_larger_and_say_so(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    keys = "{is_mixtral_config: true, num_local_experts: 4, hidden_size: 16, num_attention_heads: 2, vocab_size: 64}"
    layout = ("parallelism.dp=2", "parallelism.expert_parallel_size=2", "tokens.micro_batch_size=3")
    config = tiny_config(tmp_path, f"model.model_config={keys}", *layout)
    work: list[Config] = []
    monkeypatch.setattr("kenotron.launch.work_on_ranks", lambda config, *_, **__: work.append(config))
    for processes, dp in ((2, 2), (4, 4)):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        kn.train(config)
        assert work.pop().parallelism.dp == dp
        said = capsys.readouterr().out
        expected = "4 processes are dp 2 x ep 2 x the rest: dp is read as 4, so a step has 12 samples and not 6"
        assert (expected in said) == (dp == 4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(InputError, match=r"expected a divisor of dp x context_parallel_size 1, found 2: .*set dp: 2"):
        kn.train(kn.load(config, ["parallelism.dp=1"]))


@pytest.mark.slow
def test_the_script_with_data_of_its_own_trains_on_them(tmp_path: Path) -> None:
    """As docs/coming-from-nanotron.md has it: its squares mod 64 are few and soon known, random tokens never are."""
    page = (REPOSITORY / "docs" / "coming-from-nanotron.md").read_text()
    (tmp_path / "train_squares.py").write_text(page.split("```python\n")[1].split("```")[0])
    path = tiny_yaml(tmp_path, tokens=tiny_dict(tmp_path)["tokens"] | {"train_steps": 40})
    assert kn.load(path).data_stages[0].data.dataset is None
    command = [sys.executable, "train_squares.py", path.name]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train_squares.Squares: 9,9" in done.stdout
    assert losses(kn.load(path))[-1] < 3.0 < losses(kn.load(path))[0]
