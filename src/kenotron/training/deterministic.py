"""`general.deterministic`: bitwise reproducible runs on the same devices.

On a GPU some operators add numbers in the order in which threads happen to finish, and (a + b) + c is not a + (b + c).
Within `deterministic` torch uses operators with a fixed order, and raises at operators that have no such
implementation. On a CPU a run is reproducible in any case; there the setting shows which operators would raise.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn

from kenotron.config.errors import InputError, RunFailed
from kenotron.training.console import logger

KEY = "general.deterministic"
VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")  # cuBLAS is reproducible with these, by its manual


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """If `enabled`, use deterministic algorithms of torch, cuDNN and cuBLAS in the block, then restore the settings.

    Raises InputError if the environment sets another cuBLAS workspace, RunFailed at an operator without a deterministic
    algorithm.
    """
    if not enabled:
        yield
        return
    workspace = os.environ.setdefault(VARIABLE, WORKSPACES[0])  # cuBLAS reads it at the first product on a GPU
    if workspace not in WORKSPACES:
        raise InputError(f"{KEY}: expected {VARIABLE} to be {' or '.join(WORKSPACES)}, or not set, found {workspace!r}")
    before = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    logger.info("Deterministic algorithms of torch, cuDNN and cuBLAS (%s=%s)", VARIABLE, workspace)
    try:
        yield
    except RuntimeError as error:
        if "use_deterministic_algorithms" not in str(error):
            raise
        problem = str(error).splitlines()[0].partition(", but")[0]
        raise RunFailed(f"{KEY}: {problem} on this device; set the key to false, or avoid the operator") from error
    finally:
        torch.set_deterministic_debug_mode(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]
