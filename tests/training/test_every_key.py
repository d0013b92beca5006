"""Every key of the config does something: changing it changes what it should, or it is refused, or said to do nothing.

The table is in every_key.py; a key of the schema that stands in none of its lists fails here.
"""

import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kenotron.config import InputError, NotSupportedYet
from kenotron.config.schema import rows
from kenotron.config.section import EXPORT
from support import every_key, user_parts
from support.every_key import EXPORTED, HUB, OWN, REFUSED, ROWS, SAME, UNSERVED, Outcome
from support.family_keys import EXPORT_BASE
from support.hub_cache import TOKENIZER, make_tokenizer_repository, offline_environment
from support.key_runs import Runs
from support.layout_runs import SHORT
from support.nursery import Nursery
from support.reference_page import mark_of
from support.tiny_run import TEXTS, tiny_config, tiny_yaml, train_and_listen, train_quietly
from support.written_tokens import write_ds

SHORT_NAMES = {path.split(".")[1]: short for short, path in SHORT.items()}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DocumentSource, datasets, a tokenizer, a Hugging Face model and an earlier run, for the rows to name."""
    folder = tmp_path_factory.mktemp("shared")
    other = [text.upper() for text in TEXTS]
    for name, texts in (("a", TEXTS), ("b", other)):
        lines = [json.dumps({"text": text, "other": text[::-1]}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "lib").mkdir()
    for start in range(0, len(TEXTS), 12):
        (folder / "lib" / f"part{start}.py").write_text("".join(TEXTS[start : start + 12]))
    import datasets

    datasets.disable_progress_bars()
    for name, texts in (("rows", TEXTS), ("rows2", other)):
        columns = {"text": texts, "other": [text[::-1] for text in texts]}
        splits = {"train": datasets.Dataset.from_dict(columns), "test": datasets.Dataset.from_dict({"text": other})}
        datasets.DatasetDict(splits).save_to_disk(folder / name)
    for name, seed in (("ds/a", 0), ("ds/b", 1)):
        for file in range(3):
            ids = np.random.default_rng([seed, file]).integers(0, 64, 1200)
            write_ds(folder / name / f"{file}.ds", np.split(ids, range(7, 1200, 7)), tokenizer=None)
    # No upper byte is 0: that would be noticed where they are read as single bytes.
    np.random.default_rng(2).integers(256, 320, 3000).astype("<u2").tofile(folder / "raw.bin")
    from kenotron.text.byte_level_bpe import train_byte_level_bpe

    train_byte_level_bpe(TEXTS, 300).save(folder / "letters")
    (folder / "words").symlink_to(make_tokenizer_repository(folder / "hub home", "robot/words"))
    earlier = tiny_config(folder / "earlier", "checkpoints.checkpoint_interval=2", "general.seed=9")
    run = train_quietly(earlier)
    from kenotron.interop import to_hf

    to_hf(folder / "earlier" / "checkpoints" / str(run.step), folder / "hf", dtype="float32")
    return folder


@pytest.fixture(scope="module")
def runs(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        get_path = sysconfig.get_path  # the embedded corpus: a few files instead of Python's library
        ours = {"stdlib": str(shared / "lib")}
        patch.setattr(sysconfig, "get_path", lambda name, *more: ours.get(name) or get_path(name, *more))
        yield Runs(shared, lambda: tmp_path_factory.mktemp("run"))


@pytest.mark.parametrize("key", ROWS)
def test_changing_the_key_changes_what_it_should(key: str, runs: Runs) -> None:
    row = ROWS[key]
    assert runs.seen(row.differs, row.changed) != runs.seen(row.differs, row.base)


@pytest.mark.parametrize("differs", sorted({row.differs for row in ROWS.values()}, key=lambda f: f.__name__))
def test_what_the_rows_look_at_does_not_differ_by_itself(
    differs: Any, runs: Runs, shared: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two runs of one config look alike, otherwise the test above would mean nothing."""
    base = next(row.base for row in ROWS.values() if row.differs == differs)
    again = Runs(shared, lambda: tmp_path)
    folder = re.compile(rf"{re.escape(str(tmp_path_factory.getbasetemp()))}/\w+")
    one, other = (folder.sub("", str(each.seen(differs, base))) for each in (runs, again))
    assert one == other


