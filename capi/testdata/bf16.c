// A host in C with its own MPI, in BF16: attention and its statistics, the host's own attention,
// whole layers, both methods of the gated delta rule, halos and sums of copies. Each rank's rows
// are compared with the results of one rank alone, and these with the results in F32.
#include "ranks.h"

enum { HQ = 6, HKV = 2, DV = 5, HIDDEN = 24, MOST = 12 };
// relative to the largest value: BF16 has 8 bits, and sums are rounded more than once
static const double coarse = 2e-2;

// A tensor [B, rows, heads, features] of a type, with rows [from, from + rows) of `all` rows.
typedef struct {
  int32_t type;
  int64_t shape[4], from, all;
  void *data;
  ulysses_tensor t;
} array;
typedef struct {
  array a[MOST];
  int n;
} set;

static float get(const array *a, int64_t i) {
  if (a->type == ULYSSES_F32) return ((float *)a->data)[i];
  uint32_t bits = (uint32_t)((uint16_t *)a->data)[i] << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
static void put(array *a, int64_t i, float f) { // f is exact in BF16
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (a->type == ULYSSES_F32) ((float *)a->data)[i] = f;
  else ((uint16_t *)a->data)[i] = (uint16_t)(bits >> 16);
}
// coarsely rounds a number between -1 and 1 to 8 bits, so that it is exact in BF16.
static float coarsely(float f) { return rintf(f * 128) / 128; }

static array made(int32_t type, int32_t axes, int64_t n0, int64_t n1, int64_t n2, int64_t n3,
                  int64_t from, int64_t all) {
  array a = {type, {n0, n1, n2, n3}, from, all, allocate((uint64_t)(n0 * n1 * n2 * n3) * 4), {0}};
  a.t = ulysses_tensor_of(a.data, ULYSSES_CPU, 0, type, axes, NULL, NULL);
  return a;
}
// add adds a tensor to a set, and fills it with `number`.
static ulysses_tensor *add(set *s, int32_t type, int32_t axes, const ulysses_batch_info *rows,
                           int64_t heads, int64_t d) {
  int which = s->n++;
  CHECK(which < MOST);
  array *a = &s->a[which];
  *a = made(type, axes, B, rows->rows, heads, d, rows->lo[0], S);
  a->t.shape = a->shape;
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < rows->rows * heads * d; i++)
      put(a, b * rows->rows * heads * d + i,
          coarsely(number(which, (b * S + a->from) * heads * d + i)));
  return &a->t;
}
static void free_set(set *s) {
  for (int i = 0; i < s->n; i++) free(s->a[i].data);
}
// near compares tensor i of two sets. `most` is the largest allowed difference relative to the
// largest value; 0 = equal.
static void near(const char *what, const set *part, const set *whole, int i, double most) {
  const array *p = &part->a[i], *w = &whole->a[i];
  int64_t row = p->shape[2] * p->shape[3], n = p->shape[1];
  double top = 0, off = 0;
  for (int64_t k = 0; k < B * w->shape[1] * row; k++) top = fmax(top, fabs((double)get(w, k)));
  for (int64_t b = 0; b < B; b++)
    for (int64_t k = 0; k < n * row; k++) {
      double d = fabs((double)get(p, b * n * row + k) -
                      (double)get(w, (b * w->shape[1] + p->from - w->from) * row + k));
      off = d <= off ? off : d; // off becomes NaN if d is
    }
  if (!(off <= most * top) || top < 1e-2) {
    fprintf(stderr, "%s: tensor %d, rows from %d: the difference is %g, the largest value %g\n",
            what, i, (int)p->from, off, top);
    exit(9);
  }
}

