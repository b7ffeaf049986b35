// The functions of the CUDA runtime that the plug-in calls. allocations.cpp, copies.cpp,
// devices.cpp, errors.cpp, events.cpp, launch.cpp and streams.cpp implement them.
//
// Streams are queues. Their work runs as late as possible: when the host synchronizes, copies to
// pageable memory, or calls cudaFree. Then the first entries of streams that do not wait for an
// event run in a random order, until the requested work has completed, and no further. Recording an
// event that other processes see runs all work before the record, because those processes may wait
// for it.
//
// Settings: ULYSSES_EMULATED_SEED (1) selects the order. ULYSSES_EMULATED_DEVICES (1) is the number
// of GPUs, ULYSSES_EMULATED_MEMORY their bytes, and ULYSSES_EMULATED_TIMEOUT (60) the seconds to
// wait for an event of another process. ULYSSES_EMULATED_IPC (2) is the support of CUDA IPC: 0
// none, as on systems without interprocess events; 1 handles that other processes cannot open, as
// in containers. ULYSSES_EMULATED_LATE (0), if not 0, is the microseconds between two entries that
// a thread runs: hosts then enqueue ahead of their GPU, and a wait for an event of another process
// ends when the newest record of the event has completed, also a record after the wait.
// ULYSSES_EMULATED_REUSE (0), if not 0, gives the handle of freed memory to new memory of the same
// size, and processes that map the freed memory keep its pages. ULYSSES_EMULATED_PINNED, if set, is
// the most bytes of an allocation of pinned memory. ULYSSES_EMULATED_GUARD (0) stops kernels that
// access memory outside of allocations (fences.cpp). ULYSSES_EMULATED_PTX, if set, is a folder with
// the PTX of the kernels, which then run instead of their C++ (ptx/run.cpp).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <functional>

#include "types.h"

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInitializationError = 3,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDevicePointer = 17,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorDeviceUninitialized = 201,
  cudaErrorMapBufferObjectFailed = 205,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorPeerAccessUnsupported = 217,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchTimeout = 702,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorTooManyPeers = 711,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999,
};

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;
struct cudaIpcMemHandle_t {
  char reserved[64];
};
struct cudaIpcEventHandle_t {
  char reserved[64];
};
struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;
  size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
  int major, minor, multiProcessorCount, maxThreadsPerBlock, warpSize;
};

enum cudaMemoryType { cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice, cudaMemoryTypeManaged };
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void *devicePointer, *hostPointer;
};

enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrUnifiedAddressing = 41,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum : unsigned {
  cudaStreamDefault = 0,
  cudaStreamNonBlocking = 1,
  cudaEventDefault = 0,
  cudaEventBlockingSync = 1,
  cudaEventDisableTiming = 2,
  cudaEventInterprocess = 4,
  cudaHostAllocDefault = 0,
  cudaHostAllocPortable = 1,
  cudaIpcMemLazyEnablePeerAccess = 1,
};

const char *cudaGetErrorName(cudaError_t e);
const char *cudaGetErrorString(cudaError_t e); // for a failed launch: the kernel and the error
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaGetDeviceCount(int *n); // ULYSSES_EMULATED_DEVICES, 1
cudaError_t cudaSetDevice(int ordinal);
cudaError_t cudaGetDevice(int *ordinal);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int ordinal);
cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr what, int ordinal);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer);
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
cudaError_t cudaDriverGetVersion(int *v);
cudaError_t cudaRuntimeGetVersion(int *v);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *a, const void *p);
cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaMallocHost(void **p, size_t bytes);
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
template <class T> cudaError_t cudaMalloc(T **p, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void **>(p), bytes);
}
template <class T> cudaError_t cudaMallocHost(T **p, size_t bytes) {
  return cudaMallocHost(reinterpret_cast<void **>(p), bytes);
}
cudaError_t cudaMemset(void *p, int value, size_t bytes);
cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t s = nullptr);
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t s = nullptr);
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t s = nullptr);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned flags);
// Priorities are accepted and have no effect: a GPU does not promise an order either.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest);
cudaError_t cudaStreamDestroy(cudaStream_t s);
cudaError_t cudaStreamSynchronize(cudaStream_t s);
cudaError_t cudaStreamQuery(cudaStream_t s);
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags = 0);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t e);
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t e);
cudaError_t cudaEventQuery(cudaEvent_t e);

// Only other processes can open a handle, as on a GPU. A handle is valid while the process that
// made it lives. cudaFree of memory that other processes map is undefined on a GPU; here it fails.
// Recording an interprocess event in two streams, which CUDA does not specify, fails as well.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p);
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned flags);
cudaError_t cudaIpcCloseMemHandle(void *p);
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e);
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h);

// Every kernel is built for the emulated GPU. The call succeeds and does not change *a.
struct cudaFuncAttributes {};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, const void *) { return cudaSuccess; }
// The attribute holds for the current device.
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute what, int value);
template <class R, class... P> cudaError_t cudaFuncSetAttribute(R (*kernel)(P...), cudaFuncAttribute what, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel), what, value);
}
