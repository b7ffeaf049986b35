// Sums. ColumnSum: dst [N] += Σ over rows of x [T, N], with dst in F32. Sum: out = Σ x in F64, for
// dense F32 x. SumSquares: out += Σ x². RankSum: elementwise sum, maximum or minimum over arrays of
// several ranks that are mapped into this process. The order of additions depends on shapes only.
#include "check.h"
#include "columns.h"
#include "values.h"

namespace {

constexpr int BLOCK = 256;

template <typename T> struct PlainRows {
  enum { K = Wide<T>::LANES };
  const T *x;
  int64_t stride;
  PlainRows from(int64_t column) const { return {x + column, stride}; }
  template <bool ALIGNED>
  __device__ __forceinline__ void get(int64_t r, int64_t column, int64_t left, float (&v)[K]) const {
    load_some<ALIGNED, K>(x + r * stride + column, left, v);
  }
};

template <typename T> void column_sum_of(uly_stream *s, const uly_column_sum *a) {
  const int64_t n = a->x.shape[1], stride = a->x.stride[0];
  const bool aligned = n % Wide<T>::LANES == 0 && aligned16(a->x.data, sizeof(T), stride);
  start_columns(s, PlainRows<T>{(const T *)a->x.data, stride}, aligned, a->x.shape[0], n, (float *)a->dst.data);
}

int32_t column_sum(uly_device *d, uly_stream *s, const void *args) {
  const uly_column_sum *a = (const uly_column_sum *)args;
  Check c(d, "ColumnSum");
  const int type = c.compute("x", a->x);
  c.rows("x", a->x, type, {-1, -1});
  c.dense("dst", a->dst, ULY_F32, {a->x.shape[1]});
  if (c.failed() || elements(a->x) == 0) return c.code;
  if (type == ULY_F32) column_sum_of<float>(s, a);
  else column_sum_of<bf16>(s, a);
  return check_launch(d, "cuda.ColumnSum");
}

// sum_part writes the sum of `count` elements of x to partial[b] for block b. The thread and the
// partial sum of an element do not depend on alignment.
template <bool SQUARES> __global__ void __launch_bounds__(BLOCK)
    sum_part(const float *x, int64_t n, int64_t count, bool aligned, double *partial) {
  __shared__ double room[BLOCK / 32];
  const int64_t lo = (int64_t)blockIdx.x * count, hi = least(n, lo + count);
  double sum[4] = {0, 0, 0, 0};
#pragma unroll 2
  for (int64_t i = lo + 4 * threadIdx.x; i < hi; i += 4 * BLOCK) {
    float v[4];
    load_flat<4>(x + i, hi - i, aligned, v);
#pragma unroll
    for (int j = 0; j < 4; j++) sum[j] += SQUARES ? (double)v[j] * v[j] : (double)v[j];
  }
  const double all = block_sum((sum[0] + sum[1]) + (sum[2] + sum[3]), room);
  if (threadIdx.x == 0) partial[blockIdx.x] = all;
}

// sum_fold writes the sum of the parts to out, or adds it to out.
__global__ void __launch_bounds__(BLOCK) sum_fold(const double *partial, int64_t parts, double *out, bool add) {
  __shared__ double room[BLOCK / 32];
  double sum = 0;
  for (int64_t p = threadIdx.x; p < parts; p += BLOCK) sum += partial[p];
  sum = block_sum(sum, room);
  if (threadIdx.x == 0) *out = add ? *out + sum : sum;
}

int32_t sum_of(uly_device *d, uly_stream *s, const uly_sum *a, const char *op, bool squares) {
  Check c(d, op);
  c.dense("x", a->x, ULY_F32, Shape(a->x));
  c.dense("out", a->out, ULY_F64, Shape(a->out));
  if (elements(a->out) != 1) c.refuse("out is %s: want one element", text_of(a->out).c_str());
  if (c.failed()) return c.code;
  const int64_t n = elements(a->x), count = sum_part_elements(n), parts = ceil_div(n, count);
  const float *x = (const float *)a->x.data;
  double *partial = (double *)s->scratch;
  const bool aligned = aligned16(x, 4);
  if (parts > 0) {
    if (squares) LAUNCH(sum_part<true>, (unsigned)parts, BLOCK, 0, s, x, n, count, aligned, partial);
    else LAUNCH(sum_part<false>, (unsigned)parts, BLOCK, 0, s, x, n, count, aligned, partial);
  }
  LAUNCH(sum_fold, 1, BLOCK, 0, s, partial, parts, (double *)a->out.data, squares);
  return check_launch(d, squares ? "cuda.SumSquares" : "cuda.Sum");
}

int32_t sum(uly_device *d, uly_stream *s, const void *args) {
  return sum_of(d, s, (const uly_sum *)args, "Sum", false);
}
int32_t sum_squares(uly_device *d, uly_stream *s, const void *args) {
  return sum_of(d, s, (const uly_sum *)args, "SumSquares", true);
}

struct Ranks {
  const void *src[ULY_MAX_RANKS];
};

// Sums<T>::In is the type in which values of type T are added.
template <typename T> struct Sums {
  typedef T In;
};
template <> struct Sums<bf16> {
  typedef float In;
};
template <typename A, typename T> __device__ __forceinline__ A value_of(T x) { return (A)x; }
template <> __device__ __forceinline__ float value_of<float, bf16>(bf16 x) { return widen(x); }
template <typename T, typename A> __device__ __forceinline__ T of_value(A x) { return (T)x; }
template <> __device__ __forceinline__ bf16 of_value<bf16, float>(float x) { return narrow<bf16>(x); }

enum { SUM, MAX, MIN };
template <int HOW, typename A> __device__ __forceinline__ A joined(A x, A v) {
  if (HOW == SUM) return x + v;
  return (HOW == MAX ? v > x : v < x) || v != v ? v : x; // NaN is kept
}

// rank_sum_flat: dst may be one of src, because a thread reads an element of every rank before it
// writes.
template <typename T, int HOW, int K> __global__ void __launch_bounds__(BLOCK)
    rank_sum_flat(T *dst, Ranks r, int ranks, int64_t units) {
  typedef typename Sums<T>::In A;
  const int64_t stride = (int64_t)gridDim.x * BLOCK;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < units; i += stride) {
    Pack<T, K> v = ((const Pack<T, K> *)r.src[0])[i];
    A x[K];
#pragma unroll
    for (int j = 0; j < K; j++) x[j] = value_of<A>(v.v[j]);
#pragma unroll 4
    for (int k = 1; k < ranks; k++) {
      v = ((const Pack<T, K> *)r.src[k])[i];
#pragma unroll
      for (int j = 0; j < K; j++) x[j] = joined<HOW>(x[j], value_of<A>(v.v[j]));
    }
#pragma unroll
    for (int j = 0; j < K; j++) v.v[j] = of_value<T>(x[j]);
    ((Pack<T, K> *)dst)[i] = v;
  }
}

