"""Choose the attention function of `_attn_implementation` by facts about the run, so that tests need no device.

    choose("auto", Facts("nvidia", (9, 0), "bfloat16", head_dim=128, documents=True))        → "flash"
    choose("auto", Facts("nvidia", (9, 0), "bfloat16", head_dim=128))                        → "sdpa"
    choose("flash_attention_3", Facts("nvidia", (8, 0), …))       InputError: … needs compute capability 9.x, found 8.0

A name stands for one or several functions; the first that supports the run exactly is chosen, and the others say what
they lack. `auto`, and nanotron's default `flash_attention_2`, choose among all functions. Their order on a CPU is
measured (`kernels.attention`); on GPUs it follows the amount of work: kernels that skip hidden blocks come before those
that mask them (for times on an H200 see docs/attention.md).
"""

import os
import shutil
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kenotron.config import Config
from kenotron.config.decoder import AttentionArchitecture
from kenotron.config.dotted import import_dotted
from kenotron.config.errors import InputError
from kenotron.kernels.attention import Documents
from kenotron.kernels.attentions.documents import has_documents

KEY = "model.model_config._attn_implementation"
PACKAGES = {"flash_attn": "flash_attn", "flash_3": "flash_attn_interface", "flash_4": "flash_attn.cute"}
HALF = ("bfloat16", "float16")
OWN_BLOCKS = ("ring", "allgather")  # methods of context parallelism with their own blockwise attention


class DeviceFacts(NamedTuple):
    """The facts that the choice depends on. `vendor`: cpu, nvidia or amd; `capability` is NVIDIA's.

    `installed`: packages of `PACKAGES`, and `triton` if it can compile.
    """

    vendor: str
    capability: tuple[int, int] = (0, 0)
    dtype: str = "float32"
    head_dim: int = 64
    documents: bool = False
    window: bool = False
    softcap: bool = False
    installed: frozenset[str] = frozenset({"triton"})


class Implementation(NamedTuple):
    """A `function`, by dotted path, loaded if chosen; `problem` returns what it lacks for some facts, or None."""

    function: str
    problem: Callable[[DeviceFacts], str | None]


def _sdpa(facts: DeviceFacts) -> str | None:
    if facts.vendor != "cpu" and (facts.documents or facts.window):
        return "makes a call for every document or block, which suits a CPU"
    return _no_softcap(facts)


def _no_softcap(facts: DeviceFacts) -> str | None:
    return "has no softcap" if facts.softcap else None


def _flash(facts: DeviceFacts) -> str | None:
    if facts.vendor != "nvidia":
        return f"needs an NVIDIA GPU, found {facts.vendor}"
    return _flash_kernel(facts) or _no_softcap(facts)


def _flash_kernel(facts: DeviceFacts) -> str | None:
    """Return what all versions of flash attention lack for these facts, or None."""
    if facts.vendor == "nvidia" and facts.capability < (8, 0):
        return f"needs compute capability 8.0, found {_dotted(facts.capability)}"
    if facts.dtype not in HALF:
        return f"needs model.dtype bfloat16, found {facts.dtype}"
    if facts.head_dim > 256 or facts.head_dim % 8:
        return f"needs heads of at most 256 channels, a multiple of 8, found {facts.head_dim}"
    return None


def _flash_attn(facts: DeviceFacts) -> str | None:
    if facts.vendor == "cpu":
        return "needs a GPU"
    return _flash_kernel(facts) or _missing(facts, "flash_attn", "pip install --no-build-isolation 'kenotron[flash]'")


def _flash_3(facts: DeviceFacts) -> str | None:
    if facts.vendor == "nvidia" and facts.capability[0] != 9:
        return f"needs compute capability 9.x, found {_dotted(facts.capability)}"
    return _flash(facts) or _missing(facts, "flash_3", "build it from FlashAttention's folder hopper")


def _flash_4(facts: DeviceFacts) -> str | None:
    if facts.vendor == "nvidia" and facts.capability[0] not in (9, 10):
        return f"needs compute capability 9.x or 10.x, found {_dotted(facts.capability)}"
    return _flash(facts) or _missing(facts, "flash_4", "pip install flash-attn-4")


def _flex(facts: DeviceFacts) -> str | None:
    if facts.vendor == "cpu":
        return "has no backward on a CPU"
    if facts.head_dim < 16:
        return f"needs heads of at least 16 channels, found {facts.head_dim}"
    return None if "triton" in facts.installed else "needs triton, gcc or clang, and Python.h; not all are here"


def _missing(facts: DeviceFacts, name: str, remedy: str) -> str | None:
    if name in facts.installed:
        return None
    return f"needs the package {PACKAGES[name]}, which is not installed ({remedy})"


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


