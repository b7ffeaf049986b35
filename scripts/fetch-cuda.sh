#!/usr/bin/env bash
# fetch-cuda.sh FOLDER [--with-libs]: a CUDA compiler and the headers of NVIDIA's libraries, from the wheels in cuda/requirements.txt; with
# --with-libs also cuDNN, and NVRTC and cuBLASLt, which it needs (1.2 GB), for checks that need no GPU. Needs Python 3 with pip or venv; no GPU, no root.
#
# The folder appears whole or not at all: everything is unpacked beside it and renamed, and its .stamp says what it holds.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
dest=${1:?usage: fetch-cuda.sh FOLDER [--with-libs]}
libs=${2:-}
requirements=$here/cuda/requirements.txt
want=$(cat "$requirements" "$0" | sha256sum | cut -c 1-16)

current() { # what is there may hold the libraries although they are not asked for
  case "$(cat "$dest/.stamp" 2>/dev/null)" in
    "$want --with-libs") return 0 ;;
    "$want") [ -z "$libs" ] ;;
    *) return 1 ;;
  esac
}
current && exit 0

if [ "$(uname -sm)" != "Linux x86_64" ]; then
  echo "ulysses: the CUDA compiler is fetched for Linux on x86-64 alone. Here: make cuda NVCC=/usr/local/cuda/bin/nvcc" >&2
  exit 1
fi
mkdir -p "$(dirname "$dest")"
exec {lock}>"$dest.lock" # two builds at once: the second waits, and finds it done
flock "$lock"
current && exit 0

tmp=$(mktemp -d "$dest.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
if python3 -m pip --version >/dev/null 2>&1; then
  python=python3
elif python3 -m venv "$tmp/venv" >/dev/null 2>&1; then
  python=$tmp/venv/bin/python
else
  echo "ulysses: fetching the CUDA compiler needs Python 3 with pip: apt-get install python3-venv, or make cuda NVCC=/usr/local/cuda/bin/nvcc" >&2
  exit 1
fi
echo "ulysses: fetching the CUDA compiler (1.2 GB, once) into $dest"
platforms=()
for p in 2_28 2_27 2_18 2_17 2_12; do platforms+=(--platform "manylinux_${p}_x86_64"); done
"$python" -m pip download -q --disable-pip-version-check --no-cache-dir --no-deps --require-hashes --only-binary=:all: --python-version 3.11 \
  --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 -d "$tmp/wheels" -r "$requirements"

"$python" - "$tmp/wheels" "$tmp/cuda" "$libs" <<'PYTHON'
import os, sys, zipfile

wheels, dest, libs = sys.argv[1:]
compiler = ("nvidia_cuda_nvcc", "nvidia_cuda_crt", "nvidia_nvvm", "nvidia_cuda_runtime", "nvidia_cuda_cccl")
libraries = ("nvidia_cudnn_cu13", "nvidia_cuda_nvrtc", "nvidia_cublas") if libs else ()

def wanted(wheel, path):
    if wheel == "nvidia_cudnn_frontend":
        return path.startswith("include/")
    if not path.startswith("nvidia/") or path.endswith(("/libnvvm.so.4", "/libcublas.so.13", "/libnvblas.so.13")) or ".alt." in path:  # nobody uses them
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
ln -s lib "$tmp/cuda/nvidia/cu13/lib64" # nvcc.profile says lib64, the wheel has lib
"$tmp/cuda/nvidia/cu13/bin/nvcc" --version >/dev/null
echo "$want${libs:+ $libs}" >"$tmp/cuda/.stamp"
rm -rf "$dest"
mv "$tmp/cuda" "$dest"
