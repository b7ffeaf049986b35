#!/bin/sh
# Runs a peer without two handicaps of PyTorch as it is installed: MKL does not use AVX-512 on
# processors of other vendors than Intel, and glibc returns every large buffer to the system, so
# each step has page faults again.
#   ./unhandicapped.sh python attention.py --threads 2
set -eu
here=$(cd "$(dirname "$0")" && pwd)
shim=${TMPDIR:-/tmp}/ulysses-mkl-dispatch-$(id -u).so
if [ ! -e "$shim" ] || [ "$here/mkl_dispatch.c" -nt "$shim" ]; then
	${CC:-cc} -O2 -shared -fPIC -o "$shim.$$" "$here/mkl_dispatch.c"
	mv "$shim.$$" "$shim"
fi
export LD_PRELOAD="$shim${LD_PRELOAD:+:$LD_PRELOAD}"
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=268435456
export PEERS_UNHANDICAPPED=1
exec "$@"
