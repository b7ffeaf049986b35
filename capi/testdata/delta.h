// The gated delta rule forward and backward for a rank's rows: packed documents, with and without
// recurrent states, in host memory or on a GPU. `recurrence` compares output and states with the
// recurrence in double precision.
#pragma once
#include "rows.h"

enum { HK = 2, HV = 6, DK = 8, DV = 5, DOCS = 5, STATE = DOCS * HV * DK * DV };
enum { Q, K, V, G, BETA, DOUT, OUT, DQ, DK_, DV_, DG, DBETA, TENSORS };
enum { IN, ENDS, DENDS, DIN, STATES };
static const int64_t cu[DOCS + 1] = {0, 1, 6, 13, 20, 26};
static const int keys[TENSORS] = {[Q] = 1, [K] = 1, [DQ] = 1, [DK_] = 1},
                 gates[TENSORS] = {[G] = 1, [BETA] = 1, [DG] = 1, [DBETA] = 1};

typedef struct {
  set rows;
  float *state[STATES];
} outcome;

// Functions for memory of a GPU. They work in the order of the stream.
typedef struct {
  int32_t ordinal;
  void *stream;
  void *(*allocate)(uint64_t bytes);
  void (*release)(void *);
  void *(*to_gpu)(const void *host, uint64_t bytes, void *stream);
  void (*to_host)(void *host, const void *gpu, uint64_t bytes,
                  void *stream); // waits for the stream
  // overwrites memory that a call has read, after the call
  void (*overwrite)(void *gpu, uint64_t bytes, void *stream);
  // is called when the calls have returned; may be NULL
  void (*called)(void *stream, const void *out);
} gpu_memory;

// How the rule is called. coarse: q, k, v and dout are exact in BF16. also: further checks of a
// plan in host memory.
typedef struct how {
  int32_t strategy, dtype, chunk;
  int states, coarse;
  const gpu_memory *gpu;
  void (*also)(const struct how *, ulysses_plan *, const ulysses_batch *, const ulysses_sizes *,
               set *, ulysses_gdn_args *, ulysses_gdn_grads *);
} how;

// decays converts numbers around 0 to decays, some of them strong, and to betas between 0 and 1.
static inline void decays(set *s) {
  for (int64_t i = 0; i < B * s->shape[G][1] * HV; i++) {
    s->x[G][i] = -(s->x[G][i] + 0.5f) * (s->x[G][i] > 0.4f ? 20 : 1);
    s->x[BETA][i] += 0.5f;
  }
}

static inline int64_t count(const set *s, int i) { return B * s->shape[i][1] * s->row[i]; }
static inline uint32_t bits_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

// floats_to_gpu copies n floats to new memory of the GPU as `type`. floats_to_host copies them back
// and frees the memory.
static inline void *floats_to_gpu(const gpu_memory *m, const float *x, int64_t n, int32_t type) {
  if (type == ULYSSES_F32) return m->to_gpu(x, (uint64_t)n * 4, m->stream);
  uint16_t *half = allocate((uint64_t)n * 2);
  // the numbers are exact in BF16
  for (int64_t i = 0; i < n; i++) half[i] = (uint16_t)(bits_of(x[i]) >> 16);
  void *p = m->to_gpu(half, (uint64_t)n * 2, m->stream);
  free(half);
  return p;
}
static inline void floats_to_host(const gpu_memory *m, float *x, void *p, int64_t n, int32_t type) {
  if (type == ULYSSES_F32) m->to_host(x, p, (uint64_t)n * 4, m->stream);
  else {
    uint16_t *half = allocate((uint64_t)n * 2);
    m->to_host(half, p, (uint64_t)n * 2, m->stream);
    for (int64_t i = 0; i < n; i++) {
      uint32_t bits = (uint32_t)half[i] << 16;
      memcpy(&x[i], &bits, 4);
    }
    free(half);
  }
  m->release(p);
}

