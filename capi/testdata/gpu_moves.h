// Reshards, halos and tiled compute with tensors on a GPU. The values show where they come from,
// and the calls do not wait for the GPU.
#pragma once
#include "gpu.h"

// moved: two reshards in progress at the same time, their inverse, and halos.
static inline void moved(ulysses_context *c, stream_t s, int waits) {
  pair p = attention_pair(c);
  int64_t n = p.n, h = p.size.head_hi - p.size.head_lo, rs[4] = {B, n, H, D}, hs[4] = {B, S, h, D};
  ulysses_request *q[2];
  float *x[2], *y[2], *z[2], *host = allocate((uint64_t)(B * n * H * D) * 4);
  ulysses_tensor tx[2], ty[2], tz[2];
  void *ws[2], *busy = waits ? NULL : keep_busy(s);
  ulysses_reshard_args a;
  for (int i = 0; i < 2; i++) {
    fill(i, host, p.lo, p.lo + n);
    x[i] = to_gpu(host, B * n * H * D, s), y[i] = blank(B * S * h * D, s),
    z[i] = blank(B * n * H * D, s);
    tx[i] = on_gpu(x[i], rs), ty[i] = on_gpu(y[i], hs), tz[i] = on_gpu(z[i], rs);
    const ulysses_tensor *in[1] = {&tx[i]};
    ulysses_tensor *out[1] = {&ty[i]};
    ULYSSES_INIT(&a);
    a.n = 1, a.in = in, a.out = out, a.stream = s;
    OK(ulysses_reshard_workspace(p.plan, p.batch, &a, 1, &a.workspace_bytes));
    ws[i] = a.workspace = a.workspace_bytes ? device_allocate(a.workspace_bytes) : NULL;
    OK(ulysses_seq_to_heads_start(p.plan, p.batch, &a, &q[i]));
  }
  for (int i = 0; i < 2; i++) {
    OK(ulysses_request_wait(q[i]));
    if (!waits && i == 0)
      check_pending(s, y[i]); // on the emulated GPU, fetching the first may run the second
    float *got = fetch(y[i], B * S * h * D, s);
    for (int64_t b = 0; b < B; b++)
      for (int64_t r = 0; r < S; r++)
        for (int64_t k = 0; k < h * D; k++)
          CHECK(got[(b * S + r) * h * D + k] ==
                number(i, ((b * S + r) * H + p.size.head_lo) * D + k));
    free(got);
    const ulysses_tensor *in[1] = {&ty[i]};
    ulysses_tensor *out[1] = {&tz[i]};
    a.in = in, a.out = out, a.workspace = ws[i];
    OK(ulysses_heads_to_seq(p.plan, p.batch, &a));
    got = fetch(z[i], B * n * H * D, s);
    fill(i, host, p.lo, p.lo + n);
    CHECK(memcmp(got, host, (size_t)(B * n * H * D) * 4) == 0);
    free(got);
  }
  ulysses_halo_args ha;
  ULYSSES_INIT(&ha);
  int64_t xs[3] = {B, n, H * D}, two[3] = {B, 2, H * D};
  float *halo = blank(B * 2 * H * D, s);
  ulysses_tensor t0 = ulysses_tensor_of(x[0], ULYSSES_CUDA, cuda.gpu, ULYSSES_F32, 3, xs, NULL),
                 t1 = ulysses_tensor_of(halo, ULYSSES_CUDA, cuda.gpu, ULYSSES_F32, 3, two, NULL);
  ha.n = 2, ha.x = &t0, ha.halo = &t1, ha.stream = s;
  OK(ulysses_halo_workspace(c, p.batch, &ha, &ha.workspace_bytes));
  ha.workspace = ha.workspace_bytes ? device_allocate(ha.workspace_bytes) : NULL;
  OK(ulysses_halo_forward(c, p.batch, &ha));
  float *got = fetch(halo, B * 2 * H * D, s);
  for (int64_t b = 0; b < B; b++)
    for (int64_t r = 0; r < 2; r++)
      for (int64_t k = 0; k < H * D; k++)
        CHECK(got[(b * 2 + r) * H * D + k] ==
              (n && p.lo - 2 + r >= 0 ? number(0, (b * S + p.lo - 2 + r) * H * D + k) : 0));
  free(got);
  double sum = 1.5, mean;
  int64_t count = 3;
  OK(ulysses_loss_reduce(c, &sum, &count, &mean));
  CHECK(mean == 0.5);
  for (int i = 0; i < 2; i++) {
    RUN(cuda.free(x[i]));
    RUN(cuda.free(y[i]));
    RUN(cuda.free(z[i]));
    if (ws[i]) RUN(cuda.free(ws[i]));
  }
  RUN(cuda.free(halo));
  if (busy) RUN(cuda.free(busy));
  if (ha.workspace) RUN(cuda.free(ha.workspace));
  free(host);
  free_pair(p);
}

