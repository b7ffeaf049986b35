// host.c MODE: a host in C without MPI. The modes are "attention", "hostile", "tiled", "callbacks",
// "overhead", "rounding", "info" (prints ulysses_build_info) and "soak N".
#define _GNU_SOURCE
#include <fenv.h>
#include <sched.h>
#include <time.h>
#include "host.h"

// invalid_tensors: calls of attention with invalid tensors and handles. It destroys both contexts.
static void invalid_tensors(ulysses_context *c, ulysses_context *other) {
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  d.dtype = ULYSSES_F32, d.heads = H, d.head_dim = D;
  bd.batch = 1, bd.seq = S;
  ulysses_plan *plan;
  ulysses_batch *batch, *foreign;
  OK(ulysses_attention_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_create(other, &bd, &foreign));
  CHECK(strstr(ulysses_plan_json(plan), "ulysses"));
  ulysses_attention_args a;
  ULYSSES_INIT(&a);
  int64_t shape[4] = {1, S, H, D};
  static float x[4][S * H * D];
  ulysses_tensor t[4];
  for (int i = 0; i < 4; i++) t[i] = floats(x[i], shape);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3];
  OK(ulysses_attention_forward(plan, batch, &a));
  IS(ulysses_attention_forward(plan, foreign, &a), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_attention_forward((ulysses_plan *)batch, batch, &a), ULYSSES_INVALID_ARGUMENT);
  a.out = &t[0];
  IS(ulysses_attention_forward(plan, batch, &a), ULYSSES_INVALID_ARGUMENT);
  CHECK(strstr(ulysses_last_error(), "overlap"));
  a.out = &t[3];
  shape[1]--; // package sp finds this error, but the message names the C function
  IS(ulysses_attention_forward(plan, batch, &a), ULYSSES_INVALID_ARGUMENT);
  CHECK(strstr(ulysses_last_error(), "ulysses_attention_forward: "));
  shape[1]++;
  t[0].device = ULYSSES_CUDA;
  IS(ulysses_attention_forward(plan, batch, &a), ULYSSES_INVALID_ARGUMENT);
  t[0].device = ULYSSES_CPU;
  int64_t zero[4] = {0, 0, 0, 1};
  t[2].strides = zero;
  IS(ulysses_attention_forward(plan, batch, &a), ULYSSES_INVALID_ARGUMENT);
  CHECK(strstr(ulysses_last_error(), "stride 0"));
  t[2].strides = NULL;
  OK(ulysses_attention_forward(plan, batch, &a));
  ulysses_plan_destroy(plan);
  IS(ulysses_attention_forward(plan, batch, &a), ULYSSES_INVALID_ARGUMENT);
  ulysses_plan_destroy(plan); // a second time: it only sets the message
  CHECK(ulysses_last_error()[0]);
  ulysses_context_destroy(c);
  IS(ulysses_batch_query(batch, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_context_query(c, NULL), ULYSSES_INVALID_ARGUMENT);
  ulysses_context_destroy(other);
}

