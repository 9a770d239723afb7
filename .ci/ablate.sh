#!/usr/bin/env bash
# The gradient table of the simulator, and an ablation of three arms trained on the small recursion.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The compiled programs of `make test`.
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
# The compiler as users have it, with all its optimisations (tests/conftest.py asks for none).
export XLA_FLAGS=${XLA_FLAGS-}
sh requirements/install.sh test
"${VENV:-.venv}/bin/python" -m pytest --quiet --numprocesses 2 --dist loadfile --timeout=1200 \
  -m lab tests/test_lab_gradients.py tests/test_lab_online.py
