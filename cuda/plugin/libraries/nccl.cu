// Collectives by NCCL. Communicators are non-blocking, and each call polls until NCCL has enqueued
// it. If a peer does not join a call, the call fails after ULYSSES_TIMEOUT (the same format as in
// Go; 0 waits forever). An abort from another thread ends the wait.
//
// Communicators are not blocking, although NCCL starts a thread for each group of a non-blocking
// communicator. NCCL permits an abort only if the communicator is non-blocking and no thread is in
// a call (NCCL user guide, "Fault Tolerance"), and threads that waited for a peer's connection in a
// blocking call have not returned after an abort (PyTorch issue 113281).
#include "libraries.h"

#include <nccl.h>
#include <stdlib.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "dl.h"
#include "nccl_timeout.h"

static_assert(sizeof(ncclUniqueId) == ULY_NCCL_ID, "the size of an NCCL id differs from kernels.h");

#define NCCL(name, parameters, arguments) \
  FORWARD(LIB_NCCL, true, ncclResult_t, name, parameters, arguments, ncclSystemError)
NCCL(ncclGetVersion, (int *version), (version))
NCCL(ncclGetUniqueId, (ncclUniqueId * id), (id))
NCCL(ncclCommInitRankConfig, (ncclComm_t * c, int n, ncclUniqueId id, int rank, ncclConfig_t *config),
     (c, n, id, rank, config))
NCCL(ncclCommFinalize, (ncclComm_t c), (c))
NCCL(ncclCommDestroy, (ncclComm_t c), (c))
NCCL(ncclCommAbort, (ncclComm_t c), (c))
NCCL(ncclCommGetAsyncError, (ncclComm_t c, ncclResult_t *r), (c, r))
NCCL(ncclGroupStart, (), ())
NCCL(ncclGroupEnd, (), ())
NCCL(ncclSend, (const void *p, size_t n, ncclDataType_t t, int to, ncclComm_t c, cudaStream_t s), (p, n, t, to, c, s))
NCCL(ncclRecv, (void *p, size_t n, ncclDataType_t t, int from, ncclComm_t c, cudaStream_t s), (p, n, t, from, c, s))
NCCL(ncclAllReduce, (const void *x, void *y, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s),
     (x, y, n, t, op, c, s))
NCCL(ncclAllGather, (const void *x, void *y, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s),
     (x, y, n, t, c, s))
NCCL(ncclReduceScatter,
     (const void *x, void *y, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s),
     (x, y, n, t, op, c, s))
NCCL(ncclBroadcast, (const void *x, void *y, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s),
     (x, y, n, t, root, c, s))
FORWARD(LIB_NCCL, true, const char *, ncclGetErrorString, (ncclResult_t r), (r), "NCCL is not loaded")
FORWARD(LIB_NCCL, true, const char *, ncclGetLastError, (ncclComm_t c), (c), "")

struct uly_nccl {
  std::mutex lock;           // held during each NCCL call; an abort can happen between two calls
  ncclComm_t comm = nullptr; // NULL once aborted
  int ranks = 0, rank = 0;
  double timeout = 0;
  PendingCollectives<cudaEvent_t> pending;
};

