// The backward pass of attention on tensor cores (attention_mma_kernels.h).
#pragma once

#include "attention_mma_stream.h"

// Graded are the weight of a key for a query, after dropout, and the gradients of the score after
// and before the cap. All are 0 if the query does not see the key.
struct Graded {
  float weight, biased, score;
};
__device__ __forceinline__ Graded graded(const Scores &s, float product, float dp, float scale, float distance,
                                         float lse, float delta, const AttentionRow &query, const AttentionRow &key,
                                         bool sees) {
  if (sees && s.blocks) sees = s.blocks[query.at + key.at] != 0;
  if (!sees) return {0, 0, 0};
  float slope;
  const float x = s.capped(product, scale, slope);
  const float p = exp2_approx(s.exponent(x, distance, lse) * LOG2E), factor = s.factor(query.bits, (uint32_t)key.bits);
  const float d = p * (dp * factor - delta);
  return {p * factor, d, d * slope};
}

// The dq kernel of reproducible calls: a block has queries and their dout, and loops over keys and
// values.
template <int SIZE, bool SCORED> __device__ __forceinline__ void attention_mma_dq(const AttentionCall &a) {
  constexpr int HEAD = attention_mma_sizes[SIZE].head, ROWS = attention_mma_sizes[SIZE].dq_rows,
                COLUMNS = attention_mma_sizes[SIZE].dq_columns;
  constexpr int STRIP = ROWS / MMA_WARPS, MT = STRIP / 16, NT = COLUMNS / 8;
  typedef KeyStream<HEAD, ROWS, COLUMNS, SCORED> Stream;
  SHARED(bf16, shared);
  bf16 *qs = shared, *douts = qs + ROWS * HEAD, *kvs = douts + ROWS * HEAD; // two buffers of keys and values
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
      stream.load_queries(douts, a.dout);
      stream.begin(begin);
    }

    float dq[MT][HEAD / 8][4], lse[MT][2], delta[MT][2], terms[MT][2] = {}; // terms of dslopes, if SCORED
    const Lane of_row(thread());
#pragma unroll
    for (int i = 0; i < MT; i++) {
      zero(dq[i]);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int64_t r = work.t.q + work.t.first + least(strip + 16 * i + 8 * h + of_row.row, work.t.rows - 1);
        lse[i][h] = a.lse[r * a.lse_token + work.head * a.lse_head] * (SCORED ? 1 : LOG2E);
        delta[i][h] = a.delta[work.head * a.queries + r];
      }
    }
    for (int step = begin, after, turn = 0; step < stream.steps; step = after, turn ^= 1) {
      const int buffer = SCORED ? turn : step % 2;
      after = stream.next(step, buffer);
      const bf16 *ks = stream.buffer(buffer);
      const int n = work.rows_of(step, COLUMNS);
      const AttentionBand band = attention_band(a.mask, work.ahead - (int64_t)step * COLUMNS);
      const Visibility seen = strip < work.t.rows ? visibility(band, strip, STRIP, n, COLUMNS) : MASKED;
      if (seen == MASKED) continue;
      float ds[MT][NT][4], dp[MT][NT][4];
      const int me = thread(), lane = me % 32;
      const Lane at(me);
      products<HEAD>(dp, down<HEAD>(lane, douts, strip, 0), along<HEAD>(lane, ks + COLUMNS * HEAD, 0, 0));
      products<HEAD>(ds, down<HEAD>(lane, qs, strip, 0), along<HEAD>(lane, ks, 0, 0));
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const Columns columns(band, n, strip + 16 * i + 8 * h + at.row, at.column);
#pragma unroll
          for (int c = 0; c < 2 * NT; c++) {
            float &x = ds[i][c / 2][2 * h + c % 2];
            if constexpr (SCORED) {
              const int row = strip + 16 * i + 8 * h + at.row, column = at.column + c / 2 * 8 + c % 2;
              const float distance = apart(work.ahead - (int64_t)step * COLUMNS, row, column);
              const Graded g = graded(scored, x, dp[i][c / 2][2 * h + c % 2], a.scale, distance, lse[i][h], delta[i][h],
                                      tables.stays[row], tables.of(buffer)[column], !columns.hide(c / 2 * 8 + c % 2));
              terms[i][h] = fmaf(g.biased, distance, terms[i][h]);
              x = g.score;
              continue;
            }
            x = exp2_approx(fmaf(x, scale, -lse[i][h])) * (dp[i][c / 2][2 * h + c % 2] - delta[i][h]);
          }
          if (!SCORED && seen == PARTIAL)
#pragma unroll
            for (int c = 0; c < 2 * NT; c++)
              ds[i][c / 2][2 * h + c % 2] = columns.hide(c / 2 * 8 + c % 2) ? 0 : ds[i][c / 2][2 * h + c % 2];
        }
      accumulate<HEAD>(dq, ds, down<HEAD>(lane, ks, 0, 0));
    }
    if (strip >= work.t.rows) continue;
    if (SCORED && a.terms)
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float sum = terms[i][h];
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
          const int row = strip + 16 * i + 8 * h + of_row.row;
          if (of_row.column == 0 && row < work.t.rows)
            a.terms[work.head * a.queries + work.t.q + work.t.first + row] = sum;
        }
    multiply(dq, a.scale);
    write_gradients<HEAD>({qs, strip, 0}, dq, a.dq, work.t.q + work.t.first + strip, work.head, work.t.rows - strip);
  }
}

