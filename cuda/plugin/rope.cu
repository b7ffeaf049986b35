// Rotary embeddings (Su et al. 2021): the table of angles, and the rotation of heads by it.
#include "check.h"
#include "values.h"

namespace {

constexpr int BLOCK = 256;

// rope_table: the angle and its sine and cosine are in double precision: at position 10⁶ a float angle is wrong by 0.06.
__global__ void __launch_bounds__(BLOCK)
    rope_table(const int32_t *positions, const float *freq, float *cosine, float *sine, int64_t n, int64_t half, Divider by, bool narrow, double scale) {
  const int64_t stride = (int64_t)gridDim.x * BLOCK;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < n; i += stride) {
    const int64_t t = narrow ? (int64_t)by((uint32_t)i) : i / half;
    double s, c;
    turn_by((double)positions[t] * (double)freq[i - t * half], &s, &c);
    cosine[i] = (float)(c * scale);
    sine[i] = (float)(s * scale);
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
  if (c.failed() || n == 0) return c.code;
  LAUNCH(rope_table, blocks_for(n, BLOCK), BLOCK, 0, s, (const int32_t *)a->positions.data, (const float *)a->freq.data, (float *)a->cos.data,
         (float *)a->sin.data, n, half, Divider(half), is_narrow(n), a->scale == 0 ? 1.0 : a->scale);
  return started(d, "cuda.RopeTable");
}

template <typename T> struct Turned {
  Rows rows; // x, y: heads of tokens
  const T *x;
  T *y;
  const float *cosine, *sine;
  int64_t half, pairs, each, units; // pairs: units of a head that are pairs; each: all its units; units: of all heads
  Divider by;
  bool narrow;
  float sign;
};

// rope_units: a unit is K pairs of a head, or K of the features that are copied. y may be x: a pair is read before it is written.
template <typename T, int K> __global__ void __launch_bounds__(BLOCK) rope_units(Turned<T> a) {
  const int64_t stride = (int64_t)gridDim.x * BLOCK;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < a.units; i += stride) {
    const int64_t r = a.narrow ? (int64_t)a.by((uint32_t)i) : i / a.each, u = i - r * a.each;
    int64_t t, h;
    a.rows.split(r, &t, &h);
    const T *x = a.x + t * a.rows.token[0] + h * a.rows.head[0] + u * K;
    T *y = a.y + t * a.rows.token[1] + h * a.rows.head[1] + u * K;
    float p[K], q[K], c[K], s[K];
    load<K>(x + a.half, q);
    if (u >= a.pairs) { // behind both halves of the pairs
      store<K>(y + a.half, q);
      continue;
    }
    load<K>(x, p);
    load<K>(a.cosine + t * a.half + u * K, c);
    load<K>(a.sine + t * a.half + u * K, s);
#pragma unroll
    for (int j = 0; j < K; j++) {
      const float turn = s[j] * a.sign, first = p[j] * c[j] - q[j] * turn;
      q[j] = q[j] * c[j] + p[j] * turn;
      p[j] = first;
    }
    store<K>(y, p);
    store<K>(y + a.half, q);
  }
}

template <typename T, int K> void start_rope(uly_stream *s, Turned<T> a, int64_t copied) {
  a.pairs = a.half / K;
  a.each = a.pairs + copied / K;
  a.units = a.rows.rows * a.each;
  if (a.units == 0) return;
  a.by = Divider(a.each);
  a.narrow = is_narrow(a.units);
  LAUNCH((rope_units<T, K>), blocks_for(a.units, BLOCK), BLOCK, 0, s, a);
}

template <typename T> void rope_of(uly_stream *s, const uly_rope *p) {
  constexpr int K = Wide<T>::LANES;
  const uly_tensor *operands[] = {&p->x, &p->y};
  Turned<T> a = {};
  a.rows = Rows(operands, 2);
  a.x = (const T *)p->x.data, a.y = (T *)p->y.data;
  a.cosine = (const float *)p->cos.data, a.sine = (const float *)p->sin.data;
  a.half = p->cos.shape[1];
  a.sign = p->inverse ? -1.0f : 1.0f;
  const int64_t copied = p->x.data == p->y.data ? 0 : p->x.shape[2] - 2 * a.half;
  const bool table = (uintptr_t)a.cosine % (4 * K) == 0 && (uintptr_t)a.sine % (4 * K) == 0;
  const bool aligned = a.half % K == 0 && copied % K == 0 && table && aligned16(a.x, sizeof(T), a.rows.token[0], a.rows.head[0]) &&
                       aligned16(a.y, sizeof(T), a.rows.token[1], a.rows.head[1]);
  if (aligned) start_rope<T, K>(s, a, copied);
  else start_rope<T, 1>(s, a, copied);
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
  if (c.failed() || elements(a->x) == 0) return c.code;
  if (type == ULY_F32) rope_of<float>(s, a);
  else rope_of<bf16>(s, a);
  return started(d, "cuda.Rope");
}

} // namespace

const uly_row rope_rows[] = {
    {ULY_OP_ROPE_TABLE, "own", table, nullptr},
    {ULY_OP_ROPE, "own", rope, nullptr},
    {0, nullptr, nullptr, nullptr},
};
