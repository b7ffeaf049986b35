// Dropout: y = x / (1 - p) for the elements that it keeps, and 0 for the others. A thread has some
// features, whose random bits stay in registers, of some tokens.
#include "check.h"
#include "random.h"
#include "values.h"

namespace {

enum { WARPS = 8, THREADS = 32 * WARPS };
constexpr Limit BLOCKS = {2048, 2}; // most blocks of a column of features

template <typename T> struct DropoutCall {
  const T *x;
  T *y;
  const int64_t *numbers;
  int64_t tokens, n, x_step, y_step, columns;
  uint64_t seed;
  uint32_t drop;
  float kept;
};

template <typename T, bool ADD, bool ALIGNED> __global__ void __launch_bounds__(THREADS)
    dropout_rows(DropoutCall<T> a) {
  constexpr int K = Wide<T>::LANES;
  const int64_t column = blockIdx.x % a.columns, first = blockIdx.x / a.columns, blocks = gridDim.x / a.columns;
  const int64_t i = (column * 32 + threadIdx.x % 32) * K;
  const uint64_t head = head_bits(a.seed, 0);
  uint32_t key[K];
#pragma unroll
  for (int e = 0; e < K; e++) key[e] = key_bits(a.seed, i + e);
  for (int64_t t = first * WARPS + threadIdx.x / 32; t < a.tokens; t += blocks * WARPS) {
    const uint64_t bits = query_bits(head, a.numbers[t]);
    float x[K], y[K];
    load_some<ALIGNED, K>(a.x + t * a.x_step + i, a.n - i, x);
    if (ADD) load_some<ALIGNED, K>(a.y + t * a.y_step + i, a.n - i, y);
#pragma unroll
    for (int e = 0; e < K; e++) {
      const float v = keeps(bits, key[e], a.drop) ? x[e] * a.kept : 0.0f;
      y[e] = ADD ? y[e] + v : v;
    }
    store_some<ALIGNED, K>(a.y + t * a.y_step + i, a.n - i, y);
  }
}

template <typename T> void start(uly_stream *s, const uly_dropout &a) {
  DropoutCall<T> c = {};
  c.x = (const T *)a.x.data, c.y = (T *)a.y.data, c.numbers = (const int64_t *)a.tokens.data;
  c.tokens = a.x.shape[0], c.n = a.x.shape[1], c.x_step = a.x.stride[0], c.y_step = a.y.stride[0];
  c.columns = ceil_div(c.n, 32 * Wide<T>::LANES);
  c.seed = (uint64_t)a.seed, c.drop = drop_of(a.p), c.kept = kept_of(a.p);
  const unsigned grid = (unsigned)(c.columns * least(ceil_div(c.tokens, WARPS), BLOCKS));
  const bool vectors = aligned_rows({&a.x, &a.y});
  if (a.add && vectors) LAUNCH((dropout_rows<T, true, true>), grid, THREADS, 0, s, c);
  else if (a.add) LAUNCH((dropout_rows<T, true, false>), grid, THREADS, 0, s, c);
  else if (vectors) LAUNCH((dropout_rows<T, false, true>), grid, THREADS, 0, s, c);
  else LAUNCH((dropout_rows<T, false, false>), grid, THREADS, 0, s, c);
}

int32_t dropout(uly_device *d, uly_stream *s, const void *args) {
  const uly_dropout &a = *(const uly_dropout *)args;
  Check c(d, "Dropout");
  const int type = c.compute("x", a.x);
  c.rows("x", a.x, type, {-1, -1});
  if (c.failed()) return c.code;
  c.rows("y", a.y, type, {a.x.shape[0], a.x.shape[1]});
  c.dense("tokens", a.tokens, ULY_I64, {a.x.shape[0]});
  if (!(a.p >= 0 && a.p < 1)) c.refuse("P is %g; it must be in [0, 1)", a.p);
  if (ceil_div(a.x.shape[1], 128) > INT32_MAX / BLOCKS) c.refuse("%lld features are too many", (long long)a.x.shape[1]);
  if (c.failed() || elements(a.x) == 0) return c.code;
  if (type == ULY_F32) start<float>(s, a);
  else start<bf16>(s, a);
  return check_launch(d, "cuda.Dropout");
}

} // namespace

static const RegisterKernels registered({{ULY_OP_DROPOUT, "own", dropout}});
