"""YAMLs that nanotron and the first Kénotron publish for two features run as files, on the seeds' tiny Llama.

Both of Kénotron's for the engine `datastates` (its settings beside `checkpoints`, or inside), and nanotron's for
`s3_upload`, which resumes from the bucket that it uploads to.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
import yaml

from kenotron.checkpoint.folders import verify
from support.hub_cache import offline_environment
from support.nursery import Finished, Nursery
from support.tiny_run import REPOSITORY, same_saved

BUCKET, URL = "robots", "s3://robots/temp/config_tiny_llama_with_s3_upload"
SETTINGS = "datastates:\n  host_cache_size: 16\n  parser_threads: 2\n  pin_host_cache: true\n"
ENGINE = "  checkpointing_engine: datastates\n"
S3_UPLOAD = f"""s3_upload:
  remove_after_upload: true
  s5cmd_concurrency: 5
  s5cmd_numworkers: 16
  s5cmd_path: /fsx/someone/bin/s5cmd
  upload_s3_path: {URL}
"""
SMALL = ("parallelism.pp=1", "parallelism.tp=1", "tokens.train_steps=4", "checkpoints.checkpoint_interval=2")


def published(checkpoints: str = "", at_the_end: str = "", **replaced: str) -> str:
    """The seeds' YAML with dp 1, more of `checkpoints`, another section, and other values."""
    text = (REPOSITORY / "examples" / "llama" / "config_tiny_llama.yaml").read_text()
    text = text.replace("checkpoints:\n", f"checkpoints:\n{checkpoints}", 1) + f"\n{at_the_end}"
    for key, value in {"  dp": "1", **replaced}.items():
        before = next(line for line in text.splitlines() if line.startswith(f"{key}: "))
        text = text.replace(f"{before}\n", f"{key}: {value}\n")
    return text


def train(folder: Path, text: str, nursery: Nursery, hub_home: Path, *overrides: str, **more: str) -> Finished:
    (folder / "published.yaml").write_text(text)
    more |= offline_environment(hub_home)
    finished = nursery.run("train", "published.yaml", "logging.tensorboard=false", *overrides, folder=folder, env=more)
    assert finished.code == 0, finished.stderr
    return finished


def trained_lazily(path: Path, finished: Finished) -> None:
    """Only engines that save in the background say how long training waited."""
    assert yaml.safe_load((path / "config.yaml").read_text())["checkpoints"]["checkpointing_engine"] == "datastates"
    assert f"Saved checkpoint at {path.relative_to(path.parents[1])}: " in finished.stdout
    assert ", of which training waited " in finished.stdout
    assert verify(path) == []


@pytest.mark.slow
def test_the_tiny_llama_with_datastates_as_it_is_written(tmp_path: Path, nursery: Nursery, hub_home: Path) -> None:
    """On the four ranks that it asks for."""
    text = published(ENGINE, SETTINGS, **{"  pp": "2", "  tp": "2"})
    finished = train(tmp_path, text, nursery, hub_home)
    assert re.fullmatch(r"published.yaml:\d+: datastates is now checkpoints.datastates\n", finished.stderr)
    for step in ("10", "15"):
        trained_lazily(tmp_path / "checkpoints" / step, finished)


@pytest.mark.budget(15, reason="two commands on text with a tokenizer of transformers")
def test_the_engine_s_settings_in_checkpoints_and_weights_of_another_run(
    tmp_path: Path, nursery: Nursery, hub_home: Path
) -> None:
    """As in the YAML for 3B: it begins with the weights of a folder, and with nothing else of it."""
    train(tmp_path, published(**{"  checkpoints_path": "pretrained/tiny"}), nursery, hub_home, *SMALL)
    more = "  load_lr_scheduler: false\n  load_optimizer: false\n"
    more += ENGINE + "".join(f"  {line}\n" for line in SETTINGS.splitlines())
    text = published(more, **{"  resume_checkpoint_path": "pretrained/tiny", "  save_initial_state": "true"})
    finished = train(tmp_path, text, nursery, hub_home, *SMALL)
    assert finished.stderr == ""
    for step in ("2", "4"):
        trained_lazily(tmp_path / "checkpoints" / step, finished)
    assert same_saved(tmp_path / "checkpoints" / "0", tmp_path / "pretrained/tiny/4")


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that finds a bucket, which is empty."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        endpoint = f"http://127.0.0.1:{server.get_host_and_port()[1]}"
        client(endpoint).create_bucket(Bucket=BUCKET)
        names = {"AWS_ACCESS_KEY_ID": "robot", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
        yield names | {"AWS_ENDPOINT_URL": endpoint}
    finally:
        server.stop()


def client(endpoint: str):
    return boto3.Session("robot", "secret", region_name="us-east-1").client("s3", endpoint_url=endpoint)


@pytest.mark.slow
def test_s3_upload_begins_with_an_empty_bucket_and_goes_on_from_it(
    tmp_path: Path, nursery: Nursery, hub_home: Path, s3: dict[str, str]
) -> None:
    text = published("", S3_UPLOAD, **{"  resume_checkpoint_path": URL})
    first = train(tmp_path, text, nursery, hub_home, *SMALL, **s3)
    assert first.stderr == (
        "published.yaml:5: a run resumes from its own checkpoints; checkpoints.resume_checkpoint_path ignored\n"
    )
    own = tmp_path / "checkpoints"
    assert [path.name for path in own.iterdir() if path.name.isdigit()] == []  # remove_after_upload
    fetched = download(tmp_path / "fetched", s3["AWS_ENDPOINT_URL"])
    assert sorted(path.name for path in fetched.iterdir() if path.is_dir()) == ["2", "4"]
    assert [verify(fetched / step) for step in ("2", "4")] == [[], []]
    (again := tmp_path / "another machine").mkdir()
    second = train(again, text, nursery, hub_home, *SMALL, "tokens.train_steps=6", **s3)
    assert f"Fetching {URL}/4: " in second.stdout
    assert "step 5/6 | " in second.stdout
    assert "step 4/6 | " not in second.stdout


def download(folder: Path, endpoint: str) -> Path:
    """What lies in the bucket, by an S3 client of another maker, below `folder`."""
    s3 = client(endpoint)
    prefix = URL.removeprefix(f"s3://{BUCKET}/")
    for item in s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        path = folder / item["Key"].removeprefix(f"{prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(BUCKET, item["Key"], str(path))
    return folder
