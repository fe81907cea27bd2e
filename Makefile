# Everything starts here: `make help`.
PYTHON ?= python3
PY := .venv/bin/python
# Gemma 3 270M is under its own terms: opt-in for the demo (GEMMA=1), test input unless GEMMA=0.
GEMMA ?=
.DEFAULT_GOAL := help
.PHONY: help setup models demo test check format bench gpu-suite vectors clean

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## venv in .venv, dependencies, llama.cpp from source (5 minutes once, then nothing)
	@$(PYTHON) scripts/setup.py

models: ## setup, and the two small models of demo and tests (350 MB once; GEMMA=0: one)
	@$(PYTHON) scripts/setup.py --models $(if $(filter 0,$(GEMMA)),--no-gemma)

demo: setup ## three agents, two models, one budget that holds one pool; with receipts
	@$(PY) -m vram_conductor.client.cli demo $(if $(filter 1,$(GEMMA)),--gemma)

test: models ## the whole test suite, on real sockets and real models
	@VRAM_CONDUCTOR_TEST_GEMMA=$(GEMMA) $(PY) -m pytest

check: setup ## ruff, mypy and basedpyright strict, public types, golden vectors
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@$(PY) scripts/check_types.py
	@$(PY) -m vram_conductor.protocol.vectors --check
	@$(PY) -m vram_conductor.protocol.reasons_page --check

format: setup ## let ruff fix and format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

gpu-suite: ## on a CUDA host: gpu tests, all benches, into $OUT or build/gpu-suite (MODEL=file.gguf: it, too)
	@$(PYTHON) scripts/gpu_suite.py $(SUITE)

bench: models ## the numbers of docs/performance.md, as ratios within one run
	@$(PY) bench/run.py

vectors: setup ## write protocol/vectors anew
	@$(PY) -m vram_conductor.protocol.vectors

clean: ## remove .venv and caches (models stay)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
