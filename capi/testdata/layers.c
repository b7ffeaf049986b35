// A host in C with its own MPI: key heads whose query heads are on several ranks, cross-attention,
// statistics, overlapped passes, whole layers, and the host's own attention. Each rank's rows are
// compared with the results of one rank alone. Everything runs over MPI and over the host's own
// collectives.
#include "collectives.h"
#include "ranks.h"
#include "rows.h"

enum { HQ = 6, HKV = 2, DV = 5, SK = 9, HIDDEN = 24 };

// The indices of attention's tensors in a set.
enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV_ };

static ulysses_plan *planned(ulysses_context *c, int32_t flags) {
  ulysses_attention_desc d;
  ULYSSES_INIT(&d);
  d.dtype = ULYSSES_F32, d.flags = flags, d.heads = HQ, d.kv_heads = HKV, d.head_dim = D,
  d.v_dim = DV;
  ulysses_plan *p;
  OK(ulysses_attention_plan(c, &d, &p));
  return p;
}

// The host's own attention, in double precision, for any strides: causal, or with all keys. fail:
// the first call of this rank's callback fails. tries: every rank makes one call more.
typedef struct {
  int causal, fail, calls, tries;
} own;
static float *at(const ulysses_tensor *t, int64_t b, int64_t i, int64_t h) {
  return (float *)(void *)((char *)t->data + t->byte_offset) + b * t->strides[0] +
         i * t->strides[1] + h * t->strides[2];
}
static void clear(const ulysses_tensor *t) {
  for (int64_t b = 0; b < t->shape[0]; b++)
    for (int64_t i = 0; i < t->shape[1]; i++)
      for (int64_t h = 0; h < t->shape[2]; h++) memset(at(t, b, i, h), 0, (size_t)t->shape[3] * 4);
}
static ulysses_status naive(void *user, const ulysses_local_call *a) {
  own *u = user;
  u->calls++;
  if (u->fail) return ULYSSES_NUMERIC;
  int64_t n = a->k->shape[1], d = a->q->shape[3], dv = a->v->shape[3];
  CHECK(a->q->shape[2] == a->head_hi - a->head_lo &&
        a->k->shape[2] == a->kv_head_hi - a->kv_head_lo && n <= 64);
  if (a->backward) clear(a->dq), clear(a->dk), clear(a->dv);
  for (int64_t b = 0; b < a->q->shape[0]; b++)
    for (int64_t h = 0; h < a->q->shape[2]; h++)
      for (int64_t i = 0; i < a->q->shape[1]; i++) {
        int64_t kv = (a->head_lo + h) / (HQ / HKV) - a->kv_head_lo,
                keys = u->causal ? i + 1 + n - a->q->shape[1] : n;
        double p[64], sum = 0, top = -1e30, inner = 0, out[DV] = {0};
        for (int64_t j = 0; j < keys; j++) {
          p[j] = 0;
          for (int64_t e = 0; e < d; e++)
            p[j] += (double)at(a->q, b, i, h)[e] * (double)at(a->k, b, j, kv)[e] / sqrt((double)d);
          top = fmax(top, p[j]);
        }
        for (int64_t j = 0; j < keys; j++) sum += p[j] = exp(p[j] - top);
        for (int64_t j = 0; j < keys; j++)
          for (int64_t e = 0; e < dv; e++)
            out[e] += (p[j] /= e ? 1 : sum) * (double)at(a->v, b, j, kv)[e];
        if (!a->backward) {
          for (int64_t e = 0; e < dv; e++) at(a->out, b, i, h)[e] = (float)out[e];
          continue;
        }
        for (int64_t e = 0; e < dv; e++) inner += out[e] * (double)at(a->dout, b, i, h)[e];
        for (int64_t j = 0; j < keys; j++) {
          double ds = -inner;
          for (int64_t e = 0; e < dv; e++)
            ds += (double)at(a->dout, b, i, h)[e] * (double)at(a->v, b, j, kv)[e];
          for (int64_t e = 0; e < dv; e++)
            at(a->dv, b, j, kv)[e] += (float)(p[j] * (double)at(a->dout, b, i, h)[e]);
          for (int64_t e = 0; e < d; e++) {
            at(a->dq, b, i, h)[e] +=
                (float)(p[j] * ds / sqrt((double)d) * (double)at(a->k, b, j, kv)[e]);
            at(a->dk, b, j, kv)[e] +=
                (float)(p[j] * ds / sqrt((double)d) * (double)at(a->q, b, i, h)[e]);
          }
        }
      }
  return ULYSSES_OK;
}

