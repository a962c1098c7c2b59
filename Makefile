# `make demo` and `make test` need nothing but Python >= 3.10 with pip and venv; everything else is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Processes that share the tests; 0 runs them in one, which a debugger needs.
WORKERS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := kvquant_hf scripts tests benchmarks notebooks

# A machine shared with other jobs runs several OpenMP threads much slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: help venv venv-baselines demo test test-gpu check style bench clean

help:
	@echo 'make demo            a real model answers with the dense cache and with two quantized ones (ARGS="--help")'
	@echo 'make test            the whole test suite (ARGS="-k name" to select, WORKERS=n processes)'
	@echo 'make check           lint, format and types'
	@echo 'make style           mend what ruff can mend'
	@echo 'make bench           quality of all presets, speed of attention and of generation; JSON and plots in out/'
	@echo 'make test-gpu        the tests that need a CUDA device'
	@echo 'make venv            the environment alone'
	@echo 'make venv-baselines  adds the rival backends that scripts/score.py --baseline measures'
	@echo 'make clean           removes build and tool caches; the environment and the prepared models stay'

venv: $(STAMP)

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and f"kvquant_hf needs Python >= 3.10, \
	$(PYTHON) is {sys.version.split()[0]}; name another one with PYTHON=")'
	@echo "Installing the pinned environment into $(VENV); this takes a few minutes once."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq "$$(grep -E '^torch==' requirements.lock)"
	@$(PIP) install -qq -c requirements.lock -e '.[demo,dev,eval]'
	@touch $@

# hqq comes as source only and would compile CUDA kernels that the comparison does not use.
venv-baselines: $(STAMP)
	@$(PIP) install -qq setuptools wheel
	@DISABLE_CUDA=1 $(PIP) install -qq --no-build-isolation -c requirements.lock -r requirements-baselines.lock

demo: $(STAMP)
	@model=$$($(BIN)/python scripts/get_model.py smollm2-135m | tail -n 1) && test -n "$$model" && \
	env -u OMP_NUM_THREADS $(BIN)/python scripts/generate.py --model "$$model" $(ARGS)

test: $(STAMP)
	@$(BIN)/python scripts/get_model.py smollm2-135m
	@HF_HUB_OFFLINE=1 KVQUANT_HF_REQUIRE_MODELS=smollm2-135m $(BIN)/python -m pytest -q -n $(WORKERS) $(ARGS)

# pytest answers 5 where no test was selected.
test-gpu: $(STAMP)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -m gpu $(ARGS) || test $$? -eq 5

check: $(STAMP)
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy
	@$(BIN)/mypy benchmarks

style: $(STAMP)
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

bench: $(STAMP)
	@mkdir -p out
	@model=$$($(BIN)/python scripts/get_model.py smollm2-135m | tail -n 1) && test -n "$$model" && \
	$(BIN)/python scripts/score.py --model "$$model" --text data/pride_and_prejudice_excerpt.txt --chunks 2 \
	--all-presets --json out/score.json $(ARGS)
	@$(BIN)/python benchmarks/attention.py --json out/attention.json --plot out/attention.png
	@model=$$($(BIN)/python scripts/get_model.py smollm2-135m | tail -n 1) && test -n "$$model" && \
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/generate.py --model "$$model" \
	--json out/generate.json --plot out/generate.png

clean:
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
