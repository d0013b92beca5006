"""What a first look at a GPU needs is imported where this project's other packages are missing.

A machine with a GPU has torch, transformers, pytest and what they need, and often no network. There `kenotron`, launch,
doctor, tests/gpu and benchmarks/gpu do without `datasets` and without the extras.
"""

import os
import re
import subprocess
import sys
import tomllib

import pytest

from support.tiny_run import REPOSITORY

# Requirements and extras, by the names they are imported as, that such a machine lacks, with what comes only with them.
ABSENT = {
    *("datasets", "dill", "multiprocess"),
    *("datatrove", "ctranslate2", "etcd", "lm_eval", "accelerate"),
    *("s3fs", "aiobotocore", "botocore", "boto3", "s3transfer", "gcsfs"),
    *("moto", "flask", "flask_cors", "werkzeug", "gcp_storage_emulator"),
    *("flash_attn", "mamba_ssm", "causal_conv1d", "wandb", "trackio"),
    *("mkdocs", "material", "mypy", "ruff", "importlinter", "pre_commit", "check_jsonschema"),
}
PRESENT = {
    *("torch", "numpy", "pydantic", "yaml", "typer", "rich", "tokenizers", "transformers", "safetensors"),
    *("tensorboard", "xxhash", "fsspec", "aiohttp", "triton", "scipy", "matplotlib", "pytest", "xdist", "hypothesis"),
}
IMPORTED_AS = {
    "pyyaml": "yaml",
    "types-pyyaml": "yaml",
    "python-etcd": "etcd",
    "pytest-xdist": "xdist",
    "mkdocs-material": "material",
    "import-linter": "importlinter",
}
WITHOUT = """
import sys
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find(_, name, path=None, target=None):
    return None if name.partition(".")[0] in {absent} else find_spec(name, path, target)

PathFinder.find_spec = classmethod(find)  # nothing is found, as where nothing is installed
"""


def run_there(program: str) -> subprocess.CompletedProcess[str]:
    """A process of Python in which those packages are missing."""
    command = [sys.executable, "-c", WITHOUT.format(absent=sorted(ABSENT)) + program]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)


def test_every_requirement_is_known_to_be_there_or_absent() -> None:
    """A new one has to be placed in a list above; one in `ABSENT` may be imported only where it is used."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    names = {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower() for line in lines} - {"kenotron"}
    modules = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
    assert modules <= ABSENT | PRESENT
    assert not ABSENT & PRESENT


def test_what_is_absent_is_not_found_by_either_way_of_looking() -> None:
    done = run_there("from importlib.util import find_spec; print(find_spec('datasets'), find_spec('flash_attn'))")
    assert done.stdout == "None None\n", done.stderr[-3000:]
    assert "No module named 'datasets'" in run_there("import datasets").stderr


@pytest.mark.slow
def test_the_package_launch_doctor_and_the_benchmark_of_a_gpu_are_imported_without_them() -> None:
    program = """
import importlib, kenotron, kenotron.doctor, kenotron.launch, pkgutil
for package in (kenotron.doctor, kenotron.launch):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(kenotron.train.__name__, len(sys.modules.keys() & {"kenotron.doctor.self_test", "kenotron.launch.slurm.sites"}))
sys.path.insert(0, "benchmarks/gpu")
import speed, contender, first_contact, trace_kernels
print(*contender.CONTENDERS)
"""
    done = run_there(program)
    assert done.stdout.startswith("train 2\nkenotron kenotron compiled"), done.stderr[-3000:]


@pytest.mark.slow
def test_the_tests_of_a_gpu_are_collected_without_them_and_without_plugins_of_pytest() -> None:
    """tests/conftest.py asks neither for hypothesis nor for xdist."""
    options = ["tests/gpu", "--collect-only", "-p", "no:cacheprovider"]
    absent = "sys.modules['hypothesis'] = sys.modules['xdist'] = None"
    done = run_there(f"{absent}; import pytest; sys.exit(pytest.main({options!r}))")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for file in (REPOSITORY / "tests" / "gpu").glob("test_*.py"):
        assert f"{file.name}::" in done.stdout
