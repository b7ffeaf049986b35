// Building blocks of the attention kernels on tensor cores: tiles of BF16 in shared memory, and two
// products of a warp.
//
// A block has MMA_WARPS warps. A warp computes strips of 16 rows of the block's tile, in all
// columns, so that the values of a row are in four lanes (Lane in mma.h). The registers of one
// product, rounded to BF16, are the operand of the next (FlashAttention-2, Dao 2023,
// arXiv:2307.08691). All kernels multiply whole tiles and HEAD features, with zeros for missing
// elements. Therefore a result does not depend on the position of its row, and equal sums cancel
// exactly.
#pragma once

#include "attention_tile.h"
#include "mma.h"

enum { MMA_WARPS = ATTENTION_MMA_THREADS / 32 };

// load_tile copies rows row … row + n of a head to a tile of ROWS rows; missing elements are zero.
// If addresses do not allow vectors, it copies single elements, with the same result.
template <int HEAD, int ROWS> __device__ __forceinline__ void load_tile(Copies &copies, bf16 *to,
                                                                        const AttentionView &x, int64_t row,
                                                                        int64_t head, int n) {
  constexpr int W = HEAD + ATTENTION_MMA_GAP, LANES = HEAD / 8, STEP = ATTENTION_MMA_THREADS / LANES;
  const int c = (int)threadIdx.x % LANES * 8, first = (int)threadIdx.x / LANES, rows = c < x.width ? n : 0;
  const bf16 *p = (const bf16 *)x.data, *from = p + (row + first) * x.token + head * x.head + c;
  to += first * W + c;
#pragma unroll 1
  for (int r = first; r < ROWS; r += STEP, from += STEP * x.token, to += STEP * W) {
    if (x.vectors) {
      copies.copy<4>(reinterpret_cast<float *>(to), reinterpret_cast<const float *>(r < rows ? from : p), r < rows);
    } else {
      Pack<bf16, 8> eight;
      load_raw<false>(from, r < rows ? 8 : 0, eight);
      uint4 w;
      memcpy(&w, &eight, sizeof w);
      *reinterpret_cast<uint4 *>(to) = w;
    }
  }
}

// products computes s[i][n] = strip i of tile a times rows 8n … 8n + 7 of tile b, over all
// features.
template <int HEAD, int MT, int NT>
__device__ __forceinline__ void products(float (&s)[MT][NT][4], const bf16 *a, const bf16 *b) {
  constexpr int W = HEAD + ATTENTION_MMA_GAP;
#pragma unroll
  for (int i = 0; i < MT; i++) zero(s[i]);
  const uint32_t at_a = (uint32_t)__cvta_generic_to_shared(a + quarters_down(W)),
                 at_b = (uint32_t)__cvta_generic_to_shared(b + quarters_along(W));
#pragma unroll
  for (int k = 0; k < HEAD; k += 16) {
    uint32_t x[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++) ldmatrix<false>(x[i], at_a + 2 * (16 * i * W + k));
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t y[4];
      ldmatrix<false>(y, at_b + 2 * (8 * n * W + k));
#pragma unroll
      for (int i = 0; i < MT; i++) mma_pair(s[i][n], s[i][n + 1], x[i], y);
    }
  }
}

// accumulate rounds strip i of s to BF16, multiplies it by b, and adds the product to o[i]. b is a
// tile with one row for each column of s.
template <int HEAD, int MT, int NT>
__device__ __forceinline__ void accumulate(float (&o)[MT][HEAD / 8][4], const float (&s)[MT][NT][4], const bf16 *b) {
  constexpr int W = HEAD + ATTENTION_MMA_GAP;
  const uint32_t at_b = (uint32_t)__cvta_generic_to_shared(b + quarters_down(W));
#pragma unroll
  for (int k = 0; k < NT / 2; k++) {
    uint32_t x[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++) fragment_of(x[i], s[i], k);
#pragma unroll
    for (int n = 0; n < HEAD / 8; n += 2) {
      uint32_t y[4];
      ldmatrix<true>(y, at_b + 2 * (16 * k * W + 8 * n));
#pragma unroll
      for (int i = 0; i < MT; i++) mma_pair(o[i][n], o[i][n + 1], x[i], y);
    }
  }
}

// Visibility is how much of a tile of n columns the rows [row, row + rows) attend to. MASKED tiles
// are skipped. VISIBLE tiles need no mask.
enum Visibility { MASKED, PARTIAL, VISIBLE };
__device__ __forceinline__ Visibility visibility(AttentionBand band, int row, int rows, int n, int columns) {
  const int first = -(row + rows - 1), last = n - 1 - row; // minimum and maximum of column - row
  if (band.above < first || last < band.below) return MASKED;
  return n == columns && band.below <= first && last <= band.above ? VISIBLE : PARTIAL;
}
// Columns is the range of columns that a row attends to, relative to column `at`. After unrolling,
// hide compares with constants and needs two registers.
struct Columns {
  int lo, hi;
  __device__ __forceinline__ Columns(AttentionBand band, int n, int row, int at)
      : lo(band.below + row - at), hi((int)least(n - 1, band.above + row) - at) {}
  __device__ __forceinline__ bool hide(int column) const { return column < lo || hi < column; }
};

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

