// Rotary embeddings (Su et al. 2021, arXiv:2104.09864). RopeTable: cos and sin [T, half] of
// positions [T] · freq [half], times scale and the gain of the position. Rope: y = x [T, H, D],
// where features i and half + i are rotated by angle i of the token, and features from 2·half on
// are copied. With w, each head is first normalized by RMSNorm.
#include "check.h"
#include "moves.h"

namespace {

constexpr int BLOCK = 256;

// rope_table computes an angle as one float product, as transformers does, and its sine and cosine
// in double precision. With length above 0, they are multiplied by
// 1 + beta·ln(1 + ⌊position/length⌋).
__global__ void __launch_bounds__(BLOCK)
    rope_table(const int32_t *positions, const float *freq, float *cosine, float *sine, int64_t n, int64_t half,
               Divider by, bool narrow, double scale, double beta, uint32_t length) {
  const int64_t stride = (int64_t)gridDim.x * BLOCK;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < n; i += stride) {
    const int64_t t = narrow ? (int64_t)by((uint32_t)i) : i / half;
    double s, c;
    sine_cosine((double)((float)positions[t] * freq[i - t * half]), &s, &c);
    const float steps = length ? logf((float)(1 + (uint32_t)positions[t] / length)) : 0.0f;
    const double factor = scale * fma(beta, (double)steps, 1.0);
    cosine[i] = (float)(c * factor);
    sine[i] = (float)(s * factor);
  }
}

int32_t table(uly_device *d, uly_stream *s, const void *args) {
  const uly_rope_table *a = (const uly_rope_table *)args;
  Check c(d, "RopeTable");
  c.dense("positions", a->positions, ULY_I32, {-1});
  c.dense("freq", a->freq, ULY_F32, {-1});
  const int64_t tokens = a->positions.shape[0], half = a->freq.shape[0], n = tokens * half;
  c.dense("cos", a->cos, ULY_F32, {tokens, half});
  c.dense("sin", a->sin, ULY_F32, {tokens, half});
  if (a->length < 0) c.refuse("length is %lld; it must be at least 0", (long long)a->length);
  if (c.failed() || n == 0) return c.code;
  LAUNCH(rope_table, blocks_for(n, BLOCK), BLOCK, 0, s, (const int32_t *)a->positions.data, (const float *)a->freq.data,
         (float *)a->cos.data, (float *)a->sin.data, n, half, Divider(half), is_narrow(n),
         a->scale == 0 ? 1.0 : a->scale, a->beta, (uint32_t)(a->length < UINT32_MAX ? a->length : UINT32_MAX));
  return check_launch(d, "cuda.RopeTable");
}

template <typename T, int K> __global__ void __launch_bounds__(BLOCK) rope_units(RopeArgs<T> a) {
  const int64_t stride = (int64_t)gridDim.x * BLOCK;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < a.units; i += stride) rope_unit<T, K>(a, i);
}

template <typename T, int K> __global__ void __launch_bounds__(BLOCK) rope_normed(RopeArgs<T> a, NormArgs<T> b) {
  constexpr int GROUPS = BLOCK / ROPE_LANES;
  for (int64_t base = (int64_t)blockIdx.x * GROUPS; base < a.rows.rows; base += (int64_t)gridDim.x * GROUPS)
    rope_head<T, K>(a, b, base + threadIdx.x / ROPE_LANES);
}

template <typename T, int K> void start_rope(uly_stream *s, RopeArgs<T> a, const NormArgs<T> &b, int64_t copied) {
  a.pairs = a.half / K;
  a.each = a.pairs + copied / K;
  if constexpr (K > 1)
    if (queue_rope(s, a, b)) return;
  if (b.w) {
    LAUNCH((rope_normed<T, K>), blocks_for(a.rows.rows * ROPE_LANES, BLOCK), BLOCK, 0, s, a, b);
    return;
  }
  a.units = a.rows.rows * a.each;
  if (a.units == 0) return;
  a.by = Divider(a.each);
  a.narrow = is_narrow(a.units);
  LAUNCH((rope_units<T, K>), blocks_for(a.units, BLOCK), BLOCK, 0, s, a);
}

template <typename T> void rope_of(uly_stream *s, const uly_rope *p) {
  constexpr int K = Wide<T>::LANES;
  const uly_tensor *operands[] = {&p->x, &p->y};
  RopeArgs<T> a = {};
  a.rows = Rows(operands, 2);
  a.x = (const T *)p->x.data, a.y = (T *)p->y.data;
  a.cosine = (const float *)p->cos.data, a.sine = (const float *)p->sin.data;
  a.half = p->cos.shape[1];
  a.sign = p->inverse ? -1.0f : 1.0f;
  const NormArgs<T> b = {(const T *)p->w.data, (float *)p->rstd.data, p->x.shape[2],
                         p->rstd.stride[0],    (float)p->eps,         (float)p->centre};
  const int64_t copied = p->x.data == p->y.data && !b.w ? 0 : p->x.shape[2] - 2 * a.half;
  const bool table = (uintptr_t)a.cosine % (4 * K) == 0 && (uintptr_t)a.sine % (4 * K) == 0;
  const bool aligned = a.half % K == 0 && copied % K == 0 && table &&
                       aligned16(a.x, sizeof(T), a.rows.token[0], a.rows.head[0]) &&
                       aligned16(a.y, sizeof(T), a.rows.token[1], a.rows.head[1]) && (uintptr_t)b.w % 16 == 0;
  if (aligned) start_rope<T, K>(s, a, b, copied);
  else start_rope<T, 1>(s, a, b, copied);
}

int32_t rope(uly_device *d, uly_stream *s, const void *args) {
  const uly_rope *a = (const uly_rope *)args;
  Check c(d, "Rope");
  const int type = c.compute("x", a->x);
  c.rows("x", a->x, type, {-1, -1, -1});
  c.rows("y", a->y, type, Shape(a->x));
  c.dense("cos", a->cos, ULY_F32, {a->x.shape[0], -1});
  c.dense("sin", a->sin, ULY_F32, Shape(a->cos));
  if (!c.failed() && 2 * a->cos.shape[1] > a->x.shape[2])
    c.refuse("x is %s, cos %s: more angles than pairs", text_of(a->x).c_str(), text_of(a->cos).c_str());
  if (a->w.data) {
    c.dense("w", a->w, type, {a->x.shape[2]});
    c.rows("rstd", a->rstd, ULY_F32, {a->x.shape[0], a->x.shape[1]});
    if (!c.failed() && a->inverse) c.refuse("a norm before the inverse: the way back is RMSNormBackward, after it");
  }
  if (c.failed() || elements(a->x) == 0) return c.code;
  if (type == ULY_F32) rope_of<float>(s, a);
  else rope_of<bf16>(s, a);
  return check_launch(d, "cuda.Rope");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_ROPE_TABLE, "own", table},
    {ULY_OP_ROPE, "own", rope},
});
