// Being a guest in a program that uses CUDA itself: its streams, its memory, and what its threads
// compute on.
#include "guest.h"

#include <dlfcn.h>

namespace {

// What only the driver knows: the context of a thread, and where an allocation begins. The runtime
// has opened the driver by then.
struct Driver {
  int (*get)(void **) = nullptr;
  int (*set)(void *) = nullptr;
  int (*range)(uintptr_t *base, size_t *bytes, uintptr_t) = nullptr;
};

#ifndef ULY_EMULATED
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
#endif

} // namespace

#ifdef ULY_EMULATED

void *thread_context() {
  int ordinal = 0;
  cudaGetDevice(&ordinal);
  return reinterpret_cast<void *>((intptr_t)ordinal);
}

void thread_context_set(void *was) { cudaSetDevice((int)reinterpret_cast<intptr_t>(was)); }

bool memory_range(const void *p, char **base, int64_t *bytes) {
  void *b = nullptr;
  size_t n = 0;
  if (!uly_emulated::range(p, &b, &n)) return false;
  *base = static_cast<char *>(b), *bytes = (int64_t)n;
  return true;
}

#else

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

#endif

int32_t stream_wrap(uly_device *, void *theirs, uly_stream **s) {
  if (!*s) *s = new uly_stream;
  (*s)->wrapped = true;
  (*s)->s = static_cast<cudaStream_t>(theirs);
  return ULY_OK;
}

int32_t place_of(uly_device *d, const void *p, int32_t *place, int32_t *ordinal) {
  cudaPointerAttributes a;
  cudaError_t e = cudaPointerGetAttributes(&a, p);
  *place = ULY_AT_HOST, *ordinal = -1;
  if (e == cudaErrorInvalidValue) { // an address that CUDA has never heard of
    cudaGetLastError();
    return ULY_OK;
  }
  TRY(check(d, e, "asking where memory lies"));
  switch (a.type) {
    case cudaMemoryTypeDevice: *place = ULY_AT_GPU; break;
    case cudaMemoryTypeManaged: *place = ULY_AT_EITHER; break;
    case cudaMemoryTypeHost: *place = ULY_AT_PINNED; break;
    default: return ULY_OK;
  }
  *ordinal = a.device;
  return ULY_OK;
}
