// Ranks whose calls differ: workspaces that were not reserved, ranks without rows, and invalid
// arguments on one rank. It needs at least two ranks.
#include "ranks.h"

static ulysses_plan *plan;
static ulysses_batch *batch;
static int rank, size;

// REFUSED: rank `at` makes an invalid call, and the other ranks a valid one. All get the same
// status and a message that names the rank, and the context still works.
#define REFUSED(at, bad, good)                                                    \
  do {                                                                            \
    ulysses_status got = rank == (at) ? (bad) : (good);                           \
    char want[16];                                                                \
    snprintf(want, sizeof want, "rank %d", (at));                                 \
    CHECK(got == ULYSSES_INVALID_ARGUMENT && strstr(ulysses_last_error(), want)); \
    still_works(c);                                                               \
  } while (0)

static void still_works(ulysses_context *c) {
  double sum = 1;
  int64_t count = 1;
  OK(ulysses_loss_reduce(c, &sum, &count, NULL));
  CHECK(count == size);
}

// make creates `plan` and `batch`, and destroy destroys them.
static void make(ulysses_context *c, int64_t heads, int64_t dim, int64_t rows, int64_t max_tokens) {
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  d.dtype = ULYSSES_F32, d.heads = heads, d.head_dim = dim, d.max_tokens = max_tokens, bd.batch = 1,
  bd.rows = rows;
  OK(ulysses_attention_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
}

static void destroy(void) { ulysses_plan_destroy(plan), ulysses_batch_destroy(batch); }

static ulysses_tensor matrix(int64_t *shape, int ndim, int which) {
  int64_t n = 1;
  for (int i = 0; i < ndim; i++) n *= shape[i];
  float *x = allocate((uint64_t)n * 4 + 4);
  for (int64_t i = 0; i < n; i++) x[i] = number(which, i);
  return ulysses_tensor_of(x, ULYSSES_CPU, 0, ULYSSES_F32, ndim, shape, NULL);
}

// A layer and a reshard without a workspace, for which the ranks' contexts need different amounts
// of memory.
static void without_workspace(ulysses_context *c) {
  enum { HIDDEN = 256 };
  int64_t rows = rank ? 1 : 1000, total = 1000 + size - 1;
  make(c, 2, 16, rows, 1500);
  int64_t xs[3] = {1, rows, HIDDEN}, ws[2] = {32, HIDDEN}, os[2] = {HIDDEN, 32};
  ulysses_tensor x = matrix(xs, 3, 1), w = matrix(ws, 2, 2), wo = matrix(os, 2, 3),
                 y = matrix(xs, 3, 4), z = matrix(xs, 3, 5);
  ulysses_attention_layer_args a;
  ULYSSES_INIT(&a);
  a.hidden = HIDDEN, a.x = &x, a.wq = a.wk = a.wv = &w, a.wo = &wo, a.y = &y;
  OK(ulysses_attention_layer_forward(plan, batch, &a));
  ulysses_sizes s;
  ULYSSES_INIT(&s);
  OK(ulysses_attention_layer_sizes(plan, batch, &a, &s));
  a.y = &z, a.workspace = allocate(s.workspace), a.workspace_bytes = s.workspace;
  OK(ulysses_attention_layer_forward(plan, batch, &a));
  CHECK(memcmp(y.data, z.data, (size_t)(rows * HIDDEN) * 4) == 0);
  ulysses_sizes heads;
  ULYSSES_INIT(&heads);
  OK(ulysses_plan_sizes(plan, batch, &heads));
  int64_t in_shape[4] = {1, rows, 2, 64},
          out_shape[4] = {1, total, heads.head_hi - heads.head_lo, 64};
  ulysses_tensor in = matrix(in_shape, 4, 6);
  const ulysses_tensor *ins[16];
  ulysses_tensor outs[16], *to[16];
  for (int i = 0; i < 16; i++) ins[i] = &in, outs[i] = matrix(out_shape, 4, 7), to[i] = &outs[i];
  ulysses_reshard_args r;
  ULYSSES_INIT(&r);
  r.n = 16, r.in = ins, r.out = to;
  OK(ulysses_seq_to_heads(plan, batch, &r));
  ulysses_request *q;
  OK(ulysses_seq_to_heads_start(plan, batch, &r, &q));
  OK(ulysses_request_wait(q));
  for (int i = 0; i < 16; i++) free(outs[i].data);
  free(in.data), free(x.data), free(w.data), free(wo.data), free(y.data), free(z.data),
      free(a.workspace);
  destroy();
}

// A rank without rows may have any strides: array libraries give empty arrays products of extents,
// or zeros.
static void without_rows(ulysses_context *c) {
  int64_t R = rank ? 0 : 8, shape[4] = {1, R, 4, 16}, products[4] = {4 * R * 16, 16, R * 16, 1},
          zeros[4] = {0, 0, 0, 0};
  make(c, 4, 16, R, 0);
  float *x[4];
  ulysses_tensor t[4];
  for (int kind = 0; kind < 2; kind++) {
    for (int i = 0; i < 4; i++) {
      x[i] = allocate((uint64_t)(R * 64) * 4);
      t[i] = ulysses_tensor_of(x[i], ULYSSES_CPU, 0, ULYSSES_F32, 4, shape,
                               rank ? (kind ? zeros : products) : NULL);
      for (int64_t k = 0; k < R * 64; k++) x[i][k] = number(i, k);
    }
    ulysses_attention_args a;
    ULYSSES_INIT(&a);
    a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3];
    OK(ulysses_attention_forward(plan, batch, &a));
    for (int i = 0; i < 4; i++) free(x[i]);
  }
  destroy();
}

