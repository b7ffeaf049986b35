// Collectives by NCCL. Communicators are non-blocking: every call is polled, so that a peer that
// never comes is an error after ULYSSES_TIMEOUT (as the Go side reads it; 0 waits for ever), and an
// abort from another thread ends the wait.
#include "libraries.h"

#include <nccl.h>
#include <stdlib.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "dl.h"
#include "nccl_timeout.h"

static_assert(sizeof(ncclUniqueId) == ULY_NCCL_ID, "kernels.h has NCCL's size of an id");

#define NCCL(name, parameters, arguments) \
  FORWARD(LIB_NCCL, true, ncclResult_t, name, parameters, arguments, ncclSystemError)
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
NCCL(ncclBroadcast, (const void *x, void *y, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s),
     (x, y, n, t, root, c, s))
FORWARD(LIB_NCCL, true, const char *, ncclGetErrorString, (ncclResult_t r), (r), "NCCL is not loaded")
FORWARD(LIB_NCCL, true, const char *, ncclGetLastError, (ncclComm_t c), (c), "")

struct uly_nccl {
  std::mutex lock;           // held for the time of one call: an abort comes in between
  ncclComm_t comm = nullptr; // NULL once aborted
  int ranks = 0, rank = 0;
  double timeout = 0;
  Exchanges<cudaEvent_t> under_way;
};

namespace {

int32_t missing(uly_device *d) {
  return fail(d, ULY_COMM, "NCCL: %s. Remedy: %s", library_reason(LIB_NCCL).c_str(), library_remedy(LIB_NCCL).c_str());
}

int32_t current(uly_device *d) { return check(d, cudaSetDevice(d->ordinal), "NCCL: cudaSetDevice"); }

// of says which call of which rank a sentence is about.
std::string of(uly_nccl *n, const char *what) {
  return std::string("NCCL ") + what + ", rank " + std::to_string(n->rank) + " of " + std::to_string(n->ranks) + ": ";
}

// end ends the communicator. The lock is held.
void end(uly_nccl *n) {
  if (n->comm) ncclCommAbort(n->comm);
  n->comm = nullptr;
}

// lost is what went wrong, and ends the communicator: NCCL's state is lost after an error. The lock
// is held.
std::string lost(uly_nccl *n, const char *what, ncclResult_t r) {
  std::string more = n->comm ? ncclGetLastError(n->comm) : "";
  end(n);
  return of(n, what) + ncclGetErrorString(r) + (more.empty() ? "" : ": ") + more + " (NCCL_DEBUG=INFO says more)";
}

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// passed reports that a stream has come past an event. An error is for others to tell: what is late
// is all that is asked here.
bool passed(cudaEvent_t e) {
  const cudaError_t answer = cudaEventQuery(e);
  if (answer != cudaSuccess) cudaGetLastError();
  return answer != cudaErrorNotReady;
}

// settle waits until NCCL has taken what it was told; after that the stream holds it.
int32_t settle(uly_device *d, uly_nccl *n, const char *what, ncclResult_t r) {
  const double start = now();
  for (int turns = 0;; turns++) {
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
        return fail(d, ULY_COMM,
                    "%snot all ranks came within %g s (ULYSSES_TIMEOUT): one has ended or waits elsewhere, or there is "
                    "no way between them; NCCL_DEBUG=INFO says more",
                    of(n, what).c_str(), n->timeout);
      }
    }
    if (turns > 100) std::this_thread::sleep_for(std::chrono::microseconds(turns < 1000 ? 50 : 2000));
  }
}

// run tells NCCL something and waits until it has taken it.
template <class F> int32_t run(uly_device *d, uly_nccl *n, const char *what, F tell) {
  TRY(current(d));
  ncclResult_t r;
  {
    std::lock_guard<std::mutex> hold(n->lock);
    if (!n->comm) return fail(d, ULY_COMM, "%sthe communicator was aborted", of(n, what).c_str());
    r = tell(n->comm);
  }
  return settle(d, n, what, r);
}

// exchange tells NCCL something for a stream, between two marks: once the stream has come past the
// first, the exchange waits for peers.
template <class F> int32_t exchange(uly_device *d, uly_nccl *n, uly_stream *s, const char *what, F tell) {
  TRY(current(d));
  auto create = [&](cudaEvent_t *e) {
    return *e ? (int32_t)ULY_OK
              : check(d, cudaEventCreateWithFlags(e, cudaEventDisableTiming), "NCCL: creating an event");
  };
  Exchange<cudaEvent_t> x;
  {
    std::lock_guard<std::mutex> hold(n->lock);
    n->under_way.look(now(), passed);
    x = n->under_way.take(what);
  }
  int32_t code = create(&x.before);
  if (code == ULY_OK) code = create(&x.after);
  if (code == ULY_OK) code = check(d, cudaEventRecord(x.before, s->s), "NCCL: marking the stream");
  if (code == ULY_OK) code = run(d, n, what, tell);
  if (code == ULY_OK) code = check(d, cudaEventRecord(x.after, s->s), "NCCL: marking the stream");
  std::lock_guard<std::mutex> hold(n->lock);
  if (code == ULY_OK) n->under_way.told(x);
  else n->under_way.give(x);
  return code;
}

// group runs sends and receives as one. A group that was started is ended, whatever happens inside.
template <class F> ncclResult_t group(F tell) {
  ncclResult_t r = ncclGroupStart();
  if (r != ncclSuccess) return r;
  r = tell();
  ncclResult_t end = ncclGroupEnd();
  return r == ncclSuccess || r == ncclInProgress ? end : r;
}

bool wrong(ncclResult_t r) { return r != ncclSuccess && r != ncclInProgress; }

} // namespace

