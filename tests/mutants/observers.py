"""Bugs of what looks at a run: a signal ignored, a number or a warning that is wrong, an export that is missing."""

from __future__ import annotations

from mutants.mutant import Mutant

CONSOLE = "training/test_console_and_metrics.py"
RESUME = "training/test_exact_resume.py"
SIGNALLED = f"{RESUME}::test_a_signal_finishes_the_step_saves_and_exits_with_0_and_the_run_goes_on_exactly"

MUTANTS = [
    Mutant(
        name="a-loss-that-falls-is-a-spike",
        file="observers/spikes.py",
        find="    return (value - mean) / max(",
        replace="    return abs(value - mean) / max(",
        why="the steps in which a run learns most, after a plateau, are left out",
        tests=("training/test_spikes.py::test_a_loss_that_falls_far_is_no_spike",),
    ),
    Mutant(
        name="the-signal-of-slurm-is-not-handled",
        file="observers/signals.py",
        find='NAMES = ("SIGTERM", "SIGUSR1", "SIGINT")',
        replace='NAMES = ("SIGTERM", "SIGINT")',
        why="SIGUSR1 before the time limit kills the run, and hours since the last checkpoint are lost",
        tests=(f"{SIGNALLED}[SIGUSR1]",),
    ),
    Mutant(
        name="the-time-limit-after-its-warning-ends-the-save",
        file="observers/signals.py",
        find='        return soon or (self.received, name) == ("SIGUSR1", "SIGTERM")\n',
        replace="        return soon\n",
        why="Slurm's SIGTERM at the limit, while the run that SIGUSR1 has stopped is being saved, ends it without",
        tests=(f"{RESUME}::test_the_time_limit_after_its_warning_is_the_same_request",),
    ),
    Mutant(
        name="a-hang-of-a-rank-that-waits-like-all-others",
        file="observers/stragglers.py",
        find="        if pace.waited > WAITING and pace.waited > 2 * usual_wait:\n",
        replace="        if pace.waited > WAITING:\n",
        why="where the file system is slow for all, every rank is named as the slow one",
        tests=("training/test_stragglers.py::test_which_ranks_are_slow",),
    ),
    Mutant(
        name="of-two-ranks-the-slow-one-is-the-measure",
        file="observers/stragglers.py",
        find="usual = statistics.median_low([pace.seconds",
        replace="usual = statistics.median_high([pace.seconds",
        why="of two ranks the slow one is never named",
        tests=("training/test_stragglers.py::test_which_ranks_are_slow",),
    ),
    Mutant(
        name="time-left-from-tokens-of-an-earlier-start",
        file="observers/progress.py",
        find="(tokens - self.tokens_at_start) * (total - tokens)",
        replace="tokens * (total - tokens)",
        why="a run that was resumed at 90% says that it is done in a minute, and takes a day",
        tests=(f"{CONSOLE}::test_time_left_is_reckoned_from_the_steps_of_this_start",),
    ),
    Mutant(
        name="tensorboard-keeps-the-steps-that-are-done-again",
        file="observers/tensorboard.py",
        find=", purge_step=run.step)",
        replace=")",
        why="after a crash the curves have two values for some steps, and go back in time",
        tests=(f"{CONSOLE}::test_a_resumed_run_has_every_step_once_in_metrics_and_tensorboard",),
    ),
    Mutant(
        name="the-end-of-a-run-is-not-validated",
        file="observers/validation.py",
        find="run.config.tokens.val_check_interval == 0 or run.finished:",
        replace="run.config.tokens.val_check_interval == 0:",
        why="the loss that is published is that of a thousand steps before the end",
        tests=(f"{CONSOLE}::test_the_last_step_is_validated_whatever_the_interval",),
    ),
    Mutant(
        name="the-majority-of-replicas-is-blamed",
        file="observers/consistency.py",
        find="key=len, reverse=True)",
        replace="key=len)",
        why="of eight machines the seven that are right are named as those to look at",
        tests=("training/test_replicas.py::test_the_ranks_that_differ_are_those_in_the_minority",),
    ),
    Mutant(
        name="a-replica-that-differs-is-saved",
        file="observers/consistency.py",
        find="        if len(groups) > 1:\n",
        replace="        if len(groups) > 2:\n",
        why="a checkpoint has weights of one replica and moments of another, and nobody knows",
        tests=("training/test_replicas.py::test_the_ranks_that_differ_are_those_in_the_minority",),
    ),
    Mutant(
        name="every-element-of-a-weight-has-one-weight-in-its-hash",
        file="observers/consistency.py",
        find="torch.arange(2 * first + 1, 2 * (first + len(piece)) + 1, 2, device=piece.device)",
        replace="torch.ones(len(piece), dtype=torch.int64, device=piece.device)",
        why="two elements that were swapped, or rows in another order, have the same hash",
        tests=("cli/test_replay.py::test_elements_that_change_places_change_the_hash",),
    ),
    Mutant(
        name="warming-up-counts-as-speed",
        file="observers/benchmark.py",
        find="WARM_UP = 3 ",
        replace="WARM_UP = 0 ",
        why="a table of benchmarks compares how long kernels take to compile",
        tests=("training/test_benchmark_row.py::test_a_run_adds_one_row_with_its_speed_and_config",),
    ),
    Mutant(
        name="a-batch-of-the-table-is-that-of-a-replica",
        file="observers/benchmark.py",
        find='"gbs": config.global_batch_size,',
        replace='"gbs": config.tokens.micro_batch_size * config.tokens.batch_accumulation_per_replica,',
        why="a layout of eight replicas seems to reach its speed at an eighth of the batch",
        tests=("training/test_benchmark_row.py::test_the_batch_of_a_row_is_that_of_all_replicas",),
    ),
    Mutant(
        name="an-export-that-was-interrupted-is-never-made-up-for",
        file="observers/export.py",
        find="        if run_on_rank0(lambda: path.is_dir() and not (path / FOLDER).is_dir()):\n",
        replace="        if False:\n",
        why="the one checkpoint that was to be published has no export, and nothing is said",
        tests=("training/test_export_at_saves.py",),
    ),
    Mutant(
        name="data-of-validation-may-differ-between-machines",
        file="observers/consistency.py",
        find="        if run.config.tokens.validates:\n",
        replace="        if False:\n",
        why="val_loss is one over two versions of the held-out text",
        tests=("launch/test_agreement.py::test_a_machine_with_other_files_is_named_on_all",),
    ),
]
