// Building blocks of the attention kernels on tensor cores: tiles of BF16 in shared memory, and
// products of a warp.
//
// A warp computes strips of 16 rows of a product, so that the values of a row are in four lanes
// (Lane in mma.h). In the forward and the dq kernel, a warp has all columns of its rows, and the
// registers of one product, rounded to BF16, are the operand of the next (FlashAttention-2, Dao
// 2023, arXiv:2307.08691). In the dk and dv kernel, the operand of the next product passes through
// shared memory. All kernels multiply whole tiles and HEAD features, with zeros for missing
// elements. Therefore a result does not depend on the position of its row, and equal sums cancel
// exactly.
#pragma once

#include "attention_tile.h"
#include "mma.h"

enum { MMA_WARPS = ATTENTION_MMA_THREADS / 32 };

// thread returns threadIdx.x. What is computed from it takes no registers outside of the loop in
// which it is used.
__device__ __forceinline__ int thread() { return (int)in_loop(threadIdx.x); }

// BlockTile is a block's current work, in shared memory: registers are for products. Threads read
// it again where they need it.
struct BlockTile {
  AttentionTile t;
  int64_t head, kv;    // of the queries and of the keys; for dk and dv, `head` is the first query head
  int64_t from, count; // keys, or queries, that the block streams: the first one, and their number
  int64_t ahead;       // position of the first row's diagonal element, relative to `from`
  int heads;           // query heads of the key head

  // queries sets a tile of queries of a head, keys a tile of keys of a key head. One thread calls
  // them.
  __device__ __forceinline__ void queries(const AttentionCall &a, int64_t w, int size) {
    const AttentionWork work = attention_work(w, a.count_q, false);
    t = attention_tile(a.cu_q, a.cu_k, a.shift, a.tiles_q, a.documents, work.tile, size, false);
    head = work.head, kv = a.kv_head[head], heads = 1;
    stream(attention_keys(a.mask, t.shift, t.sk, t.first, t.first + t.rows));
    ahead = t.first + t.shift - from;
  }
  __device__ __forceinline__ void keys(const AttentionCall &a, int64_t w, int size) {
    const AttentionWork work = attention_work(w, a.count_k, true);
    t = attention_tile(a.cu_q, a.cu_k, a.shift, a.tiles_k, a.documents, work.tile, size, true);
    kv = work.head, head = a.first[kv], heads = (int)(a.first[kv + 1] - head);
    stream(attention_queries(a.mask, t.shift, t.sq, t.first, t.first + t.rows));
    ahead = from + t.shift - t.first;
  }
  // keys_seen returns the keys that `size` rows from `first` on of a tile of queries attend to,
  // queries_seen the queries that attend to such rows of a tile of keys.
  __device__ __forceinline__ AttentionRange keys_seen(const AttentionCall &a, int first, int size) const {
    if (first >= t.rows) return {0, 0};
    return attention_keys(a.mask, t.shift, t.sk, t.first + first, t.first + least(first + size, t.rows));
  }
  __device__ __forceinline__ AttentionRange queries_seen(const AttentionCall &a, int first, int size) const {
    if (first >= t.rows) return {0, 0};
    return attention_queries(a.mask, t.shift, t.sq, t.first + first, t.first + least(first + size, t.rows));
  }
  __device__ __forceinline__ void stream(AttentionRange r) { from = r.lo, count = most(0, r.hi - r.lo); }
  // steps is the number of tiles of `size` rows that the block streams, and rows_of the number of
  // rows of tile i.
  __device__ __forceinline__ int steps(int size) const { return (int)ceil_div(count, size); }
  __device__ __forceinline__ int rows_of(int i, int size) const { return (int)least(size, count - (int64_t)i * size); }
};
static_assert(sizeof(BlockTile) <= ATTENTION_MMA_BLOCK, "attention_mma_shared");

