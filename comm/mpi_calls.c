//go:build mpi

// Compiled into the program under the tag mpi, and by mpicc alone into libulysses_mpi_*.so (make
// mpi-shim).

#define _GNU_SOURCE
#include "mpi_table.h"

#include <mpi.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#endif
#include <stdlib.h>
#include <string.h>

enum { TAG_PAIR = 1, TAG_EXCHANGE = 2, TAGS = 16384 }; // every library has tags up to 32767

struct umpi_pending {
  MPI_Request *requests; // receives first
  MPI_Status *statuses;
  int *expected; // bytes, of the receives
  int count, receives, capacity;
};

#define TRY(call)                     \
  do {                                \
    int e_ = (call);                  \
    if (e_ != MPI_SUCCESS) return e_; \
  } while (0)

static MPI_Comm of(umpi_comm c) { return (MPI_Comm)(intptr_t)c; }
static umpi_comm handle(MPI_Comm c) { return (umpi_comm)(intptr_t)c; }

// below MPI_THREAD_SERIALIZED all calls are of the thread that started MPI
static int own_thread = 0;
static int started_here = 0; // so ended here

// allowed looks before every call at what would end the process inside MPI.
static int allowed(void) {
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
// the headers know the question; the library that runs has the answer
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

// exiting ends MPI with a process that is content. One that is not leaves it to the launcher to end
// the others, for whom MPI_Finalize would wait.
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

// Errors of communicators that are not ours end the process unless their handler is changed; it is
// put back at once.
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
  *out = handle(made);
  return MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
}

static int call_world(umpi_comm *out) {
  TRY(allowed());
  return duplicate(MPI_COMM_WORLD, out);
}

// known asks about a handle that a caller gave; a wrong one is an error of MPI_COMM_WORLD or, since
// MPI 4, of MPI_COMM_SELF.
static int known(MPI_Comm c) {
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
  TRY(allowed());
  MPI_Comm c = MPI_Comm_f2c((MPI_Fint)fortran);
  TRY(known(c));
  return duplicate(c, out);
}

static int call_fortran(umpi_comm c, int32_t *out) {
  TRY(allowed());
  *out = (int32_t)MPI_Comm_c2f(of(c));
  return MPI_SUCCESS;
}

static int call_identify(umpi_comm c, int *rank, int *size) {
  TRY(allowed());
  TRY(MPI_Comm_rank(of(c), rank));
  return MPI_Comm_size(of(c), size);
}

static int call_split(umpi_comm c, int color, int key, umpi_comm *out, int *none) {
  MPI_Comm made = MPI_COMM_NULL;
  TRY(allowed());
  TRY(MPI_Comm_split(of(c), color < 0 ? MPI_UNDEFINED : color, key, &made));
  *none = made == MPI_COMM_NULL;
  *out = handle(made);
  return *none ? MPI_SUCCESS : MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN);
}

static int call_release(umpi_comm c) {
  MPI_Comm gone = of(c);
  TRY(allowed());
  return MPI_Comm_free(&gone);
}

static int call_barrier(umpi_comm c) {
  TRY(allowed());
  return MPI_Barrier(of(c));
}

static int call_broadcast(umpi_comm c, void *data, int bytes, int root) {
  TRY(allowed());
  return MPI_Bcast(data, bytes, MPI_BYTE, root, of(c));
}

static int call_allgather(umpi_comm c, const void *send, int bytes, void *recv) {
  TRY(allowed());
  return MPI_Allgather(send, bytes, MPI_BYTE, recv, bytes, MPI_BYTE, of(c));
}

static int call_allgatherv(umpi_comm c, void *all, const int *counts, const int *offsets) {
  TRY(allowed());
  return MPI_Allgatherv(MPI_IN_PLACE, 0, MPI_BYTE, all, counts, offsets, MPI_BYTE, of(c));
}

