#!/usr/bin/env bash
# gpu-run.sh ARGUMENTS: ulysses-bench of the bundle, with its plug-in, its Open MPI and the libraries that a PyTorch here brought along.
bundle=$(cd "$(dirname "$0")/../dist/gpu" && pwd) || exit 3
export ULYSSES_CUDA_PLUGIN=${ULYSSES_CUDA_PLUGIN:-$bundle/lib/libulysses_cuda.so}
if [ -z "${ULYSSES_NVIDIA_ROOT:-}" ]; then
  root=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2> /dev/null) && export ULYSSES_NVIDIA_ROOT=$root
fi
. "$bundle/openmpi/env.sh"
exec "$bundle/bin/ulysses-bench" "$@"
