//go:build mpi

// The functions of the table (mpi_table.h): the only file that includes mpi.h. With the tag mpi it
// is compiled into the program. make mpi-shim compiles it alone, with mpicc, into
// libulysses_mpi_*.so.

#define _GNU_SOURCE
#include "mpi_table.h"

#include <mpi.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif
#include <stdlib.h>
#include <string.h>
#include <time.h>

// MPI guarantees tags up to 32767. An all-to-all uses TAG_ALLTOALL + sequence % ALLTOALL_TAGS.
enum { TAG_SENDRECV = 1, TAG_ALLTOALL = 2, ALLTOALL_TAGS = 16384 };

struct umpi_pending {
  MPI_Request *requests; // one receive for each sender, then the other receives, then sends
  MPI_Status *statuses;
  int *expected;       // by receive: bytes
  int count, capacity; // requests, allocated requests
  int receives;        // all receives
  int senders;         // receives whose arrival shows that their sender has started the call
};

#define TRY(call)                     \
  do {                                \
    int e_ = (call);                  \
    if (e_ != MPI_SUCCESS) return e_; \
  } while (0)

static MPI_Comm to_mpi(umpi_comm c) { return (MPI_Comm)(intptr_t)c; }
static umpi_comm from_mpi(MPI_Comm c) { return (umpi_comm)(intptr_t)c; }

// The thread level is below MPI_THREAD_SERIALIZED: only the thread that started MPI may call it.
static int own_thread = 0;
static int started_here = 0; // call_start started MPI, so call_end ends it

// check_state returns an error for a call after MPI_Finalize or on the wrong thread. MPI itself
// would end the process.
static int check_state(void) {
  int ended = 0, same = 1;
  TRY(MPI_Finalized(&ended));
  if (ended) return UMPI_ENDED;
  if (own_thread) TRY(MPI_Is_thread_main(&same));
  return same ? MPI_SUCCESS : UMPI_THREAD;
}

static int call_state(int *initialized, int *finalized, int *level) {
  int l = MPI_THREAD_SINGLE;
  *level = 0;
  TRY(MPI_Initialized(initialized));
  TRY(MPI_Finalized(finalized));
  if (!*initialized || *finalized) return MPI_SUCCESS;
  TRY(MPI_Query_thread(&l));
  *level = l == MPI_THREAD_MULTIPLE ? 3 : l == MPI_THREAD_SERIALIZED ? 2 : l == MPI_THREAD_FUNNELED ? 1 : 0;
  own_thread = *level < 2;
  return MPI_SUCCESS;
}

static int copy_text(const char *full, int n, char *text, int size) {
  if (n > size - 1) n = size - 1;
  memcpy(text, full, n);
  text[n] = 0;
  return MPI_SUCCESS;
}

static int call_device_memory(int *yes) {
// the header declares the query; the library answers at run time
#if defined(MPIX_CUDA_AWARE_SUPPORT)
  *yes = MPIX_Query_cuda_support();
#else
  *yes = 0;
#endif
  return MPI_SUCCESS;
}

static int call_library(char *text, int size) {
  char full[MPI_MAX_LIBRARY_VERSION_STRING];
  int n = 0;
  if (MPI_Get_library_version(full, &n) != MPI_SUCCESS) n = 0;
  return copy_text(full, n, text, size);
}

static int call_end(void) {
  int ended = 0;
  TRY(MPI_Finalized(&ended));
  if (!started_here || ended) return MPI_SUCCESS;
  return MPI_Finalize();
}

// exiting runs when the process exits. After exit(0) it ends MPI. After another code it does not,
// because MPI_Finalize would wait for the other ranks; the launcher ends them.
static void exiting(int code, void *unused) {
  (void)unused;
  if (code == 0) call_end();
}

static int call_start(int level) {
  static const int levels[] = {MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE};
  int granted = 0;
  TRY(MPI_Init_thread(NULL, NULL, levels[level < 0 ? 0 : level > 3 ? 3 : level], &granted));
  started_here = 1;
  return on_exit(exiting, NULL) == 0 ? MPI_SUCCESS : MPI_ERR_NO_MEM;
}

static int call_error_text(int code, char *text, int size) {
  char full[MPI_MAX_ERROR_STRING];
  int n = 0, ended = 0;
  if (MPI_Finalized(&ended) != MPI_SUCCESS || ended || MPI_Error_string(code, full, &n) != MPI_SUCCESS) n = 0;
  return copy_text(full, n, text, size);
}

