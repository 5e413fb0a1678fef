# `make` lists the targets. Each sets up what it needs; a second run installs nothing and works offline.
#
#   ARGS="--quick --schedule all"    flags for the stage, or for pytest in `make test`
#   PYTHON=/path/to/python3          Python 3.10 or newer that builds the environment
#   VENV=/path/to/folder             where the environment lives (default .venv)
#   SYSTEM_SITE_PACKAGES=1           let the environment see the packages, torch included, that PYTHON already has
#   TORCH_INDEX_URL=URL              package index to take torch from

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV ?= .venv
ARGS ?=
REQUIREMENTS := requirements.txt requirements-torch.txt requirements-dev.txt
# The stamp's name holds a checksum of the pins: change one, and the environment is brought up to date.
READY := $(VENV)/.ready-$(shell cat $(REQUIREMENTS) common/environment.py | cksum | cut -d' ' -f1)
RUN := $(VENV)/bin/python

ifndef PYTHON
PYTHON = $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
endif

.PHONY: help setup test lint bench bench-emulator clean

help:
	@echo "make setup            build the Python environment ($(VENV))"
	@echo "make stage-NN         run a stage: stage-01 to stage-09 (ARGS=--help lists its flags)"
	@echo "make diff-NN          what stage NN changes in the stage before it"
	@echo "make ptx-NN sass-NN   the kernel of a stage as PTX, as machine code"
	@echo "make test             run the tests"
	@echo "make lint             check the style of the code"
	@echo "make bench            time every stage on this machine's GPU"
	@echo "make bench-emulator   time the emulator on this machine's CPU"
	@echo "make clean            remove the environment and all caches"

setup: $(READY)
	@:

$(READY):
	@if [ -z "$(PYTHON)" ]; then \
		echo "Python 3.10 or newer is needed; $$(python3 --version 2>&1 || echo 'no python3 on PATH')." >&2; \
		echo "Install one and say where it is: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; fi
	@"$(PYTHON)" common/environment.py --venv "$(VENV)" --stamp "$@" \
		$(if $(SYSTEM_SITE_PACKAGES),--system-site-packages) $(if $(TORCH_INDEX_URL),--torch-index-url "$(TORCH_INDEX_URL)")

stage-%: $(READY)
	@$(RUN) -m common run $* $(ARGS)

diff-%: $(READY)
	@$(RUN) -m common diff $*

ptx-%: $(READY)
	@$(RUN) -m common ptx $* $(ARGS)

sass-%: $(READY)
	@$(RUN) -m common sass $* $(ARGS)

test: $(READY)
	@$(RUN) -m pytest -n auto --dist worksteal $(ARGS)

lint: $(READY)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

bench: $(READY)
	@$(RUN) -m common bench $(ARGS)

bench-emulator: $(READY)
	@$(RUN) -m common.emulator.bench $(ARGS)

clean:
	rm -rf "$(VENV)" .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
