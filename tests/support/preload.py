"""What processes of tests import once, before they fork children that train: a child then starts in half a second.

Torch's compiler is in it because every optimizer imports it, for a second and a half.
"""

PRELOAD = (
    "kenotron.checkpoint.tensor_writer",
    "kenotron.cli.app",
    "kenotron.data",
    "kenotron.generation",
    "kenotron.launch.training",
    "kenotron.models.families.llama",
    "kenotron.planner.memory",
    "kenotron.training.build",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
)
