// Attention backward in F32 arithmetic (FlashAttention-2, Dao 2023, arXiv:2307.08691, algorithm 2).
// With the probabilities P = exp(S - lse), dP = dout·vᵀ, and delta = Σ dout·out of each query:
//
//   dS = P·(dP - delta),  dq = scale·dS·k,  dk = scale·dSᵀ·q,  dv = Pᵀ·dout
//
// Blocks of the dq kernel have queries and loop over keys. Blocks of the dk and dv kernel have keys
// and loop over queries. Each kernel computes the scores again. In return, no block adds to another
// block's results, and every sum has a fixed order.
#include "attention_scored.h"

// attention_delta writes delta [head][query]. It sums in one chain of additions, as dP is computed,
// so that dS is exactly 0 for a query with a single key.
template <typename T, typename U>
__device__ __forceinline__ float inner(const AttentionView &g, const AttentionView &o, int64_t row, int64_t head) {
  const T *x = (const T *)g.data + row * g.token + head * g.head;
  const U *y = (const U *)o.data + row * o.token + head * o.head;
  float sum = 0;
  for (int c = 0; c < o.width; c += 4) {
    float p[4], q[4];
    load_flat<4>(x + c, o.width - c, g.wide, p);
    load_flat<4>(y + c, o.width - c, o.wide, q);
#pragma unroll
    for (int e = 0; e < 4; e++) sum = madd(p[e], q[e], sum);
  }
  return sum;
}
__global__ void __launch_bounds__(ATTENTION_THREADS) attention_delta(AttentionCall a) {
  const int64_t n = a.heads * a.queries;
  for (int64_t at = (int64_t)blockIdx.x * ATTENTION_THREADS + threadIdx.x; at < n;
       at += (int64_t)gridDim.x * ATTENTION_THREADS) {
    const int64_t head = at / a.queries, row = at % a.queries;
    // out is F32 after a softmax that was carried
    a.delta[at] = !a.dout.bf16 ? inner<float, float>(a.dout, a.out, row, head)
                  : a.out.bf16 ? inner<bf16, bf16>(a.dout, a.out, row, head)
                               : inner<bf16, float>(a.dout, a.out, row, head);
  }
}

// attention_head_sums writes the sums over the queries of a head, -Σ exp(sink - lse)·delta and the
// sum of the terms of dslopes: a block per head, a fixed order of additions, in F64.
__global__ void __launch_bounds__(ATTENTION_THREADS) attention_head_sums(AttentionCall a) {
  SHARED(double, part);
  for (int64_t w = blockIdx.x; w < 2 * a.heads; w += gridDim.x) {
    const int64_t head = w / 2;
    const bool slopes = w % 2 == 1;
    if (!(slopes ? a.dslopes : a.dsinks)) continue;
    double sum = 0;
    for (int64_t row = threadIdx.x; row < a.queries; row += ATTENTION_THREADS) {
      if (slopes) {
        sum += a.terms[head * a.queries + row];
        continue;
      }
      const float lse = a.lse[row * a.lse_token + head * a.lse_head];
      // a query without keys and sink has weight 0
      if (lse != -INFINITY) sum -= (double)expf(a.sinks[head] - lse) * a.delta[head * a.queries + row];
    }
    part[threadIdx.x] = sum;
    for (int n = ATTENTION_THREADS / 2; n > 0; n /= 2) {
      __syncthreads();
      if ((int)threadIdx.x < n) part[threadIdx.x] += part[threadIdx.x + n];
    }
    if (threadIdx.x == 0) (slopes ? a.dslopes : a.dsinks)[head] = (float)part[0];
    __syncthreads(); // part has been read
  }
}

