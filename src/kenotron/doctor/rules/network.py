"""Rules about networks and about the settings of NCCL and gloo."""

from __future__ import annotations

from kenotron.doctor.facts import Facts, Finding
from kenotron.doctor.rules.finding import error, hint, warning

LOCKED_MEMORY = 1 << 30
ASYNC_ERRORS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
SWITCHED_OFF = {"NCCL_P2P_DISABLE": "main memory", "NCCL_SHM_DISABLE": "the network"}


def infiniband_disabled(facts: Facts) -> Finding | None:
    active = [port.name for port in facts.network.infiniband if port.active]
    if facts.settings.get("NCCL_IB_DISABLE") != "1" or not active:
        return None
    return warning(f"NCCL_IB_DISABLE=1, but {active[0]} is active: NCCL uses TCP between machines", "unset it")


def infiniband_down(facts: Facts) -> Finding | None:
    ports = facts.network.infiniband
    if not ports or any(port.active for port in ports):
        return None
    return warning(f"no InfiniBand port is active, not even {ports[0].name}", "ibstat; cables and the subnet manager")


def locked_memory_limited(facts: Facts) -> Finding | None:
    limit = facts.limits.locked_memory
    if limit is None or limit >= LOCKED_MEMORY or not any(port.active for port in facts.network.infiniband):
        return None
    return warning(
        f"a process may lock {limit >> 10} KiB of memory: InfiniBand cannot register NCCL's buffers",
        "ulimit -l unlimited; under Slurm in slurmd's LimitMEMLOCK",
    )


def gpus_kept_apart(facts: Facts) -> Finding | None:
    off = [name for name in SWITCHED_OFF if facts.settings.get(name) == "1"]
    if not off or len(facts.torch.accelerators) < 2:
        return None
    return warning(f"{off[0]}=1 sends what GPUs exchange through {SWITCHED_OFF[off[0]]}", "unset it")


def errors_not_handled(facts: Facts) -> Finding | None:
    off = [name for name in ASYNC_ERRORS if facts.settings.get(name) == "0"]
    if not off:
        return None
    return warning(f"{off[0]}=0: ranks wait forever for one that has died", "unset it")


def no_such_interface(facts: Facts) -> Finding | None:
    there = [interface.name for interface in facts.network.interfaces]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = facts.settings.get(variable, "")
        if not there or not value or value.startswith(("^", "(")):
            continue
        exact = variable.startswith("GLOO") or value.startswith("=")  # NCCL's names are prefixes
        wanted = value.removeprefix("=").split(",")
        if not any(name == one or (not exact and name.startswith(one)) for one in wanted for name in [*there, "lo"]):
            return error(f"{variable}={value}: no such interface is up, only {', '.join(there)}", "name one of these")
    return None


def own_name_unknown(facts: Facts) -> Finding | None:
    what = {
        "loopback": "resolves to the loopback address",
        "nothing": "does not resolve",
    }.get(facts.network.own_name or "")
    if what is None:
        return None
    return hint(
        f"this machine's name {what}: ranks of several machines do not find each other with gloo (one machine is fine)",
        "for several machines: GLOO_SOCKET_IFNAME, or an address for the name in /etc/hosts",
    )


RULES = (
    infiniband_disabled,
    infiniband_down,
    locked_memory_limited,
    gpus_kept_apart,
    errors_not_handled,
    no_such_interface,
    own_name_unknown,
)
