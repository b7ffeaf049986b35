// The plug-in's table (kernels.h): opening the GPU, memory, streams, events, and which kernel
// serves an operation. Operations are in the files of their rows.
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "guest.h"
#include "libraries/libraries.h"
#include "plugin.h"
#include "probe.h"
#include "processes.h"

namespace {

#ifdef ULY_EMULATED
// little, so that tests come to what needs more than one piece of it
int64_t scratch_of_a_stream() { return 1 << 20; }
#else
int64_t scratch_of_a_stream() { return ULY_SCRATCH; }
#endif

struct Device : uly_device {
  char name[128] = "";
  char uuid[40] = "";
  int64_t bytes = 0;
  cudaStream_t setup = nullptr;     // for what is no operation: zeroes
  std::map<char *, int64_t> memory; // allocations: what IPC hands out is whole ones
  const uly_row *pin[ULY_OPS] = {};
  std::string broken; // the failure after which the GPU's context is of no use
};
Device *of(uly_device *d) { return static_cast<Device *>(d); }

struct Operation {
  const char *name;
  int64_t bytes;
};
#define OPERATION(op, name, args) {#name, sizeof(args)},
const Operation operations[ULY_OPS] = {ULY_ALL_OPERATIONS(OPERATION)};
#undef OPERATION

const uly_row *const tables[] = {copy_rows,       elementwise_rows, reduce_rows,    norm_rows,
                                 rope_rows,       swiglu_rows,      embedding_rows, loss_rows,
                                 optimizer_rows,  gemm_rows,        attention_rows, delta_rows,
                                 delta_fold_rows, gate_rows,        conv1d_rows,    gated_norm_rows};

template <class F> void each_row(int32_t op, F f) {
  for (const uly_row *table : tables)
    for (const uly_row *r = table; r->run; r++)
      if (r->op == op) f(*r);
}

std::string rows_of(int32_t op) {
  std::string s;
  each_row(op, [&](const uly_row &r) { s += (s.empty() ? "" : ", ") + std::string(r.name); });
  return s;
}

// Errors after which CUDA answers every call of the process with the same error: those of which its
// header says that the process must be started again.
bool lasts(cudaError_t e) {
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

// enter makes the device's GPU the thread's.
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

// caught lets nothing be thrown across the C face.
template <class F> int32_t caught(uly_device *d, F f) {
  try {
    return f();
  } catch (const std::bad_alloc &) {
    return fail(d, ULY_OUT_OF_MEMORY, "the plug-in: no host memory");
  } catch (const std::exception &e) { return fail(d, ULY_INTERNAL, "the plug-in: %s", e.what()); } catch (...) {
    return fail(d, ULY_INTERNAL, "the plug-in: an unknown exception");
  }
}

// guarded is around every function of the table that has a device.
template <class F> int32_t guarded(uly_device *d, F f) {
  return caught(d, [&] {
    TRY(enter(d));
    return f();
  });
}

// sized is guarded for functions that a GPU which is not there has as well.
template <class F> int32_t sized(uly_device *d, F f) { return d->absent ? caught(d, f) : guarded(d, f); }

std::string formatted(const char *format, va_list args) {
  char text[2048];
  vsnprintf(text, sizeof text, format, args);
  return text;
}

// --- opening
// ----------------------------------------------------------------------------------------------------------------------------
#ifndef ULY_EMULATED
__global__ void nothing() {}
#endif

// has_kernels fails where the plug-in was not built for this GPU.
int32_t has_kernels(Device *d) {
  if (d->sm < 80)
    return fail(d, ULY_UNSUPPORTED, "%s (sm_%d) has no bfloat16 arithmetic; sm_80 (A100) or newer is needed", d->name,
                d->sm);
#ifndef ULY_EMULATED
  cudaFuncAttributes attributes;
  const cudaError_t e = cudaFuncGetAttributes(&attributes, nothing);
  if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();
    return fail(d, ULY_UNSUPPORTED,
                "the plug-in was not built for %s (sm_%d); build it with make cuda GENCODE='-gencode "
                "arch=compute_%d,code=sm_%d'",
                d->name, d->sm, d->sm, d->sm);
  }
  TRY(check(d, e, "loading the plug-in's kernels"));
#endif
  return ULY_OK;
}

int32_t attributes(Device *d) {
  cudaDeviceProp p;
  TRY(check(d, cudaGetDeviceProperties(&p, d->ordinal), "asking for the GPU's properties"));
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

// read_pins parses ULYSSES_KERNEL: operation=row, …
int32_t read_pins(Device *d) {
  size_t at = 0;
  while (at < d->pins.size()) {
    size_t end = d->pins.find(',', at);
    if (end == std::string::npos) end = d->pins.size();
    std::string pin = d->pins.substr(at, end - at);
    at = end + 1;
    if (pin.empty()) continue;
    size_t is = pin.find('=');
    std::string name = pin.substr(0, is), row = is == std::string::npos ? "" : pin.substr(is + 1), names;
    int32_t op = -1;
    for (int32_t i = 0; i < ULY_OPS; i++) {
      if (name == operations[i].name) op = i;
      names += (i ? ", " : "") + std::string(operations[i].name);
    }
    if (op < 0)
      return fail(d, ULY_INVALID_ARGUMENT,
                  "ULYSSES_KERNEL: '%s' names no operation (say operation=row); operations are %s", pin.c_str(),
                  names.c_str());
    each_row(op, [&](const uly_row &r) {
      if (row == r.name) d->pin[op] = &r;
    });
    if (!d->pin[op])
      return fail(d, ULY_INVALID_ARGUMENT, "ULYSSES_KERNEL: %s has no row '%s'; it has %s", name.c_str(), row.c_str(),
                  rows_of(op).c_str());
  }
  return ULY_OK;
}

// befriend lets kernels of one GPU reach memory of another that this process has open, where the
// hardware can.
void befriend(int ordinal) {
  static std::mutex lock;
  static std::vector<int> open;
  std::lock_guard<std::mutex> held(lock);
  for (int other : open) {
    if (other == ordinal) return;
    int pairs[2][2] = {{ordinal, other}, {other, ordinal}};
    for (auto &p : pairs) {
      int can = 0;
      if (cudaDeviceCanAccessPeer(&can, p[0], p[1]) == cudaSuccess && can && cudaSetDevice(p[0]) == cudaSuccess)
        cudaDeviceEnablePeerAccess(p[1], 0);
      cudaGetLastError();
    }
  }
  open.push_back(ordinal);
  cudaSetDevice(ordinal);
}

int32_t start(Device *d) {
  std::string why;
  int n = count_gpus(&why);
  if (n == 0) return fail(d, ULY_DEVICE, "%s", why.c_str());
  if (d->ordinal < 0 || d->ordinal >= n)
    return fail(d, ULY_INVALID_ARGUMENT, "GPU %d does not exist: this process sees %d, counted from 0", d->ordinal, n);
  TRY(check(d, cudaSetDevice(d->ordinal), "choosing the GPU"));
  TRY(attributes(d));
  TRY(has_kernels(d));
  TRY(read_pins(d));
  TRY(check(d, cudaStreamCreateWithFlags(&d->setup, cudaStreamNonBlocking), "creating a stream"));
  befriend(d->ordinal);
  return ULY_OK;
}

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
    if (d->absent) d->shared_limit = 227 << 10; // Hopper's: which rows serve depends on it
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
    std::string kernels = "sm_" + std::to_string(d->sm), libraries = libraries_text(d);
    if (emulated) kernels += " emulated";
    if (!libraries.empty()) kernels += ", " + libraries;
    if (!d->pins.empty()) kernels += ", " + d->pins;
    put(out->kernels, sizeof out->kernels, kernels);
    put(out->uuid, sizeof out->uuid, of(d)->uuid);
    size_t free = 0, total = 0;
    TRY(check(d, cudaMemGetInfo(&free, &total), "asking for the GPU's memory"));
    out->memory = of(d)->bytes;
    out->free = (int64_t)free;
    out->sm = d->sm;
    out->multiprocessors = d->multiprocessors;
    out->emulated = emulated;
    return check(d, cudaDriverGetVersion(&out->driver), "asking for the driver's version");
  });
}

