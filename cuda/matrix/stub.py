#!/usr/bin/env python3
"""stub.py CUDNN_LIB FOLDER: writes a stub of libcuda.so.1 to FOLDER.

cuDNN builds plans for a described GPU, but it needs the driver's library, into which it loads the
kernels that it has compiled. The stub accepts these kernels and ignores them. Functions that would
use a GPU return "no device". The stub is only for checks of plans; no program can run on it.
"""

import pathlib
import re
import subprocess
import sys

NO_DEVICE = 100
# Functions for loading kernels, which must return a handle that is not NULL.
HANDLES = [
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuLibraryGetModule",
    "cuKernelGetFunction",
    "cuModuleGetFunction",
    "cuModuleLoadData",
]
FINE = ["cuLibraryUnload", "cuKernelSetAttribute", "cuFuncSetAttribute", "cuModuleUnload"]
WRITTEN = """
#define _GNU_SOURCE
#include <dlfcn.h>
int cuInit(unsigned flags) { return %(no)d; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuGetErrorName(int e, const char **text) { *text = "NO_DEVICE"; return 0; }
int cuGetErrorString(int e, const char **text) {
  *text = "stub of the driver: no device";
  return 0;
}
static int find(const char *name, void **f) {
  void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *f = self ? dlsym(self, name) : 0;
  return *f ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **f, int version, unsigned long long flags) {
  return find(name, f);
}
int cuGetProcAddress_v2(const char *name, void **f, int version, unsigned long long flags,
                        int *status) {
  int e = find(name, f);
  if (status) *status = e != 0;
  return e;
}
""" % {"no": NO_DEVICE}


def names(folder):
    """Returns the names of the driver's functions that cuDNN looks up."""
    found = set()
    for part in ("graph", "engines_runtime_compiled", "engines_precompiled"):
        data = (folder / f"libcudnn_{part}.so.9").read_bytes()
        found |= {
            m.decode()
            for m in re.findall(
                rb"(?<=\0)cu[A-Z][A-Za-z0-9]{3,}(?:_v\d)?(?:_pt[sd][zs])?(?=\0)", data
            )
        }
    return found


def main():
    libraries, out = map(pathlib.Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    written = set(re.findall(r"^int (\w+)\(", WRITTEN, re.M))
    source = [WRITTEN]
    for name in sorted((names(libraries) | set(HANDLES) | set(FINE)) - written):
        if name in HANDLES:
            source.append(f"int {name}(void **handle, ...) {{ *handle = (void *)4096; return 0; }}")
        else:
            source.append(f"int {name}() {{ return {0 if name in FINE else NO_DEVICE}; }}")
    (out / "stub.c").write_text("\n".join(source) + "\n")
    subprocess.check_call(
        [
            "gcc",
            "-O1",
            "-w",
            "-shared",
            "-fPIC",
            "-Wl,-soname,libcuda.so.1",
            "-o",
            out / "libcuda.so.1",
            out / "stub.c",
            "-ldl",
        ]
    )


main()
