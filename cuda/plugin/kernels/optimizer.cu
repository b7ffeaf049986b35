// AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and SGD. They update flat F32 arrays w, g
// (and m, v) that hold many parameters, and read each array once. `low`, if given, receives w as
// BF16. Index ranges say where weights decay. The intrinsics keep the compiler from fusing what the
// kernels of the CPU round twice, so that a step on the host gives the same weights.
#include <math.h>

#include "check.h"
#include "values.h"

namespace {

constexpr int BLOCK = 256, K = 4;

// An optimizer is a struct with step, which updates one element and returns the new weight, and
// with STATE, the number of its F32 state arrays.
struct AdamW {
  enum { STATE = 2 };
  // GradScale, 1 - β₁, β₂, 1 - β₂, lr/(1-β₁ᵗ), sqrt(1-β₂ᵗ)
  float grad, rest1, beta2, rest2, size, root, eps;
  __device__ __forceinline__ float step(float w, float g, float (&state)[2], float keep) const {
    g = __fmul_rn(g, grad);
    state[0] = fmaf(rest1, g - state[0], state[0]);
    state[1] = fmaf(state[1], beta2, rest2 * g * g);
    return __fsub_rn(__fmul_rn(w, keep), size * state[0] / (sqrtf(state[1]) / root + eps));
  }
};
struct SGD {
  enum { STATE = 0 };
  float rate; // lr·GradScale
  __device__ __forceinline__ float step(float w, float g, float (&)[1], float keep) const {
    return __fsub_rn(__fmul_rn(w, keep), __fmul_rn(rate, g));
  }
};

struct Flat {
  float *w;
  const float *g;
  float *state[2];
  bf16 *low;  // or NULL
  float keep; // 1 - lr·weight_decay
  bool aligned;
};

// update updates elements [from, to) of the ranges, in groups of K that begin at multiples of K.
template <typename S> __global__ void __launch_bounds__(BLOCK) update(S rule, Flat a, Ranges ranges) {
  constexpr int STATE = S::STATE, KEPT = STATE ? STATE : 1;
  const int64_t stride = (int64_t)gridDim.x * BLOCK * K, start = ranges.from / K * K;
  for (int64_t i = start + ((int64_t)blockIdx.x * BLOCK + threadIdx.x) * K; i < ranges.to; i += stride) {
    const int64_t lo = most(i, ranges.from), hi = least(i + K, ranges.to);
    int64_t upto;
    const bool decays = ranges.decays(lo, &upto);
    float keep = decays ? a.keep : 1.0f;
    if (a.aligned && hi - lo == K && upto >= hi) {
      float w[K], g[K], s[KEPT][K];
      load<K>(a.w + i, w);
      load<K>(a.g + i, g);
#pragma unroll
      for (int k = 0; k < STATE; k++) load<K>(a.state[k] + i, s[k]);
#pragma unroll
      for (int j = 0; j < K; j++) {
        float one[KEPT];
#pragma unroll
        for (int k = 0; k < STATE; k++) one[k] = s[k][j];
        w[j] = rule.step(w[j], g[j], one, keep);
#pragma unroll
        for (int k = 0; k < STATE; k++) s[k][j] = one[k];
      }
      store<K>(a.w + i, w);
#pragma unroll
      for (int k = 0; k < STATE; k++) store<K>(a.state[k] + i, s[k]);
      if (a.low) store<K>(a.low + i, w);
      continue;
    }
    for (int64_t j = lo; j < hi; j++) {
      if (j >= upto) keep = ranges.decays(j, &upto) ? a.keep : 1.0f;
      float one[KEPT];
#pragma unroll
      for (int k = 0; k < STATE; k++) one[k] = a.state[k][j];
      const float w = rule.step(a.w[j], a.g[j], one, keep);
      a.w[j] = w;
#pragma unroll
      for (int k = 0; k < STATE; k++) a.state[k][j] = one[k];
      if (a.low) a.low[j] = narrow<bf16>(w);
    }
  }
}

// start_update launches one kernel for every ULY_RANGES ranges.
template <typename S> void start_update(uly_stream *s, const S &rule, Flat a, int64_t n, const uly_ranges &decay) {
  a.aligned = aligned16(a.w, 4) && aligned16(a.g, 4) && (uintptr_t)a.low % (K * sizeof(bf16)) == 0;
  for (int k = 0; k < S::STATE; k++) a.aligned = a.aligned && aligned16(a.state[k], 4);
  Ranges ranges;
  for (int64_t used = 0; ranges.to < n;) {
    ranges.next(decay.data, decay.length, n, &used);
    if (ranges.to > ranges.from)
      LAUNCH(update<S>, blocks_for(ranges.to - ranges.from + K, BLOCK * K), BLOCK, 0, s, rule, a, ranges);
  }
}

// check_update checks the arguments that both optimizers share.
void check_update(Check &c, const uly_tensor &w, const uly_tensor &g, const uly_tensor &low, const uly_ranges &ranges) {
  const uly_range *decay = ranges.data;
  c.dense("w", w, ULY_F32, Shape(w));
  c.dense("g", g, ULY_F32, Shape(w));
  if (low.dtype) c.dense("low", low, ULY_BF16, Shape(w));
  int64_t at = 0;
  for (int64_t i = 0; decay && i < ranges.length && !c.failed(); i++) {
    if (decay[i].lo < at || decay[i].hi < decay[i].lo || decay[i].hi > elements(w))
      c.refuse("decay range [%lld, %lld) of %lld elements, after %lld: ranges must ascend and not overlap",
               (long long)decay[i].lo, (long long)decay[i].hi, (long long)elements(w), (long long)at);
    at = decay[i].hi;
  }
}

bf16 *low_of(const uly_tensor &low) { return low.dtype ? (bf16 *)low.data : nullptr; }

int32_t adamw(uly_device *d, uly_stream *s, const void *args) {
  const uly_adamw *a = (const uly_adamw *)args;
  Check c(d, "AdamW");
  check_update(c, a->w, a->g, a->low, a->decay);
  c.dense("m", a->m, ULY_F32, Shape(a->w));
  c.dense("v", a->v, ULY_F32, Shape(a->w));
  if (a->step < 1) c.refuse("step %lld: steps count from 1", (long long)a->step);
  if (c.failed() || elements(a->w) == 0) return c.code;
  const double t = (double)a->step;
  const AdamW rule = {(float)a->grad_scale,
                      (float)(1 - a->beta1),
                      (float)a->beta2,
                      (float)(1 - a->beta2),
                      (float)(a->lr / (1 - pow(a->beta1, t))),
                      (float)sqrt(1 - pow(a->beta2, t)),
                      (float)a->eps};
  const Flat flat = {(float *)a->w.data,
                     (const float *)a->g.data,
                     {(float *)a->m.data, (float *)a->v.data},
                     low_of(a->low),
                     (float)(1 - a->lr * a->weight_decay),
                     false};
  start_update(s, rule, flat, elements(a->w), a->decay);
  return check_launch(d, "cuda.AdamW");
}

int32_t sgd(uly_device *d, uly_stream *s, const void *args) {
  const uly_sgd *a = (const uly_sgd *)args;
  Check c(d, "SGD");
  check_update(c, a->w, a->g, a->low, a->decay);
  if (c.failed() || elements(a->w) == 0) return c.code;
  const Flat flat = {(float *)a->w.data,
                     (const float *)a->g.data,
                     {nullptr, nullptr},
                     low_of(a->low),
                     (float)(1 - a->lr * a->weight_decay),
                     false};
  start_update(s, SGD{(float)(a->lr * a->grad_scale)}, flat, elements(a->w), a->decay);
  return check_launch(d, "cuda.SGD");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_ADAMW, "own", adamw},
    {ULY_OP_SGD, "own", sgd},
});
