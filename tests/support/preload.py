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


def search_path() -> str:
    """PYTHONPATH with these tests: pytest's own `pythonpath` is for its process only."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))


def fork_server() -> ForkServerContext:
    """Processes of this context start in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.frozen"])
    with patch.dict(os.environ, PYTHONPATH=search_path()):  # what the server cannot import, it passes over in silence
        forkserver.ensure_running()
    return context
