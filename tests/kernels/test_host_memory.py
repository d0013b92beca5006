"""After `keep_freed_memory`, the tensors of a repeated step cost no page faults."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import torch
from kenotron.kernels.host_memory import keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()

def step():
    kept = [torch.ones(10 << 20) for _ in range(3)]  # 40 MiB each, above glibc's largest own threshold
    return kept[-1][0].item()

for _ in range(10):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_a_repeated_step_faults_in_no_pages_when_freed_memory_is_kept():
    faults = {mode: int(subprocess.check_output([sys.executable, "-c", PROGRAM, mode])) for mode in ("keep", "plain")}
    pages = 3 * 3 * (40 << 20) // 4096
    assert faults["plain"] > pages / 2
    assert faults["keep"] < pages / 4  # the heap may still move a tensor or two to another place
