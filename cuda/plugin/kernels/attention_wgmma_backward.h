// The backward pass of attention with Hopper's products of warpgroups (attention_wgmma.h): a kernel
// for dq and one for dk and dv, seven products together, all of whose sums have a fixed order.
// Both have rows that stay and stream the other side in pairs of tiles of 64 rows: keys and values,
// or queries and dout.
#pragma once

#include "attention_wgmma.h"

// WgmmaStages is the shared memory and the stream of such a kernel.
template <int SIZE> struct WgmmaStages {
  static constexpr int HEAD = attention_wgmma_sizes[SIZE].head, ROWS = ATTENTION_WGMMA_ROWS,
                       COLUMNS = ATTENTION_WGMMA_BACK, STAGES = ATTENTION_WGMMA_STAGES, NT = COLUMNS / 8;
  typedef TileRows<HEAD, WARPGROUP, COLUMNS> Rows;
  // A stage is FULL for a consumer when its pair was copied, and FREE when both consumers have read
  // it. Each consumer has its own FULL barriers, of all stages.
  enum Barrier { WORK = 1, FULL = 2, FREE = FULL + 2 * STAGES, CONSUMER = FREE + STAGES };
  static_assert(CONSUMER + 2 <= 16, "a block has 16 barriers");

  const AttentionCall &a;
  bf16 *one, *other; // the rows that stay, of the first consumer and then of the second one
  bf16 *stages;
  float *numbers; // lse and delta of the queries of each stage, if these are streamed
  BlockTile &work;

  __device__ __forceinline__ WgmmaStages(const AttentionCall &a, bf16 *shared)
      : a(a),
        one(shared),
        other(one + ROWS * HEAD),
        stages(other + ROWS * HEAD),
        numbers(reinterpret_cast<float *>(stages + STAGES * 2 * COLUMNS * HEAD)),
        work(*reinterpret_cast<BlockTile *>(numbers + STAGES * 2 * COLUMNS)) {}

  __device__ __forceinline__ bf16 *first_of(int step) const { return stages + step % STAGES * 2 * COLUMNS * HEAD; }
  __device__ __forceinline__ bf16 *second_of(int step) const { return first_of(step) + COLUMNS * HEAD; }
  __device__ __forceinline__ float *lse_of(int step) const { return numbers + step % STAGES * 2 * COLUMNS; }
  __device__ __forceinline__ float *delta_of(int step) const { return lse_of(step) + COLUMNS; }

  // These are for the copying warpgroup: take waits for a stage; copied ends its copies and shows
  // the preceding stage to the consumers, so that the copies of two stages are under way; end shows
  // the last one of `steps` stages, and waits until they have read all.
  __device__ __forceinline__ void take(int step) {
    if (step >= STAGES) sync_block(FREE + step % STAGES);
  }
  __device__ __forceinline__ void copied(Copies &copies, int step) {
    copies.close();
    if (step > 0) show<1>(copies, step - 1);
  }
  template <int PENDING> __device__ __forceinline__ void show(Copies &copies, int step) {
    copies.template wait<PENDING>();
    show_products();
    arrive_copied(FULL + step % STAGES);
    arrive_copied(FULL + STAGES + step % STAGES);
  }
  __device__ __forceinline__ void end(Copies &copies, int steps) {
    if (steps > 0) show<0>(copies, steps - 1);
#pragma unroll 1
    for (int step = most(0, steps - STAGES); step < steps; step++) sync_block(FREE + step % STAGES);
  }

  // These are for a consumer: wait_for waits for the pair of a step, leave passes the stage on, and
  // skip does both.
  __device__ __forceinline__ void wait_for(int step) { sync_copied(FULL + consumer() * STAGES + step % STAGES); }
  __device__ __forceinline__ void leave(int step) { arrive_block(FREE + step % STAGES); }
  __device__ __forceinline__ void skip(int from, int to) {
#pragma unroll 1
    for (int step = from; step < to; step++) {
      wait_for(step);
      leave(step);
    }
  }
};

