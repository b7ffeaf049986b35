// Collectives by NCCL. Communicators are non-blocking: every call is polled, so that a peer that never comes is an error after
// ULYSSES_TIMEOUT (as the Go side reads it; 0 waits for ever), and an abort from another thread ends the wait.
#include "libraries.h"

#ifdef ULY_EMULATED

static int32_t none(uly_device *d) { return fail(d, ULY_UNSUPPORTED, "cuda: no NCCL in the emulated plug-in"); }

int32_t nccl_id(uly_device *d, char *) { return none(d); }
int32_t nccl_init(uly_device *d, const char *, int32_t, int32_t, uly_nccl **) { return none(d); }
int32_t nccl_close(uly_device *, uly_nccl *) { return ULY_OK; }
int32_t nccl_abort(uly_device *, uly_nccl *) { return ULY_OK; }
int32_t nccl_error(uly_device *d, uly_nccl *) { return none(d); }
int32_t nccl_all_to_all(uly_device *d, uly_nccl *, uly_stream *, void *, const int64_t *, const int64_t *, const void *, const int64_t *, const int64_t *) { return none(d); }
int32_t nccl_all_reduce(uly_device *d, uly_nccl *, uly_stream *, void *, int64_t, int32_t, int32_t) { return none(d); }
int32_t nccl_broadcast(uly_device *d, uly_nccl *, uly_stream *, void *, int64_t, int32_t) { return none(d); }
int32_t nccl_send_recv(uly_device *d, uly_nccl *, uly_stream *, void *, int64_t, int32_t, const void *, int64_t, int32_t) { return none(d); }

#else

#include <nccl.h>
#include <stdlib.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "dl.h"
#include "nccl_timeout.h"

static_assert(sizeof(ncclUniqueId) == ULY_NCCL_ID, "kernels.h has NCCL's size of an id");

#define NCCL(name, parameters, arguments) FORWARD(LIB_NCCL, true, ncclResult_t, name, parameters, arguments, ncclSystemError)
NCCL(ncclGetUniqueId, (ncclUniqueId * id), (id))
NCCL(ncclCommInitRankConfig, (ncclComm_t * c, int n, ncclUniqueId id, int rank, ncclConfig_t *config), (c, n, id, rank, config))
NCCL(ncclCommFinalize, (ncclComm_t c), (c))
NCCL(ncclCommDestroy, (ncclComm_t c), (c))
NCCL(ncclCommAbort, (ncclComm_t c), (c))
NCCL(ncclCommGetAsyncError, (ncclComm_t c, ncclResult_t *r), (c, r))
NCCL(ncclGroupStart, (), ())
NCCL(ncclGroupEnd, (), ())
NCCL(ncclSend, (const void *p, size_t n, ncclDataType_t t, int to, ncclComm_t c, cudaStream_t s), (p, n, t, to, c, s))
NCCL(ncclRecv, (void *p, size_t n, ncclDataType_t t, int from, ncclComm_t c, cudaStream_t s), (p, n, t, from, c, s))
NCCL(ncclAllReduce, (const void *x, void *y, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s), (x, y, n, t, op, c, s))
NCCL(ncclBroadcast, (const void *x, void *y, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s), (x, y, n, t, root, c, s))
FORWARD(LIB_NCCL, true, const char *, ncclGetErrorString, (ncclResult_t r), (r), "NCCL is not loaded")
FORWARD(LIB_NCCL, true, const char *, ncclGetLastError, (ncclComm_t c), (c), "")

struct uly_nccl {
  std::mutex lock; // held for the time of one call: an abort comes in between
  ncclComm_t comm = nullptr; // NULL once aborted
  int ranks = 0, rank = 0;
  double timeout = 0;
};