// TileRows are the rows of a head of a tensor from a row on, for tiles with rows of HEAD elements.
// A thread has one unit of 16 bytes of every STEP-th row. A pointer that advances takes fewer
// registers and instructions than indices. PANEL: the tile consists of panels of 64 columns and
// PANEL rows; otherwise it has whole rows.
template <int HEAD, int THREADS = ATTENTION_MMA_THREADS, int PANEL = 0> struct TileRows {
  static constexpr int LANES = HEAD / 8, STEP = THREADS / LANES, WIDTH = PANEL ? 64 : HEAD;
  static_assert(STEP == 4 || STEP % 8 == 0, "the swizzle of rows that are STEP apart");
  const bf16 *from;
  __device__ __forceinline__ TileRows(const AttentionView &x, int64_t row, int64_t head) {
    const int me = thread();
    from = (const bf16 *)x.data + (row + me / LANES) * x.token + head * x.head + me % LANES * 8;
  }

  // load copies the next n rows to a tile of ROWS rows, and advances by ROWS rows. Missing elements
  // are zero. If addresses do not allow vectors, it copies single elements, with the same result.
  template <int ROWS> __device__ __forceinline__ void load(Copies &copies, bf16 *tile, const AttentionView &x, int n) {
    const int me = thread(), first = me / LANES, column = me % LANES * 8, rows = column < x.width ? n - first : 0,
              at = PANEL ? column / 64 * 64 * PANEL + swizzled<64>(first, column % 64) : swizzled<HEAD>(first, column);
    // swizzled<WIDTH>(first + r, column): `first` is less than 4 if STEP is 4
    auto to = [&](int r) { return tile + r * WIDTH + (at ^ r % 8 * 8); };
    if (x.vectors) {
#pragma unroll
      for (int r = 0; r < ROWS; r += STEP, from += STEP * x.token)
        copies.copy<4>(reinterpret_cast<float *>(to(r)), reinterpret_cast<const float *>(from), r < rows);
      return;
    }
#pragma unroll 1
    for (int r = 0; r < ROWS; r += STEP, from += STEP * x.token) {
      Pack<bf16, 8> eight;
      load_raw<false>(from, r < rows ? 8 : 0, eight);
      uint4 w;
      memcpy(&w, &eight, sizeof w);
      *reinterpret_cast<uint4 *>(to(r)) = w;
    }
  }
};

// load_tile copies rows row … row + n of a head to a tile.
template <int HEAD, int ROWS, int THREADS = ATTENTION_MMA_THREADS>
__device__ __forceinline__ void load_tile(Copies &copies, bf16 *tile, const AttentionView &x, int64_t row, int64_t head,
                                          int n) {
  TileRows<HEAD, THREADS>(x, row, head).template load<ROWS>(copies, tile, x, n);
}

// Addresses in shared memory, in bytes. moved returns the address of an element `row` rows, a
// multiple of 8, and `column` columns, a multiple of 16, after that at `address`. The columns of
// `address` must be zero there. Tiles begin at multiples of the size of a row.
template <int WIDTH> __device__ __forceinline__ uint32_t moved(uint32_t address, int row, int column) {
  return (address ^ 2 * column) + 2 * row * WIDTH;
}
// down and along return a lane's address for ldmatrix (mma.h) from a row and a column on.
template <int WIDTH> __device__ __forceinline__ uint32_t down(int lane, const bf16 *tile, int row, int column) {
  return moved<WIDTH>((uint32_t)__cvta_generic_to_shared(tile + swizzled_down<WIDTH>(lane)), row, column);
}
template <int WIDTH> __device__ __forceinline__ uint32_t along(int lane, const bf16 *tile, int row, int column) {
  return moved<WIDTH>((uint32_t)__cvta_generic_to_shared(tile + swizzled_along<WIDTH>(lane)), row, column);
}

// products computes s[i][n] = rows 16i … of a times rows 8n … of b, over all features. a is an
// address of `down`, b of `along`.
template <int HEAD, int MT, int NT>
__device__ __forceinline__ void products(float (&s)[MT][NT][4], uint32_t a, uint32_t b) {
#pragma unroll
  for (int i = 0; i < MT; i++) zero(s[i]);
#pragma unroll
  for (int k = 0; k < HEAD; k += 16) {
    uint32_t x[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++) ldmatrix<false>(x[i], moved<HEAD>(a, 16 * i, k));
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      uint32_t y[4];
      ldmatrix<false>(y, moved<HEAD>(b, 8 * n, k));
#pragma unroll
      for (int i = 0; i < MT; i++) mma_pair(s[i][n], s[i][n + 1], x[i], y);
    }
  }
}

