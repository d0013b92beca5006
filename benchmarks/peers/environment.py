"""The virtual environment that all contenders share, and what it runs on.

One environment for all, so that they meet on the same torch. litgpt asks for a huggingface_hub below 1.4, which
transformers 5 does not take, and its dependencies bring a torchvision that does not fit the CPU build of torch; its
model and step need neither, so litgpt and lightning are installed without their dependencies.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-bench" / "bin" / "python"
REQUIREMENTS = ROOT / "benchmarks" / "requirements-peers.txt"
WITHOUT_DEPENDENCIES = ("litgpt==0.5.13", "lightning==2.6.6")
PACKAGES = ("torch", "transformers", "accelerate", "litgpt", "lightning", "kenotron")


def ensure() -> Path:
    """The environment's Python, made on the first call (minutes) and whenever the list of peers changes."""
    stamp = ROOT / ".venv-bench" / "installed.txt"
    wanted = REQUIREMENTS.read_text() + "\n".join(WITHOUT_DEPENDENCIES)
    if stamp.exists() and stamp.read_text() == wanted:
        return PYTHON
    print("Installing the peers into .venv-bench …", flush=True)
    if not PYTHON.exists():
        venv.create(ROOT / ".venv-bench", with_pip=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--requirement", str(REQUIREMENTS)], check=True)
    subprocess.run([*pip, "--editable", str(ROOT)], check=True)
    subprocess.run([*pip, "--no-deps", *WITHOUT_DEPENDENCIES], check=True)
    stamp.write_text(wanted)
    return PYTHON


def versions(python: Path) -> dict[str, str]:
    """Package → version, as installed there."""
    script = "import importlib.metadata as m, json, sys; print(json.dumps({p: m.version(p) for p in sys.argv[1:]}))"
    answer = subprocess.run([str(python), "-c", script, *PACKAGES], check=True, capture_output=True, text=True)
    return {"python": platform.python_version()} | json.loads(answer.stdout)


def machine() -> dict[str, str | int]:
    """What the numbers were taken on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    fast = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count() or 1,
        "instructions": " ".join(fast),
        "memory_gib": round(_memory_total() / 2**30),
        "system": f"{platform.system()} {platform.machine()}, {platform.libc_ver()[0]} {platform.libc_ver()[1]}",
    }


def _memory_total() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def available_memory() -> int:
    """Bytes that new processes can still have; a large number where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return sys.maxsize
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
