// Errors: the device's error text, CUDA's codes as codes of internal/status, and the errors after which
// a process can no longer use its GPU.
#include <stdarg.h>

#include "device.h"

namespace {

// is_sticky reports errors after which CUDA fails every call of the process: those of which
// driver_types.h says that the process must be terminated and relaunched.
bool is_sticky(cudaError_t e) {
  const int codes[] = {214 /* ECC */,
                       226 /* contained */,
                       700 /* illegal address */,
                       702 /* timeout */,
                       709 /* no context any more */,
                       710 /* assert */,
                       714 /* hardware stack */,
                       715 /* illegal instruction */,
                       716 /* misaligned */,
                       717 /* address space */,
                       718 /* program counter */,
                       719 /* launch failure */,
                       721 /* tensor memory */,
                       810 /* MPS */,
                       911 /* external device */};
  for (int c : codes)
    if ((int)e == c) return true;
  return false;
}

std::string formatted(const char *format, va_list args) {
  char text[2048];
  vsnprintf(text, sizeof text, format, args);
  return text;
}

} // namespace

int32_t enter(uly_device *d) {
  if (d->absent)
    return fail(d, ULY_DEVICE,
                "this GPU is not there: it answers for the memory and the kernels of operations, and for nothing else");
  if (!of(d)->broken.empty())
    return fail(d, ULY_DEVICE,
                "the GPU has failed before, and nothing runs on it until the process is started again: %s",
                of(d)->broken.c_str());
  return check(d, cudaSetDevice(d->ordinal), "choosing the GPU");
}

int32_t fail(uly_device *d, int32_t code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  d->text = formatted(format, args);
  va_end(args);
  return code;
}

int32_t check(uly_device *d, cudaError_t e, const char *what) {
  if (e == cudaSuccess) return ULY_OK;
  std::string text = std::string(what) + ": " + cudaGetErrorName(e) + ": " + cudaGetErrorString(e);
  cudaGetLastError(); // clears it: the caller gets it
  if (is_sticky(e)) {
    text += " (of this operation, or of one before it: CUDA_LAUNCH_BLOCKING=1 tells)";
    if (of(d)->broken.empty()) of(d)->broken = text;
  }
  return fail(d,
              e == cudaErrorMemoryAllocation ? ULY_OUT_OF_MEMORY
              : e == cudaErrorNotSupported   ? ULY_UNSUPPORTED
                                             : ULY_DEVICE,
              "%s", text.c_str());
}