namespace {

int32_t missing(uly_device *d) {
  return fail(d, ULY_COMM, "NCCL: %s; fix: %s", library_reason(LIB_NCCL).c_str(), library_fix(LIB_NCCL).c_str());
}

int32_t current(uly_device *d) { return check(d, cudaSetDevice(d->ordinal), "NCCL: cudaSetDevice"); }

// of returns the start of a message: the call and the rank.
std::string of(uly_nccl *n, const char *what) {
  return std::string("NCCL ") + what + ", rank " + std::to_string(n->rank) + " of " + std::to_string(n->ranks) + ": ";
}

// end aborts the communicator. The caller holds the lock.
void end(uly_nccl *n) {
  if (n->comm) ncclCommAbort(n->comm);
  n->comm = nullptr;
}

// lost returns the message of a failed NCCL call and aborts the communicator, because NCCL's state
// is undefined after an error. The caller holds the lock.
std::string lost(uly_nccl *n, const char *what, ncclResult_t r) {
  std::string more = n->comm ? ncclGetLastError(n->comm) : "";
  end(n);
  return of(n, what) + ncclGetErrorString(r) + (more.empty() ? "" : ": ") + more + " (set NCCL_DEBUG=INFO for details)";
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// reached reports whether a stream has reached an event. Errors count as reached: other calls
// report them.
bool reached(cudaEvent_t e) {
  const cudaError_t answer = cudaEventQuery(e);
  if (answer != cudaSuccess) cudaGetLastError();
  return answer != cudaErrorNotReady;
}

// wait_enqueued waits until NCCL has enqueued a call in the stream. It holds the lock only during a
// poll, so another thread can abort.
int32_t wait_enqueued(uly_device *d, uly_nccl *n, const char *what, ncclResult_t r) {
  const double start = now();
  for (;;) {
    {
      std::lock_guard<std::mutex> hold(n->lock);
      if (!n->comm) return fail(d, ULY_COMM, "%saborted", of(n, what).c_str());
      if (r == ncclInProgress || r == ncclSuccess) {
        ncclResult_t asked = ncclCommGetAsyncError(n->comm, &r);
        if (asked != ncclSuccess) r = asked;
      }
      if (r == ncclSuccess) return ULY_OK;
      if (r != ncclInProgress) return fail(d, ULY_COMM, "%s", lost(n, what, r).c_str());
      if (n->timeout > 0 && now() - start > n->timeout) {
        end(n);
        return fail(
            d, ULY_COMM,
            "%snot all ranks joined within %g s (ULYSSES_TIMEOUT): a rank has ended or waits in another call, or "
            "the ranks have no connection; set NCCL_DEBUG=INFO for details",
            of(n, what).c_str(), n->timeout);
      }
    }
    const int64_t pause = nccl_poll_pause(now() - start);
    if (pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause));
    else std::this_thread::yield();
  }
}

// run makes an NCCL call and waits until NCCL has enqueued it.
template <class F> int32_t run(uly_device *d, uly_nccl *n, const char *what, F call) {
  TRY(current(d));
  ncclResult_t r;
  {
    std::lock_guard<std::mutex> hold(n->lock);
    if (!n->comm) return fail(d, ULY_COMM, "%sthe communicator was aborted", of(n, what).c_str());
    r = call(n->comm);
  }
  return wait_enqueued(d, n, what, r);
}

// enqueue_collective enqueues a collective on a stream between two events. After the stream has
// reached the first event, the collective waits for peers.
template <class F> int32_t enqueue_collective(uly_device *d, uly_nccl *n, uly_stream *s, const char *what, F call) {
  TRY(current(d));
  launch_group(s);
  auto create = [&](cudaEvent_t *e) {
    return *e ? (int32_t)ULY_OK
              : check(d, cudaEventCreateWithFlags(e, cudaEventDisableTiming), "NCCL: creating an event");
  };
  Collective<cudaEvent_t> x;
  {
    std::lock_guard<std::mutex> hold(n->lock);
    n->pending.update(now(), reached);
    x = n->pending.acquire(what);
  }
  int32_t code = create(&x.before);
  if (code == ULY_OK) code = create(&x.after);
  if (code == ULY_OK) code = check(d, cudaEventRecord(x.before, s->s), "NCCL: recording an event");
  if (code == ULY_OK) code = run(d, n, what, call);
  if (code == ULY_OK) code = check(d, cudaEventRecord(x.after, s->s), "NCCL: recording an event");
  std::lock_guard<std::mutex> hold(n->lock);
  if (code == ULY_OK) n->pending.enqueued(x);
  else n->pending.release(x);
  return code;
}

// group makes several sends and receives one NCCL operation. A started group is always ended.
template <class F> ncclResult_t group(F call) {
  ncclResult_t r = ncclGroupStart();
  if (r != ncclSuccess) return r;
  r = call();
  ncclResult_t end = ncclGroupEnd();
  return r == ncclSuccess || r == ncclInProgress ? end : r;
}

bool wrong(ncclResult_t r) { return r != ncclSuccess && r != ncclInProgress; }

} // namespace

// Since 2.26, with NCCL_LAUNCH_ORDER_IMPLICIT=1, a kernel of NCCL starts when all blocks of the
// previous one of its GPU have started, whatever their communicators and streams. NCCL reads the
// variable once in a process. With a driver older than CUDA 12.3 it waits for the previous kernel's
// end, which is as safe.
int32_t nccl_ordered(uly_device *, int32_t *ordered) {
  int version = 0;
  const char *set = getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  *ordered = library_open(LIB_NCCL) && ncclGetVersion(&version) == ncclSuccess && version >= 22600 && set &&
             strcmp(set, "1") == 0;
  return ULY_OK;
}

