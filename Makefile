# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint check

demo: $(VENV)/.installed
	$(BIN)/python -m sglang_acache demo

test: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests integration_tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/mypy

check: $(VENV)/.installed
	$(BIN)/python -m sglang_acache check

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar off -e '.[dev]'
	touch $@
