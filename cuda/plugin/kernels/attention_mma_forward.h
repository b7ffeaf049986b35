// The forward pass of attention on tensor cores (attention_mma_kernels.h).
#pragma once

#include "attention_mma_stream.h"
#include "attention_softmax.h"

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
    if (begin < stream.steps) {
      stream.load_queries(qs, a.q);
      stream.begin(begin);
    }

    float o[MT][HEAD / 8][4];
    RunningSoftmax<MT, BEGUN, SCORED> softmax;
    softmax.begin(o, a, work, strip);
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
      if constexpr (SCORED) {
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
              bool sees = !columns.hide(column);
              if (scored.blocks && sees)
                sees = scored.blocks[tables.stays[row].at + tables.of(buffer)[at.column + column].at] != 0;
              float unused;
              x = sees ? scored.capped(x, a.scale, unused) : -INFINITY;
              sees_key |= (unsigned)sees << (2 * i + h);
            }
          }
      } else if (seen == PARTIAL) {
        hide(s, band, n, strip, -INFINITY);
      }
      float keep[MT][2];
      const bool changed = softmax.raise(s, scale, keep, [&](int i, int h, int c, float x) {
        if (!SCORED) return x;
        return fmaf(
            scored.slope,
            apart(work.ahead - (int64_t)step * COLUMNS, strip + 16 * i + 8 * h + at.row, at.column + c / 2 * 8 + c % 2),
            x);
      });
      if (changed) rescale(o, keep);
      if constexpr (SCORED) {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float base = exponent_base(softmax.top[i][h], 1);
#pragma unroll
            for (int c = 0; c < 2 * NT; c++) {
              float &x = s[i][c / 2][2 * h + c % 2];
              const int row = strip + 16 * i + 8 * h + at.row, column = at.column + c / 2 * 8 + c % 2;
              x = exp2_approx(scored.exponent(x, apart(work.ahead - (int64_t)step * COLUMNS, row, column), base) *
                              LOG2E);
              softmax.sum[i][h] += x;
              if (scored.o.drop) x *= scored.factor(tables.stays[row].bits, (uint32_t)tables.of(buffer)[column].bits);
            }
          }
      } else {
        softmax.weigh(s, scale);
      }
      accumulate<HEAD>(o, s, down<HEAD>(lane, ks + COLUMNS * HEAD, 0, 0));
    }
    if (strip >= work.t.rows) continue;
    if (SCORED)
      sees_key |= __shfl_xor_sync(0xffffffffu, sees_key, 1), sees_key |= __shfl_xor_sync(0xffffffffu, sees_key, 2);
    softmax.finish(o, a, work, strip, scale, sees_key);
    write_output<BEGUN, HEAD>({qs, strip, 0}, o, a, work, strip);
  }
}
