#!/usr/bin/env bash
# The model beside `transformers`' torch model, live, in an environment of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export VENV=${PARITY_VENV:-.venv-parity}
sh requirements/install.sh parity
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5 OMP_NUM_THREADS=1
# The compiler as users have it, with all its optimisations (tests/conftest.py asks for none).
export XLA_FLAGS=${XLA_FLAGS-}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
"$VENV/bin/python" -m pytest --quiet -m parity tests/test_parity.py --timeout=1200 2>&1 | tee "$log"
if grep -E '[0-9]+ skipped' "$log"; then
  echo 'parity: a comparison was skipped' >&2
  exit 1
fi