// Shared memory of the kernel below. Its warps form a grid of two rows: a warp has 32 rows and
// 1 / ACROSS of the columns of every product.
template <int SIZE> struct MmaBackward {
  static constexpr int HEAD = attention_mma_sizes[SIZE].head, WARPS = attention_mma_sizes[SIZE].warps,
                       AHEAD = attention_mma_sizes[SIZE].ahead;
  static constexpr int THREADS = 32 * WARPS, ROWS = ATTENTION_MMA_BACK, ACROSS = WARPS / 2;
  static constexpr int MT = 2, NT = ROWS / ACROSS / 8, NF = HEAD / ACROSS / 8; // tiles of scores and of gradients
  static constexpr int BLOCKS = HEAD == 64 ? 3 : 8 / WARPS;                    // on a multiprocessor
  bf16 *k, *v, *dout, *p, *ds;                                                 // p, ds: a row for each query
  __device__ __forceinline__ explicit MmaBackward(bf16 *shared)
      : k(shared), v(k + ROWS * HEAD), dout(v + ROWS * HEAD), p(dout + ROWS * HEAD), ds(p + ROWS * ROWS) {}
  __device__ __forceinline__ bf16 *q(int buffer) const { return ds + ROWS * ROWS + buffer * ROWS * HEAD; }
  __device__ __forceinline__ float *lse(int buffer) const {
    return reinterpret_cast<float *>(q(AHEAD)) + buffer * 2 * ROWS;
  }
  __device__ __forceinline__ float *delta(int buffer) const { return lse(buffer) + ROWS; }
  // share is where a warp's share of a product begins: its row, key (of scores) and feature (of
  // gradients).
  struct Share {
    int row, key, feature;
  };
  static __device__ __forceinline__ Share share(int thread) {
    const int warp = thread / 32;
    return {warp / ACROSS * 16 * MT, warp % ACROSS * 8 * NT, warp % ACROSS * 8 * NF};
  }
  __device__ __forceinline__ BlockTile &work() const { return *reinterpret_cast<BlockTile *>(lse(AHEAD)); }
};

