"""What a run says on the console, in the form that log parsers of nanotron know.

    08/31/2024 14:37:31 [INFO|DP=0|PP=0|TP=0]: iteration: 5 / 15 | consumed_tokens: 2.56K | … | lm_loss: 5.27

Numbers are for people (`human_format`); ``metrics.jsonl`` has them raw.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh

logger = logging.getLogger("kenotron")


def log_folder(config: Config) -> Path:
    """Where a run writes down what it was like."""
    return Path(config.logging.log_dir) / config.general.run


def human_format(number: float) -> str:
    """Three significant digits and a suffix: 2840 → 2.84K, 11.13 → 11.1, 0.000264 → 0.000264, 11.0 → 11."""
    if abs(number) < 1 or number != number or abs(number) == float("inf"):
        return f"{number:.3g}"
    value = float(f"{number:.3g}")
    for suffix in ("", "K", "M", "G", "T", "P"):
        if abs(value) < 1000 or suffix == "P":
            break
        value /= 1000
    return f"{value:f}".rstrip("0").rstrip(".") + suffix


def start_logging(config: Config, mesh: Mesh) -> None:
    """Log lines of this rank: `log_level` on rank 0, `log_level_replica` on the others.

    What the ranks say of the run is the same on all of them. Another rank than the first therefore speaks freely only
    in a log file of its own, which our launcher gives it; on a console that all of them share (torchrun's) it shows
    errors alone, unless `log_level_replica` is debug.
    """
    level = config.logging.log_level if mesh.is_first else config.logging.log_level_replica
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    handler = _Stdout()
    node = os.environ.get("SLURMD_NODENAME")
    place = f"DP={mesh.dp_rank}|PP={mesh.rank('pp')}|TP={mesh.rank('tp')}" + (f"|{node}" if node else "")
    prefix = "%(asctime)s [%(levelname)s|" + place + "]: "
    handler.setFormatter(_EveryLine(prefix, datefmt="%m/%d/%Y %H:%M:%S"))
    shared = not mesh.is_first and "KENOTRON_LAUNCH" not in os.environ
    if shared and level != "debug":
        handler.setLevel(logging.ERROR)
    logger.addHandler(handler)
    logger.propagate = False
    if level != "passive":  # passive: leave the level as whoever embeds us set it
        logger.setLevel(level.upper())


class _Stdout(logging.StreamHandler[Any]):
    """Writes to what `sys.stdout` is at the moment: a progress bar takes its place, to keep below the lines."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout


class _EveryLine(logging.Formatter):
    """The prefix before every line of a message, so that `grep` keeps a block together."""

    def __init__(self, prefix: str, datefmt: str) -> None:
        super().__init__(prefix, datefmt)

    def format(self, record: logging.LogRecord) -> str:
        prefix = super().format(record)
        lines = "\n".join(prefix + line for line in record.getMessage().splitlines() or [""])
        return lines + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def iteration_line(fields: dict[str, Any], last_step: int) -> str:
    """``iteration: 5 / 15 | consumed_tokens: 2.56K | …`` from raw `fields`, in their order."""
    shown = [f"iteration: {fields['iteration']} / {last_step}"]
    shown += [f"{name}: {human_format(value)}" for name, value in fields.items() if name != "iteration"]
    return " | ".join(shown)


def mebibytes(count: float) -> str:
    return f"{count / 2**20:.2f}MiB"


def show_memory(memory: dict[str, int]) -> str:
    return (
        f" Memory usage: {mebibytes(memory['allocated'])}. Peak allocated {mebibytes(memory['peak_allocated'])}. "
        f"Peak reserved: {mebibytes(memory['peak_reserved'])}"
    )
