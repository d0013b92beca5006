"""The streams of one run: their states after a step, and who of the ranks reads which of their lanes.

    states(step)   ─▶ stream-0-lane-0.json.gz, stream-0-lane-1.json.gz, …   beside a checkpoint's weights
    restore(step)  ◀─ the lanes that a rank reads from there on, on any layout

What an indexed source gives next is arithmetic; a stream has to be put down and taken up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from kenotron.config.errors import InputError

from .batch import batch_places
from .plan import Stage, streams
from .stages import Sources
from .stream import Stream


class RunStreams:
    """The streams of the `stages` of a run with this micro-batch; falsy where no stage has one."""

    def __init__(self, stages: Sequence[Stage], sources: Sources, micro_batch_size: int) -> None:
        self.stages, self._sources, self.micro_batch_size = stages, sources, micro_batch_size

    def __bool__(self) -> bool:
        return any(streams(planned.dataset) for stage in self.stages for planned in stage.sources)

    def states(self, step: int) -> dict[str, Callable[[], bytes]]:
        """Name → state after `step` of the lanes that this process has there; each is made when it is called.

        All ranks together have every lane that gave a sample so far, of all streams that may be read from now on.
        """
        found: dict[str, Callable[[], bytes]] = {}
        for number, stream, draws in self._read_from(step):
            for lane, place in stream.places_after(step, draws).items():
                found[f"stream-{number}-lane-{lane}.json.gz"] = partial(stream.to_bytes, lane, place)
        return found

    def restore(self, step: int, read: Callable[[str], bytes | None], dp_rank: int, dp_size: int) -> None:
        """Put the lanes that this rank reads down where `step` left them; `read` gives a state by its name.

        Errors (InputError): a state is missing, or another stream's.
        """
        for number, stream, draws in self._read_from(step):
            for lane in self._lanes_read(stream, draws, dp_rank, dp_size):
                name = f"stream-{number}-lane-{lane}.json.gz"
                if not stream.given_by(lane, draws):
                    continue
                if (data := read(name)) is None:
                    raise InputError(
                        f"data/{name}: missing in the checkpoint of step {step}; without the state of the stream "
                        f"{stream.name} its data cannot go on: start over (--fresh), or set "
                        "checkpoints.load_lr_scheduler: false to start them anew"
                    )
                stream.restore(step, draws, lane, data, f"data/{name} of the checkpoint of step {step}")

    def shared_lanes(self, stage: Stage, step: int, dp_size: int) -> Iterator[str]:
        """A line for every stream of `stage` that is tokenized on several ranks, for the steps from `step` on."""
        for number, planned in enumerate(stage.sources):
            if (stream := self._sources.source(stage, number).stream) is None:
                continue
            draws = self._drawn(step - 1)[stream.key]
            read = [self._lanes_read(stream, draws, rank, dp_size) for rank in range(dp_size)]
            if sum(map(len, read)) > stream.rules.lanes:
                yield (
                    f"{stream.name}: several ranks read the same lanes, and tokenize them each for itself; with "
                    f"{planned.at}.streaming.lanes = {self.micro_batch_size * dp_size} (micro batch x dp, "
                    f"now {stream.rules.lanes}) and no mixture every rank reads a part of its own"
                )

    def _read_from(self, step: int) -> Iterator[tuple[int, Stream, int]]:
        """Number, stream, and samples so far of every stream of the stage of `step` and later ones that was read."""
        drawn = self._drawn(step)
        for number, key in enumerate(drawn):
            for stage in self.stages:
                keys = [planned.key for planned in stage.sources]
                if stage.stop > step and key in keys and drawn[key]:
                    stream = self._sources.source(stage, keys.index(key)).stream
                    assert stream is not None
                    yield number, stream, drawn[key]
                    break

    def _drawn(self, step: int) -> dict[int, int]:
        """Key of every stream of the run, in the order of the stages → its samples in the steps up to `step`."""
        found: dict[int, int] = {}
        for stage in self.stages:
            for number, planned in enumerate(stage.sources):
                if streams(planned.dataset):
                    found.setdefault(planned.key, 0)
                    if stage.start <= step:
                        found[planned.key] = self._sources.mixing(stage).given(stage.samples_before(step + 1))[number]
        return found

    def _lanes_read(self, stream: Stream, draws: int, dp_rank: int, dp_size: int) -> list[int]:
        """The lanes that a rank reads from so many samples on: its own where batches are whole rounds, else all."""
        lanes, size = stream.rules.lanes, 0
        for stage in self.stages:
            if stream.key in (planned.key for planned in stage.sources):
                sizes = [level.size for level in stage.levels]
                if len(stage.sources) > 1 or any(each % lanes for each in sizes):
                    return list(range(lanes))
                size = max(size, *sizes)
        places = batch_places(size, self.micro_batch_size, dp_rank, dp_size)
        return np.unique((draws + places) % lanes).tolist()
