// Events, of one process and of several.
#include "settings.h"
#include "streams.h"

#include "cuda.h" // after all standard headers: it defines __noinline__

using namespace uly_emulated;

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
  if (Failure f = run_until(held, [&] { return m->done; }, s)) return last(f);
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
  if (Failure f = run_until(held, [&] { return m->come(); }, nullptr)) return last(f);
  return last(m->failure);
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
  if (!m || m->come()) return m ? last(m->failure) : cudaSuccess;
  step(nullptr, anybody);
  return m->come() ? last(m->failure) : cudaErrorNotReady;
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
