# make demo and make test need Python >= 3.10 and make, and set up the rest in .venv. The first run takes minutes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PACKAGES := . plugins/transformers_backend
METADATA := pyproject.toml plugins/transformers_backend/pyproject.toml tests/packages/toy_backend/pyproject.toml

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit install wheels pins format clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

demo: install ## train a tiny model in seconds, chat with it, score the chat
	$(BIN)/python examples/demo.py

test: lint types unit ## everything a change must pass

lint: install ## style, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: install ## mypy, strict
	$(BIN)/mypy

unit: install ## the tests, the README's and the docstrings' examples among them
	$(BIN)/python -m pytest

format: install ## rewrite the code in the house's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheels: install ## build what is published, into wheels/
	rm -rf wheels
	for package in $(PACKAGES); do $(BIN)/python -m build --no-isolation --outdir wheels $$package || exit 1; done

pins: ## write down the versions that .venv holds
	$(BIN)/python .ci/pins.py > constraints/cpu.new && mv constraints/cpu.new constraints/cpu.txt

install: $(INSTALLED) ## set up .venv

$(INSTALLED): constraints/cpu.txt $(METADATA)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
		"Python 3.10 or newer is needed. This is " + sys.version.split()[0] + ": try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.13.0
	$(BIN)/python -m pip install --requirement constraints/cpu.txt
	$(BIN)/python -m pip install --no-build-isolation --constraint constraints/cpu.txt \
		--editable ".[transformers,http,cli]" --editable plugins/transformers_backend \
		--editable tests/packages/toy_backend
	touch $@

clean: ## remove what was built, and .venv
	rm -rf $(VENV) wheels dist build demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