// --- memory
// -----------------------------------------------------------------------------------------------------------------------------
int32_t allocate(Device *d, int64_t bytes, const char *what, void **out) {
  *out = nullptr;
  if (bytes < 0) return fail(d, ULY_INVALID_ARGUMENT, "%s: %lld bytes", what, (long long)bytes);
  size_t n = bytes ? (size_t)bytes : 1; // every buffer has an address
  cudaError_t e = cudaMalloc(out, n);
  if (e == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    *out = nullptr;
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return fail(d, ULY_OUT_OF_MEMORY, "%s: %lld bytes do not fit on %s: %lld of its %lld bytes are free", what,
                (long long)bytes, d->name, (long long)free, (long long)total);
  }
  return check(d, e, what);
}

int32_t zero(Device *d, void *p, int64_t bytes) {
  TRY(check(d, cudaMemsetAsync(p, 0, (size_t)bytes, d->setup), "zeroing memory"));
  return check(d, cudaStreamSynchronize(d->setup), "zeroing memory");
}

int32_t api_alloc(uly_device *d, int64_t bytes, void **out) {
  return guarded(d, [&] {
    TRY(allocate(of(d), bytes, "Alloc", out));
    int32_t code = zero(of(d), *out, bytes);
    if (code != ULY_OK) {
      cudaFree(*out);
      *out = nullptr;
      return code;
    }
    of(d)->memory[static_cast<char *>(*out)] = bytes;
    return (int32_t)ULY_OK;
  });
}