static ulysses_status copies(void *user, const ulysses_local_call *a) {
  (void)user;
  size_t n = (size_t)(a->q->shape[0] * a->q->shape[1] * a->q->shape[2] * a->q->shape[3]) * 4;
  if (!a->backward) memcpy(a->out->data, a->v->data, n);
  else memcpy(a->dv->data, a->dout->data, n), memset(a->dq->data, 0, n), memset(a->dk->data, 0, n);
  return ULYSSES_OK;
}

// Invalid arguments on one rank, in calls with a callback and in calls without any valid handle.
// The process has no other context of several ranks.
static void alone(ulysses_context *c) {
  make(c, 4, 8, 3, 0);
  int64_t shape[4] = {1, 3, 4, 8};
  ulysses_tensor t[8];
  for (int i = 0; i < 8; i++) t[i] = matrix(shape, 4, i);
  ulysses_sizes s;
  ULYSSES_INIT(&s);
  OK(ulysses_local_sizes(plan, batch, &s));
  ulysses_attention_args a, no_q, saved, short_out;
  ulysses_attention_grads g, no_dv, short_dk;
  ULYSSES_INIT(&a);
  ULYSSES_INIT(&g);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3], a.saved = allocate(s.saved),
  a.saved_bytes = s.saved;
  g.dout = &t[4], g.dq = &t[5], g.dk = &t[6], g.dv = &t[7];
  no_q = saved = a, no_dv = g, no_q.q = NULL, saved.saved = NULL, saved.saved_bytes = 0,
  no_dv.dv = NULL;
  int64_t fewer[4] = {1, 2, 4, 8};
  ulysses_tensor out = floats(t[3].data, fewer), dk = floats(t[6].data, fewer);
  short_out = a, short_out.out = &out, short_dk = g, short_dk.dk = &dk;
  for (int at = 0; at < size; at++) {
    REFUSED(at, ulysses_local_forward(plan, batch, &short_out, copies, NULL),
            ulysses_local_forward(plan, batch, &a, copies, NULL));
    OK(ulysses_local_forward(plan, batch, &a, copies, NULL));
    REFUSED(at, ulysses_local_backward(plan, batch, &a, &short_dk, copies, NULL),
            ulysses_local_backward(plan, batch, &a, &g, copies, NULL));
    REFUSED(at, ulysses_local_forward(plan, batch, &a, NULL, NULL),
            ulysses_local_forward(plan, batch, &a, copies, NULL));
    REFUSED(at, ulysses_local_forward(plan, batch, &no_q, copies, NULL),
            ulysses_local_forward(plan, batch, &a, copies, NULL));
    OK(ulysses_local_forward(plan, batch, &a, copies, NULL));
    REFUSED(at, ulysses_local_backward(plan, batch, &a, &no_dv, copies, NULL),
            ulysses_local_backward(plan, batch, &a, &g, copies, NULL));
    REFUSED(at, ulysses_local_backward(plan, batch, &saved, &g, copies, NULL),
            ulysses_local_backward(plan, batch, &a, &g, copies, NULL));
    OK(ulysses_local_forward(plan, batch, &a, copies, NULL));
    OK(ulysses_local_backward(plan, batch, &a, &g, copies, NULL));
    double sum = 1;
    int64_t count = 1;
    saved.saved = NULL, saved.saved_bytes = 0;
    REFUSED(at, ulysses_attention_forward(NULL, NULL, NULL),
            ulysses_attention_forward(plan, batch, &saved));
    REFUSED(at, ulysses_loss_reduce((ulysses_context *)plan, &sum, &count, NULL),
            ulysses_loss_reduce(c, &sum, &count, NULL));
    REFUSED(at, ulysses_halo_forward(NULL, NULL, NULL),
            ulysses_attention_forward(plan, batch, &saved));
  }
  for (int i = 0; i < 8; i++) free(t[i].data);
  free(a.saved);
  destroy();
}

