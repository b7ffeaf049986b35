// Attention on tensor cores, in BF16 with F32 sums: the algorithms of attention_forward.cu and
// attention_backward.cu. Probabilities and score gradients are rounded to BF16 before they are
// multiplied.
//
// The forward pass, and the backward pass of reproducible calls, add in a fixed order: no block
// adds to another block's results. Reproducible gradients need two kernels, which compute the
// scores and dP twice: seven products. Otherwise the dk and dv kernel also adds to dq, in the order
// in which blocks finish: five products.
//
// The forward and the dq kernel both loop over tiles of keys (copy the next tile, wait, find the
// mask, multiply), and the loop is written twice. Its body reads and writes register arrays of the
// kernel, and differs in the operands of every product: a shared loop would only contain the four
// lines of the buffering, with the rest passed as callables whose arrays the compiler may spill.
#include "attention_mma.h"

// exponent_base returns the base of the exponents of a row with maximum m. It is rounded once. If
// the largest exponential is therefore not exactly 1, the sum has the same relative error.
__device__ __forceinline__ float exponent_base(float m, float scale) { return m == -INFINITY ? 0 : m * scale; }

// The forward kernel: a block has queries and loops over keys and values. The next tile is copied
// while one is computed. BEGUN: a softmax may have begun (attention_forward.cu), with sinks or keys
// of earlier calls. The other instantiation is for calls without them, and needs fewer registers.
template <int SIZE, bool BEGUN> __global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 2)
    attention_mma_forward_kernel(AttentionCall a) {
  constexpr int HEAD = attention_mma_sizes[SIZE].head, ROWS = attention_mma_sizes[SIZE].rows,
                COLUMNS = attention_mma_sizes[SIZE].columns;
  constexpr int STRIP = ROWS / MMA_WARPS, MT = STRIP / 16, NT = COLUMNS / 8;
  SHARED(bf16, shared);
  bf16 *qs = shared, *kvs = qs + ROWS * HEAD; // two buffers of keys and values
  BlockTile &work = *reinterpret_cast<BlockTile *>(kvs + 4 * COLUMNS * HEAD);
  const int strip = (int)threadIdx.x / 32 * STRIP;
  const float scale = a.scale * LOG2E;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.heads * a.count_q; w += gridDim.x) {
    __syncthreads(); // all threads have read the previous tile
    if (threadIdx.x == 0) work.queries(a, w, ROWS);
    __syncthreads();
    const int steps = work.steps(COLUMNS);
    TileRows<HEAD> keys(a.k, work.t.k + work.from, work.kv), values(a.v, work.t.k + work.from, work.kv);
    auto load_keys = [&](int step) {
      bf16 *const to = kvs + step % 2 * 2 * COLUMNS * HEAD;
      const int n = work.rows_of(step, COLUMNS);
      keys.template load<COLUMNS>(copies, to, a.k, n);
      values.template load<COLUMNS>(copies, to + COLUMNS * HEAD, a.v, n);
    };
    if (steps > 0) {
      load_tile<HEAD, ROWS>(copies, qs, a.q, work.t.q + work.t.first, work.head, work.t.rows);
      load_keys(0);
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
          top[i][h] = begun / a.scale;
          if (begun != -INFINITY) {
            if (at.column == 0) sum[i][h] = 1;
            continue;
          }
#pragma unroll
          for (int n = 0; n < HEAD / 8; n++) o[i][n][2 * h] = o[i][n][2 * h + 1] = 0;
        }
    }
    for (int step = 0; step < steps; step++) {
      copies.close();
      copies.wait<0>();
      __syncthreads(); // the tile has arrived, and all threads have read the previous one
      if (step + 1 < steps) load_keys(step + 1);
      const bf16 *ks = kvs + step % 2 * 2 * COLUMNS * HEAD;
      const int n = work.rows_of(step, COLUMNS);
      const AttentionBand band = attention_band(a.mask, work.ahead - (int64_t)step * COLUMNS);
      const Visibility seen = strip < work.t.rows ? visibility(band, strip, STRIP, n, COLUMNS) : MASKED;
      if (seen == MASKED) continue;
      float s[MT][NT][4];
      const int me = thread(), lane = me % 32;
      const Lane at(me);
      products<HEAD>(s, down<HEAD>(lane, qs, strip, 0), along<HEAD>(lane, ks, 0, 0));
      if (seen == PARTIAL)
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const Columns columns(band, n, strip + 16 * i + 8 * h + at.row, at.column);
#pragma unroll
            for (int c = 0; c < 2 * NT; c++)
              s[i][c / 2][2 * h + c % 2] = columns.hide(c / 2 * 8 + c % 2) ? -INFINITY : s[i][c / 2][2 * h + c % 2];
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
          for (int c = 0; c < 2 * NT; c++) m = fmaxf(m, s[i][c / 2][2 * h + c % 2]);
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
          keep[i][h] = exp2_approx(top[i][h] * scale - exponent_base(m, scale));
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
          const float base = exponent_base(top[i][h], scale);
#pragma unroll
          for (int c = 0; c < 2 * NT; c++) {
            float &x = s[i][c / 2][2 * h + c % 2];
            x = exp2_approx(fmaf(x, scale, -base));
            sum[i][h] += x;
          }
        }
      accumulate<HEAD>(o, s, down<HEAD>(lane, ks + COLUMNS * HEAD, 0, 0));
    }
    if (strip >= work.t.rows) continue;
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
        const bool alone = of_row.lo >= of_row.hi, none = alone && !(BEGUN && top[i][h] != -INFINITY);
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

