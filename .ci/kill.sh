#!/usr/bin/env bash
# Kills a whole recursion in each of its stages and compares its end with an undisturbed run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
# The compiler as users have it: here programs run for longer than they compile.
export XLA_FLAGS=${XLA_FLAGS-}
"${VENV:-.venv}/bin/python" -m pytest --quiet -m kill tests/test_e2e_kill.py
