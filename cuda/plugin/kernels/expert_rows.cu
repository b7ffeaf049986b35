// The rows of experts (device/experts.go): SpreadRows copies tokens to their rows, CombineRows adds
// the rows of a token, and WeightedSwiGLUBackward is the backward pass of an expert's activation,
// whose output has a weight by row. A warp has a token or a row.
#include "check.h"
#include "faults.h"
#include "swiglu.h"

namespace {

enum { WARPS = 8, THREADS = 32 * WARPS };

__device__ __forceinline__ int64_t first_of_warp() { return (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; }
__device__ __forceinline__ int64_t all_warps() { return (int64_t)gridDim.x * WARPS; }

template <typename T> struct Moved {
  const T *x, *own;
  T *y;
  const int32_t *rows;
  const float *weights, *own_weights;
  int64_t tokens, k, n, x_step, y_step, own_step;
  uly_fault *fault;

  // row returns the row of choice j of a token; -1, with a fault, if there is none.
  __device__ __forceinline__ int64_t row(int64_t t, int64_t j, int op) const {
    const int32_t r = rows[t * k + j];
    if (r >= 0 && r < tokens * k) return r;
    report(fault, op, r, t);
    return -1;
  }
};

template <typename T, bool ALIGNED> __global__ void __launch_bounds__(THREADS) spread_rows(Moved<T> a) {
  constexpr int K = Wide<T>::LANES;
  for (int64_t t = first_of_warp(); t < a.tokens; t += all_warps())
    for (int64_t i = threadIdx.x % 32 * K; i < a.n; i += 32 * K) {
      Pack<T, K> x;
      load_raw<ALIGNED>(a.x + t * a.x_step + i, a.n - i, x);
      for (int64_t j = 0; j < a.k; j++) {
        const int64_t r = a.row(t, j, ULY_OP_SPREAD_ROWS);
        if (r >= 0) store_raw<ALIGNED>(a.y + r * a.y_step + i, a.n - i, x);
      }
    }
}

template <typename T, bool ALIGNED> __global__ void __launch_bounds__(THREADS, 6) combine_rows(Moved<T> a) {
  constexpr int K = Wide<T>::LANES;
  for (int64_t t = first_of_warp(); t < a.tokens; t += all_warps())
    for (int64_t i = threadIdx.x % 32 * K; i < a.n; i += 32 * K) {
      float sum[K] = {};
      auto add = [&](const T *from, float w) {
        float x[K];
        load_some<ALIGNED, K>(from + i, a.n - i, x);
#pragma unroll
        for (int e = 0; e < K; e++) sum[e] = fmaf(w, x[e], sum[e]);
      };
#pragma unroll 4
      for (int64_t j = 0; j < a.k; j++) {
        const int64_t r = a.row(t, j, ULY_OP_COMBINE_ROWS);
        if (r >= 0) add(a.x + r * a.x_step, a.weights ? a.weights[r] : 1.0f);
      }
      if (a.own) add(a.own + t * a.own_step, a.own_weights ? a.own_weights[t] : 1.0f);
      store_some<ALIGNED, K>(a.y + t * a.y_step + i, a.n - i, sum);
    }
}

template <typename T> void start_rows(uly_stream *s, bool spread, const uly_combine_rows &a) {
  const Moved<T> m = {(const T *)a.x.data,
                      (const T *)a.own.data,
                      (T *)a.y.data,
                      (const int32_t *)a.rows.data,
                      (const float *)a.weights.data,
                      (const float *)a.own_weights.data,
                      a.rows.shape[0],
                      a.rows.shape[1],
                      a.x.shape[1],
                      a.x.stride[0],
                      a.y.stride[0],
                      a.own.stride[0],
                      s->fault};
  const unsigned grid = blocks_for(m.tokens, WARPS);
  const bool vectors = aligned_rows({&a.x, &a.y, &a.own});
  if (spread && vectors) LAUNCH((spread_rows<T, true>), grid, THREADS, 0, s, m);
  else if (spread) LAUNCH((spread_rows<T, false>), grid, THREADS, 0, s, m);
  else if (vectors) LAUNCH((combine_rows<T, true>), grid, THREADS, 0, s, m);
  else LAUNCH((combine_rows<T, false>), grid, THREADS, 0, s, m);
}

// move_rows runs an operation between tokens [T, N] and rows [T·k, N]; x has tokens if `spread`.
int32_t move_rows(uly_device *d, uly_stream *s, const char *op, bool spread, const uly_combine_rows &a) {
  Check c(d, op);
  const int type = c.compute("x", a.x);
  c.dense("rows", a.rows, ULY_I32, {-1, -1});
  c.rows("x", a.x, type, {-1, -1});
  if (c.failed()) return c.code;
  const int64_t tokens = a.rows.shape[0], k = a.rows.shape[1], n = a.x.shape[1];
  c.rows("x", a.x, type, {spread ? tokens : tokens * k, n});
  c.rows("y", a.y, type, {spread ? tokens * k : tokens, n});
  if (a.weights.dtype) c.dense("weights", a.weights, ULY_F32, {tokens * k});
  if (a.own.dtype) c.rows("own", a.own, type, {tokens, n});
  if (a.own_weights.dtype) c.dense("own weights", a.own_weights, ULY_F32, {tokens});
  if (c.failed() || tokens * n == 0) return c.code;
  if (type == ULY_F32) start_rows<float>(s, spread, a);
  else start_rows<bf16>(s, spread, a);
  return check_launch(d, op);
}

int32_t spread(uly_device *d, uly_stream *s, const void *args) {
  const uly_spread_rows &a = *(const uly_spread_rows *)args;
  uly_combine_rows r = {};
  r.x = a.x, r.rows = a.rows, r.y = a.y;
  return move_rows(d, s, "SpreadRows", true, r);
}

int32_t combine(uly_device *d, uly_stream *s, const void *args) {
  return move_rows(d, s, "CombineRows", false, *(const uly_combine_rows *)args);
}

template <typename T> struct Weighted {
  const T *gate, *up;
  T *dy, *dgate, *dup;
  const float *weights;
  float *dweights;
  int64_t rows, n, gate_step, up_step, dy_step, dgate_step, dup_step;
  bool restore;
};

// dgate and dup may be gate and up: a thread loads its elements before it stores.
template <typename T, typename Form, bool ALIGNED> __global__ void __launch_bounds__(THREADS)
    weighted_swiglu(Weighted<T> a) {
  constexpr int K = Wide<T>::LANES;
  for (int64_t r = first_of_warp(); r < a.rows; r += all_warps()) {
    const float w = a.weights[r];
    float sum = 0;
    for (int64_t i = threadIdx.x % 32 * K; i < a.n; i += 32 * K) {
      float gate[K], up[K], dy[K];
      load_some<ALIGNED, K>(a.gate + r * a.gate_step + i, a.n - i, gate);
      load_some<ALIGNED, K>(a.up + r * a.up_step + i, a.n - i, up);
      load_some<ALIGNED, K>(a.dy + r * a.dy_step + i, a.n - i, dy);
#pragma unroll
      for (int e = 0; e < K; e++) {
        const SwiGLUOf<Form, T> of(gate[e], up[e]);
        const float y = of.y(), ds = w * dy[e] * of.s;
        sum = fmaf(dy[e], y, sum);
        gate[e] = of.dgate(ds);
        up[e] = of.dup(ds);
        dy[e] = w * y;
      }
      store_some<ALIGNED, K>(a.dgate + r * a.dgate_step + i, a.n - i, gate);
      store_some<ALIGNED, K>(a.dup + r * a.dup_step + i, a.n - i, up);
      if (a.restore) store_some<ALIGNED, K>(a.dy + r * a.dy_step + i, a.n - i, dy);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) a.dweights[r] = sum;
  }
}

template <typename T> void start_weighted(uly_stream *s, const uly_weighted_swiglu_grad &a) {
  const Weighted<T> w = {(const T *)a.gate.data,   (const T *)a.up.data, (T *)a.dy.data,
                         (T *)a.dgate.data,        (T *)a.dup.data,      (const float *)a.weights.data,
                         (float *)a.dweights.data, a.gate.shape[0],      a.gate.shape[1],
                         a.gate.stride[0],         a.up.stride[0],       a.dy.stride[0],
                         a.dgate.stride[0],        a.dup.stride[0],      a.restore};
  const unsigned grid = blocks_for(w.rows, WARPS);
  const bool vectors = aligned_rows({&a.gate, &a.up, &a.dy, &a.dgate, &a.dup});
  with_form(a, [&](auto form) {
    typedef decltype(form) Form;
    if (vectors) LAUNCH((weighted_swiglu<T, Form, true>), grid, THREADS, 0, s, w);
    else LAUNCH((weighted_swiglu<T, Form, false>), grid, THREADS, 0, s, w);
  });
}

int32_t weighted(uly_device *d, uly_stream *s, const void *args) {
  const uly_weighted_swiglu_grad &a = *(const uly_weighted_swiglu_grad *)args;
  Check c(d, "WeightedSwiGLUBackward");
  const int type = c.compute("gate", a.gate);
  c.rows("gate", a.gate, type, {-1, -1});
  c.rows("up", a.up, type, Shape(a.gate));
  c.rows("dy", a.dy, type, Shape(a.gate));
  c.rows("dgate", a.dgate, type, Shape(a.gate));
  c.rows("dup", a.dup, type, Shape(a.gate));
  c.dense("weights", a.weights, ULY_F32, {a.gate.shape[0]});
  c.dense("dweights", a.dweights, ULY_F32, {a.gate.shape[0]});
  check_form(c, a);
  if (c.failed() || a.gate.shape[0] == 0) return c.code;
  if (type == ULY_F32) start_weighted<float>(s, a);
  else start_weighted<bf16>(s, a);
  return check_launch(d, "cuda.WeightedSwiGLUBackward");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_SPREAD_ROWS, "own", spread},
    {ULY_OP_COMBINE_ROWS, "own", combine},
    {ULY_OP_WEIGHTED_SWIGLU_BACKWARD, "own", weighted},
});
