// The forward pass of attention on tensor cores (attention_mma_kernels.h).
#pragma once

#include "attention_mma_stream.h"

// exponent_base returns the base of the exponents of a row with maximum m. It is rounded once. If
// the largest exponential is therefore not exactly 1, the sum has the same relative error.
__device__ __forceinline__ float exponent_base(float m, float scale) { return m == -INFINITY ? 0 : m * scale; }

// The forward kernel: a block has queries and loops over keys and values. The next tile is copied
// while one is computed. BEGUN: a softmax may have begun (attention_forward.cu), with sinks or keys
// of earlier calls. The other instantiation is for calls without them, and needs fewer registers.
template <int SIZE, bool BEGUN, bool SCORED>
__device__ __forceinline__ void attention_mma_forward(const AttentionCall &a) {
  constexpr int HEAD = attention_mma_sizes[SIZE].head, ROWS = attention_mma_sizes[SIZE].rows,
                COLUMNS = attention_mma_sizes[SIZE].columns;
  constexpr int STRIP = ROWS / MMA_WARPS, MT = STRIP / 16, NT = COLUMNS / 8;
  typedef KeyStream<HEAD, ROWS, COLUMNS, SCORED> Stream;
  SHARED(bf16, shared);
  bf16 *qs = shared, *kvs = qs + ROWS * HEAD; // two buffers of keys and values
  BlockTile &work = *reinterpret_cast<BlockTile *>(kvs + 4 * COLUMNS * HEAD);
  const RowTables tables(work, ROWS, COLUMNS);
  const int strip = (int)threadIdx.x / 32 * STRIP;
  const float scale = SCORED ? LOG2E : a.scale * LOG2E;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.heads * a.count_q; w += gridDim.x) {
    __syncthreads(); // all threads have read the previous tile
    if (threadIdx.x == 0) work.queries(a, w, ROWS);
    __syncthreads();
    Stream stream(a, work, tables, kvs, copies);
    const Scores &scored = stream.scores;
    const int begin = stream.seen_from(0);
    if (stream.steps > 0) {
      stream.load_queries(qs, a.q);
      stream.begin(begin);
    }

    float o[MT][HEAD / 8][4], top[MT][2], sum[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++) {
      zero(o[i]);
      top[i][0] = top[i][1] = -INFINITY, sum[i][0] = sum[i][1] = 0;
    }
    // One lane of a row reads lse, and writes it below. The maximum is before scaling.
    if (BEGUN && strip < work.t.rows) {
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
          for (int n = 0; n < HEAD / 8; n++) o[i][n][2 * h] = o[i][n][2 * h + 1] = 0;
        }
    }
    unsigned sees_key = 0; // bits 2i + h of the rows that see a key, if SCORED
    for (int step = begin, after, turn = 0; step < stream.steps; step = after, turn ^= 1) {
      const int buffer = SCORED ? turn : step % 2;
      after = stream.next(step, buffer);
      const bf16 *ks = stream.buffer(buffer);
      const int n = work.rows_of(step, COLUMNS);
      const AttentionBand band = attention_band(a.mask, work.ahead - (int64_t)step * COLUMNS);
      const Visibility seen = strip < work.t.rows ? visibility(band, strip, STRIP, n, COLUMNS) : MASKED;
      if (seen == MASKED) continue;
      float s[MT][NT][4];
      const int me = thread(), lane = me % 32;
      const Lane at(me);
      products<HEAD>(s, down<HEAD>(lane, qs, strip, 0), along<HEAD>(lane, ks, 0, 0));
      if (SCORED || seen == PARTIAL)
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int row = strip + 16 * i + 8 * h + at.row;
            const Columns columns(band, n, row, at.column);
#pragma unroll
            for (int c = 0; c < 2 * NT; c++) {
              float &x = s[i][c / 2][2 * h + c % 2];
              const int column = c / 2 * 8 + c % 2;
              if constexpr (SCORED) {
                bool sees = !columns.hide(column);
                if (scored.blocks && sees)
                  sees = scored.blocks[tables.stays[row].at + tables.of(buffer)[at.column + column].at] != 0;
                float unused;
                x = sees ? scored.capped(x, a.scale, unused) : -INFINITY;
                sees_key |= (unsigned)sees << (2 * i + h);
                continue;
              }
              x = columns.hide(column) ? -INFINITY : x;
            }
          }
      // Each step is for all rows, so that the chains of different rows overlap.
      float keep[MT][2];
      bool rescale = false;
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float m = top[i][h];
#pragma unroll
          for (int c = 0; c < 2 * NT; c++) {
            float x = s[i][c / 2][2 * h + c % 2];
            if (SCORED)
              x = fmaf(scored.slope,
                       apart(work.ahead - (int64_t)step * COLUMNS, strip + 16 * i + 8 * h + at.row,
                             at.column + c / 2 * 8 + c % 2),
                       x);
            m = fmaxf(m, x);
          }
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
          keep[i][h] = SCORED ? exp2_approx((top[i][h] - exponent_base(m, 1)) * scale)
                              : exp2_approx(top[i][h] * scale - exponent_base(m, scale));
          if (BEGUN && top[i][h] == m) keep[i][h] = 1; // exactly, so that a query without keys keeps its bits
          top[i][h] = m;
          sum[i][h] *= keep[i][h];
          rescale = rescale || keep[i][h] != 1;
        }
      if (__any_sync(0xffffffffu, rescale))
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int c = 0; c < HEAD / 8; c++)
#pragma unroll
            for (int e = 0; e < 4; e++) o[i][c][e] *= keep[i][e / 2];
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float base = exponent_base(top[i][h], SCORED ? 1 : scale);
#pragma unroll
          for (int c = 0; c < 2 * NT; c++) {
            float &x = s[i][c / 2][2 * h + c % 2];
            if constexpr (SCORED) {
              const int row = strip + 16 * i + 8 * h + at.row, column = at.column + c / 2 * 8 + c % 2;
              x = exp2_approx(scored.exponent(x, apart(work.ahead - (int64_t)step * COLUMNS, row, column), base) *
                              LOG2E);
              sum[i][h] += x;
              if (scored.o.drop) x *= scored.factor(tables.stays[row].bits, (uint32_t)tables.of(buffer)[column].bits);
              continue;
            }
            x = exp2_approx(fmaf(x, scale, -base));
            sum[i][h] += x;
          }
        }
      accumulate<HEAD>(o, s, down<HEAD>(lane, ks + COLUMNS * HEAD, 0, 0));
    }
    if (strip >= work.t.rows) continue;
    if (SCORED)
      sees_key |= __shfl_xor_sync(0xffffffffu, sees_key, 1), sees_key |= __shfl_xor_sync(0xffffffffu, sees_key, 2);
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
        for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) o[i][n][e] = none ? 0 : o[i][n][e] * f;
      }
    if (BEGUN && !a.out.bf16) write_wide(o, a.out, row0 + strip, head, t.rows - strip);
    else write_rows<HEAD>({qs, strip, 0}, o, a.out, row0 + strip, head, t.rows - strip);
  }
}