int32_t nccl_id(uly_device *d, char id[ULY_NCCL_ID]) {
  if (!library_open(LIB_NCCL)) return missing(d);
  ncclUniqueId made;
  ncclResult_t r = ncclGetUniqueId(&made);
  if (r != ncclSuccess)
    return fail(d, ULY_COMM, "NCCL ncclGetUniqueId: %s: is there a network interface? NCCL_SOCKET_IFNAME names one",
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
  int32_t code = n->comm ? settle(d, n, "ncclCommInitRank", r)
                         : fail(d, ULY_COMM, "NCCL ncclCommInitRank, rank %d of %d: %s (NCCL_DEBUG=INFO says more)",
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
  n->under_way.each([](const Exchange<cudaEvent_t> &x) {
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

// A peer that dies on the same node is no error of NCCL's: its kernel waits on this GPU for ever.
// So the clock is looked at, too.
int32_t nccl_error(uly_device *, uly_nccl *n, char *text, int64_t text_bytes) {
  auto say = [&](const std::string &why) {
    snprintf(text, (size_t)text_bytes, "%s", why.c_str());
    return (int32_t)ULY_COMM;
  };
  std::lock_guard<std::mutex> hold(n->lock);
  if (!n->comm) return say(of(n, "exchange") + "the communicator was aborted");
  ncclResult_t r = ncclSuccess, asked = ncclCommGetAsyncError(n->comm, &r);
  if (asked != ncclSuccess) r = asked;
  if (wrong(r)) return say(lost(n, "exchange", r));
  const double waited = n->under_way.look(now(), passed);
  if (n->timeout <= 0 || waited <= n->timeout) return ULY_OK;
  const std::string what = n->under_way.oldest();
  end(n);
  return say(of(n, what.c_str()) + "this rank's GPU has waited " + std::to_string((int64_t)waited) +
             " s for its peers (ULYSSES_TIMEOUT): one has ended, or is in another call; NCCL_DEBUG=INFO says more");
}

// Always in sends and receives: ncclAlltoAll is made of the same ones unless the buffers lie in
// registered windows, and it wants all counts of all ranks to be equal, which one rank's counts do
// not tell.
int32_t nccl_all_to_all(uly_device *d, uly_nccl *n, uly_stream *s, void *dst, const int64_t *recv_at,
                        const int64_t *recv_bytes, const void *src, const int64_t *send_at, const int64_t *send_bytes) {
  char *to = static_cast<char *>(dst);
  const char *from = static_cast<const char *>(src);
  const int ranks = n->ranks;
  return exchange(d, n, s, "all-to-all", [&](ncclComm_t c) {
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

int32_t nccl_all_reduce(uly_device *d, uly_nccl *n, uly_stream *s, void *x, int64_t count, int32_t dtype, int32_t how) {
  static const struct {
    int32_t dtype;
    ncclDataType_t type;
    bool real;
  } types[] = {{ULY_F32, ncclFloat32, true},
               {ULY_F64, ncclFloat64, true},
               {ULY_BF16, ncclBfloat16, true},
               {ULY_I32, ncclInt32, false},
               {ULY_I64, ncclInt64, false}};
  static const ncclRedOp_t ops[] = {ncclSum, ncclMax, ncclMin};
  if (how < 0 || how > 2 || count < 0)
    return fail(d, ULY_INVALID_ARGUMENT, "NCCL all-reduce of %lld elements by operation %d", (long long)count, how);
  for (const auto &t : types) {
    if (t.dtype != dtype) continue;
    if (t.real && how != 0)
      return fail(
          d, ULY_UNSUPPORTED,
          "NCCL all-reduce: its maximum and minimum of floating-point numbers lose a NaN: gather and reduce instead");
    if (count == 0) return ULY_OK;
    return exchange(d, n, s, "all-reduce", [&](ncclComm_t c) {
      return ncclAllReduce(x, x, static_cast<size_t>(count), t.type, ops[how], c, s->s);
    });
  }
  return fail(d, ULY_UNSUPPORTED, "NCCL all-reduce of type %d: F32, F64, BF16, I32 and I64 are served", dtype);
}

int32_t nccl_broadcast(uly_device *d, uly_nccl *n, uly_stream *s, void *x, int64_t bytes, int32_t root) {
  if (root < 0 || root >= n->ranks || bytes < 0)
    return fail(d, ULY_INVALID_ARGUMENT, "NCCL broadcast of %lld bytes from rank %d of %d", (long long)bytes, root,
                n->ranks);
  if (bytes == 0) return ULY_OK;
  return exchange(d, n, s, "broadcast", [&](ncclComm_t c) {
    return ncclBroadcast(x, x, static_cast<size_t>(bytes), ncclInt8, root, c, s->s);
  });
}

int32_t nccl_send_recv(uly_device *d, uly_nccl *n, uly_stream *s, void *recv, int64_t recv_bytes, int32_t from,
                       const void *send, int64_t send_bytes, int32_t to) {
  if (from >= n->ranks || to >= n->ranks)
    return fail(d, ULY_INVALID_ARGUMENT, "NCCL: receive from rank %d, send to rank %d of %d", from, to, n->ranks);
  const bool sends = to >= 0 && send_bytes > 0, receives = from >= 0 && recv_bytes > 0;
  if (!sends && !receives) return ULY_OK;
  return exchange(d, n, s, "send and receive", [&](ncclComm_t c) {
    return group([&] {
      ncclResult_t r = sends ? ncclSend(send, static_cast<size_t>(send_bytes), ncclInt8, to, c, s->s) : ncclSuccess;
      if (receives && !wrong(r)) r = ncclRecv(recv, static_cast<size_t>(recv_bytes), ncclInt8, from, c, s->s);
      return r;
    });
  });
}
