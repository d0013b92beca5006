"""The engine `torch`: a save is complete when it returns, and training waits for all of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from kenotron.checkpoint import saving
from kenotron.checkpoint.engine import Engine, Keep, Saved, Unsaved
from kenotron.checkpoint.folders import check_together
from kenotron.checkpoint.manifest import read_manifest
from kenotron.checkpoint.retention import prune_if_possible
from kenotron.checkpoint.write_plan import Planner
from kenotron.config import Config
from kenotron.config.errors import CheckpointError
from kenotron.parallel.ranks import raise_on_any_rank, run_on_rank0


class SynchronousEngine(Engine):
    """Every rank writes its share in the call."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.planner = Planner()

    def save(self, root: Path, step: int, content: dict[str, Any], keep: Keep | None) -> list[Saved | Unsaved]:
        """Save, verify while the earlier checkpoints still exist, and prune."""
        saved = saving.save(root, step, **content, open_file=self.open_file, planner=self.planner)
        if self.verifies:
            files = raise_on_any_rank(lambda: read_manifest(saved.path)).files
            if problems := check_together(saved.path, files):
                raise CheckpointError("; ".join(problems))
        return [replace(saved, notes=run_on_rank0(lambda: prune_if_possible(root, keep)))]
