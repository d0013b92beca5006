"""Steps on an accelerator that is not there: nothing mixes devices, and the host waits for the device once a step.

`pytest -m rehearsal`. What is measured here is where the host waits, not how long anything takes.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from support.tiny_run import REPOSITORY

pytestmark = [pytest.mark.rehearsal, pytest.mark.slow]

BF16 = "model.dtype=bfloat16"
MASKING = "model.document_masking=true"
MUON = "optimizer.optimizer_factory.name=muon"
CASES = [
    *("llama|", f"llama||{BF16}", f"llama|recompute=true|{BF16}", f"llama||{BF16}|{MASKING}"),
    *(f"mistral||{BF16}|{MASKING}", f"nano||{MUON}", f"mixtral||{BF16}", f"mixtral|recompute=true|{BF16}"),
    *(f"deepseek_v3||{BF16}", "mamba|", "mamba2|", f"nemotron_h_of_experts||{BF16}"),
    *("llama|dp=2", f"llama|dp=2 zero=1|{BF16}", "llama|dp=2 zero=2", f"llama|dp=2 zero=3|{BF16}"),
    *("llama|dp=4 shard=2 zero=hybrid", f"nano|dp=2 zero=3|{MUON}", f"mixtral|dp=2 zero=1|{BF16}"),
    *(f"mixtral|dp=2 zero=3|{BF16}", "mamba2|dp=2 zero=3"),
    *("llama|tp=2 mode=ALL_REDUCE", f"llama|tp=2 async=true recompute=true|{BF16}", f"mixtral|tp=2|{BF16}"),
    *("mamba2|tp=2", f"nemotron_h_of_experts|tp=2|{BF16}"),
    *("llama|pp=2", "llama|pp=2 engine=1f1b accum=4", f"mixtral|pp=2|{BF16}", "mamba2|pp=2"),
    *("llama|cp=2", "llama|cp=2 method=ulysses", "mamba2|cp=2 method=state_passing"),
    *("llama|dp=2 tp=2 pp=2 zero=1", f"nano|dp=2 tp=2 zero=1|{MUON}"),
]
ONCE = {"training.step:read waits for the device": 1}
EXPERTS_APART = f"mixtral|dp=2 ep=2|{BF16}"
OFFLOAD = "parallelism.cpu_offload=true"
OFFLOADED = [
    f"llama|dp=2 zero=3|{OFFLOAD}",
    f"mixtral|dp=2 zero=1|{OFFLOAD}|{BF16}",
    f"deepseek_v3|dp=2 zero=3|{OFFLOAD}|{BF16}",  # with biases that no gradient reaches
    f"mixtral|dp=4 ep=2 zero=3|{OFFLOAD}|{BF16}",
]
UNSHARDED_EXPERTS = f"mixtral|dp=2 ep=2 zero=1|{OFFLOAD}|{BF16}"
GATHERED = f"order of mixtral|dp=4 ep=2 zero=3|{BF16}"
MISTAKES = "mistakes|"
ALONE = [EXPERTS_APART, UNSHARDED_EXPERTS, GATHERED, MISTAKES]


@pytest.fixture(scope="module")
def rehearsed(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """What a case gave; all of this session are rehearsed in one process."""
    specs = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    chosen = {spec.params.get("case") for spec in specs}
    cases = [*(case for case in (*CASES, *OFFLOADED) if case in chosen), *ALONE]

    @cache
    def everything() -> dict[str, Any]:
        command = [sys.executable, "-m", "support.rehearsal", *cases]
        done = subprocess.run(command, cwd=REPOSITORY / "tests", capture_output=True, text=True, timeout=900)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(lines) == len(cases), f"ended at {cases[len(lines)]}: {done.stderr[-3000:]}"
        return dict(zip(cases, lines))

    return lambda case: everything()[case]


@pytest.mark.cases(slow=3)
@pytest.mark.parametrize("case", CASES)
def test_the_host_waits_once_a_step(case: str, rehearsed: Callable[[str], Any]) -> None:
    """And nothing is computed in float64."""
    assert rehearsed(case)[1:] == [ONCE, ONCE]


def test_experts_on_other_ranks_cost_one_wait_a_layer_and_micro_batch(rehearsed: Callable[[str], Any]) -> None:
    assert rehearsed(EXPERTS_APART)[1:] == [ONCE | {"kernels.experts:counts_on_host reads": 4 * 2}] * 2


@pytest.mark.parametrize("case", OFFLOADED)
def test_offloaded_weights_are_read_by_nothing_but_their_copies(case: str, rehearsed: Callable[[str], Any]) -> None:
    steps = rehearsed(case)
    assert isinstance(steps, list), steps
    expected = ONCE | ({"kernels.experts:counts_on_host reads": 4 * 2} if "ep=2" in case else {})
    reads = [{site: n for site, n in step.items() if site.endswith("reads") or site in ONCE} for step in steps]
    assert reads == [expected] * 3
    assert any("copies to standin" in site for site in steps[2])


def test_offloading_experts_that_nothing_shards_is_refused(rehearsed: Callable[[str], Any]) -> None:
    assert "InputError: parallelism.cpu_offload: it moves shards, but no other rank" in rehearsed(UNSHARDED_EXPERTS)


def test_the_next_layers_weights_travel_while_the_host_waits_for_experts(rehearsed: Callable[[str], Any]) -> None:
    steps = rehearsed(GATHERED)
    assert isinstance(steps, list), steps
    calls, gathered = steps[2][: steps[2].index("_reduce_scatter_base_")], []
    for number, call in enumerate(calls):
        if call == "kernels.experts:counts_on_host reads":
            gathered.append(calls[:number].count("_allgather_base_"))
    # The root, then two a layer, block and experts: in the first layer those of the second, too. Two micro-batches.
    assert gathered == [5, 7, 9, 9]
    backward = calls[len(calls) - calls[::-1].index("kernels.experts:counts_on_host reads") :]
    assert backward.count("_allgather_base_") == 4  # as the last layer's gradients are summed, of it and the one before


def test_each_mistake_is_noticed(rehearsed: Callable[[str], Any]) -> None:
    found = rehearsed(MISTAKES)
    assert found.pop("tensors of two devices").endswith("Error")  # its class has another name with every torch
    assert found == {
        "a result as long as the data say": "DynamicOutputShapeException",
        "bincount": "DynamicOutputShapeException",
        "item": "elsewhere reads",
        "a tensor as a condition": "elsewhere reads",
        "tolist": "elsewhere reads",
        "cpu": "elsewhere copies to cpu",
        "a copy from ordinary memory": "elsewhere copies to standin",
        "a blocking copy": "elsewhere copies to standin",
        "synchronize": "elsewhere waits for the device",
        "a product in float64": "elsewhere computes in float64",
        "a NumPy number as a tensor": "elsewhere copies to standin elsewhere computes in float64",
        "a Fourier transform": "elsewhere computes in complex64",
        "a number of Python": "nothing",
        "a copy from pinned memory": "nothing",
        "a copy to the host": "nothing",
        "its value at once": "elsewhere reads too early",
    }
