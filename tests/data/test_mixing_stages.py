"""Stages that share sources: limits and what happens at them, weights by size, temperature, beginning anew.

Every step's samples are compared with a plain reading of the config: lists of draws, walked one by one.
"""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenotron.config import Config, load
from kenotron.config.errors import InputError
from kenotron.data import RunData, open_run
from kenotron.data.order import counts, huffman
from kenotron.data.provenance import step_origins
from kenotron.data.sources import token_files
from kenotron.data.stage_plan import plan_stages
from support.data_runs import quiet, run_config, write_texts

L = 8
BATCH = 4


def config_of(*stages: Any, **changes: Any) -> Config:
    return run_config(*stages, sequence_length=L, arch__vocab_size=4096, limit_val_batches=0, **changes)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """a: 20 windows, b: 50, c: 10, of which the last of each is held out (val_fraction below)."""
    found = {}
    for name, windows in (("a", 20), ("b", 50), ("c", 10)):
        found[name] = str(tmp_path / f"{name}.npy")
        np.save(found[name], np.arange(windows * L + 1, dtype=np.uint16))
    return found


def mixture(files: dict[str, str], **parts: Any) -> dict[str, Any]:
    """a=3: weight 3; a=(3, 2): weight 3, two epochs at most."""
    given = {name: part if isinstance(part, tuple) else (part, None) for name, part in parts.items()}
    sources = [(files[name], *each) for name, each in given.items()]
    return {"mixture": [{"tokens": file, "weight": weight, "max_epochs": most} for file, weight, most in sources]}


def opened(config: Config) -> RunData:
    return open_run(config, 1, quiet)


def read(data: RunData, steps: range) -> list[tuple[str, int]]:
    """(file, index) of every sample of these steps, in order."""
    return [(Path(o.source).stem, o.index) for step in steps for o in step_origins(data, step)]


def of(data: RunData, steps: range, name: str) -> list[int]:
    return [index for source, index in read(data, steps) if source == name]


VAL = {"val_fraction": 0.01}  # one window of each file
LENGTHS = {"a": 19, "b": 49, "c": 9}


@pytest.mark.parametrize("epochs", [0.5, 1, 2])
def test_the_run_stops_before_the_batch_that_a_source_may_not_fill(files: dict[str, str], epochs: float) -> None:
    config = config_of(mixture(files, a=(1, epochs), b=1), train_steps=40, **VAL)
    allowed, limit = int(epochs * LENGTHS["a"]), f"{epochs:g} epoch{'s' * (epochs != 1)}"
    with opened(config) as data:
        drawn = 0
        for step in range(1, 41):
            wanted = counts(huffman([1.0, 1.0]), step * BATCH)[0]
            if wanted > allowed:
                break
            assert data.exhausted(step) is None
            drawn = wanted
        assert len(of(data, range(1, step), "a")) == drawn <= allowed
        assert data.exhausted(step) == data.exhausted(40) == f"'a.npy' is exhausted after {limit}"
        for ask in (data.batch, lambda step: step_origins(data, step)):
            with pytest.raises(InputError, match=rf"step {step} is not in the run: 'a.npy' is exhausted after"):
                ask(step)
        (line,) = [line for line in data.describe() if "reaches" in line]
        assert line.endswith(f"the run ends after step {step - 1}")
        assert f"a.npy reaches its {limit} at step {step}" in line
        assert of(data, range(step - 1, step), "b")


def test_the_others_share_on_when_a_source_has_given_its_epochs(files: dict[str, str]) -> None:
    parts = mixture(files, a=(2, 1), b=2, c=(1, 2))
    with opened(config_of(parts, train_steps=60, data__when_exhausted="renormalise", **VAL)) as data:
        everything = read(data, range(1, 61))
        told = Counter(name for name, _ in everything)
        assert told == {"a": 19, "c": 18, "b": 240 - 37}
        assert sorted(index for name, index in everything if name == "a") == list(range(19))
        assert Counter(index for name, index in everything if name == "c") == dict.fromkeys(range(9), 2)
        last_a = max(place for place, (name, _) in enumerate(everything) if name == "a")
        last_c = max(place for place, (name, _) in enumerate(everything) if name == "c")
        assert last_a < last_c
        between = everything[last_a + 1 : last_c]
        share = sum(name == "c" for name, _ in between) / len(between)
        assert share == pytest.approx(1 / 3, abs=2 / len(between))
        lines = [line for line in data.describe() if "reaches" in line]
        assert [line.split(": ")[-1] for line in lines] == ["the others continue without it"] * 2
        assert data.exhausted(60) is None


