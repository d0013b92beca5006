"""Find the samples that a step of a run reads, from the data order alone."""

from dataclasses import asdict

from kenotron.checkpoint.folders import CheckpointFolder, resolve
from kenotron.checkpoint.restart import place_elsewhere
from kenotron.checkpoint.start import Start
from kenotron.config import Config
from kenotron.config.errors import InputError, counted
from kenotron.data import RunData
from kenotron.data.provenance import SampleOrigin, step_origins


def start_of(config: Config, saved: CheckpointFolder | None) -> Start:
    """Return the start of the run, which `saved` this checkpoint; a restart may continue with its parent's data.

    Without a checkpoint, return the start that training would choose. Raises InputError if there is none.
    """
    if saved is not None:
        return Start.at(saved.path, continues=True)
    folder, url = config.resume_folder, config.checkpoints.resume_checkpoint_path or ""
    if folder is None:
        return Start.new(config)
    if "://" in url and not folder.exists():
        raise InputError(f"checkpoints.resume_checkpoint_path: {url} was not fetched yet; `kenotron train` fetches it")
    return place_elsewhere(config, resolve(folder))


def describe_step(data: RunData, step: int) -> tuple[dict[str, object], list[str]]:
    """Return the samples that `step` reads, as a record and as lines."""
    stage, origins = data.stage_at(step).name, step_origins(data, step)
    head = f"step {step} of stage '{stage}': {counted(len(origins), 'sample')}"
    record = {"step": step, "stage": stage, "samples": [asdict(origin) for origin in origins]}
    return record, [head, *map(_line, origins)]


def _line(origin: SampleOrigin) -> str:
    head = f"sample {origin.sample}: "
    if origin.pieces is not None:
        parts = (f"{p.file} document {p.document} ({p.first_token}-{p.end_token - 1})" for p in origin.pieces)
        return f"{head}row {origin.index} of {origin.source}: {', '.join(parts)}"
    if origin.file is None or origin.first_token is None or origin.end_token is None:
        return f"{head}{origin.source}[{origin.index}]{', of a stream: documents not known' if origin.stream else ''}"
    line = f"{head}{origin.file} window {origin.window}, tokens {origin.first_token}-{origin.end_token - 1}"
    if origin.documents is None:
        return f"{line}, documents not known"
    ranges = (f"{part.document} ({part.first_token}-{part.end_token - 1})" for part in origin.documents)
    return f"{line}, {'document' if len(origin.documents) == 1 else 'documents'} {', '.join(ranges)}"
