#!/usr/bin/env bash
# wheel.sh PYTHON [PLUGIN [FOLDER]]: FOLDER/ulysses-*.whl (dist) from python/, with lib/libulysses.so inside, what it opens for MPI, and the CUDA plug-in:
# PLUGIN, or build/cuda/libulysses_cuda.so where there is one; "none" leaves it out. The wheel's tag says which glibc all of them need. Its path alone goes to
# standard output.
set -euo pipefail
python=$1 plugin=${2:-build/cuda/libulysses_cuda.so} out=${3:-dist}
fail() { echo "wheel: $*" >&2; exit 1; }
[ -e lib/libulysses.so ] || fail "no lib/libulysses.so: make lib first"
[ -z "${2:-}" ] || [ "$plugin" = none ] || [ -e "$plugin" ] || fail "no $plugin: make cuda builds build/cuda/libulysses_cuda.so"
mkdir -p build "$out"
work=$(mktemp -d build/wheel.XXXXXX)
trap 'rm -rf "$work"' EXIT
cp -rL python/pyproject.toml python/setup.py python/README.md python/LICENSE python/NOTICE python/ulysses "$work/"
find "$work" -name __pycache__ -prune -exec rm -rf {} +
for f in lib/libulysses.so lib/libulysses_mpi_*.so; do [ ! -e "$f" ] || cp -L "$f" "$work/ulysses/"; done
if [ "$plugin" != none ] && [ -e "$plugin" ]; then
  # One that was built before the interface changed would be refused by the library, on somebody else's machine.
  want=$(sed -n 's/^#define ULY_CUDA_ABI \([0-9]*\)u$/\1/p' cuda/kernels.h)
  have=$("$python" -c 'import ctypes, sys; have = ctypes.c_uint32(); ctypes.CDLL(sys.argv[1]).uly_cuda_plugin(0, ctypes.byref(have)); print(have.value)' "$(realpath "$plugin")")
  [ "$have" = "$want" ] || fail "$plugin speaks version $have of the interface, lib/libulysses.so version $want: make cuda"
  cp -L "$plugin" "$work/ulysses/libulysses_cuda.so"
  echo "wheel: with the CUDA plug-in $plugin, $(($(stat -Lc %s "$plugin") / 1000000)) MB of the library's own code" >&2
else
  echo "wheel: without a CUDA plug-in, for tensors on the CPU alone: make cuda builds build/cuda/libulysses_cuda.so" >&2
fi
tag=$(scripts/wheel-tag.sh "$work"/ulysses/*.so)
printf '[bdist_wheel]\nplat_name = %s\n' "$tag" >"$work/setup.cfg"
rm -f "$out"/ulysses-*.whl
"$python" -m pip wheel -q --no-deps --no-build-isolation -w "$out" "$work" >&2
ls "$out"/ulysses-*.whl