namespace {

int32_t missing(uly_device *d) {
  return fail(d, ULY_COMM, "NCCL: %s. Remedy: %s", library_reason(LIB_NCCL).c_str(), library_remedy(LIB_NCCL).c_str());
}

int32_t current(uly_device *d) { return check(d, cudaSetDevice(d->ordinal), "NCCL: cudaSetDevice"); }

// sentence is what went wrong, and ends the communicator: NCCL's state is lost after an error. The lock is held.
int32_t lost(uly_device *d, uly_nccl *n, const char *what, ncclResult_t r) {
  std::string more = n->comm ? ncclGetLastError(n->comm) : "";
  if (n->comm) ncclCommAbort(n->comm);
  n->comm = nullptr;
  return fail(d, ULY_COMM, "NCCL %s, rank %d of %d: %s%s%s (NCCL_DEBUG=INFO says more)", what, n->rank, n->ranks, ncclGetErrorString(r), more.empty() ? "" : ": ", more.c_str());
}

// settle waits until NCCL has taken what it was told; after that the stream holds it.
int32_t settle(uly_device *d, uly_nccl *n, const char *what, ncclResult_t r) {
  const auto start = std::chrono::steady_clock::now();
  for (int turns = 0;; turns++) {
    {
      std::lock_guard<std::mutex> hold(n->lock);
      if (!n->comm) return fail(d, ULY_COMM, "NCCL %s, rank %d of %d: aborted", what, n->rank, n->ranks);
      if (r == ncclInProgress || r == ncclSuccess) {
        ncclResult_t asked = ncclCommGetAsyncError(n->comm, &r);
        if (asked != ncclSuccess) r = asked;
      }
      if (r == ncclSuccess) return ULY_OK;
      if (r != ncclInProgress) return lost(d, n, what, r);
      if (n->timeout > 0 && std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > n->timeout) {
        ncclCommAbort(n->comm);
        n->comm = nullptr;
        return fail(d, ULY_COMM, "NCCL %s, rank %d of %d: not all ranks came within %g s (ULYSSES_TIMEOUT): one has ended or waits elsewhere, or there is no way between them; NCCL_DEBUG=INFO says more",
                    what, n->rank, n->ranks, n->timeout);
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
    if (!n->comm) return fail(d, ULY_COMM, "NCCL %s, rank %d of %d: the communicator was aborted", what, n->rank, n->ranks);
    r = tell(n->comm);
  }
  return settle(d, n, what, r);
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
  if (r != ncclSuccess) return fail(d, ULY_COMM, "NCCL ncclGetUniqueId: %s: is there a network interface? NCCL_SOCKET_IFNAME names one", ncclGetErrorString(r));
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
  int32_t code = n->comm ? settle(d, n, "ncclCommInitRank", r) : fail(d, ULY_COMM, "NCCL ncclCommInitRank, rank %d of %d: %s (NCCL_DEBUG=INFO says more)", rank, ranks, ncclGetErrorString(r));
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
  delete n;
  return code;
}

int32_t nccl_abort(uly_device *, uly_nccl *n) {
  std::lock_guard<std::mutex> hold(n->lock);
  ncclResult_t r = n->comm ? ncclCommAbort(n->comm) : ncclSuccess;
  n->comm = nullptr;
  return wrong(r) ? ULY_COMM : ULY_OK;
}

int32_t nccl_error(uly_device *d, uly_nccl *n) {
  std::lock_guard<std::mutex> hold(n->lock);
  if (!n->comm) return fail(d, ULY_COMM, "NCCL, rank %d of %d: the communicator was aborted", n->rank, n->ranks);
  ncclResult_t r = ncclSuccess, asked = ncclCommGetAsyncError(n->comm, &r);
  if (asked != ncclSuccess) r = asked;
  return wrong(r) ? lost(d, n, "exchange", r) : ULY_OK;
}

// Always in sends and receives: ncclAlltoAll is made of the same ones unless the buffers lie in registered windows, and it wants all counts of
// all ranks to be equal, which one rank's counts do not tell.
int32_t nccl_all_to_all(uly_device *d, uly_nccl *n, uly_stream *s, void *dst, const int64_t *recv_at, const int64_t *recv_bytes, const void *src,
                        const int64_t *send_at, const int64_t *send_bytes) {
  char *to = static_cast<char *>(dst);
  const char *from = static_cast<const char *>(src);
  const int ranks = n->ranks;
  return run(d, n, "all-to-all", [&](ncclComm_t c) {
    return group([&] {
      ncclResult_t r = ncclSuccess;
      for (int i = 0; i < ranks && !wrong(r); i++) {
        if (send_bytes[i] > 0) r = ncclSend(from + send_at[i], static_cast<size_t>(send_bytes[i]), ncclInt8, i, c, s->s);
        if (recv_bytes[i] > 0 && !wrong(r)) r = ncclRecv(to + recv_at[i], static_cast<size_t>(recv_bytes[i]), ncclInt8, i, c, s->s);
      }
      return r;
    });
  });
}

int32_t nccl_all_reduce(uly_device *d, uly_nccl *n, uly_stream *s, void *x, int64_t count, int32_t dtype, int32_t how) {
  static const struct { int32_t dtype; ncclDataType_t type; bool real; } types[] = {
      {ULY_F32, ncclFloat32, true}, {ULY_F64, ncclFloat64, true}, {ULY_BF16, ncclBfloat16, true}, {ULY_I32, ncclInt32, false}, {ULY_I64, ncclInt64, false}};
  static const ncclRedOp_t ops[] = {ncclSum, ncclMax, ncclMin};
  if (how < 0 || how > 2 || count < 0) return fail(d, ULY_INVALID_ARGUMENT, "NCCL all-reduce of %lld elements by operation %d", (long long)count, how);
  for (const auto &t : types) {
    if (t.dtype != dtype) continue;
    if (t.real && how != 0) return fail(d, ULY_UNSUPPORTED, "NCCL all-reduce: its maximum and minimum of floating-point numbers lose a NaN: gather and reduce instead");
    if (count == 0) return ULY_OK;
    return run(d, n, "all-reduce", [&](ncclComm_t c) { return ncclAllReduce(x, x, static_cast<size_t>(count), t.type, ops[how], c, s->s); });
  }
  return fail(d, ULY_UNSUPPORTED, "NCCL all-reduce of type %d: F32, F64, BF16, I32 and I64 are served", dtype);
}

int32_t nccl_broadcast(uly_device *d, uly_nccl *n, uly_stream *s, void *x, int64_t bytes, int32_t root) {
  if (root < 0 || root >= n->ranks || bytes < 0) return fail(d, ULY_INVALID_ARGUMENT, "NCCL broadcast of %lld bytes from rank %d of %d", (long long)bytes, root, n->ranks);
  if (bytes == 0) return ULY_OK;
  return run(d, n, "broadcast", [&](ncclComm_t c) { return ncclBroadcast(x, x, static_cast<size_t>(bytes), ncclInt8, root, c, s->s); });
}

int32_t nccl_send_recv(uly_device *d, uly_nccl *n, uly_stream *s, void *recv, int64_t recv_bytes, int32_t from, const void *send, int64_t send_bytes, int32_t to) {
  if (from >= n->ranks || to >= n->ranks) return fail(d, ULY_INVALID_ARGUMENT, "NCCL: receive from rank %d, send to rank %d of %d", from, to, n->ranks);
  const bool sends = to >= 0 && send_bytes > 0, receives = from >= 0 && recv_bytes > 0;
  if (!sends && !receives) return ULY_OK;
  return run(d, n, "send and receive", [&](ncclComm_t c) {
    return group([&] {
      ncclResult_t r = sends ? ncclSend(send, static_cast<size_t>(send_bytes), ncclInt8, to, c, s->s) : ncclSuccess;
      if (receives && !wrong(r)) r = ncclRecv(recv, static_cast<size_t>(recv_bytes), ncclInt8, from, c, s->s);
      return r;
    });
  });
}

#endif