template <int MT, int NT> __device__ __forceinline__ void multiply(float (&x)[MT][NT][4], float f) {
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) x[i][n][e] *= f;
}

// at_pairs calls f(p, x, y) for every pair x, y of neighbours in a warp's rows, which is at p in a
// tensor of F32.
template <int HEAD, int MT, class F> __device__ __forceinline__ void at_pairs(float (&o)[MT][HEAD / 8][4],
                                                                              const AttentionView &of, int64_t row,
                                                                              int64_t head, int rows, F f) {
  const Lane at;
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = 16 * i + 8 * h + at.row;
      if (r >= rows) continue;
      float *p = (float *)of.data + (row + r) * of.token + head * of.head + at.column;
#pragma unroll
      for (int n = 0; n < HEAD / 8; n++)
        if (8 * n < of.width) f(p + 8 * n, o[i][n][2 * h], o[i][n][2 * h + 1]);
    }
}

// read_wide and write_wide read and write a warp's rows in F32. A lane has the same elements in
// both.
template <int HEAD, int MT> __device__ __forceinline__ void read_wide(float (&o)[MT][HEAD / 8][4],
                                                                      const AttentionView &from, int64_t row,
                                                                      int64_t head, int rows) {
  at_pairs<HEAD>(o, from, row, head, rows, [&](const float *p, float &x, float &y) {
    if (from.wide) {
      const float2 two = *reinterpret_cast<const float2 *>(p);
      x = two.x, y = two.y;
    } else {
      x = p[0], y = p[1];
    }
  });
}
template <int HEAD, int MT> __device__ __forceinline__ void write_wide(float (&o)[MT][HEAD / 8][4],
                                                                       const AttentionView &to, int64_t row,
                                                                       int64_t head, int rows) {
  at_pairs<HEAD>(o, to, row, head, rows, [&](float *p, float x, float y) {
    if (to.wide) *reinterpret_cast<float2 *>(p) = make_float2(x, y);
    else p[0] = x, p[1] = y;
  });
}

// write_rows rounds a warp's results to BF16 and writes the first `rows` rows to row row, row + 1,
// … of a head. It goes through `strip`, rows of a tile that only this warp still uses, so that the
// stores are vectors of 16 bytes.
template <int HEAD, int MT> __device__ __forceinline__ void write_rows(bf16 *strip, const float (&o)[MT][HEAD / 8][4],
                                                                       const AttentionView &to, int64_t row,
                                                                       int64_t head, int rows) {
  constexpr int W = HEAD + ATTENTION_MMA_GAP, LANES = HEAD / 8;
  const Lane at;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<uint32_t *>(strip + (16 * i + 8 * h + at.row) * W + 8 * n + at.column) =
            pair(o[i][n][2 * h], o[i][n][2 * h + 1]);
  __syncwarp();
  const int lane = (int)threadIdx.x % 32, c = lane % LANES * 8;
  if (c >= to.width) return;
#pragma unroll 1
  for (int r = lane / LANES; r < least(rows, 16 * MT); r += 32 / LANES) {
    const bf16 *from = strip + r * W + c;
    bf16 *p = (bf16 *)to.data + (row + r) * to.token + head * to.head + c;
    if (to.vectors) {
      *reinterpret_cast<uint4 *>(p) = *reinterpret_cast<const uint4 *>(from);
    } else {
#pragma unroll
      for (int e = 0; e < 8; e++) p[e] = from[e];
    }
  }
}

// write_gradients is write_rows for a tensor of BF16 or F32.
template <int HEAD, int MT> __device__ __forceinline__ void write_gradients(bf16 *strip, float (&o)[MT][HEAD / 8][4],
                                                                            const AttentionView &to, int64_t row,
                                                                            int64_t head, int rows) {
  if (to.bf16) write_rows<HEAD>(strip, o, to, row, head, rows);
  else write_wide<HEAD>(o, to, row, head, rows);
}

// add_before adds the sums of the preceding query heads to a warp's rows d, and stores the result
// in `sums` for the following query heads. One thread has an element for all heads.
template <int HEAD, int MT> __device__ __forceinline__ void add_before(float (&d)[MT][HEAD / 8][4], float *sums,
                                                                       int64_t step, int width, int rows, bool first,
                                                                       bool last) {
  const Lane at;
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = 16 * i + 8 * h + at.row;
      if (row >= rows) continue;
      float2 *p = reinterpret_cast<float2 *>(sums + row * step + at.column);
#pragma unroll
      for (int n = 0; n < HEAD / 8; n++) {
        if (8 * n >= width) continue;
        float2 x = make_float2(d[i][n][2 * h], d[i][n][2 * h + 1]);
        if (!first) x.x = p[4 * n].x + x.x, x.y = p[4 * n].y + x.y;
        if (!last) p[4 * n] = x;
        d[i][n][2 * h] = x.x, d[i][n][2 * h + 1] = x.y;
      }
    }
}