// hostile: calls with invalid arguments return an error, and the calls after them succeed.
static void hostile(void) {
  ulysses_context *c = NULL, *other = NULL;
  ulysses_options o;
  ULYSSES_INIT(&o);
  IS(ulysses_context_create_local(NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  o.struct_size = 3;
  IS(ulysses_context_create_local(&o, &c), ULYSSES_INVALID_ARGUMENT);
  ULYSSES_INIT(&o);
  o.ring = 2;
  IS(ulysses_context_create_local(&o, &c), ULYSSES_INVALID_ARGUMENT);
  CHECK(strstr(ulysses_last_error(), "ring"));
  OK(ulysses_context_create_local(NULL, &c));
  CHECK(ulysses_last_error()[0] == 0);
  OK(ulysses_context_create_local(NULL, &other));
  IS(ulysses_context_create_host(NULL, NULL, &c), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_context_query(c, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_context_query(NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_context_query((ulysses_context *)(uintptr_t)0x123456789abcdefull, NULL),
     ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_attention_plan(c, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_batch_create(c, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_plan_sizes(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_batch_query(NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_batch_positions(NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_attention_forward(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_attention_backward(NULL, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_seq_to_heads(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_heads_to_seq(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_seq_to_heads_start(NULL, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_heads_to_seq_start(NULL, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_request_wait(NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_reshard_workspace(NULL, NULL, NULL, 1, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_halo_forward(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_halo_backward(c, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_halo_workspace(c, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_loss_reduce(c, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_block_mask(NULL, 1, 1, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_local_forward(NULL, NULL, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_local_backward(NULL, NULL, NULL, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_local_sizes(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_attention_layer_sizes(NULL, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_attention_layer_forward(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_attention_layer_backward(NULL, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_gdn_plan(c, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_gdn_forward(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_gdn_backward(NULL, NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  IS(tiled_compute(NULL), ULYSSES_INVALID_ARGUMENT);
  IS(tiled_compute_backward(NULL), ULYSSES_INVALID_ARGUMENT);
  CHECK(ulysses_plan_json(NULL) == NULL && strstr(ulysses_last_error(), "ulysses_plan_json"));
  CHECK(ulysses_build_info()[0] == '{');
  CHECK(strcmp(ulysses_status_string(ULYSSES_UNSUPPORTED), "unsupported") == 0 &&
        ulysses_status_string(-5)[0]);
  ulysses_context_destroy(NULL), ulysses_plan_destroy(NULL), ulysses_batch_destroy(NULL),
      ulysses_context_abort(NULL, 3);
  invalid_tensors(c, other);
}

// The collectives of a host with one rank.
typedef struct {
  int calls;
} collectives;
static int32_t allgather(void *user, const void *in, void *out, int64_t bytes) {
  collectives *u = user;
  u->calls++;
  memcpy(out, in, (size_t)bytes);
  return 0;
}
static int32_t alltoallv(void *user, const void *in, const int64_t *in_bytes, void *out,
                         const int64_t *out_bytes) {
  (void)user, (void)out_bytes;
  memcpy(out, in, (size_t)in_bytes[0]);
  return 0;
}
static int lines, single;
static void one_thread(void *user, int32_t level, const char *line) {
  (void)user, (void)level, single = strstr(line, "\"threads\":1}") != NULL;
}
static void logged(void *user, int32_t level, const char *line) {
  lines += user == &lines && level == 0 && line[0] == '{';
}

static ulysses_status failing(void *user, const ulysses_local_call *a) {
  (void)a;
  ulysses_context_info info;
  ULYSSES_INIT(&info);
  // a callback must not use the context of the call
  IS(ulysses_context_query(*(ulysses_context **)user, &info), ULYSSES_INVALID_ARGUMENT);
  return ULYSSES_NUMERIC;
}
// copies is the host's attention: out = v.
static ulysses_status copies(void *user, const ulysses_local_call *a) {
  (void)user;
  size_t n = (size_t)(a->q->shape[0] * a->q->shape[1] * a->q->shape[2] * a->q->shape[3]) * 4;
  if (!a->backward) memcpy(a->out->data, a->v->data, n);
  else memcpy(a->dv->data, a->dout->data, n), memset(a->dq->data, 0, n), memset(a->dk->data, 0, n);
  return ULYSSES_OK;
}

// ignores is the host's attention that ignores the error of a call.
static ulysses_status ignores(void *user, const ulysses_local_call *a) {
  IS(ulysses_context_query(NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  return copies(user, a);
}

// callbacks: host collectives, log functions and the host's own attention.
static void callbacks(void) {
  collectives u = {0};
  ulysses_host_comm h;
  ulysses_options o;
  ULYSSES_INIT(&h);
  ULYSSES_INIT(&o);
  h.size = 1, h.user = &u, h.allgather = allgather, h.alltoallv = alltoallv, o.log = logged,
  o.log_user = &lines;
  ulysses_context *c, *alone;
  OK(ulysses_context_create_host(&h, &o, &c));
  CHECK(lines == 1);
  OK(ulysses_context_create_local(NULL, &alone));
  results x = attention(c, 1), y = attention(alone, 1);
  same(x, y);
  free_results(x), free_results(y);
  // The number of threads is that of the affinity mask when the context is created.
  ulysses_context *bound;
  cpu_set_t mask, first;
  CHECK(sched_getaffinity(0, sizeof mask, &mask) == 0);
  CPU_ZERO(&first);
  for (int i = 0; i < CPU_SETSIZE && !CPU_COUNT(&first); i++)
    if (CPU_ISSET(i, &mask)) CPU_SET(i, &first);
  CHECK(sched_setaffinity(0, sizeof first, &first) == 0);
  o.log = one_thread;
  OK(ulysses_context_create_local(&o, &bound));
  CHECK(single && sched_setaffinity(0, sizeof mask, &mask) == 0);
  ulysses_context_destroy(bound);
  ulysses_context *broken = NULL;
  h.rank = 1;
  IS(ulysses_context_create_host(&h, NULL, &broken), ULYSSES_INVALID_ARGUMENT);

  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  d.dtype = ULYSSES_F32, d.heads = H, d.head_dim = D, bd.batch = 1, bd.seq = S;
  ulysses_plan *plan;
  ulysses_batch *batch;
  OK(ulysses_attention_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  ulysses_sizes size;
  ULYSSES_INIT(&size);
  OK(ulysses_local_sizes(plan, batch, &size));
  int64_t shape[4] = {1, S, H, D};
  static float data[8][S * H * D];
  ulysses_tensor t[8];
  for (int i = 0; i < 8; i++) {
    t[i] = floats(data[i], shape);
    for (int j = 0; j < S * H * D; j++) data[i][j] = number(i, j);
  }
  ulysses_attention_args a;
  ulysses_attention_grads g;
  ULYSSES_INIT(&a);
  ULYSSES_INIT(&g);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3], a.saved = allocate(size.saved),
  a.saved_bytes = size.saved;
  a.workspace = allocate(size.workspace), a.workspace_bytes = size.workspace, g.dout = &t[4],
  g.dq = &t[5], g.dk = &t[6], g.dv = &t[7];
  OK(ulysses_local_forward(plan, batch, &a, copies, NULL));
  CHECK(memcmp(data[3], data[2], sizeof data[2]) == 0);
  OK(ulysses_local_backward(plan, batch, &a, &g, copies, NULL));
  CHECK(memcmp(data[7], data[4], sizeof data[4]) == 0 && data[5][7] == 0);
  IS(ulysses_local_forward(plan, batch, &a, failing, &c), ULYSSES_NUMERIC);
  IS(ulysses_local_forward(plan, batch, &a, NULL, &c), ULYSSES_INVALID_ARGUMENT);
  OK(ulysses_local_forward(plan, batch, &a, copies, NULL)); // the context still works
  OK(ulysses_local_forward(plan, batch, &a, ignores, NULL));
  CHECK(ulysses_last_error()[0] == 0);
  free(a.saved), free(a.workspace);
  ulysses_context_destroy(c), ulysses_context_destroy(alone);
}

// What the callbacks of a walk over tiles have seen. fail_at is the tile at which they fail.
typedef struct {
  int calls, last, fail_at;
  int64_t rows;
} walk;
// square computes y = x*x of a tile, and adds x to the sum.
static ulysses_status square(void *user, const ulysses_tile *t, const ulysses_tensor *const *in,
                             ulysses_tensor *const *out) {
  walk *w = user;
  const float *x = (const float *)(const void *)((const char *)in[0]->data + in[0]->byte_offset);
  float *y = (float *)(void *)((char *)out[0]->data + out[0]->byte_offset);
  CHECK(t->index == w->calls && in[0]->shape[0] == t->hi - t->lo);
  // the message of the inner call is appended to the error
  if (w->calls++ == w->fail_at) return ulysses_attention_forward(NULL, NULL, NULL), ULYSSES_NUMERIC;
  w->last = t->index == t->count - 1, w->rows += t->hi - t->lo;
  for (int64_t i = 0; i < in[0]->shape[0] * in[0]->shape[1]; i++)
    y[i] = x[i] * x[i], *(float *)out[1]->data += x[i];
  return ULYSSES_OK;
}
static ulysses_status square_backward(void *user, const ulysses_tile *t,
                                      const ulysses_tensor *const *in,
                                      const ulysses_tensor *const *dout,
                                      ulysses_tensor *const *din) {
  walk *w = user;
  w->calls++, w->last += t->index == t->count - 1;
  CHECK(dout[1] == NULL);
  for (int64_t i = 0; din[0] && i < in[0]->shape[0] * in[0]->shape[1]; i++)
    ((float *)(void *)((char *)din[0]->data + din[0]->byte_offset))[i] =
        2 * ((const float *)(const void *)((const char *)in[0]->data + in[0]->byte_offset))[i] *
        ((const float *)(const void *)((const char *)dout[0]->data + dout[0]->byte_offset))[i];
  return ULYSSES_OK;
}

static ulysses_status count_tiles(void *user, const ulysses_tile *t,
                                  const ulysses_tensor *const *in, ulysses_tensor *const *out) {
  (void)in, (void)out;
  *(int64_t *)user = t->index + 1;
  IS(ulysses_context_query(NULL, NULL), ULYSSES_INVALID_ARGUMENT); // ignored
  return ULYSSES_OK;
}

// odd_elements: a tensor is divided only where every row starts at a byte. Tensors without bits or
// lanes would have the same rows in every tile.
static void odd_elements(void) {
  const struct {
    uint8_t bits;
    uint16_t lanes;
    int64_t width;
    int valid;
  } cases[] = {{32, 1, 3, 1}, {32, 4, 3, 1}, {32, 0, 3, 0}, {0, 1, 3, 0}, {4, 1, 3, 0},
               {4, 1, 4, 1},  {4, 2, 3, 1},  {1, 1, 8, 1},  {1, 1, 12, 0}};
  uint8_t x[256] = {0};
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    int64_t shape[2] = {4, cases[k].width}, tiles = 0;
    ulysses_tensor t = ulysses_tensor_of(x, ULYSSES_CPU, 0, ULYSSES_F32, 2, shape, NULL);
    t.bits = cases[k].bits, t.lanes = cases[k].lanes;
    const ulysses_tensor *in[1] = {&t};
    ulysses_tiled_args a;
    ULYSSES_INIT(&a);
    a.n_in = 1, a.in = in, a.tile_rows = 1, a.forward = count_tiles, a.user = &tiles;
    if (cases[k].valid) CHECK(tiled_compute(&a) == ULYSSES_OK && ulysses_last_error()[0] == 0);
    else IS(tiled_compute(&a), ULYSSES_INVALID_ARGUMENT);
    CHECK(tiles == (cases[k].valid ? 4 : 0));
    CHECK(cases[k].valid || strstr(ulysses_last_error(), "in[0] has"));
  }
}

static void tiled(void) {
  enum { N = 5, W = 3 };
  float x[N * W], y[N * W], sum, dy[N * W], dx[N * W];
  int64_t shape[2] = {N, W}, one[1] = {1};
  for (int i = 0; i < N * W; i++) x[i] = (float)(i + 1), dy[i] = (float)(i % 4);
  ulysses_tensor tx = ulysses_tensor_of(x, 1, 0, ULYSSES_F32, 2, shape, NULL),
                 ty = ulysses_tensor_of(y, 1, 0, ULYSSES_F32, 2, shape, NULL);
  ulysses_tensor ts = ulysses_tensor_of(&sum, 1, 0, ULYSSES_F32, 1, one, NULL),
                 tdy = ulysses_tensor_of(dy, 1, 0, ULYSSES_F32, 2, shape, NULL);
  ulysses_tensor tdx = ulysses_tensor_of(dx, 1, 0, ULYSSES_F32, 2, shape, NULL);
  const ulysses_tensor *in[1] = {&tx}, *dout[2] = {&tdy, NULL};
  ulysses_tensor *out[2] = {&ty, &ts}, *din[1] = {&tdx};
  int32_t out_dim[2] = {0, -1};
  const int64_t cases[][3] = {{1, 0, 5},
                              {2, 0, 3},
                              {7, 0, 1},
                              {0, 0, 1},
                              {2, 8, 4},
                              {2, 300, 150},
                              {INT64_MAX, INT64_MAX, 1}};
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    walk w = {0, 0, -1, 0};
    ulysses_tiled_args a;
    ULYSSES_INIT(&a);
    a.n_in = 1, a.n_out = 2, a.out_dim = out_dim, a.tile_rows = cases[k][0],
    a.max_rows = cases[k][1], a.in = in, a.out = out, a.forward = square, a.user = &w;
    memset(y, 0, sizeof y), sum = 0;
    OK(tiled_compute(&a));
    CHECK(w.calls == cases[k][2] && w.last == 1 && w.rows == N && sum == 120);
    for (int i = 0; i < N * W; i++) CHECK(y[i] == x[i] * x[i]);
    walk back = {0, 0, -1, 0};
    a.dout = dout, a.din = din, a.backward = square_backward, a.user = &back,
    memset(dx, 0, sizeof dx);
    OK(tiled_compute_backward(&a));
    CHECK(back.calls == cases[k][2] && back.last == 1);
    for (int i = 0; i < N * W; i++) CHECK(dx[i] == 2 * x[i] * dy[i]);
    a.din = NULL;
    OK(tiled_compute_backward(&a));
    walk stops = {0, 0, 0, 0};
    a.user = &stops;
    IS(tiled_compute(&a), ULYSSES_NUMERIC);
    CHECK(stops.calls == 1 && strstr(ulysses_last_error(), "numeric) at tile 0 of") &&
          strstr(ulysses_last_error(), "the plan is NULL"));
    a.max_rows = 4;
    IS(tiled_compute(&a), ULYSSES_INVALID_ARGUMENT);
    a.max_rows = -1;
    IS(tiled_compute(&a), ULYSSES_INVALID_ARGUMENT);
    a.max_rows = 0, a.n_in = 99;
    IS(tiled_compute(&a), ULYSSES_INVALID_ARGUMENT);
    a.n_in = 1, a.forward = NULL;
    IS(tiled_compute(&a), ULYSSES_INVALID_ARGUMENT);
  }
  odd_elements();
}

// rounding: results are bitwise equal in every floating-point mode of the calling thread, which is
// the same after the calls.
static void rounding(void) {
  enum { THREADS = 3 };
  ulysses_context *c;
  ulysses_options o;
  ULYSSES_INIT(&o);
  o.threads = THREADS;
  OK(ulysses_context_create_local(&o, &c));
  const results want = attention(c, 1);
  const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  for (size_t i = 0; i < sizeof modes / sizeof *modes; i++) {
    CHECK(fesetround(modes[i]) == 0);
    results r = attention(c, 4);
    CHECK(fegetround() == modes[i] && fesetround(FE_TONEAREST) == 0);
    same(r, want);
    free_results(r);
  }
  free_results(want);
  ulysses_context_destroy(c);
}

// overhead prints the time of calls of the smallest layer: one row, one head, one feature.
static void overhead(void) {
  ulysses_context *c;
  ulysses_options o;
  ULYSSES_INIT(&o);
  o.threads = 1;
  OK(ulysses_context_create_local(&o, &c));
  ulysses_attention_desc d;
  ulysses_batch_desc bd;
  ULYSSES_INIT(&d);
  ULYSSES_INIT(&bd);
  d.dtype = ULYSSES_F32, d.heads = 1, d.head_dim = 1, bd.batch = 1, bd.seq = 1;
  ulysses_plan *plan;
  ulysses_batch *batch;
  OK(ulysses_attention_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  float x[4] = {1, 1, 1, 1};
  int64_t shape[4] = {1, 1, 1, 1};
  ulysses_tensor t[4];
  for (int i = 0; i < 4; i++) t[i] = floats(&x[i], shape);
  ulysses_attention_args a;
  ULYSSES_INIT(&a);
  a.q = &t[0], a.k = &t[1], a.v = &t[2], a.out = &t[3];
  ulysses_context_info info;
  ULYSSES_INIT(&info);
  struct timespec from, to;
  ulysses_sizes size;
  ULYSSES_INIT(&size);
  const int n = 20000;
  const char *names[] = {"ulysses_context_query", "ulysses_plan_sizes of a plan and a batch",
                         "ulysses_attention_forward refused at its first tensor",
                         "ulysses_attention_forward of one number"};
  ulysses_attention_args none = a;
  none.q = NULL;
  for (int what = 0; what < 4; what++) {
    double least = 1e300;
    for (int round = 0; round < 20; round++) {
      clock_gettime(CLOCK_MONOTONIC, &from);
      for (int i = 0; i < n / 20; i++) switch (what) {
          case 0: OK(ulysses_context_query(c, &info)); break;
          case 1: OK(ulysses_plan_sizes(plan, batch, &size)); break;
          case 2:
            IS(ulysses_attention_forward(plan, batch, &none), ULYSSES_INVALID_ARGUMENT);
            break;
          case 3: OK(ulysses_attention_forward(plan, batch, &a)); break;
        }
      clock_gettime(CLOCK_MONOTONIC, &to);
      least = fmin(least,
                   ((double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec)) /
                       (n / 20));
    }
    printf("%s: %.0f ns a call\n", names[what], least);
  }
  ulysses_context_destroy(c);
}

int main(int argc, char **argv) {
  const char *mode = argc > 1 ? argv[1] : "attention";
  if (!strcmp(mode, "info")) return puts(ulysses_build_info()) < 0;
  if (!strcmp(mode, "hostile")) hostile();
  else if (!strcmp(mode, "callbacks")) callbacks();
  else if (!strcmp(mode, "tiled")) tiled();
  else if (!strcmp(mode, "overhead")) overhead();
  else if (!strcmp(mode, "rounding")) rounding();
  else {
    ulysses_context *c;
    ulysses_options o;
    ULYSSES_INIT(&o);
    o.threads = 1;
    OK(ulysses_context_create_local(&o, &c));
    free_results(attention(c, argc > 2 ? atoi(argv[2]) : 1));
    ulysses_context_destroy(c);
  }
  printf("ok %s\n", mode);
  return 0;
}
