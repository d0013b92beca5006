"""`lighteval`: evaluation jobs that follow the checkpoints of a run (nanotron's keys and Kénotron's)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Tag

from kenotron.config.parallelism import Parallelism
from kenotron.config.section import Section, by_rule, key, null_means


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


class GenerationArgs(Section):
    sampler: Annotated[Literal["greedy", "top_k", "top_p", "basic"], BeforeValidator(_lower)] | None = key(
        "How the next token is chosen.", None
    )
    temperature: float | None = key("Divides the logits.", None, gt=0)
    top_k: int | None = key("Choose among this many of the likeliest tokens.", None, ge=1)
    top_p: float | None = key("Choose among the likeliest tokens of this total probability.", None, gt=0, le=1)
    n_samples: int | None = key("Answers for one prompt.", None, ge=1)
    eos: str | None = key("Text that ends an answer.", None)
    seed: Annotated[int, null_means(42)] = key("Seed of the sampling.", 42)
    use_cache: bool = key("Keep keys and values of earlier tokens.", False)


def _generation_kind(value: Any) -> str | None:
    if isinstance(value, GenerationArgs):
        return "(one)"
    if not isinstance(value, dict):
        return None
    return "(named)" if value and all(isinstance(v, dict | GenerationArgs) for v in value.values()) else "(one)"


_generation_rule = by_rule(_generation_kind, "generation settings, or a map name → generation settings")
Generation = Annotated[
    Annotated[GenerationArgs, Tag("(one)")] | Annotated[dict[str, GenerationArgs], Tag("(named)")],
    _generation_rule,
]


class LightevalTasks(Section):
    tasks: str | None = key("Tasks, or a file that lists them.", None)
    custom_tasks: str | None = key("Module of tasks of your own.", None)
    max_samples: int | None = key("Cap on the samples of a task.", None, ge=1)
    num_fewshot_seeds: int | None = key("Draws of the few-shot examples.", None, ge=1)
    dataset_loading_processes: int = key("Processes that load datasets.", 8, ge=1)
    multichoice_continuations_start_space: bool | None = key("Start continuations with a space.", None)
    no_multichoice_continuations_start_space: bool | None = key("Never start them with a space.", None)


class LightevalLogging(Section):
    local_output_path: str | None = key("Folder of the results.", None)
    push_results_to_hub: bool | None = key("Push results to the hub.", None)
    push_details_to_hub: bool | None = key("Push details to the hub.", None)
    push_results_to_tensorboard: bool | None = key("Push results to TensorBoard.", None)
    hub_repo_results: str | None = key("Hub repository of results.", None)
    hub_repo_details: str | None = key("Hub repository of details.", None)
    hub_repo_tensorboard: str | None = key("Hub repository of TensorBoard files.", None)
    tensorboard_metric_prefix: str | None = key("Prefix of the metric names.", None)


class LightevalWandb(Section):
    wandb_project: str | None = key("Weights & Biases project.", None, min_length=1)
    wandb_entity: str | None = key("Weights & Biases entity.", None)
    wandb_run_name: str | None = key("Weights & Biases run.", None)


class LightevalSlurm(Section):
    gpus_per_node: int = key("Accelerators on a machine.", 8, ge=1)
    partition: str = key("Slurm partition.", "hopper-prod")
    hf_cache: str = key("Hugging Face cache folder.", "~/.cache/huggingface")
    cpus_per_task: int = key("CPU cores for a task.", 88, ge=1)
    qos: str = key("Slurm quality of service.", "low")
    time: str = key("Time limit.", "24:00:00")
    reservation: str | None = key("Slurm reservation.", "smollm")


class Lighteval(Section):
    slurm_template: str | None = key("Template of the Slurm script.", None)
    slurm_script_dir: str | None = key("Folder of the Slurm scripts.", "eval_results/launch-config")
    logs_path: str | None = key("Folder of the jobs' logs.", "eval_results/logs")
    local_checkpoint_dir: str = key("Folder on the machine that checkpoints are fetched to.", "/scratch")
    checkpoints_path: str | None = key("Folder of the checkpoints to evaluate.", None)
    parallelism: Parallelism | None = key("Layout of the evaluation.", None)
    batch_size: int | None = key("Requests at once.", None, ge=1)
    generation: Generation | None = key("Generation settings, one or several by name.", None)
    tasks: LightevalTasks | None = key("What is evaluated.", None)
    logging: LightevalLogging | None = key("Where results go.", None)
    wandb: LightevalWandb | None = key("Weights & Biases settings.", None)
    slurm: LightevalSlurm | None = key("Slurm settings.", None)
    s3_save_path: str | None = key("Object storage folder of the results.", None)
    upload_to_wandb: bool = key("Upload results to Weights & Biases.", False)
    wandb_project: str | None = key("Weights & Biases project.", None)
    wandb_entity: str | None = key("Weights & Biases entity.", None)
    output_dir: str | None = key("Folder of the results.", None)
    nanotron_path: str = key("Folder of the program.", "./")
    eval_config_override: str | None = key("File of settings that override these.", None)
    eval_interval: int | None = key("Steps between two evaluations.", None, ge=1)
    eval_interval_file: str | None = key("File with the interval, read before every evaluation.", None)
