# One list of commands. `make run` and `make test` need nothing but Python 3.11 or newer.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPU := $(shell test -d /proc/driver/nvidia/gpus && ls /proc/driver/nvidia/gpus 2>/dev/null | head -n 1)
KIND := $(if $(GPU),gpu,cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PIP_NO_WARN_SCRIPT_LOCATION = 1
# Whatever the environment says: what is imported is compiled once. torch and vLLM take twice as long else.
export PYTHONDONTWRITEBYTECODE :=
CONFIG ?= quickstart
ARGS ?=
BENCH ?= startup async_vs_sync peers buffer learner

.PHONY: help run install install-dev bench-install bench test lint soak chaos clean

help:
	@echo "make run       install, then launch CONFIG=$(CONFIG) (ARGS='key=value ...' are passed on)"
	@echo "make test      install, then linters, types, import rules and every test that needs no GPU"
	@echo "make lint      ruff, mypy and the import rules alone"
	@echo "make soak      the long proofs"
	@echo "make chaos     one of them: a run whose parts are killed and stopped for CHAOS_S=600 seconds"
	@echo "make bench     the benchmarks: BENCH='$(BENCH)' into bench/results/ (hours; ARGS=--quick: minutes)"
	@echo "make clean     remove the environment and caches"

$(VENV)/.installed-$(KIND): requirements/torch.txt requirements/$(KIND).txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, vLLM and Ray into $(VENV): a few minutes and 2 to 3 GB the first time"
ifeq ($(KIND),cpu)
	$(PIP) install -q --no-compile -r requirements/torch.txt
	$(PIP) install -q --no-compile --no-deps -r requirements/cpu.txt
else
	$(PIP) install -q -r requirements/gpu.txt
endif
	$(PIP) install -q --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-$(KIND) requirements/dev.txt
	$(PIP) install -q --no-deps -r requirements/dev.txt
	touch $@

install: $(VENV)/.installed-$(KIND)

install-dev: $(VENV)/.installed-dev

run: install
	$(BIN)/asyncrl launch --config $(CONFIG) $(ARGS)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -n 2 -m "not gpu and not soak" || { \
	    echo "what failed beside other tests is run again alone, and decides"; \
	    $(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "not gpu and not soak"; }

soak: install-dev
	$(BIN)/python -m pytest -m soak --timeout 7200

chaos: install-dev
	$(BIN)/python -m pytest -m soak --timeout 7200 -s tests/runs/test_chaos.py

$(VENV)/.installed-bench: $(VENV)/.installed-$(KIND) requirements/bench.txt
	rm -rf $(VENV)/bench
	$(PIP) install -q --no-deps --target $(VENV)/bench -r requirements/bench.txt
	touch $@

bench-install: $(VENV)/.installed-bench

bench: bench-install
	@set -e; for name in $(BENCH); do \
		echo "bench $$name"; \
		$(BIN)/python bench/$$name.py --json bench/results/$$name.json $(ARGS); \
	done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
