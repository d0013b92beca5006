"""Translate Slurm's variables to torchrun's, for ranks that srun starts without torchrun.

srun --nodes 2 --ntasks-per-node 4 kenotron train my.yaml

SLURM_PROCID=5  SLURM_STEP_NUM_TASKS=8  SLURM_LOCALID=1  SLURM_STEP_NODELIST=r7i[3-4]n2
RANK=5          WORLD_SIZE=8            LOCAL_RANK=1     MASTER_ADDR=r7i3n2  MASTER_PORT=23581
"""

import re
from collections.abc import Mapping

from kenotron.config.errors import InputError

FIRST_PORT, PORTS = 20_000, 10_000  # below Linux's ephemeral ports (32768 and above)


def is_task_of_many(environment: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as one of several tasks of its step."""
    return "SLURM_PROCID" in environment and int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of srun. ``MASTER_ADDR`` and ``MASTER_PORT`` are kept if they are set.

    Raises InputError if Slurm's variables are incomplete.
    """
    try:
        variables = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(_tasks_here(environment)),
            "MASTER_ADDR": first_host(environment["SLURM_STEP_NODELIST"]),
            # Steps of one job, and jobs that share a node, need different ports.
            "MASTER_PORT": str(
                FIRST_PORT + (7 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])) % PORTS
            ),
        }
    except KeyError as missing:
        raise InputError(f"srun has started this process, but {missing.args[0]} is not set") from None
    except (ValueError, IndexError) as error:
        raise InputError(f"srun has started this process, but one of Slurm's variables is wrong: {error}") from None
    return variables | {name: environment[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in environment}


def _tasks_here(environment: Mapping[str, str]) -> int:
    """Return the number of tasks on this node: 3 for ``4(x2),3`` and node 2."""
    counts: list[int] = []
    for part in environment["SLURM_STEP_TASKS_PER_NODE"].split(","):
        count, _, repeats = part.partition("(x")
        counts += [int(count)] * int(repeats.rstrip(")") or 1)
    return counts[int(environment["SLURM_NODEID"])]


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's compressed list.

    >>> first_host("r7i[03-05,9]n2,login1")
    'r7i03n2'
    """
    first = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", nodes)
    assert first is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())
