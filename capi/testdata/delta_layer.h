// The whole layer of the gated delta rule, forward and backward, for a rank's rows: packed
// documents, with and without the gated norm, in host memory or on a GPU. `exact` compares the
// output and all gradients with double precision.
#pragma once
#include "delta.h"

enum { WIDTH = 4, CHANNELS = 2 * HK * DK + HV * DV };
#define EPS 1e-5f
enum { L_QKV, L_A, L_B, L_Z, L_DOUT, L_OUT, L_DQKV, L_DA, L_DB, L_DZ, L_TENSORS };
enum { W_CONV, W_A_LOG, W_DT_BIAS, W_NORM, WEIGHTS };
// [B, rows, heads, features]; features 0 = [B, rows, heads]
static const int64_t layer_shape[L_TENSORS][2] = {
    [L_QKV] = {CHANNELS, 0}, [L_A] = {HV, 0},    [L_B] = {HV, 0},          [L_Z] = {HV, DV},
    [L_DOUT] = {HV, DV},     [L_OUT] = {HV, DV}, [L_DQKV] = {CHANNELS, 0}, [L_DA] = {HV, 0},
    [L_DB] = {HV, 0},        [L_DZ] = {HV, DV}};
static const int64_t weight_shape[WEIGHTS][2] = {{CHANNELS, WIDTH}, {HV, 0}, {HV, 0}, {DV, 0}};

typedef struct {
  set rows;
  float *w[WEIGHTS], *dw[WEIGHTS]; // weights, and this rank's share of their gradients
} layer_outcome;

static inline int64_t weight_count(int i) {
  return weight_shape[i][0] * (weight_shape[i][1] ? weight_shape[i][1] : 1);
}

// weight_tensors copies weights or their gradients to the GPU, if there is one, and describes them.
static inline void weight_tensors(const gpu_memory *m, float **x, int64_t (*shape)[2],
                                  ulysses_tensor *t) {
  for (int i = 0; i < WEIGHTS; i++)
    t[i] = ulysses_tensor_of(m ? m->to_gpu(x[i], (uint64_t)weight_count(i) * 4, m->stream) : x[i],
                             m ? ULYSSES_CUDA : ULYSSES_CPU, m ? m->ordinal : 0, ULYSSES_F32,
                             weight_shape[i][1] ? 2 : 1, shape[i], NULL);
}

// without_some: gradients of weights that are not wanted may be NULL. The others are added to.
static inline void without_some(const how *h, ulysses_plan *plan, const ulysses_batch *batch,
                                const ulysses_gdn_layer_args *a, ulysses_gdn_layer_grads g,
                                const float *da_log) {
  float once[HV];
  if (h->gpu) return;
  memcpy(once, da_log, sizeof once);
  g.dconv = g.ddt_bias = g.dnorm = NULL;
  OK(ulysses_gdn_layer_backward(plan, batch, a, &g));
  for (int i = 0; i < HV; i++) {
    CHECK(fabsf(da_log[i] - 2 * once[i]) <= 1e-6f * fmaxf(1, fabsf(once[i])));
    ((float *)g.da_log->data)[i] = once[i];
  }
}

