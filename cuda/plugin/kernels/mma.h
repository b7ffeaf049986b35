// Products of small matrices in shared memory, computed by one warp: on tensor cores for BF16, with
// fused multiply-adds for F32.
//
// A tile consists of 32-bit words. In F32 a word is the value. In BF16 a word is the sum hi + lo of
// two BF16 numbers, which have 16 bits of mantissa together. A matrix of BF16 values is EXACT: it
// has lo = 0, and lo is not multiplied. Otherwise a product is hi·hi + hi·lo + lo·hi, in F32 sums.
// Its error is about 2^-17 of its terms, near that of F32, for up to three times the work of plain
// BF16.
//
// The result of a warp is 16 rows x 8·NT columns in registers, in the layout of mma.m16n8k16 (PTX
// ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"): lane 4g + t has in c[n] rows
// g, g, g + 8, g + 8 and columns 8n + 2t, 8n + 2t + 1, …. DENSE matrices are contiguous along k
// (A[m][k] at a[m·step + k], B[k][n] at b[n·step + k]); other matrices are contiguous across k
// (a[k·step + m], b[k·step + n]). There are no bank conflicts if step is 8 or 24 modulo 32 for
// dense matrices, and 4 or 12 modulo 16 for others.
#pragma once

#include "values.h"

typedef uint32_t Word;

template <typename T> constexpr bool ON_CORES = sizeof(T) == 2;

// to_word converts a value to a word, of_word a word to its value. word_hi and word_lo return the
// two BF16 numbers of a word.
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

// Lane is the position of c[0][0] of a lane in the warp's result. c[n][e] is at row + e / 2 * 8 and
// column + 8 * n + e % 2.
struct Lane {
  int row, column;
  __device__ __forceinline__ explicit Lane(int thread = (int)threadIdx.x)
      : row(thread % 32 / 4), column(thread % 4 * 2) {}
};

template <int NT> __device__ __forceinline__ void zero(float (&c)[NT][4]) {
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) c[n][e] = 0;
}

// FragmentA and FragmentB are a lane's registers for mma.m16n8k16. A: rows g and g + 8 at k, then
// the same rows at k + 8. B: column g.
struct FragmentA {
  uint32_t hi[4], lo[4];
};
struct FragmentB {
  uint32_t hi[2], lo[2];
};

// split_pair packs the hi parts and the lo parts of words k and k + 1 of row or column x. k is in
// the lower half of a register.
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

// Tiles of plain BF16 have rows of `step` elements: an odd number of 16-byte units modulo 128
// bytes, so that there are no bank conflicts. ldmatrix fills registers from four matrices of 8 x 8.
// Lane l supplies the start of row l % 8 of matrix l / 8, in elements:
//   - quarters_down: upper left, lower left, upper right, lower right: without transposition, a
//     dense A (the four registers are FragmentA's); transposed, a B across k of 16 columns (two
//     registers each are FragmentB's of 8 columns);
//   - quarters_along: upper left, upper right, lower left, lower right: without transposition, a
//     dense B of 16 columns; transposed, an A across k.
__device__ __forceinline__ int quarters_down(int step) {
  return (int)threadIdx.x % 16 * step + (int)threadIdx.x % 32 / 16 * 8;
}
__device__ __forceinline__ int quarters_along(int step) {
  const int lane = (int)threadIdx.x % 32;
  return (lane % 8 + lane / 16 * 8) * step + lane / 8 % 2 * 8;
}

// Other tiles of plain BF16 have rows of WIDTH elements, a multiple of 64, without padding. The
// units of 16 bytes of row r are in the order unit ^ r % 8, so that a column of eight neighbouring
// rows is in all banks. swizzled returns the position of an element. swizzled_down and
// swizzled_along return a lane's positions in the orders above.
template <int WIDTH> __device__ __forceinline__ int swizzled(int row, int column) {
  return row * WIDTH + (column ^ row % 8 * 8);
}
template <int WIDTH> __device__ __forceinline__ int swizzled_down(int lane) {
  return swizzled<WIDTH>(lane % 16, lane / 16 * 8);
}
template <int WIDTH> __device__ __forceinline__ int swizzled_along(int lane) {
  return swizzled<WIDTH>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 8);
}

// pair rounds two neighbours along k to BF16 and packs them into one register of a fragment.
__device__ __forceinline__ uint32_t pair(float lower, float upper) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(lower, upper);
  uint32_t r;
  memcpy(&r, &both, sizeof r);
  return r;
}

// fragment_of rounds columns 16·k … 16·k + 15 of a product to the fragment of A for step k of the
// next product.
template <int NT> __device__ __forceinline__ void fragment_of(uint32_t (&a)[4], const float (&c)[NT][4], int k) {
#pragma unroll
  for (int i = 0; i < 4; i++) a[i] = pair(c[2 * k + i / 2][i % 2 * 2], c[2 * k + i / 2][i % 2 * 2 + 1]);
}

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

// four_words loads words k … k + 3 of row or column x.
template <bool DENSE> __device__ __forceinline__ void four_words(const Word *p, int step, int k, int x, Word (&w)[4]) {
  if (DENSE) {
    const uint4 all = *reinterpret_cast<const uint4 *>(p + x * step + k);
    w[0] = all.x, w[1] = all.y, w[2] = all.z, w[3] = all.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) w[i] = p[(k + i) * step + x];
  }
}

// product adds A [16 x depth] · B [depth x 8·NT] to c. depth is a multiple of 16; dense matrices
// begin at multiples of 16 bytes. On the host, each lane computes its own results from the same hi
// and lo parts.
template <typename T, bool A_EXACT, bool B_EXACT, bool A_DENSE, bool B_DENSE, int NT>
__device__ __forceinline__ void product(float (&c)[NT][4], const Word *a, int a_step, const Word *b, int b_step,
                                        int depth) {
  if constexpr (ON_CORES<T> && !emulated)
    return tensor_product<A_EXACT, B_EXACT, A_DENSE, B_DENSE, NT>(c, a, a_step, b, b_step, depth);
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
