// Index arithmetic of attention: the keys that a query attends to, the tiles of documents, the tile
// of a block, and the layout of the workspace. The file includes no CUDA; attention_index_test.cpp
// tests it on the host.
#pragma once

#include "index.h"
#include "random.h"

// AttentionRange is [lo, hi). It is empty if hi <= lo.
struct AttentionRange {
  int64_t lo, hi;
};

// AttentionMask is the window around the diagonal: query i of a document is aligned with key i +
// shift, and attends to `left` keys before it and `right` keys after it. A negative bound is
// unlimited.
struct AttentionMask {
  int64_t left, right;
};

// AttentionArgs has the arguments of attention or of its gradient. The tensors of gradients are
// absent in the forward pass and in queries for workspace.
struct AttentionArgs : uly_attention {
  uly_tensor dout, dq, dk, dv, dsinks, dslopes;
  bool backward;
};
inline AttentionArgs attention_args(const uly_attention &a, bool backward) {
  AttentionArgs x = {};
  static_cast<uly_attention &>(x) = a;
  x.backward = backward;
  return x;
}
// args points to uly_attention_grad if backward, else to uly_attention.
inline AttentionArgs attention_args(const void *args, bool backward) {
  AttentionArgs x = attention_args(*static_cast<const uly_attention *>(args), backward);
  if (!backward) return x;
  const uly_attention_grad &g = *static_cast<const uly_attention_grad *>(args);
  x.dout = g.dout, x.dq = g.dq, x.dk = g.dk, x.dv = g.dv, x.dsinks = g.dsinks, x.dslopes = g.dslopes;
  return x;
}

// ATTENTION_SHIFT is the most by which shifts may move queries, so that sums with rows and with the
// sides of a window do not overflow.
enum : int64_t { ATTENTION_SHIFT = (int64_t)1 << 50 };

// attention_mask combines causal and the window. A bound larger than any distance becomes -1, so
// that the sums below cannot overflow.
inline AttentionMask attention_mask(const uly_attention &a) {
  int64_t reach = 0;
  for (int64_t i = 0; i < a.shift.length; i++) reach = most(reach, a.shift[i] < 0 ? -a.shift[i] : a.shift[i]);
  reach += a.q.shape[0] + a.k.shape[0];
  const uly_window all = {-1, -1}, &w = a.window ? *a.window : all;
  const int64_t left = w.left < 0 || w.left >= reach ? -1 : w.left,
                right = w.right < 0 || w.right >= reach ? -1 : w.right;
  return {left, a.causal ? 0 : right};
}

// attention_keys returns the keys that some of the queries [q0, q1) of a document attend to; for a
// single query, exactly its keys. Here and below, queries and keys are counted from the start of
// their document, which has sq queries and sk keys, and query i is aligned with key i + shift.
ULY_BOTH AttentionRange attention_keys(AttentionMask m, int64_t shift, int64_t sk, int64_t q0, int64_t q1) {
  return {m.left < 0 ? 0 : most(0, q0 + shift - m.left), m.right < 0 ? sk : most(0, least(sk, q1 + shift + m.right))};
}

// attention_queries returns the queries that attend to some of the keys [k0, k1).
ULY_BOTH AttentionRange attention_queries(AttentionMask m, int64_t shift, int64_t sq, int64_t k0, int64_t k1) {
  return {m.right < 0 ? 0 : most(0, k0 - shift - m.right), m.left < 0 ? sq : most(0, least(sq, k1 - shift + m.left))};
}

// AttentionBand is the mask of a tile of queries from q0 on and keys from k0 on: query q0 + r
// attends to key k0 + c if below <= c - r <= above. It is exact for r and c below 2^15.
struct AttentionBand {
  int below, above;
};
// `at` is the position of query q0's diagonal key, relative to k0.
ULY_BOTH AttentionBand attention_band(AttentionMask m, int64_t at) {
  const int64_t far = 1 << 16;
  return {m.left < 0 ? (int)-far : (int)most(-far, least(far, at - m.left)),
          m.right < 0 ? (int)far : (int)most(-far, least(far, at + m.right))};
}

// AttentionSize has the tile sizes of one instantiation of the kernels, for head sizes up to
// `head`. A block of the forward pass has `rows` queries and loads `columns` keys at a time. A
// block of the backward pass has `back_rows` queries (or keys) and loads `back_columns` keys (or
// queries) at a time.
struct AttentionSize {
  int head, rows, columns, back_rows, back_columns;
};

