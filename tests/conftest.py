"""Fixtures for every test: a cache of its own, a Hugging Face home that is made here, one nursery of processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

# How long an example takes says more about the machine's other work than about the code.
hypothesis.settings.register_profile("kenotron", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("kenotron")

for shared in ("data", "interop", "layouts", "train"):  # folders with modules that tests of other rooms import
    sys.path.insert(0, str(Path(__file__).parent / shared))

if TYPE_CHECKING:
    from nursery import Nursery


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory):
    """Tokens and trained tokenizers of a test session go to a temporary folder, never to the user's."""
    folder = tmp_path_factory.getbasetemp() / "kenotron-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KENOTRON_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def hub_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF_HOME of a made hub cache: the dataset and the tokenizer of the seeds' walkthrough.

    For a subprocess: ``env=os.environ | hub_cache.offline_environment(hub_home)``.
    """
    from hub_cache import make_hub_cache

    return make_hub_cache(tmp_path_factory.mktemp("hf-home"))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A gloo process group of this process alone; it needs no port."""
    import torch.distributed as dist
    from ranks import forget_meshes

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    forget_meshes()


@pytest.fixture(scope="session")
def nursery(private_cache: Path) -> Iterator[Nursery]:
    """One nursery for all tests of a session that start processes."""
    from nursery import Nursery

    with Nursery(KENOTRON_CACHE=str(private_cache)) as made:
        yield made
