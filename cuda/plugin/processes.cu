// What processes on one machine share by CUDA IPC: whole allocations, and events. The protocol
// between them is cuda/ipc.go's.
#include "processes.h"

#include <string.h>

#include "libraries/libraries.h"

static_assert(sizeof(cudaIpcMemHandle_t) == ULY_HANDLE && sizeof(cudaIpcEventHandle_t) == ULY_HANDLE,
              "handles go between processes as they are");

int32_t memory_handle(uly_device *d, const void *p, char handle[ULY_HANDLE], int64_t *offset, int64_t *bytes) {
  char *base = nullptr;
  const bool own = allocation(d, p, &base, bytes);
  if (!own && !memory_range(p, &base, bytes))
    return fail(d, ULY_INVALID_ARGUMENT, "a handle of memory: %p is not in memory of this device", p);
  cudaIpcMemHandle_t h;
  const cudaError_t e = cudaIpcGetMemHandle(&h, base);
  if (!own && e == cudaErrorInvalidValue) {
    cudaGetLastError();
    return fail(d, ULY_UNSUPPORTED,
                "a handle of memory: %p is of an allocator whose memory other processes cannot map (a pool, or "
                "expandable segments): use memory of "
                "cudaMalloc, or another way than ipc",
                p);
  }
  TRY(check(d, e, "a handle of memory"));
  memcpy(handle, &h, sizeof h);
  *offset = static_cast<const char *>(p) - base;
  return ULY_OK;
}

int32_t memory_open(uly_device *d, const char handle[ULY_HANDLE], void **out) {
  cudaIpcMemHandle_t h;
  memcpy(&h, handle, sizeof h);
  *out = nullptr;
  return check(d, cudaIpcOpenMemHandle(out, h, cudaIpcMemLazyEnablePeerAccess), "mapping memory of another process");
}

int32_t memory_close(uly_device *d, void *p) {
  return check(d, cudaIpcCloseMemHandle(p), "unmapping memory of another process");
}

int32_t event_handle(uly_device *d, uly_event *e, char handle[ULY_HANDLE]) {
  cudaIpcEventHandle_t h;
  TRY(check(d, cudaIpcGetEventHandle(&h, e->e), "a handle of an event"));
  memcpy(handle, &h, sizeof h);
  return ULY_OK;
}

int32_t event_open(uly_device *d, const char handle[ULY_HANDLE], uly_event **out) {
  *out = nullptr;
  cudaIpcEventHandle_t h;
  memcpy(&h, handle, sizeof h);
  auto *e = new uly_event;
  e->opened = true;
  const int32_t code = check(d, cudaIpcOpenEventHandle(&e->e, h), "opening an event of another process");
  if (code == ULY_OK) *out = e;
  else delete e;
  return code;
}

int32_t copy_bytes(uly_device *d, uly_stream *s, void *dst, const void *src, int64_t bytes) {
  if (bytes < 0) return fail(d, ULY_INVALID_ARGUMENT, "copying %lld bytes", (long long)bytes);
  return bytes ? check(d, cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, s->s), "copying bytes")
               : (int32_t)ULY_OK;
}