// overlapped runs both passes in their overlapped form. q, k and v get their values just before
// they are sent. A step out of order is refused and changes nothing.
static void overlapped(ulysses_plan *plan, ulysses_batch *batch, const ulysses_attention_args *a,
                       const ulysses_attention_grads *g) {
  enum { PROJECTED = 3 };
  const ulysses_tensor *t[PROJECTED] = {a->q, a->k, a->v};
  void *values[PROJECTED];
  size_t bytes[PROJECTED];
  ulysses_pass *pass;
  for (int i = 0; i < PROJECTED; i++) {
    bytes[i] = (size_t)(t[i]->shape[0] * t[i]->shape[1] * t[i]->shape[2] * t[i]->shape[3]) * 4;
    values[i] = allocate(bytes[i] + 4);
    memcpy(values[i], t[i]->data, bytes[i]), memset(t[i]->data, 0xff, bytes[i]);
  }
  OK(ulysses_attention_forward_start(plan, batch, a, &pass));
  for (int i = 0; i < PROJECTED; i++) {
    memcpy(t[i]->data, values[i], bytes[i]);
    CHECK(ulysses_pass_attend(pass) == ULYSSES_INVALID_ARGUMENT &&
          strstr(ulysses_last_error(), "is due"));
    OK(ulysses_pass_send(pass, ULYSSES_TENSOR_Q + i));
    free(values[i]);
  }
  OK(ulysses_pass_attend(pass));
  OK(ulysses_attention_backward_start(plan, batch, a, g, &pass));
  OK(ulysses_pass_cancel(pass));
  OK(ulysses_attention_backward_start(plan, batch, a, g, &pass));
  OK(ulysses_pass_attend(pass));
  OK(ulysses_pass_wait(pass, ULYSSES_TENSOR_V));
  OK(ulysses_pass_wait(pass, ULYSSES_TENSOR_K));
  OK(ulysses_pass_wait(pass, ULYSSES_TENSOR_Q));
  CHECK(ulysses_pass_attend(pass) == ULYSSES_INVALID_ARGUMENT);
}

// attend runs attention forward and backward: the library's, plain or overlapped, or the host's own
// between the all-to-alls.
static set attend(ulysses_context *c, int32_t flags, own *u, int overlap) {
  ulysses_plan *plan = planned(c, flags);
  ulysses_batch_desc bd;
  ulysses_batch *batch;
  ulysses_batch_info info;
  ulysses_sizes size;
  ULYSSES_INIT(&bd), ULYSSES_INIT(&info), ULYSSES_INIT(&size);
  bd.batch = B, bd.seq = S, bd.kv_seq = flags & ULYSSES_CROSS ? SK : 0;
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &info));
  OK(u ? ulysses_local_sizes(plan, batch, &size) : ulysses_plan_sizes(plan, batch, &size));
  int64_t keys = info.kv_seq, me, ranks, klo, khi;
  ulysses_context_info who;
  ULYSSES_INIT(&who);
  OK(ulysses_context_query(c, &who));
  me = who.rank, ranks = who.size;
  klo = me * (keys / ranks) + (me < keys % ranks ? me : keys % ranks),
  khi = klo + keys / ranks + (me < keys % ranks);
  CHECK(khi - klo == info.kv_rows);
  set s = {info.lo[0], info.hi[0], klo, khi, 0, {0}, {{0}}, {0}, {0}, {{0}}};
  add(&s, s.lo, s.hi, S, HQ, D), add(&s, klo, khi, keys, HKV, D), add(&s, klo, khi, keys, HKV, DV),
      add(&s, s.lo, s.hi, S, HQ, DV);
  add(&s, s.lo, s.hi, S, HQ, DV), add(&s, s.lo, s.hi, S, HQ, 1), add(&s, s.lo, s.hi, S, HQ, D),
      add(&s, klo, khi, keys, HKV, D), add(&s, klo, khi, keys, HKV, DV);
  s.t[LSE].ndim = 3;
  ulysses_attention_args a;
  ulysses_attention_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.q = &s.t[Q], a.k = &s.t[K], a.v = &s.t[V], a.out = &s.t[OUT], a.lse = u ? NULL : &s.t[LSE];
  // a host gives no memory where none is needed
  a.saved = size.saved ? allocate(size.saved) : NULL, a.saved_bytes = size.saved,
  a.workspace = allocate(size.workspace), a.workspace_bytes = size.workspace;
  g.dout = &s.t[DOUT], g.dq = &s.t[DQ], g.dk = &s.t[DK], g.dv = &s.t[DV_];
  if (u && u->tries) { // a callback's failure is an error only on its rank
    int has = size.head_hi > size.head_lo;
    CHECK(ulysses_local_forward(plan, batch, &a, naive, u) ==
              (u->fail && has ? ULYSSES_NUMERIC : ULYSSES_OK) &&
          u->calls == has);
    u->fail = 0;
  }
  if (overlap) {
    overlapped(plan, batch, &a, &g);
  } else {
    OK(u ? ulysses_local_forward(plan, batch, &a, naive, u)
         : ulysses_attention_forward(plan, batch, &a));
    OK(u ? ulysses_local_backward(plan, batch, &a, &g, naive, u)
         : ulysses_attention_backward(plan, batch, &a, &g));
  }
  free(a.saved), free(a.workspace);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
  return s;
}