// attention_mma_delta writes delta [head][query] as the diagonal of dout·outᵀ. It uses the
// instruction and the order of the products for dP, so that dS is exactly 0 for a query with a
// single key. A warp has 16 queries.
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS) attention_mma_delta(AttentionCall a) {
  const Lane at;
  const int64_t strips = ceil_div(a.queries, 16), n = a.heads * strips;
  for (int64_t w = (int64_t)blockIdx.x * MMA_WARPS + threadIdx.x / 32; w < n; w += (int64_t)gridDim.x * MMA_WARPS) {
    const int64_t head = w / strips, first = w % strips * 16;
    int64_t row[2];
    const bf16 *x[2], *y[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      row[i] = first + at.row + 8 * i;
      const int64_t r = least(row[i], a.queries - 1);
      x[i] = (const bf16 *)a.dout.data + r * a.dout.token + head * a.dout.head;
      y[i] = (const bf16 *)a.out.data + r * a.out.token + head * a.out.head;
    }
    float c[2][4];
    zero(c);
    auto two = [](const bf16 *p, bool wide) {
      return wide ? *reinterpret_cast<const uint32_t *>(p)
                  : (uint32_t)__bfloat16_as_ushort(p[0]) | (uint32_t)__bfloat16_as_ushort(p[1]) << 16;
    };
    for (int k = at.column; k < a.out.width; k += 16) {
      uint32_t g[4], o[4]; // g in A's order; o in B's order, which has neighbours along k first
#pragma unroll
      for (int i = 0; i < 4; i++)
        g[i] = two(x[i % 2] + k + i / 2 * 8, a.dout.wide), o[i] = two(y[i / 2] + k + i % 2 * 8, a.out.wide);
      mma_pair(c[0], c[1], g, o);
    }
    const float sum[2] = {at.row % 2 ? c[0][1] : c[0][0], at.row % 2 ? c[1][3] : c[1][2]};
    // of the four lanes of a row, one has the diagonal element
    if (at.column != at.row / 2 * 2) continue;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (row[i] < a.queries) a.delta[head * a.queries + row[i]] = sum[i];
  }
}

