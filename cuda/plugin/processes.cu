// CUDA IPC: processes on one machine share whole allocations and events. cuda/ipc.go has the
// protocol between them, and between ranks of one process, whose GPUs access each other's memory.
#include "processes.h"

#include <string.h>

#include "libraries/libraries.h"

static_assert(sizeof(cudaIpcMemHandle_t) == ULY_HANDLE && sizeof(cudaIpcEventHandle_t) == ULY_HANDLE,
              "CUDA's handles are sent to other processes unchanged");

int32_t memory_handle(uly_device *d, const void *p, char handle[ULY_HANDLE], int64_t *offset, uint64_t *generation) {
  char *base = nullptr;
  int64_t bytes = 0;
  const bool own = allocation(d, p, &base, &bytes);
  if ((!own && !memory_range(p, &base, &bytes)) || !memory_generation(p, generation))
    return fail(d, ULY_INVALID_ARGUMENT, "memory handle: %p is not in memory of this device", p);
  cudaIpcMemHandle_t h;
  const cudaError_t e = cudaIpcGetMemHandle(&h, base);
  if (!own && e == cudaErrorInvalidValue) {
    cudaGetLastError();
    return fail(d, ULY_UNSUPPORTED,
                "memory handle: other processes cannot map the memory at %p, which belongs to a pool or to expandable "
                "segments; use memory of cudaMalloc, or another transport than ipc",
                p);
  }
  TRY(check(d, e, "cudaIpcGetMemHandle"));
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
  TRY(check(d, cudaIpcGetEventHandle(&h, e->e), "cudaIpcGetEventHandle"));
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
  launch_group(s);
  return bytes ? check(d, cudaMemcpyAsync(dst, src, (size_t)bytes, cudaMemcpyDefault, s->s), "copying bytes")
               : (int32_t)ULY_OK;
}

// cudaErrorTooManyPeers: without NVSwitch, a GPU can access eight others.
int32_t peer_access(uly_device *d, int32_t ordinal, int32_t *can) {
  *can = ordinal == d->ordinal;
  if (*can) return ULY_OK;
  int supported = 0;
  TRY(check(d, cudaDeviceCanAccessPeer(&supported, d->ordinal, ordinal), "cudaDeviceCanAccessPeer"));
  if (!supported) return ULY_OK;
  const cudaError_t e = cudaDeviceEnablePeerAccess(ordinal, 0);
  *can = e == cudaSuccess || e == cudaErrorPeerAccessAlreadyEnabled;
  if (e == cudaSuccess) return ULY_OK;
  cudaGetLastError();
  return *can || e == cudaErrorPeerAccessUnsupported || e == cudaErrorTooManyPeers
             ? ULY_OK
             : check(d, e, "cudaDeviceEnablePeerAccess");
}
