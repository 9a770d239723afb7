#!/bin/sh
# Makes or updates the virtual environment: sh requirements/install.sh [test | parity]
# Needs a Python >= 3.11 and nothing else; no root. VENV and PYTHON choose the folder and interpreter.
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
extra=${1:-}

say() { printf 'setup: %s\n' "$*"; }
stop() { printf 'setup: %s\n' "$*" >&2; exit 1; }
usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# The environment as it stands, if it still works: it breaks when its Python or the folder moves.
python=
if usable "$venv/bin/python" && "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
  python=$venv/bin/python
else
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python3.14; do
    if usable "$candidate"; then python=$candidate && break; fi
  done
  [ -n "$python" ] || stop 'no Python >= 3.11 found; install one with: sudo apt-get install python3'
fi

case $("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') in
  3.11) lock=requirements/py311 ;;
  *) lock=requirements/py312 ;;
esac
files="$lock.txt"
case $extra in
  test) files="$lock.txt $lock-test.txt" ;;
  parity) files="$lock.txt $lock-test.txt requirements/parity.txt" ;;
esac

# What was installed, and where: an unchanged lock in an unmoved folder means there is nothing to do.
stamp=$venv/.trsi-setup$extra
state="$(pwd) $(cat $files pyproject.toml | cksum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$state" ] && [ "$python" = "$venv/bin/python" ]; then
  exit 0
fi

# Debian and Ubuntu keep ensurepip in a package of its own (python3-venv). Without it, pip comes from
# the system's pip, or from Debian's wheel of pip, which apt-get downloads without root.
make_venv() {
  rm -rf "$venv"
  if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
    "$python" -m venv "$venv" && return
  fi
  "$python" -m venv --without-pip "$venv" || return 1
  if "$python" -m pip --version >/dev/null 2>&1; then
    "$python" -m pip --python "$venv/bin/python" install --quiet pip && return
  fi
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || return 1
  mkdir -p "$venv/pip-wheel" || return 1
  (
    cd "$venv/pip-wheel"
    # apt's own download user may not enter this folder; as oneself the files are oneself's.
    apt-get -o APT::Sandbox::User= download --quiet=2 python3-pip-whl >/dev/null 2>&1 &&
      dpkg-deb -x python3-pip-whl_*.deb .
  ) || return 1
  wheel=$(ls "$venv"/pip-wheel/usr/share/python-wheels/pip-*.whl) || return 1
  PYTHONPATH=$wheel "$venv/bin/python" -m pip install --quiet --no-input pip || return 1
  rm -rf "$venv/pip-wheel"
}

if [ "$python" != "$venv/bin/python" ]; then
  say "$("$python" --version) into $venv"
  make_venv || {
    rm -rf "$venv"
    stop "Python's venv module is incomplete; mend it with: sudo apt-get install python3-venv"
  }
fi

count=$(cat $files | grep -c '==')
say "installing $count packages from $(echo "$files" | sed 's/ / and /g'), one to three minutes"
pip="$venv/bin/python -m pip install --quiet --no-input --disable-pip-version-check"
# Compiling every module of every package takes as long as installing; Python compiles what it runs.
pip="$pip --progress-bar off --no-compile"
for file in $files; do set -- "$@" -r "$file"; done
if [ -n "$extra" ]; then shift; fi
$pip "$@" || stop 'pip could not install; its message is above (is the network reachable?)'
$pip --no-deps --no-build-isolation --editable . || stop 'pip could not install trsi-jax itself'
# Proves that the command works, and compiles what it imports.
"$venv/bin/trsi" --help >/dev/null || stop "$venv/bin/trsi does not start; its message is above"
printf '%s' "$state" >"$stamp"
say "done; the command is $venv/bin/trsi"
