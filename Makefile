# Two commands do everything on a machine with Python 3.11+, pip, make and a compiler:
#   make run     set up a virtual environment and train the embedded model
#   make test    set up, lint, type-check and run every CPU test

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help run example test lint types unit bench clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

run: $(STAMP)  ## set up, then train the embedded model off-policy: offline, CPU, about 4 minutes
	$(BIN)/bapo train

example: $(STAMP)  ## set up, then the whole idea in one file: a toy policy on stale data (seconds)
	$(BIN)/python examples/minimal_loop.py

test: lint types unit  ## set up, lint, type-check, run every CPU test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2

bench: $(STAMP)  ## run the benchmarks; each prints a table of ratios
	$(BIN)/python benchmarks/bounds.py
	$(BIN)/python benchmarks/logprobs.py
	$(BIN)/python benchmarks/engine.py

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# constraints.txt pins what was tested. torch goes first and pinned, so that nothing else decides which build it is.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "bapo needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
