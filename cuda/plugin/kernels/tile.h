// Tiles of elements in shared memory: copies from global memory, and products of a warp. Elements
// are F32 or BF16. Products of BF16 are computed on tensor cores from registers that ldmatrix
// loads, products of F32 with fused multiply-adds; both have F32 sums.
//
// A tile has rows of `step` elements: a multiple of 8 elements, and an odd number of 16-byte units
// modulo 128 bytes in BF16 (e.g. 64 + TILE_GAP), so that ldmatrix has no bank conflicts. Tiles
// begin at multiples of 16 bytes.
#pragma once

#include "mma.h"

constexpr int TILE_GAP = 8; // elements after each row

// copy_unit copies 16 bytes to a tile at once, with zeros for the elements from `left` on.
template <typename T> __device__ __forceinline__ void copy_unit(const T *from, int left, T *to) {
  Pack<T, Wide<T>::LANES> unit;
  load_raw<false>(from, left, unit);
  uint4 w;
  memcpy(&w, &unit, sizeof w);
  *reinterpret_cast<uint4 *>(to) = w;
}

// copy_tile copies rows [0, rows) of `width` elements to rows [0, all), at most ROWS, and columns
// [0, COLUMNS) of a tile, with zeros for missing elements. `vectors`: every row of the source
// begins at a multiple of 16 bytes. Whole units of 16 bytes are copied asynchronously, in BF16 with
// few instructions between them, others at once. THREADS threads take part, of which `thread` is
// the number; a thread's rows are the same for all columns. Eight lanes write to shared memory at
// the same time. If these are two rows of four units, the rows are not neighbours, so that they are
// in different banks: TILE_GAP is one unit of BF16 and two of F32.
template <int THREADS, int COLUMNS, int ROWS, typename T>
__device__ __forceinline__ void copy_tile(Copies &copies, T *to, int step, const T *from, int64_t stride, bool vectors,
                                          int width, int rows, int all = ROWS, int thread = (int)threadIdx.x) {
  constexpr int N = Wide<T>::LANES, LANES = COLUMNS / N, STEP = THREADS / LANES;
  [[maybe_unused]] constexpr int UNROLLED = ON_CORES<T> ? 8 : 1; // g++ ignores the pragma
  constexpr int APART = N / 2;                                   // rows
  const int c = thread % LANES * N, row = thread / LANES,
            first = LANES == 4 ? row / (2 * APART) * (2 * APART) + row % 2 * APART + row / 2 % APART : row;
  static_assert(LANES != 4 || STEP % (2 * APART) == 0, "the threads have whole groups of rows");
  const T *p = from + first * stride + c;
  to += first * step + c;
  if (c >= width) rows = 0;
  if (vectors && (c + N <= width || width <= c)) {
#pragma unroll UNROLLED
    for (int i = 0; i < ROWS; i += STEP, p += STEP * stride) {
      const bool there = first + i < rows;
      if (first + i < all)
        copies.copy<4>(reinterpret_cast<float *>(to + i * step), reinterpret_cast<const float *>(there ? p : from),
                       there);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; first + i < all; i += STEP, p += STEP * stride)
    copy_unit(p, first + i < rows ? width - c : 0, to + i * step);
}

// put_pair writes two neighbours of a row to a tile, and pair_at reads them.
__device__ __forceinline__ void put_pair(float *to, float x, float y) {
  *reinterpret_cast<float2 *>(to) = make_float2(x, y);
}
__device__ __forceinline__ void put_pair(bf16 *to, float x, float y) { *reinterpret_cast<uint32_t *>(to) = pair(x, y); }
__device__ __forceinline__ float2 pair_at(const float *p) { return *reinterpret_cast<const float2 *>(p); }
// pair_of returns two packed numbers.
__device__ __forceinline__ float2 pair_of(uint32_t w) { // BF16 is the upper half of F32
  return make_float2(__uint_as_float(w << 16), __uint_as_float(w & 0xffff0000u));
}
__device__ __forceinline__ float2 pair_at(const bf16 *p) { return pair_of(*reinterpret_cast<const uint32_t *>(p)); }

// four_elements loads elements k … k + 3 of row or column x.
template <bool DENSE>
__device__ __forceinline__ void four_elements(const float *p, int step, int k, int x, float (&y)[4]) {
  if (DENSE) {
    load<4>(p + x * step + k, y);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = p[(k + i) * step + x];
  }
}

// tile_product adds A [16 x depth] · B [depth x 8·NT] to c, in the layout of mma.h. depth is a
// multiple of 16; in BF16, NT is even. A DENSE tile is contiguous along depth (A[m][k] at a[m·step
// + k], B[k][n] at b[n·step + k]), another tile across it (a[k·step + m], b[k·step + n]). In F32
// there are no bank conflicts if step is 8 or 24 modulo 32 for dense tiles, and 4 or 12 modulo 16
// for others.
template <bool A_DENSE, bool B_DENSE, int NT>
__device__ __forceinline__ void tile_product(float (&c)[NT][4], const float *a, int a_step, const float *b, int b_step,
                                             int depth) {
  const Lane at;
  // Of the four columns that the lanes of a row load at the same time from a dense B, all are in
  // different banks if two lanes load their second column first.
  const bool second = B_DENSE && threadIdx.x & 2;
  auto turn = [&] {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const float x = c[n][e];
        c[n][e] = second ? c[n][e + 1] : x;
        c[n][e + 1] = second ? x : c[n][e + 1];
      }
  };
  if (B_DENSE) turn();
#pragma unroll 1
  for (int k = 0; k < depth; k += 4) {
    float x[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) four_elements<A_DENSE>(a, a_step, k, at.row + 8 * i, x[i]);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float y[2][4];
#pragma unroll
      for (int j = 0; j < 2; j++) four_elements<B_DENSE>(b, b_step, k, 8 * n + at.column + (j ^ second), y[j]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
          for (int u = 0; u < 4; u++) c[n][2 * i + j] = madd(x[i][u], y[j][u], c[n][2 * i + j]);
    }
  }
  if (B_DENSE) turn();
}
template <bool A_DENSE, bool B_DENSE, int NT>
__device__ __forceinline__ void tile_product(float (&c)[NT][4], const bf16 *a, int a_step, const bf16 *b, int b_step,
                                             int depth) {
  static_assert(NT % 2 == 0, "a register set of ldmatrix is two columns of results");
  const uint32_t at_a =
                     (uint32_t)__cvta_generic_to_shared(a + (A_DENSE ? quarters_down(a_step) : quarters_along(a_step))),
                 at_b =
                     (uint32_t)__cvta_generic_to_shared(b + (B_DENSE ? quarters_along(b_step) : quarters_down(b_step)));
#pragma unroll 2
  for (int k = 0; k < depth; k += 16) {
    uint32_t x[4];
    ldmatrix<!A_DENSE>(x, at_a + 2 * (A_DENSE ? k : k * a_step));
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t y[4];
      ldmatrix<!B_DENSE>(y, at_b + 2 * (B_DENSE ? 8 * n * b_step + k : k * b_step + 8 * n));
      mma_pair(c[n], c[n + 1], x, y);
    }
  }
}

