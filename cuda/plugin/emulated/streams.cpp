#include "streams.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include "settings.h"

namespace uly_emulated {

std::vector<CUstream_st *> streams;

static bool runnable(CUstream_st *s) {
  return !s->queue.empty() && (!s->queue.front().wait || s->queue.front().wait->come());
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

static double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

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
  CUstream_st *&made = reinterpret_cast<uintptr_t>(s) == 2 ? this_thread().stream : legacy;
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
  if (Failure f = run_until(held, [&] { return m->done; }, s)) return last(f);
  return last(m->failure);
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
    if (s->failure) return last(s->failure);
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock);
  if (!known(stream)) return last(cudaErrorInvalidResourceHandle);
  CUstream_st *s = own(stream);
  if (!s->queue.empty()) step(s, (Policy)below(policies)); // who asks again and again gets on
  if (s->failure) return last(s->failure);
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
