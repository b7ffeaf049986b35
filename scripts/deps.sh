#!/usr/bin/env bash
# deps.sh build|test [install]: checks for the packages that the build needs (Open MPI, gcc,
# pkg-config; Go must be installed), or that the tests need (also MPICH, Slurm, ip, g++, gfortran,
# and venv for the CUDA compiler, the linters and the tests of python/, and Python's headers for
# torch.compile). With MPICC=mpicc.mpich, or another wrapper than mpicc, the build does not need
# Open MPI.
#
# For root, as in a container, the script installs missing packages. For other users it installs
# them with sudo if the second argument is install (make deps, make deps-test); otherwise it prints
# the packages and the command. A missing package of the build is an error. Tests skip what they
# cannot run.
set -euo pipefail
what=${1:-build} install=${2:-}

go=${GO:-go}
need_go=$(awk '$1 == "go" {print $2}' go.mod)
if ! command -v "$go" >/dev/null; then
  echo "ulysses: no Go found; install Go $need_go or newer from https://go.dev/dl and add its bin folder to PATH" >&2
  exit 1
fi
have_go=$(GOTOOLCHAIN=local "$go" env GOVERSION 2>/dev/null | sed 's/^go//')
if [ "$(printf '%s\n%s\n' "$need_go" "$have_go" | sort -V | head -n 1)" != "$need_go" ]; then
  echo "ulysses: Go $have_go is too old; install Go $need_go or newer from https://go.dev/dl" >&2
  exit 1
fi

packages=()
command -v gcc >/dev/null || packages+=(gcc libc6-dev)
command -v pkg-config >/dev/null || packages+=(pkg-config)
if [ "${MPICC:-mpicc}" = mpicc ] || [ "$what" = test ]; then
  command -v mpirun >/dev/null || packages+=(openmpi-bin)
  pkg-config --exists ompi 2>/dev/null || packages+=(libopenmpi-dev)
fi
if [ "$what" = test ]; then
  command -v g++ >/dev/null || packages+=(g++)
  command -v gfortran >/dev/null || packages+=(gfortran)
  command -v mpiexec.mpich >/dev/null || packages+=(mpich)
  command -v mpicc.mpich >/dev/null || packages+=(libmpich-dev)
  python3 -c 'import ensurepip' >/dev/null 2>&1 || packages+=(python3-venv)
  python3 -c 'import os, sysconfig; os.stat(sysconfig.get_paths()["include"] + "/Python.h")' >/dev/null 2>&1 ||
    packages+=(python3-dev)
  for b in munged:munge slurmctld:slurmctld slurmd:slurmd srun:slurm-client ip:iproute2; do
    PATH=$PATH:/usr/sbin:/sbin command -v "${b%%:*}" >/dev/null || packages+=("${b##*:}")
  done
fi
[ ${#packages[@]} -eq 0 ] && exit 0

refuse() {
  echo "ulysses: $*" >&2
  [ "$what" = test ] && [ -z "$install" ] && exit 0
  exit 1
}
target=deps
[ "$what" = test ] && target=deps-test
apt="apt-get install --no-install-recommends ${packages[*]}"
command -v apt-get >/dev/null ||
  refuse "missing: ${packages[*]} (names of Debian's packages); install the same with this system's package manager, then run make again"
if [ "$(id -u)" = 0 ]; then root=(env)
elif [ -z "$install" ]; then
  refuse "missing: ${packages[*]}; run \`make $target\` (which runs: sudo $apt), then run make again"
elif command -v sudo >/dev/null; then root=(sudo)
else
  refuse "missing: ${packages[*]}, and there is no sudo; as root, run: $apt"
fi
echo "ulysses: installing ${packages[*]}"
log=$(mktemp)
apt_get() { "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >"$log" 2>&1; }
if ! apt_get; then
  "${root[@]}" apt-get update -qq >>"$log" 2>&1 || true
  apt_get || { cat "$log" >&2; echo "ulysses: apt-get could not install ${packages[*]}" >&2; exit 1; }
fi
rm -f "$log"
