#!/bin/sh
# Makes an environment of its own for SGLang servers: sh requirements/sglang.sh [cpu | gpu]
# Never the project's environment: the server's pins contradict it. SGLANG_VENV and PYTHON choose the
# folder and the interpreter (3.11 or 3.12). About 3 GB and one to two minutes for cpu; the gpu form
# installs SGLang's own CUDA pins.
set -eu
cd "$(dirname "$0")/.."
venv=${SGLANG_VENV:-.venv-sglang}
kind=${1:-cpu}
version=0.5.23

stop() { printf 'setup: %s\n' "$*" >&2; exit 1; }
case $kind in cpu | gpu) ;; *) stop "no kind $kind; there are cpu and gpu" ;; esac

python=
for candidate in ${PYTHON:-} python3.11 python3.12 python3; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' >/dev/null 2>&1; then
    python=$candidate && break
  fi
done
[ -n "$python" ] || stop 'no Python 3.11 or 3.12 found; set PYTHON'

stamp=$venv/.trsi-setup
state="$kind $version $(pwd) $(cat requirements/sglang-cpu.txt requirements/sglang.sh | cksum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi

rm -rf "$venv"
"$python" -m venv "$venv" || stop "$python cannot make environments; install its venv module"
pip="$venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check --no-compile"
if [ "$kind" = gpu ]; then
  $pip "sglang==$version"
else
  # Without dependencies: sglang asks for CUDA kernels, and torchvision from the index for CUDA torch.
  $pip torch==2.13.0
  $pip --no-deps torchvision==0.28.0 "sglang==$version"
  # pip then lists what sglang's own pins still miss: everything for CUDA.
  said=$($pip --requirement requirements/sglang-cpu.txt 2>&1) || stop "$said"
fi
printf '%s' "$state" >"$stamp"
printf 'setup: sglang %s (%s) in %s\n' "$version" "$kind" "$venv"
