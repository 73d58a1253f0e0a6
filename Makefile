# What people type. Everything sets itself up: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
INTEROP := $(VENV)/interop
FINETUNING := $(VENV)/finetuning
LOWEST := $(VENV)/lowest
PYTEST := PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q
TREE := orch orchestrator trainer checkpointing tests benchmarks examples

.PHONY: help venv demo check lint test test-gpu mutants proof bench wheel clean

help:  ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

venv: $(READY)  ## make .venv with orch and the pinned versions of what it needs (a second call costs nothing)

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) was not found. Install it: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is older than 3.11. Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module. Install it: apt-get install python3-venv"; exit 1; }
	@echo "setting up $(VENV) (once; about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# Compiling all modules takes two thirds of the time; Python compiles those that are imported.
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q --no-compile -e .
	@touch $(READY)

$(DEV): $(READY)
	@echo "adding what lint and tests need to $(VENV) (once)"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q -e '.[dev]'
	@touch $(DEV)

$(INTEROP)/.ready: tests/interop/requirements.txt | $(DEV)
	@echo "setting up $(INTEROP) (once): transformers, which the tests load exported models with"
	@rm -rf $(INTEROP)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q --no-deps --target $(INTEROP) -r $<
	@touch $@

$(FINETUNING)/.ready: tests/finetuning/requirements.txt | $(DEV)
	@echo "setting up $(FINETUNING) (once): peft, torchao and pyarrow, which fine-tuning needs"
	@rm -rf $(FINETUNING)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q --no-deps --target $(FINETUNING) -r $<
	@touch $@

$(LOWEST)/.ready: tests/lowest/requirements.txt | $(DEV)
	@echo "setting up $(LOWEST) (once): the lowest versions that are promised, which tests run with"
	@rm -rf $(LOWEST)
	@PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q --no-deps --target $(LOWEST) -r $<
	@touch $@

demo: venv  ## the main job on this machine: trains, loses a rank, recovers, finishes (half a minute)
	@$(BIN)/orch demo

lint: $(DEV)
	$(BIN)/ruff format --check $(TREE)
	$(BIN)/ruff check $(TREE)
	$(BIN)/mypy

check: lint  ## lint, types, house rules and the fast tests (about 5 minutes)
	$(PYTEST) -n 2 -m "not slurm and not multi and not proof"

test: $(INTEROP)/.ready $(FINETUNING)/.ready $(LOWEST)/.ready  ## everything, the real Slurm included (about 10 minutes on two cores)
	@$(MAKE) --no-print-directory -j 2 lint build/.bytecode
	$(PYTEST) -n 5 -m "not proof" --durations=40

proof: $(DEV) $(INTEROP)/.ready $(FINETUNING)/.ready $(LOWEST)/.ready  ## the long counts; writes docs/proof.md
	$(BIN)/python -m benchmarks.proof

mutants: $(DEV)  ## plant 100 one-line bugs: at least 90 % must fail a fast test (15 minutes, the first time 10 more)
	$(BIN)/python -m tests.mutants

# Rewriting the assertions of 650 files takes 14 s: the first time once, beside mypy, instead of in every worker.
build/.bytecode: | $(DEV)
	@$(PYTEST) --collect-only -qq >/dev/null 2>&1 || true
	@mkdir -p build && touch $@

test-gpu: $(DEV)  ## kill, hang, desync, resume and memory on the GPUs here: one table to send back (under ten minutes)
	$(BIN)/python -m tests.gpu

bench: $(DEV)  ## times beside their limits; only numbers of a quiet machine count
	$(BIN)/python -m benchmarks.cli
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.recovery
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.instrumentation

wheel: $(DEV)  ## build dist/*.whl
	$(BIN)/python -m build --wheel --outdir dist .

clean:  ## remove what was built, not the runs
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis $(VENV)
