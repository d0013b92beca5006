"""Saving a run, finding it again, and going on exactly where it was.

What a checkpoint holds is a function of the run alone: tensors by name, and a few JSON numbers. The data
position is the step, randomness is counter-based, the schedule is arithmetic: there is no other state.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from pydantic import ValidationError
from torch import Tensor

from kenotron import checkpoint
from kenotron.checkpoint.ranks import on_first, together
from kenotron.config import Config, dump, same_run_difference
from kenotron.config.errors import InputError
from kenotron.config.runs import edited_stages, past_stage_difference
from kenotron.models import LanguageModel, named_parameters
from kenotron.models.initialization import Shard
from kenotron.optim.state import init_state, load_state_tensors, state_tensors
from kenotron.parallel import data as data_parallel
from kenotron.parallel.shards import shard_of
from kenotron.train import console
from kenotron.train.console import logger
from kenotron.train.guards import NonFiniteGuard, RunFailed
from kenotron.train.hooks import Hook

if TYPE_CHECKING:
    from kenotron.interop.hf_weights import Weights
    from kenotron.train.run import Run
    from kenotron.train.step import StepResult

READ_BYTES = 1 << 20  # of initial weights at once


class Checkpoints(Hook):
    """Saves every `checkpoint_interval` steps, at the end, and when the run is stopped; keeps what retention says."""

    def __init__(self) -> None:
        self.saved_step: int | None = None

    def on_train_start(self, run: Run) -> None:
        if run.step > 0:
            self.saved_step = run.step
        elif run.config.checkpoints.save_initial_state:
            self._save(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.step % run.config.checkpoints.checkpoint_interval == 0:
            self._save(run)

    def on_train_end(self, run: Run) -> None:
        wanted = run.config.checkpoints.save_final_state or run.stop_reason is not None
        if wanted and self.saved_step != run.step:
            self._save(run)

    def _save(self, run: Run) -> None:
        save(run)
        self.saved_step = run.step


def save(run: Run) -> Path:
    """Write the checkpoint of the current step; returns its folder. A save that fails is a run that failed."""
    settings = run.config.checkpoints
    root = Path(settings.checkpoints_path)
    if run.mesh.is_first:
        logger.warning("Saving checkpoint at %s", root / str(run.step))
    for module in run.roots:
        data_parallel.show_masters(module)
    try:
        saved = checkpoint.save(
            root,
            run.step,
            model=model_tensors(*run.parts),
            # Before its first update an optimizer has no state, and a fresh one is the same thing.
            optimizer=saved_form(state_tensors(named_parameters(*run.parts), run.optimizer), run.parts)
            if run.optimizer.state
            else None,
            state=_state(run),
            config_yaml=dump(_stamped(run)),
            model_config=run.config.model.architecture.model_dump(mode="json", by_alias=True),
            save_tokenizer=run.tokenizer.save if run.tokenizer is not None else None,
            data=run.data.streams.states(run.step) if run.data.streams else None,
        )
    except checkpoint.CheckpointError as error:
        raise RunFailed(f"step {run.step}: {error}; earlier checkpoints are as they were") from error
    logger.info("Saved checkpoint at %s: %s in %.2f s", saved.path, console.mebibytes(saved.bytes), saved.seconds)
    if not run.config.general.ignore_sanity_checks:
        _read_back(run, saved.path)
    run.call("on_save", saved.path)
    broken = any(isinstance(hook, NonFiniteGuard) and hook.in_a_row for hook in run.hooks)
    if settings.keep_last is not None and not broken:  # amid skipped steps the last good weights may be the oldest
        on_first(lambda: checkpoint.prune(root, keep_last=settings.keep_last, keep_every=settings.keep_every))
    return saved.path


def _read_back(run: Run, path: Path) -> None:
    """Prove the checkpoint whole while the ones before it are still there. Each rank reads a share of its files."""
    problems = checkpoint.verify_together(path)
    if problems:
        raise RunFailed(f"step {run.step}: {'; '.join(problems)}; earlier checkpoints are as they were")
    logger.info("Read back %s: it is whole", path)


def _state(run: Run) -> dict[str, Any]:
    return {
        "step": run.step,
        "consumed_tokens": run.consumed_tokens,
        "consumed_train_samples": run.consumed_samples,
        "data": run.data.fingerprints(),
        "hooks": {name: state for name, hook in named_hooks(run.hooks) if (state := hook.state_dict())},
    }


def named_hooks(hooks: Sequence[Hook]) -> Iterator[tuple[str, Hook]]:
    """Every hook by its class; a second one of the same class is ``package.Class#2``."""
    seen: Counter[str] = Counter()
    for hook in hooks:
        name = f"{type(hook).__module__}.{type(hook).__qualname__}"
        seen[name] += 1
        yield (name if seen[name] == 1 else f"{name}#{seen[name]}"), hook