// The dq kernel of reproducible calls: a block has queries and their dout, and loops over keys and
// values.
template <int SIZE> __global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 2)
    attention_mma_dq_kernel(AttentionCall a) {
  constexpr int HEAD = attention_mma_sizes[SIZE].head, ROWS = attention_mma_sizes[SIZE].dq_rows,
                COLUMNS = attention_mma_sizes[SIZE].dq_columns;
  constexpr int STRIP = ROWS / MMA_WARPS, MT = STRIP / 16, NT = COLUMNS / 8;
  SHARED(bf16, shared);
  bf16 *qs = shared, *douts = qs + ROWS * HEAD, *kvs = douts + ROWS * HEAD; // two buffers of keys and values
  BlockTile &work = *reinterpret_cast<BlockTile *>(kvs + 4 * COLUMNS * HEAD);
  const int strip = (int)threadIdx.x / 32 * STRIP;
  const float scale = a.scale * LOG2E;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.heads * a.count_q; w += gridDim.x) {
    __syncthreads(); // all threads have read the previous tile
    if (threadIdx.x == 0) work.queries(a, w, ROWS);
    __syncthreads();
    const int steps = work.steps(COLUMNS);
    TileRows<HEAD> keys(a.k, work.t.k + work.from, work.kv), values(a.v, work.t.k + work.from, work.kv);
    auto load_keys = [&](int step) {
      bf16 *const to = kvs + step % 2 * 2 * COLUMNS * HEAD;
      const int n = work.rows_of(step, COLUMNS);
      keys.template load<COLUMNS>(copies, to, a.k, n);
      values.template load<COLUMNS>(copies, to + COLUMNS * HEAD, a.v, n);
    };
    if (steps > 0) {
      load_tile<HEAD, ROWS>(copies, qs, a.q, work.t.q + work.t.first, work.head, work.t.rows);
      load_tile<HEAD, ROWS>(copies, douts, a.dout, work.t.q + work.t.first, work.head, work.t.rows);
      load_keys(0);
    }

    float dq[MT][HEAD / 8][4], lse[MT][2], delta[MT][2];
    const Lane of_row(thread());
#pragma unroll
    for (int i = 0; i < MT; i++) {
      zero(dq[i]);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int64_t r = work.t.q + work.t.first + least(strip + 16 * i + 8 * h + of_row.row, work.t.rows - 1);
        lse[i][h] = a.lse[r * a.lse_token + work.head * a.lse_head] * LOG2E;
        delta[i][h] = a.delta[work.head * a.queries + r];
      }
    }
    for (int step = 0; step < steps; step++) {
      copies.close();
      copies.wait<0>();
      __syncthreads(); // the tile has arrived, and all threads have read the previous one
      if (step + 1 < steps) load_keys(step + 1);
      const bf16 *ks = kvs + step % 2 * 2 * COLUMNS * HEAD;
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
            x = exp2_approx(fmaf(x, scale, -lse[i][h])) * (dp[i][c / 2][2 * h + c % 2] - delta[i][h]);
          }
          if (seen == PARTIAL)
#pragma unroll
            for (int c = 0; c < 2 * NT; c++)
              ds[i][c / 2][2 * h + c % 2] = columns.hide(c / 2 * 8 + c % 2) ? 0 : ds[i][c / 2][2 * h + c % 2];
        }
      accumulate<HEAD>(dq, ds, down<HEAD>(lane, ks, 0, 0));
    }
    if (strip >= work.t.rows) continue;
    multiply(dq, a.scale);
    write_gradients<HEAD>({qs, strip, 0}, dq, a.dq, work.t.q + work.t.first + strip, work.head, work.t.rows - strip);
  }
}

