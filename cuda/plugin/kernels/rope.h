// The functions of Rope that rope.cu and moves.cu share: the rotation of a unit of a head, and that
// of a head after its norm.
#pragma once

#include "values.h"

template <typename T> struct RopeArgs {
  Rows rows; // heads of tokens, of x and y
  const T *x;
  T *y;
  const float *cosine, *sine;
  // pairs: units of pairs in a head; each: all units of a head; units: units of all heads
  int64_t half, pairs, each, units;
  Divider by;
  bool narrow;
  float sign;
};

// rotate_pairs rotates K pairs (p, q) by their angles.
template <int K> __device__ __forceinline__ void rotate_pairs(const float *cosine, const float *sine, float sign,
                                                              float (&p)[K], float (&q)[K]) {
  float c[K], s[K];
  load<K>(cosine, c);
  load<K>(sine, s);
#pragma unroll
  for (int j = 0; j < K; j++) {
    const float sn = s[j] * sign, first = p[j] * c[j] - q[j] * sn;
    q[j] = q[j] * c[j] + p[j] * sn;
    p[j] = first;
  }
}

// rope_unit processes unit i: K pairs of a head, or K copied features. y may be x, because a thread
// reads a pair before it writes it.
template <typename T, int K> __device__ __forceinline__ void rope_unit(const RopeArgs<T> &a, int64_t i) {
  const int64_t r = a.narrow ? (int64_t)a.by((uint32_t)i) : i / a.each, u = i - r * a.each;
  int64_t t, h;
  a.rows.split(r, &t, &h);
  const T *x = a.x + t * a.rows.token[0] + h * a.rows.head[0] + u * K;
  T *y = a.y + t * a.rows.token[1] + h * a.rows.head[1] + u * K;
  float p[K], q[K];
  load<K>(x + a.half, q);
  if (u >= a.pairs) { // features from 2·half on
    store<K>(y + a.half, q);
    return;
  }
  load<K>(x, p);
  rotate_pairs<K>(a.cosine + t * a.half + u * K, a.sine + t * a.half + u * K, a.sign, p, q);
  store<K>(y, p);
  store<K>(y + a.half, q);
}

template <typename T> struct NormArgs {
  const T *w; // NULL = no norm
  float *rstd;
  int64_t n, token; // features of a head; stride of rstd
  float eps, centre;
};

enum { ROPE_LANES = 16 }; // threads that process a head together

// rope_head normalizes head r and then rotates it. ROPE_LANES threads take part, also if there is
// no head r. The second read of the head hits the cache. y may be x.
template <typename T, int K>
__device__ __forceinline__ void rope_head(const RopeArgs<T> &a, const NormArgs<T> &b, int64_t r) {
  constexpr int G = ROPE_LANES;
  const int lane = threadIdx.x % G;
  const int64_t n = r < a.rows.rows ? b.n : 0; // 0: only take part in the shuffles
  int64_t t, h;
  a.rows.split(r, &t, &h);
  const T *x = a.x + t * a.rows.token[0] + h * a.rows.head[0];
  T *y = a.y + t * a.rows.token[1] + h * a.rows.head[1];
  float p[K], q[K], sum = 0;
  for (int64_t c = lane * K; c < n; c += G * K) {
    load<K>(x + c, p);
#pragma unroll
    for (int i = 0; i < K; i++) sum += p[i] * p[i];
  }
  const float rstd = 1.0f / sqrtf(group_sum<G>(sum, nullptr) / (float)b.n + b.eps);
  if (n == 0) return;
  if (lane == 0) b.rstd[t * b.token + h] = rstd;
  const auto get = [&](int64_t c, float (&v)[K]) {
    float w[K];
    load<K>(b.w + c, w);
    load<K>(x + c, v);
#pragma unroll
    for (int i = 0; i < K; i++) v[i] = widen(narrow<T>((w[i] + b.centre) * (v[i] * rstd)));
  };
  for (int64_t u = lane; u < a.each; u += G) {
    const int64_t i = u * K;
    get(a.half + i, q);
    if (u >= a.pairs) {
      store<K>(y + a.half + i, q);
      continue;
    }
    get(i, p);
    rotate_pairs<K>(a.cosine + t * a.half + i, a.sine + t * a.half + i, a.sign, p, q);
    store<K>(y + i, p);
    store<K>(y + a.half + i, q);
  }
}
