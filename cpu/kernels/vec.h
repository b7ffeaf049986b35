// The same vector functions for all instruction sets. vf holds VW floats, vi as many int32. The
// operators + - * / & | ^ << >> work on both. Comparisons of vf return vi (all ones = true), and
// (vi)x, (vf)x reinterpret bits.
//
// v_max(a, b) and v_min(a, b) return b if a or b is NaN: a NaN in b is kept, a NaN in a is lost.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define AI static inline __attribute__((always_inline, unused))
#define NOINLINE static __attribute__((noinline, unused))
#define UNLIKELY(x) __builtin_expect(x, 0)
#define UNROLL _Pragma("GCC unroll 32")
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#if defined(ULY_AVX512)
#include <immintrin.h>
typedef __m512 vf;
AI vf v_load(const float *p) { return _mm512_loadu_ps(p); }
AI void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
AI void v_stream(float *p, vf x) { _mm512_stream_ps(p, x); }
AI void v_streamed(void) { _mm_sfence(); }
AI vf v_set1(float x) { return _mm512_set1_ps(x); }
AI vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
AI vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
AI vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
AI vf v_sqrt(vf a) { return _mm512_sqrt_ps(a); }
AI __mmask16 v_lanes_below(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
AI vf v_load_n(const float *p, int64_t n) { return _mm512_maskz_loadu_ps(v_lanes_below(n), p); }
AI void v_store_n(float *p, vf x, int64_t n) { _mm512_mask_storeu_ps(p, v_lanes_below(n), x); }
AI vf v_fill_below(vf x, int64_t n, float fill) {
  return _mm512_mask_blend_ps(v_lanes_below(n), x, _mm512_set1_ps(fill));
}
AI vf v_fill_above(vf x, int64_t n, float fill) {
  return _mm512_mask_blend_ps(v_lanes_below(n), _mm512_set1_ps(fill), x);
}
AI int v_any_ne(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ) != 0; }
AI void v_transpose(vf *r) {
  vf t[16];
  UNROLL for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    __m512d a = (__m512d)t[4 * i], b = (__m512d)t[4 * i + 1], c = (__m512d)t[4 * i + 2], d = (__m512d)t[4 * i + 3];
    r[4 * i] = (vf)_mm512_unpacklo_pd(a, c);
    r[4 * i + 1] = (vf)_mm512_unpackhi_pd(a, c);
    r[4 * i + 2] = (vf)_mm512_unpacklo_pd(b, d);
    r[4 * i + 3] = (vf)_mm512_unpackhi_pd(b, d);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
  }
  UNROLL for (int i = 0; i < 8; i++) {
    r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
  }
}

#elif defined(ULY_AVX2)
#include <immintrin.h>
typedef __m256 vf;
AI vf v_load(const float *p) { return _mm256_loadu_ps(p); }
AI void v_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
AI void v_stream(float *p, vf x) { _mm256_stream_ps(p, x); }
AI void v_streamed(void) { _mm_sfence(); }
AI vf v_set1(float x) { return _mm256_set1_ps(x); }
AI vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
AI vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
AI vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
AI vf v_sqrt(vf a) { return _mm256_sqrt_ps(a); }
AI __m256i v_lanes_below(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)MAX(0, MIN(n, 8))), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
AI vf v_load_n(const float *p, int64_t n) { return _mm256_maskload_ps(p, v_lanes_below(n)); }
AI void v_store_n(float *p, vf x, int64_t n) { _mm256_maskstore_ps(p, v_lanes_below(n), x); }
AI vf v_fill_below(vf x, int64_t n, float fill) {
  return _mm256_blendv_ps(x, _mm256_set1_ps(fill), _mm256_castsi256_ps(v_lanes_below(n)));
}
AI vf v_fill_above(vf x, int64_t n, float fill) {
  return _mm256_blendv_ps(_mm256_set1_ps(fill), x, _mm256_castsi256_ps(v_lanes_below(n)));
}
AI int v_any_ne(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_NEQ_UQ)) != 0; }
AI void v_transpose(vf *r) {
  vf t[8];
  UNROLL for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
  }
  vf u[8];
  UNROLL for (int i = 0; i < 2; i++) {
    __m256d a = (__m256d)t[4 * i], b = (__m256d)t[4 * i + 1], c = (__m256d)t[4 * i + 2], d = (__m256d)t[4 * i + 3];
    u[4 * i] = (vf)_mm256_unpacklo_pd(a, c);
    u[4 * i + 1] = (vf)_mm256_unpackhi_pd(a, c);
    u[4 * i + 2] = (vf)_mm256_unpacklo_pd(b, d);
    u[4 * i + 3] = (vf)_mm256_unpackhi_pd(b, d);
  }
  UNROLL for (int i = 0; i < 4; i++) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

