"""Format a report as one page of plain text, for a terminal or a bug report, and as JSON.

    Processor
      AMD EPYC        2 cores · 1 socket · avx2 avx512f avx512_bf16
      usable          2 cores by affinity, no cgroup quota · load 0.4

A page has no names of machines or users, no addresses and no paths (`settings` removes them).
"""

import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from kenotron.config.errors import counted
from kenotron.doctor.facts import Facts, Finding, Report
from kenotron.launch.environment import default_variables

LABEL = 16
GIB = 1 << 30
DOT = " · "
HARD_SPACE = "\u00a0"
UNBROKEN = 40  # a shorter part stays on one line

Row = tuple[str, str]


def as_json(report: Report) -> str:
    """Return one JSON object with the fields of `Report`, indented."""
    return json.dumps(asdict(report), indent=2, ensure_ascii=False)


def page(report: Report, width: int = 100) -> Iterator[Row]:
    """Yield (style, line) for the page; styles are ``title``, ``error``, ``warning``, ``hint``, ``good`` and ``""``."""
    right = f"{report.time}{DOT}{report.seconds:.0f} s"
    yield "title", f"kenotron doctor{right:>{width - 15}}"
    for title, rows in _sections(report.facts):
        yield "", ""
        yield "title", title
        for label, text in rows:
            yield from (("", line) for line in _row(label, text, width))
    if report.self_tests:
        yield "", ""
        yield "title", "Self-test"
        for test in report.self_tests:
            style, verdict = ("good", f"passed{DOT}") if test.passed else ("error", "FAILED: ")
            text = f"{verdict}{test.text}{DOT}{test.seconds:.0f} s"
            yield from ((style, line) for line in _row(test.where, text, width))
    yield "", ""
    yield from _findings(report.findings, width)
    yield verdict_of(report)


def verdict_of(report: Report) -> Row:
    """Return the last line: whether training works here, or the failures."""
    failed = [f"the self-test on {test.where}" for test in report.self_tests if not test.passed]
    failed += [finding.name for finding in report.findings if finding.severity == "error"]
    if failed:
        return "error", f"FAILED: {', '.join(failed)}."
    if not report.self_tests:
        return "good", "No error found. Training was not tried (--quick)."
    return "good", f"Training works here, on {' and '.join(test.where for test in report.self_tests)}."


def _row(label: str, text: str, width: int) -> list[str]:
    """Return lines ``  label   text``, wrapped below the text and, if possible, between its parts."""
    parts = [part.replace(" ", HARD_SPACE) if len(part) < UNBROKEN else part for part in re.split(r"( · |, )", text)]
    joined = "".join(
        part if part.strip(HARD_SPACE) not in ("·", ",") else part.rstrip(HARD_SPACE) + " " for part in parts
    )
    start = f"  {label:<{LABEL - 1}} "
    lines = textwrap.wrap(
        joined, width, initial_indent=start, subsequent_indent=" " * (LABEL + 2), break_on_hyphens=False
    )
    return [line.replace(HARD_SPACE, " ").rstrip(DOT) for line in lines] or [start.rstrip()]


def _findings(findings: list[Finding], width: int) -> Iterator[Row]:
    if not findings:
        return
    counts = Counter(finding.severity for finding in findings)
    yield "title", f"Findings: {', '.join(counted(number, severity) for severity, number in counts.items())}"
    for finding in findings:
        yield finding.severity, f"  {finding.severity}: {finding.name}"
        for line in textwrap.wrap(f"{finding.what}.", width - 4, break_on_hyphens=False):
            yield "", f"    {line}"
        for line in textwrap.wrap(f"→ {finding.do}", width - 4, subsequent_indent="  ", break_on_hyphens=False):
            yield "", f"    {line}"
    yield "", ""


# ---- the sections --------------------------------------------------------------------------------------------


def _sections(facts: Facts) -> list[tuple[str, list[Row]]]:
    return [
        ("Software", _software(facts)),
        ("Processor and memory", [*_processor(facts), *_memory(facts)]),
        ("Accelerators", _accelerators(facts)),
        ("Disk and network", [*_disk(facts), *_network(facts)]),
        ("Settings", _settings(facts)),
    ]


def _software(facts: Facts) -> list[Row]:
    software = facts.software
    others = {name: version for name, version in software.packages.items() if name != "torch"}
    compiler = software.compiler or "no C++ compiler"
    return [
        ("kenotron", software.kenotron),
        ("python", DOT.join(part for part in (software.python, software.system, software.libc) if part)),
        ("torch", _torch(facts)),
        ("", ", ".join(f"{name} {version}" for name, version in others.items())),
        ("torch.compile", f"{compiler}{DOT}Python.h {'found' if software.python_headers else 'missing'}"),
    ]