static ulysses_batch *batch_of(ulysses_context *c, ulysses_batch_info *info) {
  ulysses_batch_desc d;
  ulysses_batch *b;
  ULYSSES_INIT(&d), ULYSSES_INIT(info);
  d.batch = B, d.seq = S;
  OK(ulysses_batch_create(c, &d, &b));
  OK(ulysses_batch_query(b, info));
  return b;
}
static ulysses_plan *planned(ulysses_context *c, int32_t type) {
  ulysses_attention_desc d;
  ulysses_plan *p;
  ULYSSES_INIT(&d);
  d.dtype = type, d.flags = ULYSSES_CAUSAL, d.heads = HQ, d.kv_heads = HKV, d.head_dim = D,
  d.v_dim = DV;
  OK(ulysses_attention_plan(c, &d, &p));
  return p;
}

// The host's own attention: each row of out is the row of v with the same index.
static ulysses_status copies(void *user, const ulysses_local_call *a) {
  const ulysses_tensor *q = a->q, *from = a->backward ? a->dout : a->v,
                       *to = a->backward ? a->dv : a->out;
  CHECK((int32_t)(from->code | from->bits << 8) == *(int32_t *)user && from->lanes == 1);
  size_t one = from->bits / 8;
  for (int kind = 0; a->backward && kind < 3; kind++) {
    const ulysses_tensor *t = kind == 0 ? a->dq : kind == 1 ? a->dk : a->dv;
    for (int64_t b = 0; b < t->shape[0]; b++)
      for (int64_t i = 0; i < t->shape[1]; i++)
        for (int64_t h = 0; h < t->shape[2]; h++)
          memset((char *)t->data +
                     one * (size_t)(b * t->strides[0] + i * t->strides[1] + h * t->strides[2]),
                 0, one * (size_t)t->shape[3]);
  }
  for (int64_t b = 0; b < q->shape[0]; b++)
    for (int64_t i = 0; i < q->shape[1]; i++)
      for (int64_t h = 0; h < q->shape[2]; h++) {
        int64_t kv = (a->head_lo + h) / (HQ / HKV) - a->kv_head_lo, x = a->backward ? h : kv,
                y = a->backward ? kv : h;
        // only the first head of a group has a gradient
        if (a->backward && (a->head_lo + h) % (HQ / HKV)) continue;
        memcpy((char *)to->data +
                   one * (size_t)(b * to->strides[0] + i * to->strides[1] + y * to->strides[2]),
               (char *)from->data + one * (size_t)(b * from->strides[0] + i * from->strides[1] +
                                                   x * from->strides[2]),
               one * DV);
      }
  return ULYSSES_OK;
}

enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV_ };
static set attend(ulysses_context *c, int32_t type, int own) {
  ulysses_batch_info rows;
  ulysses_batch *batch = batch_of(c, &rows);
  ulysses_plan *plan = planned(c, type);
  ulysses_sizes size;
  ULYSSES_INIT(&size);
  OK(own ? ulysses_local_sizes(plan, batch, &size) : ulysses_plan_sizes(plan, batch, &size));
  set s = {0};
  ulysses_attention_args a;
  ulysses_attention_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.q = add(&s, type, 4, &rows, HQ, D), a.k = add(&s, type, 4, &rows, HKV, D),
  a.v = add(&s, type, 4, &rows, HKV, DV);
  g.dout = add(&s, type, 4, &rows, HQ, DV), a.out = add(&s, type, 4, &rows, HQ, DV),
  a.lse = add(&s, ULYSSES_F32, 3, &rows, HQ, 1);
  g.dq = add(&s, type, 4, &rows, HQ, D), g.dk = add(&s, type, 4, &rows, HKV, D),
  g.dv = add(&s, type, 4, &rows, HKV, DV);
  if (own) a.lse = NULL;
  a.saved = allocate(size.saved), a.saved_bytes = size.saved,
  a.workspace = allocate(size.workspace), a.workspace_bytes = size.workspace;
  OK(own ? ulysses_local_forward(plan, batch, &a, copies, &type)
         : ulysses_attention_forward(plan, batch, &a));
  OK(own ? ulysses_local_backward(plan, batch, &a, &g, copies, &type)
         : ulysses_attention_backward(plan, batch, &a, &g));
  free(a.saved), free(a.workspace);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
  return s;
}