// whole_layer runs the layer forward and backward and returns its tensors.
static inline layer_outcome whole_layer(ulysses_context *c, const how *h, int normed) {
  layer_outcome r;
  ulysses_gdn_desc d;
  ulysses_batch_desc bd;
  ulysses_batch_info info;
  ulysses_sizes size;
  ulysses_plan *plan;
  ulysses_batch *batch;
  const gpu_memory *m = h->gpu;
  ULYSSES_INIT(&d), ULYSSES_INIT(&bd), ULYSSES_INIT(&info), ULYSSES_INIT(&size);
  d.dtype = ULYSSES_F32, d.strategy = h->strategy, d.conv_width = WIDTH,
  d.flags = ULYSSES_QK_L2NORM | ULYSSES_DETERMINISTIC | (normed ? ULYSSES_GATED_NORM : 0);
  d.qk_heads = HK, d.v_heads = HV, d.qk_dim = DK, d.v_dim = DV;
  bd.batch = B, bd.seq = S, bd.docs = DOCS, bd.cu_seqlens = cu;
  OK(ulysses_gdn_plan(c, &d, &plan));
  OK(ulysses_batch_create(c, &bd, &batch));
  OK(ulysses_batch_query(batch, &info));
  OK(ulysses_gdn_layer_sizes(plan, batch, &size));
  r.rows = (set){info.lo[0], info.hi[0], 0, 0, 0, {0}, {{0}}, {0}, {0}, {{0}}};
  set *s = &r.rows;
  for (int i = 0; i < L_TENSORS; i++) {
    int64_t features = layer_shape[i][1];
    add(s, s->lo, s->hi, S, layer_shape[i][0], features ? features : 1);
    for (int64_t k = 0; k < count(s, i); k++) s->x[i][k] = i < L_OUT ? 4 * s->x[i][k] : NAN;
    if (m)
      s->t[i] = ulysses_tensor_of(m->to_gpu(s->x[i], (uint64_t)count(s, i) * 4, m->stream),
                                  ULYSSES_CUDA, m->ordinal, ULYSSES_F32, 4, s->shape[i], NULL);
    s->t[i].ndim = features ? 4 : 3;
  }
  int64_t shape[WEIGHTS][2];
  memcpy(shape, weight_shape, sizeof shape);
  ulysses_tensor w[WEIGHTS], dw[WEIGHTS];
  for (int i = 0; i < WEIGHTS; i++) {
    r.w[i] = allocate((uint64_t)weight_count(i) * 4),
    r.dw[i] = allocate((uint64_t)weight_count(i) * 4);
    for (int64_t k = 0; k < weight_count(i); k++)
      r.w[i][k] = number(20 + i, k) + (i == W_NORM ? 1 : 0), r.dw[i][k] = 0;
  }
  weight_tensors(m, r.w, shape, w), weight_tensors(m, r.dw, shape, dw);
  ulysses_gdn_layer_args a;
  ulysses_gdn_layer_grads g;
  ULYSSES_INIT(&a), ULYSSES_INIT(&g);
  a.qkv = &s->t[L_QKV], a.a = &s->t[L_A], a.b = &s->t[L_B], a.out = &s->t[L_OUT];
  a.conv = &w[W_CONV], a.a_log = &w[W_A_LOG], a.dt_bias = &w[W_DT_BIAS];
  g.dout = &s->t[L_DOUT], g.dqkv = &s->t[L_DQKV], g.da = &s->t[L_DA], g.db = &s->t[L_DB];
  g.dconv = &dw[W_CONV], g.da_log = &dw[W_A_LOG], g.ddt_bias = &dw[W_DT_BIAS];
  if (normed)
    a.eps = EPS, a.z = &s->t[L_Z], a.norm = &w[W_NORM], g.dz = &s->t[L_DZ], g.dnorm = &dw[W_NORM];
  a.stream = m ? m->stream : NULL;
  OK(ulysses_gdn_layer_forward(plan, batch, &a)); // saves nothing, in the context's own workspace
  a.saved = m ? m->allocate(size.saved) : allocate(size.saved), a.saved_bytes = size.saved;
  a.workspace = m ? m->allocate(size.workspace) : allocate(size.workspace),
  a.workspace_bytes = size.workspace;
  OK(ulysses_gdn_layer_forward(plan, batch, &a));
  for (int i = 0; m && i <= L_B; i++)
    m->overwrite(s->t[i].data, (uint64_t)count(s, i) * 4, m->stream);
  a.qkv = a.a = a.b = NULL, a.out = NULL; // backward reads none of them
  OK(ulysses_gdn_layer_backward(plan, batch, &a, &g));
  without_some(h, plan, batch, &a, g, r.dw[W_A_LOG]);
  for (int i = 0; m && i < L_TENSORS; i++) {
    if (i >= L_OUT) floats_to_host(m, s->x[i], s->t[i].data, count(s, i), ULYSSES_F32);
    else m->release(s->t[i].data);
  }
  for (int i = 0; m && i < WEIGHTS; i++) {
    m->release(w[i].data);
    floats_to_host(m, r.dw[i], dw[i].data, weight_count(i), ULYSSES_F32);
  }
  if (m) m->release(a.workspace), m->release(a.saved);
  else free(a.workspace), free(a.saved);
  ulysses_plan_destroy(plan), ulysses_batch_destroy(batch);
  return r;
}

// The inputs and weights of the layer in double precision.
enum { INPUTS = L_DOUT + WEIGHTS };
static inline double silu(double x) { return x / (1 + exp(-x)); }

