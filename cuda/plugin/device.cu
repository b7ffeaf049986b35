// Opening and closing a GPU, and its properties.
#include <stdlib.h>
#include <string.h>

#include "device.h"
#include "libraries/libraries.h"
#include "probe.h"

namespace {

__global__ void probe_kernel() {}

// has_kernels fails if the plug-in was not built for this GPU.
int32_t has_kernels(Device *d) {
  if (d->sm < 80)
    return fail(d, ULY_UNSUPPORTED, "%s (sm_%d) has no bfloat16 arithmetic; sm_80 (A100) or newer is needed", d->name,
                d->sm);
  cudaFuncAttributes attributes;
  const cudaError_t e = cudaFuncGetAttributes(&attributes, (const void *)probe_kernel);
  if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    return fail(d, ULY_UNSUPPORTED, "the plug-in was not built for %s (sm_%d); build it with make cuda ARCHS=%d",
                d->name, d->sm, d->sm);
  }
  TRY(check(d, e, "loading kernels"));
  return ULY_OK;
}

int32_t attributes(Device *d) {
  cudaDeviceProp p;
  TRY(check(d, cudaGetDeviceProperties(&p, d->ordinal), "cudaGetDeviceProperties"));
  put(d->name, sizeof d->name, p.name);
  auto *u = reinterpret_cast<const unsigned char *>(p.uuid.bytes);
  snprintf(d->uuid, sizeof d->uuid, "%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
           u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
  d->bytes = (int64_t)p.totalGlobalMem;
  d->sm = p.major * 10 + p.minor;
  d->multiprocessors = p.multiProcessorCount;
  d->shared_limit = (int)p.sharedMemPerBlockOptin;
  return ULY_OK;
}

int32_t start(Device *d) {
  std::string why;
  int n = count_gpus(&why);
  if (n == 0) return fail(d, ULY_DEVICE, "%s", why.c_str());
  if (d->ordinal < 0 || d->ordinal >= n)
    return fail(d, ULY_INVALID_ARGUMENT, "GPU %d does not exist: this process sees %d GPUs, numbered from 0",
                d->ordinal, n);
  TRY(check(d, cudaSetDevice(d->ordinal), "cudaSetDevice"));
  TRY(attributes(d));
  TRY(has_kernels(d));
  TRY(read_pins(d));
  TRY(check(d, cudaStreamCreateWithFlags(&d->setup, cudaStreamNonBlocking), "creating a stream"));
  return ULY_OK;
}

} // namespace

int32_t api_open(const uly_open *how, uly_device **out, char *text, int64_t text_bytes) {
  *out = nullptr;
  Device *d = nullptr;
  try {
    d = new Device;
    d->ordinal = how->ordinal;
    d->deterministic = how->deterministic != 0;
    d->emulated = emulated;
    if (how->kernels) d->pins = how->kernels;
    d->absent = how->ordinal == ULY_NO_GPU;
    if (d->absent) d->shared_limit = 227 << 10; // of Hopper; some kernels support a call only if its shared memory fits
    int32_t code = d->absent ? ULY_OK : start(d);
    if (code == ULY_OK) {
      *out = d;
      return ULY_OK;
    }
    if (text_bytes > 0) put(text, (size_t)text_bytes, d->text);
    if (d->setup) cudaStreamDestroy(d->setup);
    delete d;
    return code;
  } catch (const std::exception &e) {
    if (text_bytes > 0) put(text, (size_t)text_bytes, std::string("opening the GPU: ") + e.what());
    delete d;
    return ULY_INTERNAL;
  }
}

void api_close(uly_device *d) {
  if (!d) return;
  if (d->absent) {
    delete of(d);
    return;
  }
  try {
    cudaSetDevice(d->ordinal);
    libraries_close(d);
    for (auto &m : of(d)->memory) cudaFree(m.first);
    if (of(d)->setup) cudaStreamDestroy(of(d)->setup);
    cudaGetLastError();
  } catch (...) {}
  delete of(d);
}

const char *api_error(uly_device *d) { return d->text.c_str(); }

int32_t api_info(uly_device *d, uly_info *out) {
  return guarded(d, [&] {
    memset(out, 0, sizeof *out);
    put(out->name, sizeof out->name, of(d)->name);
    std::string kernels = "sm_" + std::to_string(d->sm), libraries = libraries_text();
    if (emulated) kernels += " emulated";
    if (!libraries.empty()) kernels += ", " + libraries;
    put(out->kernels, sizeof out->kernels, kernels);
    put(out->uuid, sizeof out->uuid, of(d)->uuid);
    size_t free = 0, total = 0;
    TRY(check(d, cudaMemGetInfo(&free, &total), "cudaMemGetInfo"));
    out->memory = of(d)->bytes;
    out->free = (int64_t)free;
    out->sm = d->sm;
    out->multiprocessors = d->multiprocessors;
    out->emulated = emulated;
    return check(d, cudaDriverGetVersion(&out->driver), "cudaDriverGetVersion");
  });
}
