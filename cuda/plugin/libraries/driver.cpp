// Functions of the CUDA driver without an equivalent in the runtime: the context of a thread, and
// the allocation that contains an address.
#include <dlfcn.h>

#include "libraries.h"

namespace {

// The driver's functions, NULL if there is no driver. The CUDA runtime has loaded the driver
// before.
struct Driver {
  int (*get)(void **) = nullptr;
  int (*set)(void *) = nullptr;
  int (*range)(uintptr_t *base, size_t *bytes, uintptr_t) = nullptr;
  int (*attribute)(void *out, int, uintptr_t) = nullptr;
};

const Driver &driver() {
  static const Driver found = [] {
    Driver d;
    if (void *file = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
      *reinterpret_cast<void **>(&d.get) = dlsym(file, "cuCtxGetCurrent");
      *reinterpret_cast<void **>(&d.set) = dlsym(file, "cuCtxSetCurrent");
      *reinterpret_cast<void **>(&d.range) = dlsym(file, "cuMemGetAddressRange_v2");
      *reinterpret_cast<void **>(&d.attribute) = dlsym(file, "cuPointerGetAttribute");
    }
    return d;
  }();
  return found;
}
} // namespace

// A thread without a context gets none. To restore GPU 0 by cudaSetDevice would create a context on
// GPU 0, which takes GPU memory.
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

bool memory_generation(const void *p, uint64_t *generation) {
  enum { BUFFER_ID = 7 }; // CU_POINTER_ATTRIBUTE_BUFFER_ID
  unsigned long long id = 0;
  if (!driver().attribute || driver().attribute(&id, BUFFER_ID, reinterpret_cast<uintptr_t>(p))) return false;
  *generation = id;
  return true;
}
