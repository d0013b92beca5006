"""`general.deterministic`: the same bits from every run on the same devices.

On a GPU some operators add numbers in the order in which threads happen to finish, and (a + b) + c is not a + (b + c).
Within `deterministic` torch takes operators with a fixed order, and raises at one that has none. On a CPU, where a run
is reproducible in any case, it shows which operators those are.
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
WORKSPACES = (":4096:8", ":16:8")  # those with which cuBLAS is reproducible, by its manual


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Within, if it is `wanted`: deterministic algorithms of torch, cuDNN and cuBLAS; restores torch's settings after.

    Raises InputError if the environment has set up cuBLAS otherwise, RunFailed at an operator that has none.
    """
    if not wanted:
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