def _stamped(run: Run) -> Config:
    """The config as saved: it tells how far the run was, as nanotron's does."""
    counters = {"step": run.step, "consumed_train_samples": run.consumed_samples}
    return run.config.model_copy(update={"general": run.config.general.model_copy(update=counters)})


def model_tensors(*parts: LanguageModel) -> dict[str, Shard]:
    """Parameter name → this rank's block of it, sharing its memory; vocabulary padding is left out."""
    return {name: _without_padding(name, parameter, parts[0]) for name, parameter in named_parameters(*parts)}


def saved_form(tensors: dict[str, Tensor], parts: Sequence[LanguageModel]) -> dict[str, Shard]:
    """Optimizer state ``state.<parameter>.<key>`` in the shapes that the parameters are saved in; shares memory."""
    names = [name for name, _ in named_parameters(*parts)]
    owners = {key: next((n for n in names if key.startswith(f"state.{n}.")), "") for key in tensors}
    return {key: _without_padding(owners[key], tensor, parts[0]) for key, tensor in tensors.items()}


def _without_padding(name: str, tensor: Tensor, model: LanguageModel) -> Shard:
    """The block of `tensor` that this rank holds; rows beyond the vocabulary, which depend on tp, cut from the block.

    50 tokens padded to 64 rows, over 4 ranks: 16, 16, 16 and 2 rows of a [50, hidden] tensor.
    """
    shard = shard_of(tensor.detach())
    rows = model.config.vocab_size
    if name not in model.vocab_parameters or len(shard.shape) != 2 or shard.shape[0] <= rows:
        return shard
    real = min(max(rows - shard.offset[0], 0), shard.tensor.shape[0])
    return Shard(shard.tensor[:real], (rows, shard.shape[1]), shard.offset)


@dataclass(frozen=True)
class Start:
    """Where a run begins: nowhere (path None), or at a checkpoint after its `step` steps.

    `continues`: the checkpoint is this very run's own.
    """

    path: Path | None = None
    continues: bool = False
    step: int = 0


@contextmanager
def own_folder(config: Config) -> Iterator[None]:
    """`checkpoints_path`, made and held until the run ends: two runs in it would write over each other's steps."""
    root = Path(config.checkpoints.checkpoints_path)

    def take() -> None:
        try:  # now, not after the first thousand steps
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"checkpoints.checkpoints_path: cannot make {root}: {error.strerror}") from error
        held.enter_context(checkpoint.in_use(root))

    with ExitStack() as held:
        on_first(take)
        yield


def choose_start(config: Config, fresh: bool) -> tuple[Config, Start]:
    """The checkpoint to begin from, and the config with the name that the run already had.

    The newest whole checkpoint in `checkpoints_path` goes first: it is the run's own. Then an explicit
    `resume_checkpoint_path`. Rank 0 looks and decides for all; all share the reading of checksums.
    """
    root = Path(config.checkpoints.checkpoints_path)

    def clear() -> None:
        checkpoint.tidy(root, logger.warning)  # may finish a save that was killed at its rename: before --fresh looks
        if fresh:
            _set_aside(root)

    on_first(clear)
    newest = checkpoint.newest_whole(root, logger.warning)
    return on_first(lambda: _start_at(config, newest))


def _start_at(config: Config, newest: Path | None) -> tuple[Config, Start]:
    if newest is not None:
        return _same_run(config, newest), Start(newest, True, _position(newest))
    explicit = config.checkpoints.resume_checkpoint_path
    if explicit is not None:
        path = checkpoint.resolve(Path(explicit))
        return config, _start_elsewhere(config, path)
    return config, Start()