int32_t api_free(uly_device *d, void *p) {
  return guarded(d, [&] {
    if (!p) return (int32_t)ULY_OK;
    if (!of(d)->memory.erase(static_cast<char *>(p)))
      return fail(d, ULY_INVALID_ARGUMENT, "Free: %p is not the start of memory of this device", p);
    return check(d, cudaFree(p), "Free");
  });
}

int32_t api_alloc_host(uly_device *d, int64_t bytes, void **out) {
  return guarded(d, [&] {
    *out = nullptr;
    if (bytes < 0) return fail(d, ULY_INVALID_ARGUMENT, "pinned memory: %lld bytes", (long long)bytes);
    size_t n = bytes ? (size_t)bytes : 1;
    cudaError_t e = cudaHostAlloc(out, n, cudaHostAllocPortable);
    if (e == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      return fail(d, ULY_OUT_OF_MEMORY,
                  "pinned memory: the host does not give %lld bytes (ulimit -l, or the job's memory limit)",
                  (long long)bytes);
    }
    TRY(check(d, e, "pinned memory"));
    memset(*out, 0, n); // what was freed before comes back as it was
    return (int32_t)ULY_OK;
  });
}

int32_t api_free_host(uly_device *d, void *p) {
  return guarded(d, [&] { return p ? check(d, cudaFreeHost(p), "freeing pinned memory") : (int32_t)ULY_OK; });
}

// --- streams and events
// -----------------------------------------------------------------------------------------------------------------
void destroy(uly_stream *s) {
  if (s->s && !s->wrapped) cudaStreamSynchronize(s->s), cudaStreamDestroy(s->s);
  if (s->scratch) cudaFree(s->scratch);
  if (s->fault) cudaFreeHost(s->fault);
  cudaGetLastError();
  delete s;
}

int32_t api_stream_create(uly_device *d, uly_stream **out) {
  return guarded(d, [&] {
    *out = nullptr;
    auto *s = new uly_stream;
    auto make = [&]() -> int32_t {
      TRY(check(d, cudaStreamCreateWithFlags(&s->s, cudaStreamNonBlocking), "creating a stream"));
      s->scratch_bytes = scratch_of_a_stream();
      void *scratch = nullptr, *fault = nullptr;
      TRY(allocate(of(d), s->scratch_bytes, "the scratch of a stream", &scratch));
      s->scratch = static_cast<char *>(scratch);
      TRY(check(d, cudaHostAlloc(&fault, sizeof *s->fault, cudaHostAllocPortable), "creating a stream"));
      s->fault = static_cast<uly_fault *>(fault);
      memset(s->fault, 0, sizeof *s->fault);
      return ULY_OK;
    };
    int32_t code = make();
    if (code == ULY_OK) *out = s;
    else destroy(s);
    return code;
  });
}

int32_t api_stream_destroy(uly_device *d, uly_stream *s) {
  if (!s) return ULY_OK;
  cudaSetDevice(d->ordinal);
  destroy(s);
  return ULY_OK;
}

int32_t api_stream_sync(uly_device *d, uly_stream *s) {
  return guarded(d, [&] {
    TRY(check(d, cudaStreamSynchronize(s->s), "Sync"));
    return s->wrapped ? (int32_t)ULY_OK : found(d, s->fault);
  });
}