// layer runs a whole layer. dw gets this rank's share of the gradients of weights, in F32.
enum { X, DY, Y, DX };
enum { WQ, WK, WV, WO, WEIGHTS };
static set layer(ulysses_context *c, int32_t type, array dw[WEIGHTS]) {
  ulysses_batch_info rows;
  ulysses_batch *batch = batch_of(c, &rows);
  ulysses_plan *plan = planned(c, type);
  set s = {0};
  ulysses_attention_layer_args a;
  ulysses_attention_layer_grads g;
  ulysses_sizes size;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g), ULYSSES_INIT(&size);
  a.hidden = HIDDEN, a.x = add(&s, type, 3, &rows, HIDDEN, 1),
  g.dy = add(&s, type, 3, &rows, HIDDEN, 1), a.y = add(&s, type, 3, &rows, HIDDEN, 1);
  g.dx = add(&s, type, 3, &rows, HIDDEN, 1);
  const int64_t shape[WEIGHTS][2] = {
      {HQ * D, HIDDEN}, {HKV * D, HIDDEN}, {HKV * DV, HIDDEN}, {HIDDEN, HQ * DV}};
  const ulysses_tensor **w[WEIGHTS] = {&a.wq, &a.wk, &a.wv, &a.wo};
  ulysses_tensor **grad[WEIGHTS] = {&g.dwq, &g.dwk, &g.dwv, &g.dwo};
  array weight[WEIGHTS];
  for (int i = 0; i < WEIGHTS; i++) {
    weight[i] = made(type, 2, shape[i][0], shape[i][1], 1, 1, 0, 0),
    dw[i] = made(ULYSSES_F32, 2, shape[i][0], shape[i][1], 1, 1, 0, 0);
    for (int64_t k = 0; k < shape[i][0] * shape[i][1]; k++)
      put(&weight[i], k, coarsely(number(20 + i, k))), put(&dw[i], k, 0);
    weight[i].t.shape = weight[i].shape, dw[i].t.shape = dw[i].shape;
    *w[i] = &weight[i].t, *grad[i] = &dw[i].t;
  }
  OK(ulysses_attention_layer_sizes(plan, batch, &a, &size));
  a.saved = allocate(size.saved), a.saved_bytes = size.saved,
  a.workspace = allocate(size.workspace), a.workspace_bytes = size.workspace;
  OK(ulysses_attention_layer_forward(plan, batch, &a));
  OK(ulysses_attention_layer_backward(plan, batch, &a, &g));
  for (int i = 0; i < WEIGHTS; i++) free(weight[i].data);
  free(a.saved), free(a.workspace);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
  return s;
}

enum { RQ, RK, RV, RDOUT, RG, RBETA, ROUT, RDQ, RDK, RDV, RDG, RDBETA };
static set rule(ulysses_context *c, int32_t type, int32_t strategy) {
  ulysses_batch_info rows;
  ulysses_batch *batch = batch_of(c, &rows);
  ulysses_gdn_desc d;
  ulysses_plan *plan;
  ulysses_sizes size;
  ULYSSES_INIT(&d), ULYSSES_INIT(&size);
  d.dtype = type, d.flags = ULYSSES_QK_L2NORM, d.strategy = strategy, d.qk_heads = HKV,
  d.v_heads = HQ, d.qk_dim = D, d.v_dim = DV;
  OK(ulysses_gdn_plan(c, &d, &plan));
  OK(ulysses_plan_sizes(plan, batch, &size));
  set s = {0};
  ulysses_gdn_args a;
  ulysses_gdn_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.q = add(&s, type, 4, &rows, HKV, D), a.k = add(&s, type, 4, &rows, HKV, D),
  a.v = add(&s, type, 4, &rows, HQ, DV), g.dout = add(&s, type, 4, &rows, HQ, DV);
  a.g = add(&s, ULYSSES_F32, 3, &rows, HQ, 1), a.beta = add(&s, ULYSSES_F32, 3, &rows, HQ, 1),
  a.out = add(&s, type, 4, &rows, HQ, DV);
  g.dq = add(&s, type, 4, &rows, HKV, D), g.dk = add(&s, type, 4, &rows, HKV, D),
  g.dv = add(&s, type, 4, &rows, HQ, DV);
  g.dg = add(&s, ULYSSES_F32, 3, &rows, HQ, 1), g.dbeta = add(&s, ULYSSES_F32, 3, &rows, HQ, 1);
  for (int64_t i = 0; i < B * rows.rows * HQ; i++)
    put(&s.a[RG], i, -get(&s.a[RG], i) * get(&s.a[RG], i)),
        put(&s.a[RBETA], i, get(&s.a[RBETA], i) + 0.5f);
  a.saved = allocate(size.saved), a.saved_bytes = size.saved,
  a.workspace = allocate(size.workspace), a.workspace_bytes = size.workspace;
  OK(ulysses_gdn_forward(plan, batch, &a));
  OK(ulysses_gdn_backward(plan, batch, &a, &g));
  free(a.saved), free(a.workspace);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
  return s;
}

