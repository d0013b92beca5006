"""Checkpoints that are saved in the background and uploaded to S3 (moto's server)."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import boto3
import pytest

import kenotron as kn
from checkpoint.test_engines import wait_for_the_end
from kenotron.checkpoint.folders import list_checkpoints
from kenotron.checkpoint.remote import RemoteCheckpoints
from kenotron.observers.uploads import Uploads
from support.nursery import Nursery
from support.slow_disk import STOPPED
from support.tiny_run import losses, tiny_config, tiny_yaml, train_quietly


class KilledInFlight(kn.Hook):
    """After step 5, when half of a file of checkpoint 4 is written: has the uploads look, then kills the process."""

    def after_step(self, run: Any, result: Any) -> None:
        if run.step != 5:
            return
        root = run.config.checkpoint_folder
        while not (root / STOPPED).exists():
            time.sleep(0.01)
        (uploads,) = [hook for hook in run.hooks if isinstance(hook, Uploads)]
        while uploads.uploader.pending():  # checkpoint 2
            time.sleep(0.01)
        uploads.uploader.wake()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["async", "datastates"])
def test_a_save_killed_in_flight_is_not_in_the_bucket(
    engine: str, tmp_path: Path, bucket: str, server: Any, nursery: Nursery
) -> None:
    """From which the run resumes."""
    access = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    env = access | {"KENOTRON_CACHE": str(tmp_path / "cache")}
    keys = (f"checkpoints_path=s3://{bucket}/run", f"checkpointing_engine={engine}", "checkpoint_interval=2")
    remote = [f"checkpoints.{key}" for key in keys]

    def train(name: str, *overrides: str) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        file, staging = tiny_yaml(tmp_path / name), f"checkpoints.staging_path={tmp_path / name / 'staged'}"
        return nursery.run("train", file, *remote, staging, *overrides, folder=tmp_path, env=env)

    whole = train_quietly(tiny_config(tmp_path / "whole", "tokens.train_steps=6")).config
    kills = f"general.hooks=[{__name__}.KilledInFlight]"
    killed = train("first", "tokens.train_steps=8", kills, "checkpoints.writer=support.slow_disk.stops_at_step_4")
    assert killed.code == -signal.SIGKILL, killed.stderr
    staged = tmp_path / "first" / "staged"
    wait_for_the_end(int((staged / STOPPED).read_text()))
    assert [path for path in staged.glob("4.tmp-*/model/*.safetensors") if path.stat().st_size > 0]
    assert [entry.step for entry in list_checkpoints(staged)] == [2]

    def objects() -> set[str]:
        found = boto3.resource("s3", endpoint_url=server.url).Bucket(bucket).objects.filter(Prefix="run/")
        return {each.key.split("/")[1] for each in found}

    assert objects() == {".run", "2", "latest.txt"}
    again = train("second", "tokens.train_steps=6")
    assert again.code == 0, again.stderr
    assert f"Fetching s3://{bucket}/run/2: " in again.stdout
    assert losses(tiny_config(tmp_path / "second")) == losses(whole)[2:]
    assert objects() == {".run", "2", "4", "6", "latest.txt"}
    store = RemoteCheckpoints(f"s3://{bucket}/run")
    assert [entry.step for entry in store.all() if entry.manifest and not store.verify(entry.step)] == [2, 4, 6]
