// Streams, events, launches, copies. See runtime.h for the order in which things run.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <vector>

#include "internal.h"

using namespace uly_emulated;

namespace uly_emulated {

std::mutex lock;

// A Mark is one recording of an event: of this process, or number n of a slot that others see, too.
struct Mark {
  bool done = false;
  Failure failure;
  Slot *slot = nullptr;
  uint64_t n = 0;
  bool come() {
    bool failed = false;
    if (slot && !done && slot_completed(slot, n, &failed)) {
      done = true;
      if (failed)
        failure = {cudaErrorLaunchFailure,
                   format("a stream of process %d that was waited for has failed", slot_owner(slot))};
    }
    return done;
  }
};
using MarkRef = std::shared_ptr<Mark>;

struct Op { // one of the three
  std::function<Failure()> run;
  MarkRef wait, record;
};

} // namespace uly_emulated

struct CUstream_st {
  std::deque<Op> queue;
  Failure failure; // stays: what comes later does not run
  bool dying = false;
};

struct CUevent_st {
  MarkRef last;
  Slot *slot = nullptr;
  CUstream_st *marked = nullptr; // of an event that other processes see, the stream of its marks
  bool opened = false;
};

static std::vector<CUstream_st *> streams; // in the order of creation
static std::map<const void *, int> allowed_shared;
enum : int { default_shared = 48 << 10, most_shared = 227 << 10 };

// --- errors
// -----------------------------------------------------------------------------------------------------------------------------
namespace {
struct PerThread {
  cudaError_t last = cudaSuccess;
  int device = 0;
  CUstream_st *stream = nullptr; // its own default stream
  std::map<int, std::string> texts;
};
PerThread &mine() {
  static pthread_key_t key; // not thread_local: that is shared memory here
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, [] { pthread_key_create(&key, [](void *p) { delete static_cast<PerThread *>(p); }); });
  auto *p = static_cast<PerThread *>(pthread_getspecific(key));
  if (!p) pthread_setspecific(key, p = new PerThread);
  return *p;
}

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
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};
cudaError_t result(const Failure &f) { return last(f.code, f.text); }
} // namespace

cudaError_t uly_emulated::last(cudaError_t code, const std::string &text) {
  if (code == cudaSuccess) return code;
  PerThread &t = mine();
  t.last = code;
  if (text.empty()) t.texts.erase(code);
  else t.texts[code] = text;
  return code;
}

const char *cudaGetErrorName(cudaError_t e) {
  for (auto &n : names)
    if (n.code == e) return n.name;
  return "cudaErrorUnknown";
}

const char *cudaGetErrorString(cudaError_t e) { // until the thread's next failure
  auto it = mine().texts.find(e);
  if (it != mine().texts.end()) return it->second.c_str();
  for (auto &n : names)
    if (n.code == e) return n.text;
  return "unknown error";
}

cudaError_t cudaPeekAtLastError() { return mine().last; }
cudaError_t cudaGetLastError() {
  cudaError_t e = mine().last;
  mine().last = cudaSuccess;
  return e;
}

