"""`logging` and `metrics_logging`: what a run prints and writes down."""

from __future__ import annotations

from typing import Annotated, Literal

from kenotron.config.section import OURS, LocalPath, Section, key, null_means

LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical", "passive"], null_means("info")]


class Logging(Section):
    log_level: LogLevel = key(
        "Least severe message that the main process prints (`passive`: leave the logger as it is).", "info"
    )
    log_level_replica: LogLevel = key(
        "The same for all other processes, in log files of their own; on a console that all share (torchrun) they say "
        "errors only, unless this is debug.",
        "info",
    )
    iteration_step_info_interval: int = key("Print the iteration line every so many steps.", 1, ge=1)
    log_dir: LocalPath = key(
        "Folder of the logs: config.yaml, metrics.jsonl and tensorboard/ are written into <log_dir>/<run>/.",
        "logs",
        mark=OURS,
    )
    tensorboard: bool = key("Write TensorBoard scalars and text.", True, mark=OURS)
    sample_prompts: list[str] | None = key(
        "Prompts that text is generated from, and printed, at the start and at the end of the run.",
        None,
        mark=OURS,
    )


class MetricsLogging(Section):
    log_level: Literal[0, 1] = key(
        "1: statistics of every parameter and gradient beside the usual metrics (not supported yet).", 0
    )
    log_detail_interval: int = key("Steps between two such statistics, at log_level 1.", 10, ge=1)
