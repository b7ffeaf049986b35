// Cross-entropy of logits [T, V], in F32 or BF16, with targets [T]: nll[t] = log Σ e^x - x[target],
// and the gradient dlogits = (softmax - onehot) · grad_scale. A block computes a row. The first
// pass over the row finds the maximum and the sum of exponentials together (online softmax, Milakov
// and Gimelshein 2018, arXiv:1805.02867); the second pass writes the gradient. Target -100 gives a
// loss and gradients of 0. Other targets outside of [0, V) are reported (faults.h). With a softcap
// c, x is first replaced by c·tanh(x/c).
#include "check.h"
#include "faults.h"
#include "values.h"

namespace {

constexpr int BLOCK = 256, IGNORED = -100;

// Tail describes some logits: their maximum `top` and Σ e^(x - top). It is {-inf, 0} for no logits.
// A NaN in the logits makes the sum NaN.
struct Tail {
  float top, sum;
};
__device__ __forceinline__ float weight(float top, float common) { return top == common ? 1.0f : expf(top - common); }
__device__ __forceinline__ Tail joined(Tail a, Tail b) {
  const float top = fmaxf(a.top, b.top);
  return {top, a.sum * weight(a.top, top) + b.sum * weight(b.top, top)};
}
// base_of returns the value that is subtracted before exp. It is never -inf, so that e^(-inf -
// base) is 0.
__device__ __forceinline__ float base_of(float top) { return top == -INFINITY ? 0.0f : top; }

// tanh_of is tanh x. Where tanh x is large, tanhf may be wrong by two units of the last place,
// which a loss that is much smaller than the cap shows; this sum is wrong by less than one.
__device__ static inline float tanh_of(float x) {
  const float y = fabsf(x);
  return y < 0.55f ? tanhf(x) : copysignf(1 - 2 / (expf(2 * y) + 1), x);
}

// capped is cap·tanh(x/cap), rounded: the compiler cannot fuse the product with a subtraction that
// follows, so a logit minus itself is 0.
__device__ static inline float capped(float x, float cap) { return fmaf(cap, tanh_of(x / cap), 0.0f); }

template <typename L, typename D> struct Loss {
  const L *logits;
  const int32_t *targets;
  float *nll;
  D *dlogits; // may be logits; NULL = none
  int64_t rows, n, logits_row, dlogits_row;
  float scale, cap; // cap c: a logit x is first replaced by c·tanh(x/c)
  uly_fault *fault;
};

template <typename L, typename D, bool ALIGNED, bool CAPPED> __global__ void __launch_bounds__(BLOCK)
    cross_entropy(Loss<L, D> a) {
  constexpr int K = Wide<L>::LANES;
  __shared__ float tops[BLOCK / 32], sums[BLOCK / 32];
  for (int64_t r = blockIdx.x; r < a.rows; r += gridDim.x) {
    const L *x = a.logits + r * a.logits_row;
    D *d = a.dlogits ? a.dlogits + r * a.dlogits_row : nullptr;
    const int64_t target = a.targets[r];
    float v[K];
    if (target == IGNORED) {
      if (threadIdx.x == 0) a.nll[r] = 0;
#pragma unroll
      for (int i = 0; i < K; i++) v[i] = 0;
      if (d)
        for (int64_t c = threadIdx.x * K; c < a.n; c += BLOCK * K) store_some<ALIGNED, K>(d + c, a.n - c, v);
      continue;
    }
    if (target < 0 || target >= a.n) {
      if (threadIdx.x == 0) report(a.fault, ULY_OP_CROSS_ENTROPY, (int32_t)target, r);
      continue;
    }
    const float raw = widen(x[target]); // read before dlogits, which may be the same memory, is written
    const float own = CAPPED ? capped(raw, a.cap) : raw;

    Tail all = {-INFINITY, 0};
#pragma unroll 2
    for (int64_t c = threadIdx.x * K; c < a.n; c += BLOCK * K) {
      load_some<ALIGNED, K>(x + c, a.n - c, v);
      if (CAPPED) {
#pragma unroll
        for (int i = 0; i < K; i++) v[i] = capped(v[i], a.cap);
      }
      if (!ALIGNED) {
#pragma unroll
        for (int i = 0; i < K; i++)
          if (i >= a.n - c) v[i] = -INFINITY;
      }
      float top = v[0];
#pragma unroll
      for (int i = 1; i < K; i++) top = fmaxf(top, v[i]);
      if (top > all.top) {
        all.sum *= all.top == -INFINITY ? 1.0f : expf(all.top - top);
        all.top = top;
      }
      const float base = base_of(all.top);
#pragma unroll
      for (int i = 0; i < K; i++) v[i] = expf(v[i] - base);
#pragma unroll
      for (int n = 1; n < K; n *= 2)
#pragma unroll
        for (int i = 0; i < K; i += 2 * n) v[i] += v[i + n];
      all.sum += v[0];
    }
#pragma unroll
    for (int i = 16; i > 0; i /= 2)
      all = joined(all, {__shfl_xor_sync(0xffffffffu, all.top, i), __shfl_xor_sync(0xffffffffu, all.sum, i)});
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = all.top, sums[threadIdx.x / 32] = all.sum;
    __syncthreads();
    all = {tops[0], sums[0]};
    for (int w = 1; w < BLOCK / 32; w++) all = joined(all, {tops[w], sums[w]});
    __syncthreads(); // before the next row writes tops and sums

    if (threadIdx.x == 0) a.nll[r] = logf(all.sum) - (own - all.top);
    if (!d) continue;
    const float base = base_of(all.top), f = a.scale / all.sum;
#pragma unroll 2
    for (int64_t c = threadIdx.x * K; c < a.n; c += BLOCK * K) {
      load_some<ALIGNED, K>(x + c, a.n - c, v);
#pragma unroll
      for (int i = 0; i < K; i++) {
        float slope = 1.0f;
        if (CAPPED) {
          const float h = coshf(v[i] / a.cap); // 1 - tanh² would lose its digits at the cap
          v[i] = capped(v[i], a.cap), slope = 1.0f / (h * h);
        }
        const float e = expf(v[i] - base);
        v[i] = (c + i == target ? (e / all.sum - 1.0f) * a.scale : e * f) * slope;
      }
      store_some<ALIGNED, K>(d + c, a.n - c, v);
    }
  }
}

template <typename L, typename D> void start_loss(uly_stream *s, const uly_cross_entropy *p) {
  constexpr int K = Wide<L>::LANES;
  const int64_t rows = p->logits.shape[0];
  const int64_t step = rows > 1 ? p->logits.stride[0] : 0,
                dstep = rows > 1 && p->dlogits.dtype ? p->dlogits.stride[0] : 0;
  const Loss<L, D> a = {(const L *)p->logits.data,
                        (const int32_t *)p->targets.data,
                        (float *)p->nll.data,
                        p->dlogits.dtype ? (D *)p->dlogits.data : nullptr,
                        rows,
                        p->logits.shape[1],
                        step,
                        dstep,
                        (float)p->grad_scale,
                        (float)p->softcap,
                        s->fault};
  const bool aligned = a.n % K == 0 && aligned16(a.logits, sizeof(L), step) &&
                       (uintptr_t)a.dlogits % (K * sizeof(D)) == 0 && dstep % K == 0;
  const bool capped = p->softcap > 0;
  if (aligned && capped) LAUNCH((cross_entropy<L, D, true, true>), blocks_for(rows, 1), BLOCK, 0, s, a);
  else if (aligned) LAUNCH((cross_entropy<L, D, true, false>), blocks_for(rows, 1), BLOCK, 0, s, a);
  else if (capped) LAUNCH((cross_entropy<L, D, false, true>), blocks_for(rows, 1), BLOCK, 0, s, a);
  else LAUNCH((cross_entropy<L, D, false, false>), blocks_for(rows, 1), BLOCK, 0, s, a);
}

int32_t loss(uly_device *d, uly_stream *s, const void *args) {
  const uly_cross_entropy *a = (const uly_cross_entropy *)args;
  Check c(d, "CrossEntropy");
  const int type = c.compute("logits", a->logits);
  c.rows("logits", a->logits, type, {-1, -1});
  c.dense("targets", a->targets, ULY_I32, {a->logits.shape[0]});
  c.dense("nll", a->nll, ULY_F32, {a->logits.shape[0]});
  // the gradients of BF16 logits are BF16
  if (a->dlogits.dtype)
    c.rows("dlogits", a->dlogits, type == ULY_BF16 ? type : c.compute("dlogits", a->dlogits), Shape(a->logits));
  if (!(a->softcap >= 0) || std::isinf(a->softcap))
    c.refuse("softcap is %g; it must be finite and not negative", a->softcap);
  if (c.failed() || a->logits.shape[0] == 0) return c.code;
  if (type == ULY_BF16) start_loss<bf16, bf16>(s, a);
  else if (a->dlogits.dtype == ULY_BF16) start_loss<float, bf16>(s, a);
  else start_loss<float, float>(s, a);
  return check_launch(d, "cuda.CrossEntropy");
}

} // namespace

static const RegisterKernels registered({{ULY_OP_CROSS_ENTROPY, "own", loss}});