// rule runs the gated delta rule forward and backward and returns its tensors and states.
static inline outcome rule(ulysses_context *c, const how *h) {
  outcome r;
  ulysses_gdn_desc d;
  ulysses_batch_desc bd;
  ulysses_batch_info info;
  ulysses_sizes size;
  ulysses_plan *plan;
  ulysses_batch *batch;
  const gpu_memory *m = h->gpu;
  ULYSSES_INIT(&d), ULYSSES_INIT(&bd), ULYSSES_INIT(&info), ULYSSES_INIT(&size);
  d.dtype = h->dtype,
  d.flags = ULYSSES_QK_L2NORM | ULYSSES_DETERMINISTIC | (h->states ? ULYSSES_STATES : 0),
  d.strategy = h->strategy, d.chunk = h->chunk;
  d.qk_heads = HK, d.v_heads = HV, d.qk_dim = DK, d.v_dim = DV;
  bd.batch = B, bd.seq = S, bd.docs = DOCS, bd.cu_seqlens = cu;
  OK(ulysses_gdn_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &info));
  OK(ulysses_plan_sizes(plan, batch, &size));
  CHECK(strstr(ulysses_plan_json(plan), h->strategy == ULYSSES_GDN_STATE
                                            ? "\"strategy\":\"state\""
                                            : "\"strategy\":\"heads\""));
  r.rows = (set){info.lo[0], info.hi[0], 0, 0, 0, {0}, {{0}}, {0}, {0}, {{0}}};
  set *s = &r.rows;
  for (int i = 0; i < TENSORS; i++) {
    add(s, s->lo, s->hi, S, keys[i] ? HK : HV, gates[i] ? 1 : keys[i] ? DK : DV);
    if (gates[i]) s->t[i].ndim = 3;
    for (int64_t k = 0; h->coarse && k < count(s, i); k++)
      s->x[i][k] = gates[i] ? s->x[i][k] : rintf(s->x[i][k] * 128) / 128;
    if (i >= OUT) memset(s->x[i], 0xff, (size_t)count(s, i) * 4);
  }
  decays(s);
  int64_t shape[4] = {DOCS, HV, DK, DV};
  ulysses_tensor t[STATES];
  for (int i = 0; i < STATES; i++) {
    r.state[i] = allocate(STATE * 4);
    t[i] = floats(r.state[i], shape);
    for (int64_t k = 0; k < STATE; k++) r.state[i][k] = number(40 + i, k);
  }
  if (m) {
    for (int i = 0; i < TENSORS; i++) {
      int32_t type = gates[i] ? ULYSSES_F32 : h->dtype, axes = s->t[i].ndim;
      s->t[i] = ulysses_tensor_of(floats_to_gpu(m, s->x[i], count(s, i), type), ULYSSES_CUDA,
                                  m->ordinal, type, axes, s->shape[i], NULL);
    }
    for (int i = 0; i < STATES; i++)
      t[i].data = m->to_gpu(r.state[i], STATE * 4, m->stream), t[i].device = ULYSSES_CUDA,
      t[i].ordinal = m->ordinal;
  }
  ulysses_gdn_args a;
  ulysses_gdn_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.q = &s->t[Q], a.k = &s->t[K], a.v = &s->t[V], a.g = &s->t[G], a.beta = &s->t[BETA],
  a.out = &s->t[OUT], a.stream = m ? m->stream : NULL;
  a.saved = m ? m->allocate(size.saved) : allocate(size.saved), a.saved_bytes = size.saved;
  a.workspace = m ? m->allocate(size.workspace) : allocate(size.workspace),
  a.workspace_bytes = size.workspace;
  g.dout = &s->t[DOUT], g.dq = &s->t[DQ], g.dk = &s->t[DK_], g.dv = &s->t[DV_], g.dg = &s->t[DG],
  g.dbeta = &s->t[DBETA];
  if (h->states)
    a.state_in = &t[IN], a.state_out = &t[ENDS], g.dstate_out = &t[DENDS], g.dstate_in = &t[DIN];
  OK(ulysses_gdn_forward(plan, batch, &a));
  for (int i = 0; m && i <= BETA; i++)
    m->overwrite(s->t[i].data, (uint64_t)count(s, i) * (s->t[i].bits / 8), m->stream);
  void *given = a.workspace;
  a.q = a.k = a.v = a.g = a.beta = NULL, a.out = a.state_out = NULL; // backward reads none of them
  a.workspace = NULL, a.workspace_bytes = 0;                         // the context's own workspace
  OK(ulysses_gdn_backward(plan, batch, &a, &g));
  if (m) m->overwrite(s->t[DOUT].data, (uint64_t)count(s, DOUT) * (s->t[DOUT].bits / 8), m->stream);
  if (m && m->called) m->called(m->stream, s->t[DBETA].data);
  if (h->also) h->also(h, plan, batch, &size, s, &a, &g);
  if (m) {
    // the tensor that is written last is read first, when the calls may still run
    for (int i = TENSORS - 1; i >= 0; i--) {
      if (i >= OUT)
        floats_to_host(m, s->x[i], s->t[i].data, count(s, i), gates[i] ? ULYSSES_F32 : h->dtype);
      else m->release(s->t[i].data);
    }
    for (int i = 0; i < STATES; i++) floats_to_host(m, r.state[i], t[i].data, STATE, ULYSSES_F32);
    OK(ulysses_context_async_error(c));
    m->release(given), m->release(a.saved);
  } else {
    free(given), free(a.saved);
  }
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
  return r;
}

