// Error handling: the device's message, the conversion of CUDA's codes to codes of internal/status,
// and the errors after which a process can no longer use its GPU.
#include <stdarg.h>

#include "device.h"

namespace {

// is_sticky reports errors after which every CUDA call of the process fails. For these codes,
// driver_types.h says that the process must be terminated and relaunched.
bool is_sticky(cudaError_t e) {
  const int codes[] = {214 /* ECC */,
                       226 /* contained */,
                       700 /* illegal address */,
                       702 /* timeout */,
                       709 /* context destroyed */,
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
    return fail(
        d, ULY_DEVICE,
        "absent GPU: only the memory and the kernels of operations can be queried; open a GPU to run operations");
  if (!of(d)->broken.empty())
    return fail(
        d, ULY_DEVICE,
        "the GPU failed earlier and this process cannot use it any more; restart the process. The first error was: %s",
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
  cudaGetLastError(); // clear the error: the caller reports it
  if (is_sticky(e)) {
    text += "  (caused by this or an earlier operation; set CUDA_LAUNCH_BLOCKING=1 to find which)";
    if (of(d)->broken.empty()) of(d)->broken = text;
  }
  return fail(d,
              e == cudaErrorMemoryAllocation ? ULY_OUT_OF_MEMORY
              : e == cudaErrorNotSupported   ? ULY_UNSUPPORTED
                                             : ULY_DEVICE,
              "%s", text.c_str());
}