def test_a_source_that_repeats_is_reported_and_goes_on(files: dict[str, str]) -> None:
    limited = mixture(files, a=(1, 1), b=1)
    repeating = config_of(limited, train_steps=40, data__when_exhausted="repeat", **VAL)
    with opened(repeating) as data, opened(config_of(mixture(files, a=1, b=1), train_steps=40, **VAL)) as plain:
        assert read(data, range(1, 41)) == read(plain, range(1, 41))
        (line,) = [line for line in data.describe() if "reaches" in line]
        assert line.endswith("a.npy reaches its 1 epoch at step 10: it is repeated")


def test_a_stage_that_restarts_begins_anew_and_later_ones_go_on_from_there(files: dict[str, str]) -> None:
    alone = {"tokens": files["b"]}
    stages = [{"dataset": alone, "start": start} for start in (1, 4, 7)]
    config = config_of(*stages, train_steps=9, **VAL)
    content = json.loads(config.model_dump_json(by_alias=True))
    content["data_stages"][1]["data"]["restart"] = True
    with opened(load(content)) as data, opened(config) as through:
        first, again, on = (read(data, range(start, start + 3)) for start in (1, 4, 7))
        assert again == first
        assert on == read(through, range(4, 7))
        assert data.consumption(9) == {"b.npy": (36 * L, 24 / 49)}


def test_weights_are_training_tokens_or_bytes(files: dict[str, str], tmp_path: Path) -> None:
    for measure in ("tokens", "size"):
        with opened(config_of(mixture(files, a=measure, b=measure, c=measure), **VAL)) as data:
            weights = data.stage_of(1).order.mixing.weights
            sizes = [(windows * L + 1) * 2 for windows in (20, 50, 10)]
            assert weights == ([19, 49, 9] if measure == "tokens" else sizes)
    texts = [write_texts(tmp_path / name, count, seed=count) for name, count in (("few", 10), ("many", 40))]
    parts = [{"weight": "size", "text_files": str(folder)} for folder in texts]
    with opened(config_of({"mixture": parts})) as data:
        stage = data.stage_of(1)
        assert stage.order.mixing.weights == [s.cache.train.bytes for s in stage.sources if s.cache]
        assert stage.order.mixing.weights[1] > 3 * stage.order.mixing.weights[0]
    with pytest.raises(InputError, match=r"test_mixing_stages.made has no size in bytes; give it a number, or tokens"):
        opened(config_of({"mixture": [{"weight": "size", "source": "test_mixing_stages.made"}]}))


def made(sequence_length: int, seed: int) -> list[list[int]]:
    return [[0] * (sequence_length + 1)] * 9


def test_a_run_without_data_for_one_step_does_not_begin(files: dict[str, str]) -> None:
    with pytest.raises(InputError, match=r"no sample for a single step: 'a.npy' is exhausted after 0.1 epochs"):
        opened(config_of({"tokens": files["a"], "max_epochs": 0.1}, **VAL))


def test_a_dataset_of_several_paths_weighs_what_all_of_them_hold(files: dict[str, str]) -> None:
    parts = [{"weight": "tokens", "tokens": [files["a"], files["c"]]}, {"weight": "tokens", "tokens": {files["b"]: 1}}]
    with opened(config_of({"mixture": parts}, **VAL)) as data:
        assert data.stage_of(1).order.mixing.weights == pytest.approx([19, 9, 49])
    parts[0]["tokens"] = {files["a"]: 3, files["c"]: 1}
    with opened(config_of({"mixture": parts}, **VAL)) as data:
        assert data.stage_of(1).order.mixing.weights == pytest.approx([28 * 3 / 4, 28 / 4, 49])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 1e9, 1e-3])
