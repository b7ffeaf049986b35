# . gpu-env.sh BUNDLE: sets the environment for a bundle of gpu-bundle.sh: its plug-in, its Open
# MPI, and NVIDIA's libraries from an installed PyTorch. ULYSSES_CUDA_PLUGIN and ULYSSES_NVIDIA_ROOT
# override these. BUNDLE is the archive, which is unpacked beside itself once, or the unpacked
# folder. Sets $bundle.
bundle=${1%.tar.gz}
if [ "$1" != "$bundle" ] && [ "$1" -nt "$bundle/packed" ]; then
  rm -rf "$bundle" && mkdir -p "$bundle" && tar xzf "$1" -C "$bundle" && touch "$bundle/packed" || { echo "gpu-env: $1: cannot unpack the archive" >&2; exit 3; }
fi
bundle=$(cd "$bundle" 2> /dev/null && pwd) || { echo "gpu-env: no bundle at $1; run make gpu-bundle on a machine with Go" >&2; exit 3; }
export ULYSSES_CUDA_PLUGIN=${ULYSSES_CUDA_PLUGIN:-$bundle/lib/libulysses_cuda.so}
if [ -z "${ULYSSES_NVIDIA_ROOT:-}" ]; then
  # several packages may have folders of this name
  root=$(python3 -c 'import nvidia, os; print(max(nvidia.__path__, key=lambda p: sum(os.path.isdir(f"{p}/{x}/lib") for x in ("cu13", "cudnn", "nccl"))))' 2> /dev/null) && export ULYSSES_NVIDIA_ROOT=$root
fi
. "$bundle/openmpi/env.sh"