template <typename T, int HOW> void start_rank_sum(uly_stream *s, const uly_rank_sum *a) {
  constexpr int K = Wide<T>::LANES;
  Ranks r;
  bool aligned = aligned16(a->dst, sizeof(T));
  for (int k = 0; k < a->ranks; k++) r.src[k] = a->src[k], aligned = aligned && aligned16(a->src[k], sizeof(T));
  const int64_t packs = aligned ? a->n / K : 0, done = packs * K, rest = a->n - done;
  T *dst = (T *)a->dst;
  if (packs) LAUNCH((rank_sum_flat<T, HOW, K>), blocks_for(packs, BLOCK), BLOCK, 0, s, dst, r, a->ranks, packs);
  for (int k = 0; k < a->ranks; k++) r.src[k] = (const T *)r.src[k] + done;
  if (rest) LAUNCH((rank_sum_flat<T, HOW, 1>), blocks_for(rest, BLOCK), BLOCK, 0, s, dst + done, r, a->ranks, rest);
}

template <typename T> void rank_sum_of(uly_stream *s, const uly_rank_sum *a) {
  switch (a->how) {
    case SUM: return start_rank_sum<T, SUM>(s, a);
    case MAX: return start_rank_sum<T, MAX>(s, a);
    default: return start_rank_sum<T, MIN>(s, a);
  }
}

int32_t rank_sum(uly_device *d, uly_stream *s, const void *args) {
  const uly_rank_sum *a = (const uly_rank_sum *)args;
  Check c(d, "RankSum");
  if (a->ranks < 1 || a->ranks > ULY_MAX_RANKS) c.refuse("%d ranks: want 1 to %d", a->ranks, (int)ULY_MAX_RANKS);
  if (a->how < SUM || a->how > MIN) c.refuse("operation %d: want 0 (sum), 1 (max) or 2 (min)", a->how);
  if (a->n < 0) c.refuse("%lld elements", (long long)a->n);
  bool memory = a->dst != nullptr;
  for (int k = 0; k < a->ranks && !c.failed(); k++) memory = memory && a->src[k] != nullptr;
  if (!memory && a->n > 0) c.refuse("%lld elements without memory", (long long)a->n);
  bool aligned = !misaligned(a->dst, a->dtype);
  for (int k = 0; k < a->ranks && !c.failed(); k++) aligned = aligned && !misaligned(a->src[k], a->dtype);
  if (!aligned)
    c.refuse("%s: addresses must be multiples of the type's %lld bytes", name_of(a->dtype),
             (long long)size_of(a->dtype));
  if (c.failed() || a->n == 0) return c.code;
  switch (a->dtype) {
    case ULY_F32: rank_sum_of<float>(s, a); break;
    case ULY_BF16: rank_sum_of<bf16>(s, a); break;
    case ULY_F64: rank_sum_of<double>(s, a); break;
    case ULY_I32: rank_sum_of<int32_t>(s, a); break;
    case ULY_I64: rank_sum_of<int64_t>(s, a); break;
    default:
      return fail(d, ULY_UNSUPPORTED, "cuda.RankSum: %s: sums are of F32, BF16, F64, I32 and I64", name_of(a->dtype));
  }
  return check_launch(d, "cuda.RankSum");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_COLUMN_SUM, "own", column_sum},
    {ULY_OP_SUM, "own", sum},
    {ULY_OP_SUM_SQUARES, "own", sum_squares},
    {ULY_OP_RANK_SUM, "own", rank_sum},
});
