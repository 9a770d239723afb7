#!/usr/bin/env bash
# The engine in processes of their own: on a mesh, and behind `trsi serve`, where its contract is
# held over HTTP.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
VENV=$venv sh requirements/install.sh test
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
"$venv/bin/python" -m pytest --quiet -m engine tests/test_engine.py tests/test_serve.py
