"""Save a checkpoint: write and sync everything in a temporary folder, then publish it by one rename.

    <root>/30.tmp-3f9c0a1b/   model/, optimizer/, tokenizer/, config.yaml, ...; manifest.json last
    <root>/30/                after the rename
    <root>/latest.txt         "30", last of all

Whenever a process is killed, folders in `root` with a final name are complete. A folder that was complete but not yet
renamed is not lost either: the next `tidy` renames it.
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
    from kenotron.checkpoint.tensors import Tensors
    from kenotron.checkpoint.write_plan import Planner

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

    Every rank calls it with its shards of `model` and `optimizer`; `state`, the texts and the tokenizer are rank 0's. A
    checkpoint of the same step is replaced once the new one is complete. If `root` differs between ranks, the ranks
    with the same root write a part of the checkpoint there, with its own manifest.

    Args:
        model: name → tensor, DTensor, or `TensorShard` (this rank's block of a tensor), any device.
        optimizer: the same, with the names of `optim.state.state_tensors`.
        state: counters, schedule and hook states: JSON values, with strings as keys.
        save_tokenizer: called with a new folder to put the tokenizer's files in.
        data: name → function that returns the content of `data/<name>`: the position in data of which the step does not
            tell it. The first rank that has a name writes the file. None on every rank if there are none.
        hooks: tensors in the states of hooks, like `model`; None on every rank if there are none.
        open_file: opens the files of tensors, `checkpoints.writer`.
        planner: the planner of earlier saves of the same run, so that their plan is reused.

    Raises:
        CheckpointError: the disk is full, permission is missing, or JSON cannot hold the state. Nothing of this save is
            left, and every checkpoint from before is untouched.
    """
    from kenotron.checkpoint.tensor_writer import write_files
    from kenotron.checkpoint.tensors import shards
    from kenotron.checkpoint.write_plan import Planner

    started = time.perf_counter()
    final = Path(root) / str(step)
    folders = zip(OF_TENSORS, (model, optimizer, hooks), strict=True)
    parts = {folder: shards(tensors) for folder, tensors in folders if tensors is not None}

    def begin() -> Path:
        plain(state, "state")  # fails before gigabytes are written
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
    """Take the folder's lock, clear leftovers, and create the temporary folder; `cleanup` undoes this.

    `commit` syncs the folders that are created here.
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
    """Return the records of all ranks in the order of manifests: small files, then the ranks' files by folder."""
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
    """Return the files besides tensors that this rank writes, by name; rank 0's include config and tokenizer.

    Files of `data` belong to the first rank that has them. All ranks call it.
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
    """Return the files that `save_tokenizer` writes, by their names in a checkpoint."""
    if save_tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {f"tokenizer/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in paths}


def write_small(temporary: Path, files: dict[str, bytes]) -> dict[str, FileRecord]:
    """Write the files of `small_files` and return their records."""
    records = {}
    for name, content in files.items():
        make_folder((temporary / name).parent)  # data/, tokenizer/ and what is in it
        records[name] = write_file(temporary / name, content)
    return records


def commit(temporary: Path, final: Path, state: dict[str, Any], files: dict[str, FileRecord]) -> int:
    """Sync the folders, write the manifest, and rename, after the last file. Return the checkpoint's bytes."""
    for folder in (path for path in temporary.rglob("*") if path.is_dir()):
        sync_folder(folder)
    manifest = Manifest(int(final.name), _now(final.parent), state, files)
    size = manifest.bytes + write_file(temporary / MANIFEST, render(manifest)).bytes
    sync_folder(temporary)
    publish(temporary, final)
    return size


def _now(root: Path) -> float:
    """Return seconds since 1970, but later than every save in `root`, even if the clock was set back."""
    times = [entry.manifest.saved_at for entry in list_checkpoints(root) if entry.manifest]
    return max([time.time(), *(saved_at + 0.001 for saved_at in times)])
