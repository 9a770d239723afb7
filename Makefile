# Everything starts from a bare clone: Python >= 3.11 on Debian or Ubuntu, no root, no Docker, no GPU.

VENV ?= .venv
OUT ?= runs/demo
export VENV

BIN = $(VENV)/bin
# Compiled programs are kept between runs: the second `make test` spends its time in the tests.
TEST_ENV = JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.cache/jax \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5

.PHONY: help setup demo test lint clean

help: ## Show this list.
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile | expand -t 16

setup: ## Make the virtual environment and install (one to three minutes, then instant).
	@sh requirements/install.sh

demo: setup ## Run the whole recursion with configs/tiny.toml into runs/demo (five to thirteen minutes).
	@$(BIN)/trsi run configs/tiny.toml --out $(OUT)

test: lint ## Check style, types and imports, then run the tests (under fifteen minutes).
	@echo 'test: pytest on two processes'
	@$(TEST_ENV) $(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

lint: ## Check style, types and imports only.
	@sh requirements/install.sh test
	@echo 'test: ruff, mypy, import contracts'
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@said=$$($(BIN)/lint-imports --no-cache) || { echo "$$said"; exit 1; }

clean: ## Remove the virtual environment and every cache; runs stay.
	@rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
