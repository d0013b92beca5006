"""`checkpoints`: when and where a run is saved, which checkpoints are kept, and what it resumes from."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, Tag, model_validator

from kenotron.config.section import NO_EFFECT, LocalPath, Section, by_rule, key, null_means, our_key, problem

# Gapetron's name of a load mode → the parts that a new run takes from the checkpoint that it starts from.
LOAD_MODES = {
    "continue": ("model", "optimizer", "data", "scheduler", "step"),
    "model_only": ("model",),
    "optimizer_only": ("optimizer",),
    "model_data": ("model", "data"),
    "model_opt_data": ("model", "optimizer", "data"),
    "transfer": ("model", "optimizer"),
    "transfer_with_lr": ("model", "optimizer", "scheduler", "step"),
    "cooldown": ("model", "optimizer", "data", "step"),
}
# nanotron's key → the parts of `continue` that it leaves out if it is false.
_NANOTRON = {"load_optimizer": {"optimizer"}, "load_lr_scheduler": {"data", "scheduler", "step"}}


def _mode_kind(value: Any) -> str | None:
    return "(mode)" if isinstance(value, str) else "(parts)" if isinstance(value, list | tuple) else None


LoadMode = Annotated[
    Annotated[Literal[*LOAD_MODES], Tag("(mode)")]  # type: ignore[valid-type]
    | Annotated[list[Literal["model", "optimizer", "data", "scheduler", "step"]], Field(min_length=1), Tag("(parts)")],
    by_rule(_mode_kind, f"{', '.join(LOAD_MODES)}, or a list of {', '.join(LOAD_MODES['continue'])}"),
]
EngineName = Annotated[str, null_means("torch"), AfterValidator(lambda name: name if "." in name else name.lower())]


class DataStates(Section):
    """Settings of the checkpointing engine `datastates`."""

    host_cache_size: float = key(
        "Host memory for copies that are not written yet, in GiB for each rank; a state beyond it waits for the disk.",
        16.0,
        gt=0,
    )
    parser_threads: int = key("Number of threads that copy.", 2, ge=1)
    pin_host_cache: bool = key(
        "Pin that memory, so that an accelerator copies to it asynchronously; no effect without one.", True
    )


class LocalCheckpoints(Section):
    """Frequent checkpoints in addition to those in checkpoints_path, from which a run resumes after a fault."""

    path: LocalPath = key(
        "Folder on the machine's own disk or in its memory (/dev/shm/kenotron), outside of checkpoints_path; each run "
        "has a subfolder there."
    )
    interval: int = key("Steps between local checkpoints; fewer than checkpoint_interval.", ge=1)


class Checkpoints(Section):
    """Saving and resuming."""

    checkpoints_path: LocalPath = key(
        "Folder of the run's checkpoints, with one subfolder per saved step; or the URL of a store that they are "
        "uploaded to while training continues (s3://, gs://, what fsspec writes to)."
    )
    staging_path: LocalPath | None = our_key(
        "Local folder where checkpoints are written and wait for their upload, if checkpoints_path is a URL; null: "
        "`remote` in logging.log_dir.",
        None,
    )
    remove_after_upload: bool = our_key(
        "Remove uploaded local checkpoints, except the newest while the run lasts; needs a URL as checkpoints_path.",
        False,
    )
    checkpoint_interval: int = key("Steps between checkpoints.", ge=1)
    save_initial_state: bool = key("Save checkpoint `0` before the first step.", False)
    save_final_state: bool = key("Save a checkpoint after the last step.", True)
    resume_checkpoint_path: LocalPath | None = key(
        "Checkpoint, or folder of checkpoints, local or a URL, that a new run starts from. A run that has its own "
        "checkpoints resumes from those.",
        None,
    )
    load_mode: LoadMode = our_key(
        "What a new run takes from resume_checkpoint_path: all (continue) or, by name or as a list, some of model "
        "(weights), optimizer (its state), data (position), scheduler (position) and step; the rest starts fresh.",
        "continue",
    )
    load_lr_scheduler: bool = key(
        "False: load_mode continue leaves out data, scheduler and step (as transfer does).", True
    )
    load_optimizer: bool = key("False: load_mode continue leaves out the optimizer.", True)
    checkpoints_path_is_shared_file_system: bool = key(
        "Whether all machines share the folder. A run on several needs this, and is refused if one does not see what "
        "another writes: after 15 seconds, or with true after two minutes, which slow NFS may need.",
        False,
    )
    keep_last: int | None = our_key("Keep only this many of the newest checkpoints; null: keep all.", None, ge=1)
    keep_every: int | None = our_key(
        "Also keep the checkpoints whose step is a multiple of this; used with keep_last.", None, ge=1
    )
    keep_best: bool = our_key(
        "Also keep the checkpoint whose validation loss is the lowest; used with keep_last.", False
    )
    local: LocalCheckpoints | None = our_key(
        "Frequent checkpoints on the machine's own disk or memory; the newest is kept until one in checkpoints_path is "
        "newer or the run ends.",
        None,
    )
    export_hf: bool = our_key(
        "Also write every checkpoint in Hugging Face's format: weights in model.dtype and the tokenizer, in its "
        "folder `hf`.",
        False,
    )
    checkpointing_engine: EngineName = key(
        "What writes checkpoints: `torch` (in the call), `async` (copies in the call, writes in the background), "
        "`datastates` (copies and writes in the background), or the dotted path or entry point of an engine.",
        "torch",
    )
    writer: str = our_key(
        "Writer of the tensor files: `python`; `native` (in C++, past the page cache); or the dotted path or entry "
        "point of a function of path and size.",
        "python",
    )
    datastates: Annotated[DataStates, null_means(DataStates())] = key(
        "Settings of the engine `datastates`.", DataStates()
    )

    def saves_at(self, step: int) -> bool:
        """Return whether a checkpoint, in checkpoints_path or local, is due after `step`."""
        intervals = [self.checkpoint_interval] + ([self.local.interval] if self.local else [])
        return any(step % interval == 0 for interval in intervals)

    @property
    def loads(self) -> frozenset[str]:
        """The parts of a checkpoint that a new run loads."""
        left_out = [parts for name, parts in _NANOTRON.items() if not getattr(self, name)]
        return self._mode_parts.difference(*left_out)

    @property
    def _mode_parts(self) -> frozenset[str]:
        return frozenset(LOAD_MODES[self.load_mode] if isinstance(self.load_mode, str) else self.load_mode)

    @model_validator(mode="after")
    def _check_load_mode(self) -> Self:
        if self.load_mode == "continue":
            return self
        if self.resume_checkpoint_path is None:
            raise problem("resume_checkpoint_path", "missing: checkpoints.load_mode needs it")
        for name, parts in _NANOTRON.items():
            if not getattr(self, name) and (both := sorted(parts & self._mode_parts)):
                raise problem("load_mode", f"{self.load_mode} has {both[0]}, but {name}: false; remove one of them")
        return self


class S3Upload(Section):
    """Upload of the checkpoints of a local `checkpoints_path`."""

    upload_s3_path: str = key("URL of the folder that checkpoints are uploaded to: s3://, or another store's.")
    remove_after_upload: bool = key("As checkpoints.remove_after_upload.")
    s5cmd_numworkers: int | None = key("Files that are uploaded at once; null: 2.", None, ge=1)
    s5cmd_concurrency: int | None = key("Parts of a file that are uploaded at once, to S3; null: 5.", None, ge=1)
    s5cmd_path: str | None = key("Path of s5cmd, which is not used.", None, mark=NO_EFFECT)
