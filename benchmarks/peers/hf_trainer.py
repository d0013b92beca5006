"""Hugging Face's `Trainer` on the same model: nothing logged, nothing saved, fused AdamW."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers_loop import build
from worker import Job, Pace


class Samples(IterableDataset):
    def __init__(self, job: Job) -> None:
        self.job = job

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in self.job.batches():
            for sample in batch:
                labels = sample[1:]
                yield {"input_ids": sample[:-1], "labels": labels, "shift_labels": labels}


class LossKeepingTrainer(Trainer):
    """Keeps the loss of the last step for `Pace`; everything else is `Trainer`'s."""

    last_loss: Tensor | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.last_loss = super().training_step(*args, **kwargs)
        return self.last_loss


class PaceCallback(TrainerCallback):
    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.trainer: LossKeepingTrainer | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self.pace(self.trainer.last_loss)


def train(job: Job, pace: Pace) -> None:
    work = job.work
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="trainer-"),
        max_steps=1_000_000,
        per_device_train_batch_size=work.micro_batch,
        learning_rate=work.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=work.betas[0],
        adam_beta2=work.betas[1],
        adam_epsilon=work.eps,
        weight_decay=work.weight_decay,
        max_grad_norm=work.clip,
        optim="adamw_torch_fused",
        bf16=work.precision == "bf16",
        use_cpu=work.device == "cpu",
        torch_compile=job.compiled,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    callback = PaceCallback(pace)
    model = build(work, job.weights())
    callback.trainer = LossKeepingTrainer(model=model, args=arguments, train_dataset=Samples(job), callbacks=[callback])
    callback.trainer.train()
