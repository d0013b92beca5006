"""Tokenizing by datatrove's tasks: the plain command's bytes, on processes, and on a Slurm and a Ray played here."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import types
from pathlib import Path

import pytest

from kenotron.config.errors import InputError
from kenotron.prepare.executors import Cluster, ShardTokenizer, tokenize_on
from kenotron.prepare.tokenize import TokenizeOptions, tokenize
from kenotron.text.byte_level_bpe import train_byte_level_bpe
from kenotron.text.tokenizer import load_tokenizer
from support.data_runs import bytes_of

OPTIONS = TokenizeOptions(shard_megabytes=0.002, shuffle_documents=True)

# Slurm's part: sbatch keeps the script and starts each task of its array, srun starts what comes after its options.
SBATCH = """#!/bin/sh
for script; do :; done
cat "$script" >> "{folder}/submitted"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
if grep -q launch_pickled "$script"; then
    for task in $(seq 0 "$last"); do SLURM_ARRAY_TASK_ID=$task {nodes} bash "$script" > "{folder}/task$task" 2>&1; done
fi
echo Submitted batch job 7
"""
SRUN = """#!/bin/sh
while [ "$1" != launch_pickled_pipeline ]; do shift; done
exec "$@"
"""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a corpus of five shards, a tokenizer, and the plain command's tokens in ``plain``."""
    monkeypatch.chdir(tmp_path)
    source = random.Random(0)
    texts = [" ".join(source.choices(["alpha", "beta", "gamma"], k=30)) for _ in range(50)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_byte_level_bpe(texts, 300).save(tmp_path / "tokenizer")
    made = tokenize(["corpus.jsonl"], load_tokenizer("tokenizer"), tmp_path / "plain", OPTIONS, 1, lambda line: None)
    assert len(made["files"]) == 5
    return tmp_path


def run_on(cluster: Cluster, output: str) -> dict | None:
    return tokenize_on(cluster, ["corpus.jsonl"], "tokenizer", Path(output), OPTIONS, lambda line: None)


def test_local_tasks_write_the_plain_command_s_bytes(corpus: Path) -> None:
    made = run_on(Cluster("local", tasks=3, workers=2), "tokens")
    assert bytes_of(corpus / "tokens") == bytes_of(corpus / "plain")
    assert made == json.loads((corpus / "plain" / "manifest.json").read_text())
    assert len(list((corpus / "tokens.logs" / "stats").iterdir())) == 3
    assert run_on(Cluster("local"), "tokens") == made  # done already


@pytest.mark.parametrize("tasks", [2, pytest.param(9, marks=pytest.mark.slow)])
def test_tasks_in_any_number_and_order_are_the_same_bytes(corpus: Path, tasks: int) -> None:
    """By themselves, as a cluster would start them; the last to come writes the manifest."""
    output = corpus / "tokens"
    (output / ".unfinished").mkdir(parents=True)
    step = ShardTokenizer(["corpus.jsonl"], "tokenizer", output, OPTIONS)
    for rank in reversed(range(tasks)):
        assert not (output / "manifest.json").exists() or tasks > 5
        step.run(None, rank, tasks)
    assert bytes_of(output) == bytes_of(corpus / "plain")


def test_what_a_task_left_undone_the_plain_command_makes(corpus: Path) -> None:
    output = corpus / "tokens"
    (output / ".unfinished").mkdir(parents=True)
    ShardTokenizer(["corpus.jsonl"], "tokenizer", output, OPTIONS).run(None, 1, 2)
    assert sorted(file.name for file in output.glob("*.ds")) == ["00001.ds", "00003.ds"]
    lines: list[str] = []
    tokenize(["corpus.jsonl"], load_tokenizer("tokenizer"), output, OPTIONS, 1, lines.append)
    assert "2 of 5 shards done already" in lines
    assert bytes_of(output) == bytes_of(corpus / "plain")


def test_a_task_whose_input_is_another_is_refused(corpus: Path) -> None:
    output = corpus / "tokens"
    (output / ".unfinished").mkdir(parents=True)
    step = ShardTokenizer(["corpus.jsonl"], "tokenizer", output, OPTIONS)
    step.run(None, 0, 2)
    with open(corpus / "corpus.jsonl", "a") as stream:
        stream.write(json.dumps({"text": "more"}) + "\n")
    with pytest.raises(InputError, match=r"started with content\.corpus\.jsonl"):
        step.run(None, 1, 2)


def test_slurm_gets_one_array_whose_tasks_make_the_tokens(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{corpus}:{os.environ['PATH']}")
    nodes = "SLURM_NODELIST=here SLURM_GPUS_ON_NODE=0 SLURM_CPUS_PER_TASK=1 SLURM_MEM_PER_CPU=2048"
    for name, script in (("sbatch", SBATCH.format(folder=corpus, nodes=nodes)), ("srun", SRUN)):
        (corpus / name).write_text(script)
        (corpus / name).chmod(0o755)
    (corpus / "scontrol").write_text("#!/bin/sh\necho here\n")
    (corpus / "scontrol").chmod(0o755)
    cluster = Cluster("slurm", tasks=2, workers=1, partition="cpu", time="10:00:00", sbatch={"account": "me"})
    assert run_on(cluster, "tokens") is None
    script = (corpus / "submitted").read_text()
    for line in ("partition=cpu", "time=10:00:00", "array=0-1%1", "account=me", "job-name=kenotron-tokenize"):
        assert f"#SBATCH --{line}\n" in script
    assert "--qos" not in script
    assert f'export PATH="{Path(sys.executable).parent}:$PATH"' in script
    assert (corpus / "tokens" / "manifest.json").exists(), (corpus / "task0").read_text()
    assert bytes_of(corpus / "tokens") == bytes_of(corpus / "plain")


# Ray's part, of which datatrove's executor needs no more: actors whose calls are done at once, here.
RAY = """
import sys, types

def init(**options):
    started.append(options)

started, left = [], []
put = lambda value: value
shutdown = lambda: None

class Task:
    def __init__(self, work, arguments):
        try:
            self.value, self.error = work(*arguments), None
        except Exception as error:
            self.value, self.error = None, error

def get(task):
    if isinstance(task, list):
        return [get(each) for each in task]
    if task.error is not None:
        raise task.error
    return task.value

def wait(tasks, num_returns=1, timeout=None):
    return tasks[:num_returns], tasks[num_returns:]

class Method:
    def __init__(self, work):
        self.work = work
    def remote(self, *arguments):
        return Task(self.work, arguments)

class Actor:
    def __init__(self, made):
        self._made = made
    def __getattr__(self, name):
        return Method(getattr(self._made, name))

class remote:
    def __init__(self, kind):
        self.kind = kind
    def options(self, **options):
        assert options["num_cpus"] == 1
        return self
    def remote(self):
        return Actor(self.kind())

class Group:
    def ready(self):
        return Task(lambda: None, ())

util = types.SimpleNamespace(
    placement_group=lambda bundles: Group(),
    remove_placement_group=left.append,
    get_node_ip_address=lambda: "127.0.0.1",
)
exceptions = types.ModuleType("ray.exceptions")
for name in ("ObjectLostError", "RayActorError", "TaskCancelledError", "WorkerCrashedError"):
    setattr(exceptions, name, type(name, (Exception,), {}))
sys.modules["ray.exceptions"] = exceptions
"""


@pytest.mark.slow
def test_ray_actors_write_the_plain_command_s_bytes(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = corpus / "path" / "ray-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Name: ray\nVersion: 1\n")
    (corpus / "path" / "ray.py").write_text(RAY)
    monkeypatch.syspath_prepend(str(corpus / "path"))
    for name in ("ray", "ray.exceptions"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made = run_on(Cluster("ray", tasks=3, workers=2), "tokens")
    import ray

    assert ray.started == [{"ignore_reinit_error": True}]
    assert len(ray.left) == 3  # every task gave its place back
    assert bytes_of(corpus / "tokens") == bytes_of(corpus / "plain")
    assert made == json.loads((corpus / "plain" / "manifest.json").read_text())
    assert len(list((corpus / "tokens.logs" / "stats").iterdir())) == 3


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (Cluster("slrum"), r"--executor: expected local, slurm, ray, found 'slrum'; did you mean 'slurm'\?"),
        (Cluster("slurm", time="1:00"), r"--partition: missing"),
        (Cluster("local", partition="cpu"), r"--partition: expected only with --executor slurm, found with local"),
        (Cluster("slurm", partition="cpu", time="1:00"), r"sbatch was not found"),
        (Cluster("ray"), r"--executor ray: ray is not installed"),
    ],
)
def test_a_cluster_that_is_not_there_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Cluster, message: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("kenotron.prepare.executors.find_spec", lambda name: None)
    with pytest.raises(InputError, match=message):
        tokenize_on(cluster, ["nothing"], "nothing", tmp_path / "tokens", OPTIONS)
    assert list(tmp_path.iterdir()) == []


def test_a_ray_that_does_not_answer_is_one_line(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Failed to connect\nand more")

    ray = types.SimpleNamespace(init=init, exceptions=types.SimpleNamespace(RayError=OSError))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("kenotron.prepare.executors.find_spec", lambda name: "ray")
    monkeypatch.setenv("RAY_ADDRESS", "here:6379")
    with pytest.raises(InputError, match=r"ray: no cluster at here:6379 \(RAY_ADDRESS\): Failed to connect$"):
        run_on(Cluster("ray"), "tokens")


def test_options_of_a_cluster_without_one_are_refused(corpus: Path) -> None:
    line = [sys.executable, "-c", "from kenotron.cli import main; main()", "data", "tokenize", "corpus.jsonl"]
    more = ["--tokenizer", "tokenizer", "--output", "tokens", "--tasks", "3"]
    done = subprocess.run([*line, *more], capture_output=True, text=True, cwd=corpus)
    assert done.returncode == 2
    assert "--tasks: expected only with --executor" in done.stderr
