"""Every example runs by the commands that its README gives, and what the README shows is what comes out."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kenotron.config import diff, load
from kenotron.storage.native import find_compiler
from support.hub_cache import offline_environment
from support.nursery import Finished, Nursery
from support.tiny_run import REPOSITORY, TEXTS

pytestmark = pytest.mark.budget(15, reason="each README's commands run in full, some as processes that import torch")

ITERATION = re.compile(r"(?:iteration: \d+ / \d+|validation: \d+ / \d+|step \d+/\d+) \|.*")


def run_readme(folder: Path, root: Path, nursery: Nursery, **more: str) -> list[Finished]:
    """Run every ``kenotron …``, ``python …`` and ``cd …`` of a README's bash blocks, from `root` on."""
    done = []
    for block in re.findall(r"```bash\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL):
        where = root
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            if program == "cd":
                where = root / arguments[0]
            elif program == "kenotron":  # torchrun's are those of test_walkthrough
                done.append(nursery.run(*arguments, folder=where, env=more))
            elif program == "python":
                line = [sys.executable, *arguments]
                process = subprocess.run(line, cwd=where, capture_output=True, text=True, check=False)
                done.append(Finished(process.returncode, process.stdout, process.stderr))
    return done


def fields(line: str) -> dict[str, str]:
    """Of either form: ``iteration: 5 / 15 | lm_loss: 5.27`` or ``step 5/15 | loss 5.27``."""
    if line.startswith(("iteration: ", "validation: ")):
        return dict(part.strip().split(": ", 1) for part in line.split(" | ") if part.strip() != "…")
    parts = [part.split() for part in line.split(" | ") if part.strip() != "…"]
    return dict(pair if pair[0].isalpha() else pair[::-1] for pair in parts)


def iterations(text: str) -> dict[str, dict[str, str]]:
    """Lines of steps by their first field, as ``5 / 15``."""
    return {next(iter((found := fields(line)).values())): found for line in ITERATION.findall(text)}


def compare(readme: Path, said: str) -> None:
    """The README's iteration lines are those of the run: counters and rates exactly, the loss within 10%."""
    shown, printed = iterations(readme.read_text()), iterations(said)
    assert shown
    for step, expected in shown.items():
        assert list(expected) == [name for name in printed[step] if name in expected], f"fields of {step}"
        for name, value in expected.items():
            if name.endswith("loss"):
                assert float(printed[step][name]) == pytest.approx(float(value), rel=0.1), step
            else:
                assert printed[step][name] == value, (step, name)


def others(readme: Path) -> list[str]:
    """What else the README shows of the log, without its prefix."""
    block = re.findall(r"```\n(.*?)```", readme.read_text().split("## Output")[1], re.DOTALL)[0]
    lines = [line.split("]: ")[-1] for line in block.splitlines()]
    return [line for line in lines if line and line != "…" and not ITERATION.match(line)]


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    """The examples alone in a folder, without this repository around them."""
    ignored = shutil.ignore_patterns("checkpoints", "logs", "__pycache__")
    return Path(shutil.copytree(REPOSITORY / "examples", tmp_path / "examples", ignore=ignored))


def test_the_tiny_llama_runs_by_its_readme(examples: Path, hub_home: Path, nursery: Nursery) -> None:
    _, generated = as_its_readme_shows(examples / "llama", nursery, **offline_environment(hub_home))
    assert generated.stdout.startswith("Once upon a time")
    assert (examples.parent / "checkpoints" / "15" / "manifest.json").exists()
    assert [path.name.startswith("tiny_llama_") for path in (examples.parent / "logs").iterdir()] == [True]


@pytest.mark.slow
def test_the_custom_dataloader_runs_by_its_readme(examples: Path, nursery: Nursery) -> None:
    (_,) = as_its_readme_shows(examples / "custom-dataloader", nursery)


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
def test_the_data_source_in_cpp_runs_by_its_readme(examples: Path, nursery: Nursery) -> None:
    as_its_readme_shows(examples / "native", nursery)


@pytest.mark.slow
@pytest.mark.cases(slow=0)
def test_the_model_of_the_chat_example_answers_as_its_readme_shows(examples: Path, nursery: Nursery) -> None:
    folder = examples / "chat"
    for done in run_readme(folder, examples.parent, nursery):  # the last one's standard input is empty
        assert done.code == 0, done.stderr
    shown = re.findall(r"```text\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[0].splitlines()
    command, typed = [sys.executable, "-m", "kenotron", "chat", "checkpoints/chat/150"], "\n".join(shown[::2])
    done = subprocess.run(command, input=typed, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == shown[1::2]


@pytest.mark.slow
def test_the_nanosets_run_by_their_readme(examples: Path, nursery: Nursery) -> None:
    readme = examples / "nanosets" / "README.md"
    _, trained, which = without_errors(run_readme(examples / "nanosets", examples.parent, nursery))
    assert len(list((examples / "nanosets" / "tokens").glob("*/*.ds"))) == 4
    compare(readme, trained.stdout)
    for line in others(readme):
        assert line.removesuffix(" …") in trained.stdout
    assert len(re.findall(r"^sample 15\d\d: tokens/code/0000[01]\.ds window", which.stdout, re.MULTILINE)) == 12


@pytest.mark.slow
def test_a_model_in_its_true_shape_is_checked_and_trains_in_miniature(examples: Path, nursery: Nursery) -> None:
    checked, trained = run_readme(examples / "models", examples.parent, nursery)
    assert checked.code == 0
    assert checked.stderr.startswith("warning: data_stages.0.data.dataset is null: random tokens")
    assert "valid: 100000 steps of 1024 sequences of 4096 tokens" in checked.stdout
    assert (trained.code, trained.stderr) == (0, "")
    assert (examples.parent / "checkpoints" / "llama-3.2-1b" / "2" / "manifest.json").exists()


def test_the_spectral_llama_runs_by_its_readme(examples: Path, nursery: Nursery) -> None:
    """nanotron's published factors, and steps in miniature; the other YAML differs in its init alone."""
    shown, trained = run_readme(examples / "mup", examples.parent, nursery)
    assert (shown.code, trained.code, trained.stderr) == (0, 0, "")
    rows = {line.split()[0]: line.split()[-4:-2] for line in shown.stdout.splitlines()}
    assert rows["model.layers.*.mlp.up_proj.weight"] == ["0.03125", "8"]
    assert rows["lm_head.weight"] == ["0.03125", "48"]
    compare(examples / "mup" / "README.md", trained.stdout)
    files = [examples / "mup" / "configs" / f"{name}_350m_llama_config.yaml" for name in ("mup", "sp")]
    spectral, standard = map(load, files)
    differ = {path.partition(".init_method")[0] for path, _, _ in diff(spectral, standard)}
    assert differ == {"general.run", "checkpoints.checkpoints_path", "model"}


@pytest.mark.slow
@pytest.mark.cases(slow=0)
def test_the_mamba_runs_by_its_readme(examples: Path, nursery: Nursery) -> None:
    _, generated, _, shared, hybrid = as_its_readme_shows(examples / "mamba", nursery)
    assert generated.stdout.startswith("def main(")
    config = json.loads((examples.parent / "checkpoints" / "mamba" / "60-hf" / "config.json").read_text())
    assert (config["architectures"], config["state_size"]) == (["MambaForCausalLM"], 8)
    assert goes_on(shared)
    lines = iterations(hybrid.stdout)
    assert float(lines["60/60"]["loss"]) < float(lines["1/60"]["loss"]) - 1.5


def goes_on(process: Finished) -> bool:
    """Whether a run of 60 steps goes on to step 80, with the loss where it was: 5.2 and below."""
    losses = {step: float(line["loss"]) for step, line in iterations(process.stdout).items()}
    return "(step 60)" in process.stdout and "1/80" not in losses and losses["80/80"] < 5.5


def without_errors(finished: list[Finished]) -> list[Finished]:
    for process in finished:
        assert (process.code, process.stderr) == (0, "")
    return finished


def as_its_readme_shows(example: Path, nursery: Nursery, **more: str) -> list[Finished]:
    """What the commands of an example's README ended with: no error, and of the first the lines that are shown."""
    finished = without_errors(run_readme(example, example.parents[1], nursery, **more))
    compare(example / "README.md", finished[0].stdout)
    for line in others(example / "README.md"):
        assert line in finished[0].stdout
    return finished


@pytest.mark.slow
@pytest.mark.cases(slow=0)
def test_the_mixture_of_experts_runs_by_its_readme(examples: Path, nursery: Nursery) -> None:
    _, generated, shared = as_its_readme_shows(examples / "moe", nursery)
    assert generated.stdout.startswith("def main(")
    assert goes_on(shared)


@pytest.mark.slow
def test_the_lazy_checkpoints_run_by_their_readme(examples: Path, nursery: Nursery) -> None:
    trained, verified, resumed = as_its_readme_shows(examples / "datastates", nursery)
    assert ", of which training waited " in trained.stdout
    assert verified.stdout == "checkpoints/datastates/40 is intact\n"
    assert "(step 40)" in resumed.stdout
    assert ", of which training waited " not in resumed.stdout
    assert sorted(path.name for path in (examples.parent / "checkpoints" / "datastates").glob("*0")) == ["50", "60"]


@pytest.mark.slow
def test_the_quickstart_trains_on_a_few_files(examples: Path, nursery: Nursery) -> None:
    texts = examples.parent / "texts"
    texts.mkdir()
    for number in range(8):
        (texts / f"{number}.txt").write_text("".join(TEXTS[number::8]) * 4)
    keys = ["data_stages.0.data.dataset={text_files: texts}", "tokens.train_steps=3", "tokens.val_fraction=0.3"]
    keys += ["logging.tensorboard=false", "logging.iteration_step_info_interval=1"]
    process = nursery.run("train", examples / "quickstart.yaml", *keys, folder=examples.parent)
    assert (process.code, process.stderr) == (0, "")
    log = examples.parent / "logs" / "quickstart" / "metrics.jsonl"
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert [step["iteration"] for step in steps] == [1, 2, 3]
    assert steps[2]["lm_loss"] < steps[0]["lm_loss"]
    assert steps[2]["val_bits_per_byte"] > 0
    assert (examples.parent / "checkpoints" / "quickstart" / "3" / "manifest.json").exists()


@pytest.mark.slow
def test_checkpoints_go_to_s3_by_their_readme(examples: Path, nursery: Nursery, tmp_path: Path) -> None:
    """moto's server stands for S3, as in the README."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        port = server.get_host_and_port()[1]
        access = {"AWS_ACCESS_KEY_ID": "robot", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        session = boto3.Session("robot", "secret", region_name="us-east-1")
        session.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="robots")
        more = access | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "KENOTRON_CACHE": str(tmp_path / "cache")}
        readme = examples / "s3" / "README.md"
        trained, continued, listed, generated = run_readme(examples / "s3", examples.parent, nursery, **more)
    finally:
        server.stop()
    for process in (trained, continued, listed, generated):
        assert process.code == 0, process.stderr
    compare(readme, trained.stdout + continued.stdout)
    for line in others(readme):
        assert line in trained.stdout + continued.stdout
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == ["30", "40"]  # keep_last
    assert generated.stdout.startswith("def main(")
    assert not list((examples.parent / "logs").rglob("*.safetensors"))  # remove_after_upload
