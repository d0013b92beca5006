"""One process a session that has imported torch and done nothing else: ranks and the nursery are its forks.

A fork of a test process instead would inherit its threads' locks, torch's caches and every open file. Torch's compiler
is imported because every optimizer does, for a second and a half.
"""

import multiprocessing
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

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
    "pytest",
    "transformers.models.llama.modeling_llama",  # 4 s of each rank that has to import it
)


def fork_server() -> ForkServerContext:
    """Processes of this context start in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.frozen"])
    # The server passes over in silence what it cannot import, and pytest's own `pythonpath` is for this process only.
    tests, outer = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [tests, outer]))):
        forkserver.ensure_running()
    return context
