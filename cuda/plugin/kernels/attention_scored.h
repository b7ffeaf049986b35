// Building blocks of the scored kernels: scores that are capped, biased, dropped or hidden by a
// block mask. They are instantiations of their own, so that these options cost the others no
// registers.
#pragma once

#include "attention_tile.h"

// AttentionRow has what depends on a row of a block's tile: in the kernels over keys, the random
// bits of a query and the offset of its line in the block mask; in the dk and dv kernel, the random
// bits of a key and its column in the block mask.
struct AttentionRow {
  uint64_t bits;
  int64_t at;
};
static_assert(sizeof(AttentionRow) == 16, "attention_shared");

// Scores are the options of a head in a block's tile.
struct Scores {
  const AttentionScores &o;
  const uint8_t *blocks; // of the head; NULL = none
  uint64_t head_bits;
  float slope;
  __device__ __forceinline__ Scores(const AttentionCall &a, int64_t head)
      : o(a.scores),
        blocks(o.blocks ? o.blocks + head * o.blocks_head : nullptr),
        head_bits(::head_bits(o.seed, o.head_at + head)),
        slope(o.slopes ? o.slopes[head] : 0) {}

  // blocks of the mask from a row of the packed tensors on
  __device__ __forceinline__ AttentionBlocks queries_from(int64_t row) const {
    return attention_blocks(o.query_at + row, o.query_seq, o.block_rows);
  }
  __device__ __forceinline__ AttentionBlocks keys_from(int64_t row) const {
    return attention_blocks(o.key_at + row, o.key_seq, o.block_columns);
  }

  // hides reports whether the block mask hides nk keys from row k on from nq queries from row q on.
  // All lanes of a warp call it, and get the same result.
  __device__ __forceinline__ bool hides(int64_t q, int nq, int64_t k, int nk) const {
    if (!blocks) return false;
    const AttentionBlocks rows = queries_from(q), columns = keys_from(k);
    const int down = (int)(rows.of(nq - 1) - rows.first) + 1, across = (int)(columns.of(nk - 1) - columns.first) + 1;
    bool any = false;
    for (int i = (int)threadIdx.x % 32; i < down * across; i += 32)
      any = any || blocks[(rows.first + i / across) * o.blocks_row + columns.first + i % across] != 0;
    return !__any_sync(0xffffffffu, any);
  }

  // capped returns a score without bias, for a product. slope_of becomes its derivative by the
  // scaled product.
  __device__ __forceinline__ float capped(float product, float scale, float &slope_of) const {
    const float x = __fmul_rn(product, scale); // rounded, as in the plain kernels
    slope_of = 1;
    if (o.cap == 0) return x;
    const float t = tanhf(x * o.per_cap);
    slope_of = 1 - t * t;
    return o.cap * t;
  }
  // exponential returns exp(x + bias - base). The bias and base, which may be large and nearly
  // equal, are rounded once, together.
  __device__ __forceinline__ float exponential(float x, float distance, float base) const {
    return expf(exponent(x, distance, base));
  }
  __device__ __forceinline__ float exponent(float x, float distance, float base) const {
    return x + fmaf(slope, distance, -base);
  }
  // factor returns what dropout multiplies a weight by.
  __device__ __forceinline__ float factor(uint64_t query_bits, uint32_t key_bits) const {
    return !o.drop ? 1 : keeps(query_bits, key_bits, o.drop) ? o.kept : 0;
  }
};

// query_rows writes the table of ROWS rows, of which n exist, of queries from row q on, key_rows
// that of keys from row k on. The kernels also read the block mask for rows that do not exist, and
// drop what they compute from it, so these rows have valid offsets. Threads must be synchronized
// before the table is read.
template <int ROWS> __device__ __forceinline__ void query_rows(AttentionRow *rows, const Scores &s, int64_t q, int n) {
  static_assert(ROWS <= ATTENTION_THREADS, "a thread writes a row");
  if ((int)threadIdx.x >= ROWS) return;
  AttentionRow r = {};
  const bool there = (int)threadIdx.x < n;
  if (there && s.o.drop) r.bits = ::query_bits(s.head_bits, s.o.query_at + q + threadIdx.x);
  if (there && s.blocks) r.at = s.queries_from(q + threadIdx.x).first * s.o.blocks_row;
  rows[threadIdx.x] = r;
}
template <int ROWS>
__device__ __forceinline__ void key_rows(AttentionRow *rows, const AttentionScores &o, int64_t k, int n) {
  static_assert(ROWS <= ATTENTION_THREADS, "a thread writes a row");
  if ((int)threadIdx.x >= ROWS) return;
  AttentionRow r = {};
  const bool there = (int)threadIdx.x < n;
  if (there && o.drop) r.bits = ::key_bits(o.seed, o.key_at + k + threadIdx.x);
  if (there && o.blocks) r.at = attention_blocks(o.key_at + k + threadIdx.x, o.key_seq, o.block_columns).first;
  rows[threadIdx.x] = r;
}

// KeyColumns has what depends on a thread's columns of a tile of keys from row k on.
template <int CT> struct KeyColumns {
  uint32_t bits[CT];
  int64_t at[CT];
  __device__ __forceinline__ KeyColumns(const Scores &s, int64_t k) {
    AttentionBlocks b = {};
    if (s.blocks) b = s.keys_from(k);
#pragma unroll
    for (int j = 0; j < CT; j++) {
      const int c = (int)threadIdx.x % 16 + 16 * j;
      bits[j] = s.o.drop ? ::key_bits(s.o.seed, s.o.key_at + k + c) : 0;
      at[j] = s.blocks ? b.of(c) : 0;
    }
  }
};
// QueryColumn has what depends on column c of a tile of queries from row q on.
struct QueryColumn {
  uint64_t bits = 0;
  int64_t at = 0;
  __device__ __forceinline__ QueryColumn(const Scores &s, int64_t q, int c) {
    if (s.o.drop) bits = ::query_bits(s.head_bits, s.o.query_at + q + c);
    if (s.blocks) at = s.queries_from(q).of(c) * s.o.blocks_row;
  }
};

// row_sum returns the sum over the 16 lanes of a row.
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
  return x;
}
