"""NVIDIA's driver and GPUs as nvidia-smi describes them, which also works where torch cannot use them.

nvidia-smi --query-gpu=name,memory.total,… --format=csv,noheader,nounits
  NVIDIA H100 80GB HBM3, 81559, 4, Enabled, 700.00, 700.00, 0, 16, 16, Disabled
"""

from __future__ import annotations

import re
import shutil
import subprocess

from kenotron.doctor.facts import Nvidia, NvidiaGpu

SECONDS = 15.0  # a driver with a GPU that fell off the bus never answers
QUERY = [
    "name",
    "memory.total",
    "memory.used",
    "persistence_mode",
    "power.limit",
    "power.default_limit",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "mig.mode.current",
]


def nvidia() -> Nvidia:
    """Driver, GPUs and the links between them; empty where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return Nvidia()
    try:
        head = _ask()
        gpus = gpus_of(_ask(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"))
        links = links_of(_ask("topo", "-m")) if len(gpus) > 1 else []
    except subprocess.TimeoutExpired:
        return Nvidia(problem=f"nvidia-smi gave no answer within {SECONDS:g} s")
    except (subprocess.CalledProcessError, OSError) as error:
        said = (getattr(error, "stdout", None) or str(error)).strip().splitlines()
        return Nvidia(problem=f"nvidia-smi: {said[-1] if said else error}")
    driver, cuda = versions_of(head)
    return Nvidia(driver=driver, cuda=cuda, gpus=gpus, links=links)


def _ask(*arguments: str) -> str:
    return subprocess.run(
        ["nvidia-smi", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
        stdin=subprocess.DEVNULL,
    ).stdout


def versions_of(text: str) -> tuple[str | None, str | None]:
    """Driver and newest CUDA runtime in the head of nvidia-smi's page."""
    driver = re.search(r"Driver Version:\s*([\d.]+)", text)
    cuda = re.search(r"CUDA (?:\w+ )?Version:\s*([\d.]+)", text)
    return driver.group(1) if driver else None, cuda.group(1) if cuda else None


def gpus_of(text: str) -> list[NvidiaGpu]:
    """The GPUs of the answer to `QUERY`; what a GPU does not have ([N/A]) is None."""
    found = []
    for line in text.strip().splitlines():
        name, *words = (word.strip() for word in line.split(","))
        if len(words) + 1 != len(QUERY):
            continue
        total, used, persistence, limit, default, errors, width, widest, mig = words
        found.append(
            NvidiaGpu(
                name=name,
                memory_total=(_whole(total) or 0) << 20,
                memory_used=(_whole(used) or 0) << 20,
                persistence={"Enabled": True, "Disabled": False}.get(persistence),
                power_limit=_number(limit),
                power_default=_number(default),
                uncorrected_errors=_whole(errors),
                pcie_width=_whole(width),
                pcie_width_max=_whole(widest),
                mig=mig == "Enabled",
            )
        )
    return found


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


def _whole(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def links_of(text: str) -> list[list[str]]:
    """The matrix of `nvidia-smi topo -m` between GPUs: [["X", "NV18"], ["NV18", "X"]]."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split("\t") for line in text.splitlines()]
    header = next((row for row in rows if "GPU0" in (cell.strip() for cell in row)), [])
    columns = [number for number, cell in enumerate(header) if re.fullmatch(r"GPU\d+", cell.strip())]
    body = [row for row in rows if re.fullmatch(r"GPU\d+", row[0].strip()) and row is not header]
    return [[row[column].strip() for column in columns if column < len(row)] for row in body]
