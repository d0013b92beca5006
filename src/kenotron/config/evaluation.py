"""`evaluation`: tasks of lm-evaluation-harness on the checkpoints of a run, during training."""

from kenotron.config.section import LocalPath, Section, our_key


class Evaluation(Section):
    """Tasks of lm-evaluation-harness that a separate process runs on the run's checkpoints."""

    tasks: list[str] = our_key("Names of tasks, groups or tags of lm-evaluation-harness.", min_length=1)
    include_path: LocalPath | None = our_key("Folder with YAML files of tasks of your own.", None)
    eval_interval: int | None = our_key(
        "Steps between evaluations, a multiple of checkpoint_interval; null: evaluate every checkpoint. The last "
        "checkpoint is always evaluated.",
        None,
        ge=1,
    )
    num_fewshot: int | None = our_key("Examples before each question; null: the task's default.", None, ge=0)
    limit: int | None = our_key("Number of documents of each task to evaluate, the first ones; null: all.", None, ge=1)
    batch_size: int = our_key("Sequences per forward pass.", 8, ge=1)
    ema: bool = our_key("Evaluate the moving average (optimizer.ema_decay) instead of the weights.", False)
    device: str = our_key("Device of the evaluating process: cpu, or cuda where a GPU has room beside training.", "cpu")
    srun: dict[str, str | int | None] | None = our_key(
        'Run in a separate Slurm job, with these options of srun: {partition: eval, gpus: 1, time: "2:00:00"}, where '
        "null means a flag. null: on the machine of rank 0.",
        None,
    )