def _torch(facts: Facts) -> str:
    torch = facts.torch
    if torch.problem is not None:
        return f"{facts.software.packages.get('torch', '')} cannot be imported: {torch.problem}".strip()
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.rocm}" if torch.rocm else "the CPU"
    parts = [f"{torch.version} for {built}", f"BLAS: {torch.blas}" + (", oneDNN" if torch.onednn else "")]
    parts += [f"NCCL {torch.nccl}"] if torch.nccl else []
    return DOT.join([*parts, f"{' and '.join(torch.backends)} between ranks"])


def _processor(facts: Facts) -> list[Row]:
    processor, torch = facts.processor, facts.torch
    quota = f"cgroup quota {processor.quota:g}" if processor.quota is not None else "no cgroup quota"
    load = f"{DOT}load {processor.load:.1f}" if processor.load is not None else ""
    rows = [
        ("processor", processor.name),
        ("", DOT.join([counted(processor.cores, "core"), *processor.instructions])),
        ("usable", f"{counted(processor.usable, 'core')}: {processor.allowed} by affinity, {quota}{load}"),
    ]
    if torch.threads:
        rows.append(("threads", f"torch: {torch.threads}, {torch.cpu_capability} kernels"))
    return rows


def _memory(facts: Facts) -> list[Row]:
    memory, limits = facts.memory, facts.limits
    limit = f"cgroup limit {size(memory.limit)}" if memory.limit else "no cgroup limit"
    shm = f"/dev/shm {size(memory.shm_total)}" if memory.shm_total is not None else "no /dev/shm"
    files = "unlimited" if limits.open_files is None else f"{limits.open_files:,}"
    locked = "unlimited" if limits.locked_memory is None else size(limits.locked_memory)
    available = "unknown" if memory.available is None else f"{part_of(memory.available, memory.total)} available"
    return [
        ("memory", f"{available}{DOT}{limit}{DOT}{shm}"),
        ("limits", f"open files {files}{DOT}locked memory {locked}"),
    ]


def _accelerators(facts: Facts) -> list[Row]:
    torch, nvidia = facts.torch, facts.nvidia
    rows = []
    if nvidia.problem:
        rows.append(("driver", nvidia.problem))
    if nvidia.driver:
        rows.append(("driver", f"NVIDIA {nvidia.driver}, CUDA {nvidia.cuda} at most"))
    for number, gpu in enumerate(torch.accelerators):
        free = f"{part_of(gpu.memory_free, gpu.memory_total)} free"
        rows.append((f"GPU {number}", DOT.join([gpu.name, free, f"capability {gpu.capability}"])))
    if not torch.accelerators:
        gpus = f"; the driver has {counted(len(nvidia.gpus), 'GPU')}: {nvidia.gpus[0]}" if nvidia.gpus else ""
        rows.append(("none", f"{torch.accelerators_problem or 'runs are on the CPU'}{gpus}"))
    return rows


def _disk(facts: Facts) -> list[Row]:
    disk = facts.disk
    if disk.problem is not None:
        return [("folder", f"not writable: {disk.problem}")]
    files = f"{DOT}{disk.files_free:,} more files" if disk.files_free is not None else ""
    skew = f"{DOT}clock off by {disk.clock_skew:+.1f} s" if abs(disk.clock_skew or 0.0) >= 0.1 else ""
    return [("folder", f"{disk.filesystem or 'unknown'}{DOT}{part_of(disk.free, disk.total)} free{files}{skew}")]


def _network(facts: Facts) -> list[Row]:
    rows = [("network", ", ".join(facts.network.interfaces)), ("infiniband", ", ".join(facts.network.infiniband))]
    return [(label, text) for label, text in rows if text]


def _settings(facts: Facts) -> list[Row]:
    added = default_variables(facts.settings, facts.torch.cuda)
    rows = [
        ("set", ", ".join(f"{name}={value}" for name, value in facts.settings.items()) or "nothing"),
        ("a run adds", ", ".join(f"{name}={value}" for name, value in added.items())),
    ]
    return [(label, text) for label, text in rows if text]


# ---- numbers ---------------------------------------------------------------------------------------------------


def size(number: int) -> str:
    """Format bytes as ``23.5 GiB``, ``64 MiB`` or ``8 KiB``."""
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB")):
        if number >= unit:
            return f"{number / unit:.1f} {name}" if unit == GIB else f"{number / unit:.0f} {name}"
    return f"{number / 1024:.0f} KiB"


def part_of(part: int, whole: int) -> str:
    """Format two sizes as ``72.6 of 252.0 GiB``, or both with units if these differ."""
    (number, unit), (total, total_unit) = size(part).split(), size(whole).split()
    return f"{number} of {total} {unit}" if unit == total_unit else f"{number} {unit} of {total} {total_unit}"
