// The softmax of the forward kernels of attention on tensor cores, over the tiles of keys of a
// warp's rows.
#pragma once

#include "attention_mma.h"

// exponent_base returns the base of the exponents of a row with maximum m. It is rounded once. If
// the largest exponential is therefore not exactly 1, the sum has the same relative error.
__device__ __forceinline__ float exponent_base(float m, float scale) { return m == -INFINITY ? 0 : m * scale; }

// RunningSoftmax is the softmax over the keys so far of 16·MT rows, from row `strip` of a block's
// tile on. BEGUN: it may have begun (attention_forward.cu), with sinks or keys of earlier calls.
// SCORED: scores are in natural units, before they are in units of the scale.
template <int MT, bool BEGUN, bool SCORED> struct RunningSoftmax {
  float top[MT][2], sum[MT][2]; // maximum of a row; a lane's part of its sum, one of four

  // begin sets the output and the softmax before the first key. One lane of a row reads lse, and
  // writes it in finish. The maximum is before scaling.
  template <int NT> __device__ __forceinline__ void begin(float (&o)[MT][NT][4], const AttentionCall &a,
                                                          const BlockTile &work, int strip) {
#pragma unroll
    for (int i = 0; i < MT; i++) {
      zero(o[i]);
      top[i][0] = top[i][1] = -INFINITY, sum[i][0] = sum[i][1] = 0;
    }
    if (!BEGUN || strip >= work.t.rows) return;
    const Lane at(thread());
    const int64_t row0 = work.t.q + work.t.first;
    if (a.carry) read_wide(o, a.out, row0 + strip, work.head, work.t.rows - strip);
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = strip + 16 * i + 8 * h + at.row;
        float begun = a.sinks ? a.sinks[work.head] : -INFINITY;
        if (a.carry) {
          if (at.column == 0 && row < work.t.rows) begun = a.lse[(row0 + row) * a.lse_token + work.head * a.lse_head];
          begun = __shfl_sync(0xffffffffu, begun, 0, 4);
        }
        top[i][h] = SCORED ? begun : begun / a.scale;
        if (begun != -INFINITY) {
          if (at.column == 0) sum[i][h] = 1;
          continue;
        }
#pragma unroll
        for (int n = 0; n < NT; n++) o[i][n][2 * h] = o[i][n][2 * h + 1] = 0;
      }
  }

  // raise raises the maxima to the scores of a tile. score(i, h, c, x) is the score whose product
  // is x: column c of row 16i + 8h of a lane. `keep` becomes the factors of the sums before; raise
  // reports whether one in the warp is not 1. Each step is for all rows, so that the chains of
  // different rows overlap.
  template <int NT, class Score>
  __device__ __forceinline__ bool raise(const float (&s)[MT][NT][4], float scale, float (&keep)[MT][2], Score score) {
    bool rescale = false;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float m = top[i][h];
#pragma unroll
        for (int c = 0; c < 2 * NT; c++) m = fmaxf(m, score(i, h, c, s[i][c / 2][2 * h + c % 2]));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
        keep[i][h] = SCORED ? exp2_approx((top[i][h] - exponent_base(m, 1)) * scale)
                            : exp2_approx(top[i][h] * scale - exponent_base(m, scale));
        if (BEGUN && top[i][h] == m) keep[i][h] = 1; // exactly, so that a query without keys keeps its bits
        top[i][h] = m;
        sum[i][h] *= keep[i][h];
        rescale = rescale || keep[i][h] != 1;
      }
    return __any_sync(0xffffffffu, rescale);
  }

  // weigh replaces scores by their exponentials, and adds these to the sums.
  template <int NT> __device__ __forceinline__ void weigh(float (&s)[MT][NT][4], float scale) {
    static_assert(!SCORED, "scores with options have exponents of their own");
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float base = exponent_base(top[i][h], scale);
#pragma unroll
        for (int c = 0; c < 2 * NT; c++) {
          float &x = s[i][c / 2][2 * h + c % 2];
          x = exp2_approx(fmaf(x, scale, -base));
          sum[i][h] += x;
        }
      }
  }

  // finish divides the output by the sums and writes lse. sees_key has, if SCORED, bits 2i + h of
  // the rows that see a key.
  template <int NT> __device__ __forceinline__ void finish(float (&o)[MT][NT][4], const AttentionCall &a,
                                                           const BlockTile &work, int strip, float scale,
                                                           unsigned sees_key) {
    const Lane at(thread());
    const AttentionTile t = work.t;
    const int64_t row0 = t.q + t.first, head = work.head;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float l = sum[i][h];
        l += __shfl_xor_sync(0xffffffffu, l, 1);
        l += __shfl_xor_sync(0xffffffffu, l, 2);
        const int row = strip + 16 * i + 8 * h + at.row;
        const AttentionRange of_row = attention_keys(a.mask, t.shift, t.sk, t.first + row, t.first + row + 1);
        const bool alone = SCORED ? !(sees_key >> (2 * i + h) & 1) : of_row.lo >= of_row.hi,
                   none = alone && !(BEGUN && top[i][h] != -INFINITY);
        const float f = none ? 0 : 1 / l;
        float lse = (top[i][h] * scale + log2f(l)) * LN2;
        if (BEGUN && alone && a.sinks) lse = a.sinks[head];
        // a softmax to which no key was added keeps the bits of its lse
        if (at.column == 0 && row < t.rows && !(BEGUN && alone && a.carry && !none))
          a.lse[(row0 + row) * a.lse_token + head * a.lse_head] = none ? -INFINITY : lse;
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) o[i][n][e] = none ? 0 : o[i][n][e] * f;
      }
  }
};

// rescale multiplies rows by the factors of `raise`.
template <int MT, int NT> __device__ __forceinline__ void rescale(float (&o)[MT][NT][4], const float (&keep)[MT][2]) {
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int c = 0; c < NT; c++)
#pragma unroll
      for (int e = 0; e < 4; e++) o[i][c][e] *= keep[i][e / 2];
}

// write_output writes a warp's rows of the output, of F32 or BF16, through rows of a tile that only
// this warp still uses.
template <bool BEGUN, int WIDTH, int MT, int NT>
__device__ __forceinline__ void write_output(Corner in, float (&o)[MT][NT][4], const AttentionCall &a,
                                             const BlockTile &work, int strip) {
  const int64_t row = work.t.q + work.t.first + strip;
  if (BEGUN && !a.out.bf16) write_wide(o, a.out, row, work.head, work.t.rows - strip);
  else write_rows<WIDTH>(in, o, a.out, row, work.head, work.t.rows - strip);
}