// resharded: three tensors in one reshard, one with shared heads and one with gaps between its
// rows: forward, inverse, and inverse with sum_copies. The caller overwrites the inputs after each
// call.
enum { SHARED = 2, MOVED = 3 };
static inline void resharded(ulysses_context *c, stream_t s, int waits) {
  ulysses_attention_desc d;
  ULYSSES_INIT(&d);
  d.dtype = ULYSSES_F32, d.heads = H, d.kv_heads = SHARED, d.head_dim = D;
  pair p = pair_of(c, &d);
  int64_t n = p.n, h = p.size.head_hi - p.size.head_lo, k = p.size.shared_hi - p.size.shared_lo,
          wide = H * D + 8;
  int64_t rows[MOVED][4] = {{B, n, H, D}, {B, n, SHARED, D}, {B, n, H, D}},
          heads[MOVED][4] = {{B, S, h, D}, {B, S, k, D}, {B, S, h, D}};
  int64_t gaps[4] = {n * wide, wide, D, 1}, have[MOVED] = {H, SHARED, H}, mine[MOVED] = {h, k, h},
          from[MOVED] = {p.size.head_lo, p.size.shared_lo, p.size.head_lo};
  int64_t copies[SHARED] = {0, 0};
  int32_t shared[MOVED] = {0, 1, 0};
  float *x[MOVED], *y[MOVED], *z[MOVED], *host = allocate((uint64_t)(B * n * wide) * 4);
  ulysses_tensor tx[MOVED], ty[MOVED], tz[MOVED];
  const ulysses_tensor *in[MOVED];
  ulysses_tensor *out[MOVED];
  ulysses_context_info info;
  ULYSSES_INIT(&info);
  OK(ulysses_context_query(c, &info));
  // heads are sharded evenly: the first H mod size ranks have one more
  for (int r = 0; r < info.size; r++) {
    int64_t lo = r * (H / info.size) + (r < H % info.size ? r : H % info.size),
            hi = lo + H / info.size + (r < H % info.size);
    for (int64_t j = 0; j < SHARED; j++)
      copies[j] += hi > lo && j >= lo / (H / SHARED) && j <= (hi - 1) / (H / SHARED);
  }
  for (int i = 0; i < MOVED; i++) {
    int64_t step = i == 2 ? wide : have[i] * D;
    for (int64_t b = 0; b < B; b++)
      for (int64_t r = 0; r < n; r++)
        for (int64_t e = 0; e < step; e++)
          host[(b * n + r) * step + e] =
              e < have[i] * D ? number(50 + i, (b * S + p.lo + r) * have[i] * D + e) : 7;
    x[i] = to_gpu(host, B * n * step, s), y[i] = blank(B * S * mine[i] * D, s),
    z[i] = blank(B * n * have[i] * D, s);
    tx[i] = on_gpu(x[i], rows[i]), ty[i] = on_gpu(y[i], heads[i]), tz[i] = on_gpu(z[i], rows[i]);
    in[i] = &tx[i], out[i] = &ty[i];
  }
  tx[2].strides = gaps;
  RUN(cuda.wait(s)); // `host` has been read
  meet();
  void *busy = waits ? NULL : keep_busy(s);
  ulysses_reshard_args a;
  ULYSSES_INIT(&a);
  a.n = MOVED, a.shared = shared, a.in = in, a.out = out, a.stream = s;
  OK(ulysses_reshard_workspace(p.plan, p.batch, &a, 1, &a.workspace_bytes));
  void *ws = a.workspace = a.workspace_bytes ? device_allocate(a.workspace_bytes) : NULL;
  OK(ulysses_seq_to_heads(p.plan, p.batch, &a));
  if (!waits) check_pending(s, h ? y[0] : NULL);
  for (int i = 0; i < MOVED; i++)
    RUN(cuda.set(x[i], 0xff, (size_t)(B * n * (i == 2 ? wide : have[i] * D)) * 4, s));
  // later work on the stream may use the workspace
  if (ws) RUN(cuda.set(ws, 0xff, a.workspace_bytes, s));
  for (int i = 0; i < MOVED; i++) {
    float *got = fetch(y[i], B * S * mine[i] * D, s);
    for (int64_t t = 0; t < B * S; t++)
      for (int64_t e = 0; e < mine[i] * D; e++)
        CHECK(got[t * mine[i] * D + e] == number(50 + i, (t * have[i] + from[i]) * D + e));
    free(got);
    in[i] = &ty[i], out[i] = &tz[i];
  }
  for (int sum = 0; sum < 2; sum++) {
    a.sum_copies = sum;
    OK(ulysses_reshard_workspace(p.plan, p.batch, &a, 0, &a.workspace_bytes));
    a.workspace = a.workspace_bytes ? device_allocate(a.workspace_bytes) : NULL;
    OK(ulysses_heads_to_seq(p.plan, p.batch, &a));
    for (int i = 0; i < MOVED; i++) {
      float *got = fetch(z[i], B * n * have[i] * D, s);
      for (int64_t b = 0; b < B; b++)
        for (int64_t r = 0; r < n; r++)
          for (int64_t e = 0; e < have[i] * D; e++) {
            float one = number(50 + i, (b * S + p.lo + r) * have[i] * D + e), want = one;
            for (int64_t more = 1; sum && shared[i] && more < copies[e / D]; more++) want += one;
            CHECK(got[(b * n + r) * have[i] * D + e] == want);
          }
      free(got);
      RUN(cuda.set(z[i], 0xff, (size_t)(B * n * have[i] * D) * 4, s));
    }
    if (a.workspace) RUN(cuda.free(a.workspace));
  }
  OK(ulysses_context_async_error(c));
  for (int i = 0; i < MOVED; i++) {
    RUN(cuda.free(x[i]));
    RUN(cuda.free(y[i]));
    RUN(cuda.free(z[i]));
  }
  if (ws) RUN(cuda.free(ws));
  if (busy) RUN(cuda.free(busy));
  free(host);
  free_pair(p);
}