// pair_behind returns the roundings of what is left of x and y, if hi has their roundings.
__device__ __forceinline__ uint32_t pair_behind(uint32_t hi, float x, float y) {
  const float2 rounded = pair_of(hi);
  return pair(x - rounded.x, y - rounded.y);
}

// quad_transpose exchanges registers between the four lanes that have a row: register i of lane j
// (of the four) becomes register j of lane i.
__device__ __forceinline__ void quad_transpose(uint32_t (&r)[4]) {
#pragma unroll
  for (int by = 1; by <= 2; by *= 2) {
    const bool upper = (threadIdx.x & by) != 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & by) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? r[i] : r[i + by], by);
      if (upper) r[i] = got;
      else r[i + by] = got;
    }
  }
}

// store_results writes the rows below `rows` and the columns below `columns` of a warp's results
// [16 x 32] to memory. at(row) returns the start of a row; `vectors`: it is a multiple of 16 bytes.
template <typename F> __device__ __forceinline__ void store_results(const float (&c)[4][4], int rows, int columns,
                                                                    bool vectors, const F &at, bf16) {
  const int row = (int)threadIdx.x % 32 / 4, column = (int)threadIdx.x % 4 * 8;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    uint32_t r[4];
#pragma unroll
    for (int n = 0; n < 4; n++) r[n] = pair(c[n][2 * half], c[n][2 * half + 1]);
    quad_transpose(r); // a lane has eight neighbours
    if (row + 8 * half >= rows) continue;
    bf16 *to = at(row + 8 * half) + column;
    if (vectors && column + 8 <= columns) {
      __stwb(reinterpret_cast<uint4 *>(to), make_uint4(r[0], r[1], r[2], r[3]));
      continue;
    }
#pragma unroll
    for (int e = 0; e < 8; e++)
      if (column + e < columns) to[e] = __ushort_as_bfloat16((unsigned short)(r[e / 2] >> e % 2 * 16));
  }
}
template <typename F> __device__ __forceinline__ void store_results(const float (&c)[4][4], int rows, int columns,
                                                                    bool vectors, const F &at, float) {
  const Lane lane;
  columns -= lane.column;
#pragma unroll
  for (int half = 0; half < 2; half++)
    if (lane.row + 8 * half < rows) {
      float *const to = at(lane.row + 8 * half) + lane.column;
      if (vectors && columns >= 26) {
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const float both[2] = {c[n][2 * half], c[n][2 * half + 1]};
          store<2>(to + 8 * n, both);
        }
        continue;
      }
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (8 * n + e < columns) to[8 * n + e] = c[n][2 * half + e];
    }
}
