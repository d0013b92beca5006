# `make` alone lists the targets. Everything lives in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
THREADS ?= 2
# Two of them have the layouts, whose ranks wait for one another.
WORKERS ?= 4
# Byte code is kept: many tests start processes, and each would compile the package again.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help setup train test slow nightly test-gpu fuzz test-slurm test-network test-ranks mutants compare-power chaos soak lint bench bench-gpu plan-proof leaderboard reference pictures docs clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## create .venv and install Kénotron, nothing more

train: setup  ## train a small Llama on text that every machine has: under 5 minutes on 2 CPU cores
	$(BIN)/kenotron train examples/quickstart.yaml

test: $(VENV)/.installed-test  ## run the test suite
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" --sample --budget

slow: $(VENV)/.installed-test $(VENV)/.installed-triton  ## run the slow tests, each on one of its cases
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not slurm and not many_ranks" --sample

nightly: $(VENV)/.installed-test $(VENV)/.installed-triton $(VENV)/.installed-trackers  ## run the slow tests and those of many cases on all of them, and the properties on many more examples
	$(BIN)/python -m pytest -n $(WORKERS) -m "(slow or cases or hypothesis) and not slurm and not many_ranks" --hypothesis-profile=thorough

test-gpu: $(VENV)/.installed-test  ## the tests that need one GPU; skipped where there is none
	$(BIN)/python -m pytest -rs -m gpu tests/gpu

fuzz: $(VENV)/.installed-test  ## a million damaged configs, checkpoints, models and token files: about an hour; EXAMPLES=n of each test
	EXAMPLES=$(or $(EXAMPLES),50000) $(BIN)/python -m pytest -n $(WORKERS) -m hypothesis --hypothesis-profile=fuzz tests/test_fuzz.py tests/data/test_fuzz_readers.py

test-slurm: $(VENV)/.installed-test  ## jobs on a real Slurm of two nodes, installed on Debian if root asks
	@command -v slurmctld >/dev/null || ! command -v apt-get >/dev/null || apt-get install -qq -y --no-install-recommends slurm-wlm munge
	$(BIN)/python -m pytest -rs -m slurm tests/launch tests/evaluation

test-network: $(VENV)/.installed-test  ## a run on two machines whose network is cut: namespaces of Linux, iproute2 installed on Debian if root asks
	@command -v ip >/dev/null || ! command -v apt-get >/dev/null || apt-get install -qq -y --no-install-recommends iproute2
	$(BIN)/python -m pytest -rs tests/launch/test_two_machines.py

test-ranks: $(VENV)/.installed-test  ## a run on 32 ranks, dp 2 x pp 4 x tp 2 x cp 2, against one process: minutes
	$(BIN)/python -m pytest -rs -m many_ranks tests/launch

mutants: $(VENV)/.installed-test  ## see which of the field's bugs the quick tests would miss; ONLY=name for one
	PYTHONPATH=tests $(BIN)/python -m mutants.run --workers $(THREADS) --only $(ONLY)

compare-power: $(VENV)/.installed-test  ## how often `kenotron compare` is right: 200 pairs that agree, 25 seeded faults
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m compare_power.run

chaos: $(VENV)/.installed-test  ## 62 faults of ranks that spare processes replace: half an hour, and as long without faults; OPTIONS="--every 8"
	PYTHONPATH=tests $(BIN)/python -m chaos.run $(OPTIONS)

soak: $(VENV)/.installed-test  ## 1,000 kills of six runs on several layouts, which resume each time: 9 minutes; OPTIONS="--kills 50"
	PYTHONPATH=tests $(BIN)/python -m soak.run $(OPTIONS)

lint: $(VENV)/.installed-dev  ## formatting, lint, types, layering, generated docs, schemas of what GitHub reads
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files --show-diff-on-failure

bench: setup  ## measure against the peers, on this machine, in one run
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/layouts.py
	$(BIN)/python benchmarks/zero_memory.py
	$(BIN)/python benchmarks/one_rank.py
	$(BIN)/python benchmarks/data_wait.py

bench-gpu: $(VENV)/.installed-plots  ## measure on one GPU: an hour; OPTIONS="--minutes 15 --only REGEX"
	$(BIN)/python benchmarks/gpu/speed.py $(OPTIONS)

plan-proof: $(VENV)/.installed-test $(VENV)/.installed-plots  ## compare planned memory with that of ranks, and draw it: half an hour on two cores
	$(BIN)/python benchmarks/plan_proof.py $(OPTIONS)

leaderboard: setup  ## train the entries of the leaderboard one after another and write their table: about 5 minutes each
	$(BIN)/python benchmarks/leaderboard.py

reference: $(VENV)/.installed  ## write docs/config-reference.md, docs/commands.md, the JSON schema and the notebook anew
	$(BIN)/python tests/support/reference_page.py
	$(BIN)/kenotron config schema > docs/config.schema.json
	$(BIN)/python tests/support/commands_page.py
	$(BIN)/python tests/support/notebook.py

pictures: $(VENV)/.installed-plots  ## draw the pictures of the README and docs anew, from runs: half an hour on two cores
	$(BIN)/python benchmarks/diagrams.py
	$(BIN)/python benchmarks/pictures.py $(OPTIONS)

docs: $(VENV)/.installed-docs  ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean:  ## remove .venv
	rm -rf $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "Python >= 3.11 is needed, found %d.%d; set PYTHON=..." % v[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(PIP) install --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@