// The indices of a layer's tensors of tokens, and of its weights.
enum { X, DY, Y, DX };
enum { WQ, WK, WV, WO, BQ, BO, QN, KN, WEIGHTS };
static const int64_t weight_shape[WEIGHTS][2] = {{HQ * D, HIDDEN},
                                                 {HKV * D, HIDDEN},
                                                 {HKV * DV, HIDDEN},
                                                 {HIDDEN, HQ * DV},
                                                 {HQ * D, 0},
                                                 {HIDDEN, 0},
                                                 {D, 0},
                                                 {D, 0}};
typedef struct {
  float *dw[WEIGHTS];
  int64_t n[WEIGHTS];
} weights;

// layer runs a whole layer with norms, biases and rotation forward and backward. out gets this
// rank's share of the gradients of weights.
static set layer(ulysses_context *c, int32_t flags, weights *out) {
  ulysses_plan *plan = planned(c, ULYSSES_CAUSAL | flags);
  ulysses_batch_desc bd;
  ulysses_batch *batch;
  ulysses_batch_info info;
  ulysses_sizes size;
  ULYSSES_INIT(&bd), ULYSSES_INIT(&info), ULYSSES_INIT(&size);
  bd.batch = B, bd.seq = S;
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &info));
  set s = {info.lo[0], info.hi[0], 0, 0, 0, {0}, {{0}}, {0}, {0}, {{0}}};
  for (int i = 0; i < 4; i++) {
    add(&s, s.lo, s.hi, S, HIDDEN, 1);
    s.t[i].ndim = 3;
  }
  float *w[WEIGHTS], *angle[2];
  int64_t shape[WEIGHTS][2], positions[B * S], rotary_shape[2] = {B * info.rows, D / 2};
  ulysses_tensor tw[WEIGHTS], tdw[WEIGHTS], rotary[2];
  for (int i = 0; i < WEIGHTS; i++) {
    out->n[i] = weight_shape[i][0] * (weight_shape[i][1] ? weight_shape[i][1] : 1);
    memcpy(shape[i], weight_shape[i], sizeof shape[i]);
    w[i] = allocate((uint64_t)out->n[i] * 4), out->dw[i] = allocate((uint64_t)out->n[i] * 4);
    for (int64_t k = 0; k < out->n[i]; k++)
      w[i][k] = number(20 + i, k) + (i >= QN ? 1.0f : 0), out->dw[i][k] = 0;
    tw[i] = ulysses_tensor_of(w[i], 1, 0, ULYSSES_F32, weight_shape[i][1] ? 2 : 1, shape[i], NULL);
    tdw[i] = ulysses_tensor_of(out->dw[i], 1, 0, ULYSSES_F32, weight_shape[i][1] ? 2 : 1, shape[i],
                               NULL);
  }
  OK(ulysses_batch_positions(batch, positions));
  for (int k = 0; k < 2; k++) {
    angle[k] = allocate((uint64_t)(rotary_shape[0] * rotary_shape[1]) * 4);
    for (int64_t i = 0; i < rotary_shape[0] * rotary_shape[1]; i++) {
      double x = (double)positions[i / rotary_shape[1]] /
                 pow(100, (double)(i % rotary_shape[1]) / (double)rotary_shape[1]);
      angle[k][i] = (float)(k ? sin(x) : cos(x));
    }
    rotary[k] = ulysses_tensor_of(angle[k], 1, 0, ULYSSES_F32, 2, rotary_shape, NULL);
  }
  ulysses_attention_layer_args a;
  ulysses_attention_layer_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.hidden = HIDDEN, a.x = &s.t[X], a.wq = &tw[WQ], a.wk = &tw[WK], a.wv = &tw[WV], a.wo = &tw[WO],
  a.bq = &tw[BQ], a.bo = &tw[BO], a.q_norm = &tw[QN], a.k_norm = &tw[KN];
  a.cos = &rotary[0], a.sin = &rotary[1], a.y = &s.t[Y];
  OK(ulysses_attention_layer_sizes(plan, batch, &a, &size));
  a.saved = allocate(size.saved), a.saved_bytes = size.saved,
  a.workspace = allocate(size.workspace), a.workspace_bytes = size.workspace;
  g.dy = &s.t[DY], g.dx = &s.t[DX], g.dwq = &tdw[WQ], g.dwk = &tdw[WK], g.dwv = &tdw[WV],
  g.dwo = &tdw[WO], g.dbq = &tdw[BQ], g.dbo = &tdw[BO];
  g.dq_norm = &tdw[QN], g.dk_norm = &tdw[KN];
  OK(ulysses_attention_layer_forward(plan, batch, &a));
  OK(ulysses_attention_layer_backward(plan, batch, &a, &g));
  for (int i = 0; i < WEIGHTS; i++) free(w[i]);
  free(angle[0]), free(angle[1]), free(a.saved), free(a.workspace);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
  return s;
}

