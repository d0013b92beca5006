"""Warn of settings of a valid config that are probably mistakes, with one line each.

>>> list(warnings_of(load("my.yaml", ["tokens.train_steps=20"])))      # doctest: +SKIP
['optimizer.learning_rate_scheduler.lr_warmup_steps is 50, tokens.train_steps only 20: the learning rate …']
"""

from collections.abc import Iterator

from kenotron.config.config import Config
from kenotron.config.decoder import AttentionArchitecture
from kenotron.config.errors import human_format

HIGHEST_LEARNING_RATE = 1.0  # runs use 1e-5 to 5e-2


def warnings_of(config: Config) -> Iterator[str]:
    """Yield the warnings about `config`; none of them stops a run."""
    yield from _schedule(config)
    yield from _length(config)
    yield from _stages(config)
    interval, batches = config.tokens.val_check_interval, config.tokens.limit_val_batches
    if not config.tokens.validates and (interval > 0 or batches != 0 or config.tokens.val_datasets):
        yield f"tokens.val_check_interval is {interval}, limit_val_batches {batches}: without both, it never validates"
    if config.tokens.test_datasets and not config.tokens.limit_test_batches:
        yield "tokens.limit_test_batches is 0: the run is not tested on tokens.test_datasets"


def amount(config: Config) -> str:
    """Format the tokens of a run: ``4.19M tokens a step, 2.1T in all``, or at most that if batches or lengths vary."""
    steps, batch, total = config.tokens.train_steps, config.global_batch_size, 0
    stages = sorted(config.data_stages, key=lambda stage: stage.start_training_step)
    ends = [stage.start_training_step for stage in stages[1:]] + [steps + 1]
    for stage, end in zip(stages, ends):
        length = stage.sequence_length or config.tokens.sequence_length
        total += max(0, min(end, steps + 1) - stage.start_training_step) * batch * length
    grows = any(stage.batch_size_ramp for stage in config.data_stages)
    at_most = "at most " if grows or len(set(config.sequence_lengths.values())) > 1 else ""
    per_step = human_format(batch * max(config.sequence_lengths.values()))
    return f"{at_most}{per_step} tokens a step, {'at most ' if grows else ''}{human_format(total)} in all"


def _schedule(config: Config) -> Iterator[str]:
    schedule, steps = config.optimizer.learning_rate_scheduler, config.tokens.train_steps
    at, rate, warmup = "optimizer.learning_rate_scheduler", schedule.learning_rate, schedule.lr_warmup_steps
    decays = schedule.lr_decay_style != "constant" and (schedule.min_decay_lr is None or schedule.final_lr < rate)
    if rate >= HIGHEST_LEARNING_RATE:
        yield f"{at}.learning_rate is {rate:g}: training is likely to diverge; common rates are 1e-5 to 5e-2"
    if steps < warmup and schedule.lr_warmup_style == "linear":
        yield (
            f"{at}.lr_warmup_steps is {warmup}, but tokens.train_steps only {steps}: the learning rate ends at "
            f"{rate * steps / warmup:.3g} and never reaches {rate:g}"
        )
    elif steps <= (schedule.lr_decay_starting_step or 0) and decays:
        yield (
            f"{at}.lr_decay_starting_step is {schedule.decay_start}, but tokens.train_steps only {steps}: the learning "
            f"rate never decays"
        )


def _stages(config: Config) -> Iterator[str]:
    for number, stage in enumerate(config.data_stages):
        if stage.start_training_step > config.tokens.train_steps:
            yield (
                f"data_stages.{number}.start_training_step is {stage.start_training_step}, but tokens.train_steps "
                f"only {config.tokens.train_steps}: the stage '{stage.name}' is never trained on"
            )
        if any(dataset is None for dataset in stage.data.datasets):
            yield f"data_stages.{number}.data.dataset is null: random tokens, from which nothing is learnt"


def _length(config: Config) -> Iterator[str]:
    architecture = config.model.architecture
    name, length = max(config.sequence_lengths.items(), key=lambda item: item[1])
    if isinstance(architecture, AttentionArchitecture) and length > architecture.longest_text:
        yield (
            f"{name} is {length}, but model_config.max_position_embeddings only "
            f"{architecture.max_position_embeddings}: the model trains on all of it, but generation will stop at "
            f"{architecture.longest_text} tokens"
        )