// moves: halos forward and backward, and the sum of the copies of shared heads, with small
// integers, which BF16 adds exactly.
static void moves(ulysses_context *c, int rank, int size) {
  ulysses_batch_info rows;
  ulysses_batch *batch = batch_of(c, &rows);
  ulysses_plan *plan = planned(c, ULYSSES_BF16);
  ulysses_sizes part;
  ULYSSES_INIT(&part);
  OK(ulysses_plan_sizes(plan, batch, &part));
  array x = made(ULYSSES_BF16, 3, B, rows.rows, 1, 1, 0, 0),
        halo = made(ULYSSES_BF16, 3, B, 1, 1, 1, 0, 0);
  x.t.shape = x.shape, halo.t.shape = halo.shape;
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < rows.rows; i++)
      put(&x, b * rows.rows + i, (float)(100 * b + rows.lo[0] + i + 1));
  ulysses_halo_args h;
  ULYSSES_INIT(&h);
  h.n = 1, h.x = &x.t, h.halo = &halo.t;
  OK(ulysses_halo_workspace(c, batch, &h, &h.workspace_bytes));
  h.workspace = allocate(h.workspace_bytes);
  OK(ulysses_halo_forward(c, batch, &h));
  for (int b = 0; b < B; b++) {
    CHECK(get(&halo, b) == (rank ? (float)(100 * b + rows.lo[0]) : 0));
    put(&halo, b, (float)(rank + 1));
  }
  OK(ulysses_halo_backward(c, batch, &h));
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < rows.rows; i++)
      CHECK(get(&x, b * rows.rows + i) ==
            (float)(100 * b + rows.lo[0] + i + 1) +
                (i == rows.rows - 1 && rank < size - 1 ? (float)(rank + 2) : 0));
  free(h.workspace);

  int64_t mine = part.shared_hi - part.shared_lo;
  array heads = made(ULYSSES_BF16, 4, B, S, mine, D, 0, 0),
        back = made(ULYSSES_BF16, 4, B, rows.rows, HKV, D, 0, 0);
  heads.t.shape = heads.shape, back.t.shape = back.shape;
  for (int64_t i = 0; i < B * S * mine * D; i++) put(&heads, i, (float)(rank + 1));
  const ulysses_tensor *in = &heads.t;
  ulysses_tensor *out = &back.t;
  int32_t shared = 1;
  ulysses_reshard_args a;
  ULYSSES_INIT(&a);
  a.n = 1, a.in = &in, a.out = &out, a.shared = &shared, a.sum_copies = 1;
  OK(ulysses_reshard_workspace(plan, batch, &a, 0, &a.workspace_bytes));
  a.workspace = allocate(a.workspace_bytes);
  OK(ulysses_heads_to_seq(plan, batch, &a));
  int64_t range[2] = {part.shared_lo, part.shared_hi}, *all = allocate((uint64_t)size * 16);
  MPI_Allgather(range, 2, MPI_INT64_T, all, 2, MPI_INT64_T, MPI_COMM_WORLD);
  for (int64_t i = 0; i < B * rows.rows * HKV * D; i++) {
    float want = 0;
    for (int r = 0; r < size; r++)
      want += i / D % HKV >= all[2 * r] && i / D % HKV < all[2 * r + 1] ? (float)(r + 1) : 0;
    CHECK(get(&back, i) == want);
  }
  free(a.workspace), free(all), free(x.data), free(halo.data), free(heads.data), free(back.data);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
}