// The first size with `head` not less than both head sizes is used. The last size is for GPUs with
// less shared memory and supports all head sizes: every GPU allows 99 KiB for a block.
enum { ATTENTION_SIZES = 4, ATTENTION_HEAD = ULY_ATTENTION_HEAD, ATTENTION_THREADS = 256, ATTENTION_GAP = 4 };
constexpr AttentionSize attention_sizes[ATTENTION_SIZES] = {
    {64, 128, 64, 64, 64}, {128, 128, 64, 64, 64}, {256, 64, 64, 64, 32}, {256, 32, 16, 16, 16}};

inline const AttentionSize &attention_size(int64_t d, int64_t dv, bool small) {
  int i = small ? ATTENTION_SIZES - 1 : 0;
  while (attention_sizes[i].head < most(d, dv)) i++;
  return attention_sizes[i];
}

// attention_shared returns the bytes of shared memory. Rows of tiles are padded, so that lanes that
// read one column of neighbouring rows use different banks.
//
// Scored kernels, for scores that are capped, biased, dropped or hidden by a block mask, have an
// AttentionRow for each row as well.
constexpr int64_t attention_shared(const AttentionSize &s, bool backward, bool scored) {
  return (scored ? 16 * (backward ? s.back_rows : s.rows) : 0) +
         4 * (backward ? (s.head + ATTENTION_GAP) * 2 * (s.back_rows + s.back_columns) +
                             s.back_rows * (s.back_columns + ATTENTION_GAP) + 2 * s.back_columns
                       : (s.head + ATTENTION_GAP) * (s.rows + 2 * s.columns) + s.rows * (s.columns + ATTENTION_GAP));
}

// AttentionMmaSize has the sizes of one instantiation of the kernels on tensor cores, in BF16. A
// block of the forward pass has `rows` queries and loads `columns` keys at a
// time. A block of the dq kernel has dq_rows and dq_columns of them. A block of the dk and dv
// kernel has ATTENTION_MMA_BACK keys and loads as many queries at a time; it has `warps` warps, and
// buffers for `ahead` tiles of queries.
struct AttentionMmaSize {
  int head, rows, columns, dq_rows, dq_columns, warps, ahead;
};
enum { ATTENTION_MMA_SIZES = 3, ATTENTION_MMA_THREADS = 128, ATTENTION_MMA_BACK = 64, ATTENTION_MMA_BLOCK = 128 };
constexpr AttentionMmaSize attention_mma_sizes[ATTENTION_MMA_SIZES] = {
    {64, 128, 64, 128, 64, 4, 2}, {128, 128, 64, 128, 32, 4, 2}, {256, 64, 32, 64, 16, 8, 1}};

// These return the bytes of shared memory, with ATTENTION_MMA_BLOCK bytes for the block's work.
// Streamed tiles have two buffers, except dout and, for the widest heads, the queries of the dk and
// dv kernel. Scored kernels have an AttentionRow for each row of q and k as well.
constexpr int64_t attention_mma_shared(const AttentionMmaSize &s, bool scored) {
  return 2 * s.head * (s.rows + 4 * s.columns) + ATTENTION_MMA_BLOCK + (scored ? 16 * (s.rows + 2 * s.columns) : 0);
}
constexpr int64_t attention_mma_dq_shared(const AttentionMmaSize &s, bool scored) {
  return 2 * s.head * (2 * s.dq_rows + 4 * s.dq_columns) + ATTENTION_MMA_BLOCK +
         (scored ? 16 * (s.dq_rows + 2 * s.dq_columns) : 0);
}
// with P, dS, and lse and delta of the queries
constexpr int64_t attention_mma_dkv_shared(const AttentionMmaSize &s, bool scored) {
  return 2 * ATTENTION_MMA_BACK * (s.head * (3 + s.ahead) + 2 * ATTENTION_MMA_BACK + 4 * s.ahead) +
         ATTENTION_MMA_BLOCK + (scored ? 16 * ATTENTION_MMA_BACK * (1 + s.ahead) : 0);
}
inline const AttentionMmaSize &attention_mma_size(int64_t d, int64_t dv) {
  int i = 0;
  while (attention_mma_sizes[i].head < most(d, dv)) i++;
  return attention_mma_sizes[i];
}

