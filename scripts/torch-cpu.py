#!/usr/bin/env python3
"""torch-cpu.py REQUIREMENTS: installs PyTorch and the other packages of a requirements file into
this interpreter's environment, without CUDA.

The CPU build of PyTorch comes from PyTorch's own index. Where that index cannot be reached, PyPI's
build for CUDA is installed without NVIDIA's packages, which are 5 GB that tests on a CPU never
call. PyTorch's libraries link them, so this program compiles a library of the same name and with
the same functions for each; a call of such a function aborts the process. Only the CUDA runtime is
the real one (3 MB), because PyTorch registers its kernels with it. If that fails, for example
because there is no gcc, everything is installed.
"""

from __future__ import annotations

import collections
import pathlib
import re
import subprocess
import sys
import sysconfig

LIB = pathlib.Path(sysconfig.get_paths()["purelib"]) / "torch" / "lib"
# Functions without a symbol version, and the library that has them.
PREFIXES = {
    "nccl": "libnccl",
    "cudnn": "libcudnn",
    "cusparseLt": "libcusparseLt",
    "cuFile": "libcufile",
    "nvshmem": "libnvshmem_host",
    "cu": "libcuda",
}

# Packages that require PyTorch. pip would install NVIDIA's packages with them.
ON_TORCH = ["accelerate", "peft"]

# What `import torch` imports.
IMPORTED = ["typing_extensions", "filelock", "sympy", "networkx", "jinja2", "fsspec"]


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pip(*arguments: str) -> bool:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", *arguments]
    return subprocess.run(command).returncode == 0


def works() -> bool:
    program = "import torch; assert float(torch.ones(3) @ torch.ones(3)) == 3"
    return subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def main(requirements: str) -> None:
    lines = [line.strip() for line in pathlib.Path(requirements).read_text().splitlines()]
    torch = next(line for line in lines if line.startswith("torch=="))
    others = [line for line in lines if line and line[0] != "#" and line != torch]
    on_torch = [line for line in others if line.split("==")[0] in ON_TORCH]
    others = [line for line in others if line not in on_torch]
    index = ["--index-url", "https://download.pytorch.org/whl/cpu", "--retries", "0"]
    done = pip(torch, *index) and works()
    if not done:
        print("torch-cpu: no CPU build of PyTorch at its index; taking PyPI's without CUDA")
        try:
            done = pip("--no-deps", torch, "nvidia-cuda-runtime>=13,<14") and pip(*IMPORTED)
            stand_in()
            done = done and works()
        except (OSError, subprocess.CalledProcessError) as e:
            print(f"torch-cpu: {e}")
            done = False
    if not done:
        print("torch-cpu: installing PyTorch with NVIDIA's packages (6 GB)")
        done = pip("--force-reinstall", torch)
    done = done and pip(*others) and (not on_torch or pip("--no-deps", *on_torch))
    if not (done and works()):
        sys.exit(f"torch-cpu: could not install {requirements}")


def stand_in() -> None:
    """Compiles a library for each of NVIDIA's that PyTorch links and that is not here."""
    files = sorted(LIB.glob("*.so*"))
    if not files:
        raise OSError(f"no libraries in {LIB}")
    missing: set[str] = set()
    undefined: set[str] = set()
    defined: set[str] = set()
    for file in files:
        for name in re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-dW", str(file))):
            if re.match(r"lib(cu|nv|nccl)", name) and not re.match(r"libcudart\.", name):
                missing.add(name)
        undefined |= {line.split()[-1] for line in output("nm", "-D", "-u", str(file)).splitlines()}
        lines = output("nm", "-D", "--defined-only", str(file)).splitlines()
        defined |= {line.split()[-1].split("@")[0] for line in lines}
    # By library and symbol version, the functions.
    wanted: dict[str, dict[str, set[str]]] = collections.defaultdict(
        lambda: collections.defaultdict(set)
    )
    for symbol in undefined:
        name, _, version = symbol.partition("@")
        if name in defined:
            continue
        library = version if version in missing else ""
        if not library:
            stem = next((v for k, v in PREFIXES.items() if name.startswith(k)), None)
            library = next((m for m in missing if stem and m.split(".so")[0] == stem), "")
        if library:
            wanted[library][version].add(name)
    for library in sorted(missing):
        versions = wanted[library]
        source = "void abort(void);\n" + "".join(
            f"void {name}(void) {{ abort(); }}\n" for names in versions.values() for name in names
        )
        script = "".join(
            f"{version} {{ global: {'; '.join(sorted(names))}; }};\n"
            for version, names in versions.items()
            if version
        )
        (LIB / "stub.map").write_text(script)
        options = ["-Wl,--version-script=" + str(LIB / "stub.map")] if script else []
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", "-x", "c", "-", "-o"]
            + [str(LIB / library), "-Wl,-soname," + library, *options],
            input=source,
            text=True,
            check=True,
        )
        count = sum(len(names) for names in versions.values())
        print(f"torch-cpu: {library} stands in with {count} functions that abort")


if __name__ == "__main__":
    main(sys.argv[1])