int main(int argc, char **argv) {
  int rank, size;
  ulysses_context *alone, *c;
  open_ranks(&argc, &argv, &rank, &size, &alone, &c);
  set whole = attend(alone, ULYSSES_BF16, 0), part = attend(c, ULYSSES_BF16, 0),
      fine = attend(alone, ULYSSES_F32, 0);
  for (int i = OUT; i <= DV_; i++)
    near("attention", &part, &whole, i, i <= DQ ? 0 : coarse),
        near("attention in F32", &whole, &fine, i, coarse);
  free_set(&whole), free_set(&part), free_set(&fine);
  whole = attend(alone, ULYSSES_BF16, 1), part = attend(c, ULYSSES_BF16, 1),
  fine = attend(alone, ULYSSES_F32, 1);
  near("the host's own", &part, &whole, OUT, 0), near("the host's own", &part, &whole, DV_, 0),
      near("the host's own in F32", &whole, &fine, DV_, 0);
  free_set(&whole), free_set(&part), free_set(&fine);

  array sum[WEIGHTS], want[WEIGHTS], finest[WEIGHTS];
  whole = layer(alone, ULYSSES_BF16, want), part = layer(c, ULYSSES_BF16, sum),
  fine = layer(alone, ULYSSES_F32, finest);
  near("layer", &part, &whole, Y, coarse), near("layer", &part, &whole, DX, coarse),
      near("layer in F32", &whole, &fine, Y, coarse),
      near("layer in F32", &whole, &fine, DX, coarse);
  free_set(&whole), free_set(&part), free_set(&fine);
  for (int i = 0; i < WEIGHTS; i++) {
    int64_t n = sum[i].shape[0] * sum[i].shape[1];
    MPI_Allreduce(MPI_IN_PLACE, sum[i].data, (int)n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    double top = 0, off = 0;
    for (int64_t k = 0; k < n; k++) {
      top = fmax(top, fabs((double)get(&finest[i], k)));
      off = fmax(off, fmax(fabs((double)get(&sum[i], k) - (double)get(&want[i], k)),
                           fabs((double)get(&want[i], k) - (double)get(&finest[i], k))));
    }
    CHECK(top > 1e-2 && off <= coarse * top);
    free(sum[i].data), free(want[i].data), free(finest[i].data);
  }

  whole = rule(alone, ULYSSES_BF16, ULYSSES_GDN_HEADS),
  fine = rule(alone, ULYSSES_F32, ULYSSES_GDN_HEADS);
  for (int32_t strategy = ULYSSES_GDN_HEADS; strategy <= ULYSSES_GDN_STATE; strategy++) {
    part = rule(c, ULYSSES_BF16, strategy);
    for (int i = ROUT; i <= RDBETA; i++)
      near(strategy == ULYSSES_GDN_HEADS ? "heads" : "state", &part, &whole, i,
           strategy == ULYSSES_GDN_HEADS && i != RDQ && i != RDK ? 0 : coarse),
          near("the rule in F32", &whole, &fine, i, coarse);
    free_set(&part);
  }
  free_set(&whole), free_set(&fine);
  moves(c, rank, size);
  ulysses_context_destroy(c), ulysses_context_destroy(alone);
  MPI_Finalize();
  if (rank == 0) printf("ok bf16 %d\n", size);
  return 0;
}
