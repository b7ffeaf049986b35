// A C host with its own MPI: the gated delta rule over ranks by heads and by states, packed documents, states in and out; each rank's rows are
// held to those of one rank alone, and its output and states to the recurrence in double precision.
#include "ranks.h"
#include "rows.h"

enum { HK = 2, HV = 6, DK = 8, DV = 5, DOCS = 5, STATE = DOCS * HV * DK * DV };
enum { Q, K, V, G, BETA, DOUT, OUT, DQ, DK_, DV_, DG, DBETA, TENSORS };
enum { IN, ENDS, DENDS, DIN, STATES };
static const int64_t cu[DOCS + 1] = {0, 1, 6, 13, 20, 26};
static const int keys[TENSORS] = {[Q] = 1, [K] = 1, [DQ] = 1, [DK_] = 1}, gates[TENSORS] = {[G] = 1, [BETA] = 1, [DG] = 1, [DBETA] = 1};

typedef struct { set rows; float *state[STATES]; } outcome;

// settle turns numbers around 0 into decays, some of them strong, and betas between 0 and 1.
static void settle(set *s) {
  for (int64_t i = 0; i < B * s->shape[G][1] * HV; i++) {
    s->x[G][i] = -(s->x[G][i] + 0.5f) * (s->x[G][i] > 0.4f ? 20 : 1);
    s->x[BETA][i] += 0.5f;
  }
}

static outcome rule(ulysses_context *c, int32_t strategy, int states) {
  outcome r;
  ulysses_gdn_desc d;
  ulysses_batch_desc bd;
  ulysses_batch_info info;
  ulysses_sizes size;
  ulysses_plan *plan;
  ulysses_batch *batch;
  ULYSSES_INIT(&d), ULYSSES_INIT(&bd), ULYSSES_INIT(&info), ULYSSES_INIT(&size);
  d.dtype = ULYSSES_F32, d.flags = ULYSSES_QK_L2NORM | (states ? ULYSSES_STATES : 0), d.strategy = strategy, d.qk_heads = HK, d.v_heads = HV, d.qk_dim = DK, d.v_dim = DV;
  bd.batch = B, bd.seq = S, bd.docs = DOCS, bd.cu_seqlens = cu;
  OK(ulysses_gdn_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &info));
  OK(ulysses_plan_sizes(plan, batch, &size));
  CHECK(strstr(ulysses_plan_json(plan), strategy == ULYSSES_GDN_STATE ? "\"strategy\":\"state\"" : "\"strategy\":\"heads\""));
  r.rows = (set){info.lo[0], info.hi[0], 0, 0, 0, {0}, {{0}}, {0}, {0}, {{0}}};
  set *s = &r.rows;
  for (int i = 0; i < TENSORS; i++) {
    add(s, s->lo, s->hi, S, keys[i] ? HK : HV, gates[i] ? 1 : keys[i] ? DK : DV);
    if (gates[i]) s->t[i].ndim = 3;
  }
  settle(s);
  int64_t shape[4] = {DOCS, HV, DK, DV};
  ulysses_tensor t[STATES];
  for (int i = 0; i < STATES; i++) {
    r.state[i] = room(STATE * 4);
    t[i] = floats(r.state[i], shape);
    for (int64_t k = 0; k < STATE; k++) r.state[i][k] = number(40 + i, k);
  }
  ulysses_gdn_args a;
  ulysses_gdn_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.q = &s->t[Q], a.k = &s->t[K], a.v = &s->t[V], a.g = &s->t[G], a.beta = &s->t[BETA], a.out = &s->t[OUT];
  a.saved = room(size.saved), a.saved_bytes = size.saved, a.workspace = room(size.workspace), a.workspace_bytes = size.workspace;
  g.dout = &s->t[DOUT], g.dq = &s->t[DQ], g.dk = &s->t[DK_], g.dv = &s->t[DV_], g.dg = &s->t[DG], g.dbeta = &s->t[DBETA];
  if (states) a.state_in = &t[IN], a.state_out = &t[ENDS], g.dstate_out = &t[DENDS], g.dstate_in = &t[DIN];
  OK(ulysses_gdn_forward(plan, batch, &a));
  a.q = a.k = a.v = a.g = a.beta = NULL, a.out = a.state_out = NULL; // backward reads none of them
  free(a.workspace), a.workspace = NULL, a.workspace_bytes = 0;      // the context's own
  OK(ulysses_gdn_backward(plan, batch, &a, &g));
  if (!states) {
    g.dstate_in = &t[DIN];
    IS(ulysses_gdn_backward(plan, batch, &a, &g), ULYSSES_INVALID_ARGUMENT);
    CHECK(strstr(ulysses_last_error(), "ULYSSES_STATES"));
  }
  free(a.saved);

  // The plan's reshard cuts as it does, where heads travel.
  int64_t mine = size.head_hi - size.head_lo, heads[4] = {B, S, mine, DV};
  float *y = room((uint64_t)(B * S * mine * DV) * 4);
  ulysses_tensor ty = floats(y, heads), *out = &ty;
  const ulysses_tensor *in = &s->t[V];
  ulysses_reshard_args m;
  ULYSSES_INIT(&m);
  m.n = 1, m.in = &in, m.out = &out;
  if (strategy == ULYSSES_GDN_STATE) IS(ulysses_reshard_workspace(plan, batch, &m, 1, &m.workspace_bytes), ULYSSES_INVALID_ARGUMENT);
  else {
    OK(ulysses_reshard_workspace(plan, batch, &m, 1, &m.workspace_bytes));
    m.workspace = m.workspace_bytes ? room(m.workspace_bytes) : NULL;
    OK(ulysses_seq_to_heads(plan, batch, &m));
    for (int64_t i = 0; i < B * S; i++)
      for (int64_t k = 0; k < mine * DV; k++) CHECK(y[i * mine * DV + k] == number(V, i * HV * DV + size.head_lo * DV + k));
    free(m.workspace);
  }
  free(y);
  ulysses_attention_args wrong;
  ULYSSES_INIT(&wrong);
  IS(ulysses_attention_forward(plan, batch, &wrong), ULYSSES_INVALID_ARGUMENT);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
  return r;
}