// AttentionWgmmaSize has the sizes of one instantiation of the kernels for Hopper. A block of the
// forward pass has ATTENTION_WGMMA_ROWS queries and two buffers for `columns` keys, and for as many
// values. A block of the backward pass has ATTENTION_WGMMA_ROWS queries (or keys) and stages for
// ATTENTION_WGMMA_BACK keys and their values (or queries and their dout); the sums of the largest
// heads would not fit in registers.
struct AttentionWgmmaSize {
  int head, columns;
};
enum {
  ATTENTION_WGMMA_ROWS = 128,
  ATTENTION_WGMMA_THREADS = 384,
  ATTENTION_WGMMA_BACK = 64,
  ATTENTION_WGMMA_STAGES = 3,
  ATTENTION_WGMMA_BACK_SIZES = 2
};
constexpr AttentionWgmmaSize attention_wgmma_sizes[ATTENTION_MMA_SIZES] = {{64, 128}, {128, 128}, {256, 64}};
constexpr int64_t attention_wgmma_shared(const AttentionWgmmaSize &s) {
  return 2 * s.head * (ATTENTION_WGMMA_ROWS + 4 * s.columns) + ATTENTION_MMA_BLOCK;
}
// with lse and delta of the queries of each stage
constexpr int64_t attention_wgmma_back_shared(const AttentionWgmmaSize &s) {
  return 4 * s.head * (ATTENTION_WGMMA_ROWS + ATTENTION_WGMMA_STAGES * ATTENTION_WGMMA_BACK) +
         8 * ATTENTION_WGMMA_STAGES * ATTENTION_WGMMA_BACK + ATTENTION_MMA_BLOCK;
}
constexpr int64_t attention_wgmma_delta_shared(const AttentionWgmmaSize &s) { return 2 * 2 * 64 * s.head; }

// AttentionLayout is the layout of a workspace, in byte offsets. The tables of documents (int64)
// come first. Kernels read these tables and not the call's arrays, which are in host memory and may
// contain documents without tokens.
struct AttentionLayout : Room {
  int64_t documents;        // documents with tokens; the maximum if cu_q is NULL
  int64_t cu_q, cu_k;       // [documents + 1] bounds
  int64_t tiles_q, tiles_k; // [documents + 1] number of tiles in the preceding documents
  int64_t shift;            // [documents] key with which the first query is aligned
  int64_t kv_head;          // [query heads] key head of each query head
  int64_t first;            // [key heads + 1] first query head of each key head
  int64_t tables;           // end of the tables; the rest depends on the kernel
  int64_t delta;            // [query heads][queries] F32, backward
  int64_t terms;            // [query heads][queries] F32, backward with slopes: terms of dslopes
  // [key heads][keys][d + dv] F32, backward: sums over query heads if dk and dv are not F32
  int64_t sums;
  int64_t dq_sums; // [query heads][queries][d] F32, backward if blocks add to dq in any order
};

// adds: blocks add to dq in any order.
inline AttentionLayout attention_layout(const uly_attention &a, bool backward, bool adds) {
  const int64_t tq = a.q.shape[0], hq = a.q.shape[1], tk = a.k.shape[0], hkv = a.k.shape[1];
  AttentionLayout l = {};
  l.documents = a.cu_q ? 0 : tq + tk;
  for (int64_t i = 0; a.cu_q && i < a.cu_q.documents(); i++)
    l.documents += a.cu_q[i + 1] > a.cu_q[i] || a.cu_k[i + 1] > a.cu_k[i];
  auto take = [&](int64_t n, int64_t size) { return l.take(n, size); };
  l.cu_q = take(l.documents + 1, 8);
  l.cu_k = take(l.documents + 1, 8);
  l.tiles_q = take(l.documents + 1, 8);
  l.tiles_k = take(l.documents + 1, 8);
  l.shift = take(l.documents, 8);
  l.kv_head = take(hq, 8);
  l.first = take(hkv + 1, 8);
  l.tables = l.bytes;
  if (!backward) return l;
  l.delta = take(hq * tq, 4);
  l.terms = take(a.slopes.dtype ? hq * tq : 0, 4);
  l.sums = take(a.k.dtype == ULY_F32 || (!a.kv_head && hq <= hkv) ? 0 : hkv * tk * (a.k.shape[2] + a.v.shape[2]), 4);
  l.dq_sums = take(adds ? hq * tq * a.q.shape[2] : 0, 4);
  return l;
}

inline int64_t attention_kv_head(const uly_attention &a, int64_t h) {
  return a.kv_head ? a.kv_head[h] : h / (a.q.shape[1] / a.k.shape[1]);
}