// recurrence computes the rule token by token in double precision, and compares output and final
// states with it.
static inline void recurrence(const outcome *whole, int states) {
  const set *s = &whole->rows;
  double most = 0, off = 0;
  for (int h = 0; h < HV; h++)
    for (int doc = 0; doc < DOCS; doc++) {
      double state[DK][DV];
      for (int i = 0; i < DK * DV; i++)
        state[i / DV][i % DV] = states ? (double)whole->state[IN][(doc * HV + h) * DK * DV + i] : 0;
      for (int64_t t = cu[doc]; t < cu[doc + 1]; t++) {
        const float *q = s->x[Q] + (t * HK + h / (HV / HK)) * DK,
                    *k = s->x[K] + (t * HK + h / (HV / HK)) * DK, *v = s->x[V] + (t * HV + h) * DV;
        double qq = 1e-6, kk = 1e-6, decay = exp((double)s->x[G][t * HV + h]);
        for (int i = 0; i < DK; i++)
          qq += (double)q[i] * (double)q[i], kk += (double)k[i] * (double)k[i];
        for (int j = 0; j < DV; j++) {
          double u = (double)v[j], o = 0;
          for (int i = 0; i < DK; i++) u -= (state[i][j] *= decay) * (double)k[i] / sqrt(kk);
          for (int i = 0; i < DK; i++)
            state[i][j] += (double)k[i] / sqrt(kk) * u * (double)s->x[BETA][t * HV + h],
                o += state[i][j] * (double)q[i] / sqrt(qq * DK);
          most = fmax(most, fabs(o)),
          off = fmax(off, fabs(o - (double)s->x[OUT][(t * HV + h) * DV + j]));
        }
      }
      for (int i = 0; states && i < DK * DV; i++)
        CHECK(fabs(state[i / DV][i % DV] -
                   (double)whole->state[ENDS][(doc * HV + h) * DK * DV + i]) < 2e-5);
    }
  CHECK(most > 0.05 && off <= CLOSE * most);
}

// agree compares a rank's results with the results of one rank. limit 0 = bitwise equal.
static inline void agree(const char *what, const outcome *part, const outcome *whole, int states,
                         double limit) {
  for (int i = OUT; i < TENSORS; i++) near(what, &part->rows, &whole->rows, i, limit);
  for (int i = ENDS; states && i < STATES; i++) {
    double most = 0;
    for (int64_t k = 0; k < STATE; k++) most = fmax(most, fabs((double)whole->state[i][k]));
    for (int64_t k = 0; i != DENDS && k < STATE; k++)
      CHECK(limit > 0 ? fabs((double)part->state[i][k] - (double)whole->state[i][k]) <= limit * most
                      : bits_of(part->state[i][k]) == bits_of(whole->state[i][k]));
  }
}

static inline void free_outcome(outcome *r) {
  free_set(&r->rows);
  for (int i = 0; i < STATES; i++) free(r->state[i]);
}