@pytest.mark.parametrize("override", [*REFUSED.values(), *UNSERVED])
def test_what_no_code_serves_yet_is_refused_by_name(override: str, tmp_path: Path) -> None:
    with pytest.raises(NotSupportedYet) as caught:
        train_quietly(tiny_config(tmp_path, override))
    path = override.partition("=")[0]
    assert str(caught.value).removeprefix("not supported yet: ").startswith(path)
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("key", SAME)
def test_keys_of_an_axis_of_one_leave_the_run_as_it_is(key: str, runs: Runs) -> None:
    before, after = runs.trained(saved=True), runs.trained((SAME[key],), saved=True)
    for look in (every_key.final_weights, every_key.last_loss, every_key.tokens, every_key.checkpoints):
        assert look(after) == look(before), look.__name__


@pytest.fixture(scope="module")
def exported(runs: Runs) -> Callable[[Outcome], dict[str, Any]]:
    """The config.json of a run's last checkpoint, exported to Hugging Face."""
    from kenotron.interop import to_hf

    @cache
    def export(folder: Path) -> dict[str, Any]:
        to_hf(folder / "checkpoints" / "3", folder / "hf")
        return json.loads((folder / "hf" / "config.json").read_text())

    return lambda outcome: export(outcome.folder)


@pytest.mark.parametrize("key", EXPORTED)
def test_keys_for_the_export_leave_the_run_as_it_is(key: str, runs: Runs, exported: Any) -> None:
    base = EXPORT_BASE.get(key.split(".")[0], ())
    before, after = (runs.trained(overrides, saved=True) for overrides in (base, (*base, EXPORTED[key])))
    assert every_key.final_weights(after) == every_key.final_weights(before)
    name = key.split(".")[1]
    values = [exported(which).get(name) for which in (before, after)]
    assert values[0] != values[1]
    assert str(values[1]).lower() == EXPORTED[key].split("=")[1]


def test_every_key_of_the_schema_is_in_the_table() -> None:
    listed = {*ROWS, *REFUSED, *SAME, *EXPORTED, *OWN, *every_key.SECTIONS.split()}
    known = {f"{every_key.owner(row)}.{row.name}" for row in rows()}
    assert known - listed == set(), "keys without a row"
    assert listed - known == set(), "rows without a key"
    assert not (set(ROWS) & set(SAME)) | (set(ROWS) & set(REFUSED))
    marked = {f"{every_key.owner(row)}.{row.name}" for row in rows() if mark_of(row) == EXPORT}
    assert marked <= set(EXPORTED), "keys of the export without a value"


def test_the_tests_that_the_table_names_are_there_and_know_the_key() -> None:
    files = {path.name: path for path in Path(__file__).parents[1].rglob("test_*.py")}
    for key, file in OWN.items():
        text, name = files[file].read_text(), key.split(".")[1]
        short = SHORT_NAMES.get(name, name)  # "cp=2" in tests of layouts
        assert re.search(rf"\b{name}\b|[\" ]{short}=", text), key


# ---- keys whose effect is no number of a short run ---------------------------------------------------------