// Shared memory of the kernel below. Its warps form a grid of two rows: a warp has 32 rows and
// 1 / ACROSS of the columns of every product.
template <int SIZE> struct Backward {
  static constexpr int HEAD = attention_mma_sizes[SIZE].head, WARPS = attention_mma_sizes[SIZE].warps,
                       AHEAD = attention_mma_sizes[SIZE].ahead;
  static constexpr int THREADS = 32 * WARPS, ROWS = ATTENTION_MMA_BACK, ACROSS = WARPS / 2;
  static constexpr int MT = 2, NT = ROWS / ACROSS / 8, NF = HEAD / ACROSS / 8; // tiles of scores and of gradients
  static constexpr int BLOCKS = HEAD == 64 ? 3 : 8 / WARPS;                    // on a multiprocessor
  bf16 *k, *v, *dout, *p, *ds;                                                 // p, ds: a row for each query
  __device__ __forceinline__ explicit Backward(bf16 *shared)
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
template <int SIZE, bool DQ> __global__ void __launch_bounds__(Backward<SIZE>::THREADS, Backward<SIZE>::BLOCKS)
    attention_mma_dkv_kernel(AttentionCall a) {
  typedef Backward<SIZE> B;
  constexpr int HEAD = B::HEAD, ROWS = B::ROWS, THREADS = B::THREADS, AHEAD = B::AHEAD, MT = B::MT, NT = B::NT,
                NF = B::NF;
  SHARED(bf16, shared);
  const B tile(shared);
  Copies copies;
  BlockTile &work = tile.work();
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
    if (steps > 0) {
      load_tile<HEAD, ROWS, THREADS>(copies, tile.k, a.k, work.t.k + work.t.first, work.kv, work.t.rows);
      load_tile<HEAD, ROWS, THREADS>(copies, tile.v, a.v, work.t.k + work.t.first, work.kv, work.t.rows);
      load_q(0, 0, 0);
      load_dout(0, 0);
    }
    copies.close();

    float dk[MT][NF][4], dv[MT][NF][4];
    int buffer = 0;
    // A key head without query heads has gradients of zero.
    for (int head = 0; head < (heads > 0 ? heads : 1); head++) {
#pragma unroll
      for (int i = 0; i < MT; i++) zero(dk[i]), zero(dv[i]);
      for (int step = 0; step < steps; step++) {
        copies.wait<0>();
        __syncthreads(); // the tiles have arrived, and all threads have read the previous P and dS
        const int next_step = step + 1 < steps ? step + 1 : 0, next_head = head + (next_step == 0);
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
                const float lse = tile.lse(buffer)[row] * LOG2E, delta = tile.delta(buffer)[row];
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

// attention_mma_dq_finish writes dq from its sums. A thread has 16 features.
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS) attention_mma_dq_finish(AttentionCall a) {
  const int64_t groups = a.dq.width / 16, n = a.heads * a.queries * groups;
  for (int64_t w = (int64_t)blockIdx.x * ATTENTION_MMA_THREADS + threadIdx.x; w < n;
       w += (int64_t)gridDim.x * ATTENTION_MMA_THREADS) {
    const int64_t group = w % groups, row = w / groups % a.queries, head = w / groups / a.queries;
    float sums[16], dq[2][8];
    load<16>(a.dq_sums + 16 * w, sums);
#pragma unroll
    for (int i = 0; i < 16; i++) dq[i / 2 % 2][i / 4 * 2 + i % 2] = sums[i] * a.scale;
    const int64_t to = row * a.dq.token + head * a.dq.head + 16 * group;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (a.dq.bf16) store_flat<8>((bf16 *)a.dq.data + to + 8 * half, 8, a.dq.vectors, dq[half]);
      else store_flat<8>((float *)a.dq.data + to + 8 * half, 8, a.dq.vectors, dq[half]);
    }
  }
}

const AttentionKernel attention_mma_forward_kernels[ATTENTION_MMA_SIZES] = {attention_mma_forward_kernel<0, false>,
                                                                            attention_mma_forward_kernel<1, false>,
                                                                            attention_mma_forward_kernel<2, false>};
const AttentionKernel attention_mma_begun_kernels[ATTENTION_MMA_SIZES] = {attention_mma_forward_kernel<0, true>,
                                                                          attention_mma_forward_kernel<1, true>,
                                                                          attention_mma_forward_kernel<2, true>};
const AttentionKernel attention_mma_dq_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_dq_kernel<0>, attention_mma_dq_kernel<1>, attention_mma_dq_kernel<2>};
const AttentionKernel attention_mma_dkv_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_dkv_kernel<0, false>, attention_mma_dkv_kernel<1, false>, attention_mma_dkv_kernel<2, false>};
const AttentionKernel attention_mma_gradient_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_dkv_kernel<0, true>, attention_mma_dkv_kernel<1, true>, attention_mma_dkv_kernel<2, true>};
