// For programs that use CUDA themselves: their streams and the location of their memory.
#include "guest.h"

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
