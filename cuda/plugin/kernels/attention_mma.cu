// Attention on tensor cores, in BF16 with F32 sums: the algorithms of attention_forward.cu and
// attention_backward.cu. Probabilities and score gradients are rounded to BF16 before they are
// multiplied. No block adds to another block's results, and every sum has a fixed order.
//
// The forward and the dq kernel both loop over tiles of keys (copy the next tile, wait, find the
// mask, multiply), and the loop is written twice. Its body reads and writes register arrays of the
// kernel, and differs in the operands of every product: a shared loop would only contain the four
// lines of the buffering, with the rest passed as callables whose arrays the compiler may spill.
#include "attention_mma.h"

// The forward kernel: a block has queries and loops over keys and values. The next tile is copied
// while one is computed. BEGUN: a softmax may have begun (attention_forward.cu), with sinks or keys
// of earlier calls. The other instantiation is for calls without them, and needs fewer registers.
template <int SIZE, bool BEGUN> __global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 2)
    attention_mma_forward_kernel(AttentionCall a) {
  constexpr int HEAD = attention_mma_sizes[SIZE].head, ROWS = attention_mma_sizes[SIZE].rows,
                COLUMNS = attention_mma_sizes[SIZE].columns;
  constexpr int W = HEAD + ATTENTION_MMA_GAP, STRIP = ROWS / MMA_WARPS, MT = STRIP / 16, NT = COLUMNS / 8;
  SHARED(bf16, shared);
  bf16 *qs = shared, *kvs = qs + ROWS * W; // two buffers of keys and values
  const Lane at;
  const int strip = (int)threadIdx.x / 32 * STRIP;
  const float scale = a.scale * LOG2E;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.heads * a.count_q; w += gridDim.x) {
    const AttentionWork work = attention_work(w, a.count_q, false);
    const AttentionTile t = attention_tile(a.cu_q, a.cu_k, a.shift, a.tiles_q, a.documents, work.tile, ROWS, false);
    const int64_t kv = a.kv_head[work.head];
    const AttentionRange see = attention_keys(a.mask, t.shift, t.sk, t.first, t.first + t.rows);

    // these describe the current tile of keys
    int64_t left = see.hi - see.lo, ahead = t.first + t.shift - see.lo, key = t.k + see.lo;
    auto load_keys = [&](bf16 *to, int64_t by) {
      const int n = (int)least(COLUMNS, left - by);
      load_tile<HEAD, COLUMNS>(copies, to, a.k, key + by, kv, n);
      load_tile<HEAD, COLUMNS>(copies, to + COLUMNS * W, a.v, key + by, kv, n);
    };
    __syncthreads(); // all threads have read the previous tile
    if (left > 0) {
      load_tile<HEAD, ROWS>(copies, qs, a.q, t.q + t.first, work.head, t.rows);
      load_keys(kvs, 0);
    }

    float o[MT][HEAD / 8][4], top[MT][2], sum[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++) {
      zero(o[i]);
      top[i][0] = top[i][1] = -INFINITY, sum[i][0] = sum[i][1] = 0;
    }
    // One lane of a row reads lse, and writes it below. The maximum is before scaling.
    if (BEGUN && strip < t.rows) {
      if (a.carry) read_wide<HEAD>(o, a.out, t.q + t.first + strip, work.head, t.rows - strip);
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int row = strip + 16 * i + 8 * h + at.row;
          float begun = a.sinks ? a.sinks[work.head] : -INFINITY;
          if (a.carry) {
            if (at.column == 0 && row < t.rows)
              begun = a.lse[(t.q + t.first + row) * a.lse_token + work.head * a.lse_head];
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
    unsigned without_keys = 0; // bits of this lane's rows that have no key
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
      const int64_t r = t.first + strip + 8 * i + at.row;
      const AttentionRange keys = attention_keys(a.mask, t.shift, t.sk, r, r + 1);
      if (keys.lo >= keys.hi) without_keys |= 1u << i;
    }
    const int64_t row0 = t.q + t.first;
    for (int buffer = 0; left > 0; left -= COLUMNS, ahead -= COLUMNS, key += COLUMNS, buffer ^= 1) {
      const bf16 *ks = kvs + buffer * 2 * COLUMNS * W;
      copies.close();
      copies.wait<0>();
      __syncthreads(); // the tile has arrived, and all threads have read the previous one
      if (left > COLUMNS) load_keys(kvs + (buffer ^ 1) * 2 * COLUMNS * W, COLUMNS);
      const int n = (int)least(COLUMNS, left);
      const AttentionBand band = attention_band(a.mask, ahead);
      const Visibility seen = strip < t.rows ? visibility(band, strip, STRIP, n, COLUMNS) : MASKED;
      if (seen == MASKED) continue;
      float s[MT][NT][4];
      products<HEAD>(s, qs + strip * W, ks);
#pragma unroll
      for (int i = 0; i < MT; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const Columns columns(band, n, strip + 16 * i + 8 * h + at.row, at.column);
          if (seen == PARTIAL)
#pragma unroll
            for (int c = 0; c < 2 * NT; c++)
              s[i][c / 2][2 * h + c % 2] = columns.hide(c / 2 * 8 + c % 2) ? -INFINITY : s[i][c / 2][2 * h + c % 2];
          float m = top[i][h];
#pragma unroll
          for (int c = 0; c < 2 * NT; c++) m = fmaxf(m, s[i][c / 2][2 * h + c % 2]);
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
          // The base of all exponents of a row is rounded once. If the largest exponential is
          // therefore not exactly 1, the sum has the same relative error.
          const float base = m == -INFINITY ? 0 : m * scale;
          float keep = exp2_approx(top[i][h] * scale - base);
          if (BEGUN && top[i][h] == m) keep = 1; // exactly, so that a query without keys keeps its bits
          top[i][h] = m;
          sum[i][h] *= keep;
#pragma unroll
          for (int c = 0; c < 2 * NT; c++) {
            float &x = s[i][c / 2][2 * h + c % 2];
            x = exp2_approx(fmaf(x, scale, -base));
            sum[i][h] += x;
          }
          if (__any_sync(0xffffffffu, keep != 1))
#pragma unroll
            for (int c = 0; c < HEAD / 8; c++) o[i][c][2 * h] *= keep, o[i][c][2 * h + 1] *= keep;
        }
      accumulate<HEAD>(o, s, ks + COLUMNS * W);
    }
    if (strip >= t.rows) continue;
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float l = sum[i][h];
        l += __shfl_xor_sync(0xffffffffu, l, 1);
        l += __shfl_xor_sync(0xffffffffu, l, 2);
        const bool alone = without_keys >> (2 * i + h) & 1, none = alone && !(BEGUN && top[i][h] != -INFINITY);
        const float f = none ? 0 : 1 / l;
        const int row = strip + 16 * i + 8 * h + at.row;
        float lse = (top[i][h] * scale + log2f(l)) * LN2;
        if (BEGUN && alone && a.sinks) lse = a.sinks[work.head];
        // a softmax to which no key was added keeps the bits of its lse
        if (at.column == 0 && row < t.rows && !(BEGUN && alone && a.carry && !none))
          a.lse[(row0 + row) * a.lse_token + work.head * a.lse_head] = none ? -INFINITY : lse;
#pragma unroll
        for (int n = 0; n < HEAD / 8; n++)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; e++) o[i][n][e] = none ? 0 : o[i][n][e] * f;
      }
    if (BEGUN && !a.out.bf16) write_wide<HEAD>(o, a.out, row0 + strip, work.head, t.rows - strip);
    else write_rows<HEAD>(qs + strip * W, o, a.out, row0 + strip, work.head, t.rows - strip);
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

