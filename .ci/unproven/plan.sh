#!/usr/bin/env bash
# The sharded steps on eight devices and in two processes, and a true-depth TPU program.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export VENV=${PLAN_VENV:-.venv-plan}
sh requirements/install.sh
# The TPU compiler that belongs to the locked jax.
"$VENV/bin/python" -m pip install --quiet --no-input "jax[tpu]==$("$VENV/bin/python" -c \
  'from importlib.metadata import version; print(version("jax"))')"
export JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
# LLVM's optimisations take longer than what these small programs compute.
quick="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

XLA_FLAGS=$quick timeout 240 "$VENV/bin/python" -m tests.sharded
XLA_FLAGS=$quick timeout 120 "$VENV/bin/python" -m tests.sharded --processes 2 \
  --mesh fsdp=2,tensor=2,sequence=2
timeout 120 "$VENV/bin/python" benchmarks/logprob.py --check --rounds 2

log=$(mktemp)
trap 'rm -f "$log"' EXIT
timeout 300 "$VENV/bin/trsi" plan configs/qwen3_8_27b_v5p64.toml --json >"$log"
"$VENV/bin/python" - "$log" <<'PY'
import json
import sys
from pathlib import Path

plan = json.loads(Path(sys.argv[1]).read_text())
compiled = plan["compiled"]
assert compiled is not None, plan["left_out"]
assert plan["fits"] and plan["spare"] >= 0.1, (plan["spare"], plan["knob"])
assert compiled["logits"] == [], compiled["logits"]
assert "all-to-all" not in compiled["collectives"], compiled["collectives"]
assert compiled["unknown_loops"] == 0
assert compiled["matmul_over_model_flops"] <= 1.5, compiled["matmul_over_model_flops"]
print(
    f"plan: {plan['config']} on {plan['topology']}: {100 * plan['spare']:.0f} % to spare,"
    f" {compiled['matmul_over_model_flops']:.2f} x 6ND, compiled in"
    f" {compiled['compile_seconds']:.0f} s"
)
PY
