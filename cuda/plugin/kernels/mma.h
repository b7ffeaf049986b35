// Registers of products on tensor cores (mma.m16n8k16), and the layouts of tiles of BF16 from which
// ldmatrix loads them.
//
// The result of a warp is 16 rows x 8·NT columns in registers, in the layout of mma.m16n8k16 (PTX
// ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"): lane 4g + t has in c[n] rows
// g, g, g + 8, g + 8 and columns 8n + 2t, 8n + 2t + 1, …. Its registers of A are rows g and g + 8
// at k = 2t, then the same rows at k + 8; its registers of B are column g at k = 2t and k + 8.
#pragma once

#include "values.h"

// ON_CORES: products of T are computed on tensor cores, others with fused multiply-adds.
template <typename T> constexpr bool ON_CORES = sizeof(T) == 2;

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

// Tiles of BF16 have rows of `step` elements: an odd number of 16-byte units modulo 128
// bytes, so that there are no bank conflicts. ldmatrix fills registers from four matrices of 8 x 8.
// Lane l supplies the start of row l % 8 of matrix l / 8, in elements:
//   - quarters_down: upper left, lower left, upper right, lower right: without transposition, a
//     dense A (its four registers); transposed, a B across k of 16 columns (two registers for each
//     8 columns);
//   - quarters_along: upper left, upper right, lower left, lower right: without transposition, a
//     dense B of 16 columns; transposed, an A across k.
__device__ __forceinline__ int quarters_down(int step) {
  return (int)threadIdx.x % 16 * step + (int)threadIdx.x % 32 / 16 * 8;
}
__device__ __forceinline__ int quarters_along(int step) {
  const int lane = (int)threadIdx.x % 32;
  return (lane % 8 + lane / 16 * 8) * step + lane / 8 % 2 * 8;
}

// Other tiles of BF16 have rows of WIDTH elements, a multiple of 64, without padding. The
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
