"""Saving: everything into a temporary folder, synced; then one rename makes it a checkpoint.

    <root>/30.tmp-3f9c0a1b/   model/, optimizer/, tokenizer/, config.yaml, ...; manifest.json last
    <root>/30/                after the rename
    <root>/latest.txt         "30", last of all

Whenever a process is killed, what is in `root` under its final name is complete. What was complete but not yet renamed
is not lost either: the next `tidy` renames it.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kenotron.checkpoint.durable import FileRecord, HashedFile, locked, make_folder, refusing, write_file
from kenotron.checkpoint.engine import Saved
from kenotron.checkpoint.file_writer import OpenFile
from kenotron.checkpoint.folders import list_checkpoints, publish, quiet
from kenotron.checkpoint.leftovers import clear_leftovers
from kenotron.checkpoint.manifest import MANIFEST, Manifest, plain, render
from kenotron.parallel.ranks import gather, gather_at, raise_on_any_rank, rank_and_size, ranks_with, run_on_first
from kenotron.storage.files import sync_folder, temporary_beside

if TYPE_CHECKING:
    from kenotron.checkpoint.plan import Planner
    from kenotron.checkpoint.tensors import Tensors

OF_TENSORS = ("model", "optimizer", "hooks")
"""The folders of a checkpoint that hold tensors; `save` has an argument for each."""


def save(
    root: Path | str,
    step: int,
    *,
    model: Tensors,
    optimizer: Tensors | None,
    state: dict[str, Any],
    config_yaml: str,
    model_config: dict[str, Any],
    save_tokenizer: Callable[[Path], None] | None = None,
    data: dict[str, Callable[[], bytes]] | None = None,
    hooks: Tensors | None = None,
    open_file: OpenFile = HashedFile,
    planner: Planner | None = None,
) -> Saved:
    """Write checkpoint `<root>/<step>`; it is complete and synced when this returns.

    Every rank calls it with its part of `model` and `optimizer`; `state`, the texts and the tokenizer are
    rank 0's. A checkpoint of the same step is replaced once the new one is complete. Where `root` differs between
    ranks, those with the same one write a part of the checkpoint there, with a manifest of its own.

    Args:
        model: name → tensor, DTensor, or `TensorShard` (this rank's block of a tensor), any device.
        optimizer: the same, as `optim.state.state_tensors` names them.
        state: counters, schedule and hook states: what JSON can hold, with text as keys.
        save_tokenizer: called with a new folder to put the tokenizer's files in.
        data: name → what makes the file `data/<name>`: the position in the data, if a step does not say it (any rank's;
            of those that have a name the first writes it). None on every rank: there are none.
        hooks: tensors in the states of hooks, as `model`; None on every rank: there are none.
        open_file: opens the files of tensors, `checkpoints.writer`.
        planner: of earlier saves of the same run, so that their plan is used again.

    Raises:
        CheckpointError: disk full, no permission, a state that JSON cannot hold. Nothing of this save is
            left, and every checkpoint from before is untouched.
    """
    from kenotron.checkpoint.plan import Planner
    from kenotron.checkpoint.tensor_writer import write_files
    from kenotron.checkpoint.tensors import shards

    started = time.perf_counter()
    final = Path(root) / str(step)
    given = zip(OF_TENSORS, (model, optimizer, hooks), strict=True)
    parts = {folder: shards(tensors) for folder, tensors in given if tensors is not None}

    def begin() -> Path:
        plain(state, "state")  # before gigabytes are written
        return begin_folder(final, list(parts), cleanup)

    with refusing("save", final), ExitStack() as cleanup:
        ranks = ranks_with(str(root))
        small = small_files(config_yaml, model_config, partial(tokenizer_files, save_tokenizer), data)
        temporary = run_on_first(ranks, begin)
        plan = (planner or Planner()).plan(parts)

        def write() -> dict[str, FileRecord]:
            return write_files(temporary, plan, parts, open_file) | write_small(temporary, small)

        files = in_order(gather_at(str(temporary), raise_on_any_rank(write)))
        size = run_on_first(ranks, lambda: commit(temporary, final, plain(state, "state"), files))
    return Saved(final, size, time.perf_counter() - started)


def begin_folder(final: Path, folders: list[str], cleanup: ExitStack) -> Path:
    """Take the folder's lock, clear leftovers, make the temporary folder; `cleanup` undoes what remains.

    What is made here is synced by `commit`.
    """
    make_folder(final.parent)
    if cleanup.enter_context(locked(final.parent)):
        clear_leftovers(final.parent, quiet)
    temporary = temporary_beside(final)
    cleanup.callback(shutil.rmtree, temporary, ignore_errors=True)
    for folder in (temporary, *(temporary / name for name in folders)):
        folder.mkdir()
    return temporary


def in_order(shares: list[dict[str, FileRecord]]) -> dict[str, FileRecord]:
    """The records of all ranks, as manifests list them: small files, then folder by folder those of each rank."""
    folders = (*OF_TENSORS, "data")
    merged = {name: record for name, record in shares[0].items() if name.split("/")[0] not in folders}
    for folder in folders:
        for share in shares:
            merged |= {name: record for name, record in share.items() if name.startswith(f"{folder}/")}
    return merged


def small_files(
    config_yaml: str,
    model_config: dict[str, Any],
    tokenizer: Callable[[], dict[str, bytes]],
    data: dict[str, Callable[[], bytes]] | None,
) -> dict[str, bytes]:
    """What this rank writes besides tensors, by name: rank 0 the config and the `tokenizer`'s files.

    Files of `data` are written by the first rank that has them. All ranks call it.
    """
    makers = data or {}
    others = [] if data is None else gather(list(makers))[: rank_and_size()[0]]
    written = {name for names in others for name in names}

    def make() -> dict[str, bytes]:
        small = {f"data/{name}": content() for name, content in makers.items() if name not in written}
        if rank_and_size()[0] == 0:
            config = json.dumps(plain(model_config, "model_config"), indent=2) + "\n"
            small |= {"config.yaml": config_yaml.encode(), "model_config.json": config.encode(), **tokenizer()}
        return small

    return raise_on_any_rank(make)


def tokenizer_files(save_tokenizer: Callable[[Path], None] | None) -> dict[str, bytes]:
    """What `save_tokenizer` puts into a folder, by its names in a checkpoint."""
    if save_tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {f"tokenizer/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


def write_small(temporary: Path, files: dict[str, bytes]) -> dict[str, FileRecord]:
    """Write the files of `small_files`; returns their records."""
    records = {}
    for name, content in files.items():
        make_folder((temporary / name).parent)  # data/, tokenizer/ and what is in it
        records[name] = write_file(temporary / name, content)
    return records


def commit(temporary: Path, final: Path, state: dict[str, Any], files: dict[str, FileRecord]) -> int:
    """After the last file: sync the folders, write the manifest, rename. Returns the checkpoint's bytes."""
    for folder in (path for path in temporary.rglob("*") if path.is_dir()):
        sync_folder(folder)
    manifest = Manifest(int(final.name), _now(final.parent), state, files)
    size = manifest.bytes + write_file(temporary / MANIFEST, render(manifest)).bytes
    sync_folder(temporary)
    publish(temporary, final)
    return size


def _now(root: Path) -> float:
    """Seconds since 1970, and later than every save in `root`, even if the clock was set back."""
    times = [entry.manifest.saved_at for entry in list_checkpoints(root) if entry.manifest]
    return max([time.time(), *(saved_at + 0.001 for saved_at in times)])
