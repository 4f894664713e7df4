# The two commands: `make demo` and `make test`. Both set up .venv first.

PYTHON ?= python3
BIN := .venv/bin
RUN = $(shell n=1; while [ -e runs/demo-$$n ]; do n=$$((n + 1)); done; echo runs/demo-$$n)

.PHONY: help demo test lint benchmarks clean

help:
	@echo "make demo   six methods on the digits: a table, a figure, about two minutes"
	@echo "make test   format, lint, types and all tests"
	@echo "make lint   format, lint and types alone"
	@echo "make benchmarks  everything that docs/speed.md measures, into runs/"
	@echo "make clean  remove .venv and caches; runs/ stays"

demo: .venv/installed
	$(BIN)/idiolect compare --out $(RUN)

test: lint
	$(BIN)/pytest -n auto

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

benchmarks: .venv/installed
	PYTHON=$(BIN)/python benchmarks/all.sh runs/benchmarks-$$(date +%Y%m%d-%H%M%S)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; choose one with 'make PYTHON=python3.12 ...'."; exit 1; }
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --disable-pip-version-check --progress-bar off -e '.[dev]'
	$(BIN)/pip install --disable-pip-version-check --progress-bar off --no-deps -c constraints.txt flwr-datasets seaborn
	@touch $@
