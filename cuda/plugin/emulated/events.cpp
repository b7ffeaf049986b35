// Events of one process, and interprocess events.
#include "cuda.h"
#include "settings.h"
#include "streams.h"

using namespace uly_emulated;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags) {
  std::lock_guard<std::mutex> held(lock);
  *e = nullptr;
  if ((flags & cudaEventInterprocess) && !(flags & cudaEventDisableTiming)) return set_error(cudaErrorInvalidValue);
  if ((flags & cudaEventInterprocess) && setting("ULYSSES_EMULATED_IPC", 2) == 0)
    return set_error(cudaErrorNotSupported);
  auto *n = new CUevent_st;
  n->device = this_thread().device;
  if (flags & cudaEventInterprocess) n->slot = slot_create();
  if ((flags & cudaEventInterprocess) && !n->slot) {
    delete n;
    return set_error(cudaErrorMemoryAllocation);
  }
  *e = n;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e) {
  std::lock_guard<std::mutex> held(lock);
  if (!e) return set_error(cudaErrorInvalidResourceHandle);
  delete e;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream) {
  std::unique_lock<std::mutex> held(lock);
  if (!e || !known(stream)) return set_error(cudaErrorInvalidResourceHandle);
  if (e->device != device_of(stream))
    return set_error(
        cudaErrorInvalidResourceHandle,
        format("an event of device %d is recorded in a stream of device %d", e->device, device_of(stream)));
  CUstream_st *s = resolve(stream);
  if (e->slot && e->record_stream && e->record_stream != s && known(e->record_stream))
    return set_error(cudaErrorInvalidValue, "an interprocess event is recorded in a second stream");
  e->record_stream = s;
  EventRecordRef m = record_event(s);
  e->last = m;
  if (!e->slot) return cudaSuccess;
  m->slot = e->slot;
  m->n = slot_record(e->slot);
  m->done = false;
  if (late()) return cudaSuccess;
  // Another process may wait for this record while this process runs nothing. Therefore it
  // completes now.
  if (Failure f = run_until(held, [&] { return m->done; }, s)) return set_error(f);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e) {
  std::unique_lock<std::mutex> held(lock);
  if (!e) return set_error(cudaErrorInvalidResourceHandle);
  EventRecordRef m = last_record(e);
  if (!m) return cudaSuccess;
  if (Failure f = run_until(held, [&] { return m->reached(); }, nullptr)) return set_error(f);
  return set_error(m->failure);
}

cudaError_t cudaEventQuery(cudaEvent_t e) {
  std::unique_lock<std::mutex> held(lock);
  if (!e) return set_error(cudaErrorInvalidResourceHandle);
  EventRecordRef m = last_record(e);
  if (!m || m->reached()) return m ? set_error(m->failure) : cudaSuccess;
  step(nullptr, no_preference);
  return m->reached() ? set_error(m->failure) : cudaErrorNotReady;
}

void uly_emulated::claim(cudaEvent_t e) { slot_record(e->slot); }

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) {
  std::lock_guard<std::mutex> held(lock);
  if (!e || !e->slot || e->opened) return set_error(cudaErrorInvalidResourceHandle);
  slot_handle(e->slot, h->reserved);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) {
  std::lock_guard<std::mutex> held(lock);
  Slot *slot = slot_open(h.reserved);
  if (!slot) return set_error(cudaErrorInvalidResourceHandle);
  *e = new CUevent_st;
  (*e)->slot = slot;
  (*e)->opened = true;
  (*e)->device = this_thread().device;
  return cudaSuccess;
}