// --- running
// ----------------------------------------------------------------------------------------------------------------------------
namespace {

bool runnable(CUstream_st *s) { return !s->queue.empty() && (!s->queue.front().wait || s->queue.front().wait->come()); }

void run_head(CUstream_st *s) {
  Op op = std::move(s->queue.front());
  s->queue.pop_front();
  if (op.run && !s->failure) s->failure = op.run();
  if (op.wait && op.wait->failure && !s->failure) s->failure = op.wait->failure;
  if (op.record) {
    op.record->failure = s->failure;
    op.record->done = true;
    if (op.record->slot) slot_complete(op.record->slot, op.record->n, bool(s->failure));
  }
  if (s->dying && s->queue.empty()) {
    for (size_t i = 0; i < streams.size(); i++)
      if (streams[i] == s) streams.erase(streams.begin() + (long)i);
    delete s;
  }
}

// Each wait prefers something else: anybody, the stream that is waited for, or all the others.
enum Policy { anybody, wanted_first, wanted_last, policies };

bool step(CUstream_st *wanted, Policy policy) {
  static std::vector<CUstream_st *> heads;
  heads.clear();
  bool wanted_can = false;
  for (CUstream_st *s : streams)
    if (runnable(s)) {
      if (s == wanted && policy != anybody) wanted_can = true;
      else heads.push_back(s);
    }
  if (wanted_can && (policy == wanted_first || heads.empty())) {
    run_head(wanted);
    return true;
  }
  if (heads.empty()) return false;
  run_head(heads[below(heads.size())]);
  return true;
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// run_until runs heads until done() holds. Where only another process can make that happen, it
// waits for it.
Failure run_until(std::unique_lock<std::mutex> &held, const std::function<bool()> &done, CUstream_st *wanted) {
  auto policy = (Policy)below(policies);
  double since = 0;
  while (!done()) {
    if (step(wanted, policy)) {
      since = 0;
      continue;
    }
    int32_t owner = 0;
    for (CUstream_st *s : streams)
      if (!s->queue.empty() && s->queue.front().wait && s->queue.front().wait->slot)
        owner = slot_owner(s->queue.front().wait->slot);
    if (since == 0) since = now();
    double limit = (double)setting("ULYSSES_EMULATED_TIMEOUT", 60);
    bool gone = owner && kill(owner, 0) != 0;
    if (now() - since > limit || gone) {
      Failure f{cudaErrorLaunchTimeout,
                gone    ? format("a stream waits for an event of process %d, which has ended", owner)
                : owner ? format("a stream has waited %.0f s for an event of process %d", limit, owner)
                        : format("nothing has run for %.0f s, and yet something is waited for", limit)};
      // Give up what cannot come, so that the next wait does not take as long.
      for (CUstream_st *s : streams)
        if (!s->queue.empty() && s->queue.front().wait) {
          auto w = s->queue.front().wait;
          w->done = true;
          w->failure = f;
        }
      if (wanted) continue;
      return f;
    }
    held.unlock();
    usleep(50);
    held.lock();
  }
  return {};
}

// CUDA's names of streams that nobody makes: 1 the legacy default one, as NULL; 2 the calling
// thread's own.
bool by_name(cudaStream_t s) { return reinterpret_cast<uintptr_t>(s) <= 2; }

CUstream_st *own(cudaStream_t s) {
  static CUstream_st *legacy = nullptr;
  if (!by_name(s)) return s;
  CUstream_st *&made = reinterpret_cast<uintptr_t>(s) == 2 ? mine().stream : legacy;
  if (!made) streams.push_back(made = new CUstream_st);
  return made;
}

bool known(cudaStream_t s) {
  if (by_name(s)) return true;
  for (CUstream_st *t : streams)
    if (t == s && !t->dying) return true;
  return false;
}

MarkRef mark(CUstream_st *s) {
  auto m = std::make_shared<Mark>();
  s->queue.push_back({nullptr, nullptr, m});
  return m;
}

cudaError_t synchronize(std::unique_lock<std::mutex> &held, CUstream_st *s) {
  auto m = mark(s);
  if (Failure f = run_until(held, [&] { return m->done; }, s)) return result(f);
  return result(m->failure);
}

} // namespace

void uly_emulated::drain(std::unique_lock<std::mutex> &held) {
  run_until(
      held,
      [] {
        for (CUstream_st *s : streams)
          if (!s->queue.empty()) return false;
        return true;
      },
      nullptr);
}

void uly_emulated::launch(const Kernel &kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                          const void *const *pointers, int n, std::function<void()> body) {
  std::unique_lock<std::mutex> held(lock);
  if (!known(stream)) {
    last(cudaErrorInvalidResourceHandle);
    return;
  }
  CUstream_st *s = own(stream);
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  auto allowed = allowed_shared.find(kernel.address);
  size_t limit = (size_t)(allowed == allowed_shared.end() ? (int)default_shared : allowed->second);
  std::string why;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0) why = "an empty grid or block";
  else if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    why = format("a grid of %u x %u x %u blocks", grid.x, grid.y, grid.z);
  else if (threads > 1024 || block.z > 64) why = format("a block of %llu threads", (unsigned long long)threads);
  else if (threads % 32)
    why = format("a block of %llu threads, which is no multiple of 32", (unsigned long long)threads);
  else if (shared > limit)
    why = format("%zu bytes of dynamic shared memory, where %zu are allowed (cudaFuncSetAttribute)", shared, limit);
  for (int i = 0; i < n; i++)
    if (pointers[i] && place(pointers[i], 1) == Place::pageable && !setting("ULYSSES_EMULATED_HOST", 0)) {
      last(cudaErrorInvalidDevicePointer,
           format("kernel %s (%s:%d) is started with a pointer to host memory, which no GPU reaches", kernel.name,
                  kernel.file, kernel.line));
      return;
    }
  if (!why.empty()) {
    last(cudaErrorInvalidConfiguration,
         format("kernel %s (%s:%d) is started with %s", kernel.name, kernel.file, kernel.line, why.c_str()));
    return;
  }
  if (s->failure) {
    result(s->failure);
    return;
  }
  s->queue.push_back({[=, body = std::move(body)]() -> Failure {
                        std::string text = check_red_zones();
                        if (!text.empty())
                          return {cudaErrorIllegalAddress, format("before kernel %s (%s:%d) somebody %s", kernel.name,
                                                                  kernel.file, kernel.line, text.c_str())};
                        text = run_grid(kernel, grid, block, shared, body);
                        if (!text.empty()) return {cudaErrorLaunchFailure, text};
                        text = check_red_zones();
                        if (!text.empty())
                          return {cudaErrorIllegalAddress,
                                  format("kernel %s (%s:%d) %s", kernel.name, kernel.file, kernel.line, text.c_str())};
                        return {};
                      },
                      nullptr, nullptr});
}

