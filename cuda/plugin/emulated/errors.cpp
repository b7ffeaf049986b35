#include "errors.h"

#include <pthread.h>

namespace uly_emulated {

std::mutex lock;

PerThread &this_thread() {
  static pthread_key_t key; // thread_local data is the kernels' shared memory (cuda.h)
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, [] { pthread_key_create(&key, [](void *p) { delete static_cast<PerThread *>(p); }); });
  auto *p = static_cast<PerThread *>(pthread_getspecific(key));
  if (!p) pthread_setspecific(key, p = new PerThread);
  return *p;
}

cudaError_t set_error(cudaError_t code, const std::string &text) {
  if (code == cudaSuccess) return code;
  PerThread &t = this_thread();
  t.last = code;
  if (text.empty()) t.texts.erase(code);
  else t.texts[code] = text;
  return code;
}

} // namespace uly_emulated

using namespace uly_emulated;

namespace {

struct ErrorName {
  cudaError_t code;
  const char *name, *text;
};
const ErrorName names[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
    {cudaErrorMapBufferObjectFailed, "cudaErrorMapBufferObjectFailed", "mapping of buffer object failed"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
     "peer access is not supported between these two devices"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};
} // namespace

const char *cudaGetErrorName(cudaError_t e) {
  for (auto &n : names)
    if (n.code == e) return n.name;
  return "cudaErrorUnknown";
}

const char *cudaGetErrorString(cudaError_t e) { // valid until the thread's next failure
  auto it = this_thread().texts.find(e);
  if (it != this_thread().texts.end()) return it->second.c_str();
  for (auto &n : names)
    if (n.code == e) return n.text;
  return "unknown error";
}

cudaError_t cudaPeekAtLastError() { return this_thread().last; }
cudaError_t cudaGetLastError() {
  cudaError_t e = this_thread().last;
  this_thread().last = cudaSuccess;
  return e;
}
