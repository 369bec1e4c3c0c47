# Everything a person types here. Each target installs what it needs first; nothing has to be there but Python 3.11, gcc and git.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard gateway/*.pyx gateway/*/*.pyx gateway/*.pxd gateway/*/*.pxd)

# Python's own compiled parts for other versions are not mixed: PYTHON=/path/to/python3.12 make install takes another one.
PYTHON ?=

.PHONY: help install run test lint format bench fuzz torture clean
.DEFAULT_GOAL := help

help: ## say what there is
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

install: $(VENV)/installed ## make .venv with everything in it, the locum command too

$(VENV)/installed: pyproject.toml setup.py $(SOURCES) | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VENV)/bin/python:
	@python="$$(PYTHON='$(PYTHON)' .ci/python)" && echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV)

run: install ## run the gateway with conf/ and var/
	$(BIN)/locum run --conf conf --data var

test: install ## run all tests
	@.ci/javascript
	$(BIN)/python -m pytest $(PYTEST)

lint: install ## check style and types
	@failed=0; export PATH="$(CURDIR)/$(BIN):$$PATH"; \
	for check in 'ruff check .' 'ruff format --check --output-format concise .' mypy 'cython-lint gateway'; do \
		echo "$$check"; $$check || failed=1; \
	done; exit $$failed

format: install ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install ## measure, and print a table; takes minutes
	$(BIN)/python -m benchmarks

fuzz: install ## throw broken requests at the reader for five minutes
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python -m fuzz.fuzz_wire -max_total_time=300

torture: install ## the fault campaign: two hours of kills, bad disks, clocks and receivers; as root
	$(BIN)/python -m tests.promises.torture

clean: ## take away what was made here, but not var/
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/js/node_modules
	rm -f gateway/*.so gateway/*/*.so $(patsubst %.pyx,%.c,$(filter %.pyx,$(SOURCES)))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
