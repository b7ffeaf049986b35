#!/usr/bin/env bash
# wheel.sh PYTHON: dist/ulysses-*.whl from python/, with lib/libulysses.so and what it opens for MPI inside. Its tag says which glibc the library needs.
set -euo pipefail
python=$1
[ -e lib/libulysses.so ] || { echo "wheel: no lib/libulysses.so: make lib first" >&2; exit 1; }
need=$(objdump -T lib/libulysses.so lib/libulysses_mpi_*.so 2>/dev/null | grep -o 'GLIBC_2\.[0-9]*' | sort -V | tail -n 1)
tag=manylinux_${need#GLIBC_}
tag=${tag/./_}_$(uname -m)
work=build/wheel
rm -rf $work && mkdir -p $work dist
cp -r python/pyproject.toml python/README.md python/ulysses $work/
find $work -name __pycache__ -prune -exec rm -rf {} +
for f in lib/libulysses.so lib/libulysses_mpi_*.so; do [ ! -e "$f" ] || cp -L "$f" $work/ulysses/; done
printf '[bdist_wheel]\nplat_name = %s\n' "$tag" >$work/setup.cfg
rm -f dist/ulysses-*.whl
"$python" -m pip wheel -q --no-deps --no-build-isolation -w dist $work
ls dist/ulysses-*.whl
