#!/usr/bin/env bash
# The gates of a stratified sample of the generated tasks, in real sandboxes: one task of each of the
# 46 families and a few of each suite. `trsi tasks check` of all 3,000 takes longer (docs/tasks.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

trsi=.venv/bin/trsi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$trsi" tasks make --seed 0 --out "$work/pool"
"$trsi" tasks check "$work/pool" --sample 1 --repeats 2
for suite in marathon rebuild; do
  "$trsi" tasks make --seed 0 --suite "$suite" --out "$work/$suite"
  "$trsi" tasks check "$work/$suite" --sample 3
done