def _position(path: Path) -> int:
    return checkpoint.read_manifest(path).step


def _start_elsewhere(config: Config, path: Path) -> Start:
    """A new run's start at the checkpoint that `resume_checkpoint_path` names."""
    if not config.checkpoints.load_lr_scheduler:
        return Start(path)
    step, steps = _position(path), config.tokens.train_steps
    if step >= steps:
        raise InputError(
            f"checkpoints.resume_checkpoint_path: {path} is at step {step} and tokens.train_steps is {steps}, so no "
            f"step is left; raise tokens.train_steps, or set checkpoints.load_lr_scheduler: false to start at step 0"
        )
    if (path / "config.yaml").exists():
        saved = yaml.safe_load((path / "config.yaml").read_text())
        if (difference := past_stage_difference(saved, config, step)) is not None:
            raise InputError(
                f"checkpoints.resume_checkpoint_path: {_past_stage(saved, path, step, difference)}, or set "
                f"checkpoints.load_lr_scheduler: false to start the data anew"
            )
    return Start(path, False, step)


def _set_aside(root: Path) -> None:
    """Nothing is lost by --fresh: earlier checkpoints only stop being this run's."""
    now = datetime.now().strftime("%Y%m%d_%H%M%S_%f")
    steps = [entry.path for entry in checkpoint.list_checkpoints(root)]
    if not steps:
        return
    aside = root / f"replaced-{now}"
    aside.mkdir()
    for path in [*steps, root / "latest.txt"]:
        if path.exists():
            path.rename(aside / path.name)
    logger.warning("--fresh: earlier checkpoints now stand in %s", aside)


def _same_run(config: Config, path: Path) -> Config:
    saved, step = yaml.safe_load((path / "config.yaml").read_text()), _position(path)
    try:
        difference = same_run_difference(saved, config, step)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"{path / 'config.yaml'}: {'.'.join(map(str, first['loc']))}: {first['msg']}; another version of kenotron "
            f"wrote it: go on with that one, or start over with --fresh"
        ) from error
    if difference is not None:
        key, old, new = difference
        if key.startswith("data_stages."):
            raise InputError(
                f"{_past_stage(saved, path, step, difference)}, start over with --fresh, or set another "
                f"checkpoints.checkpoints_path"
            )
        raise InputError(
            f"{path} belongs to another run: {key} is {old!r} there and {new!r} in this config; "
            f"put the old value back, start over with --fresh, or set another checkpoints.checkpoints_path"
        )
    if edited := edited_stages(saved, config, step):
        names = ", ".join(f"'{name}'" for name in edited)
        logger.warning("data_stages: from step %d on the run goes by other stages than %s: %s", step + 1, path, names)
    name = saved["general"]["run"]
    wanted = re.escape(config.general.run).replace("%date", r"\d{8}_\d{6}").replace("%jobid", r"\w+")
    if not re.fullmatch(wanted, name):
        logger.warning("general.run: a run that goes on keeps its name: %s, not %s", name, config.general.run)
    return config.model_copy(update={"general": config.general.model_copy(update={"run": name})})


def _past_stage(saved: dict[str, Any], path: Path, step: int, difference: tuple[str, Any, Any]) -> str:
    """A stage that has been trained on is not what it was."""
    key, old, new = difference
    if key.endswith("start_training_step"):
        what = (
            f"{key}: a stage begins at step {old or new} {'there and not' if old else 'not there but'} in this config"
        )
    else:
        stages = sorted(saved["data_stages"], key=lambda stage: stage["start_training_step"])
        name = stages[int(key.split(".")[1])]["name"]
        what = f"{key} of stage '{name}' is {old!r} there and {new!r} in this config"
    return (
        f"{path} is at step {step}, and stages that have begun by then stay what they were: {what}; put that back "
        f"(stages that begin later may be edited)"
    )


