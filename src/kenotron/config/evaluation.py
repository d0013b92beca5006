"""`evaluation`: tasks of lm-evaluation-harness on the checkpoints of a run, beside its training."""

from kenotron.config.section import LocalPath, Section, our_key


class Evaluation(Section):
    """Tasks of lm-evaluation-harness, which a process of its own runs on the run's checkpoints."""

    tasks: list[str] = our_key("Names of tasks, groups or tags of lm-evaluation-harness.", min_length=1)
    include_path: LocalPath | None = our_key("Folder with YAML files of tasks of your own.", None)
    eval_interval: int | None = our_key(
        "Steps between evaluations, a multiple of checkpoint_interval; null: each checkpoint. The last one always is.",
        None,
        ge=1,
    )
    num_fewshot: int | None = our_key("Examples before each question; null: as the task says.", None, ge=0)
    limit: int | None = our_key("Documents of each task, the first ones; null: all of them.", None, ge=1)
    batch_size: int = our_key("Sequences of a forward pass.", 8, ge=1)
    ema: bool = our_key("Evaluate the moving average of the weights (optimizer.ema_decay) instead of them.", False)
    device: str = our_key("Device of the evaluating process: cpu, or cuda where a GPU has room beside training.", "cpu")
    srun: dict[str, str | int | None] | None = our_key(
        'Options of srun, {partition: eval, gpus: 1, time: "2:00:00"} (a value of null: a flag): the process runs in a '
        "job of Slurm of its own. null: on the machine of rank 0.",
        None,
    )