// recurrence is the rule token after token: what `whole` says of output and last states must be that.
static void recurrence(const outcome *whole, int states) {
  const set *s = &whole->rows;
  double most = 0, off = 0;
  for (int h = 0; h < HV; h++)
    for (int doc = 0; doc < DOCS; doc++) {
      double state[DK][DV];
      for (int i = 0; i < DK * DV; i++) state[i / DV][i % DV] = states ? (double)whole->state[IN][(doc * HV + h) * DK * DV + i] : 0;
      for (int64_t t = cu[doc]; t < cu[doc + 1]; t++) {
        const float *q = s->x[Q] + (t * HK + h / (HV / HK)) * DK, *k = s->x[K] + (t * HK + h / (HV / HK)) * DK, *v = s->x[V] + (t * HV + h) * DV;
        double qq = 1e-6, kk = 1e-6, decay = exp((double)s->x[G][t * HV + h]);
        for (int i = 0; i < DK; i++) qq += (double)q[i] * (double)q[i], kk += (double)k[i] * (double)k[i];
        for (int j = 0; j < DV; j++) {
          double u = (double)v[j], o = 0;
          for (int i = 0; i < DK; i++) u -= (state[i][j] *= decay) * (double)k[i] / sqrt(kk);
          for (int i = 0; i < DK; i++) state[i][j] += (double)k[i] / sqrt(kk) * u * (double)s->x[BETA][t * HV + h], o += state[i][j] * (double)q[i] / sqrt(qq * DK);
          most = fmax(most, fabs(o)), off = fmax(off, fabs(o - (double)s->x[OUT][(t * HV + h) * DV + j]));
        }
      }
      for (int i = 0; states && i < DK * DV; i++) CHECK(fabs(state[i / DV][i % DV] - (double)whole->state[ENDS][(doc * HV + h) * DK * DV + i]) < 2e-5);
    }
  CHECK(most > 0.05 && off <= 2e-5 * most);
}

static void end(outcome *r) {
  drop(&r->rows);
  for (int i = 0; i < STATES; i++) free(r->state[i]);
}

// hostile: what cannot be is refused, on all ranks alike, and the context goes on.
static void hostile(ulysses_context *c, int rank, int size) {
  ulysses_gdn_desc good, d;
  ulysses_plan *plan = NULL;
  ULYSSES_INIT(&good);
  good.dtype = ULYSSES_F32, good.qk_heads = HK, good.v_heads = HV, good.qk_dim = DK, good.v_dim = DV;
  IS(ulysses_gdn_plan(c, NULL, &plan), ULYSSES_INVALID_ARGUMENT);
  IS(ulysses_gdn_plan(c, &good, NULL), ULYSSES_INVALID_ARGUMENT);
  d = good, d.v_heads = HV + 1;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  CHECK(strstr(ulysses_last_error(), "multiple"));
  d = good, d.strategy = 3;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  d = good, d.chunk = 7;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  d = good, d.flags = ULYSSES_CAUSAL;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  d = good, d.scale = (float)NAN;
  IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  d = good, d.dtype = ULYSSES_I32;
  CHECK(ulysses_gdn_plan(c, &d, &plan) != ULYSSES_OK && !plan);
  if (size > 1) {
    d = good, d.qk_dim = rank ? DK : DK + 1;
    IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
    d = good, d.flags = rank ? ULYSSES_STATES : 0;
    IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
    d = good, d.strategy = rank ? ULYSSES_GDN_HEADS : ULYSSES_GDN_STATE;
    IS(ulysses_gdn_plan(c, &d, &plan), ULYSSES_INVALID_ARGUMENT);
  }
  IS(ulysses_gdn_forward(NULL, NULL, NULL), ULYSSES_INVALID_ARGUMENT);
  d = good, d.max_tokens = B * S;
  OK(ulysses_gdn_plan(c, &d, &plan)); // auto chooses, and says why
  CHECK(size == 1 || strstr(ulysses_plan_json(plan), "bytes"));
  ulysses_plan_destroy(plan);
}

int main(int argc, char **argv) {
  int rank, size;
  ulysses_context *alone, *c;
  open_ranks(&argc, &argv, &rank, &size, &alone, &c);
  for (int states = 0; states < 2; states++) {
    outcome whole = rule(alone, ULYSSES_GDN_HEADS, states);
    recurrence(&whole, states);
    for (int32_t strategy = ULYSSES_GDN_HEADS; strategy <= ULYSSES_GDN_STATE; strategy++) {
      outcome part = rule(c, strategy, states);
      for (int i = OUT; i < TENSORS; i++) near(strategy == ULYSSES_GDN_HEADS ? "heads" : "state", &part.rows, &whole.rows, i, strategy == ULYSSES_GDN_HEADS);
      for (int i = ENDS; states && i < STATES; i++)
        for (int64_t k = 0; k < STATE; k++)
          CHECK(strategy == ULYSSES_GDN_HEADS ? part.state[i][k] == whole.state[i][k] : fabsf(part.state[i][k] - whole.state[i][k]) <= 2e-5f);
      end(&part);
    }
    end(&whole);
  }
  hostile(c, rank, size);
  ulysses_context_destroy(c), ulysses_context_destroy(alone);
  MPI_Finalize();
  if (rank == 0) printf("ok gdn %d\n", size);
  return 0;
}