int32_t nccl_id(uly_device *d, char id[ULY_NCCL_ID]) {
  if (!library_open(LIB_NCCL)) return missing(d);
  ncclUniqueId made;
  ncclResult_t r = ncclGetUniqueId(&made);
  if (r != ncclSuccess)
    return fail(d, ULY_COMM, "NCCL ncclGetUniqueId: %s: check the network interfaces; NCCL_SOCKET_IFNAME selects one",
                ncclGetErrorString(r));
  memcpy(id, &made, sizeof made);
  return ULY_OK;
}

int32_t nccl_init(uly_device *d, const char id[ULY_NCCL_ID], int32_t ranks, int32_t rank, uly_nccl **out) {
  *out = nullptr;
  if (ranks < 1 || rank < 0 || rank >= ranks) return fail(d, ULY_INVALID_ARGUMENT, "NCCL: rank %d of %d", rank, ranks);
  if (!library_open(LIB_NCCL)) return missing(d);
  TRY(current(d));
  uly_nccl *n = new uly_nccl;
  n->ranks = ranks, n->rank = rank, n->timeout = nccl_seconds(getenv("ULYSSES_TIMEOUT"), 600);
  ncclUniqueId unique;
  memcpy(&unique, id, sizeof unique);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclResult_t r = ncclCommInitRankConfig(&n->comm, ranks, unique, rank, &config);
  int32_t code = n->comm
                     ? wait_enqueued(d, n, "ncclCommInitRank", r)
                     : fail(d, ULY_COMM, "NCCL ncclCommInitRank, rank %d of %d: %s (set NCCL_DEBUG=INFO for details)",
                            rank, ranks, ncclGetErrorString(r));
  if (code != ULY_OK) {
    delete n;
    return code;
  }
  *out = n;
  return ULY_OK;
}

int32_t nccl_close(uly_device *d, uly_nccl *n) {
  if (!n) return ULY_OK;
  int32_t code = ULY_OK;
  if (n->comm) {
    code = run(d, n, "ncclCommFinalize", [](ncclComm_t c) { return ncclCommFinalize(c); });
    std::lock_guard<std::mutex> hold(n->lock);
    if (n->comm) ncclCommDestroy(n->comm);
    n->comm = nullptr;
  }
  n->pending.each([](const Collective<cudaEvent_t> &x) {
    for (cudaEvent_t e : {x.before, x.after})
      if (e) cudaEventDestroy(e);
  });
  cudaGetLastError();
  delete n;
  return code;
}

int32_t nccl_abort(uly_device *, uly_nccl *n) {
  std::lock_guard<std::mutex> hold(n->lock);
  ncclResult_t r = n->comm ? ncclCommAbort(n->comm) : ncclSuccess;
  n->comm = nullptr;
  return wrong(r) ? ULY_COMM : ULY_OK;
}

// NCCL reports no error when a peer on the same node dies: the kernel on this GPU then waits
// forever. Therefore nccl_error also checks how long the oldest collective has waited.
int32_t nccl_error(uly_device *, uly_nccl *n, char *text, int64_t text_bytes) {
  auto say = [&](const std::string &why) {
    snprintf(text, (size_t)text_bytes, "%s", why.c_str());
    return (int32_t)ULY_COMM;
  };
  std::lock_guard<std::mutex> hold(n->lock);
  if (!n->comm) return say(of(n, "collective") + "the communicator was aborted");
  ncclResult_t r = ncclSuccess, asked = ncclCommGetAsyncError(n->comm, &r);
  if (asked != ncclSuccess) r = asked;
  if (wrong(r)) return say(lost(n, "collective", r));
  const double waited = n->pending.update(now(), reached);
  if (n->timeout <= 0 || waited <= n->timeout) return ULY_OK;
  const std::string what = n->pending.oldest();
  end(n);
  return say(
      of(n, what.c_str()) + "this rank's GPU has waited " + std::to_string((int64_t)waited) +
      " s for its peers (ULYSSES_TIMEOUT): a peer has ended or is in another call; set NCCL_DEBUG=INFO for details");
}

// The all-to-all consists of sends and receives. ncclAlltoAll consists of the same operations
// unless the buffers lie in registered windows, and it requires equal counts on all ranks, which a
// rank cannot check.
int32_t nccl_all_to_all(uly_device *d, uly_nccl *n, uly_stream *s, void *dst, const int64_t *recv_at,
                        const int64_t *recv_bytes, const void *src, const int64_t *send_at, const int64_t *send_bytes) {
  char *to = static_cast<char *>(dst);
  const char *from = static_cast<const char *>(src);
  const int ranks = n->ranks;
  return enqueue_collective(d, n, s, "all-to-all", [&](ncclComm_t c) {
    return group([&] {
      ncclResult_t r = ncclSuccess;
      for (int i = 0; i < ranks && !wrong(r); i++) {
        if (send_bytes[i] > 0)
          r = ncclSend(from + send_at[i], static_cast<size_t>(send_bytes[i]), ncclInt8, i, c, s->s);
        if (recv_bytes[i] > 0 && !wrong(r))
          r = ncclRecv(to + recv_at[i], static_cast<size_t>(recv_bytes[i]), ncclInt8, i, c, s->s);
      }
      return r;
    });
  });
}

