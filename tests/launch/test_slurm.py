"""`kenotron submit` without a Slurm: the script it writes, run by bash with stand-ins for srun and scontrol."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kenotron.cli.nanotron_scripts import slurm_launcher
from kenotron.config import dump, load
from kenotron.config.errors import InputError
from kenotron.config.packaged import packaged_yaml
from kenotron.launch.environment import share_threads
from kenotron.launch.slurm.ranks import first_host, is_task_of_many, torchrun_variables
from kenotron.launch.slurm.script import Job, render
from kenotron.launch.slurm.sites import BUILT_IN, Site, load_site
from kenotron.launch.slurm.submitting import configs_of
from support.tiny_run import REPOSITORY, Shell, tiny_config, tiny_yaml, train_quietly, wait_until

# As srun of Slurm 22.05 sets them for the third of four tasks on two nodes.
TASK = {"SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
TASK |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "n[1-2]"}
# Of a batch script, which is no task of srun.
BATCH = {"SLURM_JOB_ID": "41", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_variables_of_a_task_are_those_of_torchrun() -> None:
    found = torchrun_variables(TASK)
    expected = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "n1"}
    assert found.items() >= expected.items()
    assert 20_000 <= int(found["MASTER_PORT"]) < 30_000
    assert torchrun_variables(TASK | {"SLURM_PROCID": "0"})["MASTER_PORT"] == found["MASTER_PORT"]
    assert torchrun_variables(TASK | {"MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1"
    assert is_task_of_many(TASK)
    assert not is_task_of_many(BATCH)
    uneven = TASK | {"SLURM_STEP_TASKS_PER_NODE": "4(x3),2", "SLURM_NODEID": "3"}
    assert torchrun_variables(uneven)["LOCAL_WORLD_SIZE"] == "2"
    with pytest.raises(InputError, match="SLURM_LOCALID is not set"):
        torchrun_variables({name: value for name, value in TASK.items() if name != "SLURM_LOCALID"})
    for wrong in ({"SLURM_JOB_ID": "41a"}, {"SLURM_NODEID": "2"}):
        with pytest.raises(InputError, match="one of Slurm's variables is wrong"):
            torchrun_variables(TASK | wrong)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("r7i[03-05,9]n2,login", "r7i03n2"),
        ("a[1-2]b[3,5],c", "a1b3"),
        ("x,y[1-2]", "x"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


# ---- the script --------------------------------------------------------------------------------------------

SRUN = """\
#!{python}
import json, os, signal, sys, time
with open({seen!r}, "w") as file:
    json.dump([sys.argv[1:], dict(os.environ), os.getcwd()], file)
