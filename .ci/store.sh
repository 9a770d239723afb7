#!/usr/bin/env bash
# The trajectory store: on a local S3 server, exports read by others, the page in a browser, kills.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${VENV:-.venv}/bin/python
cache=.cache/store-ci
wanted=requirements/store-ci.txt

if ! cmp --silent "$wanted" "$cache/installed.txt"; then
  rm -rf "$cache"
  "$python" -m venv "$cache"
  "$cache/bin/python" -m pip install --quiet --requirement "$wanted"
  # For the project's own interpreter, without their dependencies, which it has.
  "$cache/bin/python" -m pip install --quiet --no-deps --target "$cache/peers" atif==1.8.0 pyarrow==26.0.1
  cp "$wanted" "$cache/installed.txt"
fi
# Debian's Chromium, where it can be had; the page's browser tests are skipped otherwise.
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && [ -n "${CI:-}" ]; then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 ||
    echo "store: no Chromium to be had; the page is not opened in a browser"
fi

export JAX_PLATFORMS=cpu PYTHONPATH=$PWD
PYTHONPATH=$PWD:$PWD/$cache/peers TRSI_S3_SERVER=$PWD/$cache/bin/moto_server \
  "$python" -m pytest --quiet tests/test_store_s3.py tests/test_store_export.py tests/test_show_html.py
timeout 300 "$python" -m tests.store_kill --rounds 12 --pace 0.6
timeout 300 "$python" -m tests.store_kill --rounds 8 --pace 0.6 --full-disk --disk-mb 3 --seed 1
