// probe: the GPUs and the libraries of NVIDIA that this process can use, and how to install missing
// libraries.
#include "probe.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "libraries/libraries.h"

// The driver's library is opened first. Without it, the CUDA runtime would report a driver that is
// too old.
int count_gpus(std::string *why) {
  if (!emulated) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!driver) {
      const char *e = dlerror();
      *why = std::string("no CUDA driver: ") + (e ? e : "libcuda.so.1 does not load") +
             "; run on a node with an NVIDIA GPU and its driver (nvidia-smi shows it)";
      return 0;
    }
  }
  int n = 0;
  cudaError_t e = cudaGetDeviceCount(&n);
  if (e == cudaSuccess && n > 0) return n;
  cudaGetLastError();
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (e == cudaErrorInsufficientDriver) {
    int have = 0, need = 0;
    cudaDriverGetVersion(&have);
    cudaRuntimeGetVersion(&need);
    char text[256];
    snprintf(text, sizeof text,
             "the CUDA driver is too old: it supports CUDA %d.%d, the plug-in needs %d.%d; install driver 580 or newer",
             have / 1000, have % 1000 / 10, need / 1000, need % 1000 / 10);
    *why = text;
  } else if (e == cudaErrorNoDevice || e == cudaSuccess) {
    *why = "no GPU is visible to this process";
    if (visible) *why += std::string(": CUDA_VISIBLE_DEVICES is '") + visible + "'";
    else *why += ": request one from the scheduler (srun --gpus-per-task=1), or start the container with GPUs";
  } else {
    *why = std::string("the CUDA driver does not start: ") + cudaGetErrorName(e) + ": " + cudaGetErrorString(e);
  }
  return 0;
}

namespace {

// The effect of each missing library, in the order of enum library.
struct Library {
  const char *name, *effect;
};
const Library libraries[ULY_LIBRARIES] = {
    {"CUDA driver", "no GPU can be used"},
    {"cuBLASLt", "matrix products use a plain kernel and are many times slower"},
    {"cuDNN",
     "attention in BF16 uses the plug-in's own kernels and is slower, many times slower if head sizes are not "
     "multiples "
     "of 16"},
    {"NVRTC", "attention cannot use cuDNN, which needs NVRTC"},
    {"NCCL", "GPUs communicate through CUDA IPC, or between nodes through host memory"},
};

} // namespace

static void probe_libraries(uly_probe *out) {
  for (int i = 0; i < ULY_LIBRARIES; i++) {
    uly_library &l = out->library[i];
    put(l.name, sizeof l.name, libraries[i].name);
    l.found[0] = l.effect[0] = l.fix[0] = 0;
    const library which = static_cast<library>(i);
    l.ok = library_open(which);
    if (l.ok) {
      put(l.found, sizeof l.found, library_version(which) + ", " + library_path(which));
    } else {
      put(l.found, sizeof l.found, library_reason(which));
      put(l.effect, sizeof l.effect, libraries[i].effect);
      put(l.fix, sizeof l.fix, library_fix(which));
    }
  }
}

std::string libraries_text() {
  if (emulated) return "no libraries";
  std::string text;
  for (int i = LIB_CUBLASLT; i <= LIB_CUDNN; i++) {
    std::string version = library_version(static_cast<library>(i));
    text += std::string(i == LIB_CUBLASLT ? "" : ", ") +
            (version.empty() ? std::string("no ") + libraries[i].name : libraries[i].name + (" " + version));
  }
  return text;
}

int32_t probe(uly_probe *out) {
  memset(out, 0, sizeof *out);
  try {
    std::string why;
    out->devices = count_gpus(&why);
    put(out->text, sizeof out->text, why);
    probe_libraries(out);
    return ULY_OK;
  } catch (...) {
    put(out->text, sizeof out->text, "looking for GPUs: out of host memory");
    return ULY_INTERNAL;
  }
}
