// Products of small matrices in shared memory, by one warp: on tensor cores where values are BF16,
// else by fused multiply-adds.
//
// A tile is made of words. With F32 a word is the value. With BF16 it is the value as the sum of
// two, hi + lo, together 16 bits of mantissa: of what was BF16 before, lo is zero (EXACT) and is
// not multiplied; elsewhere a product is hi·hi + hi·lo + lo·hi, in F32 sums, whose error is about
// 2^-17 of its terms: near F32, at up to three times the work of plain BF16. Where a product must
// be better, it is not made here.
//
// The result of a warp is 16 rows x 8·NT columns in registers, as mma.m16n8k16 has it: lane 4g + t
// holds in c[n] rows g, g, g + 8, g + 8 and columns 8n + 2t, 8n + 2t + 1, …. DENSE matrices lie
// along k (A[m][k] at a[m·step + k], B[k][n] at b[n·step + k]), others across (a[k·step + m],
// b[k·step + n]). No bank is met twice where step is 8 or 24 modulo 32 for dense ones, 4 or 12
// modulo 16 for others.
#pragma once

#include "values.h"

typedef uint32_t Word;

template <typename T> constexpr bool ON_CORES = sizeof(T) == 2;

// to_word and of_word keep a value in a word, and give it back; of BF16's 16 bits.
template <typename T> __device__ __forceinline__ Word to_word(float x) {
  if constexpr (!ON_CORES<T>) return __float_as_uint(x);
  const bf16 hi = __float2bfloat16(x), lo = __float2bfloat16(x - __bfloat162float(hi));
  return (Word)__bfloat16_as_ushort(hi) | (Word)__bfloat16_as_ushort(lo) << 16;
}
__device__ __forceinline__ float word_hi(Word w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float word_lo(Word w) { return __uint_as_float(w & 0xffff0000u); }
template <typename T> __device__ __forceinline__ float of_word(Word w) {
  return ON_CORES<T> ? word_hi(w) + word_lo(w) : __uint_as_float(w);
}

// Lane says where c[0][0] lies in a warp's result; c[n][e] is at row + e / 2 * 8 and column + 8 * n
// + e % 2.
struct Lane {
  int row, column;
  __device__ __forceinline__ Lane() : row((int)threadIdx.x % 32 / 4), column((int)threadIdx.x % 4 * 2) {}
};

template <int NT> __device__ __forceinline__ void zero(float (&c)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) c[n][e] = 0;
}

// Fragments are what a lane gives to mma.m16n8k16: of A rows g, g + 8 and, beyond them, those again
// 8 further along k; of B its column g.
struct FragmentA {
  uint32_t hi[4], lo[4];
};
struct FragmentB {
  uint32_t hi[2], lo[2];
};

// split_pair takes words k and k + 1 of row or column x apart: the lower half of a register is k.
template <bool DENSE>
__device__ __forceinline__ void split_pair(const Word *p, int step, int k, int x, uint32_t &hi, uint32_t &lo) {
  uint2 w;
  if (DENSE) w = *reinterpret_cast<const uint2 *>(p + x * step + k);
  else w.x = p[k * step + x], w.y = p[(k + 1) * step + x];
  hi = (w.x & 0xffffu) | w.y << 16;
  lo = w.x >> 16 | (w.y & 0xffff0000u);
}
template <bool DENSE> __device__ __forceinline__ FragmentA fragment_a(const Word *a, int step, int k) {
  const Lane lane;
  FragmentA f;
#pragma unroll
  for (int i = 0; i < 4; i++)
    split_pair<DENSE>(a, step, k + lane.column + i / 2 * 8, lane.row + i % 2 * 8, f.hi[i], f.lo[i]);
  return f;
}
template <bool DENSE> __device__ __forceinline__ FragmentB fragment_b(const Word *b, int step, int k) {
  const Lane lane;
  FragmentB f;
#pragma unroll
  for (int i = 0; i < 2; i++) split_pair<DENSE>(b, step, k + lane.column + i * 8, lane.row, f.hi[i], f.lo[i]);
  return f;
}

// Plain BF16 lies in rows of `step` elements, 16 bytes and an odd number of them modulo 128 bytes,
// so that no bank is met twice. ldmatrix makes registers of four matrices of 8 x 8; lane l says
// where row l % 8 of matrix l / 8 begins, in elements:
//  - quarters_down: upper left, lower left, upper right, lower right of 16 x 16. As they lie, A dense (the four registers are FragmentA's); transposed, B
//    across for 16 columns (two registers each are FragmentB's of 8 columns);
//  - quarters_along: upper left, upper right, lower left, lower right: B dense for 16 columns, as they lie.
__device__ __forceinline__ int quarters_down(int step) {
  return (int)threadIdx.x % 16 * step + (int)threadIdx.x % 32 / 16 * 8;
}
__device__ __forceinline__ int quarters_along(int step) {
  const int lane = (int)threadIdx.x % 32;
  return (lane % 8 + lane / 16 * 8) * step + lane / 8 % 2 * 8;
}

// pair rounds two neighbours along k to a register of a fragment.
__device__ __forceinline__ uint32_t pair(float lower, float upper) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(lower, upper);
  uint32_t r;
  memcpy(&r, &both, sizeof r);
  return r;
}

// fragment_of makes A's fragment of results: of columns 16·k … 16·k + 15 of a product, which are as
// far along k of the next one.
template <int NT> __device__ __forceinline__ void fragment_of(uint32_t (&a)[4], const float (&c)[NT][4], int k) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = pair(c[2 * k + i / 2][i % 2 * 2], c[2 * k + i / 2][i % 2 * 2 + 1]);
}

