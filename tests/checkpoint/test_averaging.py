"""`kenotron checkpoint average`: the weights are float64's mean, and the result is a checkpoint like others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from kenotron.checkpoint import averaging, folders, manifest, saving
from kenotron.checkpoint.averaging import average
from kenotron.cli import main
from kenotron.config import InputError
from support.tiny_run import (
    equal_bits,
    exported,
    metrics,
    saved_weights,
    text_overrides,
    tiny_config,
    train_and_listen,
    train_quietly,
)


def run(folder: Path, *overrides: str) -> Any:
    folder.mkdir(exist_ok=True)
    config = tiny_config(folder, "checkpoints.checkpoint_interval=1", *overrides)
    train_quietly(config)
    return config


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints 1, 2 and 3 of a run."""
    folder = tmp_path_factory.mktemp("run")
    run(folder)
    return [folder / "checkpoints" / str(step) for step in (1, 2, 3)]


def expected(paths: list[Path], weights: list[float]) -> dict[str, torch.Tensor]:
    parts = [saved_weights(path) for path in paths]
    return {
        name: sum(w / sum(weights) * part[name].double() for w, part in zip(weights, parts)).float()  # type: ignore
        for name in parts[0]
    }


def command(*arguments: object) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", "average", *map(str, arguments)])
    assert not ended.value.code


@pytest.mark.parametrize("weights", [None, "1,2.5,0.5"])
def test_the_weights_are_the_mean_in_float64(
    weights: str | None, steps: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaging, "BLOCK", 100)  # a matrix is several blocks, and the last is smaller
    command(*steps, "--output", tmp_path / "mean", *(["--weights", weights] if weights else []))
    result = tmp_path / "mean" / "3"
    numbers = [float(each) for each in weights.split(",")] if weights else [1.0, 1.0, 1.0]
    assert equal_bits(saved_weights(result), expected(steps, numbers))
    assert folders.verify(result) == []
    found = manifest.read_manifest(result)
    assert not found.below("optimizer")
    shares = [each / sum(numbers) for each in numbers]
    assert [part["weight"] for part in found.state["averaged_from"]] == pytest.approx(shares)


def test_the_mean_of_bfloat16_is_rounded_once(tmp_path: Path) -> None:
    tensors = torch.randn(3, 100, generator=torch.Generator().manual_seed(0)).bfloat16()
    for step, (name, tensor) in enumerate(zip("abc", tensors)):
        saving.save(
            tmp_path / name,
            step,
            model={"w": tensor, "scalar": tensor[0], "seen": torch.tensor([7 * step])},
            optimizer=None,
            state={"hooks": {"spikes": {"seen": step}}},
            config_yaml="{}",
            model_config={},
        )
    path = average([tmp_path / name for name in "abc"], tmp_path / "mean").path
    found = saved_weights(path)
    exact = sum(tensor.double() / 3 for tensor in tensors)
    assert isinstance(exact, torch.Tensor)
    assert equal_bits({"w": found["w"].float()}, {"w": exact.bfloat16().float()})
    assert found["scalar"].dtype == torch.bfloat16
    assert float(found["scalar"]) == float(found["w"][0])
    assert found["seen"].tolist() == [14]  # a counter: the newest one's
    assert manifest.read_manifest(path).state["hooks"] == {}  # of another course of the loss


