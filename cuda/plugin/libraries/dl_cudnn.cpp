// The functions of cuDNN and NVRTC that cuDNN's frontend calls.
#include <cudnn_backend.h>
#include <nvrtc.h>
#include <stdio.h>

#include "dl.h"

#define CUDNN(name, parameters, arguments) \
  FORWARD(LIB_CUDNN, true, cudnnStatus_t, name, parameters, arguments, CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED)
CUDNN(cudnnCreate, (cudnnHandle_t * h), (h))
CUDNN(cudnnDestroy, (cudnnHandle_t h), (h))
CUDNN(cudnnGetStream, (cudnnHandle_t h, cudaStream_t *s), (h, s))
CUDNN(cudnnSetStream, (cudnnHandle_t h, cudaStream_t s), (h, s))
CUDNN(cudnnBackendCreateDescriptor, (cudnnBackendDescriptorType_t t, cudnnBackendDescriptor_t *d), (t, d))
CUDNN(cudnnBackendDestroyDescriptor, (cudnnBackendDescriptor_t d), (d))
CUDNN(cudnnBackendFinalize, (cudnnBackendDescriptor_t d), (d))
CUDNN(cudnnBackendSetAttribute,
      (cudnnBackendDescriptor_t d, cudnnBackendAttributeName_t n, cudnnBackendAttributeType_t t, int64_t count,
       const void *v),
      (d, n, t, count, v))
CUDNN(cudnnBackendGetAttribute,
      (cudnnBackendDescriptor_t const d, cudnnBackendAttributeName_t n, cudnnBackendAttributeType_t t, int64_t asked,
       int64_t *count, void *v),
      (d, n, t, asked, count, v))
CUDNN(cudnnBackendExecute, (cudnnHandle_t h, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack),
      (h, plan, pack))
FORWARD(LIB_CUDNN, true, size_t, cudnnGetVersion, (void), (), 0)
FORWARD(LIB_CUDNN, true, const char *, cudnnGetErrorString, (cudnnStatus_t s), (s), "cuDNN is not loaded")

static void *at_last;
static library_function forward_last(LIB_CUDNN, "cudnnGetLastErrorString", true, &at_last);
extern "C" void cudnnGetLastErrorString(char *text, size_t n) {
  if (at_last) reinterpret_cast<void (*)(char *, size_t)>(at_last)(text, n);
  else snprintf(text, n, "cuDNN is not loaded");
}

#define NVRTC(name, parameters, arguments) \
  FORWARD(LIB_NVRTC, true, nvrtcResult, name, parameters, arguments, NVRTC_ERROR_INTERNAL_ERROR)
NVRTC(nvrtcCreateProgram,
      (nvrtcProgram * p, const char *source, const char *name, int n, const char *const *headers,
       const char *const *names),
      (p, source, name, n, headers, names))
NVRTC(nvrtcDestroyProgram, (nvrtcProgram * p), (p))
NVRTC(nvrtcCompileProgram, (nvrtcProgram p, int n, const char *const *options), (p, n, options))
NVRTC(nvrtcGetCUBIN, (nvrtcProgram p, char *code), (p, code))
NVRTC(nvrtcGetCUBINSize, (nvrtcProgram p, size_t *n), (p, n))
NVRTC(nvrtcGetPTX, (nvrtcProgram p, char *code), (p, code))
NVRTC(nvrtcGetPTXSize, (nvrtcProgram p, size_t *n), (p, n))
NVRTC(nvrtcGetProgramLog, (nvrtcProgram p, char *log), (p, log))
NVRTC(nvrtcGetProgramLogSize, (nvrtcProgram p, size_t *n), (p, n))
FORWARD(LIB_NVRTC, true, const char *, nvrtcGetErrorString, (nvrtcResult r), (r), "NVRTC is not loaded")
