// Streams, with their scratch memory and fault record, and events.
#include <string.h>

#include "device.h"

static void destroy(uly_stream *s) {
  if (s->s && !s->wrapped) cudaStreamSynchronize(s->s), cudaStreamDestroy(s->s);
  if (s->scratch) cudaFree(s->scratch);
  delete_queue(s->queue);
  if (s->fault) cudaFreeHost(s->fault);
  cudaGetLastError();
  delete s;
}

// COMM_SCRATCH is the scratch of a communication stream, which runs copies and sums of ranks only.
static constexpr Limit COMM_SCRATCH = {1 << 20, 1 << 14};

int32_t api_stream_create(uly_device *d, int32_t use, uly_stream **out) {
  return guarded(d, [&] {
    *out = nullptr;
    auto *s = new uly_stream;
    s->queue = new_queue();
    auto make = [&]() -> int32_t {
      int lowest = 0, highest = 0;
      TRY(check(d, cudaDeviceGetStreamPriorityRange(&lowest, &highest), "creating a stream"));
      TRY(check(
          d, cudaStreamCreateWithPriority(&s->s, cudaStreamNonBlocking, use == ULY_STREAM_PRIORITY ? highest : lowest),
          "creating a stream"));
      s->scratch_bytes = use == ULY_STREAM_COMPUTE ? (int64_t)STREAM_SCRATCH : (int64_t)COMM_SCRATCH;
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

// launched launches what an open group has queued.
static int32_t launched(uly_device *d, uly_stream *s) {
  launch_group(s);
  return check_launch(d, "Group");
}

int32_t api_stream_group(uly_device *d, uly_stream *s, int32_t open) {
  return guarded(d, [&] {
    if (open) {
      open_group(s);
      return (int32_t)ULY_OK;
    }
    close_group(s);
    return check_launch(d, "Group");
  });
}

int32_t api_stream_sync(uly_device *d, uly_stream *s) {
  return guarded(d, [&] {
    TRY(launched(d, s));
    TRY(check(d, cudaStreamSynchronize(s->s), "Sync"));
    return s->wrapped ? (int32_t)ULY_OK : fault_error(d, s->fault);
  });
}

static int32_t is_done(uly_device *d, cudaError_t e, int32_t *done, const char *what) {
  *done = e == cudaSuccess;
  if (e != cudaErrorNotReady) return check(d, e, what);
  cudaGetLastError();
  return ULY_OK;
}

int32_t api_stream_query(uly_device *d, uly_stream *s, int32_t *done) {
  return guarded(d, [&] {
    TRY(launched(d, s));
    return is_done(d, cudaStreamQuery(s->s), done, "cudaStreamQuery");
  });
}

int32_t api_stream_wait(uly_device *d, uly_stream *s, uly_event *e) {
  return guarded(d, [&] {
    TRY(launched(d, s));
    return check(d, cudaStreamWaitEvent(s->s, e->e, 0), "Wait");
  });
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
  return guarded(d, [&] {
    TRY(launched(d, s));
    return check(d, cudaEventRecord(e->e, s->s), "Record");
  });
}
int32_t api_event_sync(uly_device *d, uly_event *e) {
  return guarded(d, [&] { return check(d, cudaEventSynchronize(e->e), "cudaEventSynchronize"); });
}
int32_t api_event_query(uly_device *d, uly_event *e, int32_t *done) {
  return guarded(d, [&] { return is_done(d, cudaEventQuery(e->e), done, "cudaEventQuery"); });
}
