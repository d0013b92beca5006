"""Save and restore the states of a run's streams.

    states(step)   ─▶ stream-0-shard-0.json.gz, stream-1-shard-0.json.gz, …   beside a checkpoint's weights
    restore(step)  ◀─ the same, on any layout

The next samples of an indexed source can be computed; a stream's state has to be saved and restored.
"""

from collections.abc import Callable, Iterator, Sequence

from kenotron.config.errors import InputError
from kenotron.data.open_stage import Sources
from kenotron.data.source import StreamSource
from kenotron.data.stage_plan import StagePlan

NAME = "stream-{}-shard-0.json.gz"
"""The file name of a stream's state, with the stream's number."""


class RunStreams:
    """The streams of the `stages` of a run; falsy if no stage has one."""

    def __init__(self, stages: Sequence[StagePlan], sources: Sources) -> None:
        self.stages, self._sources = stages, sources

    def __bool__(self) -> bool:
        return any(planned.spec.is_stream for stage in self.stages for planned in stage.sources)

    def states(self, step: int) -> dict[str, Callable[[], bytes]]:
        """Return name → function for the state after `step`, for streams that were read and may be read again."""
        found: dict[str, Callable[[], bytes]] = {}
        for number, stream, drawn in self._read_from(step):
            if (state := stream.state(step, drawn)) is not None:
                found[NAME.format(number)] = state
        return found

    def restore(self, step: int, read: Callable[[str], bytes | None]) -> None:
        """Continue the streams from the end of `step`; `read` returns a state by its name.

        Raises InputError if a state is missing or belongs to another stream.
        """
        for number, stream, drawn in self._read_from(step):
            name = NAME.format(number)
            if (state := read(name)) is None:
                raise InputError(
                    f"data/{name}: missing in the checkpoint of step {step}; without the state of the stream "
                    f"{stream.name} its data cannot continue: start over (--fresh), or set "
                    "checkpoints.load_mode: transfer to restart the data"
                )
            stream.restore(step, drawn, state, f"data/{name} of the checkpoint of step {step}")

    def _read_from(self, step: int) -> Iterator[tuple[int, StreamSource, int]]:
        """Yield (number, stream, samples so far) of every stream that was read, from the stage of `step` on."""
        drawn = self._drawn(step)
        for number, key in enumerate(drawn):
            for stage in self.stages:
                keys = [planned.key for planned in stage.sources]
                if stage.stop > step and key in keys and drawn[key]:
                    stream = self._sources.source(stage, keys.index(key))
                    assert isinstance(stream, StreamSource)
                    yield number, stream, drawn[key]
                    break

    def _drawn(self, step: int) -> dict[int, int]:
        """Return key → samples in the steps up to `step` for every stream of the run, in the order of the stages."""
        found: dict[int, int] = {}
        for stage in self.stages:
            for number, planned in enumerate(stage.sources):
                if planned.spec.is_stream:
                    found.setdefault(planned.key, 0)
                    if stage.start <= step:
                        found[planned.key] = self._sources.mixing(stage).drawn(stage.samples_before(step + 1))[number]
        return found
