"""Console output, in one of two formats (`logging.format`).

    plain       step 5/15 | loss 5.27 | lr 0.000264 | grad_norm 3.2 | 55.9K tokens/s | 9.15 ms | 2.56K tokens
    nanotron    08/31/2024 14:37:31 [INFO|DP=0|PP=0|TP=0]: iteration: 5 / 15 | … | lm_loss: 5.27

Numbers are rounded and abbreviated (`human_format`); ``metrics.jsonl`` has the raw values.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kenotron.config.errors import human_format

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.parallel.mesh import Mesh

logger = logging.getLogger("kenotron")


def start_logging(config: Config, mesh: Mesh) -> None:
    """Set up this rank's logger with `log_level` on rank 0, `log_level_replica` on the others.

    All ranks log the same lines. So the others log them only if they have their own files, as with Kénotron's launcher;
    on a console that all ranks share (torchrun's) they log only errors, unless `log_level_replica` is debug.
    """
    level = config.logging.log_level if mesh.is_first else config.logging.log_level_replica
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    handler = _Stdout()
    handler.setFormatter(_Nanotron(mesh) if config.logging.format == "nanotron" else _Plain(mesh))
    shared = not mesh.is_first and "KENOTRON_LAUNCH" not in os.environ
    if shared and level != "debug":
        handler.setLevel(logging.ERROR)
    logger.addHandler(handler)
    logger.propagate = False
    if level != "passive":  # passive: leave the level as the embedding program set it
        logger.setLevel(level.upper())


class _Stdout(logging.StreamHandler[Any]):
    """Writes to the current `sys.stdout`, which a progress bar replaces to stay below the log lines."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stdout

    def handleError(self, record: logging.LogRecord) -> None:
        """Continue without output if the reader of a pipe has closed it (`| head`)."""
        if isinstance(sys.exception(), BrokenPipeError):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (until the process ends)
        else:
            super().handleError(record)


class _Plain(logging.Formatter):
    """Formats rank 0's messages unchanged, other ranks' with time and rank; levels above INFO are shown."""

    def __init__(self, mesh: Mesh) -> None:
        rank = "" if mesh.is_first else f"%(asctime)s rank {mesh.rank('world')}: "
        super().__init__(rank + "%(level)s%(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.level = f"{record.levelname.lower()}: " if record.levelno > logging.INFO else ""
        return super().format(record)


class _Nanotron(logging.Formatter):
    """Prefixes every line of a message as nanotron does, for `grep`."""

    def __init__(self, mesh: Mesh) -> None:
        node = os.environ.get("SLURMD_NODENAME")
        place = f"DP={mesh.rank('batch')}|PP={mesh.rank('pp')}|TP={mesh.rank('tp')}" + (f"|{node}" if node else "")
        super().__init__("%(asctime)s [%(levelname)s|" + place + "]: ", datefmt="%m/%d/%Y %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        prefix = super().format(record)
        lines = "\n".join(prefix + line for line in record.getMessage().splitlines() or [""])
        return lines + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


PLAIN = {  # metric → the format of its field in a plain line
    "lm_loss": "loss {}",
    "z_loss": "z_loss {}",
    "lr": "lr {}",
    "grad_norm": "grad_norm {}",
    "tokens_per_sec": "{} tokens/s",
    "elapsed_time_per_iteration_ms": "{} ms",
    "consumed_tokens": "{} tokens",
    "sequence_length": "sequence length {}",
    "cuda_max_memory_reserved": "{}B peak memory",
}


def plain_line(fields: Mapping[str, float], recorded: Mapping[str, float], last_step: int) -> str:
    """Format raw `fields` as ``step 5/15 | loss 5.27 | …`` of up to 120 columns, and append the `recorded` metrics."""
    shown = [f"step {fields['iteration']}/{last_step}"]
    shown += [template.format(human_format(fields[name])) for name, template in PLAIN.items() if name in fields]
    shown += [f"{name} {human_format(value)}" for name, value in recorded.items()]
    return " | ".join(shown)


def mebibytes(count: float) -> str:
    """Format a number of bytes: 1572864 as ``1.50MiB``."""
    return f"{count / 2**20:.2f}MiB"
