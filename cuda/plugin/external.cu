// Streams and memory of host programs that use CUDA themselves.
#include "external.h"

int32_t stream_wrap(uly_device *, void *external, uly_stream **s) {
  if (!*s) *s = new uly_stream;
  (*s)->wrapped = true;
  (*s)->s = static_cast<cudaStream_t>(external);
  return ULY_OK;
}

int32_t memory_kind(uly_device *d, const void *p, int32_t *kind, int32_t *ordinal) {
  cudaPointerAttributes a;
  cudaError_t e = cudaPointerGetAttributes(&a, p);
  *kind = ULY_MEMORY_HOST, *ordinal = -1;
  if (e == cudaErrorInvalidValue) { // CUDA does not know this address
    cudaGetLastError();
    return ULY_OK;
  }
  TRY(check(d, e, "cudaPointerGetAttributes"));
  switch (a.type) {
    case cudaMemoryTypeDevice: *kind = ULY_MEMORY_GPU; break;
    case cudaMemoryTypeManaged: *kind = ULY_MEMORY_MANAGED; break;
    case cudaMemoryTypeHost: *kind = ULY_MEMORY_PINNED; break;
    default: return ULY_OK;
  }
  *ordinal = a.device;
  return ULY_OK;
}