// WgmmaDq is the block of the dq kernel: 128 queries and their dout stay. A consumer computes the
// gradients of the scores of a tile while the product of the preceding ones and their keys runs.
template <int SIZE> struct WgmmaDq : WgmmaStages<SIZE> {
  typedef WgmmaStages<SIZE> Stages;
  using Stages::a, Stages::HEAD, Stages::COLUMNS, Stages::NT, Stages::ROWS, Stages::work;
  using Stages::Stages;

  __device__ __forceinline__ int64_t items() const { return a.heads * a.count_q; }

  __device__ __forceinline__ void copy() {
    Copies copies;
    for (int64_t w = blockIdx.x; w < items(); w += gridDim.x) {
      sync_block(Stages::WORK); // the consumers have finished the previous work
      if (threadIdx.x == 0) work.queries(a, w, ROWS);
      sync_block(Stages::WORK);
      const int steps = work.steps(COLUMNS);
      typename Stages::Rows k(a.k, work.t.k + work.from, work.kv), v(a.v, work.t.k + work.from, work.kv);
      for (int step = 0; step < steps; step++) {
        const int n = work.rows_of(step, COLUMNS);
        const int64_t row = work.t.q + work.t.first;
        if (step == 0) {
          load_strips<HEAD, ROWS>(copies, this->one, a.q, row, work.head, work.t.rows);
          load_strips<HEAD, ROWS>(copies, this->other, a.dout, row, work.head, work.t.rows);
        }
        this->take(step);
        k.template load<COLUMNS>(copies, this->first_of(step), a.k, n);
        v.template load<COLUMNS>(copies, this->second_of(step), a.v, n);
        this->copied(copies, step);
      }
      this->end(copies, steps);
    }
  }

  __device__ __forceinline__ void compute() {
    const float scale = a.scale * LOG2E;
    WarpgroupProducts products;
    for (int64_t w = blockIdx.x; w < items(); w += gridDim.x) {
      sync_block(Stages::WORK);
      sync_block(Stages::WORK);
      const int steps = work.steps(COLUMNS);
      const SeenSteps seen(work.keys_seen(a, consumer_row(), WARPGROUP_STRIP), work.from, COLUMNS, steps);
      float dq[1][HEAD / 8][4], lse[2], delta[2];
      zero(dq[0]);
      const Lane at(thread());
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int64_t r = work.t.q + work.t.first + least(consumer_strip() + 8 * h + at.row, work.t.rows - 1);
        lse[h] = a.lse[r * a.lse_token + work.head * a.lse_head] * LOG2E;
        delta[h] = a.delta[work.head * a.queries + r];
      }
      this->skip(0, seen.begin);
      if (seen.begin < seen.end) {
        float s[1][NT][4], dp[NT][4];
        uint32_t ds[COLUMNS / 16][4];
        scores(products, s[0], dp, seen.begin);
        products.template wait<0>(s[0], dp);
        gradients(s, dp, lse, delta, scale, seen.begin);
        hold(ds, s[0]);
        for (int step = seen.begin + 1; step < seen.end; step++) {
          scores(products, s[0], dp, step);
          add_held(products, dq[0], ds, this->first_of(step - 1));
          products.template wait<1>(s[0], dp);
          gradients(s, dp, lse, delta, scale, step);
          products.template wait<0>(dq[0]);
          this->leave(step - 1);
          hold(ds, s[0]);
        }
        add_held(products, dq[0], ds, this->first_of(seen.end - 1));
        products.template wait<0>(dq[0]);
        this->leave(seen.end - 1);
      }
      this->skip(seen.end, steps);
      sync_consumer(Stages::CONSUMER + consumer()); // all warps have read the queries
      const int strip = consumer_strip();
      if (strip >= work.t.rows) continue;
      multiply(dq, a.scale);
      write_gradients<HEAD>({this->one, strip, 0}, dq, a.dq, work.t.q + work.t.first + strip, work.head,
                            work.t.rows - strip);
    }
  }
  // scores issues the products for the scores of a tile and for dP.
  __device__ __forceinline__ void scores(WarpgroupProducts &products, float (&s)[NT][4], float (&dp)[NT][4], int step) {
    this->wait_for(step);
    multiply_rows<HEAD>(products, s, this->one + consumer_row() * HEAD, this->first_of(step));
    multiply_rows<HEAD>(products, dp, this->other + consumer_row() * HEAD, this->second_of(step));
  }
  // gradients replaces the scores of a tile by their gradients.
  __device__ __forceinline__ void gradients(float (&s)[1][NT][4], const float (&dp)[NT][4], const float (&lse)[2],
                                            const float (&delta)[2], float scale, int step) {
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int c = 0; c < 2 * NT; c++) {
        float &x = s[0][c / 2][2 * h + c % 2];
        x = exp2_approx(fmaf(x, scale, -lse[h])) * (dp[c / 2][2 * h + c % 2] - delta[h]);
      }
    const int n = work.rows_of(step, COLUMNS);
    const AttentionBand band = attention_band(a.mask, work.ahead - (int64_t)step * COLUMNS);
    if (visibility(band, consumer_row(), WARPGROUP_STRIP, n, COLUMNS) != VISIBLE) hide(s, band, n, consumer_strip(), 0);
  }
};

