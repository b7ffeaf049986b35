#!/usr/bin/env bash
# gpu-bundle.sh [DEST]: writes the folder DEST (dist/gpu) and the archive DEST.tar.gz for a machine
# with a GPU and without Go: the program, the plug-in, the library with host programs in C, the
# tests as programs, and Open MPI. scripts/gpu-check.sh and benchmarks/gpu.py use it. The machine
# also needs the files of this repository and NVIDIA's libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
dest=${1:-dist/gpu}
go=${GO:-go}
rm -rf "$dest" && mkdir -p "$dest"/{bin,lib,tests}
cp build/cuda/libulysses_cuda.so "$dest/lib/"
cp -L lib/libulysses.so lib/libulysses_mpi_ompi.so "$dest/lib/"
ln -s libulysses.so "$dest/lib/libulysses.so.0"
host=(-std=c11 -D_GNU_SOURCE -O1 -Icapi capi/testdata/gpu.c -Llib -lulysses -Wl,-rpath,\$ORIGIN/../lib -lm -lpthread -ldl)
gcc "${host[@]}" -o "$dest/tests/gpu-host"
mpicc -DWITH_MPI "${host[@]}" -o "$dest/tests/gpu-host-mpi"
$go build -tags mpi -ldflags "-s -w -X ulysses/internal/version.commit=$(git describe --always --abbrev=12 --dirty=+ --exclude='*' 2>/dev/null)" -o "$dest/bin/ulysses-mpi" ./cmd/ulysses-mpi
$go build -tags mpi -ldflags '-s -w' -o "$dest/bin/ulysses-bench" ./benchmarks
$go test -c -ldflags '-s -w' -o "$dest/tests/cuda.test" ./cuda
$go test -c -ldflags '-s -w' -o "$dest/tests/job.test" ./job
$go test -c -ldflags '-s -w' -tags mpi -o "$dest/tests/comm.test" ./comm
$go test -c -ldflags '-s -w' -tags mpi -o "$dest/tests/ulysses-mpi.test" ./cmd/ulysses-mpi
scripts/openmpi-tree.sh "$dest/openmpi" > /dev/null
tar czf "$dest.tar.gz" -C "$dest" .
touch "$dest/packed"  # the folder equals the archive, so gpu-env.sh does not unpack it
echo "$dest.tar.gz: $(du -sm "$dest.tar.gz" | cut -f1) MiB, unpacked $(du -sm "$dest" | cut -f1) MiB"
