"""`kenotron data fetch CONFIG`: download the datasets, tokenizers and models of a run ahead of time.

kenotron data fetch my.yaml
HF_HUB_OFFLINE=1 kenotron data fetch my.yaml        # downloads nothing, checks that every file is cached
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kenotron.cli.data import app
from kenotron.cli.tables import to_stderr
from kenotron.config.errors import byte_size, counted

if TYPE_CHECKING:
    from kenotron.prepare.download import RequiredFile


@app.command()
def fetch(
    config: Annotated[Path, typer.Argument(help="The YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides: dotted.path=value.")] = None,
) -> None:
    """Download everything a run needs from the Hugging Face Hub, and check that its local files exist."""
    from kenotron.config import load
    from kenotron.prepare import download
    from kenotron.storage.hub import configure_hub

    run = load(config, overrides or ())
    configure_hub()
    requirements = [*download.data_requirements(run), *_model_requirements(run)]
    fetched = download.fetch(requirements, to_stderr)
    for item in fetched:
        place = "read during training" if item.required.kind == "remote" else item.place
        status = f"{byte_size(item.size)}, {place}" if item.required.files else "user code, not checked"
        print(f"{item.required.kind} {item.required.name}: {status}")
    remote = sum(item.required.kind == "remote" for item in fetched)
    later = f"; {counted(remote, 'path')} will be read over the network during training" if remote else ""
    print(f"Ready: the run can start offline (HF_HUB_OFFLINE=1){later}")


def _model_requirements(config: Any) -> Iterator[RequiredFile]:
    """Yield the Hugging Face models that provide the shapes or the initial weights."""
    from kenotron.checkpoint.hf_files import locate
    from kenotron.checkpoint.model_files import find_config, is_hub_name
    from kenotron.prepare.download import RequiredFile, required_path

    if name := getattr(config.model.architecture, "hf", None):
        yield RequiredFile("model", f"{name} (shapes)", "model.model_config.hf", lambda: [find_config(name)])
    if path := getattr(config.model.init_method, "path", None):
        key = "model.init_method.path"
        if is_hub_name(path):
            weights = f"{path} (weights)"
            yield RequiredFile("model", weights, key, lambda: [*filter(Path.is_file, locate(path).iterdir())])
        else:
            yield required_path(path, key)
