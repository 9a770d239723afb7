#!/usr/bin/env bash
# The sharded steps on eight devices and in two processes, the fused head, and a 27B step for a TPU.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
VENV=$venv sh requirements/install.sh test
bin=$venv/bin
python=$bin/python
cache=.cache/plan-ci
# The TPU compiler that belongs to the installed jax; beside the environment, which has all else.
wanted=$("$python" -c 'from importlib.metadata import requires
print(next(r.partition(";")[0].strip() for r in requires("jax") if r.startswith("libtpu")))')
if [ "$(cat "$cache/installed.txt" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$cache"
  "$python" -m pip install --quiet --no-input --no-deps --target "$cache" "$wanted"
  echo "$wanted" >"$cache/installed.txt"
fi
export PYTHONPATH=$PWD JAX_PLATFORMS=cpu
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/.cache/jax}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.5
# LLVM's optimisations take longer than what these small programs compute.
quick="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

log=$(mktemp -d)
compiler=
trap '[ -z "$compiler" ] || kill "$compiler" 2>/dev/null || true; rm -rf "$log"' EXIT
# One core for the TPU's compiler, the others meanwhile for the rest; docs/plan.md has the PPO steps.
PYTHONPATH=$PWD:$PWD/$cache XLA_FLAGS= timeout 1800 "$bin/trsi" plan \
  configs/qwen3_8_27b_v5p64.toml --step sft --json >"$log/plan.json" 2>"$log/plan.err" &
compiler=$!

small() { XLA_FLAGS=$quick timeout 1800 "$python" -m tests.sharded "$@"; }
small --step sft --step ppo
small --step sft --step ppo --norm-eps 1e-6 --mesh data=2,fsdp=2,tensor=2
small --step sft --step ppo --float64 --mesh fsdp=2,tensor=2,sequence=2
small --step sft --processes 2 --mesh fsdp=2,tensor=2,sequence=2 2>&1 | grep --invert-match '^\[Gloo\]'

wait "$compiler" || { cat "$log/plan.err" >&2; exit 1; }
"$python" - "$log/plan.json" <<'PY'
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
    f"plan: {plan['config']} {plan['step']} on {plan['topology']}: {100 * plan['spare']:.0f} % to"
    f" spare, {compiled['matmul_over_model_flops']:.2f} x 6ND, compiled in"
    f" {compiled['compile_seconds']:.0f} s"
)
PY
# Last and alone, because it compares times.
XLA_FLAGS= timeout 900 "$python" benchmarks/logprob.py --check --rounds 2