// tiled: tiled compute on a GPU. Callbacks get views and the stream. The number of tiles is equal
// on all ranks, so callbacks may be collective.
enum { WIDE = 12, TILE_ROWS = 2 };
typedef struct {
  ulysses_context *c;
  stream_t s;
  int64_t tiles, rows, width;
  float *whole;
} walk;

static inline void seen_tile(walk *w, const ulysses_tile *t, const ulysses_tensor *x,
                             const ulysses_tensor *y) {
  CHECK(t->stream == w->s && t->index == w->tiles && t->lo == w->rows &&
        t->hi - t->lo == x->shape[0]);
  CHECK(x->device == ULYSSES_CUDA && x->ordinal == cuda.gpu && y->device == ULYSSES_CUDA &&
        x->shape[0] == y->shape[0] && x->shape[1] == w->width);
  w->tiles++, w->rows = t->hi;
}
static inline char *row_of(const ulysses_tensor *t, int64_t r) {
  return (char *)t->data + t->byte_offset + r * t->strides[0] * 4;
}
static inline void copy_rows(const ulysses_tensor *to, const ulysses_tensor *from, stream_t s) {
  for (int64_t r = 0; r < from->shape[0]; r++)
    RUN(cuda.copy(row_of(to, r), row_of(from, r), (size_t)from->shape[1] * 4, 3, s));
}
// Forward: y = x, and `whole` becomes the last row. Backward: dx = dy, with a collective call.
static inline ulysses_status tile_forward(void *user, const ulysses_tile *t,
                                          const ulysses_tensor *const *in,
                                          ulysses_tensor *const *out) {
  walk *w = user;
  seen_tile(w, t, in[0], out[0]);
  CHECK(out[1]->data == w->whole && out[1]->shape[0] == 1);
  copy_rows(out[0], in[0], t->stream);
  if (in[0]->shape[0])
    RUN(cuda.copy(w->whole, row_of(in[0], in[0]->shape[0] - 1), (size_t)w->width * 4, 3,
                  t->stream));
  return ULYSSES_OK;
}
static inline ulysses_status tile_backward(void *user, const ulysses_tile *t,
                                           const ulysses_tensor *const *in,
                                           const ulysses_tensor *const *dout,
                                           ulysses_tensor *const *din) {
  walk *w = user;
  seen_tile(w, t, in[0], dout[0]);
  CHECK(!dout[1]);
  copy_rows(din[0], dout[0], t->stream);
  double sum = (double)t->index, mean;
  int64_t n = 1;
  OK(ulysses_loss_reduce(w->c, &sum, &n, &mean));
  CHECK(mean == (double)t->index);
  return ULYSSES_OK;
}

