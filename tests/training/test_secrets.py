"""Secrets in the environment are in nothing that is written or printed, and a config holds none."""

from pathlib import Path
from typing import Any

import pytest

from kenotron.cli import main
from kenotron.config import InputError, load
from kenotron.storage.drivers import filesystem
from support.nursery import Finished, Nursery
from support.tiny_run import tiny_dict, tiny_yaml, write_texts

SECRET, MARK = "hunter2", "open-sesame"  # the mark is no secret, and shows that what is searched is what was written
ENVIRONMENT = {
    "HF_TOKEN": f"hf_{SECRET}",
    "HUGGING_FACE_HUB_TOKEN": f"hf_{SECRET}",
    "AWS_ACCESS_KEY_ID": f"AKIA{SECRET}",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_SESSION_TOKEN": SECRET,
    "WANDB_API_KEY": SECRET,
    "OPENAI_API_KEY": SECRET,
    "GITHUB_TOKEN": SECRET,
    "KENOTRON_PASSWORD": SECRET,
    "NCCL_AUTH": SECRET,
    "AWS_ENDPOINT_URL": f"http://robot:{SECRET}@127.0.0.1:9",
    "HTTPS_PROXY": f"http://robot:{SECRET}@127.0.0.1:9",
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
    text = (
        f"data_stages.0.data.dataset={{text_files: {write_texts(tmp_path)}}}",
        "tokenizer={train: {vocab_size: 300}}",
    )
    text += ("model.model_config.vocab_size=300", "model.model_config.eos_token_id=0", "logging.log_level=debug")
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


@pytest.mark.parametrize(
    ("key", "url"),
    [
        ("checkpoints.checkpoints_path", WITH_PASSWORD[1]),
        ("data_stages.0.data.dataset", WITH_PASSWORD[0]),
        ("tokenizer.tokenizer_name_or_path", WITH_PASSWORD[2]),
    ],
)
def test_a_config_with_a_password_is_refused_without_repeating_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, key: str
) -> None:
    content: Any = tiny_dict(tmp_path)
    load(content)
    value = f"{{dataset_folder: [{url}]}}" if key.endswith("dataset") else url
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tiny_yaml(tmp_path)), f"{key}={value}"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert key in captured.err
    assert "a URL with a user or password; credentials come from the environment" in captured.err
    assert SECRET not in captured.err + captured.out
    assert not (tmp_path / "logs").exists()


def test_nor_with_one_among_the_keys_of_a_mix(tmp_path: Path) -> None:
    content: Any = tiny_dict(tmp_path)
    content["data_stages"][0]["data"]["dataset"] = {"hf_dataset_or_datasets": {WITH_PASSWORD[0]: 0.5, "b": 0.5}}
    with pytest.raises(InputError, match="hf_dataset_or_datasets: a URL with a user or password") as caught:
        load(content)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("key", ["checkpoints_path", "resume_checkpoint_path"])
def test_nor_with_one_that_went_through_pathlib(tmp_path: Path, key: str) -> None:
    content: Any = tiny_dict(tmp_path)
    content["checkpoints"][key] = str(Path(WITH_PASSWORD[1]))
    with pytest.raises(InputError, match=f"{key}: a URL with a user or password") as caught:
        load(content)
    assert SECRET not in str(caught.value)


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
    load(
        tiny_dict(tmp_path),
        [
            f"data_stages.0.data.dataset={{text_files: ['{url}']}}",
            "tokenizer={train: {vocab_size: 300}}",
            "model.model_config.vocab_size=300",
        ],
    )
