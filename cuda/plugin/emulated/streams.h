// Streams as queues of work, events as records in them, and the order in which work runs (runtime.h).
// The caller of every function holds the lock (errors.h).
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "errors.h"
#include "settings.h"
#include "slots.h"

namespace uly_emulated {

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

// Op is one of the three: work, a wait for a mark, a mark.
struct Op {
  std::function<Failure()> run;
  MarkRef wait, record;
};

} // namespace uly_emulated

struct CUstream_st {
  std::deque<uly_emulated::Op> queue;
  uly_emulated::Failure failure; // stays: what comes later does not run
  bool dying = false;
};

struct CUevent_st {
  uly_emulated::MarkRef last;
  uly_emulated::Slot *slot = nullptr;
  CUstream_st *marked = nullptr; // of an event that other processes see, the stream of its marks
  bool opened = false;
};

namespace uly_emulated {

extern std::vector<CUstream_st *> streams; // in the order of creation

// known reports whether a stream exists. own returns the stream that a name stands for.
bool known(cudaStream_t s);
bool by_name(cudaStream_t s);
CUstream_st *own(cudaStream_t s);

// enqueue appends work to a stream.
inline void enqueue(CUstream_st *s, std::function<Failure()> run) {
  s->queue.push_back({std::move(run), nullptr, nullptr});
}
// mark appends a mark.
MarkRef mark(CUstream_st *s);

// run_head runs the first entry of a stream.
void run_head(CUstream_st *s);
// Each wait prefers other streams: any, the one that is waited for, or all but that one.
enum Policy { anybody, wanted_first, wanted_last, policies };
// step runs one entry that can run. It returns false where there is none.
bool step(CUstream_st *wanted, Policy policy);
// run_until runs entries until done() holds. Where only another process can make it hold, run_until
// waits for that process.
Failure run_until(std::unique_lock<std::mutex> &held, const std::function<bool()> &done, CUstream_st *wanted);
// drain runs everything in all streams.
void drain(std::unique_lock<std::mutex> &held);
cudaError_t synchronize(std::unique_lock<std::mutex> &held, CUstream_st *s);

} // namespace uly_emulated