// WgmmaDkv is the block of the dk and dv kernel: 128 keys and their values stay, and the queries of
// all query heads of the key head are streamed, head by head. Scores have a row for each key, so
// that probabilities and gradients are operands in registers.
template <int SIZE> struct WgmmaDkv : WgmmaStages<SIZE> {
  typedef WgmmaStages<SIZE> Stages;
  using Stages::a, Stages::HEAD, Stages::COLUMNS, Stages::NT, Stages::ROWS, Stages::work;
  using Stages::Stages;

  __device__ __forceinline__ int64_t items() const { return a.kv_heads * a.count_k; }
  // of a head; 0 for a key head without query heads, whose gradients are zero
  __device__ __forceinline__ int steps_of_head() const { return work.heads > 0 ? work.steps(COLUMNS) : 0; }

  __device__ __forceinline__ void copy() {
    Copies copies;
    for (int64_t w = blockIdx.x; w < items(); w += gridDim.x) {
      sync_block(Stages::WORK); // the consumers have finished the previous work
      if (threadIdx.x == 0) work.keys(a, w, ROWS);
      sync_block(Stages::WORK);
      const int steps = steps_of_head();
      if (steps > 0) {
        load_strips<HEAD, ROWS>(copies, this->one, a.k, work.t.k + work.t.first, work.kv, work.t.rows);
        load_strips<HEAD, ROWS>(copies, this->other, a.v, work.t.k + work.t.first, work.kv, work.t.rows);
      }
      for (int head = 0, i = 0; head < work.heads; head++) {
        typename Stages::Rows q(a.q, work.t.q + work.from, work.head + head),
            dout(a.dout, work.t.q + work.from, work.head + head);
        for (int step = 0; step < steps; step++, i++) {
          const int n = work.rows_of(step, COLUMNS);
          this->take(i);
          q.template load<COLUMNS>(copies, this->first_of(i), a.q, n);
          dout.template load<COLUMNS>(copies, this->second_of(i), a.dout, n);
          load_numbers(copies, work.head + head, step, i, n);
          this->copied(copies, i);
        }
      }
      this->end(copies, work.heads * steps);
    }
  }
  // load_numbers copies lse and delta of the n queries of a tile: half of the threads one each.
  __device__ __forceinline__ void load_numbers(Copies &copies, int64_t head, int step, int i, int n) {
    const int column = (int)threadIdx.x % COLUMNS;
    const int64_t r = work.t.q + work.from + (int64_t)step * COLUMNS + column;
    const bool there = column < n;
    if ((int)threadIdx.x < COLUMNS)
      copies.copy<1>(this->lse_of(i) + column, there ? a.lse + r * a.lse_token + head * a.lse_head : a.lse, there);
    else copies.copy<1>(this->delta_of(i) + column, there ? a.delta + head * a.queries + r : a.delta, there);
  }

  __device__ __forceinline__ void compute() {
    const float scale = a.scale * LOG2E;
    WarpgroupProducts products;
    for (int64_t w = blockIdx.x; w < items(); w += gridDim.x) {
      sync_block(Stages::WORK);
      sync_block(Stages::WORK);
      const int steps = steps_of_head();
      const SeenSteps seen(work.queries_seen(a, consumer_row(), WARPGROUP_STRIP), work.from, COLUMNS, steps);
      float dk[1][HEAD / 8][4], dv[1][HEAD / 8][4];
      zero(dk[0]), zero(dv[0]);
      for (int head = 0; head < work.heads; head++) {
        const int base = head * steps;
        this->skip(base, base + seen.begin);
        for (int step = seen.begin; step < seen.end; step++) {
          const int i = base + step;
          float s[1][NT][4], dp[1][NT][4];
          uint32_t p[COLUMNS / 16][4], ds[COLUMNS / 16][4];
          this->wait_for(i);
          multiply_rows<HEAD>(products, s[0], this->one + consumer_row() * HEAD, this->first_of(i));
          products.template wait<1>(); // for the preceding product for dk, whose operand takes registers
          if (step > seen.begin) this->leave(i - 1);
          multiply_rows<HEAD>(products, dp[0], this->other + consumer_row() * HEAD, this->second_of(i));
          products.template wait<1>(s[0]);
          const int n = work.rows_of(step, COLUMNS);
          const AttentionBand of_query = attention_band(a.mask, work.ahead + (int64_t)step * COLUMNS),
                              band = {-of_query.above, -of_query.below};
          const bool whole = visibility(band, consumer_row(), WARPGROUP_STRIP, n, COLUMNS) == VISIBLE;
          probabilities(s, this->lse_of(i), scale);
          if (!whole) hide(s, band, n, consumer_strip(), 0);
          hold(p, s[0]);
          products.template wait<0>(dp[0]);
          gradients(dp, p, this->delta_of(i)); // before the product with p, whose registers may not be read then
          if (!whole) hide(dp, band, n, consumer_strip(), 0);
          hold(ds, dp[0]);
          add_held(products, dv[0], p, this->second_of(i));
          add_held(products, dk[0], ds, this->first_of(i));
          products.template wait<1>(); // p is free: else its registers, ds and the next scores are too many
        }
        products.template wait<0>(dk[0], dv[0]);
        if (seen.begin < seen.end) this->leave(base + seen.end - 1);
        this->skip(base + seen.end, base + steps);
      }
      sync_consumer(Stages::CONSUMER + consumer()); // all warps have read the keys and values
      const int strip = consumer_strip(), rows = work.t.rows - strip;
      if (rows <= 0) continue;
      multiply(dk, a.scale);
      const int64_t row = work.t.k + work.t.first + strip;
      write_gradients<HEAD>({this->one, strip, 0}, dk, a.dk, row, work.kv, rows);
      write_gradients<HEAD>({this->other, strip, 0}, dv, a.dv, row, work.kv, rows);
    }
  }
  // of_columns calls f(x, y, two) for a lane's neighbours x and y in a row, with the numbers of
  // their columns.
  template <class F>
  static __device__ __forceinline__ void of_columns(float (&s)[1][NT][4], const float *numbers, F f) {
    const Lane at(thread());
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const float2 two = *reinterpret_cast<const float2 *>(numbers + 8 * n + at.column);
#pragma unroll
      for (int h = 0; h < 2; h++) f(n, 2 * h, two);
    }
  }
  static __device__ __forceinline__ void probabilities(float (&s)[1][NT][4], const float *lse, float scale) {
    of_columns(s, lse, [&](int n, int e, float2 two) {
      s[0][n][e] = exp2_approx(fmaf(s[0][n][e], scale, -two.x * LOG2E));
      s[0][n][e + 1] = exp2_approx(fmaf(s[0][n][e + 1], scale, -two.y * LOG2E));
    });
  }
  // The probabilities are those that were multiplied, in BF16: F32 would take 32 registers more.
  static __device__ __forceinline__ void gradients(float (&dp)[1][NT][4], const uint32_t (&p)[COLUMNS / 16][4],
                                                   const float *delta) {
    of_columns(dp, delta, [&](int n, int e, float2 two) {
      const uint32_t both = p[n / 2][n % 2 * 2 + e / 2]; // fragment_of
      dp[0][n][e] = __uint_as_float(both << 16) * (dp[0][n][e] - two.x);
      dp[0][n][e + 1] = __uint_as_float(both & 0xffff0000u) * (dp[0][n][e + 1] - two.y);
    });
  }
};