int32_t is_done(uly_device *d, cudaError_t e, int32_t *done, const char *what) {
  *done = e == cudaSuccess;
  if (e != cudaErrorNotReady) return check(d, e, what);
  cudaGetLastError();
  return ULY_OK;
}

int32_t api_stream_query(uly_device *d, uly_stream *s, int32_t *done) {
  return guarded(d, [&] { return is_done(d, cudaStreamQuery(s->s), done, "asking a stream"); });
}

int32_t api_stream_wait(uly_device *d, uly_stream *s, uly_event *e) {
  return guarded(d, [&] { return check(d, cudaStreamWaitEvent(s->s, e->e, 0), "Wait"); });
}

int32_t api_event_create(uly_device *d, int32_t shared, uly_event **out) {
  return guarded(d, [&] {
    *out = nullptr;
    auto *e = new uly_event;
    int32_t code = check(d,
                         cudaEventCreateWithFlags(
                             &e->e, shared ? cudaEventDisableTiming | cudaEventInterprocess : cudaEventDisableTiming),
                         "creating an event");
    if (code == ULY_OK) *out = e;
    else delete e;
    return code;
  });
}

int32_t api_event_destroy(uly_device *d, uly_event *e) {
  if (!e) return ULY_OK;
  cudaSetDevice(d->ordinal);
  cudaEventDestroy(e->e);
  cudaGetLastError();
  delete e;
  return ULY_OK;
}

int32_t api_event_record(uly_device *d, uly_event *e, uly_stream *s) {
  return guarded(d, [&] { return check(d, cudaEventRecord(e->e, s->s), "Record"); });
}
int32_t api_event_sync(uly_device *d, uly_event *e) {
  return guarded(d, [&] { return check(d, cudaEventSynchronize(e->e), "waiting for an event"); });
}
int32_t api_event_query(uly_device *d, uly_event *e, int32_t *done) {
  return guarded(d, [&] { return is_done(d, cudaEventQuery(e->e), done, "asking an event"); });
}

// --- operations
// -------------------------------------------------------------------------------------------------------------------------
// choose finds the row that serves; null: none does.
const uly_row *choose(Device *d, int32_t op, const void *args) {
  if (const uly_row *pin = d->pin[op]) return !pin->fits || pin->fits(d, args) ? pin : nullptr;
  const uly_row *found = nullptr;
  each_row(op, [&](const uly_row &r) {
    if (!found && (!r.fits || r.fits(d, args))) found = &r;
  });
  return found;
}

// unserved is the error of an operation that no row serves; the device's text is what the rows said
// of it.
int32_t unserved(Device *d, int32_t op) {
  const std::string why = d->text.empty() ? "" : ": " + d->text;
  if (d->pin[op])
    return fail(d, ULY_UNSUPPORTED,
                "%s: the row '%s' that ULYSSES_KERNEL names does not serve these arguments%s; rows are %s",
                operations[op].name, d->pin[op]->name, why.c_str(), rows_of(op).c_str());
  return fail(d, ULY_UNSUPPORTED, "%s: no kernel serves these arguments%s; rows are %s", operations[op].name,
              why.c_str(), rows_of(op).c_str());
}

int32_t api_enqueue(uly_device *d, uly_stream *s, int32_t op, const void *args, int64_t args_bytes) {
  return guarded(d, [&] {
    if (op < 0 || op >= ULY_OPS) return fail(d, ULY_INVALID_ARGUMENT, "operation %d does not exist", op);
    const Operation &o = operations[op];
    if (s->wrapped)
      return fail(d, ULY_INVALID_ARGUMENT, "%s: on a stream of the program's own, which is for order alone", o.name);
    if (args_bytes != o.bytes)
      return fail(d, ULY_INVALID_ARGUMENT, "%s: arguments of %lld bytes, not %lld", o.name, (long long)args_bytes,
                  (long long)o.bytes);
    d->text.clear();
    const uly_row *row = choose(of(d), op, args);
    return row ? row->run(d, s, args) : unserved(of(d), op);
  });
}

int32_t api_workspace(uly_device *d, const uly_attention *a, int32_t backward, int64_t *bytes) {
  return sized(d, [&] {
    *bytes = attention_workspace(d, a, backward != 0);
    return (int32_t)ULY_OK;
  });
}

