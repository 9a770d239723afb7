#!/usr/bin/env bash
# The sandboxes' contract on a real Docker engine and, in bubblewrap, for a user made for it; tasks
# with images; owners killed at random, KILLS for each backend. Debian's engine runs on a socket, and
# in folders, of its own; it makes no bridge and no packet filter, so nothing of the network stays
# behind. Root only: the engine needs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${VENV:-.venv}/bin/python
kills=${KILLS:-60}
user=trsi-test-$$
work=$(mktemp -d)
manual=/var/lib/man-db/auto-update
engine=

finish() {
  if [ -n "$engine" ]; then
    kill "$engine" 2>/dev/null || true
    for _ in $(seq 200); do kill -0 "$engine" 2>/dev/null || break; sleep 0.1; done
  fi
  # The engine leaves what its containers' namespaces were mounted on.
  awk -v work="$work/" 'index($2, work) == 1 { print $2 }' /proc/self/mounts | sort -r |
    while read -r mount; do umount "$mount" || true; done
  rm -rf "$work"
  if getent passwd "$user" >/dev/null; then userdel "$user"; fi
  if [ -e "$manual.aside" ]; then mv "$manual.aside" "$manual"; fi
}
trap finish EXIT

if ! command -v dockerd >/dev/null || ! command -v busybox >/dev/null || ! command -v tmux >/dev/null; then
  # Renewing the index of manual pages takes longer than all the rest.
  if [ -e "$manual" ]; then mv "$manual" "$manual.aside"; fi
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends docker.io busybox-static tmux procps >"$work/apt.log" 2>&1 ||
    { tail -n 20 "$work/apt.log"; exit 1; }
fi

dockerd --data-root "$work/data" --exec-root "$work/exec" --pidfile "$work/pid" -H "unix://$work/socket" \
  --iptables=false --ip6tables=false --bridge=none >"$work/engine.log" 2>&1 </dev/null &
engine=$!

export DOCKER_HOST=unix://$work/socket TRSI_DOCKER_IMAGE=trsi-test TRSI_REQUIRE_DOCKER=1 PYTHONPATH=$PWD
for _ in $(seq 600); do
  docker version >/dev/null 2>&1 && break
  kill -0 "$engine" || { tail -n 20 "$work/engine.log"; exit 1; }
  sleep 0.1
done
"$python" -m tests.docker_image >"$work/image.tar"
docker import "$work/image.tar" trsi-test >/dev/null

"$python" -m pytest --quiet --numprocesses 2 -m docker \
  tests/test_sandbox.py tests/test_sandbox_docker.py tests/test_harbor_images.py
useradd --no-create-home "$user"
# Of root's folder, which is closed, the user sees the checkout and the interpreter, if they are there.
seen=("$PWD" $("$python" -c 'import sys; print(sys.prefix, sys.base_prefix)'))
TRSI_PLAIN_USER=$user unshare --mount bash -euc '
  aside=$1 python=$2; shift 2
  mkdir -m 700 "$aside"
  mount --rbind /root "$aside"
  mount -t tmpfs -o mode=755 none /root
  for path; do
    case $path in /root/*) mkdir -p "$path"; mount --rbind "$aside${path#/root}" "$path" ;; esac
  done
  cd "$1"
  "$python" -m pytest --quiet -k plain_user tests/test_sandbox.py
' bash "$work/aside" "$python" "${seen[@]}"
for backend in bubblewrap docker; do
  timeout 900 "$python" -m tests.sandbox_kill --backend "$backend" --rounds "$kills"
done
# The last: it ends the engine under a command.
timeout 120 "$python" -m tests.engine_end "$engine"