// attention_wgmma_delta writes delta [head][query] as the diagonal of dout·outᵀ of 64 queries. It
// uses the instruction and the order of the products for dP, so that dS is exactly 0 for a query
// with a single key.
template <int SIZE> __device__ __forceinline__ void attention_wgmma_delta(const AttentionCall &a, bf16 *shared) {
  constexpr int HEAD = attention_wgmma_sizes[SIZE].head;
  bf16 *outs = shared + WARPGROUP_STRIP * HEAD;
  const int64_t strips = ceil_div(a.queries, WARPGROUP_STRIP);
  Copies copies;
  WarpgroupProducts products;
  for (int64_t w = blockIdx.x; w < a.heads * strips; w += gridDim.x) {
    const int64_t head = w / strips, first = w % strips * WARPGROUP_STRIP;
    const int n = (int)least(WARPGROUP_STRIP, a.queries - first);
    __syncthreads(); // all warps have read the previous rows
    load_strips<HEAD, WARPGROUP_STRIP>(copies, shared, a.dout, first, head, n);
    load_strips<HEAD, WARPGROUP_STRIP>(copies, outs, a.out, first, head, n);
    copies.close();
    copies.template wait<0>();
    show_products();
    __syncthreads();
    float c[WARPGROUP_STRIP / 8][4];
    multiply_rows<HEAD>(products, c, shared, outs);
    products.template wait<0>(c);
    const Lane at;
    const int row = (int)threadIdx.x / 32 * 16 + at.row;
#pragma unroll
    for (int i = 0; i < WARPGROUP_STRIP / 8; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int r = row + e / 2 * 8;
        if (8 * i + at.column + e % 2 == r && r < n) a.delta[head * a.queries + first + r] = c[i][e];
      }
  }
}
