// Devices and their properties: a GPU of compute capability 9.0 with 4 multiprocessors.
#include <stdio.h>

#include <set>
#include <utility>

#include "errors.h"
#include "heap.h"
#include "limits.h"
#include "settings.h"

using namespace uly_emulated;

static int devices() { return (int)setting("ULYSSES_EMULATED_DEVICES", 1); }

cudaError_t cudaGetDeviceCount(int *n) {
  *n = devices();
  return *n > 0 ? cudaSuccess : set_error(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int ordinal) {
  if (ordinal < 0 || ordinal >= devices()) return set_error(cudaErrorInvalidDevice);
  this_thread().device = ordinal;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *ordinal) {
  *ordinal = this_thread().device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int ordinal) {
  if (ordinal < 0 || ordinal >= devices()) return set_error(cudaErrorInvalidDevice);
  *out = cudaDeviceProp{};
  snprintf(out->name, sizeof out->name, "emulated GPU %d", ordinal);
  for (int i = 0; i < 16; i++) out->uuid.bytes[i] = (char)(i == 15 ? ordinal : 0xe0 + i);
  out->totalGlobalMem = (size_t)setting("ULYSSES_EMULATED_MEMORY", 16ll << 30);
  out->sharedMemPerBlock = DEFAULT_SHARED;
  out->sharedMemPerBlockOptin = most_shared();
  out->major = 9;
  out->multiProcessorCount = 4;
  out->maxThreadsPerBlock = 1024;
  out->warpSize = 32;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr what, int ordinal) {
  if (ordinal < 0 || ordinal >= devices()) return set_error(cudaErrorInvalidDevice);
  switch (what) {
    case cudaDevAttrMaxThreadsPerBlock: *out = 1024; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = DEFAULT_SHARED; return cudaSuccess;
    case cudaDevAttrWarpSize: *out = 32; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *out = 4; return cudaSuccess;
    case cudaDevAttrUnifiedAddressing: *out = 1; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *out = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *out = 0; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = most_shared(); return cudaSuccess;
  }
  return set_error(cudaErrorInvalidValue);
}

// the pairs of a device and another one whose memory it can access
static std::set<std::pair<int, int>> peers;

bool uly_emulated::has_access(int device, int other) { return device == other || peers.count({device, other}); }

cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  if (ordinal < 0 || ordinal >= devices() || peer < 0 || peer >= devices()) return set_error(cudaErrorInvalidDevice);
  *can = ordinal != peer && setting("ULYSSES_EMULATED_PEERS", 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  std::lock_guard<std::mutex> held(lock);
  const int device = this_thread().device;
  if (peer < 0 || peer >= devices() || peer == device) return set_error(cudaErrorInvalidDevice);
  if (!setting("ULYSSES_EMULATED_PEERS", 1)) return set_error(cudaErrorPeerAccessUnsupported);
  return peers.insert({device, peer}).second ? cudaSuccess : set_error(cudaErrorPeerAccessAlreadyEnabled);
}
cudaError_t cudaDriverGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}