// add_step adds x, columns k … k + 15 of a matrix, times rows k … k + 15 of b to o. b is an address
// of `down` in a tile of WIDTH columns.
template <int WIDTH, int MT, int NT>
__device__ __forceinline__ void add_step(float (&o)[MT][NT][4], const uint32_t (&x)[MT][4], uint32_t b, int k) {
#pragma unroll
  for (int n = 0; n < NT; n += 2) {
    uint32_t y[4];
    ldmatrix<true>(y, moved<WIDTH>(b, k, 8 * n));
#pragma unroll
    for (int i = 0; i < MT; i++) mma_pair(o[i][n], o[i][n + 1], x[i], y);
  }
}

// accumulate rounds s to BF16 and adds s times b to o. b has a row for each column of s.
template <int WIDTH, int MT, int NT, int COLUMNS>
__device__ __forceinline__ void accumulate(float (&o)[MT][NT][4], const float (&s)[MT][COLUMNS][4], uint32_t b) {
#pragma unroll
  for (int k = 0; k < COLUMNS / 2; k++) {
    uint32_t x[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++) fragment_of(x[i], s[i], k);
    add_step<WIDTH>(o, x, b, 16 * k);
  }
}

// accumulate_stored adds a times b to o, over ATTENTION_MMA_BACK rows of b. a is in a square tile:
// with a row for each row of o (an address of `down`) or, ACROSS, with a row for each row of b (an
// address of `along`).
template <bool ACROSS, int WIDTH, int MT, int NT>
__device__ __forceinline__ void accumulate_stored(float (&o)[MT][NT][4], uint32_t a, uint32_t b) {
#pragma unroll
  for (int k = 0; k < ATTENTION_MMA_BACK; k += 16) {
    uint32_t x[MT][4];
#pragma unroll
    for (int i = 0; i < MT; i++)
      ldmatrix<ACROSS>(x[i], moved<ATTENTION_MMA_BACK>(a, ACROSS ? k : 16 * i, ACROSS ? 16 * i : k));
    add_step<WIDTH>(o, x, b, k);
  }
}

// Corner is a warp's elements of a tile, from a row and a column on.
struct Corner {
  bf16 *tile;
  int row, column;
};

// store_rounded rounds s to BF16 and stores it in a tile.
template <int WIDTH, int MT, int NT>
__device__ __forceinline__ void store_rounded(Corner in, const float (&s)[MT][NT][4]) {
  const Lane at(thread());
  const int from = swizzled<WIDTH>(in.row + at.row, in.column + at.column);
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        *reinterpret_cast<uint32_t *>(in.tile + (from ^ 8 * n) + (16 * i + 8 * h) * WIDTH) =
            pair(s[i][n][2 * h], s[i][n][2 * h + 1]);
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

// hide sets what the mask hides of a tile of n columns, from row `strip` on, to `hidden`.
template <int MT, int NT>
__device__ __forceinline__ void hide(float (&s)[MT][NT][4], AttentionBand band, int n, int strip, float hidden) {
  const Lane at(thread());
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const Columns columns(band, n, strip + 16 * i + 8 * h + at.row, at.column);
#pragma unroll
      for (int c = 0; c < 2 * NT; c++) {
        float &x = s[i][c / 2][2 * h + c % 2];
        x = columns.hide(c / 2 * 8 + c % 2) ? hidden : x;
      }
    }
}

constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

template <int MT, int NT> __device__ __forceinline__ void multiply(float (&x)[MT][NT][4], float f) {
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) x[i][n][e] *= f;
}

// columns_from is a tensor without the columns before `column`, a multiple of 16.
__device__ __forceinline__ AttentionView columns_from(AttentionView x, int column) {
  x.data = (char *)x.data + (x.bf16 ? 2 : 4) * column;
  x.width -= column;
  return x;
}

// at_pairs calls f(p, x, y) for every pair x, y of neighbours in a warp's rows, which is at p in a
// tensor of F32.
template <int MT, int NT, class F> __device__ __forceinline__ void at_pairs(float (&o)[MT][NT][4],
                                                                            const AttentionView &of, int64_t row,
                                                                            int64_t head, int rows, F f) {
  const Lane at(thread());
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int r = 16 * i + 8 * h + at.row;
      if (r >= rows) continue;
      float *p = (float *)of.data + (row + r) * of.token + head * of.head + at.column;
#pragma unroll
      for (int n = 0; n < NT; n++)
        if (8 * n < of.width) f(p + 8 * n, o[i][n][2 * h], o[i][n][2 * h + 1]);
    }
}

