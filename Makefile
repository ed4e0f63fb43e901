# `make` alone prints this help. Everything a target needs it installs itself, into .venv and .cache.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
export KVGATE_CACHE ?= $(CURDIR)/.cache

.DEFAULT_GOAL := help
.PHONY: help run demo watch test check lint unit e2e bench docs clean

help:  ## Print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/run.stamp: pyproject.toml constraints.txt
	@echo "== installing kvgate and the development engine into $(VENV) (about 40 s)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[engine]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "== installing what the tests need"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

run: $(VENV)/run.stamp  ## Start a gate: in front of UPSTREAM=http://host:port, or of a real llama.cpp server of its own
	@$(BIN)/python -m kvgate.cli.quickstart $(if $(UPSTREAM),--upstream $(UPSTREAM)) $(if $(LISTEN),--listen $(LISTEN)) \
		$(if $(ADMIN_LISTEN),--admin-listen $(ADMIN_LISTEN))

demo: $(VENV)/run.stamp  ## In a minute, side by side: what a bare engine does to three tenants, and what kvgate does
	@$(BIN)/python -m kvgate.cli.demo

watch: $(VENV)/run.stamp  ## Start a Prometheus beside a gate that runs here (ADMIN_LISTEN=host:port), with kvgate's alerts
	@$(BIN)/python -m deploy.watch $(if $(ADMIN_LISTEN),--admin $(ADMIN_LISTEN)) $(if $(WATCH_LISTEN),--listen $(WATCH_LISTEN))

test: check  ## Run everything that CI runs

check: lint unit e2e  ## ruff, format, mypy, import contracts, all tests, docs

lint: $(VENV)/dev.stamp
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

unit: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest tests/unit tests/contract

e2e: $(VENV)/dev.stamp
	@$(BIN)/python -m pytest tests/e2e

bench: $(VENV)/dev.stamp  ## Compare what nginx, kvgate, aiohttp and LiteLLM cost, in ten minutes; OPTIONS="--quick" (docs/performance.md)
	@$(BIN)/python -m loadtests.bench $(OPTIONS)

docs: $(VENV)/dev.stamp  ## Write docs/reference.md, docs/faults.md, rules and dashboards anew from the code
	@$(BIN)/python -m kvgate.cli.reference > docs/reference.md
	@$(BIN)/python -m tests.e2e.faults.render > docs/faults.md
	@$(BIN)/python -m deploy.generate

clean:  ## Remove what the other targets made
	@rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
