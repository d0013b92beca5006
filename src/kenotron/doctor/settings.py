"""Environment variables that change how a run behaves, without anything private.

NCCL_DEBUG=INFO                 as it is
TORCH_HOME=/home/ada/torch      TORCH_HOME=(a path)
NCCL_COMM_ID=10.0.0.7:4000      NCCL_COMM_ID=(an address)
HF_TOKEN=…                      is not on the list, and not read

Messages of errors lose their folders: OSError: /home/ada/env/lib/libtorch.so: … → OSError: …/libtorch.so: …
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Mapping

FAMILIES = [
    "NCCL_",
    "TORCH_",
    "PYTORCH_",
    "TORCHINDUCTOR_",
    "CUDA_",
    "CUBLAS_",
    "CUDNN_",
    "NVIDIA_TF32_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "GLOO_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "ONEDNN_",
    "DNNL_",
    "ATEN_",
    "MALLOC_",
    "TRITON_",
    "KENOTRON_",
    "RCCL_",
    "UCX_",
    "FI_",
]
SINGLE = [
    "HF_HUB_OFFLINE",
    "HF_DATASETS_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM",
    "LD_PRELOAD",
    "PYTHONMALLOC",
    "SLURM_NNODES",
    "SLURM_NTASKS",
    "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_ON_NODE",
]
PRIVATE_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|_KEY$|AUTH")
ADDRESS_NAME = re.compile(r"HOST|ADDR|COMM_ID|ENDPOINT|URL")
ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|@|://|[0-9a-fA-F]*:[0-9a-fA-F]*:")
LONGEST = 120


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be shown, with their values or what stands for them."""
    listed = [name for name in environment if name in SINGLE or name.startswith(tuple(FAMILIES))]
    return {name: shown(name, environment[name]) for name in sorted(listed) if not PRIVATE_NAME.search(name)}


def shown(name: str, value: str) -> str:
    """`value`, or in brackets what it is: paths hold names of users, addresses those of machines."""
    if ADDRESS_NAME.search(name) or ADDRESS.search(value):
        return "(an address)"
    if name == "LD_PRELOAD":
        return " ".join(re.split(r"[\\/]", part)[-1] for part in re.split(r"[:\s]+", value))
    if re.search(r"[\\/~]", value):
        return "(a path)"
    return value if len(value) <= LONGEST else value[:LONGEST] + "…"


def anonymous(message: str) -> str:
    """A message of an error without folders, and without the names of this machine and its user."""
    message = re.sub(r"'[^']*[\\/]([^'\\/]+)'", r"'…/\1'", message)  # as Python quotes them, with spaces
    message = re.sub(r"(?<![\w….)])(?:[A-Za-z]:|~)?[\\/](?:[^\s'\":;,]*[\\/])?([^\s'\":;,\\/]+)", r"…/\1", message)
    names = {socket.gethostname(): "(this machine)", _user(): "(user)"}
    for name, instead in names.items():
        if len(name) > 2:  # two letters would be found in other words
            message = re.sub(rf"\b{re.escape(name)}\b", instead, message)
    return message


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user without a name
        return ""