// Shared memory of the kernels below: two tiles that stay, two buffers for each of two streamed
// tiles, and for dk and dv the lse and delta of the streamed queries.
template <int SIZE> struct Backward {
  static constexpr int HEAD = attention_mma_sizes[SIZE].head, ROWS = attention_mma_sizes[SIZE].back_rows,
                       COLUMNS = attention_mma_sizes[SIZE].back_columns;
  static constexpr int W = HEAD + ATTENTION_MMA_GAP, STRIP = ROWS / MMA_WARPS, MT = STRIP / 16, NT = COLUMNS / 8;
  bf16 *resident, *resident2;
  __device__ __forceinline__ explicit Backward(bf16 *shared) : resident(shared), resident2(resident + ROWS * W) {}
  __device__ __forceinline__ bf16 *streamed(int buffer) const { return resident2 + (ROWS + buffer * 2 * COLUMNS) * W; }
  __device__ __forceinline__ bf16 *streamed2(int buffer) const { return streamed(buffer) + COLUMNS * W; }
  __device__ __forceinline__ float *lse(int buffer) const {
    return reinterpret_cast<float *>(streamed(2)) + buffer * 2 * COLUMNS;
  }
  __device__ __forceinline__ float *delta(int buffer) const { return lse(buffer) + COLUMNS; }
};