def test_compile_compiles_every_block_in_place(tmp_path: Path) -> None:
    import torch

    from kenotron.parallel.mesh import build_mesh
    from kenotron.training.model_parts import build_parts

    mesh = build_mesh({}, 1, "cpu")
    for wanted in ("false", "true"):
        (model,), _ = build_parts(tiny_config(tmp_path, f"model.compile={wanted}"), mesh, torch.device("cpu"))
        compiled = [block._compiled_call_impl is not None for block in model.model.layers.values()]
        assert compiled == [wanted == "true"] * 2
        assert all("_orig_mod" not in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("workers", [0, 3])
def test_loading_workers_are_threads_that_read_ahead(workers: int, tmp_path: Path) -> None:
    data = (f"num_loading_workers={workers}", "dataset={source: support.user_parts.Slow}")
    keys = (*(f"data_stages.0.data.{key}" for key in data), "general.hooks=[support.user_parts.Threads]")
    run = train_quietly(tiny_config(tmp_path, *keys, "tokens.train_steps=8"))
    (threads,) = (hook for hook in run.hooks if isinstance(hook, user_parts.Threads))
    assert threads.most == workers


@pytest.mark.slow
def test_a_tokenizer_revision_that_is_not_there_is_named(nursery: Nursery, hub_home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word1 word2 word3 " * 400)
    keys = (f"{every_key.DATASET}={{text_files: a.txt}}", "model.model_config.vocab_size=256")
    named = (f"tokenizer.tokenizer_name_or_path={TOKENIZER}", "tokenizer.tokenizer_revision=")
    given = {"folder": tmp_path, "env": offline_environment(hub_home)}
    finished = nursery.run("train", tiny_yaml(tmp_path), *keys, named[0], named[1] + "v9", **given)
    assert finished.code == 2
    assert TOKENIZER in finished.stderr
    finished = nursery.run("train", tiny_yaml(tmp_path), *keys, named[0], named[1] + "main", **given)
    assert (finished.code, finished.stderr) == (0, "")


def test_the_configuration_of_a_dataset_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import datasets

    asked: list[tuple[Any, ...]] = []

    def pretend(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments)
        return datasets.Dataset.from_dict({"text": TEXTS})

    monkeypatch.setattr(datasets, "load_dataset", pretend)
    monkeypatch.setattr("kenotron.storage.hub.unreachable", lambda: None)
    part = "{hf_dataset_or_datasets: someone/texts, hf_dataset_config_name: small}"
    train_quietly(tiny_config(tmp_path, f"{every_key.DATASET}={part}", *HUB[1:]))
    assert {arguments[:2] for arguments in asked} == {("someone/texts", "small")}


def test_a_tokenized_dataset_is_cached_unless_overwritten(shared: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("KENOTRON_CACHE", str(tmp_path / "cache"))
    said = []
    for number, overwrite in enumerate(("false", "false", "true")):
        for path in (tmp_path / "cache").glob("tokens/*"):
            os.utime(path, (0, 0))  # as if an earlier process had made it
        again = f"{every_key.DATASET}.dataset_overwrite_cache={overwrite}"
        config = tiny_config(tmp_path / str(number), *(text.replace("{folder}", str(shared)) for text in HUB), again)
        said.append(train_and_listen(config)[1].count("\ntokenized "))
    assert said == [1, 0, 1]


def test_tokenizing_takes_as_many_workers_as_are_asked_for(shared: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from kenotron.text import encode

    asked = []

    class Spy(encode.ThreadPoolExecutor):
        def __init__(self, workers: int) -> None:
            asked.append(workers)
            super().__init__(workers)

    monkeypatch.setattr(encode, "ThreadPoolExecutor", Spy)
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        monkeypatch.setenv("KENOTRON_CACHE", str(folder / "cache"))
        number = f"{every_key.DATASET}.dataset_processing_num_proc_per_process={workers}"
        train_quietly(tiny_config(folder, *(text.replace("{folder}", str(shared)) for text in HUB), number))
    assert asked == [3]  # one worker is the calling thread


def test_the_embedded_corpus_has_one_name_and_a_share_in_mixtures(tmp_path: Path) -> None:
    from kenotron.data.stage_plan import plan_stages

    with pytest.raises(InputError, match="python-stdlib"):
        tiny_config(tmp_path, f"{every_key.DATASET}={{corpus: python-stdlip}}", "tokenizer={train: {vocab_size: 300}}")
    weight = every_key.mixture("corpus: python-stdlib, max_epochs: 2.5", "source: support.user_parts.counting", (3, 1))
    config = tiny_config(tmp_path, weight, "tokenizer={train: {vocab_size: 300}}", "model.model_config.vocab_size=300")
    (stage,) = plan_stages(config)
    assert stage.shares(lambda number, unit: 0.0) == [3, 1]
    assert [source.max_epochs for source in stage.sources] == [2.5, None]
    best_fit = f"{every_key.DATASET}={{corpus: python-stdlib, packing: best_fit}}"
    packed = tiny_config(tmp_path, best_fit, *every_key.TEXT[1:])
    assert plan_stages(packed)[0].sources[0].spec.section.packing == "best_fit"


def test_in_fp32_gradients_are_in_fp32_whatever_the_key_says(runs: Runs) -> None:
    off = "optimizer.accumulate_grad_in_fp32=false"
    assert runs.seen(every_key.final_weights, (off,)) == runs.seen(every_key.final_weights)
