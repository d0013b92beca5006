"""`checkpoints`: when the run is saved, where, for how long, and from what it resumes."""

from __future__ import annotations

from typing import Annotated, Literal

from kenotron.config.section import NO_EFFECT, OURS, LocalPath, Section, key, upper_case


class Datastates(Section):
    """Settings of the DataStates engine (not supported yet)."""

    host_cache_size: int = key("Pinned host memory for checkpoints in flight, in GB.", ge=1)
    parser_threads: int = key("Threads that write.", ge=1)
    pin_host_cache: bool = key("Whether the host memory is pinned.")


class Checkpoints(Section):
    checkpoints_path: LocalPath = key("Folder of the run's checkpoints, one sub-folder a step.")
    checkpoint_interval: int = key("Steps between two checkpoints.", ge=1)
    save_initial_state: bool = key("Save a checkpoint `0` before the first step.", False)
    save_final_state: bool = key("Save a checkpoint after the last step.", True)
    resume_checkpoint_path: LocalPath | None = key(
        "Checkpoint, or folder of checkpoints, that a new run starts from (weights, optimizer, schedule, "
        "data position); a run that has checkpoints of its own continues from those.",
        None,
    )
    load_lr_scheduler: bool = key(
        "False: a run resumed by resume_checkpoint_path starts at step 0 with its data from the beginning.",
        True,
    )
    load_optimizer: bool = key("False: a resumed run starts with a fresh optimizer state.", True)
    checkpoints_path_is_shared_file_system: bool = key(
        "Whether all machines of a run see one folder; a run has one machine here.",
        False,
        mark=NO_EFFECT,
    )
    checkpointing_engine: Annotated[Literal["TORCH", "DATASTATES"], upper_case("TORCH")] = key(
        "What writes the tensors: torch.distributed.checkpoint, or DataStates (not supported yet).", "TORCH"
    )
    datastates: Datastates | None = key("Settings of the DataStates engine (not supported yet).", None)
    keep_last: int | None = key("Keep only this many of the newest checkpoints; null keeps all.", None, ge=1, mark=OURS)
    keep_every: int | None = key(
        "Of the checkpoints that keep_last would delete, keep those whose step is a multiple of this.",
        None,
        ge=1,
        mark=OURS,
    )
