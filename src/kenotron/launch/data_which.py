"""What a step of a run reads, from the data order alone."""

from dataclasses import asdict

from kenotron.checkpoint.folders import CheckpointFolder, resolve
from kenotron.checkpoint.restart import place_elsewhere
from kenotron.checkpoint.start import Start
from kenotron.config import Config
from kenotron.config.errors import InputError, counted
from kenotron.data import RunData
from kenotron.data.provenance import SampleOrigin, step_origins


def start_of(config: Config, saved: CheckpointFolder | None) -> Start:
    """Where the run begins that has `saved` this checkpoint: a restart may continue with its parent's data.

    A run that has saved none is about to begin, by the same rule as in training. Raises InputError if it cannot.
    """
    if saved is not None:
        return Start.at(saved.path, continues=True)
    if (named := config.resume_folder) is None:
        return Start.new(config)
    if "://" in (url := config.checkpoints.resume_checkpoint_path or "") and not named.exists():
        raise InputError(f"checkpoints.resume_checkpoint_path: {url} was not fetched yet; `kenotron train` fetches it")
    return place_elsewhere(config, resolve(named))


def of_step(data: RunData, step: int) -> tuple[dict[str, object], list[str]]:
    """What `step` reads: as a record, and as lines."""
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
    ranges = (f"{each.document} ({each.first_token}-{each.end_token - 1})" for each in origin.documents)
    return f"{line}, {'document' if len(origin.documents) == 1 else 'documents'} {', '.join(ranges)}"
