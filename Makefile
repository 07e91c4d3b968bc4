# `make` lists the targets. PYTHON=python3.12 chooses the interpreter of .venv, which `make setup` makes.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Most of the time tests wait, so that two cores are enough for three at a time.
PARALLEL := --numprocesses=3 --dist=worksteal

.DEFAULT_GOAL := help
# In the order written: python3-venv before .venv, lint before tests.
.NOTPARALLEL:
.PHONY: help setup system-packages run test check format lint type layers unit net design bench docs fuzz faults soak clean

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: system-packages $(INSTALLED) ## Make .venv with everything for development; install the system packages of the tests

system-packages:
	@PYTHON='$(PYTHON)' tools/system-packages

# The build backend comes first and from constraints.txt too, so that nothing unpinned takes part.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

run: $(INSTALLED) ## Train a small model on two nodes played by this machine
	$(BIN)/dtrain launch cluster-examples/digits.yaml --cluster cluster-examples/local.yaml

test check unit net design fuzz faults soak: export OMP_NUM_THREADS = 1

test: setup ## All tests
	$(BIN)/pytest $(PARALLEL)

check: lint type layers test ## All that CI checks: lint, types, layers, tests

format: $(INSTALLED) ## Bring the code into its one format
	$(BIN)/ruff check --quiet --fix
	$(BIN)/ruff format

lint: $(INSTALLED) ## Style and format; dtrain/node uses nothing newer than Python 3.9
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/vermin --quiet --no-tips --violations --target=3.9- dtrain/node

type: $(INSTALLED) ## Types
	$(BIN)/mypy

layers: $(INSTALLED) ## Imports point down only
	$(BIN)/lint-imports

unit: $(INSTALLED) ## Tests of what is pure: seconds
	$(BIN)/pytest tests/unit

net: setup ## Tests on real sshd, torchrun and mpirun
	$(BIN)/pytest $(PARALLEL) tests/net

fuzz: $(INSTALLED) ## 10,000 mutated job and cluster files: each an answer within a second, never a traceback
	DTRAIN_FUZZ=10000 $(BIN)/pytest -o timeout=3600 -o faulthandler_timeout=3600 tests/unit/test_spec_mutations.py

design: $(INSTALLED) ## Tests that hold the design's rules
	$(BIN)/pytest tests/design

bench: $(INSTALLED) ## Measure what dtrain itself costs
	$(BIN)/python benchmarks/launch_overhead.py
	$(BIN)/python benchmarks/ssh_launch_overhead.py
	$(BIN)/python benchmarks/connect.py
	$(BIN)/python benchmarks/check.py
	$(BIN)/python benchmarks/fail_as_one.py
	$(BIN)/python benchmarks/log_flood.py
	$(BIN)/python benchmarks/help_time.py
	$(BIN)/python benchmarks/plan_1000.py
	$(BIN)/python benchmarks/status_1000.py
	$(BIN)/python benchmarks/trainer_overhead.py
	$(BIN)/python benchmarks/idle.py
	$(BIN)/python benchmarks/sync.py

docs: $(INSTALLED) ## Write docs/job-file.md and docs/preflight.md from what dtrain says of each key and finding
	$(BIN)/python tools/job_file_docs.py > docs/job-file.md
	$(BIN)/python tools/preflight_docs.py > docs/preflight.md

faults: setup ## The fault matrix of docs/reliability.md, and causes with clocks apart: three quarters of an hour
	$(BIN)/python benchmarks/faults.py
	$(BIN)/pytest tests/net/test_causes.py -m ''

soak: setup ## 200 random faults in a row, SEED=N for the same ones again: half an hour
	$(BIN)/python benchmarks/soak.py $(if $(SEED),--seed $(SEED))

clean: ## Remove what make made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
