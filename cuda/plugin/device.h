// Device is the plug-in's side of uly_device. This header also declares the guards around the
// functions of the table.
#pragma once

#include <exception>
#include <map>
#include <new>

#include "plugin.h"

struct Device : uly_device {
  char name[128] = "";
  char uuid[40] = "";
  int64_t bytes = 0;
  cudaStream_t setup = nullptr;        // zeroes new allocations
  std::map<char *, int64_t> memory;    // the device's allocations and their bytes
  const uly_kernel *pin[ULY_OPS] = {}; // the kernels that ULYSSES_KERNEL names
  std::string broken;                  // the first error after which CUDA fails every call (errors.cu)
};
inline Device *of(uly_device *d) { return static_cast<Device *>(d); }

// enter makes the device's GPU the current one of the calling thread. It fails for an absent GPU
// and after an error that destroyed the CUDA context.
int32_t enter(uly_device *d);

// caught calls f and converts exceptions to status codes, because none may cross the C interface.
template <class F> int32_t caught(uly_device *d, F f) {
  try {
    return f();
  } catch (const std::bad_alloc &) {
    return fail(d, ULY_OUT_OF_MEMORY, "CUDA plug-in: out of host memory");
  } catch (const std::exception &e) { return fail(d, ULY_INTERNAL, "CUDA plug-in: %s", e.what()); } catch (...) {
    return fail(d, ULY_INTERNAL, "CUDA plug-in: unknown exception");
  }
}

// guarded calls f after enter; every function of the table that takes a device uses it.
template <class F> int32_t guarded(uly_device *d, F f) {
  return caught(d, [&] {
    TRY(enter(d));
    return f();
  });
}

// guarded_or_absent is guarded for functions that also serve an absent GPU.
template <class F> int32_t guarded_or_absent(uly_device *d, F f) { return d->absent ? caught(d, f) : guarded(d, f); }

// read_pins parses ULYSSES_KERNEL ("operation=kernel,…") into d->pin.
int32_t read_pins(Device *d);

// allocate allocates at least one byte of device memory. `what` names the purpose in messages.
int32_t allocate(Device *d, int64_t bytes, const char *what, void **out);

// The functions of uly_cuda_api (kernels.h), by file. external.h, processes.h, probe.h and
// libraries.h declare the others.
// device.cu
int32_t api_open(const uly_open *how, uly_device **out, char *text, int64_t text_bytes);
void api_close(uly_device *d);
const char *api_error(uly_device *d);
int32_t api_info(uly_device *d, uly_info *out);
// memory.cu
int32_t api_alloc(uly_device *d, int64_t bytes, void **out);
int32_t api_free(uly_device *d, void *p);
int32_t api_alloc_host(uly_device *d, int64_t bytes, void **out);
int32_t api_free_host(uly_device *d, void *p);
// streams.cu
int32_t api_stream_create(uly_device *d, int32_t use, uly_stream **out);
int32_t api_stream_destroy(uly_device *d, uly_stream *s);
int32_t api_stream_group(uly_device *d, uly_stream *s, int32_t open);
int32_t api_stream_sync(uly_device *d, uly_stream *s);
int32_t api_stream_query(uly_device *d, uly_stream *s, int32_t *done);
int32_t api_stream_wait(uly_device *d, uly_stream *s, uly_event *e);
int32_t api_event_create(uly_device *d, int32_t shared, uly_event **out);
int32_t api_event_destroy(uly_device *d, uly_event *e);
int32_t api_event_record(uly_device *d, uly_event *e, uly_stream *s);
int32_t api_event_sync(uly_device *d, uly_event *e);
int32_t api_event_query(uly_device *d, uly_event *e, int32_t *done);
// operations.cu
int32_t api_enqueue(uly_device *d, uly_stream *s, int32_t op, const void *args, int64_t args_bytes);
int32_t api_workspace(uly_device *d, const uly_attention *a, int32_t backward, int64_t *bytes);
int32_t api_delta_sizes(uly_device *d, const uly_gated_delta *a, uly_delta_sizes *out);
int32_t api_kernel_of(uly_device *d, int32_t op, const void *args, const char **name);