static int call_abort(int code) {
  int ended = 0;
  TRY(MPI_Finalized(&ended));
  return ended ? UMPI_ENDED : MPI_Abort(MPI_COMM_WORLD, code);
}

// An error on a host program's communicator ends the process, unless the error handler is replaced.
// A guard replaces it during one call and restores it afterwards.
typedef struct {
  MPI_Comm c;
  MPI_Errhandler before;
} guard;

static int guard_begin(guard *g, MPI_Comm c) {
  g->c = c;
  TRY(MPI_Comm_get_errhandler(c, &g->before));
  return MPI_Comm_set_errhandler(c, MPI_ERRORS_RETURN);
}

static int guard_end(guard *g) {
  TRY(MPI_Comm_set_errhandler(g->c, g->before));
  return MPI_Errhandler_free(&g->before);
}

static int duplicate(MPI_Comm c, umpi_comm *out) {
  guard g;
  MPI_Comm made = MPI_COMM_NULL;
  TRY(guard_begin(&g, c));
  int code = MPI_Comm_dup(c, &made);
  TRY(guard_end(&g));
  TRY(code);
  *out = from_mpi(made);
  return MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
}

static int call_world(umpi_comm *out) {
  TRY(check_state());
  return duplicate(MPI_COMM_WORLD, out);
}

// check_handle checks a communicator that a caller passed. MPI reports a wrong handle as an error
// on MPI_COMM_WORLD or, since MPI 4, on MPI_COMM_SELF.
static int check_handle(MPI_Comm c) {
  guard world, self;
  int inter = 0;
  if (c == MPI_COMM_NULL || c == (MPI_Comm)0) return UMPI_NULL;
  TRY(guard_begin(&world, MPI_COMM_WORLD));
  TRY(guard_begin(&self, MPI_COMM_SELF));
  int code = MPI_Comm_test_inter(c, &inter);
  TRY(guard_end(&self));
  TRY(guard_end(&world));
  if (code != MPI_SUCCESS) return UMPI_NULL;
  return inter ? UMPI_INTER : MPI_SUCCESS;
}

static int call_from(int32_t fortran, umpi_comm *out) {
  TRY(check_state());
  MPI_Comm c = MPI_Comm_f2c((MPI_Fint)fortran);
  TRY(check_handle(c));
  return duplicate(c, out);
}

static int call_fortran(umpi_comm c, int32_t *out) {
  TRY(check_state());
  *out = (int32_t)MPI_Comm_c2f(to_mpi(c));
  return MPI_SUCCESS;
}

static int call_identify(umpi_comm c, int *rank, int *size) {
  TRY(check_state());
  TRY(MPI_Comm_rank(to_mpi(c), rank));
  return MPI_Comm_size(to_mpi(c), size);
}

static int call_split(umpi_comm c, int color, int key, umpi_comm *out, int *none) {
  MPI_Comm made = MPI_COMM_NULL;
  TRY(check_state());
  TRY(MPI_Comm_split(to_mpi(c), color < 0 ? MPI_UNDEFINED : color, key, &made));
  *none = made == MPI_COMM_NULL;
  *out = from_mpi(made);
  return *none ? MPI_SUCCESS : MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
}

static int call_release(umpi_comm c) {
  MPI_Comm gone = to_mpi(c);
  TRY(check_state());
  return MPI_Comm_free(&gone);
}

static int call_barrier(umpi_comm c) {
  TRY(check_state());
  return MPI_Barrier(to_mpi(c));
}

static int call_broadcast(umpi_comm c, void *data, int bytes, int root) {
  TRY(check_state());
  return MPI_Bcast(data, bytes, MPI_BYTE, root, to_mpi(c));
}

static int call_allgather(umpi_comm c, const void *send, int bytes, void *recv) {
  TRY(check_state());
  return MPI_Allgather(send, bytes, MPI_BYTE, recv, bytes, MPI_BYTE, to_mpi(c));
}

static int call_allgatherv(umpi_comm c, void *all, const int *counts, const int *offsets) {
  TRY(check_state());
  return MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_BYTE, all, counts, offsets, MPI_BYTE, to_mpi(c));
}

