#!/usr/bin/env bash
# gpu-run.sh ARGUMENTS: ulysses-bench of the bundle in dist, with all that it needs (gpu-env.sh).
. "$(dirname "$0")/gpu-env.sh" "$(dirname "$0")/../dist/gpu.tar.gz"
exec "$bundle/bin/ulysses-bench" "$@"
