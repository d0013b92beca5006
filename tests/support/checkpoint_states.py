"""Small states to save: every element of every tensor is known from the step."""

from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from kenotron.checkpoint.durable import hash_file
from kenotron.checkpoint.engine import Saved
from kenotron.checkpoint.loading import load
from kenotron.checkpoint.manifest import Manifest, read_manifest, render
from kenotron.checkpoint.saving import save
from kenotron.cli.checkpoint import app
from kenotron.config import InputError


def weights(step: int, rows: int = 64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.embed_tokens.weight": torch.randn(rows, 32, generator=generator),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(32, 32, generator=generator).bfloat16(),
        "model.norm.weight": torch.full((32,), float(step)),
    }


def moments(step: int, rows: int = 64) -> dict[str, Any]:
    tensors = {f"state.{name}.exp_avg": value.float() * 0.5 for name, value in weights(step, rows).items()}
    return tensors | {"state.model.norm.weight.step": torch.tensor(float(step))}


def run_command(*arguments: object) -> tuple[int, str]:
    """Exit code and stdout of `kenotron checkpoint <arguments>`, called in this process; its InputError is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, InputError):
        raise result.exception
    return result.exit_code, result.stdout


def save_step(root: Path, step: int, rows: int = 64, seed: int | None = None, **kwargs: Any) -> Saved:
    """Save the state of `step` (with the numbers of `seed`, default the step's own)."""
    seed = step if seed is None else seed
    return save(
        root,
        step,
        model=weights(seed, rows),
        optimizer=moments(seed, rows),
        state={"step": step, "seed": seed, "consumed_tokens": 512 * step},
        config_yaml=f"general:\n  step: {step}\n",
        model_config={"hidden_size": 32},
        save_tokenizer=write_tokenizer,
        **kwargs,
    )


def write_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')


def empty_like(tensors: dict[str, Any]) -> dict[str, Any]:
    """Room for `tensors`, filled with nonsense."""
    return {name: torch.full_like(value, 7) for name, value in tensors.items()}


def load_and_compare(path: Path, rows: int = 64) -> int:
    """Load the checkpoint, check every bit against what its step must hold, and return the seed it was made of."""
    model, optimizer = empty_like(weights(0, rows)), empty_like(moments(0, rows))
    state = load(path, model=model, optimizer=optimizer)
    assert state["step"] == int(path.name)
    assert_same(model, weights(state["seed"], rows))
    assert_same(optimizer, moments(state["seed"], rows))
    return state["seed"]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(bits(found[name]), bits(value)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def flip_a_byte(file: Any, place: int = -1) -> Any:
    """Change one bit of a file, or of an object in memory: at its end it is a tensor's, and only its checksum tells."""
    content = bytearray(file.read_bytes() if isinstance(file, Path) else file.getvalue())
    content[place] ^= 1
    if isinstance(file, Path):
        file.write_bytes(content)
    else:
        file.getbuffer()[:] = content
    return file


def forge(path: Path, name: str, data: bytes) -> None:
    """Replace a file and write a manifest that vouches for it: someone means it."""
    (path / name).write_bytes(data)
    manifest = read_manifest(path)
    files = manifest.files | {name: hash_file(path / name)}
    (path / "manifest.json").write_bytes(render(Manifest(manifest.step, manifest.saved_at, manifest.state, files)))