_HERE = "kenotron.kernels.attentions"
IMPLEMENTATIONS = {
    "sdpa": Implementation("kenotron.kernels.attention.attention", _sdpa),
    "flash": Implementation(f"{_HERE}.packed.torch_flash", _flash),
    "flash_attn": Implementation(f"{_HERE}.packed.flash_attn_package", _flash_attn),
    "flex_attention": Implementation(f"{_HERE}.flex.flex", _flex),
    "sdpa_with_mask": Implementation(f"{_HERE}.masked.sdpa_with_mask", _no_softcap),
    "eager": Implementation(f"{_HERE}.masked.eager", lambda facts: None),
    "flash_3": Implementation(f"{_HERE}.packed.torch_flash", _flash_3),
    "flash_4": Implementation(f"{_HERE}.packed.torch_flash", _flash_4),
}
_FASTEST = ("sdpa", "flash", "flash_attn", "flex_attention", "sdpa_with_mask", "eager")
NAMES: dict[str, tuple[str, ...]] = {
    "auto": _FASTEST,
    "flash_attention_2": _FASTEST,
    "sdpa": ("sdpa", "sdpa_with_mask"),
    "flash_attention_3": ("flash_3",),
    "flash_attention_4": ("flash_4",),
    "flex_attention": ("flex_attention",),
    "eager": ("eager",),
}
"""Value of the key → the implementations that it may stand for."""


def choose(name: str, facts: DeviceFacts) -> str:
    """Return the first function (of `IMPLEMENTATIONS`) that `name` stands for and that supports `facts`.

    Raises InputError with what the last one lacks, and the names that would work.
    """
    problem = None
    for each in NAMES[name]:
        problem = IMPLEMENTATIONS[each].problem(facts)
        if problem is None:
            return each
    others = [other for other, each in NAMES.items() if any(not IMPLEMENTATIONS[i].problem(facts) for i in each)]
    raise InputError(f"{KEY}: {name} {problem}; expected one of {', '.join(others)}")


def attention_of_run(config: Config, device: torch.device) -> tuple[Callable[..., Tensor], str]:
    """Return the run's attention function, for whole sequences and packed documents, and a line that describes it.

    For models with their own or no attention, return `kernels.attention`. Raises InputError as `choose` does.
    """
    sdpa = import_dotted(IMPLEMENTATIONS["sdpa"].function, KEY)
    model, layout = config.model.decoder, config.parallelism
    if not isinstance(model, AttentionArchitecture):
        return sdpa, "none, or the module's own"
    name, method = model.attn_implementation, layout.context_parallel_method
    if layout.context_parallel_size > 1 and method in OWN_BLOCKS:
        if NAMES[name] not in (_FASTEST, NAMES["sdpa"]):
            raise InputError(
                f"{KEY}: expected auto, flash_attention_2 or sdpa with parallelism.context_parallel_method {method}, "
                f"which computes attention in blocks of its own, found {name}; ulysses takes every implementation"
            )
        return sdpa, f"{method}, in blocks of its own"
    facts = facts_of(device)._replace(
        dtype=config.model.dtype,
        head_dim=model.head_dim,
        window=model.attention_window is not None,
        softcap=getattr(model, "attn_logit_softcapping", None) is not None,
    )
    whole, packed = (choose(name, facts._replace(documents=documents)) for documents in (False, True))
    line = whole if whole == packed else f"{whole}; for packed documents {packed}"
    return by_documents(load(whole), load(packed)), f"{line} (_attn_implementation: {name})"


def load(name: str) -> Callable[..., Tensor]:
    """Import a function of `IMPLEMENTATIONS`; FlashAttention 3 and 4 replace torch's own in this process."""
    if name in ("flash_3", "flash_4"):
        import_dotted(f"{_HERE}.packed.activate", KEY)("FA3" if name == "flash_3" else "FA4")
    return import_dotted(IMPLEMENTATIONS[name].function, KEY)


def by_documents(whole: Callable[..., Tensor], packed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that calls `packed` for contexts with documents, and `whole` for others."""
    if whole is packed:
        return whole

    def attend(q: Tensor, k: Tensor, v: Tensor, ctx: Documents, *args: Any, **options: Any) -> Tensor:
        return (packed if has_documents(ctx) else whole)(q, k, v, ctx, *args, **options)

    return attend


def facts_of(device: torch.device) -> DeviceFacts:
    """Return the facts about a device and this installation."""
    if device.type == "cpu":
        return DeviceFacts("cpu")
    vendor = "amd" if torch.version.hip else "nvidia"
    capability = torch.cuda.get_device_capability(device) if vendor == "nvidia" else (0, 0)
    found = {name for name, module in PACKAGES.items() if _is_installed(module)}
    return DeviceFacts(vendor, capability, installed=frozenset(found | ({"triton"} if _triton_compiles() else set())))


def _triton_compiles() -> bool:
    """Return whether Triton and the compiler that it needs are installed."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    headers = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    return compiler is not None and os.path.exists(headers) and _is_installed("triton")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing, too
        return False