def test_temperature_makes_shares_alike(files: dict[str, str], temperature: float) -> None:
    config = config_of(mixture(files, a=9, b=4, c=1), data__temperature=temperature, **VAL)
    (stage,) = plan_stages(config)
    found = stage.shares(lambda i, unit: 0)
    expected = np.array([9.0, 4.0, 1.0]) / 9
    expected = np.exp(np.log(expected) / temperature)
    assert np.array(found) / sum(found) == pytest.approx(expected / expected.sum(), rel=1e-9, abs=1e-12)


def test_a_later_stage_is_planned_by_sources_that_an_earlier_one_had_to_measure(files: dict[str, str]) -> None:
    first = mixture(files, a="tokens", b="tokens")
    config = config_of(first, {"dataset": {"tokens": files["a"]}, "start": 7}, train_steps=12, **VAL)
    given = counts(huffman([19, 49]), 24)[0]
    with opened(config) as through:
        whole = of(through, range(1, 13), "a")
    with open_run(config, 8, quiet) as data:  # resumed: the first stage was never asked for
        assert data.stage_of(8).order.mixing.offsets == (given,)
        assert of(data, range(8, 13), "a") == whole[given + BATCH :]
    assert sorted(whole[:19]) == list(range(19))


def test_a_resumed_run_does_not_wait_for_its_next_stage(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier stages and validation need is open before the next stage takes its time in the background."""
    begun, go_on, open_folder = threading.Event(), threading.Event(), token_files.open_folder

    def slow(wanted: Any, *rest: Any) -> Any:
        if wanted.path == files["c"]:
            begun.set()
            assert go_on.wait(60)
        return open_folder(wanted, *rest)

    monkeypatch.setattr(token_files, "open_folder", slow)
    later = [{"dataset": {"tokens": files[name]}, "start": start} for name, start in (("b", 7), ("c", 10))]
    values = {"train_steps": 12, "sequence_length": L, "arch__vocab_size": 4096, **VAL}
    config = run_config({"tokens": files["a"]}, *later, **values)
    said: list[Any] = []

    def resume() -> None:
        with open_run(config, 8, quiet) as data:
            assert begun.wait(60)
            said.extend([data.exhausted(8), len(list(data.validation())), len(data.batch(8))])
            go_on.set()
            said.append(len(data.batch(10)))

    thread = threading.Thread(target=resume, daemon=True)
    thread.start()
    thread.join(20)
    go_on.set()
    assert said == [None, 1, 2, 2]


def test_a_source_that_comes_again_with_other_windows_is_reported(files: dict[str, str]) -> None:
    alone = {"tokens": files["b"]}
    config = config_of(alone, {"dataset": alone, "start": 7, "length": 4}, train_steps=12, **VAL)
    with opened(config) as data:
        (line,) = [line for line in data.describe() if "is read again" in line]
        assert line.startswith("[stage 1] b.npy is read again with sequence length 4, not 8")
        assert data.consumption(12) == {"b.npy": (24 * L + 24 * 4, 24 / len(data.stage_of(7).sources[0]))}
    for again in (alone, {"tokens": f"{Path(files['b']).parent}/./b.npy"}):  # however the path is written
        with opened(config_of(alone, again, train_steps=12, **VAL)) as data:
            assert not [line for line in data.describe() if "is read again" in line]
            assert data.consumption(12) == {"b.npy": (48 * L, 48 / len(data.stage_of(7).sources[0]))}
    with opened(config_of(alone, alone | {"token_dtype": "uint16"}, train_steps=12, **VAL)) as data:
        assert [line for line in data.describe() if "is read again with dtype uint16, not None" in line]


def test_labels_are_as_short_as_tells_sources_apart() -> None:
    def labels(*paths: str) -> list[str]:
        return [s.label for s in plan_stages(config_of({"tokens": list(paths)}))[0].sources]

    assert labels("/data/code", "/data/prose") == ["code", "prose"]
    assert labels("/x/code/train", "/x/prose/train", "/x/web") == ["code/train", "prose/train", "web"]
    assert labels("/x/a", "/x/a") == ["a", "a-2"]
    assert labels("code", "x/code") == ["code", "x/code"]