// Shared memory of the kernels below: two tiles that stay, two tiles that are streamed, a tile of
// products, for dk and dv the lse and delta of the streamed queries, and the table of the rows if
// the kernel is scored.
template <int SIZE> struct Backward {
  static constexpr int HEAD = attention_sizes[SIZE].head, ROWS = attention_sizes[SIZE].back_rows,
                       COLUMNS = attention_sizes[SIZE].back_columns;
  static constexpr int RT = ROWS / 16, CT = COLUMNS / 16, W = HEAD + ATTENTION_GAP;
  float *resident, *resident2, *streamed, *streamed2, *product, *lse, *delta;
  AttentionRow *rows;
  __device__ __forceinline__ explicit Backward(float *shared) {
    resident = shared;
    resident2 = resident + ROWS * W;
    streamed = resident2 + ROWS * W;
    streamed2 = streamed + COLUMNS * W;
    product = streamed2 + COLUMNS * W;
    lse = product + ROWS * (COLUMNS + ATTENTION_GAP);
    delta = lse + COLUMNS;
    rows = reinterpret_cast<AttentionRow *>(delta + COLUMNS);
  }
};

// The dq kernel: a block has queries and their dout, and loops over keys and values.
template <int SIZE, bool SCORED> __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    attention_dq_kernel(AttentionCall a) {
  typedef Backward<SIZE> B;
  constexpr int HEAD = B::HEAD, ROWS = B::ROWS, COLUMNS = B::COLUMNS, RT = B::RT, CT = B::CT;
  SHARED(float, shared);
  const B tile(shared);
  const int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
  const int depth = (a.q.width + 3) / 4 * 4, depth_v = (a.v.width + 3) / 4 * 4;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.heads * a.count_q; w += gridDim.x) {
    const AttentionWork work = attention_work(w, a.count_q, false);
    const AttentionTile t = attention_tile(a.cu_q, a.cu_k, a.shift, a.tiles_q, a.documents, work.tile, ROWS, false);
    const int64_t kv = a.kv_head[work.head];
    const AttentionRange see = attention_keys(a.mask, t.shift, t.sk, t.first, t.first + t.rows);
    const bool active = y / 2 * 2 < t.rows;
    const Scores scored(a, work.head);
    auto visible_from = [&](int64_t k) { // the first tile from key k on that the block mask does not hide
      while (SCORED && k < see.hi && scored.hides(t.q + t.first, t.rows, t.k + k, (int)least(COLUMNS, see.hi - k)))
        k += COLUMNS;
      return k;
    };
    const int64_t begin = visible_from(see.lo);

    // Groups of copies, in order: queries, dout and first values; first keys; second values; ….
    __syncthreads();
    load_rows<HEAD, ROWS>(copies, tile.resident, a.q, t.q + t.first, work.head, t.rows);
    load_rows<HEAD, ROWS>(copies, tile.resident2, a.dout, t.q + t.first, work.head, t.rows);
    if (SCORED) query_rows<ROWS>(tile.rows, scored, t.q + t.first, t.rows);
    if (begin < see.hi)
      load_rows<HEAD, COLUMNS>(copies, tile.streamed2, a.v, t.k + begin, kv, (int)least(COLUMNS, see.hi - begin));
    copies.close();
    if (begin < see.hi)
      load_rows<HEAD, COLUMNS>(copies, tile.streamed, a.k, t.k + begin, kv, (int)least(COLUMNS, see.hi - begin));
    copies.close();

    float dq[RT][HEAD / 16], lse[RT], delta[RT], terms[RT]; // terms of dslopes, if SCORED
    clear(dq);
#pragma unroll
    for (int i = 0; i < RT; i++) {
      const int64_t r = t.q + t.first + least(y + 16 * i, t.rows - 1);
      lse[i] = a.lse[r * a.lse_token + work.head * a.lse_head];
      delta[i] = a.delta[work.head * a.queries + r];
      terms[i] = 0;
    }
    for (int64_t k0 = begin, after; k0 < see.hi; k0 = after) {
      after = visible_from(k0 + COLUMNS);
      const int n = (int)least(COLUMNS, see.hi - k0), next = (int)least(COLUMNS, see.hi - after);
      float ds[RT][CT];
      copies.wait<1>();
      __syncthreads();
      float dp[RT][CT];
      if (active) scores<HEAD>(dp, tile.resident2, tile.streamed2, depth_v);
      __syncthreads();
      if (next > 0) load_rows<HEAD, COLUMNS>(copies, tile.streamed2, a.v, t.k + after, kv, next);
      copies.close();
      copies.wait<1>();
      __syncthreads();
      if (active) {
        scores<HEAD>(ds, tile.resident, tile.streamed, depth);
        const AttentionBand band = attention_band(a.mask, t.first + t.shift - k0);
        const KeyColumns<SCORED ? CT : 1> columns(scored, t.k + k0);
        const float far = (float)(k0 - t.first - t.shift); // distance of the tile's first pair
#pragma unroll
        for (int i = 0; i < RT; i++)
#pragma unroll
          for (int j = 0; j < CT; j++) {
            const int c = x + 16 * j, apart = c - (y + 16 * i);
            if constexpr (SCORED) {
              bool sees = c < n && band.below <= apart && apart <= band.above;
              if (scored.blocks && sees) sees = scored.blocks[tile.rows[y + 16 * i].at + columns.at[j]] != 0;
              float slope, d = 0;
              const float score = scored.capped(ds[i][j], a.scale, slope);
              if (sees)
                d = scored.exponential(score, far + apart, lse[i]) *
                    (dp[i][j] * scored.factor(tile.rows[y + 16 * i].bits, columns.bits[j]) - delta[i]);
              terms[i] = madd(d, far + apart, terms[i]);
              ds[i][j] = sees ? d * slope : 0;
              continue;
            }
            const float p = expf(madd(ds[i][j], a.scale, -lse[i]));
            ds[i][j] = c < n && band.below <= apart && apart <= band.above ? p * (dp[i][j] - delta[i]) : 0;
          }
        weights(tile.product, ds);
        add_tile<HEAD, RT, CT>(dq, tile.product, tile.streamed, n, a.q.width);
      }
      __syncthreads();
      if (next > 0) load_rows<HEAD, COLUMNS>(copies, tile.streamed, a.k, t.k + after, kv, next);
      copies.close();
    }
    copies.wait<0>();
#pragma unroll
    for (int i = 0; i < RT; i++) {
      if (SCORED && a.terms) {
        const float sum = row_sum(terms[i]);
        if (x == 0 && y + 16 * i < t.rows) a.terms[work.head * a.queries + t.q + t.first + y + 16 * i] = sum;
      }
      if (y + 16 * i >= t.rows) continue;
#pragma unroll
      for (int g = 0; g < HEAD / 64; g++) {
        const float *d = &dq[i][4 * g];
        store_four(a.dq, t.q + t.first + y + 16 * i, work.head, 64 * g + 4 * x,
                   make_float4(d[0] * a.scale, d[1] * a.scale, d[2] * a.scale, d[3] * a.scale));
      }
    }
  }
}

