"""A config of a model on a layout that it is only decoded on.

    layout_config(source.model, dp=1, pp=2, tp=2).parallelism.world_size        # 4

Pipeline stages, the mesh and the launcher read a whole config; a model from elsewhere has none, and a checkpoint's
own tells how it was trained. What training alone asks for is filled in with values that nobody reads.
"""

from __future__ import annotations

from kenotron.config import Config, load
from kenotron.config.errors import InputError
from kenotron.config.model import Model


def layout_config(model: Model, *, dp: int = 1, pp: int = 1, tp: int = 1) -> Config:
    """`model`, the section of a config, on ``dp x pp x tp`` ranks.

    Errors (InputError): the model's shapes do not allow a degree; it is called as on the command line, ``--tp``.
    """
    plain = {
        "general": {"project": "generate", "run": "generate"},
        "model": model.model_dump(mode="json", by_alias=True),
        "parallelism": {"dp": dp, "pp": pp, "tp": tp},
        "checkpoints": {"checkpoints_path": "unused", "checkpoint_interval": 1},
        "tokens": {
            "sequence_length": 1,
            "train_steps": 1,
            "micro_batch_size": 1,
            "batch_accumulation_per_replica": 4 * pp,  # a full pipe: there is nothing to warn of
        },
        "optimizer": {
            "optimizer_factory": {"name": "sgd"},
            "weight_decay": 0.0,
            "clip_grad": None,
            "accumulate_grad_in_fp32": True,
            "learning_rate_scheduler": {"learning_rate": 1.0},
        },
        "data_stages": [{"name": "none", "start_training_step": 1, "data": {"dataset": None}}],
    }
    try:
        return load(plain)
    except InputError as error:
        raise InputError(str(error).replace("parallelism.", "--")) from None
