#!/usr/bin/env bash
# `trsi serve` in a process of its own: the engine's contract over HTTP, its routes, the chat.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
VENV=$venv sh requirements/install.sh test
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
"$venv/bin/python" -m pytest --quiet -m serve tests/test_serve.py
