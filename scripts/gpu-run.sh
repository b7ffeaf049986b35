#!/usr/bin/env bash
# gpu-run.sh ARGUMENTS: runs ulysses-bench, or the program PROGRAM, of the bundle in dist, in the
# environment of gpu-env.sh. If RANKS is set, it runs that many processes.
. "$(dirname "$0")/gpu-env.sh" "$(dirname "$0")/../dist/gpu.tar.gz"
exec ${RANKS:+mpirun --oversubscribe --bind-to none -n "$RANKS"} "$bundle/bin/${PROGRAM:-ulysses-bench}" "$@"
