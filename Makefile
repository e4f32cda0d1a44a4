# Needs Python 3.11 or newer with pip, and make; everything else is installed into .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo check test test-all lint fmt proto bench clean
.SILENT: help

help:
	echo "make demo    download a small model, serve it, stream a chat and a profile, stop"
	echo "make check   lint, types, layers, generated code and the tests that run no kernel: a minute"
	echo "make test    the same, and the other tests, those of kernels with a fixed choice of their cases"
	echo "make test-all  everything, with all cases of the kernels' tests"
	echo "make fmt     format the code, mend what ruff can mend"
	echo "make proto   regenerate the gRPC API from proto/"
	echo "make bench   tokens per second of the demo model on this machine"
	echo "make clean   remove $(VENV) and what builds and tools leave behind"

demo: $(VENV)/.installed
	@PATH="$(abspath $(BIN)):$$PATH" bash clients/demo.sh

# A file's tests stay together: they share engines and compiled kernels.
PYTEST = $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

check: lint
	$(PYTEST) -m "not kernels"

test: lint
	$(PYTEST)

test-all: lint
	$(PYTEST) --all-cases

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	fresh="$$(mktemp -d)"; trap 'rm -rf "$$fresh"' EXIT; PYTHON=$(BIN)/python sh proto/generate.sh "$$fresh"; \
		diff -r -x '__pycache__' -x '__init__.py' -x 'py.typed' "$$fresh/numba_engine_api" clients/python/numba_engine_api \
		|| { echo "The generated API is out of date: run 'make proto'." >&2; exit 1; }

fmt: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(VENV)/.installed-dev
	PYTHON=$(BIN)/python sh proto/generate.sh

bench: $(VENV)/.installed
	$(BIN)/numba-engine bench demo

clean:
	rm -rf $(VENV) build dist *.egg-info clients/python/build clients/python/*.egg-info \
		.pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The interpreter's own pip can fill a virtual environment that has none (Debian without python3-venv).
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; name one with: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "Setting up $(VENV) …"; "$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); "$(PYTHON)" -m venv --without-pip $(VENV); \
		"$(PYTHON)" -m pip --python $(VENV)/bin/python install pip; }

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing the package and what it needs …"; $(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing the package, what it needs, and the tools …"; $(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $(VENV)/.installed $@
