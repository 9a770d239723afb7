#!/usr/bin/env bash
# The fleet against real SGLang servers on CPUs, in an environment that this script makes (3 GB).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
VENV=$venv sh requirements/install.sh test
export SGLANG_VENV=${SGLANG_VENV:-.cache/sglang}
sh requirements/sglang.sh cpu
TRSI_SGLANG_PYTHON=$(realpath --no-symlinks "$SGLANG_VENV/bin/python")
export TRSI_SGLANG_PYTHON TRSI_REQUIRE_SGLANG=1 PYTHONPATH=$PWD
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5

work=$(mktemp -d)
trsi() { "$venv/bin/python" -m trsi_jax.cli.main "$@"; }
finish() {
  if [ -e "$work/fleet/fleet.json" ]; then trsi fleet down --folder "$work/fleet" || true; fi
  rm -rf "$work"
}
trap finish EXIT

# The command that users start servers with; the tests share what it starts.
"$venv/bin/python" - "$work/weights" <<'PY'
import sys
from pathlib import Path

from tests.sglang_real import DENSE, dense_params
from trsi_jax.publish import publish

publish(Path(sys.argv[1]), 7, DENSE, dense_params(0), dtype="F32")
PY
port=${FLEET_PORT:-31700}
export TRSI_SGLANG_URL=http://127.0.0.1:$port
trsi fleet up --model "$work/weights/v000007" --weights "$work/weights" --cpu --context 512 \
  --python "$TRSI_SGLANG_PYTHON" --folder "$work/fleet" --port "$port" -- \
  --dtype float32 --max-total-tokens 8192 --max-running-requests 16
trsi fleet status --folder "$work/fleet" | tee "$work/status"
grep -q 'ready  weights 7' "$work/status"

# -s: the largest gap of a log-prob and the time to recover are worth a line in the log.
"$venv/bin/python" -m pytest --quiet -s -m sglang tests/test_fleet_real.py 2>&1 | tee "$work/log"
# One test skips itself: a server on a CPU does not honour seeds, and the fleet does not promise it.
if grep -E '([2-9]|[0-9]{2,}) skipped' "$work/log"; then
  echo 'fleet: a test on a real server was skipped' >&2
  exit 1
fi
trsi fleet status --folder "$work/fleet" | tee "$work/status"
grep -q 'ended 0 times' "$work/status"
trsi fleet down --folder "$work/fleet"

"$venv/bin/python" -m pytest --quiet -m fleet tests/test_fleet_run.py tests/test_fleet_serve.py
