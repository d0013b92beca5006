"""The streams of one run: their states after a step, and which rank reads which of their reader shards.

    states(step)   ─▶ stream-0-shard-0.json.gz, stream-0-shard-1.json.gz, …   beside a checkpoint's weights
    restore(step)  ◀─ the reader shards that a rank reads from there on, on any layout

Which samples of an indexed source come next is arithmetic; a stream's state has to be saved and restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kenotron.config.errors import InputError
from kenotron.data.batch import batch_places
from kenotron.data.open_stage import Sources
from kenotron.data.source import StreamSource
from kenotron.data.stage_plan import StagePlan


class RunStreams:
    """The streams of the `stages` of a run with this micro-batch; falsy where no stage has one."""

    def __init__(self, stages: Sequence[StagePlan], sources: Sources, micro_batch_size: int) -> None:
        self.stages, self._sources, self.micro_batch_size = stages, sources, micro_batch_size

    def __bool__(self) -> bool:
        return any(planned.spec.is_stream for stage in self.stages for planned in stage.sources)

    def states(self, step: int) -> dict[str, Callable[[], bytes]]:
        """Name → state after `step` of the reader shards that this process has there; each is made when it is called.

        All ranks together have every shard that gave a sample so far, of all streams that may be read from now on.
        """
        found: dict[str, Callable[[], bytes]] = {}
        for number, _, stream, drawn in self._read_from(step):
            for shard, state in stream.states(step, drawn).items():
                found[f"stream-{number}-shard-{shard}.json.gz"] = state
        return found

    def restore(self, step: int, read: Callable[[str], bytes | None], dp_rank: int, dp_size: int) -> None:
        """Continue the reader shards of this rank where `step` left them; `read` returns a state by its name.

        Raises InputError: a state is missing, or another stream's.
        """
        for number, key, stream, drawn in self._read_from(step):
            for shard in self._shards_read(key, stream, drawn, dp_rank, dp_size):
                name = f"stream-{number}-shard-{shard}.json.gz"
                if not stream.emitted_by(shard, drawn):
                    continue
                if (state := read(name)) is None:
                    raise InputError(
                        f"data/{name}: missing in the checkpoint of step {step}; without the state of the stream "
                        f"{stream.name} its data cannot continue: start over (--fresh), or set "
                        "checkpoints.load_mode: transfer to restart the data"
                    )
                stream.restore(step, drawn, shard, state, f"data/{name} of the checkpoint of step {step}")

    def shared_shards(self, stage: StagePlan, step: int, dp_size: int) -> Iterator[str]:
        """A line for every stream of `stage` that is tokenized on several ranks, for the steps from `step` on."""
        for number, planned in enumerate(stage.sources):
            if not isinstance(stream := self._sources.source(stage, number), StreamSource):
                continue
            drawn = self._drawn(step - 1)[planned.key]
            read = [self._shards_read(planned.key, stream, drawn, rank, dp_size) for rank in range(dp_size)]
            if sum(map(len, read)) > stream.shards:
                yield (
                    f"{stream.name}: several ranks read and tokenize the same reader shards; with "
                    f"{planned.at}.streaming.reader_shards = {self.micro_batch_size * dp_size} (micro batch x dp, "
                    f"now {stream.shards}) and no mixture every rank reads a part of its own"
                )

    def _read_from(self, step: int) -> Iterator[tuple[int, int, StreamSource, int]]:
        """Number, key, stream, and samples so far of every stream of the stage of `step` and later that was read."""
        drawn = self._drawn(step)
        for number, key in enumerate(drawn):
            for stage in self.stages:
                keys = [planned.key for planned in stage.sources]
                if stage.stop > step and key in keys and drawn[key]:
                    stream = self._sources.source(stage, keys.index(key))
                    assert isinstance(stream, StreamSource)
                    yield number, key, stream, drawn[key]
                    break

    def _drawn(self, step: int) -> dict[int, int]:
        """Key of every stream of the run, in the order of the stages → its samples in the steps up to `step`."""
        found: dict[int, int] = {}
        for stage in self.stages:
            for number, planned in enumerate(stage.sources):
                if planned.spec.is_stream:
                    found.setdefault(planned.key, 0)
                    if stage.start <= step:
                        found[planned.key] = self._sources.mixing(stage).drawn(stage.samples_before(step + 1))[number]
        return found

    def _shards_read(self, key: int, stream: StreamSource, drawn: int, dp_rank: int, dp_size: int) -> list[int]:
        """The reader shards that a rank reads from so many samples on: its own where batches are complete rounds."""
        shards, size = stream.shards, 0
        for stage in self.stages:
            if key in (planned.key for planned in stage.sources):
                sizes = [level.size for level in stage.levels]
                if len(stage.sources) > 1 or any(each % shards for each in sizes):
                    return list(range(shards))
                size = max(size, *sizes)
        places = batch_places(size, self.micro_batch_size, dp_rank, dp_size)
        return np.unique((drawn + places) % shards).tolist()
