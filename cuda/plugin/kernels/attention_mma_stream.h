// What the kernels of attention on tensor cores share besides products: tables of rows, and the
// tiles of keys and values that a block with queries streams.
#pragma once

#include "attention_mma.h"
#include "attention_scored.h"

// RowTables are tables of rows in shared memory, if SCORED: of the tile that stays, and of the two
// tiles that are streamed.
struct RowTables {
  AttentionRow *stays, *streamed;
  int rows;
  __device__ __forceinline__ RowTables(BlockTile &work, int resident, int streamed_rows)
      : stays(reinterpret_cast<AttentionRow *>(reinterpret_cast<char *>(&work) + ATTENTION_MMA_BLOCK)),
        streamed(stays + resident),
        rows(streamed_rows) {}
  __device__ __forceinline__ AttentionRow *of(int buffer) const { return streamed + buffer * rows; }
};

// apart returns the distance of a row and a column of a tile, in which the diagonal element of the
// first row is at column `ahead`.
__device__ __forceinline__ float apart(int64_t ahead, int row, int column) {
  return (float)-ahead + (float)(column - row);
}

// KeyStream is the stream of a block with queries, ROWS of a head: tiles of COLUMNS keys and their
// values. The next tile is copied while one is computed. Steps are numbers of tiles. The stream has
// no tiles that the block mask hides.
template <int HEAD, int ROWS, int COLUMNS, bool SCORED> struct KeyStream {
  const AttentionCall &a;
  const BlockTile &work;
  const RowTables &tables;
  bf16 *kvs; // two buffers of keys and values
  Copies &copies;
  TileRows<HEAD> keys, values; // that are copied next, unless SCORED
  Scores scores;
  int steps;

  __device__ __forceinline__ KeyStream(const AttentionCall &a, const BlockTile &work, const RowTables &tables,
                                       bf16 *kvs, Copies &copies)
      : a(a),
        work(work),
        tables(tables),
        kvs(kvs),
        copies(copies),
        keys(a.k, work.t.k + work.from, work.kv),
        values(a.v, work.t.k + work.from, work.kv),
        scores(a, work.head),
        steps(work.steps(COLUMNS)) {}

  __device__ __forceinline__ bf16 *buffer(int n) const { return kvs + n * 2 * COLUMNS * HEAD; }
  // seen_from returns the first step from this one on whose keys the block mask does not hide.
  __device__ __forceinline__ int seen_from(int step) const {
    while (SCORED && step < steps &&
           scores.hides(work.t.q + work.t.first, work.t.rows, work.t.k + work.from + (int64_t)step * COLUMNS,
                        work.rows_of(step, COLUMNS)))
      step++;
    return step;
  }
  // load copies the keys and values of a step to a buffer, and writes the table of the keys.
  __device__ __forceinline__ void load(int step, int to) {
    const int n = work.rows_of(step, COLUMNS);
    const int64_t row = work.t.k + work.from + (int64_t)step * COLUMNS;
    if (SCORED) keys = TileRows<HEAD>(a.k, row, work.kv), values = TileRows<HEAD>(a.v, row, work.kv);
    keys.template load<COLUMNS>(copies, buffer(to), a.k, n);
    values.template load<COLUMNS>(copies, buffer(to) + COLUMNS * HEAD, a.v, n);
    if (SCORED) key_rows<COLUMNS>(tables.of(to), a.scores, row, n);
  }
  // load_queries copies the block's rows of a tensor of queries.
  __device__ __forceinline__ void load_queries(bf16 *to, const AttentionView &x) {
    load_tile<HEAD, ROWS>(copies, to, x, work.t.q + work.t.first, work.head, work.t.rows);
  }
  // begin copies the first tile, and writes the table of the queries. If the block mask hides all
  // tiles, no copies may begin, because nothing would wait for them: they could end after the
  // block has stored its results in the same shared memory.
  __device__ __forceinline__ void begin(int step) {
    if (SCORED) query_rows<ROWS>(tables.stays, scores, work.t.q + work.t.first, work.t.rows);
    load(step, SCORED ? 0 : step % 2);
  }
  // next waits for the tile of a step in buffer `at`, and begins to copy the one after it, whose
  // step it returns.
  __device__ __forceinline__ int next(int step, int at) {
    copies.close();
    copies.template wait<0>();
    __syncthreads(); // the tile has arrived, and all threads have read the previous one
    const int after = seen_from(step + 1);
    if (after < steps) load(after, SCORED ? at ^ 1 : after % 2);
    return after;
  }
};