int32_t api_delta_sizes(uly_device *d, const uly_gated_delta *a, uly_delta_sizes *out) {
  return sized(d, [&] {
    *out = {};
    return delta_sizes(d, a, out);
  });
}

int32_t api_kernel_of(uly_device *d, int32_t op, const void *args, const char **name) {
  return sized(d, [&] {
    *name = "";
    if (op < 0 || op >= ULY_OPS) return fail(d, ULY_INVALID_ARGUMENT, "operation %d does not exist", op);
    d->text.clear();
    const uly_row *row = choose(of(d), op, args);
    if (!row) return unserved(of(d), op);
    *name = row->name;
    return (int32_t)ULY_OK;
  });
}

// --- functions of other files, guarded
// ------------------------------------------------------------------------------------------------
template <auto function, class... A> int32_t forwarded(uly_device *d, A... a) {
  return guarded(d, [&] { return function(d, a...); });
}

// Any thread may abort and ask, while another is in a call: the device's text is not for it.
int32_t api_nccl_abort(uly_device *d, uly_nccl *n) {
  try {
    cudaSetDevice(d->ordinal);
    return nccl_abort(d, n);
  } catch (...) { return ULY_INTERNAL; }
}

int32_t api_nccl_error(uly_device *d, uly_nccl *n, char *text, int64_t text_bytes) {
  try {
    cudaSetDevice(d->ordinal);
    return nccl_error(d, n, text, text_bytes);
  } catch (...) { return ULY_INTERNAL; }
}

const uly_cuda_api table = {
    ULY_CUDA_ABI,
    sizeof(uly_cuda_api),
    ULY_OPERATIONS_SUM,
    probe,
    api_open,
    api_close,
    api_error,
    api_info,
    api_alloc,
    api_free,
    api_alloc_host,
    api_free_host,
    api_stream_create,
    api_stream_destroy,
    api_stream_sync,
    api_stream_query,
    api_stream_wait,
    api_event_create,
    api_event_destroy,
    api_event_record,
    api_event_sync,
    api_event_query,
    api_enqueue,
    api_workspace,
    api_delta_sizes,
    api_kernel_of,
    forwarded<memory_handle>,
    forwarded<memory_open>,
    forwarded<memory_close>,
    forwarded<event_handle>,
    forwarded<event_open>,
    forwarded<copy_bytes>,
    forwarded<nccl_id>,
    forwarded<nccl_init>,
    forwarded<nccl_close>,
    api_nccl_abort,
    api_nccl_error,
    forwarded<nccl_all_to_all>,
    forwarded<nccl_all_reduce>,
    forwarded<nccl_broadcast>,
    forwarded<nccl_send_recv>,
    forwarded<stream_wrap>,
    forwarded<place_of>,
    thread_context,
    thread_context_set,
};

} // namespace

int32_t fail(uly_device *d, int32_t code, const char *format, ...) {
  va_list args;
  va_start(args, format);
  d->text = formatted(format, args);
  va_end(args);
  return code;
}

bool allocation(uly_device *d, const void *p, char **base, int64_t *bytes) {
  auto *at = const_cast<char *>(static_cast<const char *>(p));
  auto it = of(d)->memory.upper_bound(at);
  if (it == of(d)->memory.begin() || at >= (--it)->first + it->second) return false;
  *base = it->first, *bytes = it->second;
  return true;
}

int32_t check(uly_device *d, cudaError_t e, const char *what) {
  if (e == cudaSuccess) return ULY_OK;
  std::string text = std::string(what) + ": " + cudaGetErrorName(e) + ": " + cudaGetErrorString(e);
  cudaGetLastError(); // it has been told
  if (lasts(e)) {
    text += " (of this operation, or of one before it: CUDA_LAUNCH_BLOCKING=1 tells)";
    if (of(d)->broken.empty()) of(d)->broken = text;
  }
  return fail(d,
              e == cudaErrorMemoryAllocation ? ULY_OUT_OF_MEMORY
              : e == cudaErrorNotSupported   ? ULY_UNSUPPORTED
                                             : ULY_DEVICE,
              "%s", text.c_str());
}

extern "C" __attribute__((visibility("default"))) const uly_cuda_api *uly_cuda_plugin(uint32_t abi, uint32_t *have) {
  if (have) *have = ULY_CUDA_ABI;
  return abi == ULY_CUDA_ABI ? &table : nullptr;
}