// attention_tables calls put(byte offset, value) for every entry of the tables. tile_q and tile_k
// are the queries and keys of a tile.
template <class Put>
void attention_tables(const uly_attention &a, const AttentionLayout &l, int64_t tile_q, int64_t tile_k, Put put) {
  int64_t n = 0, tiles_q = 0, tiles_k = 0;
  auto entry = [&](int64_t q, int64_t k) {
    put(l.cu_q + 8 * n, q);
    put(l.cu_k + 8 * n, k);
    put(l.tiles_q + 8 * n, tiles_q);
    put(l.tiles_k + 8 * n, tiles_k);
    n++;
  };
  entry(0, 0);
  for (int64_t i = 0; i < a.cu_q.documents(); i++) {
    const int64_t q = a.cu_q[i + 1] - a.cu_q[i], k = a.cu_k[i + 1] - a.cu_k[i];
    if (q == 0 && k == 0) continue;
    put(l.shift + 8 * (n - 1), a.shift ? a.cu_q[i] + a.shift[i] - a.cu_k[i] : k - q);
    tiles_q += ceil_div(q, tile_q);
    tiles_k += ceil_div(k, tile_k);
    entry(a.cu_q[i + 1], a.cu_k[i + 1]);
  }
  const int64_t hq = a.q.shape[1], hkv = a.k.shape[1];
  for (int64_t h = 0; h < hq; h++) put(l.kv_head + 8 * h, attention_kv_head(a, h));
  for (int64_t kv = 0, h = 0; kv <= hkv; kv++) {
    while (h < hq && attention_kv_head(a, h) < kv) h++;
    put(l.first + 8 * kv, h);
  }
}

// attention_count returns the number of tiles of all documents.
inline int64_t attention_count(const int64_t *cu, int64_t documents, int64_t tile) {
  int64_t n = 0;
  for (int64_t i = 0; i < documents; i++) n += ceil_div(cu[i + 1] - cu[i], tile);
  return n;
}

// AttentionTile is the work of a block: rows [first, first + rows) of a document, counted from its
// start.
struct AttentionTile {
  int64_t q, sq, k, sk; // the first query and key of the document, and their numbers
  int64_t shift;        // the key with which the document's first query is aligned
  int64_t first;
  int rows;
};

// attention_tile returns tile t of all tiles of queries, or of keys. `tiles` is the table of tiles
// in the preceding documents.
ULY_BOTH AttentionTile attention_tile(const int64_t *cu_q, const int64_t *cu_k, const int64_t *shift,
                                      const int64_t *tiles, int64_t documents, int64_t t, int size, bool keys) {
  int64_t lo = 0, hi = documents; // tiles[lo] <= t < tiles[hi]
  while (hi - lo > 1) {
    const int64_t mid = lo + (hi - lo) / 2;
    if (tiles[mid] <= t) lo = mid;
    else hi = mid;
  }
  AttentionTile x = {cu_q[lo],  cu_q[lo + 1] - cu_q[lo], cu_k[lo], cu_k[lo + 1] - cu_k[lo],
                     shift[lo], (t - tiles[lo]) * size,  0};
  x.rows = (int)least(size, (keys ? x.sk : x.sq) - x.first);
  return x;
}

// AttentionWork is work item w, for heads with `tiles` tiles each. Items are ordered by head, so
// that blocks that run at the same time read the same keys. Tiles with the most work come first:
// with a causal mask, the last queries or the first keys.
struct AttentionWork {
  int64_t head, tile;
};
ULY_BOTH AttentionWork attention_work(int64_t w, int64_t tiles, bool keys) {
  return {w / tiles, keys ? w % tiles : tiles - 1 - w % tiles};
}

// AttentionBlocks are the blocks of a block mask along one axis, for rows that lie in one sequence:
// the first row is row `rest` of block `first`. A row c is less than ATTENTION_BLOCK after it.
enum { ATTENTION_BLOCK = 256 };
struct AttentionBlocks {
  int64_t first, rest, size;
  ULY_BOTH int64_t of(int c) const {
    if (size >= ATTENTION_BLOCK) return first + (rest + c >= size);
    return first + ((int)rest + c) / (int)size;
  }
};
// row is a number in the whole batch, whose sequences have `seq` rows and blocks of `size` rows.
ULY_BOTH AttentionBlocks attention_blocks(int64_t row, int64_t seq, int64_t size) {
  const int64_t at = row % seq;
  return {at / size, at % size, size};
}
