#include "streams.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "settings.h"

namespace uly_emulated {

std::vector<CUstream_st *> streams;

static bool runnable(CUstream_st *s) { // a stream that has failed does not wait
  return !s->queue.empty() && (!s->queue.front().wait || s->failure || s->queue.front().wait->reached());
}

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

bool step(CUstream_st *wanted, Policy policy) {
  static std::vector<CUstream_st *> heads;
  heads.clear();
  bool wanted_can = false;
  for (CUstream_st *s : streams)
    if (runnable(s)) {
      if (s == wanted && policy != no_preference) wanted_can = true;
      else heads.push_back(s);
    }
  if (wanted_can && (policy == wanted_first || heads.empty())) {
    run_head(wanted);
    return true;
  }
  if (heads.empty()) return false;
  run_head(heads[random_below(heads.size())]);
  return true;
}

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

Failure run_until(std::unique_lock<std::mutex> &held, const std::function<bool()> &done, CUstream_st *wanted) {
  auto policy = (Policy)random_below(policies);
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
                        : format("deadlock: no stream could run for %.0f s", limit)};
      // Fail all waits that cannot end, so that the next synchronization does not take as long.
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

// Handles of streams that CUDA defines: 1 is the legacy default stream, as is NULL; 2 is the stream
// of the calling thread.
bool is_builtin(cudaStream_t s) { return reinterpret_cast<uintptr_t>(s) <= 2; }

CUstream_st *resolve(cudaStream_t s) {
  static CUstream_st *legacy = nullptr;
  if (!is_builtin(s)) return s;
  CUstream_st *&made = reinterpret_cast<uintptr_t>(s) == 2 ? this_thread().stream : legacy;
  if (!made) streams.push_back(made = new CUstream_st);
  return made;
}

int device_of(cudaStream_t s) { return is_builtin(s) ? this_thread().device : s->device; }

bool known(cudaStream_t s) {
  if (is_builtin(s)) return true;
  for (CUstream_st *t : streams)
    if (t == s && !t->dying) return true;
  return false;
}

EventRecordRef record_event(CUstream_st *s) {
  auto m = std::make_shared<EventRecord>();
  s->queue.push_back({nullptr, nullptr, m});
  return m;
}

EventRecordRef last_record(cudaEvent_t e) {
  if (!e->slot) return e->last;
  auto m = std::make_shared<EventRecord>();
  m->slot = e->slot;
  m->n = slot_recorded(e->slot);
  m->newest = e->opened && late();
  return m;
}

int64_t late() {
  static const int64_t microseconds = setting("ULYSSES_EMULATED_LATE", 0);
  return microseconds;
}

// LateGPU runs entries in a thread of its own until the process ends.
struct LateGPU {
  std::atomic<bool> ended{false};
  std::thread thread{[this] {
    while (!ended) {
      {
        std::lock_guard<std::mutex> held(lock);
        step(nullptr, no_preference);
      }
      usleep((useconds_t)late());
    }
  }};
  ~LateGPU() {
    ended = true;
    thread.join();
  }
};

void start_late() {
  if (late()) static LateGPU gpu;
}

cudaError_t synchronize(std::unique_lock<std::mutex> &held, CUstream_st *s) {
  auto m = record_event(s);
  if (Failure f = run_until(held, [&] { return m->done; }, s)) return set_error(f);
  return set_error(m->failure);
}

void drain(std::unique_lock<std::mutex> &held) {
  run_until(
      held,
      [] {
        for (CUstream_st *s : streams)
          if (!s->queue.empty()) return false;
        return true;
      },
      nullptr);
}

} // namespace uly_emulated

using namespace uly_emulated;

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) {
  std::lock_guard<std::mutex> held(lock);
  streams.push_back(*s = new CUstream_st);
  (*s)->device = this_thread().device;
  start_late();
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *lowest, int *highest) {
  *lowest = 0, *highest = -5;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority) {
  if (priority < -5 || priority > 0) { // CUDA would clamp it
    std::lock_guard<std::mutex> held(lock);
    return set_error(cudaErrorInvalidValue);
  }
  return cudaStreamCreateWithFlags(s, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t s) { // enqueued work still runs
  std::lock_guard<std::mutex> held(lock);
  if (is_builtin(s) || !known(s)) return set_error(cudaErrorInvalidResourceHandle);
  s->dying = true;
  if (s->queue.empty()) {
    s->queue.push_back({});
    run_head(s);
  }
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s) {
  std::unique_lock<std::mutex> held(lock);
  if (!known(s)) return set_error(cudaErrorInvalidResourceHandle);
  return synchronize(held, resolve(s));
}

cudaError_t cudaDeviceSynchronize() {
  std::unique_lock<std::mutex> held(lock);
  drain(held);
  for (CUstream_st *s : streams)
    if (s->failure) return set_error(s->failure);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock);
  if (!known(stream)) return set_error(cudaErrorInvalidResourceHandle);
  CUstream_st *s = resolve(stream);
  if (!s->queue.empty()) step(s, (Policy)random_below(policies)); // a caller that polls makes progress
  if (s->failure) return set_error(s->failure);
  return s->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t e, unsigned) {
  std::unique_lock<std::mutex> held(lock);
  if (!e || !known(stream)) return set_error(cudaErrorInvalidResourceHandle);
  EventRecordRef m = last_record(e);
  if (m && (m->newest || !m->reached() || m->failure)) resolve(stream)->queue.push_back({nullptr, m, nullptr});
  return cudaSuccess;
}
