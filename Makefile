# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
PIP := .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt
EXPERIMENT ?= lenet5/lecun1998
unexport PYTHONDONTWRITEBYTECODE  # the tests start many processes: each would compile all modules again

.PHONY: train data test test-slow lint style types pytest format bench docs clean help

help:
	@echo "make train      set up .venv and train $(EXPERIMENT) on real data (EXPERIMENT=… for another)"
	@echo "make data       set up .venv and build the data of code_multitask (the standard library) and variable_stars (12 MB)"
	@echo "make test       set up .venv, then lint, types and tests"
	@echo "make test-slow  the fault, soak and scale tests in full, properties with ten times the examples"
	@echo "make bench      speed tables, measured against a hand-written loop and other trainers"
	@echo "make docs       the site of guides, design notes and reference, in build/site"
	@echo "make lint       ruff, mypy --strict and import-linter alone"

train: .venv/.core
	.venv/bin/etude train $(EXPERIMENT)

data: .venv/.core
	.venv/bin/python experiments/code_multitask/prepare.py
	.venv/bin/python experiments/variable_stars/prepare.py

test: style
	@$(MAKE) --no-print-directory -j 2 types pytest

pytest: .venv/.dev
	.venv/bin/pytest -n 2 --dist worksteal -m "not slow"

test-slow: .venv/.dev
	.venv/bin/pytest -m "slow or hypothesis" --hypothesis-profile=thorough

lint: style types

style: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

types: .venv/.dev
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

format: .venv/.dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: .venv/.bench
	.venv/bin/python -m benchmarks

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build
	@echo "open build/site/index.html through: .venv/bin/mkdocs serve"

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "etude needs Python 3.11 or newer; say which with: make PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/.core: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "setting up .venv (torch is large; the first time takes a minute or two)"
	$(PIP) -e '.[text,code]'
	@touch $@

.venv/.dev: .venv/.core
	$(PIP) -e '.[dev]'
	@touch $@

.venv/.docs: .venv/.core
	$(PIP) -e '.[docs]'
	@touch $@

.venv/.bench: .venv/.core
	$(PIP) -e '.[bench]'
	@touch $@
