"""Secrets in the environment are in nothing that is written or printed, and a config holds none."""

import re
from pathlib import Path

import pytest

from kenotron.config import InputError
from kenotron.storage.drivers import filesystem
from support.nursery import Finished, Nursery
from support.tiny_run import Shell, text_overrides, tiny_config, tiny_yaml

SECRET, MARK = "hunter2", "open-sesame"  # the mark is no secret, and shows that what is searched is what was written
WHOLE = "AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN WANDB_API_KEY OPENAI_API_KEY GITHUB_TOKEN KENOTRON_PASSWORD NCCL_AUTH"
ENVIRONMENT = dict.fromkeys(WHOLE.split(), SECRET) | {
    **dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), f"hf_{SECRET}"),
    "AWS_ACCESS_KEY_ID": f"AKIA{SECRET}",
    **dict.fromkeys(("AWS_ENDPOINT_URL", "HTTPS_PROXY"), f"http://robot:{SECRET}@127.0.0.1:9"),
    "MASTER_ADDR": f"robot:{SECRET}@127.0.0.1",
    "NO_PROXY": "*",
}


def run(nursery: Nursery, folder: Path, *arguments: str, code: int = 0) -> Finished:
    finished = nursery.run(*arguments, folder=folder, env=ENVIRONMENT)
    assert finished.code == code, finished.stderr
    return finished


@pytest.mark.slow
def test_no_file_and_no_line_of_a_run_has_a_secret_of_the_environment(tmp_path: Path, nursery: Nursery) -> None:
    """A run of text with its debug log, a run that fails with its traceback, a job's script, the doctor's pages."""
    tiny_yaml(tmp_path, general={"project": MARK, "run": "tiny", "seed": 7})
    text = [*text_overrides(tmp_path), "logging.log_level=debug"]
    breaks = ("general.hooks=[support.user_parts.Broken]", "logging.log_dir=broken", "checkpoints.checkpoints_path=b")
    said = [
        run(nursery, tmp_path, "train", "tiny.yaml", *text),
        run(nursery, tmp_path, "--debug", "train", "tiny.yaml", *breaks, code=1),
        run(nursery, tmp_path, "submit", "tiny.yaml", "--dry-run"),
        run(nursery, tmp_path, "doctor", "--quick"),
        run(nursery, tmp_path, "doctor", "--quick", "--json"),
        run(nursery, tmp_path, "config", "show", "tiny.yaml"),
    ]
    written = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for file, content in written.items():
        assert SECRET.encode() not in content, file
    for number, finished in enumerate(said):
        assert SECRET not in finished.stdout + finished.stderr, number
    marked = {file.name for file, content in written.items() if MARK.encode() in content}
    assert {"config.yaml", "tiny.yaml"} <= marked
    assert {"metrics.jsonl", "manifest.json"} <= {file.name for file in written}
    assert "Traceback" in said[1].stderr
    assert "#SBATCH" in said[2].stdout


WITH_PASSWORD = [
    f"https://robot:{SECRET}@127.0.0.1/tokens.ds",
    f"s3://key:{SECRET}@bucket/run",
    f"https://{SECRET}@127.0.0.1/tokens.ds",
]


THROUGH_PATHLIB = str(Path(WITH_PASSWORD[1]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoints.checkpoints_path", WITH_PASSWORD[1]),
        ("checkpoints.checkpoints_path", THROUGH_PATHLIB),
        ("checkpoints.resume_checkpoint_path", THROUGH_PATHLIB),
        ("data_stages.0.data.dataset.dataset_folder", f"[{WITH_PASSWORD[0]}]"),
        ("data_stages.0.data.dataset.hf_dataset_or_datasets", f"{{'{WITH_PASSWORD[0]}': 0.5, b: 0.5}}"),
        ("tokenizer.tokenizer_name_or_path", WITH_PASSWORD[2]),
    ],
)
def test_a_config_with_a_password_is_refused(tmp_path: Path, shell: Shell, key: str, value: str) -> None:
    """Without repeating it."""
    code, said, errors = shell("train", tiny_yaml(tmp_path), f"{key}={value}")
    assert code == 2
    assert re.search(rf"{key}(\.0)?: a URL with a user or password; credentials come from the environment", errors)
    assert SECRET not in errors + said
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("url", WITH_PASSWORD)
def test_a_file_is_not_read_by_a_url_with_a_password(url: str) -> None:
    with pytest.raises(InputError, match="a URL with a user or password") as caught:
        filesystem(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["hf://datasets/someone/data@main/a.jsonl", "hf://data@main/a.jsonl", "s3://bucket/a@b", "https://a.org?mail=a@b"],
)
def test_not_every_at_sign_is_of_a_password(tmp_path: Path, url: str) -> None:
    tiny_config(tmp_path, *text_overrides(tmp_path), f"data_stages.0.data.dataset={{text_files: ['{url}']}}")