def restore(run: Run, start: Start) -> None:
    """Load what `start` names into a prepared run."""
    if start.path is None:
        logger.info("No checkpoint path provided.")
        return
    settings = run.config.checkpoints
    with_optimizer = (start.continues or settings.load_optimizer) and (start.path / "optimizer").is_dir()
    with_position = start.continues or settings.load_lr_scheduler
    moments = None
    if with_optimizer:
        init_state(run.optimizer)
        moments = state_tensors(named_parameters(*run.parts), run.optimizer)
    state = checkpoint.load(
        start.path,
        model=model_tensors(*run.parts),
        optimizer=None if moments is None else saved_form(moments, run.parts),
        verify=not start.continues,  # its own newest checkpoint was verified when it was found
    )
    on_first(lambda: _check_data(run, state.get("data", {}), start))
    if moments is not None:
        load_state_tensors(named_parameters(*run.parts), run.optimizer, moments)
    if run.pipeline is not None:
        run.pipeline.share_tied_weights()
    if with_position:
        run.step = start.step
        _check_position(run, state, start.path)
        _restore_streams(run, start.path)
        saved = state.get("hooks", {})  # an imported checkpoint has none
        for name, hook in named_hooks(run.hooks):
            if name in saved:
                hook.load_state_dict(saved[name])
    parts = ["weights"] + ["optimizer"] * with_optimizer + ["schedule and data position"] * with_position
    logger.info("Loaded %s of %s (step %d)", ", ".join(parts), start.path, _position(start.path))


def _check_data(run: Run, saved: dict[str, str], start: Start) -> None:
    """Other tokens under the same weights would be another language; other text is told, and goes on."""
    now = run.data.fingerprints()
    for name in sorted(saved.keys() & now.keys()):
        if saved[name] == now[name]:
            continue
        if name == "tokenizer" and start.continues:
            assert run.tokenizer is not None
            raise InputError(
                f"tokenizer: {run.tokenizer.name} (hash {now[name]}) is not the tokenizer of {start.path} (hash "
                f"{saved[name]}), which stands in {start.path}/tokenizer; put that one back, or start over with --fresh"
            )
        logger.warning("%s has changed since %s was saved: the run goes on with what it is now", name, start.path)


def _restore_streams(run: Run, path: Path) -> None:
    mesh = run.mesh
    if run.data.streams:
        together(
            lambda: run.data.streams.restore(
                run.step, partial(checkpoint.read_data, path), mesh.dp_rank, mesh.dp_degree
            )
        )


def _check_position(run: Run, state: dict[str, Any], path: Path) -> None:
    if run.consumed_samples != state.get("consumed_train_samples", 0):
        raise InputError(
            f"{path} has consumed {state['consumed_train_samples']} samples in {run.step} steps, but this config's "
            f"global batch of {run.config.global_batch_size} makes that {run.consumed_samples}; keep the global batch "
            f"size and its ramps, or set checkpoints.load_lr_scheduler: false to start the data anew"
        )


@torch.no_grad()
def load_initial_weights(parts: Sequence[LanguageModel], path: str) -> None:
    """`init_method: {path}`: the weights of a checkpoint or a Hugging Face model, and nothing else.

    Every rank reads its own blocks of them.
    """
    from kenotron.interop import initial_tensors

    config = parts[0].config
    on_first(lambda: len(initial_tensors(path, config)))  # fetched and checked once
    together(lambda: _copy_from(initial_tensors(path, config, verify=False), model_tensors(*parts), path))


def _copy_from(given: Weights, wanted: dict[str, Shard], path: str) -> None:
    missing = sorted(set(wanted) - set(given))
    if missing:
        raise InputError(f"model.init_method.path: {path} lacks {missing[0]!r} ({len(missing)} missing in all)")
    for name, shard in wanted.items():
        if given.stored(name).shape != shard.shape:
            raise InputError(
                f"model.init_method.path: {name} is {list(given.stored(name).shape)} in {path}, but the config makes "
                f"it {list(shard.shape)}"
            )
        for rows, part in _in_rows(shard.tensor):
            part.copy_(given.block(name, (shard.offset[0] + rows, *shard.offset[1:]), tuple(part.shape)))


def _in_rows(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(first row, some rows) after one another, few enough that a copy of them on their way is no memory."""
    at_once = max(1, READ_BYTES // max(1, tensor[:1].nbytes))
    for first in range(0, tensor.shape[0], at_once):
        yield first, tensor[first : first + at_once]
