#!/usr/bin/env bash
# gpu-run.sh ARGUMENTS: ulysses-bench of the bundle in dist, with all that it needs (gpu-env.sh); on RANKS processes where that is set.
. "$(dirname "$0")/gpu-env.sh" "$(dirname "$0")/../dist/gpu.tar.gz"
exec ${RANKS:+mpirun --oversubscribe --bind-to none -n "$RANKS"} "$bundle/bin/ulysses-bench" "$@"