static inline void tiled(ulysses_context *c, stream_t s) {
  pair p = attention_pair(c);
  ulysses_batch_info info;
  ULYSSES_INIT(&info);
  OK(ulysses_batch_query(p.batch, &info));
  int64_t n = p.n, gap = WIDE + 4, shape[2] = {n, WIDE}, one[2] = {1, WIDE}, steps[2] = {gap, 1},
          tiles = (info.max_rows + TILE_ROWS - 1) / TILE_ROWS;
  float *host = allocate((uint64_t)(n * gap) * 4), *x[4];
  for (int64_t i = 0; i < n * gap; i++) host[i] = number(60, p.lo * gap + i);
  x[0] = to_gpu(host, n * gap, s), x[1] = blank(n * WIDE, s), x[2] = blank(n * WIDE, s),
  x[3] = blank(WIDE, s);
  RUN(cuda.wait(s)); // `host` has been read
  meet();
  void *busy = keep_busy(s);
  ulysses_tensor tx = ulysses_tensor_of(x[0], ULYSSES_CUDA, cuda.gpu, ULYSSES_F32, 2, shape, steps),
                 ty = tx, td = tx, tw = tx;
  ty.data = x[1], ty.strides = NULL, td.data = x[2], td.strides = NULL, tw.data = x[3],
  tw.strides = NULL, tw.shape = one;
  const ulysses_tensor *in[1] = {&tx}, *dout[2] = {&ty, NULL};
  ulysses_tensor *out[2] = {&ty, &tw}, *din[1] = {&td};
  int32_t out_dim[2] = {0, -1};
  walk w = {c, s, 0, 0, WIDE, x[3]};
  ulysses_tiled_args a;
  ULYSSES_INIT(&a);
  a.n_in = 1, a.n_out = 2, a.out_dim = out_dim, a.tile_rows = TILE_ROWS, a.max_rows = info.max_rows,
  a.in = in, a.out = out;
  a.forward = tile_forward, a.backward = tile_backward, a.user = &w, a.stream = s;
  OK(tiled_compute(&a));
  CHECK(w.tiles == tiles && w.rows == n);
  check_pending(s, n ? x[1] : NULL);
  RUN(cuda.set(x[0], 0xff, (size_t)(n * gap) * 4, s)); // after the tiles
  w.tiles = w.rows = 0;
  a.dout = dout, a.din = din;
  OK(tiled_compute_backward(&a));
  CHECK(w.tiles == tiles && w.rows == n);
  float *y = fetch(x[1], n * WIDE, s), *dx = fetch(x[2], n * WIDE, s), *last = fetch(x[3], WIDE, s);
  for (int64_t r = 0; r < n; r++)
    for (int64_t i = 0; i < WIDE; i++) {
      CHECK(y[r * WIDE + i] == number(60, (p.lo + r) * gap + i) &&
            dx[r * WIDE + i] == y[r * WIDE + i]);
      CHECK(r < n - 1 || last[i] == y[r * WIDE + i]);
    }
  for (int i = 0; i < 4; i++) RUN(cuda.free(x[i]));
  if (busy) RUN(cuda.free(busy));
  free(y), free(dx), free(last), free(host);
  free_pair(p);
}
