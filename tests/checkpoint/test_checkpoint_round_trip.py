"""What was saved comes back bit by bit, through our reader and through readers that are not ours."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from kenotron.checkpoint.loading import load
from kenotron.checkpoint.manifest import read_manifest
from kenotron.checkpoint.reading import read_tensors
from kenotron.checkpoint.saving import save
from kenotron.config.errors import CheckpointError
from support.checkpoint_states import assert_same, empty_like, load_and_compare, save_step

DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all: NaNs with payloads, infinities, subnormals."""
    if dtype == torch.bool:
        return torch.randint(2, shape).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def save_plain(root: Path, step: int, model: dict, optimizer: dict | None = None, **kwargs) -> Path:
    arguments = {"state": {}, "config_yaml": "", "model_config": {}} | kwargs
    return save(root, step, model=model, optimizer=optimizer, **arguments).path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
        st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)),
        min_size=1,
        max_size=8,
    )
)
def test_tensors_of_every_dtype_and_shape_come_back_bit_by_bit(tmp_path: Path, wanted: dict) -> None:
    model = {name: random_bits(shape, dtype) for name, (shape, dtype) in wanted.items()}
    path = save_plain(tmp_path, 1, model)
    found = empty_like(model)
    load(path, model=found, optimizer=None)
    assert_same(found, model)
    assert_same(read_tensors(path), model)


def test_tensors_that_are_views_are_saved_as_they_look(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    model = {"transposed": base.t(), "column": base[:, 2], "every other": base[::2], "expanded": base[:1].expand(3, 6)}
    path = save_plain(tmp_path, 1, model)
    found = {name: torch.empty(value.shape) for name, value in model.items()}
    load(path, model=found, optimizer=None)
    assert_same(found, {name: value.contiguous() for name, value in model.items()})
    target = {"transposed": torch.empty(4, 6).t()} | {name: found[name] for name in list(model)[1:]}
    load(path, model=target, optimizer=None)
    assert torch.equal(target["transposed"], base.t())


def test_the_safetensors_library_reads_a_rank_file(tmp_path: Path) -> None:
    """It checks the format's rules itself: header length, no gaps, no overlaps."""
    model = {f"{dtype}": random_bits((3, 5), dtype) for dtype in DTYPES}
    model |= {"scalar": torch.tensor(3), "": torch.ones(0)}
    path = save_plain(tmp_path, 1, model)
    assert_same(load_file(path / "model" / "rank0.safetensors"), model)


def test_the_state_comes_back_equal(tmp_path: Path) -> None:
    state = {"consumed": 2**60, "rate": 0.1 + 0.2, "best": float("inf"), "name": 'Kénotron \u2028 "x"'}
    state["stages"] = [{"name": "a", "weights": (0.25, 0.75)}, None, True]
    path = save_plain(tmp_path, 3, {"w": torch.ones(1)}, state=state)
    loaded = load(path, model={"w": torch.zeros(1)}, optimizer=None)
    assert loaded == state | {"stages": [{"name": "a", "weights": [0.25, 0.75]}, None, True]}
    assert read_manifest(path).step == 3


def test_the_folder_holds_what_the_architecture_page_says(tmp_path: Path) -> None:
    saved = save_step(tmp_path / "deep" / "root", 10)
    files = {file.relative_to(saved.path).as_posix() for file in saved.path.rglob("*") if file.is_file()}
    expected = """manifest.json config.yaml model_config.json model/index.json model/rank0.safetensors
        optimizer/index.json optimizer/rank0.safetensors tokenizer/tokenizer.json"""
    assert files == set(expected.split())
    assert (saved.path / "config.yaml").read_text() == "general:\n  step: 10\n"
    assert json.loads((saved.path / "model_config.json").read_text()) == {"hidden_size": 32}
    assert (tmp_path / "deep" / "root" / "latest.txt").read_bytes() == b"10"
    assert saved.bytes == sum((saved.path / name).stat().st_size for name in files)
    assert saved.seconds > 0
    assert set(read_manifest(saved.path).files) == files - {"manifest.json"}


def test_a_foreign_folder_in_the_way_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "notes.txt").write_text("mine")
    with caplog.at_level("WARNING", "kenotron"):
        save_step(tmp_path, 10)
    assert load_and_compare(tmp_path / "10") == 10
    (aside,) = tmp_path.glob("10.replaced-*")
    assert (aside / "notes.txt").read_text() == "mine"
    assert aside.name in caplog.text


def test_saving_copies_no_tensor_that_is_contiguous_on_the_host(tmp_path: Path, monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tensor was cloned")

    model = {"w": torch.randn(1000, 10)}
    monkeypatch.setattr(torch.Tensor, "clone", refuse)
    from kenotron.checkpoint import tensor_writer

    assert tensor_writer._bytes_of(model["w"]).obj.ctypes.data == model["w"].data_ptr()
    save_plain(tmp_path, 1, model)


SHAPE = "'weight' has shape [2, 3] in the checkpoint"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wieght": torch.ones(2, 3), "b": torch.ones(4)}, "lacks 'wieght'; did you mean 'weight'?"),
        ({"weight": torch.ones(2, 3)}, "has 'b', which this run does not have"),
        ({"weight": torch.ones(3, 2), "b": torch.ones(4)}, f"{SHAPE} and [3, 2] in this run"),
        ({"weight": torch.ones(3, 2), "b": torch.ones(5)}, f"{SHAPE} and [3, 2] in this run, and 1 more"),
        (
            {"weight": torch.ones(2, 3).half(), "b": torch.ones(4)},
            "'weight' is float32 in the checkpoint and float16 in this run",
        ),
        ({"weight": torch.ones(2, 3, device="meta"), "b": torch.ones(4)}, "without memory"),
        ({"x": torch.ones(1), "y": torch.ones(1), "z": torch.ones(1)}, "lacks 'x' and 2 more"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_touched(tmp_path: Path, given: dict, message: str) -> None:
    path = save_plain(tmp_path, 1, {"weight": torch.zeros(2, 3), "b": torch.zeros(4)}, {"c": torch.zeros(1)})
    optimizer = {"c": torch.ones(1)}
    with pytest.raises(CheckpointError) as error:
        load(path, model=given, optimizer=optimizer)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert all(torch.all(value == 1) for value in given.values() if torch.is_tensor(value) and not value.is_meta)
    assert optimizer["c"] == 1


def test_a_checkpoint_without_optimizer_says_so(tmp_path: Path) -> None:
    path = save_plain(tmp_path, 1, {"w": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="was saved without optimizer"):
        load(path, model={"w": torch.zeros(1)}, optimizer={"s": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="no tensor 'W'"):
        read_tensors(path, ["W"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"hooks": {"guard": {"best": torch.tensor(1.0)}}}, "state.hooks.guard.best is torch.Tensor"),
        ({"steps": {10: "x"}}, "state.steps: key 10 is int"),
        ({"list": [1, {2, 3}]}, "state.list[1] is set"),
    ],
)
def test_a_state_that_json_would_change_is_refused_at_once(tmp_path: Path, state: dict, message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        save_plain(tmp_path / "root", 1, {"w": torch.zeros(1)}, state=state)
    assert message in str(error.value)
    assert not (tmp_path / "root").exists()
