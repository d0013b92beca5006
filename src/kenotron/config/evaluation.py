"""`evaluation`: tasks of lm-evaluation-harness on the checkpoints of a run, beside its training."""

from kenotron.config.section import OURS, LocalPath, Section, key


class Evaluation(Section):
    """Tasks of lm-evaluation-harness, which a process of its own runs on the run's checkpoints."""

    tasks: list[str] = key("Names of tasks, groups or tags of lm-evaluation-harness.", min_length=1, mark=OURS)
    include_path: LocalPath | None = key("Folder with YAML files of tasks of your own.", None, mark=OURS)
    eval_interval: int | None = key(
        "Steps between evaluations, a multiple of checkpoint_interval; null: each checkpoint. The last one always is.",
        None,
        ge=1,
        mark=OURS,
    )
    num_fewshot: int | None = key("Examples before each question; null: as the task says.", None, ge=0, mark=OURS)
    limit: int | None = key("Documents of each task, the first ones; null: all of them.", None, ge=1, mark=OURS)
    batch_size: int = key("Sequences of a forward pass.", 8, ge=1, mark=OURS)
    device: str = key(
        "Device of the evaluating process: cpu, or cuda where a GPU has room beside training.", "cpu", mark=OURS
    )
