#!/usr/bin/env bash
# fetch-cuda.sh FOLDER [--with-libs]: fetches a CUDA compiler and the headers of NVIDIA's libraries
# from the wheels in cuda/requirements.txt. With --with-libs it also fetches cuDNN, and NVRTC and
# cuBLASLt, which cuDNN needs (1.2 GB), for checks without a GPU. It needs Python 3 with pip or
# venv, and neither a GPU nor root.
#
# The folder is complete or absent: the files are unpacked beside it, and the new folder is renamed.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
dest=${1:?usage: fetch-cuda.sh FOLDER [--with-libs]}
libs=${2:-}
requirements=$here/cuda/requirements.txt

# The file .stamp in the folder names its content: the wheels, and the version of the files that
# this script takes from them. Increase layout if that choice changes.
layout=1
want=$(grep -v '^#' "$requirements" | sha256sum | cut -c 1-16)-$layout

# current reports whether the folder has the content. It may have the libraries without --with-libs.
current() {
  local stamp
  stamp=$(cat "$dest/.stamp" 2>/dev/null) || return 1
  case "${stamp%% *}" in
    "$want") [ -z "$libs" ] || [ "$stamp" != "${stamp% --with-libs}" ] ;;
    *) return 1 ;;
  esac
}
current && exit 0

machine=$(uname -m)
case $(uname -s)-$machine in
  Linux-x86_64 | Linux-aarch64) ;;
  *)
    echo "ulysses: the CUDA compiler can be fetched only for Linux on x86-64 and AArch64; use make cuda NVCC=/usr/local/cuda/bin/nvcc" >&2
    exit 1
    ;;
esac
mkdir -p "$(dirname "$dest")"
exec {lock}>"$dest.lock" # of two concurrent builds, the second waits and finds the folder
flock "$lock"
current && exit 0

tmp=$(mktemp -d "$dest.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
if python3 -m pip --version >/dev/null 2>&1; then
  python=python3
elif python3 -m venv "$tmp/venv" >/dev/null 2>&1; then
  python=$tmp/venv/bin/python
else
  echo "ulysses: fetching the CUDA compiler needs Python 3 with pip; run apt-get install python3-venv, or make cuda NVCC=/usr/local/cuda/bin/nvcc" >&2
  exit 1
fi
echo "ulysses: fetching the CUDA compiler (1.2 GB, once) into $dest"
platforms=()
for p in _2_28 _2_27 _2_18 _2_17 _2_12 2014 2010; do platforms+=(--platform "manylinux${p}_$machine"); done
"$python" -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --require-hashes --only-binary=:all: --python-version 3.11 \
  --implementation cp "${platforms[@]}" -d "$tmp/wheels" -r "$requirements"

"$python" - "$tmp/wheels" "$tmp/cuda" "$libs" <<'PYTHON'
import os, sys, zipfile

wheels, dest, libs = sys.argv[1:]
compiler = ("nvidia_cuda_nvcc", "nvidia_cuda_crt", "nvidia_nvvm", "nvidia_cuda_runtime", "nvidia_cuda_cccl")
libraries = ("nvidia_cudnn_cu13", "nvidia_cuda_nvrtc", "nvidia_cublas") if libs else ()

def wanted(wheel, path):
    if wheel == "nvidia_cudnn_frontend":
        return path.startswith("include/")
    if not path.startswith("nvidia/") or ".alt." in path:
        return False
    if path.endswith(("/libnvvm.so.4", "/libcublas.so.13", "/libnvblas.so.13")):  # unused
        return False
    return wheel in compiler or wheel in libraries or "/include/" in path

for name in sorted(os.listdir(wheels)):
    wheel = name.split("-")[0]
    root = os.path.join(dest, "cudnn_frontend") if wheel == "nvidia_cudnn_frontend" else dest
    with zipfile.ZipFile(os.path.join(wheels, name)) as z:
        for path in z.namelist():
            if wanted(wheel, path) and not path.endswith("/"):
                os.chmod(z.extract(path, root), 0o755 if "/bin/" in path else 0o644)
    os.remove(os.path.join(wheels, name))
PYTHON
ln -s lib "$tmp/cuda/nvidia/cu13/lib64" # nvcc.profile names lib64, the wheel has lib
"$tmp/cuda/nvidia/cu13/bin/nvcc" --version >/dev/null
echo "$want${libs:+ $libs}" >"$tmp/cuda/.stamp"
rm -rf "$dest"
mv "$tmp/cuda" "$dest"