// layer_loss computes the layer token by token and returns sum(dout*out). out may be NULL.
static inline double layer_loss(double *const *x, const float *dout, int normed, double *out) {
  const double *conv = x[L_DOUT + W_CONV];
  double loss = 0, y[CHANNELS], state[HV][DK][DV];
  for (int doc = 0; doc < DOCS; doc++) {
    memset(state, 0, sizeof state);
    for (int64_t t = cu[doc]; t < cu[doc + 1]; t++) {
      for (int c = 0; c < CHANNELS; c++) {
        y[c] = 0;
        for (int i = 0; i < WIDTH; i++)
          if (t - WIDTH + 1 + i >= cu[doc])
            y[c] += conv[c * WIDTH + i] * x[L_QKV][(t - WIDTH + 1 + i) * CHANNELS + c];
        y[c] = silu(y[c]);
      }
      for (int h = 0; h < HV; h++) {
        const double *q = y + h / (HV / HK) * DK, *k = q + HK * DK, *v = y + 2 * HK * DK + h * DV;
        double qq = 1e-6, kk = 1e-6, o[DV], square = 0, beta = 1 / (1 + exp(-x[L_B][t * HV + h]));
        double decay = exp(-exp(x[L_DOUT + W_A_LOG][h]) *
                           log1p(exp(x[L_A][t * HV + h] + x[L_DOUT + W_DT_BIAS][h])));
        for (int i = 0; i < DK; i++) qq += q[i] * q[i], kk += k[i] * k[i];
        for (int j = 0; j < DV; j++) {
          double u = v[j];
          o[j] = 0;
          for (int i = 0; i < DK; i++) u -= (state[h][i][j] *= decay) * k[i] / sqrt(kk);
          for (int i = 0; i < DK; i++)
            state[h][i][j] += k[i] / sqrt(kk) * u * beta,
                o[j] += state[h][i][j] * q[i] / sqrt(qq * DK);
          square += o[j] * o[j];
        }
        for (int j = 0; j < DV; j++) {
          int64_t at = (t * HV + h) * DV + j;
          if (normed)
            o[j] *= x[L_DOUT + W_NORM][j] * silu(x[L_Z][at]) / sqrt(square / DV + (double)EPS);
          loss += o[j] * (double)dout[at];
          if (out) out[at] = o[j];
        }
      }
    }
  }
  return loss;
}

// exact compares the results of one rank with double precision. Gradients are the slopes of the
// loss, by differences of fourth order.
static inline void exact(const layer_outcome *r, int normed) {
  double *x[INPUTS], out[B * S * HV * DV];
  int64_t n[INPUTS];
  const float *found[INPUTS];
  const set *s = &r->rows;
  for (int i = 0; i < INPUTS; i++) {
    int w = i - L_DOUT;
    const float *from = w < 0 ? s->x[i] : r->w[w];
    n[i] = w < 0 ? count(s, i) : weight_count(w);
    found[i] = w < 0 ? s->x[L_DQKV + i] : r->dw[w];
    x[i] = allocate((uint64_t)n[i] * 8);
    for (int64_t k = 0; k < n[i]; k++) x[i][k] = (double)from[k];
  }
  layer_loss(x, s->x[L_DOUT], normed, out);
  double most = 0, off = 0;
  for (int64_t k = 0; k < count(s, L_OUT); k++)
    most = fmax(most, fabs(out[k])), off = fmax(off, fabs(out[k] - (double)s->x[L_OUT][k]));
  CHECK(most > 0.05 && off <= CLOSE * most);
  for (int i = 0; i < INPUTS; i++) {
    if (!normed && (i == L_Z || i == L_DOUT + W_NORM)) continue;
    most = off = 0;
    for (int64_t k = 0; k < n[i]; k++) {
      const double step = 1e-4, keep = x[i][k], by[4] = {-2, -1, 1, 2}, factor[4] = {1, -8, 8, -1};
      double slope = 0;
      for (int e = 0; e < 4; e++) {
        x[i][k] = keep + by[e] * step;
        slope += factor[e] * layer_loss(x, s->x[L_DOUT], normed, NULL) / (12 * step);
      }
      x[i][k] = keep;
      most = fmax(most, fabs(slope)), off = fmax(off, fabs(slope - (double)found[i][k]));
    }
    if (!(most > 0.01 && off <= CLOSE * most))
      fprintf(stderr, "input %d, norm %d: error %g, largest gradient %g\n", i, normed, off, most);
    CHECK(most > 0.01 && off <= CLOSE * most);
  }
  for (int i = 0; i < INPUTS; i++) free(x[i]);
}

// layers_agree compares a rank's results with the results of one rank. limit 0 = bitwise equal,
// except for sums over the ranks: dqkv where ranks share a key head, and the gradients of weights,
// which the caller has added if there are several ranks. summed 0 = these are not compared.
static inline void layers_agree(const char *what, const layer_outcome *part,
                                const layer_outcome *whole, int normed, int summed, double limit) {
  const double close = fmax(limit, CLOSE);
  for (int i = L_OUT; i < (normed ? L_TENSORS : L_DZ); i++)
    near(what, &part->rows, &whole->rows, i, i == L_DQKV ? close : limit);
  for (int i = 0; summed && i < (normed ? WEIGHTS : W_NORM); i++) {
    double most = 0;
    for (int64_t k = 0; k < weight_count(i); k++) most = fmax(most, fabs((double)whole->dw[i][k]));
    CHECK(most > 0.01);
    for (int64_t k = 0; k < weight_count(i); k++)
      CHECK(fabs((double)part->dw[i][k] - (double)whole->dw[i][k]) <= close * most);
  }
}

static inline void free_layer(layer_outcome *r) {
  free_set(&r->rows);
  for (int i = 0; i < WEIGHTS; i++) free(r->w[i]), free(r->dw[i]);
}