// finish adds a query head's sum (times f) to the sum of the preceding query heads. That sum is in
// the result itself if the result is F32, else in `sums`, for features from `at` on. One thread has
// an element for all heads.
__device__ __forceinline__ void finish(const AttentionCall &a, const AttentionView &to, int64_t row, int64_t kv, int at,
                                       int c, const float *d, float f, bool first, bool last) {
  float part[4] = {d[0] * f, d[1] * f, d[2] * f, d[3] * f};
  float *sum = !to.bf16        ? (float *)to.data + row * to.token + kv * to.head + c
               : first && last ? nullptr
                               : a.sums + (kv * a.keys + row) * (a.k.width + a.v.width) + at + c;
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (!first && c + e < to.width) part[e] = sum[e] + part[e];
  if (!to.bf16 || last) {
    store_four(to, row, kv, c, make_float4(part[0], part[1], part[2], part[3]));
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (c + e < to.width) sum[e] = part[e];
}

// The dk and dv kernel: a block has keys and values, and loops over queries and their dout.
// Products are transposed: their rows are keys.
template <int SIZE, bool SCORED> __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    attention_dkv_kernel(AttentionCall a) {
  typedef Backward<SIZE> B;
  constexpr int HEAD = B::HEAD, ROWS = B::ROWS, COLUMNS = B::COLUMNS, RT = B::RT, CT = B::CT;
  SHARED(float, shared);
  const B tile(shared);
  const int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
  const int depth = (a.q.width + 3) / 4 * 4, depth_v = (a.v.width + 3) / 4 * 4;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.kv_heads * a.count_k; w += gridDim.x) {
    const AttentionWork work = attention_work(w, a.count_k, true);
    const AttentionTile t = attention_tile(a.cu_q, a.cu_k, a.shift, a.tiles_k, a.documents, work.tile, ROWS, true);
    const int64_t kv = work.head, first = a.first[kv], heads = a.first[kv + 1] - first;
    const AttentionRange seen = attention_queries(a.mask, t.shift, t.sq, t.first, t.first + t.rows);
    const int64_t passes = seen.lo < seen.hi ? ceil_div(seen.hi - seen.lo, COLUMNS) : 0;
    const bool active = y / 2 * 2 < t.rows;

    // For each query head of the key head, for each tile of its queries.
    auto load_dout = [&](int64_t head, int64_t pass) {
      const int64_t q0 = seen.lo + pass * COLUMNS;
      load_rows<HEAD, COLUMNS>(copies, tile.streamed2, a.dout, t.q + q0, first + head,
                               (int)least(COLUMNS, seen.hi - q0));
    };
    auto load_q = [&](int64_t head, int64_t pass) {
      const int64_t q0 = seen.lo + pass * COLUMNS, r = t.q + q0 + threadIdx.x;
      load_rows<HEAD, COLUMNS>(copies, tile.streamed, a.q, t.q + q0, first + head, (int)least(COLUMNS, seen.hi - q0));
      if (threadIdx.x < COLUMNS) {
        const bool there = q0 + threadIdx.x < seen.hi;
        copies.copy<1>(tile.lse + threadIdx.x, there ? a.lse + r * a.lse_token + (first + head) * a.lse_head : a.lse,
                       there);
        copies.copy<1>(tile.delta + threadIdx.x, there ? a.delta + (first + head) * a.queries + r : a.delta, there);
      }
    };
    // hidden reports whether the block mask hides the tile of a pass. advance goes to the next pass
    // that it does not hide, of the same head or a later one.
    auto hidden = [&](int64_t head, int64_t pass) {
      const int64_t q0 = seen.lo + pass * COLUMNS;
      return SCORED &&
             Scores(a, first + head).hides(t.q + q0, (int)least(COLUMNS, seen.hi - q0), t.k + t.first, t.rows);
    };
    auto advance = [&](int64_t &head, int64_t &pass) {
      do {
        pass = pass + 1 < passes ? pass + 1 : 0;
        head += pass == 0;
      } while (SCORED && head < heads && hidden(head, pass));
    };
    int64_t at_head = passes > 0 ? 0 : heads, at_pass = 0;
    if (SCORED && at_head < heads && hidden(at_head, at_pass)) advance(at_head, at_pass);
    __syncthreads();
    load_rows<HEAD, ROWS>(copies, tile.resident, a.k, t.k + t.first, kv, t.rows);
    load_rows<HEAD, ROWS>(copies, tile.resident2, a.v, t.k + t.first, kv, t.rows);
    if (SCORED) key_rows<ROWS>(tile.rows, a.scores, t.k + t.first, t.rows);
    if (at_head < heads) load_dout(at_head, at_pass);
    copies.close();
    if (at_head < heads) load_q(at_head, at_pass);
    copies.close();

    float dk[RT][HEAD / 16], dv[RT][HEAD / 16];
    // A key head without query heads has gradients of zero.
    for (int64_t head = 0; head < most(heads, 1); head++) {
      clear(dk);
      clear(dv);
      while (at_head == head && head < heads) {
        const int64_t q0 = seen.lo + at_pass * COLUMNS;
        advance(at_head, at_pass);
        const int n = (int)least(COLUMNS, seen.hi - q0);
        float s[RT][CT], dp[RT][CT];
        copies.wait<1>();
        __syncthreads();
        if (active) scores<HEAD>(dp, tile.resident2, tile.streamed2, depth_v);
        copies.wait<0>();
        __syncthreads();
        if (active) {
          scores<HEAD>(s, tile.resident, tile.streamed, depth);
          const AttentionBand band = attention_band(a.mask, q0 + t.shift - t.first);
          const Scores scored(a, first + head);
          const float far = (float)(t.first - q0 - t.shift); // distance of the tile's first pair
#pragma unroll
          for (int j = 0; j < CT; j++) {
            const int c = x + 16 * j;
            const float lse = tile.lse[c], delta = tile.delta[c];
            const QueryColumn column(scored, t.q + q0, c); // if SCORED
#pragma unroll
            for (int i = 0; i < RT; i++) {
              const int apart = y + 16 * i - c;
              if constexpr (SCORED) {
                bool sees = c < n && band.below <= apart && apart <= band.above;
                if (scored.blocks && sees) sees = scored.blocks[column.at + tile.rows[y + 16 * i].at] != 0;
                float slope, p = 0, factor = 0;
                const float score = scored.capped(s[i][j], a.scale, slope);
                if (sees) {
                  p = scored.exponential(score, far + apart, lse);
                  factor = scored.factor(column.bits, (uint32_t)tile.rows[y + 16 * i].bits);
                }
                s[i][j] = p * factor;
                dp[i][j] = sees ? p * (dp[i][j] * factor - delta) * slope : 0;
                continue;
              }
              const bool sees = c < n && band.below <= apart && apart <= band.above;
              s[i][j] = sees ? expf(madd(s[i][j], a.scale, -lse)) : 0;
              dp[i][j] = sees ? s[i][j] * (dp[i][j] - delta) : 0;
            }
          }
          weights(tile.product, s);
          add_tile<HEAD, RT, CT>(dv, tile.product, tile.streamed2, n, a.v.width);
        }
        __syncthreads();
        if (at_head < heads) load_dout(at_head, at_pass);
        copies.close();
        if (active) {
          weights(tile.product, dp);
          add_tile<HEAD, RT, CT>(dk, tile.product, tile.streamed, n, a.q.width);
        }
        __syncthreads();
        if (at_head < heads) load_q(at_head, at_pass);
        copies.close();
      }
#pragma unroll
      for (int i = 0; i < RT; i++) {
        const int64_t row = t.k + t.first + y + 16 * i;
        if (y + 16 * i >= t.rows) continue;
#pragma unroll
        for (int g = 0; g < HEAD / 64; g++) {
          finish(a, a.dk, row, kv, 0, 64 * g + 4 * x, &dk[i][4 * g], a.scale, head == 0, head + 1 >= heads);
          finish(a, a.dv, row, kv, a.k.width, 64 * g + 4 * x, &dv[i][4 * g], 1, head == 0, head + 1 >= heads);
        }
      }
    }
    copies.wait<0>();
  }
}

const AttentionKernel attention_dq_kernels[ATTENTION_SIZES] = {
    attention_dq_kernel<0, false>, attention_dq_kernel<1, false>, attention_dq_kernel<2, false>,
    attention_dq_kernel<3, false>};
const AttentionKernel attention_dkv_kernels[ATTENTION_SIZES] = {
    attention_dkv_kernel<0, false>, attention_dkv_kernel<1, false>, attention_dkv_kernel<2, false>,
    attention_dkv_kernel<3, false>};
const AttentionKernel attention_scored_dq_kernels[ATTENTION_SIZES] = {
    attention_dq_kernel<0, true>, attention_dq_kernel<1, true>, attention_dq_kernel<2, true>,
    attention_dq_kernel<3, true>};
const AttentionKernel attention_scored_dkv_kernels[ATTENTION_SIZES] = {
    attention_dkv_kernel<0, true>, attention_dkv_kernel<1, true>, attention_dkv_kernel<2, true>,
    attention_dkv_kernel<3, true>};
