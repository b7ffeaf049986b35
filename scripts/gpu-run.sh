#!/usr/bin/env bash
# gpu-run.sh ARGUMENTS: runs ulysses-bench of the bundle in dist, in the environment of gpu-env.sh.
# If RANKS is set, it runs that many processes.
. "$(dirname "$0")/gpu-env.sh" "$(dirname "$0")/../dist/gpu.tar.gz"
exec ${RANKS:+mpirun --oversubscribe --bind-to none -n "$RANKS"} "$bundle/bin/ulysses-bench" "$@"