// The dq kernel: a block has queries and their dout, and loops over keys and values.
template <int SIZE> __global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 2)
    attention_mma_dq_kernel(AttentionCall a) {
  typedef Backward<SIZE> B;
  constexpr int HEAD = B::HEAD, ROWS = B::ROWS, COLUMNS = B::COLUMNS, STRIP = B::STRIP, MT = B::MT, NT = B::NT;
  SHARED(bf16, shared);
  const B tile(shared);
  const Lane at;
  const int strip = (int)threadIdx.x / 32 * STRIP;
  const float scale = a.scale * LOG2E;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.heads * a.count_q; w += gridDim.x) {
    const AttentionWork work = attention_work(w, a.count_q, false);
    const AttentionTile t = attention_tile(a.cu_q, a.cu_k, a.shift, a.tiles_q, a.documents, work.tile, ROWS, false);
    const int64_t kv = a.kv_head[work.head];
    const AttentionRange see = attention_keys(a.mask, t.shift, t.sk, t.first, t.first + t.rows);

    // these describe the current tile of keys
    int64_t left = see.hi - see.lo, ahead = t.first + t.shift - see.lo, key = t.k + see.lo;
    auto load_keys = [&](int buffer, int64_t by) {
      const int n = (int)least(COLUMNS, left - by);
      load_tile<HEAD, COLUMNS>(copies, tile.streamed(buffer), a.k, key + by, kv, n);
      load_tile<HEAD, COLUMNS>(copies, tile.streamed2(buffer), a.v, key + by, kv, n);
    };
    __syncthreads(); // all threads have read the previous tile
    if (left > 0) {
      load_tile<HEAD, ROWS>(copies, tile.resident, a.q, t.q + t.first, work.head, t.rows);
      load_tile<HEAD, ROWS>(copies, tile.resident2, a.dout, t.q + t.first, work.head, t.rows);
      load_keys(0, 0);
    }

    float dq[MT][HEAD / 8][4], lse[MT][2], delta[MT][2];
#pragma unroll
    for (int i = 0; i < MT; i++) {
      zero(dq[i]);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int64_t r = t.q + t.first + least(strip + 16 * i + 8 * h + at.row, t.rows - 1);
        lse[i][h] = a.lse[r * a.lse_token + work.head * a.lse_head] * LOG2E;
        delta[i][h] = a.delta[work.head * a.queries + r];
      }
    }
    for (int buffer = 0; left > 0; left -= COLUMNS, ahead -= COLUMNS, key += COLUMNS, buffer ^= 1) {
      copies.close();
      copies.wait<0>();
      __syncthreads(); // the tile has arrived, and all threads have read the previous one
      if (left > COLUMNS) load_keys(buffer ^ 1, COLUMNS);
      const int n = (int)least(COLUMNS, left);
      const AttentionBand band = attention_band(a.mask, ahead);
      const Visibility seen = strip < t.rows ? visibility(band, strip, STRIP, n, COLUMNS) : MASKED;
      if (seen == MASKED) continue;
      float ds[MT][NT][4], dp[MT][NT][4];
      products<HEAD>(dp, tile.resident2 + strip * B::W, tile.streamed2(buffer));
      products<HEAD>(ds, tile.resident + strip * B::W, tile.streamed(buffer));
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
      accumulate<HEAD>(dq, ds, tile.streamed(buffer));
    }
    if (strip >= t.rows) continue;
    multiply(dq, a.scale);
    write_gradients<HEAD>(tile.resident + strip * B::W, dq, a.dq, t.q + t.first + strip, work.head, t.rows - strip);
  }
}

