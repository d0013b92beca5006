"""`kenotron convert from-hf|to-hf|from-nanotron SRC DST`: convert models from and to other systems' files."""

from pathlib import Path
from typing import Annotated

import typer

from kenotron.cli.data import require_local
from kenotron.cli.remote import fetch_checkpoint
from kenotron.cli.sampling_options import Ema
from kenotron.cli.tables import progress_bar, to_stderr
from kenotron.config.errors import InputError, byte_size, no_such_path

app = typer.Typer(help="Convert models to and from Hugging Face's format, and nanotron's runs.", no_args_is_help=True)


@app.command("from-hf")
def from_hf(
    src: Annotated[str, typer.Argument(help="A Hugging Face folder, or a hub name (local cache first).")],
    dst: Annotated[Path, typer.Argument(help="New folder of checkpoints; the model becomes its checkpoint 0.")],
    family: Annotated[
        str | None, typer.Option(help="Your own model family to read it as, such as my_module.MyFamily.")
    ] = None,
) -> None:
    """Convert a Hugging Face model to a checkpoint."""
    from kenotron.checkpoint.model_files import find_config

    require_local(dst, "DST")
    find_config(src)
    from kenotron import interop  # imports torch

    with progress_bar("Reading") as progress:
        saved = interop.from_hf(src, dst, family=family, report=to_stderr, progress=progress)
    print(f"Wrote {saved.path}: {byte_size(saved.bytes)} in {saved.seconds:.1f} s")
    print(f'Next: kenotron generate {dst} --prompt "Once upon a time"')
    print(f"  or, in a config: model.model_config: {{hf: {src}}} and model.init_method: {{path: {dst}}}")


@app.command("to-hf")
def to_hf(
    src: Annotated[str, typer.Argument(help="A checkpoint, or a folder of checkpoints (its newest); also s3://….")],
    dst: Annotated[Path, typer.Argument(help="New folder for transformers to load.")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; default: the config's model.dtype.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Maximum size of a safetensors file.")] = "5GB",
    ema: Ema = False,
) -> None:
    """Convert a checkpoint to a folder that transformers loads."""
    from kenotron.checkpoint.folders import resolve

    require_local(dst, "DST")
    if dst.expanduser().absolute() == Path.cwd():
        raise InputError("DST: expected a new folder, found the current one")
    source = resolve(fetch_checkpoint(src).expanduser())
    from kenotron import interop  # imports torch

    with progress_bar("Writing") as progress:
        written = interop.to_hf(
            source, dst, dtype=dtype, max_shard_size=max_shard_size, ema=ema, report=to_stderr, progress=progress
        )
    files = f"{len(written.files)} files" if len(written.files) > 1 else written.files[0]
    print(f"Wrote {written.path}: {files}, {byte_size(written.bytes)} in {written.dtype}")
    print(f'Next: python -c "import transformers as t; print(t.AutoModelForCausalLM.from_pretrained({str(dst)!r}))"')


@app.command("from-nanotron")
def from_nanotron(
    src: Annotated[Path, typer.Argument(help="A checkpoint of nanotron, or a folder of checkpoints (its latest).")],
    dst: Annotated[Path, typer.Argument(help="New folder of checkpoints; the step keeps its number.")],
) -> None:
    """Convert a nanotron checkpoint (Llama or Qwen2) to one that a run resumes from: weights, optimizer, position."""
    require_local(dst, "DST")
    if not src.expanduser().exists():
        raise no_such_path("SRC", src)
    from kenotron import interop  # imports torch

    with progress_bar("Reading") as progress:
        saved = interop.from_nanotron(src, dst, report=to_stderr, progress=progress)
    print(f"Wrote {saved.path}: {byte_size(saved.bytes)} in {saved.seconds:.1f} s")
    print(f"Next: kenotron train {saved.path / 'config.yaml'}")
    print(f"  or, in a config of the same data_stages: checkpoints.resume_checkpoint_path: {saved.path}")
