#!/usr/bin/env bash
# wheel.sh PYTHON [PLUGIN [FOLDER [LIBRARIES]]]: makes FOLDER/libulysses-*.whl (dist) from python/,
# with libulysses.so and libulysses_mpi_*.so of the folder LIBRARIES (build/portable) and with the
# CUDA plug-in: PLUGIN, or build/cuda/libulysses_cuda.so if it exists; "none" leaves it out. The
# wheel's tag names the glibc that these libraries need. Standard output has the wheel's path alone.
set -euo pipefail
python=$1 plugin=${2:-build/cuda/libulysses_cuda.so} out=${3:-dist} lib=${4:-build/portable}
# The same sources and libraries give the same wheel: its files have the time of the commit.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}
fail() { echo "wheel: $*" >&2; exit 1; }
[ -e "$lib/libulysses.so" ] || fail "no $lib/libulysses.so; run make portable"
[ -z "${2:-}" ] || [ "$plugin" = none ] || [ -e "$plugin" ] || fail "no $plugin; make cuda builds build/cuda/libulysses_cuda.so"
mkdir -p build "$out"
work=$(mktemp -d build/wheel.XXXXXX)
trap 'rm -rf "$work"' EXIT
cp -rL python/pyproject.toml python/setup.py python/README.md python/LICENSE python/NOTICE python/ulysses "$work/"
find "$work" -name __pycache__ -prune -exec rm -rf {} +
for f in "$lib"/libulysses.so "$lib"/libulysses_mpi_*.so; do [ ! -e "$f" ] || cp -L "$f" "$work/ulysses/"; done
if [ "$plugin" != none ] && [ -e "$plugin" ]; then
  # The library would refuse a plug-in with another version of the interface on the user's machine.
  want=$(sed -n 's/^#define ULY_CUDA_ABI \([0-9]*\)u$/\1/p' cuda/kernels.h)
  have=$("$python" -c 'import ctypes, sys; have = ctypes.c_uint32(); ctypes.CDLL(sys.argv[1]).uly_cuda_plugin(0, ctypes.byref(have)); print(have.value)' "$(realpath "$plugin")")
  [ "$have" = "$want" ] || fail "$plugin has version $have of the interface, $lib/libulysses.so version $want; run make cuda"
  cp -L "$plugin" "$work/ulysses/libulysses_cuda.so"
  echo "wheel: with the CUDA plug-in $plugin, $(($(stat -Lc %s "$plugin") / 1000000)) MB" >&2
else
  echo "wheel: without a CUDA plug-in, so only for tensors on the CPU; make cuda builds build/cuda/libulysses_cuda.so" >&2
fi
tag=$(scripts/wheel-tag.sh "$work"/ulysses/*.so)
printf '[bdist_wheel]\nplat_name = %s\n' "$tag" >"$work/setup.cfg"
rm -f "$out"/libulysses-*.whl
"$python" -m pip wheel -q --no-deps --no-build-isolation -w "$out" "$work" >&2
ls "$out"/libulysses-*.whl
