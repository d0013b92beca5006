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
        """Compare the sources of the stage that comes first."""
        stage = run.data.stage_of(run.step + 1)
        counts = [len(source) for source in stage.sources]
        labels = [source.label for source in stage.stage.sources]
        found = gather((socket.gethostname(), counts))
        for rank, (machine, theirs) in enumerate(found):
            for label, one, first in zip(labels, theirs, found[0][1], strict=True):
                if one != first:
                    raise InputError(
                        f"data_stages: rank {rank} on {machine} has {one:,} samples of {label}, and rank 0 {first:,}"
                    )