// read_wide and write_wide read and write a warp's rows in F32. A lane has the same elements in
// both.
template <int MT, int NT> __device__ __forceinline__ void read_wide(float (&o)[MT][NT][4], const AttentionView &from,
                                                                    int64_t row, int64_t head, int rows) {
  at_pairs(o, from, row, head, rows, [&](const float *p, float &x, float &y) {
    if (from.wide) {
      const float2 two = *reinterpret_cast<const float2 *>(p);
      x = two.x, y = two.y;
    } else {
      x = p[0], y = p[1];
    }
  });
}
template <int MT, int NT> __device__ __forceinline__ void write_wide(float (&o)[MT][NT][4], const AttentionView &to,
                                                                     int64_t row, int64_t head, int rows) {
  at_pairs(o, to, row, head, rows, [&](float *p, float x, float y) {
    if (to.wide) *reinterpret_cast<float2 *>(p) = make_float2(x, y);
    else p[0] = x, p[1] = y;
  });
}

// write_rows rounds a warp's results to BF16 and writes the first `rows` rows to row row, row + 1,
// … of a head. It goes through elements of a tile that only this warp still uses, so that the
// stores are vectors of 16 bytes.
template <int WIDTH, int MT, int NT> __device__ __forceinline__ void write_rows(Corner in, const float (&o)[MT][NT][4],
                                                                                const AttentionView &to, int64_t row,
                                                                                int64_t head, int rows) {
  __syncwarp();
  store_rounded<WIDTH>(in, o);
  __syncwarp();
  const int lane = thread() % 32, c = lane % NT * 8;
  if (c >= to.width) return;
#pragma unroll 1
  for (int r = lane / NT; r < least(rows, 16 * MT); r += 32 / NT) {
    const bf16 *from = in.tile + swizzled<WIDTH>(in.row + r, in.column + c);
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
template <int WIDTH, int MT, int NT>
__device__ __forceinline__ void write_gradients(Corner in, float (&o)[MT][NT][4], const AttentionView &to, int64_t row,
                                                int64_t head, int rows) {
  if (to.bf16) write_rows<WIDTH>(in, o, to, row, head, rows);
  else write_wide(o, to, row, head, rows);
}

// add_before adds the sums of the preceding query heads to a warp's rows d, and stores the result
// in `sums` for the following query heads. One thread has an element for all heads.
template <int MT, int NT> __device__ __forceinline__ void add_before(float (&d)[MT][NT][4], float *sums, int64_t step,
                                                                     int width, int rows, bool first, bool last) {
  const Lane at(thread());
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = 16 * i + 8 * h + at.row;
      if (row >= rows) continue;
      float2 *p = reinterpret_cast<float2 *>(sums + row * step + at.column);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        if (8 * n >= width) continue;
        float2 x = make_float2(d[i][n][2 * h], d[i][n][2 * h + 1]);
        if (!first) x.x = p[4 * n].x + x.x, x.y = p[4 * n].y + x.y;
        if (!last) p[4 * n] = x;
        d[i][n][2 * h] = x.x, d[i][n][2 * h + 1] = x.y;
      }
    }
}

// add_to_sums adds a warp's rows to the sums of dq, of `width` features each, from feature
// `feature` on. In the sums, the features of each 16 are ordered by lanes, so that a lane adds four
// neighbours: 4·(i % 8 / 2) + i / 8 · 2 + i % 2 is the position of feature i.
template <int MT, int NT> __device__ __forceinline__ void add_to_sums(const float (&d)[MT][NT][4], float *sums,
                                                                      int width, int feature, int rows) {
  const Lane at(thread());
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = 16 * i + 8 * h + at.row;
      if (row >= rows) continue;
      float *p = sums + (int64_t)row * width + feature + 2 * at.column;
#pragma unroll
      for (int n = 0; n < NT; n += 2)
        if (feature + 8 * n < width)
          add_four(p + 8 * n,
                   make_float4(d[i][n][2 * h], d[i][n][2 * h + 1], d[i][n + 1][2 * h], d[i][n + 1][2 * h + 1]));
    }
}
