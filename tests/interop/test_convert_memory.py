"""Converting a model takes the memory of two of its shards, whatever its size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_llamas import hf_llama
from support.tiny_run import environment

SHARD = 16 << 20
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 24, "vocab_size": 8192}

# The process's own memory at its highest within each conversion, less that before it: mapped files are not its own.
MEASURE = """
import json, re, sys, threading
from pathlib import Path
from kenotron.interop import from_hf, to_hf

def peak(convert):
    seen, over = [own()], threading.Event()
    def look():
        while not over.wait(0.001):
            seen.append(own())
    thread = threading.Thread(target=look)
    thread.start()
    convert()
    over.set()
    thread.join()
    return max(seen) - seen[0]

def own():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

small, large, shard = sys.argv[1:]
from_hf(small, "warm")
to_hf("warm/0", "warm-again")
grown = [peak(lambda: from_hf(large, "ours")), peak(lambda: to_hf("ours/0", "again", max_shard_size=int(shard)))]
print(json.dumps(grown))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_both_ways_take_no_more_than_two_shards(tmp_path: Path) -> None:
    hf_llama().save_pretrained(tmp_path / "small")
    hf_llama(**SHAPE).save_pretrained(tmp_path / "large", max_shard_size=SHARD)
    shards = list((tmp_path / "large").glob("*.safetensors"))
    assert len(shards) > 6
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large"), str(SHARD)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for grown in json.loads(done.stdout.splitlines()[-1]):
        assert grown < 2 * max(path.stat().st_size for path in shards)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 6
