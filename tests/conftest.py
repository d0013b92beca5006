"""Fixtures for every test: a temporary cache, a Hugging Face home made here, one nursery of processes.

With `pytest -n` a file goes to one worker, and all layouts to two: each of them starts a pool of eight ranks.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mutants.tables import MUTANTS
from support import budget

# Two workers share two cores, and tiny models gain nothing from more threads. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` tries the same few examples each time, `make nightly` many new ones (--hypothesis-profile=thorough).
# No deadline: how long an example takes says more about the machine's other work than about the code.
with contextlib.suppress(ModuleNotFoundError):  # tests/gpu needs nothing of the extra `test` but pytest
    from hypothesis import HealthCheck, settings

    untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
    settings.register_profile("quick", untimed, max_examples=20, derandomize=True, database=None)
    settings.register_profile("thorough", untimed, max_examples=100)
    settings.register_profile("fuzz", untimed, max_examples=int(os.environ.get("EXAMPLES", "1000")))
    settings.load_profile("quick")

if TYPE_CHECKING:
    from support.nursery import Nursery
    from support.tiny_run import Shell


@pytest.hookimpl(optionalhook=True)  # there is none without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out files, with tests/layouts as two of about the same length; the largest go first."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/layouts/"):
                return "layouts, first half" if nodeid < "tests/layouts/test_me" else "layouts, second half"
            return super()._split_scope(nodeid)

    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--budget`, see support/budget.py, and `--sample`."""
    parser.addoption("--budget", action="store_true", help="fail a quick test that takes longer than its budget")
    parser.addoption("--sample", action="store_true", help="one case of a slow test, some of a quick one of many")


@pytest.hookimpl(trylast=True)  # after `-m` has chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--sample`, keep as many cases of a test as its mark `cases` says, evenly spread, and those mutants name."""
    if not config.getoption("--sample"):
        return
    killers = {f"tests/{test}" for mutant in MUTANTS for test in mutant.tests}
    cases: dict[tuple[str, bool], list[pytest.Item]] = {}
    for item in items:
        slow = item.get_closest_marker("slow") is not None
        cases.setdefault((item.nodeid.partition("[")[0], slow), []).append(item)
    left_out: set[pytest.Item] = set()
    for (_, slow), each in cases.items():
        marker = each[0].get_closest_marker("cases")
        given, named = (marker.args, marker.kwargs) if marker else ((), {})
        kept = named.get("slow", 1) if slow else (*given, len(each))[0]
        spread = {round(number * (len(each) - 1) / max(kept - 1, 1)) for number in range(kept)}
        spread |= {number for number, case in enumerate(each) if case.nodeid in killers}
        left_out.update(case for number, case in enumerate(each) if number not in spread and len(each) > kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_configure() -> None:
    """Nothing that collection makes is garbage."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """From here on garbage collections look at what tests make, and never at what was imported.

    Many tests need the server of `preload`, and the planner, which would start a server with less in it, is among them.
    """
    gc.enable()
    gc.freeze()
    if len(session.items) > 100 and not session.config.option.collectonly:
        from support.preload import fork_server

        fork_server()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Fail a test that takes longer than its budget."""
    if not item.config.getoption("--budget"):
        return (yield)
    charge = budget.Charge()
    result = yield
    seconds, allowed = charge.seconds(), budget.allowed(item)
    if seconds > budget.TOLERANCE * allowed:
        pytest.fail(f"took {seconds:.1f} s, its budget is {allowed:g} s: see tests/support/budget.py", pytrace=False)
    return result


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
    from support.hub_cache import make_hub_cache

    return make_hub_cache(tmp_path_factory.mktemp("hf-home"))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A gloo process group of this process alone; it needs no port."""
    import torch.distributed as dist
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    # torch knows how DTensors move by mesh, and the next test's equal mesh has groups of its own
    _redistribute._gen_transform_infos.cache_clear()
    _clear_sharding_prop_cache()


@pytest.fixture
def shell(capfd: pytest.CaptureFixture[str]) -> Shell:
    """Exit code, stdout and stderr of `kenotron <arguments>`, called in this process."""
    from kenotron.cli import main

    def run(*arguments: object, command: Callable[[list[str]], None] = main) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            command([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int | None)
        return ended.value.code or 0, *capfd.readouterr()

    return run


@pytest.fixture(scope="session")
def nursery(private_cache: Path) -> Iterator[Nursery]:
    """One nursery for all tests of a session that start processes."""
    from support.nursery import Nursery

    with Nursery(KENOTRON_CACHE=str(private_cache)) as made:
        yield made