// One rank waits for a request with an invalid handle, or for another request, or makes another
// call. No request changes, so all are complete when the ranks wait for them again. The messages
// are so large that MPI sends them only while both ranks are in a call.
static void requests(ulysses_context *c) {
  enum { ROWS = 900, DIM = 96 };
  make(c, 6, DIM, ROWS, 0);
  ulysses_sizes s;
  ULYSSES_INIT(&s);
  OK(ulysses_plan_sizes(plan, batch, &s));
  int64_t in_shape[4] = {1, ROWS, 6, DIM},
          out_shape[4] = {1, ROWS * size, s.head_hi - s.head_lo, DIM};
  ulysses_tensor in[2], out[2], want = matrix(out_shape, 4, 9);
  ulysses_reshard_args r[2];
  const ulysses_tensor *from[2] = {&in[0], &in[1]};
  ulysses_tensor *to[2] = {&out[0], &out[1]}, *wanted = &want;
  ulysses_request *q[2];
  for (int i = 0; i < 2; i++) in[i] = matrix(in_shape, 4, i), out[i] = matrix(out_shape, 4, 7);
  uint64_t bytes = (uint64_t)(ROWS * size * (s.head_hi - s.head_lo) * DIM) * 4;
  for (int at = 0; at < size; at++) {
    for (int i = 0; i < 2; i++) {
      ULYSSES_INIT(&r[i]);
      r[i].n = 1, r[i].in = &from[i], r[i].out = &to[i];
      memset(out[i].data, 0, bytes);
      OK(ulysses_seq_to_heads_start(plan, batch, &r[i], &q[i]));
    }
    REFUSED(at, ulysses_request_wait(NULL), ulysses_request_wait(q[0]));
    REFUSED(at, ulysses_request_wait((ulysses_request *)plan), ulysses_request_wait(q[0]));
    REFUSED(at, ulysses_request_wait(q[1]), ulysses_request_wait(q[0]));
    REFUSED(at, ulysses_attention_forward(plan, batch, NULL), ulysses_request_wait(q[0]));
    for (int i = 0; i < 2; i++) {
      OK(ulysses_request_wait(q[i]));
      r[i].out = &wanted;
      OK(ulysses_seq_to_heads(plan, batch, &r[i]));
      CHECK(memcmp(want.data, out[i].data, bytes) == 0);
      IS(ulysses_request_wait(q[i]), ULYSSES_INVALID_ARGUMENT); // it was destroyed
    }
  }
  for (int i = 0; i < 2; i++) free(in[i].data), free(out[i].data);
  free(want.data);
  destroy();
}

typedef struct {
  MPI_Comm comm;
} collectives;
static int32_t allgather(void *user, const void *in, void *out, int64_t bytes) {
  return MPI_Allgather(in, (int)bytes, MPI_BYTE, out, (int)bytes, MPI_BYTE,
                       ((collectives *)user)->comm);
}

// One rank gives an invalid description of the host's collectives.
static void described(void) {
  collectives u = {MPI_COMM_WORLD};
  ulysses_host_comm h;
  ulysses_context *none = NULL;
  for (int kind = 0; kind < 4; kind++) {
    ULYSSES_INIT(&h);
    h.rank = rank, h.size = size, h.user = &u, h.allgather = allgather;
    if (rank == size - 1 && kind == 0) h.reserved = 1;
    if (rank == size - 1 && kind == 1) h.rank = size + 3;
    if (rank == size - 1 && kind == 2) h.rank = 0; // two ranks have the number 0
    // kind 3: alltoallv is NULL on all ranks
    IS(ulysses_context_create_host(&h, NULL, &none), ULYSSES_INVALID_ARGUMENT);
    CHECK(none == NULL);
  }
}

int main(int argc, char **argv) {
  ulysses_context *own, *c;
  open_ranks(&argc, &argv, &rank, &size, &own, &c);
  if (size < 2) return 2;
  without_workspace(c);
  without_rows(c);
  alone(c);
  requests(c);
  described();
  ulysses_context_destroy(c), ulysses_context_destroy(own);
  MPI_Finalize();
  if (rank == 0) printf("ok agree %d\n", size);
  return 0;
}