int32_t nccl_all_gather(uly_device *d, uly_nccl *n, uly_stream *s, void *dst, const void *src, int64_t bytes) {
  if (bytes < 0) return fail(d, ULY_INVALID_ARGUMENT, "NCCL all-gather of %lld bytes", (long long)bytes);
  if (bytes == 0) return ULY_OK;
  return enqueue_collective(d, n, s, "all-gather", [&](ncclComm_t c) {
    return ncclAllGather(src, dst, static_cast<size_t>(bytes), ncclInt8, c, s->s);
  });
}

// sum_type finds NCCL's type for sums.
static int32_t sum_type(uly_device *d, int64_t count, int32_t dtype, ncclDataType_t *out) {
  static const struct {
    int32_t dtype;
    ncclDataType_t type;
  } types[] = {{ULY_F32, ncclFloat32},
               {ULY_F64, ncclFloat64},
               {ULY_BF16, ncclBfloat16},
               {ULY_I32, ncclInt32},
               {ULY_I64, ncclInt64}};
  if (count < 0) return fail(d, ULY_INVALID_ARGUMENT, "NCCL: a sum of %lld elements", (long long)count);
  for (const auto &t : types)
    if (t.dtype == dtype) {
      *out = t.type;
      return ULY_OK;
    }
  return fail(d, ULY_UNSUPPORTED, "NCCL: a sum of type %d: use F32, F64, BF16, I32 or I64", dtype);
}

int32_t nccl_all_reduce(uly_device *d, uly_nccl *n, uly_stream *s, void *x, int64_t count, int32_t dtype) {
  ncclDataType_t type = ncclFloat32;
  TRY(sum_type(d, count, dtype, &type));
  if (count == 0) return ULY_OK;
  return enqueue_collective(d, n, s, "all-reduce", [&](ncclComm_t c) {
    return ncclAllReduce(x, x, static_cast<size_t>(count), type, ncclSum, c, s->s);
  });
}

int32_t nccl_reduce_scatter(uly_device *d, uly_nccl *n, uly_stream *s, void *dst, const void *src, int64_t count,
                            int32_t dtype) {
  ncclDataType_t type = ncclFloat32;
  TRY(sum_type(d, count, dtype, &type));
  if (count == 0) return ULY_OK;
  return enqueue_collective(d, n, s, "reduce-scatter", [&](ncclComm_t c) {
    return ncclReduceScatter(src, dst, static_cast<size_t>(count), type, ncclSum, c, s->s);
  });
}

int32_t nccl_broadcast(uly_device *d, uly_nccl *n, uly_stream *s, void *x, int64_t bytes, int32_t root) {
  if (root < 0 || root >= n->ranks || bytes < 0)
    return fail(d, ULY_INVALID_ARGUMENT, "NCCL broadcast of %lld bytes from rank %d of %d", (long long)bytes, root,
                n->ranks);
  if (bytes == 0) return ULY_OK;
  return enqueue_collective(d, n, s, "broadcast", [&](ncclComm_t c) {
    return ncclBroadcast(x, x, static_cast<size_t>(bytes), ncclInt8, root, c, s->s);
  });
}

int32_t nccl_send_recv(uly_device *d, uly_nccl *n, uly_stream *s, void *recv, int64_t recv_bytes, int32_t from,
                       const void *send, int64_t send_bytes, int32_t to) {
  if (from >= n->ranks || to >= n->ranks)
    return fail(d, ULY_INVALID_ARGUMENT, "NCCL: receive from rank %d, send to rank %d of %d", from, to, n->ranks);
  const bool sends = to >= 0 && send_bytes > 0, receives = from >= 0 && recv_bytes > 0;
  if (!sends && !receives) return ULY_OK;
  return enqueue_collective(d, n, s, "send and receive", [&](ncclComm_t c) {
    return group([&] {
      ncclResult_t r = sends ? ncclSend(send, static_cast<size_t>(send_bytes), ncclInt8, to, c, s->s) : ncclSuccess;
      if (receives && !wrong(r)) r = ncclRecv(recv, static_cast<size_t>(recv_bytes), ncclInt8, from, c, s->s);
      return r;
    });
  });
}
