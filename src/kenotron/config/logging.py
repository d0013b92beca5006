"""`logging`: what a run prints, and what it writes to files."""

from typing import Annotated, Literal

from kenotron.config.section import LocalPath, Section, key, null_means, our_key

LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical", "passive"], null_means("info")]


class Wandb(Section):
    """A run of Weights & Biases."""

    project: str | None = our_key("Its project; null: general.project.", None)
    entity: str | None = our_key("The user or team; null: the account's default.", None)
    name: str | None = our_key("Its name; null: general.run.", None)
    tags: list[str] = our_key("Its tags.", [])
    mode: Literal["online", "offline", "disabled"] = our_key(
        "offline writes to the run's folder only, for `wandb sync`.", "online"
    )


class Trackio(Section):
    """A run of Trackio."""

    project: str | None = our_key("Its project; null: general.project.", None)
    name: str | None = our_key("Its name; null: general.run.", None)
    space_id: str | None = our_key("A Space of Hugging Face to log to; null: this machine.", None)


class MetricsLogging(Section):
    """Statistics of every layer, in metrics.jsonl and for trackers."""

    log_level: Literal[0, 1] = key("1: log them; 0: do not.", 0)
    log_detail_interval: int = key(
        "Steps between them; each costs a third of a step, or with gradient_noise_scale more.", 10, ge=1
    )
    gradient_noise_scale: bool = our_key(
        "Log the gradient noise scale as well, from the first micro-batch's gradient.", False
    )


class Logging(Section):
    """What is printed and logged."""

    log_level: LogLevel = key(
        "Minimum severity of the messages that the main process prints (`passive`: do not configure the logger).",
        "info",
    )
    log_level_replica: LogLevel = key(
        "The same for all other processes, which write to their own log files. On a shared console (torchrun) they "
        "print errors only, unless this is debug.",
        "info",
    )
    format: Literal["plain", "nanotron"] = our_key(
        "Form of the console lines: plain, or nanotron's for its log parsers (the default of run_train.py).", "plain"
    )
    iteration_step_info_interval: int = key("Steps between iteration lines.", 1, ge=1)
    log_dir: LocalPath = our_key(
        "Folder of the logs: config.yaml, metrics.jsonl and TensorBoard events are written to <log_dir>/<run>/.", "logs"
    )
    state_hash: bool = our_key(
        "Log a hash of a 64th of the weights in every step's line of metrics.jsonl, which `kenotron replay` compares.",
        True,
    )
    expert_loads: bool = our_key("Log the load of every expert in every line of metrics.jsonl.", False)
    tensorboard: bool = our_key("Write TensorBoard scalars and text.", True)
    wandb: Wandb | None = our_key("Log to Weights & Biases as well; {}: by default names.", None)
    trackio: Trackio | None = our_key("Log to Trackio as well; {}: by default names.", None)
    sample_prompts: list[str] | None = our_key(
        "Prompts; the model's continuations are printed at the start and at the end of the run.", None
    )
