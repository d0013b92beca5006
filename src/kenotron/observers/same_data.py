"""Whether all ranks read the same data: machines may have copies of the files of their own, and one may be old or cut.

    data_stages: rank 8 on node2 has 9,000 samples of tokens/web, and rank 0 50,000

Samples are counted, not compared.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from kenotron.config.errors import InputError
from kenotron.parallel.ranks import gather
from kenotron.training.hooks import Hook

if TYPE_CHECKING:
    from kenotron.training.run import Run


class SameData(Hook):
    """See the module; on all ranks."""

    def on_train_start(self, run: Run) -> None:
        """Compare the sources of the stage that comes first, and those of validation."""
        stage = run.data.stage_of(run.step + 1)
        own = [("data_stages", each.label, len(source)) for each, source in zip(stage.stage.sources, stage.sources)]
        if run.config.tokens.validates:
            own += [("validation", each.label, len(source.held_out)) for each, source in run.data.validated]
        found = gather((socket.gethostname(), [count for _, _, count in own]))
        for rank, (machine, theirs) in enumerate(found):
            for (key, label, _), one, first in zip(own, theirs, found[0][1], strict=True):
                if one != first:
                    raise InputError(
                        f"{key}: rank {rank} on {machine} has {one:,} samples of {label}, and rank 0 {first:,}"
                    )