def test_the_average_is_generated_from_exported_and_trained_on(steps: list[Path], tmp_path: Path) -> None:
    from kenotron.generation.load import load_for_generation
    from kenotron.interop import to_hf

    average(steps[1:], tmp_path / "mean")
    wanted = expected(steps[1:], [1, 1])
    to_hf(tmp_path / "mean", tmp_path / "hf", dtype="float32")
    assert equal_bits(exported(tmp_path / "hf"), wanted)
    load_for_generation(tmp_path / "mean" / "3")
    source = f"checkpoints.resume_checkpoint_path={tmp_path}/mean"
    config = tiny_config(
        tmp_path / "new", source, "checkpoints.load_mode=model_only", "checkpoints.save_initial_state=true"
    )
    train_quietly(config)
    assert equal_bits(saved_weights(tmp_path / "new" / "checkpoints" / "0"), wanted)
    assert [step["iteration"] for step in metrics(config)] == [1, 2, 3]

    for mode in ("continue", "transfer"):
        again = tiny_config(tmp_path / mode, source, f"checkpoints.load_mode={mode}", "tokens.train_steps=9")
        with pytest.raises(
            InputError, match=r"mean/3 has no optimizer state; set a checkpoints.load_mode .* model_only"
        ):
            train_quietly(again)
    own = tiny_config(tmp_path, f"checkpoints.checkpoints_path={tmp_path}/mean", "tokens.train_steps=9")
    with pytest.raises(InputError, match=r"mean/3 is an average, which no run can continue; .*load_mode: model_only"):
        train_quietly(own)


def test_data_go_on_where_the_last_of_them_left_off(steps: list[Path], tmp_path: Path) -> None:
    average(steps, tmp_path / "mean")
    source = f"checkpoints.resume_checkpoint_path={tmp_path}/mean"
    _, said = train_and_listen(tiny_config(tmp_path / "new", source, "checkpoints.load_mode=model_data"))
    assert "Loaded weights, data position of" in said
    assert metrics(tiny_config(tmp_path / "new"))[0]["consumed_tokens"] == 4 * 4 * 16


def test_what_does_not_fit_is_one_line(steps: list[Path], tmp_path: Path) -> None:
    wide = run(tmp_path / "wide", "model.model_config.intermediate_size=32", "tokens.train_steps=1")
    text = [run(tmp_path / name, *text_overrides(tmp_path), "tokens.train_steps=1") for name in ("one", "other")]
    one, other = (Path(config.checkpoints.checkpoints_path) / "1" for config in text)
    (other / "tokenizer" / "tokenizer.json").write_text("{}")
    damaged = tmp_path / "damaged"
    shutil.copytree(steps[0], damaged)
    (file,) = (damaged / "model").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    output = tmp_path / "out"
    for paths, options, message in [
        ([steps[0]], {}, "expected two checkpoints or more to average, found 1"),
        (steps, {"weights": [1, 2]}, "weights: expected 3, one for each checkpoint, found 2"),
        (steps, {"weights": [1, 2, 0]}, "weights: expected numbers above 0, found 0"),
        (
            [steps[0], Path(wide.checkpoints.checkpoints_path)],
            {},
            "wide.* holds a different model .*intermediate_size is 32",
        ),
        ([one, other], {}, "other/checkpoints/1/tokenizer/tokenizer.json is damaged"),
        ([steps[0], one], {}, "holds a different model from .*: eos_token_id is 0, not 2"),
        ([steps[0], damaged], {}, f"{file.name} is damaged"),
        ([steps[0], tmp_path / "nowhere"], {}, "nowhere"),
    ]:
        with pytest.raises(InputError, match=message) as caught:
            average(paths, output, **options)  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
    assert not output.exists()
    with pytest.raises(InputError, match="holds checkpoints already"):
        average(steps, steps[0].parent)


def test_another_tokenizer_is_another_model(tmp_path: Path) -> None:
    def write(text: str) -> Any:
        return lambda folder: (folder / "tokenizer.json").write_text(text)

    for name in "ab":
        saving.save(
            tmp_path / name,
            1,
            model={"w": torch.ones(2)},
            optimizer=None,
            state={},
            config_yaml="{}",
            model_config={},
            save_tokenizer=write(name),
        )
    with pytest.raises(InputError, match=r"b/1 holds a different model from .*a/1: the hash of its tokenizer is"):
        average([tmp_path / "a", tmp_path / "b"], tmp_path / "mean")
