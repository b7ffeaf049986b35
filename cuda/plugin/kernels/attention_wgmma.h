// What the kernels of attention with Hopper's products of warpgroups share
// (docs/attention-hopper.md; after FlashAttention-3, Shah et al. 2024, arXiv:2407.08608). Of the
// three warpgroups of a block, one copies tiles to shared memory. The other two, the consumers,
// compute: each has 64 rows.
//
// The copies are cp.async, not TMA: they fill rows behind a document with zeros and accept any
// layout, so that results do not depend on either. Exponentials, masks and the order of tiles are
// as in attention_mma_kernels.h.
//
// Tiles consist of panels of 64 columns, whose rows of 128 bytes are swizzled.
#pragma once

#include "attention_mma.h"
#include "warpgroups.h"

// WARPGROUP: threads of a warpgroup; THREADS: of a block. STRIP: rows of a consumer.
enum { WARPGROUP = 128, WARPGROUP_STRIP = 64 };

// The registers of a thread that computes, and of one that copies.
enum { REGISTERS = 232, REGISTERS_COPYING = 40 };
static_assert(2 * REGISTERS + REGISTERS_COPYING <= 3 * 168, "a block has 168 registers for each of 384 threads");

// consumer is the number of a thread's consumer, 0 or 1; consumer_row its first row. consumer_strip
// is the first of the 16 rows of its warp. They take no registers outside of a loop (thread).
__device__ __forceinline__ int consumer() { return thread() / WARPGROUP - 1; }
__device__ __forceinline__ int consumer_row() { return consumer() * WARPGROUP_STRIP; }
__device__ __forceinline__ int consumer_strip() { return thread() / 32 * 16 - WARPGROUP_STRIP; }

// Barriers of the whole block, of the copying warpgroup and one consumer, and of one consumer.
__device__ __forceinline__ void sync_block(int barrier) { sync_at(barrier, ATTENTION_WGMMA_THREADS); }
__device__ __forceinline__ void arrive_block(int barrier) { arrive_at(barrier, ATTENTION_WGMMA_THREADS); }
__device__ __forceinline__ void sync_copied(int barrier) { sync_at(barrier, 2 * WARPGROUP); }
__device__ __forceinline__ void arrive_copied(int barrier) { arrive_at(barrier, 2 * WARPGROUP); }
__device__ __forceinline__ void sync_consumer(int barrier) { sync_at(barrier, WARPGROUP); }

// load_strips copies n rows of a head, in strips of 64 rows with panels of their own: the rows of
// the consumers.
template <int HEAD, int ROWS> __device__ __forceinline__ void load_strips(Copies &copies, bf16 *to,
                                                                          const AttentionView &x, int64_t row,
                                                                          int64_t head, int n) {
  TileRows<HEAD, WARPGROUP, WARPGROUP_STRIP> rows(x, row, head);
#pragma unroll 1
  for (int r = 0; r < ROWS; r += WARPGROUP_STRIP) rows.template load<WARPGROUP_STRIP>(copies, to + r * HEAD, x, n - r);
}

// panels_of returns the descriptor of a tile of ROWS rows. panel_step is what it increases by from
// column 0 to column c.
template <int ROWS> __device__ __forceinline__ uint64_t panels_of(const bf16 *tile) {
  return panels((uint32_t)__cvta_generic_to_shared(tile), ROWS * 128);
}
template <int ROWS> __device__ __forceinline__ uint64_t panel_step(int c) {
  return (uint64_t)(c / 64 * ROWS * 128 + c % 64 * 2) / 16;
}

// multiply_rows issues, as a group, s = rows of x [64, HEAD] times rows of y [8·NT, HEAD].
template <int HEAD, int NT> __device__ __forceinline__ void multiply_rows(WarpgroupProducts &products,
                                                                          float (&s)[NT][4], const bf16 *x,
                                                                          const bf16 *y) {
  const uint64_t px = panels_of<WARPGROUP_STRIP>(x), py = panels_of<8 * NT>(y);
  products.begin();
#pragma unroll
  for (int c = 0; c < HEAD; c += 16)
    products.from_shared(s, px + panel_step<WARPGROUP_STRIP>(c), py + panel_step<8 * NT>(c), c > 0);
  products.close();
}
// add_held issues, as a group, the product of x [64, 16·KT], in registers, and y [16·KT, 8·NT],
// which is added to o.
template <int KT, int NT> __device__ __forceinline__ void add_held(WarpgroupProducts &products, float (&o)[NT][4],
                                                                   const uint32_t (&x)[KT][4], const bf16 *y) {
  const uint64_t py = panels_of<16 * KT>(y);
  products.begin();
#pragma unroll
  for (int k = 0; k < KT; k++) products.from_registers(o, x[k], py + k * (16 * 128 / 16));
  products.close();
}
// hold rounds a product to BF16, as the first operand of add_held.
template <int KT> __device__ __forceinline__ void hold(uint32_t (&x)[KT][4], const float (&s)[2 * KT][4]) {
#pragma unroll
  for (int k = 0; k < KT; k++) fragment_of(x[k], s, k);
}

// SeenSteps are the steps of a stream of tiles of `size` rows in which a consumer's rows see rows
// of `range`. If `range` is empty, begin and end are `steps`.
struct SeenSteps {
  int begin, end;
  __device__ __forceinline__ SeenSteps(AttentionRange range, int64_t from, int size, int steps) {
    const bool sees = range.lo < range.hi;
    begin = sees ? (int)((range.lo - from) / size) : steps;
    end = sees ? (int)ceil_div(range.hi - from, size) : steps;
  }
};
