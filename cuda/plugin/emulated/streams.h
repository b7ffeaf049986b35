// Streams as queues of work, records of events in them, and the order in which work runs
// (runtime.h). The caller of every function must hold the lock (errors.h).
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

// EventRecord is one record of an event: of this process, or record n of a slot that other
// processes see.
struct EventRecord {
  bool done = false;
  Failure failure;
  Slot *slot = nullptr;
  uint64_t n = 0;
  bool newest = false; // instead of record n, the newest record of the slot at each check (late)
  bool reached() {
    bool failed = false;
    if (slot && !done && slot_completed(slot, newest ? slot_recorded(slot) : n, &failed)) {
      done = true;
      if (failed)
        failure = {cudaErrorLaunchFailure,
                   format("a stream of process %d that was waited for has failed", slot_owner(slot))};
    }
    return done;
  }
};
using EventRecordRef = std::shared_ptr<EventRecord>;

// Op is an entry of a queue: work, a wait for a record, or a record.
struct Op {
  std::function<Failure()> run;
  EventRecordRef wait, record;
};

} // namespace uly_emulated

struct CUstream_st {
  std::deque<uly_emulated::Op> queue;
  uly_emulated::Failure failure; // permanent: later work does not run
  bool dying = false;
  int device = 0;
};

struct CUevent_st {
  uly_emulated::EventRecordRef last;
  uly_emulated::Slot *slot = nullptr;
  CUstream_st *record_stream = nullptr; // for an event that other processes see: the stream of its records
  bool opened = false;
  int device = 0;
};

namespace uly_emulated {

extern std::vector<CUstream_st *> streams; // in the order of creation

// known reports whether a stream exists. is_builtin reports one of CUDA's own stream handles: NULL
// and 1 are the legacy default stream, 2 the stream of the calling thread. resolve returns the
// stream that a handle stands for.
bool known(cudaStream_t s);
bool is_builtin(cudaStream_t s);
CUstream_st *resolve(cudaStream_t s);
// device_of returns the device of a stream: for CUDA's own handles the calling thread's.
int device_of(cudaStream_t s);

// enqueue appends work to a stream.
inline void enqueue(CUstream_st *s, std::function<Failure()> run) {
  s->queue.push_back({std::move(run), nullptr, nullptr});
}
// record_event appends a record.
EventRecordRef record_event(CUstream_st *s);
// last_record returns the last record of an event; for an interprocess event, that of any process.
// It returns NULL for an event that was never recorded in this process.
EventRecordRef last_record(cudaEvent_t e);
// late returns ULYSSES_EMULATED_LATE: 0, or the microseconds between two entries that a thread of
// the GPU runs.
int64_t late();
// start_late starts this thread if late() is not 0.
void start_late();

// run_head runs the first entry of a stream.
void run_head(CUstream_st *s);
// Each synchronization prefers certain streams, at random: none, the stream that it waits for, or
// the other streams.
enum Policy { no_preference, wanted_first, wanted_last, policies };
// step runs one entry that can run. It returns false if there is none.
bool step(CUstream_st *wanted, Policy policy);
// run_until runs entries until done() holds. If only another process can make it hold, run_until
// waits for that process.
Failure run_until(std::unique_lock<std::mutex> &held, const std::function<bool()> &done, CUstream_st *wanted);
// drain runs all entries of all streams.
void drain(std::unique_lock<std::mutex> &held);
cudaError_t synchronize(std::unique_lock<std::mutex> &held, CUstream_st *s);

} // namespace uly_emulated