#else
#if defined(ULY_NEON)
#include <arm_neon.h>
#endif
typedef float vf __attribute__((vector_size(4 * VW)));
AI vf v_load(const float *p) {
  vf x;
  memcpy(&x, p, sizeof x);
  return x;
}
AI void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
AI void v_stream(float *p, vf x) { v_store(p, x); }
AI void v_streamed(void) {}
AI vf v_set1(float x) { return (vf){x, x, x, x}; }
// The compiler fuses the two operations if the processor can (FMLA). With intrinsics it would store
// sums that are in registers: they may raise exceptions, so it takes them for writes of memory.
AI vf v_fma(vf a, vf b, vf c) { return a * b + c; }
#if defined(ULY_NEON)
AI vf v_sqrt(vf a) { return vsqrtq_f32(a); }
AI int v_any_ne(vf a, vf b) { return vminvq_u32(vceqq_f32(a, b)) == 0; }
#else
AI vf v_sqrt(vf a) {
  UNROLL for (int i = 0; i < VW; i++) a[i] = sqrtf(a[i]);
  return a;
}
AI int v_any_ne(vf a, vf b) {
  int any = 0;
  UNROLL for (int i = 0; i < VW; i++) any |= a[i] != b[i];
  return any;
}
#endif
AI vf v_max(vf a, vf b) {
  typedef int32_t m __attribute__((vector_size(4 * VW)));
  m gt = a > b;
  return (vf)(((m)a & gt) | ((m)b & ~gt));
}
AI vf v_min(vf a, vf b) {
  typedef int32_t m __attribute__((vector_size(4 * VW)));
  m lt = a < b;
  return (vf)(((m)a & lt) | ((m)b & ~lt));
}
NOINLINE vf v_load_n(const float *p, int64_t n) {
  vf x = {0};
  for (int i = 0; i < VW && i < n; i++) x[i] = p[i];
  return x;
}
NOINLINE void v_store_n(float *p, vf x, int64_t n) {
  for (int i = 0; i < VW && i < n; i++) p[i] = x[i];
}
AI vf v_fill_below(vf x, int64_t n, float fill) {
  for (int i = 0; i < VW && i < n; i++) x[i] = fill;
  return x;
}
AI vf v_fill_above(vf x, int64_t n, float fill) {
  for (int i = 0; i < VW; i++) x[i] = i < n ? x[i] : fill;
  return x;
}
AI void v_transpose(vf *r) {
  vf a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5), b = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
  vf c = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5), d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  r[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  r[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  r[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  r[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}
#endif

typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef uint32_t vu __attribute__((vector_size(4 * VW))); // shifts to the right insert zeros

// v_stream stores around the caches, to an address aligned to the vector, values that are not read
// soon. A task that uses it ends with v_streamed, which makes the values visible to other threads.
// v_load_n reads the first n >= 0 lanes, sets the others to 0 and touches no memory after them;
// v_store_n writes n lanes. v_fill_below replaces lanes [0, n) by fill, v_fill_above lanes [n, VW).
// v_any_ne returns whether some lane differs or is NaN. v_transpose transposes VW vectors in place.

AI vf v_zero(void) { return (vf){0}; }
AI vf v_add(vf a, vf b) { return a + b; }
AI vf v_sub(vf a, vf b) { return a - b; }
AI vf v_mul(vf a, vf b) { return a * b; }
AI vf v_div(vf a, vf b) { return a / b; }

// v_rounded returns x. The compiler may fuse a product with the sum that uses it, but not through
// v_rounded: there the product is rounded on every instruction set.
AI vf v_rounded(vf x) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(x));
#elif defined(__x86_64__)
  __asm__("" : "+x"(x));
#elif defined(__aarch64__)
  __asm__("" : "+w"(x));
#else
  __asm__("" : "+m"(x));
#endif
  return x;
}

// v_sum adds the lanes pairwise: the two halves, then quarters, and so on. The order depends on VW
// alone.
AI float v_sum(vf x) {
#if defined(ULY_AVX512) || defined(ULY_AVX2)
#if defined(ULY_AVX512)
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else
  const __m256 h = x;
#endif
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
#else
  float t[VW];
  v_store(t, x);
  UNROLL for (int w = VW / 2; w > 0; w /= 2) { UNROLL for (int i = 0; i < w; i++) t[i] += t[i + w]; }
  return t[0];
#endif
}

// v_hmax returns the largest lane. NaN in a lane may be lost.
AI float v_hmax(vf x) {
  float t[VW];
  v_store(t, x);
  UNROLL for (int w = VW / 2; w > 0; w /= 2) {
    UNROLL for (int i = 0; i < w; i++) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  }
  return t[0];
}

// v_exp2_poly is 2^f for f in [-0.5, 0.5]: a minimax polynomial with constant term 1, relative
// error 9e-8.
AI vf v_exp2_poly(vf f) {
  vf p = v_set1(.00132647272f);
  p = v_fma(p, f, v_set1(.00967151281f));
  p = v_fma(p, f, v_set1(.0555073374f));
  p = v_fma(p, f, v_set1(.240222421f));
  p = v_fma(p, f, v_set1(.693146978f));
  return v_fma(p, f, v_set1(1.0f));
}

// Adding V_EXP_MAGIC rounds to the nearest integer n and leaves n + 127, the exponent field of 2^n,
// in the low bits.
#define V_EXP_MAGIC (12582912.0f + 127.0f)

// v_exp2 is 2^x for x below 127.5. For x below -126 it is 2^-126, never 0. NaN stays NaN, because
// the power of two is multiplied, and not added to the bits.
AI vf v_exp2(vf x) {
  x = v_max(v_set1(-126.0f), x);
  vf t = v_add(x, v_set1(V_EXP_MAGIC));
  vf f = v_sub(x, v_sub(t, v_set1(V_EXP_MAGIC)));
  return v_mul(v_exp2_poly(f), (vf)((vi)t << 23));
}

// v_exp is e^x with a relative error of 2e-7. x is clamped to [-87.3, 88], so the result is finite
// and above 0. NaN stays NaN.
AI vf v_exp(vf x) {
  x = v_min(v_set1(88.0f), v_max(v_set1(-87.3f), x));
  vf t = v_fma(x, v_set1(1.44269502f), v_set1(V_EXP_MAGIC));
  vf n = v_sub(t, v_set1(V_EXP_MAGIC));
  vf f = v_fma(x, v_set1(1.44269502f), v_sub(v_zero(), n));
  f = v_fma(x, v_set1(1.92596299e-8f), f); // log2(e) minus its value as a float
  return v_mul(v_exp2_poly(f), (vf)((vi)t << 23));
}

// v_select returns, for each lane, a where the condition is all ones, b where it is 0.
AI vf v_select(vi c, vf a, vf b) { return (vf)(((vi)a & c) | ((vi)b & ~c)); }

// v_tanh is tanh(x) with a relative error of 2e-7, at most 1. NaN stays NaN. Below 0.625 it is an
// odd polynomial (S. Moshier, Cephes), because 1 - 2/(e^2x + 1) has an absolute error.
AI vf v_tanh(vf x) {
  const vi sign = (vi)v_set1(-0.0f);
  const vf a = (vf)((vi)x & ~sign), z = v_mul(x, x);
  vf p = v_set1(-5.70498872745e-3f);
  p = v_fma(p, z, v_set1(2.06390887954e-2f));
  p = v_fma(p, z, v_set1(-5.37397155531e-2f));
  p = v_fma(p, z, v_set1(1.33314422036e-1f));
  p = v_fma(p, z, v_set1(-3.33332819422e-1f));
  p = v_fma(v_mul(p, z), x, x);
  const vf e = v_exp2(v_min(v_set1(30.0f), v_mul(a, v_set1(2.88539008f))));
  const vf far = v_sub(v_set1(1), v_div(v_set1(2), v_add(e, v_set1(1))));
  return v_select(a < v_set1(0.625f), p, (vf)((vi)far | ((vi)x & sign)));
}

// v_sigmoid is 1 / (1 + e^-x). NaN stays NaN.
AI vf v_sigmoid(vf x) { return v_div(v_set1(1), v_add(v_set1(1), v_exp(v_sub(v_zero(), x)))); }

// Elements of the compute type. T is a compile-time constant: 0 for F32, 1 for BF16. BF16 is
// widened exactly to F32 when it is read; F32 is rounded to the nearest BF16, ties to even, when it
// is written. NaN stays NaN. All sums are F32.

// e_bytes is the size of an element in bytes. e_at and e_to are the address of element i.
AI int64_t e_bytes(const int T) { return T ? 2 : 4; }
AI const void *e_at(const int T, const void *p, int64_t i) { return (const char *)p + i * e_bytes(T); }
AI void *e_to(const int T, void *p, int64_t i) { return (char *)p + i * e_bytes(T); }

// bf16_value widens one BF16, bf16_of rounds one float to BF16.
AI float bf16_value(uint16_t b) {
  const uint32_t u = (uint32_t)b << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}

AI uint16_t bf16_of(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return (u & 0x7fffffff) > 0x7f800000 ? u >> 16 | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

#if defined(ULY_AVX512)
AI vf v_widen(__m256i x) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
AI __m256i v_narrow(vf x) {
  __m512i u = (__m512i)x, r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
  r = _mm512_mask_add_epi32(r, _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x10000)), r, _mm512_set1_epi32(1));
  r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
  const __m512i upper = (__m512i)(__v32hi){1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  return _mm512_castsi512_si256(_mm512_permutexvar_epi16(upper, r));
}
AI vf v_load_bf16(const uint16_t *p) { return v_widen(_mm256_loadu_si256((const __m256i *)p)); }
AI void v_store_bf16(uint16_t *p, vf x) { _mm256_storeu_si256((__m256i *)p, v_narrow(x)); }
AI vf v_load_bf16_n(const uint16_t *p, int64_t n) { return v_widen(_mm256_maskz_loadu_epi16(v_lanes_below(n), p)); }
AI void v_store_bf16_n(uint16_t *p, vf x, int64_t n) { _mm256_mask_storeu_epi16(p, v_lanes_below(n), v_narrow(x)); }
#elif defined(ULY_AVX2)
AI vf v_widen(__m128i x) { return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16); }
AI __m128i v_narrow(vf x) {
  __m256i u = (__m256i)x, odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
  r = (__m256i)_mm256_blendv_ps((vf)r, (vf)nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
AI vf v_load_bf16(const uint16_t *p) { return v_widen(_mm_loadu_si128((const __m128i *)p)); }
AI void v_store_bf16(uint16_t *p, vf x) { _mm_storeu_si128((__m128i *)p, v_narrow(x)); }
#else
typedef uint16_t vh __attribute__((vector_size(2 * VW)));
AI vf v_load_bf16(const uint16_t *p) {
  vh x;
  memcpy(&x, p, sizeof x);
  return (vf)(__builtin_convertvector(x, vu) << 16);
}
AI void v_store_bf16(uint16_t *p, vf x) {
  const vu u = (vu)x, nan = (vu)(x != x), r = (u + 0x7fff + ((u >> 16) & 1)) & ~nan;
  const vh h = __builtin_convertvector((r | ((u | 0x400000) & nan)) >> 16, vh);
  memcpy(p, &h, sizeof h);
}
#endif
#if !defined(ULY_AVX512)
NOINLINE vf v_load_bf16_n(const uint16_t *p, int64_t n) {
  uint16_t t[VW] = {0};
  for (int i = 0; i < VW && i < n; i++) t[i] = p[i];
  return v_load_bf16(t);
}
NOINLINE void v_store_bf16_n(uint16_t *p, vf x, int64_t n) {
  uint16_t t[VW];
  v_store_bf16(t, x);
  for (int i = 0; i < VW && i < n; i++) p[i] = t[i];
}
#endif

// e_load and e_store read and write VW elements from element i on.
AI vf e_load(const int T, const void *p, int64_t i) {
  return T ? v_load_bf16((const uint16_t *)p + i) : v_load((const float *)p + i);
}
AI void e_store(const int T, void *p, int64_t i, vf x) {
  if (T) v_store_bf16((uint16_t *)p + i, x);
  else v_store((float *)p + i, x);
}
// e_load_n and e_store_n read and write the first n >= 0 lanes and touch no memory after them.
AI vf e_load_n(const int T, const void *p, int64_t i, int64_t n) {
  return T ? v_load_bf16_n((const uint16_t *)p + i, n) : v_load_n((const float *)p + i, n);
}
AI void e_store_n(const int T, void *p, int64_t i, vf x, int64_t n) {
  if (T) v_store_bf16_n((uint16_t *)p + i, x, n);
  else v_store_n((float *)p + i, x, n);
}
// e_get and e_put read and write min(n, VW) lanes, n >= 1. They are fast for n >= VW, the usual
// case: masked stores of AVX2 are slow on some CPUs.
AI vf e_get(const int T, const void *p, int64_t i, int64_t n) {
  return UNLIKELY(n < VW) ? e_load_n(T, p, i, n) : e_load(T, p, i);
}
AI void e_put(const int T, void *p, int64_t i, vf x, int64_t n) {
  if (UNLIKELY(n < VW)) e_store_n(T, p, i, x, n);
  else e_store(T, p, i, x);
}
// v_get and v_put are e_get and e_put of F32.
AI vf v_get(const float *p, int64_t n) { return e_get(0, p, 0, n); }
AI void v_put(float *p, vf x, int64_t n) { e_put(0, p, 0, x, n); }

// e_value and e_set read and write one element.
AI float e_value(const int T, const void *p, int64_t i) {
  return T ? bf16_value(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}
AI void e_set(const int T, void *p, int64_t i, float x) {
  if (T) ((uint16_t *)p)[i] = bf16_of(x);
  else ((float *)p)[i] = x;
}

// Pairs: a lane holds two BF16, the first in its lower half.

// v_pair makes pairs of two vectors of widened BF16.
AI vf v_pair(vf first, vf second) { return (vf)((vu)first >> 16 | (vu)second); }
// v_first and v_second widen the first and the second element of pairs.
AI vf v_first(vf pairs) { return (vf)((vu)pairs << 16); }
AI vf v_second(vf pairs) { return (vf)((vu)pairs & 0xffff0000); }
#ifdef ULY_DOT
// v_dot adds to c, for each lane, the two products of the pairs a and b (VDPBF16PS). Denormals,
// those in c included, count as zero.
AI vf v_dot(vf a, vf b, vf c) { return (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
#endif