#ifndef ULY_EMULATED
template <bool TRANSPOSED> __device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// mma_pair is two of them: of the 16 columns of b.
__device__ __forceinline__ void mma_pair(float (&c0)[4], float (&c1)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  mma(c0, a, {b[0], b[1]});
  mma(c1, a, {b[2], b[3]});
}
#else
// The same by PTX's description of registers, of what lanes leave for each other.
template <bool TRANSPOSED> void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  const uint4 row = *reinterpret_cast<const uint4 *>(uly_emulated::dynamic_shared() + address);
  uint64_t half[2][32];
  for (int i = 0; i < 2; i++)
    memcpy(half[i],
           uly_emulated::exchange(0xffffffffu, i ? row.z | (uint64_t)row.w << 32 : row.x | (uint64_t)row.y << 32,
                                  "ldmatrix", __FILE__, __LINE__),
           sizeof half[i]);
  const int lane = (int)threadIdx.x % 32, along = lane % 4 * 2, down = lane / 4;
  for (int m = 0; m < 4; m++) {
    auto at = [&](int row, int column) {
      return (uint32_t)(half[column / 4][8 * m + row] >> 16 * (column % 4) & 0xffff);
    };
    r[m] = TRANSPOSED ? at(along, down) | at(along + 1, down) << 16 : at(down, along) | at(down, along + 1) << 16;
  }
}
inline void mma_pair(float (&c0)[4], float (&c1)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  const int lane = (int)threadIdx.x % 32;
  float x[2][16], y[4][16]; // this lane's rows and columns
  auto share = [](uint32_t lower, uint32_t upper) {
    return uly_emulated::exchange(0xffffffffu, lower | (uint64_t)upper << 32, "mma", __FILE__, __LINE__);
  };
  auto take = [](float *to, uint32_t two) { to[0] = word_hi(two), to[1] = word_lo(two); };
  for (int half = 0; half < 2; half++) {
    const uint64_t *all = share(a[2 * half], a[2 * half + 1]);
    for (int t = 0; t < 4; t++)
      for (int i = 0; i < 2; i++) take(x[i] + 8 * half + 2 * t, (uint32_t)(all[lane / 4 * 4 + t] >> 32 * i));
  }
  for (int n = 0; n < 2; n++) {
    const uint64_t *all = share(b[2 * n], b[2 * n + 1]);
    for (int j = 0; j < 2; j++)
      for (int t = 0; t < 4; t++)
        for (int half = 0; half < 2; half++)
          take(y[2 * n + j] + 8 * half + 2 * t, (uint32_t)(all[(lane % 4 * 2 + j) * 4 + t] >> 32 * half));
  }
  for (int k = 0; k < 16; k++)
    for (int e = 0; e < 4; e++) {
      c0[e] = madd(x[e / 2][k], y[e % 2][k], c0[e]);
      c1[e] = madd(x[e / 2][k], y[2 + e % 2][k], c1[e]);
    }
}
#endif

#ifndef ULY_EMULATED
template <bool A_EXACT, bool B_EXACT, bool A_DENSE, bool B_DENSE, int NT>
__device__ __forceinline__ void tensor_product(float (&c)[NT][4], const Word *a, int a_step, const Word *b, int b_step,
                                               int depth) {
#pragma unroll 2
  for (int k = 0; k < depth; k += 16) {
    const FragmentA x = fragment_a<A_DENSE>(a, a_step, k);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const FragmentB y = fragment_b<B_DENSE>(B_DENSE ? b + 8 * n * b_step : b + 8 * n, b_step, k);
      if (!B_EXACT) mma(c[n], x.hi, y.lo);
      if (!A_EXACT) mma(c[n], x.lo, y.hi);
      mma(c[n], x.hi, y.hi);
    }
  }
}
#endif

// four is words k .. k+3 of row or column x.
template <bool DENSE> __device__ __forceinline__ void four_words(const Word *p, int step, int k, int x, Word (&w)[4]) {
  if (DENSE) {
    const uint4 all = *reinterpret_cast<const uint4 *>(p + x * step + k);
    w[0] = all.x, w[1] = all.y, w[2] = all.z, w[3] = all.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = p[(k + i) * step + x];
  }
}

// product adds A[16 x depth]·B[depth x 8·NT] to c; depth is a multiple of 16, dense matrices lie at
// multiples of 16 bytes. Emulated, a lane makes its part of the result by itself, out of the same
// pieces.
template <typename T, bool A_EXACT, bool B_EXACT, bool A_DENSE, bool B_DENSE, int NT>
__device__ __forceinline__ void product(float (&c)[NT][4], const Word *a, int a_step, const Word *b, int b_step,
                                        int depth) {
#ifndef ULY_EMULATED
  if constexpr (ON_CORES<T>)
    return tensor_product<A_EXACT, B_EXACT, A_DENSE, B_DENSE, NT>(c, a, a_step, b, b_step, depth);
#endif
  const Lane at;
#pragma unroll 1
  for (int k = 0; k < depth; k += 4) {
    Word x[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) four_words<A_DENSE>(a, a_step, k, at.row + 8 * i, x[i]);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      Word y[2][4];
#pragma unroll
      for (int j = 0; j < 2; j++) four_words<B_DENSE>(b, b_step, k, 8 * n + at.column + j, y[j]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
          for (int u = 0; u < 4; u++) {
            float &sum = c[n][2 * i + j];
            if constexpr (!ON_CORES<T>) {
              sum = madd(__uint_as_float(x[i][u]), __uint_as_float(y[j][u]), sum);
            } else {
              if (!B_EXACT) sum = madd(word_hi(x[i][u]), word_lo(y[j][u]), sum);
              if (!A_EXACT) sum = madd(word_lo(x[i][u]), word_hi(y[j][u]), sum);
              sum = madd(word_hi(x[i][u]), word_hi(y[j][u]), sum);
            }
          }
    }
  }
}