// bf16: a plan in BF16 is refused by name if the device does not compute in it. A reshard of BF16
// works in any case.
static void bf16(ulysses_context *c) {
  ulysses_attention_desc d;
  ULYSSES_INIT(&d);
  d.dtype = ULYSSES_BF16, d.heads = HQ, d.head_dim = D;
  ulysses_plan *plan;
  ulysses_status status = ulysses_attention_plan(c, &d, &plan);
  CHECK(status == ULYSSES_OK ||
        (status == ULYSSES_UNSUPPORTED && strstr(ulysses_last_error(), "BF16")));
  if (status == ULYSSES_OK) ulysses_plan_destroy(plan);
  plan = planned(c, 0);
  ulysses_batch_desc bd;
  ulysses_batch *batch;
  ulysses_batch_info info;
  ulysses_sizes size;
  ULYSSES_INIT(&bd), ULYSSES_INIT(&info), ULYSSES_INIT(&size);
  bd.batch = B, bd.seq = S;
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &info));
  OK(ulysses_plan_sizes(plan, batch, &size));
  int64_t mine = size.shared_hi - size.shared_lo, rows[4] = {B, info.rows, HKV, D},
          heads[4] = {B, S, mine, D};
  uint16_t *x = allocate((uint64_t)(B * info.rows * HKV * D) * 2),
           *y = allocate((uint64_t)(B * S * mine * D) * 2),
           *z = allocate((uint64_t)(B * info.rows * HKV * D) * 2);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < info.rows * HKV * D; i++)
      x[b * info.rows * HKV * D + i] = (uint16_t)((b * S + info.lo[0]) * HKV * D + i);
  ulysses_tensor tx = ulysses_tensor_of(x, 1, 0, ULYSSES_BF16, 4, rows, NULL),
                 ty = ulysses_tensor_of(y, 1, 0, ULYSSES_BF16, 4, heads, NULL),
                 tz = ulysses_tensor_of(z, 1, 0, ULYSSES_BF16, 4, rows, NULL);
  const ulysses_tensor *in = &tx;
  ulysses_tensor *out = &ty;
  int32_t shared = 1;
  ulysses_reshard_args a;
  ULYSSES_INIT(&a);
  a.n = 1, a.in = &in, a.out = &out, a.shared = &shared;
  OK(ulysses_reshard_workspace(plan, batch, &a, 1, &a.workspace_bytes));
  a.workspace = a.workspace_bytes ? allocate(a.workspace_bytes) : NULL;
  OK(ulysses_seq_to_heads(plan, batch, &a));
  free(a.workspace);
  for (int64_t b = 0; b < B; b++)
    for (int64_t i = 0; i < S; i++)
      for (int64_t k = 0; k < mine * D; k++)
        CHECK(y[((b * S + i) * mine) * D + k] ==
              (uint16_t)(((b * S + i) * HKV + size.shared_lo) * D + k));
  in = &ty, out = &tz, a.workspace = NULL, a.workspace_bytes = 0;
  OK(ulysses_reshard_workspace(plan, batch, &a, 0, &a.workspace_bytes));
  a.workspace = a.workspace_bytes ? allocate(a.workspace_bytes) : NULL;
  OK(ulysses_heads_to_seq(plan, batch, &a));
  CHECK(memcmp(x, z, (size_t)(B * info.rows * HKV * D) * 2) == 0);
  free(a.workspace), free(x), free(y), free(z);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
}