if os.environ.get("WAIT"):
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    time.sleep(30)
"""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with srun, which writes what it was called with into `seen`, and scontrol, into `requeued`."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "srun").write_text(SRUN.format(python=sys.executable, seen=str(folder / "seen")))
    (folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" > {folder}/requeued\n')
    for name in ("srun", "scontrol"):
        (folder / name).chmod(0o755)
    return folder


def run_script(script: str, stand_ins: Path, **environment: str) -> subprocess.Popen[bytes]:
    for name in ("seen", "requeued", "canary"):
        (stand_ins / name).unlink(missing_ok=True)
    env = {"PATH": f"{stand_ins}:{os.environ['PATH']}", "SLURM_JOB_ID": "41", **environment}
    return subprocess.Popen(["bash", "-c", script], env=env, cwd=stand_ins)


def reach_the_time_limit(job: Job, stand_ins: Path, **environment: str) -> None:
    """Run the job's script until Slurm's signal, and to its end."""
    process = run_script(render(job, Site()), stand_ins, WAIT="yes", **environment)
    seen = stand_ins / "seen"
    wait_until(lambda: seen.exists() and seen.read_text(), seconds=20)
    time.sleep(0.2)  # srun's handler
    process.send_signal(10)  # SIGUSR1
    assert process.wait(20) == 0


printable = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, exclude_characters="\x7f"), max_size=30)


@settings(max_examples=15, deadline=None)
@given(argument=printable, value=printable, folder=printable.map(lambda text: text.replace("/", "") or "x"))
def test_no_value_is_read_as_shell(argument: str, value: str, folder: str, stand_ins: Path) -> None:
    hostile = f"$(touch {stand_ins}/canary)`touch {stand_ins}/canary`;'\"{argument}"
    where = stand_ins / ("in " + folder)
    where.mkdir(exist_ok=True)
    command, variables = ("kenotron", "train", hostile, argument), {"VALUE": value, "HOSTILE": hostile}
    options = {"comment": hostile}
    job = Job(argument.strip() or "x", 1, 1, command, where, "x.log", options=options, environment=variables)
    assert run_script(render(job, Site()), stand_ins).wait(20) == 0
    arguments, environment, cwd = json.loads((stand_ins / "seen").read_text())
    assert arguments == ["--kill-on-bad-exit=1", "kenotron", "train", hostile, argument]
    assert (environment["VALUE"], environment["HOSTILE"], cwd) == (value, hostile, str(where))
    assert not (stand_ins / "canary").exists()
    shutil.rmtree(where)


def test_the_signal_before_the_time_limit_reaches_the_ranks_and_requeues_the_job(stand_ins: Path) -> None:
    job = Job("x", 1, 1, ("train",), stand_ins, "x.log")
    reach_the_time_limit(job, stand_ins)
    assert (stand_ins / "requeued").read_text() == "requeue 41\n"
    assert run_script(render(job, Site()), stand_ins).wait(20) == 0
    assert not (stand_ins / "requeued").exists(), "a run that has ended is not started again"


def test_a_task_of_an_array_is_requeued_alone(stand_ins: Path) -> None:
    job = Job("x", 1, 1, ("train",), stand_ins, "x.log", array=2)
    reach_the_time_limit(job, stand_ins, SLURM_ARRAY_JOB_ID="41", SLURM_ARRAY_TASK_ID="1")
    assert (stand_ins / "requeued").read_text() == "requeue 41_1\n"


def test_cores_of_a_rank_reach_srun_whoever_names_them(tmp_path: Path) -> None:
    job = Job("x", 1, 1, ("train",), tmp_path, "x.log", options={"cpus-per-task": 12})
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=12 " in render(job, Site(cpus_per_rank=4))
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=4 " in render(replace(job, options={}), Site(cpus_per_rank=4))


def test_slurm_is_asked_for_what_a_requeued_run_needs(tmp_path: Path) -> None:
    """The signal goes to the script (B:), which requeues; the log goes on; a task of an array has a config."""
    script = render(Job("x", 1, 1, ("train",), tmp_path, "x.log", save_seconds=120, array=3), Site())
    asked = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")}
    assert asked >= {"--requeue", "--open-mode=append", "--signal=B:USR1@120", "--array=0-2"}


def test_a_variable_of_the_command_wins_over_the_sites(tmp_path: Path) -> None:
    job = Job("x", 1, 1, ("train",), tmp_path, "x.log", environment={"NCCL_SOCKET_IFNAME": "ib1"})
    script = render(job, Site(environment={"NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "WARN"})).splitlines()
    exports = [line for line in script if line.startswith("export ")]
    assert sorted(exports) == ["export NCCL_DEBUG=WARN", "export NCCL_SOCKET_IFNAME=ib1"]


def test_a_rank_that_srun_binds_to_cores_has_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    monkeypatch.setattr("kenotron.launch.environment.cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share_threads(4)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    for cpus in ("8", "2", "many"):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", cpus)
        share_threads(4)
    assert threads == [2, 8, 2, 2]


def test_bad_values_are_refused_by_name() -> None:
    job = Job("x", 1, 1, ("x",), Path("/"), "x")
    for more, message in (
        ({"options": {"comment": "a\n#SBATCH --uid=0"}}, "--comment: expected printable characters"),
        ({"options": {"a b": "c"}}, "expected an option of Slurm"),
        ({"environment": {"A;B": "c"}}, "expected the name of a variable, found 'A;B'"),
    ):
        with pytest.raises(InputError, match=message):
            render(replace(job, **more), Site())


# ---- sites and the command ---------------------------------------------------------------------------------


def test_every_profile_makes_a_script_that_bash_can_read() -> None:
    for path in BUILT_IN.glob("*.yaml"):
        site = load_site(path.stem)
        job = Job("x", 2, site.gpus_per_node or 2, ("train",), Path("/"), "x.log", container="image.sif")
        script = render(job, site)
        subprocess.run(["bash", "-n"], input=script.encode(), check=True)
        if site.gpus_per_node:
            assert f"#SBATCH --gres=gpu:{site.gpus_per_node}" in script
            assert f"#SBATCH --cpus-per-task={site.cpus_per_rank}" in script


def test_a_wrong_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'generic'"):
        load_site("genric")
    (tmp_path / "mine.yaml").write_text("gpu_per_node: 8")
    with pytest.raises(InputError, match=r"mine.yaml: gpu_per_node: .*did you mean 'gpus_per_node'"):
        load_site(str(tmp_path / "mine.yaml"))


def test_a_time_of_a_profile_is_no_number_in_base_60(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("sbatch: {time: 20:00:00, partition: gpu}")
    assert load_site(str(tmp_path / "mine.yaml")).sbatch["time"] == "20:00:00"


def test_ranks_and_nodes_must_fit(tmp_path: Path, shell: Shell) -> None:
    job = ("submit", tiny_yaml(tmp_path), "--gpus-per-node", "4", "--dry-run")
    code, script, _ = shell(*job, "parallelism.dp=8")
    assert (code, "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in script) == (0, True)
    code, _, said = shell(*job, "parallelism.dp=6", "--nodes", "2")
    assert (code, "needs 6 ranks, but 2 nodes of 4 have 8; parallelism.dp=8 would fit" in said) == (2, True)
    assert not (tmp_path / "logs").exists()


def test_gpus_are_asked_for_unless_ranks_run_on_cpus(tmp_path: Path, shell: Shell) -> None:
    job = ("submit", tiny_yaml(tmp_path), "parallelism.dp=4", "--gpus-per-node", "4", "--dry-run")
    for options, asked in (
        ((), ["--gres=gpu:4"]),
        (("--env", "KENOTRON_DEVICE=cpu"), []),
        (("--sbatch", "gpus-per-task=1"), ["--gpus-per-task=1"]),
        (("--sbatch", "gres=gpu:h100:4"), ["--gres=gpu:h100:4"]),
    ):
        code, script, _ = shell(*job, *options)
        assert code == 0
        assert re.findall(r"^#SBATCH (--g\S+)", script, re.MULTILINE) == asked


def test_a_job_that_could_not_resume_its_run_is_refused(tmp_path: Path, shell: Shell) -> None:
    config = tiny_config(tmp_path, "tokens.train_steps=1")
    train_quietly(config)
    file = tmp_path / "run.yaml"
    file.write_text(dump(config))
    for command_line in (("submit", "--gpus-per-node", "2", "--dry-run"), ("config", "check")):
        code, _, said = shell(*command_line, file, "parallelism.dp=2")
        assert (code, "has a global batch of 4 sequences, this config has 8" in said) == (2, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("5", "--time: 5 is 300 s, and --save-seconds 300 before its end the job is saved"),
        ("4:59", "4:59 is 299 s"),
        ("0-0:5", "0-0:5 is 300 s"),
        ("two hours", "expected minutes, H:M:S or D-H:M:S, found 'two hours'"),
        ("1:2:3:4", "expected minutes"),
    ],
)
def test_a_time_limit_that_leaves_no_time_is_refused(given: str, message: str, tmp_path: Path, shell: Shell) -> None:
    job = ("submit", tiny_yaml(tmp_path), "--dry-run")
    code, _, said = shell(*job, "--time", given)
    assert (code, message in said) == (2, True)
    assert shell(*job, "--sbatch", f"time={given}")[0] == 2


def test_a_time_limit_that_leaves_time_is_taken(tmp_path: Path, shell: Shell) -> None:
    for enough in ("6", "5:01", "0-1", "1-00:00:00", "20:00:00", "UNLIMITED"):
        assert shell("submit", tiny_yaml(tmp_path), "--dry-run", "--time", enough)[0] == 0


def test_a_run_in_a_folder_has_a_job_of_one_name(tmp_path: Path, shell: Shell) -> None:
    for run, name in (("ablations/lr1", "ablations-lr1"), ("'%jobid'", "kenotron")):
        code, script, _ = shell("submit", tiny_yaml(tmp_path), f"general.run={run}", "--dry-run")
        assert (code, f"--job-name={name}\n" in script) == (0, True)


def test_runs_of_an_array_share_no_folder(tmp_path: Path) -> None:
    file = tiny_yaml(tmp_path)
    upload = "s3_upload={upload_s3_path: 's3://bucket/run', remove_after_upload: false}"
    rates = "optimizer.learning_rate_scheduler.learning_rate=0.1,0.2"
    configs = configs_of(file, [upload, "checkpoints.checkpoints_path=here"], rates, print)
    assert [each.upload_url for each in configs] == ["s3://bucket/run/0", "s3://bucket/run/1"]
    assert [each.checkpoints.checkpoints_path for each in configs] == ["here/0", "here/1"]
    assert [each.general.run for each in configs] == ["tiny-0", "tiny-1"]  # of its folder of logs


def test_the_example_has_the_ranks_of_its_command(shell: Shell) -> None:
    example = REPOSITORY / "examples" / "slurm" / "config_slurm.yaml"
    code, script, _ = shell("submit", example, "--gpus-per-node", "2", "--time", "10", "--dry-run")
    assert (code, "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n" in script) == (0, True)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for what Slurm has installed, which write down what they were asked, in the current folder."""
    for name, text in {
        "sbatch": 'echo "$@" >> sbatch.log\necho $((100 + $(wc -l < sbatch.log)))',
        "squeue": "echo asked >> asked\necho '102|RUNNING 0:10 of 1:00 n1'",
        "sacct": "echo $2 >> asked\necho '101|COMPLETED|00:05:00|0:0'",
        "scancel": "echo $@ > cancelled",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("programs")
def test_jobs_are_recorded_listed_shown_and_cancelled(tmp_path: Path, shell: Shell) -> None:
    logs = ("--log-dir", str(tmp_path / "logs"))
    assert shell("status", *logs)[0] == 2
    assert shell("submit", tiny_yaml(tmp_path), "tokens.train_steps=9", "--chain", "2", "--time", "6")[0] == 0
    first, second = (tmp_path / "sbatch.log").read_text().splitlines()
    assert "--dependency" not in first
    assert "--dependency=afterany:101" in second
    (folder,) = (tmp_path / "logs" / "slurm").iterdir()
    assert "train_steps: 9" in (folder / "config.yaml").read_text()
    (tmp_path / "logs" / "tiny").mkdir()
    (tmp_path / "logs" / "tiny" / "metrics.jsonl").write_text('{"iteration": 7}\n')
    (folder / "102.log").write_text("one\ntwo\n")
    (folder / "job-broken.json").touch()  # a disk was full
    first, second = "101  tiny  COMPLETED 00:05:00 0:0  step 7\n", "102  tiny  RUNNING 0:10 of 1:00 n1  step 7\n"
    assert shell("status", *logs)[:2] == (0, first + second)
    assert (tmp_path / "asked").read_text().splitlines() == ["asked", "101"]  # once each
    assert shell("logs", "--lines", "1", *logs)[:2] == (0, "two\n")
    code, _, said = shell("cancel", "103", *logs)
    assert (code, "no job '103'" in said) == (2, True)
    for job, cancelled in (("tiny", "--quiet 101 102\n"), ("101", "--quiet 101 102\n"), ("102", "102\n")):
        assert shell("cancel", job, *logs)[0] == 0  # and what would start after it
        assert (tmp_path / "cancelled").read_text() == cancelled
    (folder / "102.log").rename(folder / "101.log")  # the first of the chain runs
    assert shell("logs", *logs)[:2] == (0, "one\ntwo\n")
    assert shell("logs", "102", *logs)[0] == 2


@pytest.mark.usefixtures("programs")
def test_every_job_of_a_chain_waits_for_the_one_before(tmp_path: Path, shell: Shell) -> None:
    assert shell("submit", tiny_yaml(tmp_path), "--chain", "3")[0] == 0
    said = (tmp_path / "sbatch.log").read_text()
    assert re.findall(r"--dependency=(\S+)", said) == ["afterany:101", "afterany:102"]


# ---- nanotron's launcher -----------------------------------------------------------------------------------


def test_nanotrons_flags_make_a_config_that_loads_and_a_job(tmp_path: Path, monkeypatch: Any, shell: Shell) -> None:
    monkeypatch.chdir(tmp_path)
    given = "--run pretrain --model 1b --dp 4 --tp 2 --gpus_per_node 8 --partition hopper --time_limit 20:00:00"
    more = ["--extra_env", "export NCCL_DEBUG=WARN; A='b c'\nexport B=1 C=2", "--email", "a@b.c"]
    more += ["--pre_launch_commands", "module load cuda"]
    code, script, _ = shell(*given.split(), *more, "--steps", "123", "--dry-run", command=slurm_launcher)
    asked = ("nodes=1", "partition=hopper", "time=20:00:00", "gres=gpu:8", "mail-user=a@b.c")
    lines = {*(f"#SBATCH --{option}" for option in asked), "export NCCL_DEBUG=WARN", "export A='b c'", "export B=1"}
    assert (code, {*lines, "export C=2", "module load cuda"} - {*script.splitlines()}) == (0, set())
    config = load(tmp_path / "logs" / "configs" / "pretrain.yaml")
    assert config.tokens.train_steps == 123
    assert config.model.decoder.hidden_size == 2048


@pytest.mark.parametrize("flag", ["--enable-wandb", "--run-train-script=train.py", "--slurm-scripts-dir scripts"])
def test_a_flag_of_nanotrons_that_is_not_served_is_refused_by_name(flag: str, shell: Shell) -> None:
    code, _, said = shell("--run", "pretrain", *flag.split(), command=slurm_launcher)
    assert (code, f"{re.split('[ =]', flag)[0]} is not supported: " in said) == (2, True)


def test_nanotrons_sizes_have_the_parameters_of_their_names() -> None:
    presets = packaged_yaml("kenotron.launch.slurm", "nanotron.yaml")["presets"]
    for name, (layers, hidden, heads, kv_heads, feed_forward) in presets.items():
        kv = hidden // heads * kv_heads
        parameters = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * feed_forward) + 2 * 65536 * hidden
        assert parameters == pytest.approx(float(name[:-1]) * (1e6 if name.endswith("m") else 1e9), rel=0.35), name
