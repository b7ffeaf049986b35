#!/usr/bin/env bash
# Installs what is missing for: build (Go is asked for, Open MPI, gcc, pkg-config), test (also Slurm, g++, and venv for the
# CUDA compiler and the tests of python/). Says what to do where it cannot.
set -euo pipefail
what=${1:-build}

need_go=$(awk '$1 == "go" {print $2}' go.mod)
if ! command -v go >/dev/null; then
  echo "ulysses: no Go found. Install Go $need_go or newer from https://go.dev/dl and put its bin folder on PATH." >&2
  exit 1
fi
have_go=$(GOTOOLCHAIN=local go env GOVERSION 2>/dev/null | sed 's/^go//')
if [ "$(printf '%s\n%s\n' "$need_go" "$have_go" | sort -V | head -n 1)" != "$need_go" ]; then
  echo "ulysses: Go $have_go is too old, $need_go or newer is needed: https://go.dev/dl" >&2
  exit 1
fi

packages=()
command -v gcc >/dev/null || packages+=(gcc libc6-dev)
command -v pkg-config >/dev/null || packages+=(pkg-config)
command -v mpirun >/dev/null || packages+=(openmpi-bin)
pkg-config --exists ompi 2>/dev/null || packages+=(libopenmpi-dev)
if [ "$what" = test ]; then
  command -v g++ >/dev/null || packages+=(g++)
  command -v gfortran >/dev/null || packages+=(gfortran)
  python3 -c 'import ensurepip' >/dev/null 2>&1 || packages+=(python3-venv)
  for b in munged:munge slurmctld:slurmctld slurmd:slurmd srun:slurm-client; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${b%%:*}" >/dev/null || packages+=("${b##*:}")
  done
fi
[ ${#packages[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "ulysses: missing: ${packages[*]} (names of Debian's packages). Install their like with this system's package manager, then run make again." >&2
  [ "$what" = test ] && exit 0 || exit 1
fi
if [ "$(id -u)" = 0 ]; then root=(env)
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then root=(sudo)
else
  echo "ulysses: missing: ${packages[*]}. As root: apt-get install --no-install-recommends ${packages[*]}" >&2
  [ "$what" = test ] && exit 0 || exit 1
fi
echo "ulysses: installing ${packages[*]}"
log=$(mktemp)
install() { "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >"$log" 2>&1; }
if ! install; then
  "${root[@]}" apt-get update -qq >>"$log" 2>&1 || true
  install || { cat "$log" >&2; echo "ulysses: apt-get could not install ${packages[*]}" >&2; exit 1; }
fi
rm -f "$log"