// equal checks that tensors of two sets are bitwise equal.
static void equal(const set *x, const set *y, int from, int to) {
  for (int i = from; i <= to; i++)
    CHECK(memcmp(x->x[i], y->x[i], (size_t)(B * x->shape[i][1] * x->row[i]) * 4) == 0);
}

// compare compares the results on the ranks of c with the ones of a context alone.
static void compare(ulysses_context *alone, ulysses_context *c, int fails) {
  const int32_t kinds[] = {ULYSSES_CAUSAL, 0, ULYSSES_CROSS};
  for (int i = 0; i < 3; i++) {
    own mine = {kinds[i] == ULYSSES_CAUSAL, 0, 0, 0},
        flawed = {kinds[i] == ULYSSES_CAUSAL, fails, 0, 1};
    set whole = attend(alone, kinds[i], NULL, 0), part = attend(c, kinds[i], NULL, 0),
        over = attend(c, kinds[i], NULL, 1), theirs = attend(c, kinds[i], &mine, 0),
        after = attend(c, kinds[i], &flawed, 0);
    for (int k = OUT; k <= DV_; k++)
      near("attention", &part, &whole, k, k == OUT || k == LSE || k == DQ ? 0 : CLOSE);
    equal(&over, &part, OUT, DV_);
    for (int k = OUT; k <= DV_; k++)
      if (k != LSE)
        near("the host's own", &theirs, &whole, k, CLOSE),
            near("after a failure", &after, &whole, k, CLOSE);
    free_set(&part), free_set(&over), free_set(&theirs), free_set(&after), free_set(&whole);
  }
  weights sum, over, want;
  set whole = layer(alone, 0, &want), part = layer(c, 0, &sum),
      hidden = layer(c, ULYSSES_OVERLAP, &over);
  near("layer", &part, &whole, Y, CLOSE), near("layer", &part, &whole, DX, CLOSE);
  equal(&hidden, &part, Y, DX);
  for (int i = 0; i < WEIGHTS; i++) {
    CHECK(memcmp(over.dw[i], sum.dw[i], (size_t)sum.n[i] * 4) == 0);
    MPI_Allreduce(MPI_IN_PLACE, sum.dw[i], (int)sum.n[i], MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    double most = 0;
    for (int64_t k = 0; k < sum.n[i]; k++) most = fmax(most, fabs((double)want.dw[i][k]));
    for (int64_t k = 0; k < sum.n[i]; k++)
      CHECK(fabs((double)sum.dw[i][k] - (double)want.dw[i][k]) <= 2e-5 * most && most > 1e-3);
    free(sum.dw[i]), free(over.dw[i]), free(want.dw[i]);
  }
  free_set(&part), free_set(&hidden), free_set(&whole);
  bf16(c);
}

int main(int argc, char **argv) {
  int rank, size;
  ulysses_context *alone, *c, *mine;
  open_ranks(&argc, &argv, &rank, &size, &alone, &c);
  compare(alone, c, rank == size - 1);
  collectives own = {MPI_COMM_WORLD, 0, 0};
  ulysses_host_comm host = host_comm(&own);
  ulysses_options o;
  ULYSSES_INIT(&o);
  o.threads = 1;
  OK(ulysses_context_create_host(&host, &o, &mine));
  compare(alone, mine, rank == size - 1);
  ulysses_context_destroy(mine), ulysses_context_destroy(c), ulysses_context_destroy(alone);
  MPI_Finalize();
  if (rank == 0) printf("ok layers %d\n", size);
  return 0;
}