// The kernel for dk and dv: a block has keys and values, and loops over queries and their dout. DQ:
// it also adds to the sums of dq.
template <int SIZE, bool DQ, bool SCORED> __device__ __forceinline__ void attention_mma_dkv(const AttentionCall &a) {
  typedef MmaBackward<SIZE> B;
  constexpr int HEAD = B::HEAD, ROWS = B::ROWS, THREADS = B::THREADS, AHEAD = B::AHEAD, MT = B::MT, NT = B::NT,
                NF = B::NF;
  SHARED(bf16, shared);
  const B tile(shared);
  Copies copies;
  BlockTile &work = tile.work();
  const RowTables tables(work, ROWS, ROWS);
  for (int64_t w = blockIdx.x; w < a.kv_heads * a.count_k; w += gridDim.x) {
    __syncthreads(); // all threads have read the previous tile
    if (threadIdx.x == 0) work.keys(a, w, ROWS);
    __syncthreads();
    const int heads = work.heads, steps = heads > 0 ? work.steps(ROWS) : 0;

    // For each query head of the key head, and for each tile of its queries.
    auto load_q = [&](int buffer, int head, int step) {
      const int64_t first = work.t.q + work.from + (int64_t)step * ROWS, r = first + threadIdx.x, h = work.head + head;
      const int n = work.rows_of(step, ROWS);
      load_tile<HEAD, ROWS, THREADS>(copies, tile.q(buffer), a.q, first, h, n);
      if (SCORED) query_rows<ROWS>(tables.of(buffer), Scores(a, h), first, n);
      if (threadIdx.x < ROWS) {
        const bool there = (int)threadIdx.x < n;
        copies.copy<1>(tile.lse(buffer) + threadIdx.x, there ? a.lse + r * a.lse_token + h * a.lse_head : a.lse, there);
        copies.copy<1>(tile.delta(buffer) + threadIdx.x, there ? a.delta + h * a.queries + r : a.delta, there);
      }
    };
    auto load_dout = [&](int head, int step) {
      load_tile<HEAD, ROWS, THREADS>(copies, tile.dout, a.dout, work.t.q + work.from + (int64_t)step * ROWS,
                                     work.head + head, work.rows_of(step, ROWS));
    };
    // hidden reports whether the block mask hides the tile of a step of a head. advance goes to the
    // next step that it does not hide, of the same head or a later one.
    auto hidden = [&](int head, int step) {
      return SCORED && Scores(a, work.head + head)
                           .hides(work.t.q + work.from + (int64_t)step * ROWS, work.rows_of(step, ROWS),
                                  work.t.k + work.t.first, work.t.rows);
    };
    auto advance = [&](int &head, int &step) {
      do {
        step = step + 1 < steps ? step + 1 : 0;
        head += step == 0;
      } while (SCORED && head < heads && hidden(head, step));
    };
    if (steps > 0) {
      int head = 0, step = 0;
      if (SCORED && hidden(head, step)) advance(head, step);
      if (head < heads) { // otherwise nothing would wait for the copies (KeyStream.begin)
        load_tile<HEAD, ROWS, THREADS>(copies, tile.k, a.k, work.t.k + work.t.first, work.kv, work.t.rows);
        load_tile<HEAD, ROWS, THREADS>(copies, tile.v, a.v, work.t.k + work.t.first, work.kv, work.t.rows);
        if (SCORED) key_rows<ROWS>(tables.stays, a.scores, work.t.k + work.t.first, work.t.rows);
        load_q(0, head, step);
        load_dout(head, step);
      }
    }
    copies.close();

    float dk[MT][NF][4], dv[MT][NF][4];
    int buffer = 0;
    // A key head without query heads has gradients of zero.
    for (int head = 0; head < (heads > 0 ? heads : 1); head++) {
#pragma unroll
      for (int i = 0; i < MT; i++) zero(dk[i]), zero(dv[i]);
      for (int step = 0; step < steps; step++) {
        if (SCORED && hidden(head, step)) continue;
        copies.wait<0>();
        __syncthreads(); // the tiles have arrived, and all threads have read the previous P and dS
        int next_step = step, next_head = head;
        advance(next_head, next_step);
        const bf16 *qs = tile.q(buffer);
        const int me = thread(), lane = me % 32;
        const Lane at(me);
        const auto [row0, key0, feature0] = B::share(me);
        if (AHEAD == 2 && next_head < heads) load_q(buffer ^ 1, next_head, next_step);
        {
          float s[MT][NT][4], dp[MT][NT][4];
          const float scale = a.scale * LOG2E;
          const AttentionBand of_tile = attention_band(a.mask, work.ahead + (int64_t)step * ROWS),
                              band = {of_tile.below - key0, of_tile.above - key0};
          const int n = work.rows_of(step, ROWS), keys = work.t.rows - key0;
          const Visibility seen =
              row0 < n && keys > 0 ? visibility(band, row0, 16 * MT, (int)least(8 * NT, keys), 8 * NT) : MASKED;
          if (seen == MASKED) {
#pragma unroll
            for (int i = 0; i < MT; i++) zero(s[i]), zero(dp[i]);
          } else {
            products<HEAD>(dp, down<HEAD>(lane, tile.dout, row0, 0), along<HEAD>(lane, tile.v, key0, 0));
            products<HEAD>(s, down<HEAD>(lane, qs, row0, 0), along<HEAD>(lane, tile.k, key0, 0));
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
              for (int h = 0; h < 2; h++) {
                const int row = row0 + 16 * i + 8 * h + at.row;
                const float lse = tile.lse(buffer)[row] * (SCORED ? 1 : LOG2E), delta = tile.delta(buffer)[row];
                if constexpr (SCORED) {
                  const Scores scored(a, work.head + head);
                  const Columns columns(band, (int)least(8 * NT, keys), row, at.column);
#pragma unroll
                  for (int c = 0; c < 2 * NT; c++) {
                    float &p = s[i][c / 2][2 * h + c % 2], &d = dp[i][c / 2][2 * h + c % 2];
                    const int column = key0 + at.column + c / 2 * 8 + c % 2;
                    const Graded g = graded(
                        scored, p, d, a.scale, apart(work.ahead + (int64_t)step * ROWS, row, column), lse, delta,
                        tables.of(buffer)[row], tables.stays[column], row < n && !columns.hide(c / 2 * 8 + c % 2));
                    p = g.weight, d = g.score;
                  }
                } else {
#pragma unroll
                  for (int c = 0; c < 2 * NT; c++) {
                    float &p = s[i][c / 2][2 * h + c % 2], &d = dp[i][c / 2][2 * h + c % 2];
                    p = exp2_approx(fmaf(p, scale, -lse));
                    d = p * (d - delta);
                  }
                  if (seen == PARTIAL) {
                    const Columns columns(band, (int)least(8 * NT, keys), row, at.column);
#pragma unroll
                    for (int c = 0; c < 2 * NT; c++) {
                      float &p = s[i][c / 2][2 * h + c % 2], &d = dp[i][c / 2][2 * h + c % 2];
                      const bool hidden = columns.hide(c / 2 * 8 + c % 2);
                      p = hidden ? 0 : p, d = hidden ? 0 : d;
                    }
                  }
                }
              }
          }
          store_rounded<ROWS>({tile.p, row0, key0}, s);
          store_rounded<ROWS>({tile.ds, row0, key0}, dp);
        }
        __syncthreads(); // P and dS are stored
        accumulate_stored<true, HEAD>(dv, along<ROWS>(lane, tile.p, 0, row0), down<HEAD>(lane, tile.dout, 0, feature0));
        __syncthreads(); // all threads have read dout
        if (next_head < heads) load_dout(next_head, next_step);
        accumulate_stored<true, HEAD>(dk, along<ROWS>(lane, tile.ds, 0, row0), down<HEAD>(lane, qs, 0, feature0));
        if (AHEAD == 1) {
          __syncthreads(); // all threads have read the queries
          if (next_head < heads) load_q(buffer, next_head, next_step);
        }
        copies.close();
        if (DQ) {
          float dq[MT][NF][4];
#pragma unroll
          for (int i = 0; i < MT; i++) zero(dq[i]);
          accumulate_stored<false, HEAD>(dq, down<ROWS>(lane, tile.ds, row0, 0), down<HEAD>(lane, tile.k, 0, feature0));
          const int64_t row = (work.head + head) * a.queries + work.t.q + work.from + (int64_t)step * ROWS + row0;
          add_to_sums(dq, a.dq_sums + row * a.q.width, a.q.width, feature0, work.rows_of(step, ROWS) - row0);
        }
        if (AHEAD == 2) buffer ^= 1;
      }
      const auto [row0, key0, feature0] = B::share(thread());
      const bool first_head = head == 0, last_head = head + 1 >= heads;
      const int64_t row = work.t.k + work.t.first + row0, kv = work.kv;
      const int rows = work.t.rows - row0;
      const AttentionView to_dk = columns_from(a.dk, feature0), to_dv = columns_from(a.dv, feature0);
      float *sums = a.sums + (kv * a.keys + row) * (a.k.width + a.v.width) + feature0;
      multiply(dk, a.scale);
      add_before(dk, sums, a.k.width + a.v.width, to_dk.width, rows, first_head, last_head);
      add_before(dv, sums + a.k.width, a.k.width + a.v.width, to_dv.width, rows, first_head, last_head);
      if (!last_head) continue;
      __syncthreads(); // all threads have read the keys
      if (rows <= 0) continue;
      write_gradients<HEAD>({tile.k, row0, feature0}, dk, to_dk, row, kv, rows);
      write_gradients<HEAD>({tile.v, row0, feature0}, dv, to_dv, row, kv, rows);
    }
  }
}
