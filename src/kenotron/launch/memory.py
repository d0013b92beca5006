"""What a rank's memory must hold, overrides of the same batch that are likely to fit, and when a run says so.

with machine_limits(config, device):
    train(…)              # torch.OutOfMemoryError → RunFailed("out of memory …; try tokens.micro_batch_size=2 …")

Linux grants most allocations, and kills a process that then uses more than there is. So there is a warning before
training if weights, gradients and optimizer state alone do not fit, and `why_killed` for a rank that was killed.
`machine_memory` has what the machine offers. An estimate:

    free 70 GiB; weights, gradients and optimizer state 22 GiB; a sequence 9 GiB

    tokens.micro_batch_size=8    22 + 8 x 9 = 94
    tokens.micro_batch_size=4    22 + 4 x 9 = 58, and some to spare (`usable`)

Weights, gradients and optimizer state are those of `parallel.data`'s table, 16 bytes a parameter for AdamW on one rank.
A sequence is what a forward pass leaves in memory of it, counted on the meta device, and a quarter more for what lives
only within an operation.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kenotron.config.errors import InputError, RunFailed
from kenotron.launch.environment import accelerators, ranks_from_environment
from kenotron.launch.local import CUT_SHORT
from kenotron.launch.machine_memory import available_memory, out_of_memory_kills
from kenotron.models import Context, build, named_parameters
from kenotron.models.recomputation import Recompute
from kenotron.optim.groups import parameter_groups
from kenotron.storage.hub import first_line

if TYPE_CHECKING:
    from kenotron.config import Config
    from kenotron.models.decoder import Decoder

WITHIN_OPERATIONS = 1.25
GIB = 1 << 30
LESS_AND_LESS_KEPT: tuple[Recompute, ...] = (False, "elementwise", "selective", True)
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
SPLIT = "split the model: parallelism.tp, parallelism.pp, optimizer.zero_stage: 3"


@contextmanager
def machine_limits(config: Config, device: torch.device, *, warn: bool = False) -> Iterator[None]:
    """Raise RunFailed, with what to do, in place of torch's and Python's errors about memory and disks.

    `warn`: print a warning first if weights, gradients and optimizer state alone do not fit.
    """
    ranks = ranks_from_environment()
    free = free_memory(device, ranks.local_world_size)
    if warn and ranks.rank == 0 and free is not None and (problem := states_too_large(config, free)):
        print(f"warning: {problem}", file=sys.stderr, flush=True)
    try:
        yield
    except Exception as error:
        if _out_of_memory(error):
            traceback.clear_frames(error.__traceback__)  # the advice needs some of the memory that they hold
            raise RunFailed(f"out of memory ({first_line(error)}); {_advice(config, free)}") from error
        if type(error).__name__ == "FailOnRecompileLimitHit":  # of torch._dynamo, which takes seconds to import
            raise RunFailed(
                "model.compile: a function of the model was compiled as often as model_parts.COMPILATIONS allows, and "
                "would go on uncompiled; torch's warning above says what changes; expected numbers and shapes that few "
                "layers and batches differ in, or model.compile=false"
            ) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunFailed(
                f"{error.filename or 'a file of the run'}: {error.strerror}; free space there, or set another "
                f"logging.log_dir, checkpoints.checkpoints_path or KENOTRON_CACHE"
            ) from error
        raise


def why_killed(config: Config, kills_before: int | None, number: int) -> str | None:
    """Why a rank of `config` on this machine was killed by the signal `number`; None where that is not known.

    `kills_before` is `out_of_memory_kills` before the ranks were started. "" if memory was not the reason of a SIGKILL.
    """
    if number == signal.SIGBUS:  # perhaps a token file is shorter than when the run mapped it into its memory
        from kenotron.data.stage_plan import check_files

        try:
            check_files(config)
        except InputError as error:
            return f"{CUT_SHORT}: {error}"
    kills = out_of_memory_kills()
    if number != signal.SIGKILL or kills is None:
        return None
    if kills == kills_before:
        return ""
    said = "memory? The kernel has killed processes for lack of it since the run began"
    if accelerators():  # which have the weights: the advice is not for the host's memory
        return f"out of host {said}"
    available, count = available_memory(), config.parallelism.world_size
    return f"out of {said}; {_advice(config, None if available is None else available // count)}"


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, RuntimeError):  # torch.OutOfMemoryError and the CPU allocator's
        return any(words in str(error) for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _advice(config: Config, free: int | None) -> str:
    try:
        return what_fits(config, free)
    except Exception:  # an estimate must not hide what it is about
        return f"lower tokens.micro_batch_size, now {config.tokens.micro_batch_size}, or {SPLIT}"


def free_memory(device: torch.device, ranks_on_machine: int) -> int | None:
    """Bytes that a rank may use on `device` besides what its process has; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = available_memory()
    if device.type != "cpu" or available is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    allowed = available if limit == resource.RLIM_INFINITY else max(limit - mapped, 1)
    return min(available // ranks_on_machine, allowed)


def usable(free: int) -> float:
    """What to plan for: some is fragmented, and libraries and threads take some."""
    return max(0.85 * (free - GIB / 4), free / 4)


def what_fits(config: Config, free: int | None) -> str:
    """What to change in `config`, which did not fit into `free` bytes of a rank."""
    if free is not None and (problem := states_too_large(config, free)):
        return problem
    states = state_bytes(config, config.zero_stage)
    tokens, layout = config.tokens, config.parallelism
    if layout.pp_engine == "afab" and tokens.batch_accumulation_per_replica > layout.pp > 1:
        return f"try parallelism.pp_engine=1f1b, which keeps activations of {layout.pp} micro-batches, not of all"
    for recompute in LESS_AND_LESS_KEPT[LESS_AND_LESS_KEPT.index(layout.recompute_layer) :]:
        largest = tokens.micro_batch_size - (recompute == layout.recompute_layer)
        sizes = [size for size in range(largest, 0, -1) if tokens.micro_batch_size % size == 0]
        each = sequence_bytes(config, recompute) if free is not None else None
        if each is None and recompute not in (layout.recompute_layer, True):
            continue  # what is not known to fit is not worth a try
        for size in sizes:
            if free is None or each is None:
                return f"try {_overrides(config, size, recompute)}; or {SPLIT}"
            if states + size * each < usable(free):
                why = f"{_in_words(states, free)}, and each sequence {each / GIB:.3g} GiB"
                return f"try {_overrides(config, size, recompute)} ({why}); or {SPLIT}"
    return f"lower tokens.sequence_length, now {tokens.sequence_length}, or {SPLIT}"


def states_too_large(config: Config, free: int) -> str | None:
    """What to change if weights, gradients and optimizer state alone are larger than `free` bytes; else None."""
    states = state_bytes(config, config.zero_stage)
    return f"{_in_words(states, free)}: try {_smaller_states(config, states, free)}" if states > free else None


def _smaller_states(config: Config, states: float, free: int) -> str:
    more_ranks = f"{math.ceil(states / usable(free))} times as many ranks along parallelism.tp or pp"
    for stage in (1, 2, 3) if config.parallelism.dp > 1 else ():
        if config.zero_stage in range(stage) and state_bytes(config, stage) < usable(free):
            return f"optimizer.zero_stage={stage}, or {more_ranks}"
    return more_ranks


def _overrides(config: Config, size: int, recompute: Recompute) -> str:
    tokens = config.tokens
    count = tokens.batch_accumulation_per_replica * tokens.micro_batch_size // size
    changed = []
    if size < tokens.micro_batch_size:
        changed += [f"tokens.micro_batch_size={size}", f"tokens.batch_accumulation_per_replica={count}"]
    if recompute != config.parallelism.recompute_layer:
        changed.append(f"parallelism.recompute_layer={recompute}".lower())
    return " ".join(changed)


def _in_words(states: float, free: int) -> str:
    return f"weights, gradients and optimizer state need {states / GIB:.3g} of {free / GIB:.3g} GiB a rank"


def state_bytes(config: Config, stage: int | str) -> float:
    """Bytes of weights, optimizer state, gradients and weights at work on a rank, with this `zero_stage`."""
    layout, model = config.parallelism, _on_meta(config)
    parameters = list(named_parameters(model))
    sizes = {name: parameter.numel() for name, parameter in parameters}
    count, split = sum(sizes.values()), layout.tp * layout.pp
    groups = parameter_groups(parameters, config.optimizer)
    kept = sum(_moments(group["factory"], each) * each.numel() for group in groups for each in group["params"])
    moments = kept / count + (config.optimizer.ema_decay is not None)
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    held = (count - experts * (1 - 1 / layout.expert_parallel_size)) / split
    ranks = (layout.dp_shard or layout.dp) * layout.context_parallel_size if stage != 0 else 1
    share = count / split / ranks if ranks > 1 else held
    gradients = held if layout.pp > 1 or stage in (0, 1) else share
    width, widest = (getattr(torch, dtype).itemsize for dtype in (config.model.dtype, config.kept_dtype))
    at_work = width * held if (ranks > 1 and stage in (1, 2)) or (ranks == 1 and width < widest) else 0.0
    return at_work + (0.0 if layout.cpu_offload else widest * ((1 + moments) * share + gradients))


def _moments(factory: Any, parameter: Tensor) -> float:
    """Numbers that an optimizer keeps for each number of a parameter."""
    if factory.name == "sgd":
        return float(factory.momentum > 0)
    if factory.name == "soap":  # covariances and their eigenvectors
        rows, columns = parameter.shape[-2:]
        return 2 + 2 * (rows / columns + columns / rows)
    return 1.0 if factory.name in ("lion", "muon", "normuon") else 2.0


def sequence_bytes(config: Config, recompute: Recompute) -> float | None:
    """Bytes of the activations of one sequence on a rank; None for a model that does not run on the meta device.

    Models of transformers may read numbers there, and torch has no kernel for experts in float32.
    A rank of a pipeline has fewer layers, and as many times the micro-batches that wait for their backward pass.
    """
    layout = config.parallelism
    try:
        kept = whole = _kept(config, 2, False) - _kept(config, 1, False)
        if recompute:  # and one layer is whole in backward
            kept = _kept(config, 2, recompute) - _kept(config, 1, recompute)
            kept += whole // config.model.decoder.num_hidden_layers
    except Exception:  # whatever torch or a model of one's own raises there
        return None
    return WITHIN_OPERATIONS * kept / (layout.tp if layout.tp_mode == "REDUCE_SCATTER" else 1)


def _kept(config: Config, sequences: int, recompute: Recompute) -> int:
    """Bytes that a forward pass of whole sequences leaves in memory, and those of what has no sequences."""
    length = math.ceil(max(config.sequence_lengths.values()) / config.parallelism.context_parallel_size)
    model = _on_meta(config)
    model.set_recompute(recompute)
    model.set_compute_dtype(getattr(torch, config.model.dtype))
    with torch.device("meta"), _Made() as made:
        tokens = torch.zeros(sequences * length, dtype=torch.int64)
        left = model(tokens, Context((sequences, length), tokens, _attention), tokens)  # its graph keeps the others
        return sum(size for each, size in made.storages.items() if left and not each.expired())


def _on_meta(config: Config) -> Decoder:
    with torch.device("meta"):
        return build(config.model)


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Tensor:
    """What has no matrix of scores keeps: inputs and output."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]


class _Made(TorchDispatchMode):
    """What operators made, and its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor):
                self.storages[StorageWeakRef(each.untyped_storage())] = each.untyped_storage().nbytes()
        return out