// The kernel for dk and dv, or one of them: a block has keys and values, and loops over queries and
// their dout. Products are transposed: their rows are keys.
template <int SIZE, bool DK, bool DV> __global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 2)
    attention_mma_dkv_kernel(AttentionCall a) {
  typedef Backward<SIZE> B;
  constexpr int HEAD = B::HEAD, ROWS = B::ROWS, COLUMNS = B::COLUMNS, STRIP = B::STRIP, MT = B::MT, NT = B::NT;
  SHARED(bf16, shared);
  const B tile(shared);
  const Lane at;
  const int strip = (int)threadIdx.x / 32 * STRIP;
  const float scale = a.scale * LOG2E;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.kv_heads * a.count_k; w += gridDim.x) {
    const AttentionWork work = attention_work(w, a.count_k, true);
    const AttentionTile t = attention_tile(a.cu_q, a.cu_k, a.shift, a.tiles_k, a.documents, work.tile, ROWS, true);
    const int64_t kv = work.head, first = a.first[kv];
    const int heads = (int)(a.first[kv + 1] - first);
    const AttentionRange queries = attention_queries(a.mask, t.shift, t.sq, t.first, t.first + t.rows);
    const int64_t row0 = t.k + t.first, query = t.q + queries.lo, count = most(0, queries.hi - queries.lo),
                  ahead = queries.lo + t.shift - t.first;
    const int passes = (int)ceil_div(count, COLUMNS);

    // For each query head of the key head, and for each tile of its queries.
    auto load_queries = [&](int buffer, int head, int pass) {
      const int64_t q0 = (int64_t)pass * COLUMNS, r = query + q0 + threadIdx.x;
      const int n = (int)least(COLUMNS, count - q0);
      load_tile<HEAD, COLUMNS>(copies, tile.streamed(buffer), a.q, query + q0, first + head, n);
      load_tile<HEAD, COLUMNS>(copies, tile.streamed2(buffer), a.dout, query + q0, first + head, n);
      if (threadIdx.x < COLUMNS) {
        const bool there = (int)threadIdx.x < n;
        copies.copy<1>(tile.lse(buffer) + threadIdx.x,
                       there ? a.lse + r * a.lse_token + (first + head) * a.lse_head : a.lse, there);
        copies.copy<1>(tile.delta(buffer) + threadIdx.x, there ? a.delta + (first + head) * a.queries + r : a.delta,
                       there);
      }
    };
    __syncthreads(); // all threads have read the previous tile
    if (heads > 0 && passes > 0) {
      load_tile<HEAD, ROWS>(copies, tile.resident, a.k, row0, kv, t.rows);
      if (DK) load_tile<HEAD, ROWS>(copies, tile.resident2, a.v, row0, kv, t.rows);
      load_queries(0, 0, 0);
    }

    float dk[MT][HEAD / 8][4], dv[MT][HEAD / 8][4];
    int buffer = 0;
    // A key head without query heads has gradients of zero.
    for (int head = 0; head < most(heads, 1); head++) {
#pragma unroll
      for (int i = 0; i < MT; i++) {
        if (DK) zero(dk[i]);
        if (DV) zero(dv[i]);
      }
      for (int pass = 0; pass < (heads > 0 ? passes : 0); pass++, buffer ^= 1) {
        copies.close();
        copies.wait<0>();
        __syncthreads(); // the tile has arrived, and all threads have read the previous one
        const int next_pass = pass + 1 < passes ? pass + 1 : 0, next_head = head + (next_pass == 0);
        if (next_head < heads) load_queries(buffer ^ 1, next_head, next_pass);
        const int64_t q0 = (int64_t)pass * COLUMNS;
        const int n = (int)least(COLUMNS, count - q0);
        const AttentionBand transposed = attention_band(a.mask, ahead + q0),
                            band = {-transposed.above, -transposed.below};
        const Visibility seen = strip < t.rows ? visibility(band, strip, STRIP, n, COLUMNS) : MASKED;
        if (seen == MASKED) continue;
        float s[MT][NT][4], dp[MT][NT][4];
        if (DK) products<HEAD>(dp, tile.resident2 + strip * B::W, tile.streamed2(buffer));
        products<HEAD>(s, tile.resident + strip * B::W, tile.streamed(buffer));
#pragma unroll
        for (int i = 0; i < MT; i++) {
          const Columns columns[2] = {{band, n, strip + 16 * i + at.row, at.column},
                                      {band, n, strip + 16 * i + 8 + at.row, at.column}};
#pragma unroll
          for (int c = 0; c < NT; c++) {
            const float2 l = *reinterpret_cast<const float2 *>(tile.lse(buffer) + 8 * c + at.column),
                         d = *reinterpret_cast<const float2 *>(tile.delta(buffer) + 8 * c + at.column);
            const float lse[2] = {l.x * LOG2E, l.y * LOG2E}, delta[2] = {d.x, d.y};
#pragma unroll
            for (int e = 0; e < 4; e++) {
              s[i][c][e] = exp2_approx(fmaf(s[i][c][e], scale, -lse[e % 2]));
              if (DK) dp[i][c][e] = s[i][c][e] * (dp[i][c][e] - delta[e % 2]);
            }
          }
          if (seen == PARTIAL)
#pragma unroll
            for (int c = 0; c < NT; c++)
#pragma unroll
              for (int e = 0; e < 4; e++) {
                const bool hidden = columns[e / 2].hide(8 * c + e % 2);
                s[i][c][e] = hidden ? 0 : s[i][c][e];
                if (DK) dp[i][c][e] = hidden ? 0 : dp[i][c][e];
              }
        }
        if (DV) accumulate<HEAD>(dv, s, tile.streamed2(buffer));
        if (DK) accumulate<HEAD>(dk, dp, tile.streamed(buffer));
      }
      const bool first_head = head == 0, last_head = head + 1 >= heads;
      const int rows = t.rows - strip;
      float *sums = a.sums + (kv * a.keys + row0 + strip) * (a.k.width + a.v.width);
      if (DK) {
        multiply(dk, a.scale);
        add_before<HEAD>(dk, sums, a.k.width + a.v.width, a.k.width, rows, first_head, last_head);
        if (last_head && rows > 0)
          write_gradients<HEAD>(tile.resident + strip * B::W, dk, a.dk, row0 + strip, kv, rows);
      }
      if (DV) {
        add_before<HEAD>(dv, sums + a.k.width, a.k.width + a.v.width, a.v.width, rows, first_head, last_head);
        if (last_head && rows > 0)
          write_gradients<HEAD>((DK ? tile.resident2 : tile.resident) + strip * B::W, dv, a.dv, row0 + strip, kv, rows);
      }
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
// With the widest heads, a warp has registers for one of the two sums only. dk and dv then have a
// kernel each, and both compute the scores.
const AttentionKernel attention_mma_dk_kernels[ATTENTION_MMA_SIZES] = {attention_mma_dkv_kernel<0, true, true>,
                                                                       attention_mma_dkv_kernel<1, true, true>,
                                                                       attention_mma_dkv_kernel<2, true, false>};
const AttentionKernel attention_mma_dv_kernels[ATTENTION_MMA_SIZES] = {nullptr, nullptr,
                                                                       attention_mma_dkv_kernel<2, false, true>};