static int call_pending_new(umpi_pending **out) {
  *out = calloc(1, sizeof **out);
  return *out == NULL ? MPI_ERR_NO_MEM : MPI_SUCCESS;
}

static int call_pending_free(umpi_pending *p) {
  if (p == NULL) return MPI_SUCCESS;
  free(p->requests);
  free(p->statuses);
  free(p->expected);
  free(p);
  return MPI_SUCCESS;
}

// messages_of returns the number of messages of at most limit bytes.
static int64_t messages_of(int64_t bytes, int64_t limit) { return (bytes + limit - 1) / limit; }

static int smaller(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

// reserve clears p and allocates memory for the given number of messages.
static int reserve(umpi_pending *p, int64_t messages) {
  p->count = p->receives = p->senders = 0;
  if (messages <= p->capacity) return MPI_SUCCESS;
  if (messages > INT32_MAX / 2) return MPI_ERR_COUNT;
  size_t n = (size_t)messages;
  free(p->requests);
  free(p->statuses);
  free(p->expected);
  p->requests = malloc(n * sizeof *p->requests);
  p->statuses = malloc(n * sizeof *p->statuses);
  p->expected = malloc(n * sizeof *p->expected);
  p->capacity = p->requests && p->statuses && p->expected ? (int)n : 0;
  return p->capacity ? MPI_SUCCESS : MPI_ERR_NO_MEM;
}

// Both ranks of a block know its bytes, so they agree on the messages: a block of up to UMPI_SMALL
// bytes is one message. A larger one is an empty message and messages of at most limit bytes. MPI
// keeps the order of messages between two ranks, so all messages of a block have the same tag.
static int is_small(int64_t bytes, int64_t limit) { return bytes <= smaller(limit, UMPI_SMALL); }

// block_messages returns the number of messages of a block.
static int64_t block_messages(int64_t bytes, int64_t limit) {
  return is_small(bytes, limit) ? bytes > 0 : 1 + messages_of(bytes, limit);
}

static int receive_message(MPI_Comm c, char *data, int n, int from, int tag, umpi_pending *p) {
  p->expected[p->receives++] = n;
  return MPI_Irecv(data, n, MPI_BYTE, from, tag, c, &p->requests[p->count++]);
}

// receive_first posts the receive of the first message of a block. It is called for all blocks
// before receive_rest, because the first messages are the first requests.
static int receive_first(MPI_Comm c, char *data, int64_t bytes, int from, int tag, int64_t limit, umpi_pending *p) {
  if (bytes == 0) return MPI_SUCCESS;
  p->senders++;
  return receive_message(c, data, is_small(bytes, limit) ? (int)bytes : 0, from, tag, p);
}

static int receive_rest(MPI_Comm c, char *data, int64_t bytes, int from, int tag, int64_t limit, umpi_pending *p) {
  if (is_small(bytes, limit)) return MPI_SUCCESS;
  for (int64_t at = 0; at < bytes; at += limit)
    TRY(receive_message(c, data + at, smaller(limit, bytes - at), from, tag, p));
  return MPI_SUCCESS;
}

static int send(MPI_Comm c, const char *data, int64_t bytes, int to, int tag, int64_t limit, umpi_pending *p) {
  if (!is_small(bytes, limit)) TRY(MPI_Isend(data, 0, MPI_BYTE, to, tag, c, &p->requests[p->count++]));
  for (int64_t at = 0; at < bytes; at += limit)
    TRY(MPI_Isend(data + at, smaller(limit, bytes - at), MPI_BYTE, to, tag, c, &p->requests[p->count++]));
  return MPI_SUCCESS;
}

static int is_truncated(int code) {
  int class = MPI_SUCCESS;
  return MPI_Error_class(code, &class) == MPI_SUCCESS && class == MPI_ERR_TRUNCATE;
}

// check_received returns the first error of the first n requests, which are complete, and
// UMPI_LENGTH - r if a message of rank r was too short or too long. code is the result of
// MPI_Waitall or MPI_Testall.
static int check_received(umpi_pending *p, int n, int code) {
  if (code == MPI_ERR_IN_STATUS)
    for (int i = 0; i < n; i++) {
      int fault = p->statuses[i].MPI_ERROR;
      if (i < p->receives && is_truncated(fault)) return UMPI_LENGTH - p->statuses[i].MPI_SOURCE;
      if (fault != MPI_SUCCESS && fault != MPI_ERR_PENDING) return fault;
    }
  TRY(code);
  for (int i = 0; i < p->receives; i++) {
    int bytes = 0;
    TRY(MPI_Get_count(&p->statuses[i], MPI_BYTE, &bytes));
    if (bytes != p->expected[i]) return UMPI_LENGTH - p->statuses[i].MPI_SOURCE;
  }
  return MPI_SUCCESS;
}

static int call_alltoall_start(umpi_comm c, int rank, int size, const char *s, const int64_t *soffsets,
                               const int64_t *sbytes, char *r, const int64_t *roffsets, const int64_t *rbytes,
                               int64_t sequence, int64_t limit, umpi_pending *p) {
  int64_t messages = 0;
  TRY(check_state());
  int tag = TAG_ALLTOALL + (int)(sequence % ALLTOALL_TAGS);
  for (int j = 0; j < size; j++) messages += block_messages(sbytes[j], limit) + block_messages(rbytes[j], limit);
  TRY(reserve(p, messages));
  for (int k = 1; k < size; k++) {
    int j = (rank - k + size) % size;
    TRY(receive_first(to_mpi(c), r + roffsets[j], rbytes[j], j, tag, limit, p));
  }
  for (int k = 1; k < size; k++) {
    int j = (rank - k + size) % size;
    TRY(receive_rest(to_mpi(c), r + roffsets[j], rbytes[j], j, tag, limit, p));
  }
  for (int k = 1; k < size; k++) { // ranks start with different peers
    int j = (rank + k) % size;
    TRY(send(to_mpi(c), s + soffsets[j], sbytes[j], j, tag, limit, p));
  }
  if (sbytes[rank] > 0 && s + soffsets[rank] != r + roffsets[rank])
    memcpy(r + roffsets[rank], s + soffsets[rank], sbytes[rank]);
  return MPI_SUCCESS;
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// finish waits for the first message of each sender, and then for all other messages. They move
// during the first wait as well.
static int finish(umpi_pending *p, double *waited) {
  int k = p->senders;
  double began = seconds();
  int code = MPI_Waitall(k, p->requests, p->statuses);
  *waited = seconds() - began;
  if (code == MPI_SUCCESS) {
    code = MPI_Waitall(p->count - k, p->requests + k, p->statuses + k);
    k = p->count;
  }
  return check_received(p, k, code);
}

static int call_wait(umpi_pending *p, double *waited) {
  *waited = 0;
  TRY(check_state());
  return finish(p, waited);
}

static int call_test(umpi_pending *p, int *done) {
  if (p->count == 0) { // complete since an earlier call
    *done = 1;
    return MPI_SUCCESS;
  }
  TRY(check_state());
  int code = MPI_Testall(p->count, p->requests, done, p->statuses);
  if (code == MPI_SUCCESS && !*done) return MPI_SUCCESS;
  code = check_received(p, p->count, code);
  p->count = p->receives = p->senders = 0;
  return code;
}

static int call_sendrecv(umpi_comm c, char *recv, int64_t rbytes, int from, const char *data, int64_t sbytes, int to,
                         int64_t limit, umpi_pending *p, double *waited) {
  *waited = 0;
  TRY(check_state());
  if (from < 0) rbytes = 0;
  if (to < 0) sbytes = 0;
  TRY(reserve(p, block_messages(rbytes, limit) + block_messages(sbytes, limit)));
  TRY(receive_first(to_mpi(c), recv, rbytes, from, TAG_SENDRECV, limit, p));
  TRY(receive_rest(to_mpi(c), recv, rbytes, from, TAG_SENDRECV, limit, p));
  TRY(send(to_mpi(c), data, sbytes, to, TAG_SENDRECV, limit, p));
  return finish(p, waited);
}

#if defined(OPEN_MPI)
#define HEADERS "Open MPI"
#elif defined(MPICH_VERSION)
#define HEADERS "MPICH"
#else
#define HEADERS ""
#endif

__attribute__((visibility("default"))) const umpi_api *umpi_table(uint32_t want, uint32_t *have) {
#define ENTRY(name, parameters, arguments) .name = call_##name,
  static const umpi_api table = {.abi = UMPI_ABI, .size = sizeof table, .headers = HEADERS, UMPI_CALLS(ENTRY)};
#undef ENTRY
  *have = UMPI_ABI;
  return want == UMPI_ABI ? &table : NULL;
}
