"""Show the environment variables that change how a run behaves, without private data.

NCCL_DEBUG=INFO                 is shown
TORCH_HOME=/home/ada/torch      is shown as TORCH_HOME=(a path)
NCCL_COMM_ID=10.0.0.7:4000      is shown as NCCL_COMM_ID=(an address)
HF_TOKEN=…                      is not on the list, and not read

Folders are removed from error messages: OSError: /home/ada/env/lib/libtorch.so: … → OSError: …/libtorch.so: …
"""

import getpass
import re
import socket
from collections.abc import Mapping

LISTED = re.compile(
    r"(NCCL|RCCL|GLOO|UCX|FI|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|KENOTRON|CUDA|CUBLAS|CUDNN|NVIDIA_TF32|HIP|ROCR|HSA)_"
    r"|(OMP|GOMP|KMP|MKL|OPENBLAS|ONEDNN|DNNL|ATEN|MALLOC)_"
    r"|(HF_HUB_OFFLINE|HF_DATASETS_OFFLINE|TRANSFORMERS_OFFLINE|LD_PRELOAD|PYTHONMALLOC)$"
    r"|SLURM_(NNODES|NTASKS|CPUS_PER_TASK|GPUS_ON_NODE)$"
)
PRIVATE_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|_KEY$|AUTH")
ADDRESS_NAME = re.compile(r"HOST|ADDR|COMM_ID|ENDPOINT|URL")
ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|@|://|[0-9a-fA-F]*:[0-9a-fA-F]*:")
LONGEST = 120


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to show, with their values or placeholders."""
    listed = [name for name in sorted(environment) if LISTED.match(name) and not PRIVATE_NAME.search(name)]
    return {name: shown(name, environment[name]) for name in listed}


def shown(name: str, value: str) -> str:
    """Return `value`, or a placeholder, because paths contain names of users, and addresses names of machines."""
    if ADDRESS_NAME.search(name) or ADDRESS.search(value):
        return "(an address)"
    if name == "LD_PRELOAD":
        return " ".join(re.split(r"[\\/]", part)[-1] for part in re.split(r"[:\s]+", value))
    if re.search(r"[\\/~]", value):
        return "(a path)"
    return value if len(value) <= LONGEST else value[:LONGEST] + "…"


def anonymous(message: str) -> str:
    """Return an error message without folders, and without the names of this machine and its user."""
    message = re.sub(r"'[^']*[\\/]([^'\\/]+)'", r"'…/\1'", message)  # quoted paths, which may have spaces
    message = re.sub(r"(?<![\w….)])(?:[A-Za-z]:|~)?[\\/](?:[^\s'\":;,]*[\\/])?([^\s'\":;,\\/]+)", r"…/\1", message)
    names = {socket.gethostname(): "(this machine)", _user(): "(user)"}
    for name, placeholder in names.items():
        if len(name) > 2:  # two letters would match other words
            message = re.sub(rf"\b{re.escape(name)}\b", placeholder, message)
    return message


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a user without a name, in a container
        return ""
