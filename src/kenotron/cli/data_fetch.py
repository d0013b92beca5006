"""`kenotron data fetch CONFIG`: the datasets, tokenizers and models of a run, brought here beforehand.

kenotron data fetch my.yaml
HF_HUB_OFFLINE=1 kenotron data fetch my.yaml        # fetches nothing: is everything here?
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kenotron.cli.data import app

if TYPE_CHECKING:
    from kenotron.data.prepare.fetch import Found, Need


@app.command()
def fetch(
    config: Annotated[Path, typer.Argument(help="The YAML file of the run.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Keys to change: dotted.path=value.")] = None,
) -> None:
    """Bring everything that a run needs from the Hugging Face hub, and check that its local files are there."""
    from kenotron.config import load
    from kenotron.data.hub import settle_hub
    from kenotron.data.prepare.fetch import data_needs
    from kenotron.data.prepare.fetch import fetch as work

    run = load(config, overrides or ())
    settle_hub()
    needs = [*data_needs(run), *_model_needs(run)]
    found = work(needs, lambda line: print(line, file=sys.stderr, flush=True))
    for each in found:
        print(_line(each))
    remote = sum(each.need.kind == "remote" for each in found)
    later = f"; {remote} of its paths are read over the network while it trains" if remote else ""
    print(f"Ready: with HF_HUB_OFFLINE=1 the run asks nothing of the hub{later}")


def _model_needs(config: Any) -> Iterator[Need]:
    """The Hugging Face models that give the shapes or the first weights."""
    from kenotron.data.prepare.fetch import Need, path_need
    from kenotron.interop.hf_weights import find_config, is_hub_name, locate

    if name := getattr(config.model.architecture, "hf", None):
        key = "model.model_config.hf"
        yield Need("model", f"{name} (shapes)", key, lambda: [find_config(name)])
    if path := getattr(config.model.init_method, "path", None):
        key = "model.init_method.path"
        weights = Need("model", f"{path} (weights)", key, lambda: [f for f in locate(path).iterdir() if f.is_file()])
        yield weights if is_hub_name(path) else path_need(path, key)


def _line(found: Found) -> str:
    need = found.need
    if need.bring is None:
        told = f"{_bytes(found.size)}, read while training" if need.look else "your own, not looked at"
        return f"{need.kind} {need.name}: {told}"
    size = _bytes(found.size)
    if not found.brought:
        told = f"was here, {size}"
    elif found.brought < found.size:
        told = f"brought {_bytes(found.brought)} of {size}"
    else:
        told = f"brought {size}"
    return f"{need.kind} {need.name}: {told}, {found.place}"


def _bytes(size: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} TB"
