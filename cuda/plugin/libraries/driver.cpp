// Functions of the CUDA driver that the runtime has no equivalent of: a thread's context, and the
// allocation that an address lies in.
#include <dlfcn.h>

#include "libraries.h"

namespace {

// The driver's functions, NULL where the driver is missing. The runtime has loaded the driver before.
struct Driver {
  int (*get)(void **) = nullptr;
  int (*set)(void *) = nullptr;
  int (*range)(uintptr_t *base, size_t *bytes, uintptr_t) = nullptr;
};

const Driver &driver() {
  static const Driver found = [] {
    Driver d;
    if (void *file = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
      *reinterpret_cast<void **>(&d.get) = dlsym(file, "cuCtxGetCurrent");
      *reinterpret_cast<void **>(&d.set) = dlsym(file, "cuCtxSetCurrent");
      *reinterpret_cast<void **>(&d.range) = dlsym(file, "cuMemGetAddressRange_v2");
    }
    return d;
  }();
  return found;
}
} // namespace

// A thread that has no context yet is given none: cudaSetDevice, asked to restore GPU 0, would make
// one there and take its memory.
void *thread_context() {
  void *c = nullptr;
  if (driver().get && driver().get(&c)) c = nullptr;
  return c;
}

void thread_context_set(void *was) {
  if (driver().set) driver().set(was);
}

bool memory_range(const void *p, char **base, int64_t *bytes) {
  uintptr_t b = 0;
  size_t n = 0;
  if (!driver().range || driver().range(&b, &n, reinterpret_cast<uintptr_t>(p))) return false;
  *base = reinterpret_cast<char *>(b), *bytes = (int64_t)n;
  return true;
}