// --- copies
// -----------------------------------------------------------------------------------------------------------------------------
static bool fits(cudaMemcpyKind kind, Place dst, Place src) {
  if (dst == Place::invalid || src == Place::invalid) return false;
  bool to = dst == Place::device, from = src == Place::device;
  switch (kind) {
    case cudaMemcpyHostToHost: return !to && !from;
    case cudaMemcpyHostToDevice: return to && !from;
    case cudaMemcpyDeviceToHost: return !to && from;
    case cudaMemcpyDeviceToDevice: return to && from;
    default: return true;
  }
}

static const char *place_name(Place p) {
  const char *n[] = {"pageable memory", "pinned memory", "device memory", "memory outside of any allocation"};
  return n[(int)p];
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t rows,
                              cudaMemcpyKind kind, cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock);
  if (width == 0 || rows == 0) return cudaSuccess;
  if (!known(stream)) return last(cudaErrorInvalidResourceHandle);
  CUstream_st *s = own(stream);
  if (dst_pitch < width || src_pitch < width) return last(cudaErrorInvalidValue);
  Place to = place(dst, (rows - 1) * dst_pitch + width), from = place(src, (rows - 1) * src_pitch + width);
  if (!fits(kind, to, from))
    return last(cudaErrorInvalidValue, format("a copy of kind %d of %zu x %zu bytes from %s to %s", (int)kind, rows,
                                              width, place_name(from), place_name(to)));
  if (s->failure) return result(s->failure);
  auto copy = [=](const char *source, size_t pitch) {
    for (size_t r = 0; r < rows; r++) memcpy(static_cast<char *>(dst) + r * dst_pitch, source + r * pitch, width);
  };
  if (from == Place::pageable) { // staged: the source is free when the call returns
    auto staged = std::make_shared<std::string>();
    staged->resize(rows * width);
    for (size_t r = 0; r < rows; r++)
      memcpy(&(*staged)[r * width], static_cast<const char *>(src) + r * src_pitch, width);
    s->queue.push_back({[=]() -> Failure {
                          copy(staged->data(), width);
                          return {};
                        },
                        nullptr, nullptr});
  } else {
    s->queue.push_back({[=]() -> Failure {
                          copy(static_cast<const char *>(src), src_pitch);
                          return {};
                        },
                        nullptr, nullptr});
  }
  return to == Place::pageable ? synchronize(held, s) : cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t s) {
  return cudaMemcpy2DAsync(dst, bytes, src, bytes, bytes, 1, kind, s);
}

cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind) {
  cudaError_t e = cudaMemcpyAsync(dst, src, bytes, kind, nullptr);
  return e != cudaSuccess ? e : cudaStreamSynchronize(nullptr);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t bytes, cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock);
  if (bytes == 0) return cudaSuccess;
  if (!known(stream)) return last(cudaErrorInvalidResourceHandle);
  CUstream_st *s = own(stream);
  Place at = place(p, bytes);
  if (at == Place::invalid || at == Place::pageable)
    return last(cudaErrorInvalidValue, format("a memset of %zu bytes of %s", bytes, place_name(at)));
  if (s->failure) return result(s->failure);
  s->queue.push_back({[=]() -> Failure {
                        clear(p, value, bytes);
                        return {};
                      },
                      nullptr, nullptr});
  return cudaSuccess;
}

cudaError_t cudaMemset(void *p, int value, size_t bytes) { return cudaMemsetAsync(p, value, bytes, nullptr); }

// --- streams and events
// -----------------------------------------------------------------------------------------------------------------
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
  std::lock_guard<std::mutex> held(lock);
  streams.push_back(*s = new CUstream_st);
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s) { // what is in it runs all the same
  std::lock_guard<std::mutex> held(lock);
  if (by_name(s) || !known(s)) return last(cudaErrorInvalidResourceHandle);
  s->dying = true;
  if (s->queue.empty()) {
    s->queue.push_back({});
    run_head(s);
  }
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  std::unique_lock<std::mutex> held(lock);
  if (!known(s)) return last(cudaErrorInvalidResourceHandle);
  return synchronize(held, own(s));
}

cudaError_t cudaDeviceSynchronize() {
  std::unique_lock<std::mutex> held(lock);
  drain(held);
  for (CUstream_st *s : streams)
    if (s->failure) return result(s->failure);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock);
  if (!known(stream)) return last(cudaErrorInvalidResourceHandle);
  CUstream_st *s = own(stream);
  if (!s->queue.empty()) step(s, (Policy)below(policies)); // who asks again and again gets on
  if (s->failure) return result(s->failure);
  return s->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned) {
  std::unique_lock<std::mutex> held(lock);
  if (!e || !known(stream)) return last(cudaErrorInvalidResourceHandle);
  MarkRef m = e->last;
  if (e->slot) { // the last mark of any process
    m = std::make_shared<Mark>();
    m->slot = e->slot;
    m->n = slot_recorded(e->slot);
  }
  if (m && !(m->come() && !m->failure)) own(stream)->queue.push_back({nullptr, m, nullptr});
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
  std::lock_guard<std::mutex> held(lock);
  *e = nullptr;
  if ((flags & cudaEventInterprocess) && !(flags & cudaEventDisableTiming)) return last(cudaErrorInvalidValue);
  if ((flags & cudaEventInterprocess) && setting("ULYSSES_EMULATED_IPC", 2) == 0) return last(cudaErrorNotSupported);
  auto *n = new CUevent_st;
  if (flags & cudaEventInterprocess) n->slot = slot_create();
  if ((flags & cudaEventInterprocess) && !n->slot) {
    delete n;
    return last(cudaErrorMemoryAllocation);
  }
  *e = n;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e) {
  std::lock_guard<std::mutex> held(lock);
  if (!e) return last(cudaErrorInvalidResourceHandle);
  delete e;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock);
  if (!e || !known(stream)) return last(cudaErrorInvalidResourceHandle);
  CUstream_st *s = own(stream);
  if (e->slot && e->marked && e->marked != s && known(e->marked))
    return last(cudaErrorInvalidValue, "an event of several processes is recorded in a second stream");
  e->marked = s;
  MarkRef m = mark(s);
  e->last = m;
  if (!e->slot) return cudaSuccess;
  // Another process may wait for this mark while this one runs nothing: it must come now.
  m->slot = e->slot;
  m->n = slot_record(e->slot);
  m->done = false;
  if (Failure f = run_until(held, [&] { return m->done; }, s)) return result(f);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  std::unique_lock<std::mutex> held(lock);
  if (!e) return last(cudaErrorInvalidResourceHandle);
  MarkRef m = e->last;
  if (e->slot) {
    m = std::make_shared<Mark>();
    m->slot = e->slot;
    m->n = slot_recorded(e->slot);
  }
  if (!m) return cudaSuccess;
  if (Failure f = run_until(held, [&] { return m->come(); }, nullptr)) return result(f);
  return result(m->failure);
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
  std::unique_lock<std::mutex> held(lock);
  if (!e) return last(cudaErrorInvalidResourceHandle);
  MarkRef m = e->last;
  if (e->slot) {
    m = std::make_shared<Mark>();
    m->slot = e->slot;
    m->n = slot_recorded(e->slot);
  }
  if (!m || m->come()) return m ? result(m->failure) : cudaSuccess;
  step(nullptr, anybody);
  return m->come() ? result(m->failure) : cudaErrorNotReady;
}

