// The forward pass of attention with Hopper's products of warpgroups (attention_wgmma.h). A
// consumer computes the scores of a tile while its product with the values of the preceding tile
// runs.
#pragma once

#include "attention_softmax.h"
#include "attention_wgmma.h"

// WgmmaForward is the block of one head size: 128 queries, which stay, and two buffers of keys and
// of values, which are streamed.
template <int SIZE, bool BEGUN> struct WgmmaForward {
  static constexpr int HEAD = attention_wgmma_sizes[SIZE].head, COLUMNS = attention_wgmma_sizes[SIZE].columns,
                       ROWS = ATTENTION_WGMMA_ROWS, NT = COLUMNS / 8;
  typedef TileRows<HEAD, WARPGROUP, COLUMNS> Rows;
  typedef RunningSoftmax<1, BEGUN, false> Softmax;
  // A buffer of keys or values is FULL for a consumer when it was copied, and FREE when both
  // consumers have read it. The consumers do not wait for each other: each has its own FULL
  // barriers, of both buffers.
  enum Barrier { WORK = 1, KEYS_FULL = 2, VALUES_FULL = 6, KEYS_FREE = 10, VALUES_FREE = 12, CONSUMER = 14 };

  const AttentionCall &a;
  bf16 *queries; // of the first consumer, then of the second one
  bf16 *buffers; // keys, then values, twice
  BlockTile &work;

  __device__ __forceinline__ WgmmaForward(const AttentionCall &a, bf16 *shared)
      : a(a),
        queries(shared),
        buffers(shared + ROWS * HEAD),
        work(*reinterpret_cast<BlockTile *>(buffers + 4 * COLUMNS * HEAD)) {}

  __device__ __forceinline__ bf16 *keys(int step) const { return buffers + step % 2 * 2 * COLUMNS * HEAD; }
  __device__ __forceinline__ bf16 *values(int step) const { return keys(step) + COLUMNS * HEAD; }
  __device__ __forceinline__ int64_t items() const { return a.heads * a.count_q; }

  // copy is the work of the copying warpgroup. A buffer is shown to the consumers after the next
  // copies have begun.
  __device__ __forceinline__ void copy() {
    Copies copies;
    for (int64_t w = blockIdx.x; w < items(); w += gridDim.x) {
      sync_block(WORK); // the consumers have finished the previous work
      if (threadIdx.x == 0) work.queries(a, w, ROWS);
      sync_block(WORK);
      const int steps = work.steps(COLUMNS);
      Rows k(a.k, work.t.k + work.from, work.kv), v(a.v, work.t.k + work.from, work.kv);
      for (int step = 0; step < steps; step++) {
        const int buffer = step % 2, n = work.rows_of(step, COLUMNS);
        if (step == 0) load_strips<HEAD, ROWS>(copies, queries, a.q, work.t.q + work.t.first, work.head, work.t.rows);
        if (step >= 2) sync_block(KEYS_FREE + buffer);
        k.template load<COLUMNS>(copies, keys(step), a.k, n);
        copies.close();
        if (step > 0) show<1>(copies, VALUES_FULL, step - 1);
        if (step >= 2) sync_block(VALUES_FREE + buffer);
        v.template load<COLUMNS>(copies, values(step), a.v, n);
        copies.close();
        show<1>(copies, KEYS_FULL, step);
      }
      if (steps > 0) show<0>(copies, VALUES_FULL, steps - 1);
#pragma unroll 1
      for (int step = most(0, steps - 2); step < steps; step++) {
        sync_block(KEYS_FREE + step % 2);
        sync_block(VALUES_FREE + step % 2);
      }
    }
  }
  // show waits until at most PENDING groups of copies are under way, and shows the last one that
  // has completed to the consumers: the tile of a step.
  template <int PENDING> __device__ __forceinline__ void show(Copies &copies, Barrier full, int step) {
    copies.template wait<PENDING>();
    show_products();
    arrive_copied(full + step % 2);
    arrive_copied(full + 2 + step % 2);
  }
  static __device__ __forceinline__ void wait_until(Barrier full, int step) {
    sync_copied(full + 2 * consumer() + step % 2);
  }

  // compute is the work of a consumer.
  __device__ __forceinline__ void compute() {
    const float scale = a.scale * LOG2E;
    WarpgroupProducts products;
    for (int64_t w = blockIdx.x; w < items(); w += gridDim.x) {
      sync_block(WORK);
      sync_block(WORK);
      const int steps = work.steps(COLUMNS);
      const SeenSteps seen(work.keys_seen(a, consumer_row(), WARPGROUP_STRIP), work.from, COLUMNS, steps);
      float o[1][HEAD / 8][4];
      Softmax softmax;
      softmax.begin(o, a, work, consumer_strip());
#pragma unroll 1
      for (int step = 0; step < seen.begin; step++) skip(step);
      if (seen.begin < seen.end) {
        float s[1][NT][4], keep[1][2];
        uint32_t p[COLUMNS / 16][4]; // the probabilities of a tile
        scores(products, s[0], seen.begin);
        products.template wait<0>(s[0]);
        arrive_block(KEYS_FREE + seen.begin % 2);
        if (exponentials(softmax, s, keep, scale, seen.begin)) rescale(o, keep);
        hold(p, s[0]);
        for (int step = seen.begin + 1; step < seen.end; step++) {
          scores(products, s[0], step);
          outputs(products, o[0], p, step - 1);
          products.template wait<1>(s[0]);
          arrive_block(KEYS_FREE + step % 2);
          const bool changed = exponentials(softmax, s, keep, scale, step);
          products.template wait<0>(o[0]);
          arrive_block(VALUES_FREE + (step - 1) % 2);
          if (changed) rescale(o, keep);
          hold(p, s[0]);
        }
        outputs(products, o[0], p, seen.end - 1);
        products.template wait<0>(o[0]);
        arrive_block(VALUES_FREE + (seen.end - 1) % 2);
      }
#pragma unroll 1
      for (int step = seen.end; step < steps; step++) skip(step);
      sync_consumer(CONSUMER + consumer()); // all warps have read the queries
      const int strip = consumer_strip();
      if (strip >= work.t.rows) continue;
      softmax.finish(o, a, work, strip, scale, 0);
      write_output<BEGUN, HEAD>({queries, strip, 0}, o, a, work, strip);
    }
  }
  // skip passes a tile that this consumer does not see.
  __device__ __forceinline__ void skip(int step) {
    wait_until(KEYS_FULL, step);
    arrive_block(KEYS_FREE + step % 2);
    wait_until(VALUES_FULL, step);
    arrive_block(VALUES_FREE + step % 2);
  }
  // scores issues the products of the queries and the keys of a tile, and outputs the products of a
  // tile's probabilities and values.
  __device__ __forceinline__ void scores(WarpgroupProducts &products, float (&s)[NT][4], int step) {
    wait_until(KEYS_FULL, step);
    multiply_rows<HEAD>(products, s, queries + consumer_row() * HEAD, keys(step));
  }
  __device__ __forceinline__ void outputs(WarpgroupProducts &products, float (&o)[HEAD / 8][4],
                                          const uint32_t (&p)[COLUMNS / 16][4], int step) {
    wait_until(VALUES_FULL, step);
    add_held(products, o, p, values(step));
  }
  // exponentials replaces the scores of a tile by their exponentials. It reports whether a maximum
  // has changed.
  __device__ __forceinline__ bool exponentials(Softmax &softmax, float (&s)[1][NT][4], float (&keep)[1][2], float scale,
                                               int step) {
    const int n = work.rows_of(step, COLUMNS);
    const AttentionBand band = attention_band(a.mask, work.ahead - (int64_t)step * COLUMNS);
    if (visibility(band, consumer_row(), WARPGROUP_STRIP, n, COLUMNS) != VISIBLE)
      hide(s, band, n, consumer_strip(), -INFINITY);
    const bool changed = softmax.raise(s, scale, keep, [](int, int, int, float x) { return x; });
    softmax.weigh(s, scale);
    return changed;
  }
};
