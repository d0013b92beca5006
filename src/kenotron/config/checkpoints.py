"""`checkpoints`: when and where a run is saved, which checkpoints are kept, and what it resumes from."""

from __future__ import annotations

from kenotron.config.section import NO_EFFECT, OURS, LocalPath, Section, key


class Checkpoints(Section):
    """Saving and resuming."""

    checkpoints_path: LocalPath = key("Folder of the run's checkpoints, with one subfolder per saved step.")
    checkpoint_interval: int = key("Steps between checkpoints.", ge=1)
    save_initial_state: bool = key("Save checkpoint `0` before the first step.", False)
    save_final_state: bool = key("Save a checkpoint after the last step.", True)
    resume_checkpoint_path: LocalPath | None = key(
        "Checkpoint, or folder of checkpoints, that a new run starts from (weights, optimizer, schedule, data "
        "position). A run that has its own checkpoints resumes from those.",
        None,
    )
    load_lr_scheduler: bool = key(
        "False: a run started from resume_checkpoint_path begins at step 0, with its data from the beginning.",
        True,
    )
    load_optimizer: bool = key(
        "False: a run started from resume_checkpoint_path begins with a fresh optimizer state.", True
    )
    checkpoints_path_is_shared_file_system: bool = key(
        "Whether all machines share the folder; runs on several machines are not supported yet.",
        False,
        mark=NO_EFFECT,
    )
    keep_last: int | None = key("Keep only this many of the newest checkpoints; null: keep all.", None, ge=1, mark=OURS)
    keep_every: int | None = key(
        "Also keep the checkpoints whose step is a multiple of this; used with keep_last.",
        None,
        ge=1,
        mark=OURS,
    )
    export_hf: bool = key(
        "Write every checkpoint for Hugging Face's transformers, too: weights in model.dtype and the tokenizer, in its "
        "folder `hf`.",
        False,
        mark=OURS,
    )