void uly_emulated::claim(cudaEvent_t e) { slot_record(e->slot); }

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) {
  std::lock_guard<std::mutex> held(lock);
  if (!e || !e->slot || e->opened) return last(cudaErrorInvalidResourceHandle);
  slot_handle(e->slot, h->reserved);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) {
  std::lock_guard<std::mutex> held(lock);
  Slot *slot = slot_open(h.reserved);
  if (!slot) return last(cudaErrorInvalidResourceHandle);
  *e = new CUevent_st;
  (*e)->slot = slot;
  (*e)->opened = true;
  return cudaSuccess;
}

// --- devices
// ----------------------------------------------------------------------------------------------------------------------------
static int devices() { return (int)setting("ULYSSES_EMULATED_DEVICES", 1); }

cudaError_t cudaGetDeviceCount(int *n) {
  *n = devices();
  return *n > 0 ? cudaSuccess : last(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int ordinal) {
  if (ordinal < 0 || ordinal >= devices()) return last(cudaErrorInvalidDevice);
  mine().device = ordinal;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *ordinal) {
  *ordinal = mine().device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int ordinal) {
  if (ordinal < 0 || ordinal >= devices()) return last(cudaErrorInvalidDevice);
  *out = cudaDeviceProp{};
  snprintf(out->name, sizeof out->name, "emulated GPU %d", ordinal);
  for (int i = 0; i < 16; i++) out->uuid.bytes[i] = (char)(i == 15 ? ordinal : 0xe0 + i);
  out->totalGlobalMem = (size_t)setting("ULYSSES_EMULATED_MEMORY", 16ll << 30);
  out->sharedMemPerBlock = default_shared;
  out->sharedMemPerBlockOptin = most_shared;
  out->major = 9;
  out->multiProcessorCount = 4;
  out->maxThreadsPerBlock = 1024;
  out->warpSize = 32;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *out, cudaDeviceAttr what, int ordinal) {
  if (ordinal < 0 || ordinal >= devices()) return last(cudaErrorInvalidDevice);
  switch (what) {
    case cudaDevAttrMaxThreadsPerBlock: *out = 1024; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = default_shared; return cudaSuccess;
    case cudaDevAttrWarpSize: *out = 32; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *out = 4; return cudaSuccess;
    case cudaDevAttrUnifiedAddressing: *out = 1; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *out = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *out = 0; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = most_shared; return cudaSuccess;
  }
  return last(cudaErrorInvalidValue);
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int ordinal, int peer) {
  *can = ordinal != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *v) {
  *v = 13000;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute what, int value) {
  std::lock_guard<std::mutex> held(lock);
  if (what == cudaFuncAttributeMaxDynamicSharedMemorySize) {
    if (value < 0 || value > most_shared) return last(cudaErrorInvalidValue);
    allowed_shared[kernel] = value;
  }
  return cudaSuccess;
}