static int call_alltoall(umpi_comm c, const void *send, void *recv, int bytes) {
  TRY(allowed());
  return MPI_Alltoall(send, bytes, MPI_BYTE, recv, bytes, MPI_BYTE, of(c));
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

static int64_t pieces(int64_t bytes, int64_t piece) { return (bytes + piece - 1) / piece; }

static int smaller(int64_t a, int64_t b) { return (int)(a < b ? a : b); }

// empty makes room for so many messages.
static int empty(umpi_pending *p, int64_t messages) {
  p->count = p->receives = 0;
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

// Messages between two ranks keep their order, so the pieces need no tags of their own.
static int receive(MPI_Comm c, char *data, int64_t bytes, int from, int tag, int64_t piece, umpi_pending *p) {
  for (int64_t at = 0; at < bytes; at += piece) {
    int n = smaller(piece, bytes - at);
    p->expected[p->receives++] = n;
    TRY(MPI_Irecv(data + at, n, MPI_BYTE, from, tag, c, &p->requests[p->count++]));
  }
  return MPI_SUCCESS;
}

static int send(MPI_Comm c, const char *data, int64_t bytes, int to, int tag, int64_t piece, umpi_pending *p) {
  for (int64_t at = 0; at < bytes; at += piece)
    TRY(MPI_Isend(data + at, smaller(piece, bytes - at), MPI_BYTE, to, tag, c, &p->requests[p->count++]));
  return MPI_SUCCESS;
}

// arrived looks at what has come, after all requests are done; code is the outcome of waiting.
static int arrived(umpi_pending *p, int code) {
  if (code == MPI_ERR_IN_STATUS)
    for (int i = 0; i < p->count; i++)
      if (p->statuses[i].MPI_ERROR != MPI_SUCCESS && p->statuses[i].MPI_ERROR != MPI_ERR_PENDING)
        return p->statuses[i].MPI_ERROR;
  TRY(code);
  for (int i = 0; i < p->receives; i++) {
    int n = 0;
    TRY(MPI_Get_count(&p->statuses[i], MPI_BYTE, &n));
    if (n != p->expected[i]) return UMPI_SHORT;
  }
  return MPI_SUCCESS;
}

static int call_exchange_start(umpi_comm c, int rank, int size, const char *s, const int64_t *soffsets,
                               const int64_t *sbytes, char *r, const int64_t *roffsets, const int64_t *rbytes,
                               int64_t sequence, int64_t piece, umpi_pending *p) {
  int64_t messages = 0;
  TRY(allowed());
  int tag = TAG_EXCHANGE + (int)(sequence % TAGS);
  for (int j = 0; j < size; j++) messages += pieces(sbytes[j], piece) + pieces(rbytes[j], piece);
  TRY(empty(p, messages));
  for (int k = 1; k < size; k++) {
    int j = (rank - k + size) % size;
    TRY(receive(of(c), r + roffsets[j], rbytes[j], j, tag, piece, p));
  }
  for (int k = 1; k < size; k++) { // everyone starts with another neighbour
    int j = (rank + k) % size;
    TRY(send(of(c), s + soffsets[j], sbytes[j], j, tag, piece, p));
  }
  if (sbytes[rank] > 0 && s + soffsets[rank] != r + roffsets[rank])
    memcpy(r + roffsets[rank], s + soffsets[rank], sbytes[rank]);
  return MPI_SUCCESS;
}

static int finish(umpi_pending *p) { return arrived(p, MPI_Waitall(p->count, p->requests, p->statuses)); }

static int call_wait(umpi_pending *p) {
  TRY(allowed());
  return finish(p);
}

static int call_test(umpi_pending *p, int *done) {
  if (p->count == 0) { // done before, and its requests are gone
    *done = 1;
    return MPI_SUCCESS;
  }
  TRY(allowed());
  int code = MPI_Testall(p->count, p->requests, done, p->statuses);
  if (code == MPI_SUCCESS && !*done) return MPI_SUCCESS;
  code = arrived(p, code);
  p->count = p->receives = 0;
  return code;
}

static int call_sendrecv(umpi_comm c, char *recv, int64_t rbytes, int from, const char *data, int64_t sbytes, int to,
                         int64_t piece, umpi_pending *p) {
  TRY(allowed());
  if (from < 0) rbytes = 0;
  if (to < 0) sbytes = 0;
  TRY(empty(p, pieces(rbytes, piece) + pieces(sbytes, piece)));
  TRY(receive(of(c), recv, rbytes, from, TAG_PAIR, piece, p));
  TRY(send(of(c), data, sbytes, to, TAG_PAIR, piece, p));
  return finish(p);
}

__attribute__((visibility("default"))) const umpi_api *umpi_table(uint32_t want, uint32_t *have) {
#define ENTRY(name, parameters, arguments) .name = call_##name,
  static const umpi_api table = {.abi = UMPI_ABI, .size = sizeof table, UMPI_CALLS(ENTRY)};
#undef ENTRY
  *have = UMPI_ABI;
  return want == UMPI_ABI ? &table : NULL;
}
