#!/usr/bin/env python3
"""stub.py CUDNN_LIB FOLDER: a libcuda.so.1 without a GPU behind it, into FOLDER.

cuDNN builds plans for a GPU that it is only told of, but not without a driver's library: it wants to load the kernels that it has compiled. This
one takes them and forgets them; whatever would touch a GPU fails with "no device". It is for checks of plans alone: a program that finds it in
place of a driver cannot run anything.
"""

import pathlib
import re
import subprocess
import sys

NO_DEVICE = 100
# What a library of kernels goes through on its way to a plan: a handle that is not NULL.
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
int cuGetErrorString(int e, const char **text) { *text = "a stand-in for the driver: no device"; return 0; }
static int find(const char *name, void **f) {
  void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  *f = self ? dlsym(self, name) : 0;
  return *f ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **f, int version, unsigned long long flags) { return find(name, f); }
int cuGetProcAddress_v2(const char *name, void **f, int version, unsigned long long flags, int *status) {
  int e = find(name, f);
  if (status) *status = e != 0;
  return e;
}
""" % {"no": NO_DEVICE}


def names(folder):
    """Functions of the driver that cuDNN asks for by name."""
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
