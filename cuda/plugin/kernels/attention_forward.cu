// Attention forward in F32 arithmetic (FlashAttention-2, Dao 2023, arXiv:2307.08691, algorithm 1).
// A block has a tile of queries of one head and loops over tiles of keys, with a running maximum
// and sum. While one product is computed, the next keys or values are copied to shared memory.
#include "attention_scored.h"

template <int SIZE, bool SCORED> __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    attention_forward_kernel(AttentionCall a) {
  constexpr int HEAD = attention_sizes[SIZE].head, ROWS = attention_sizes[SIZE].rows,
                COLUMNS = attention_sizes[SIZE].columns;
  constexpr int RT = ROWS / 16, CT = COLUMNS / 16, W = HEAD + ATTENTION_GAP;
  SHARED(float, shared);
  float *qs = shared, *ks = qs + ROWS * W, *vs = ks + COLUMNS * W, *ps = vs + COLUMNS * W;
  AttentionRow *const rows = reinterpret_cast<AttentionRow *>(ps + ROWS * (COLUMNS + ATTENTION_GAP)); // if SCORED
  const int x = (int)threadIdx.x % 16, y = (int)threadIdx.x / 16;
  const int depth = (a.q.width + 3) / 4 * 4;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.heads * a.count_q; w += gridDim.x) {
    const AttentionWork work = attention_work(w, a.count_q, false);
    const AttentionTile t = attention_tile(a.cu_q, a.cu_k, a.shift, a.tiles_q, a.documents, work.tile, ROWS, false);
    const int64_t kv = a.kv_head[work.head];
    const AttentionRange see = attention_keys(a.mask, t.shift, t.sk, t.first, t.first + t.rows);
    const bool active = y / 2 * 2 < t.rows; // a warp has rows y, y + 16, … of two neighbouring y
    const Scores scored(a, work.head);
    auto visible_from = [&](int64_t k) { // the first tile from key k on that the block mask does not hide
      while (SCORED && k < see.hi && scored.hides(t.q + t.first, t.rows, t.k + k, (int)least(COLUMNS, see.hi - k)))
        k += COLUMNS;
      return k;
    };
    const int64_t begin = visible_from(see.lo);

    // Groups of copies, in order: queries and first keys, first values, second keys, …. Each wait
    // is for the last group but one.
    __syncthreads(); // all threads have read the previous tile
    load_rows<HEAD, ROWS>(copies, qs, a.q, t.q + t.first, work.head, t.rows);
    if (SCORED) query_rows<ROWS>(rows, scored, t.q + t.first, t.rows);
    if (begin < see.hi) load_rows<HEAD, COLUMNS>(copies, ks, a.k, t.k + begin, kv, (int)least(COLUMNS, see.hi - begin));
    copies.close();
    if (begin < see.hi) load_rows<HEAD, COLUMNS>(copies, vs, a.v, t.k + begin, kv, (int)least(COLUMNS, see.hi - begin));
    copies.close();

    // Where a softmax has begun, with lse m, its maximum is m, its sum 1 and its output `out`. A
    // sink is such a beginning without an output.
    float o[RT][HEAD / 16], top[RT], sum[RT];
    clear(o);
#pragma unroll
    for (int i = 0; i < RT; i++) {
      const int64_t r = t.q + t.first + y + 16 * i;
      const bool there = y + 16 * i < t.rows;
      float begun = a.sinks ? a.sinks[work.head] : -INFINITY;
      if (a.carry) { // one lane of a row reads lse, and writes it below
        if (x == 0) begun = there ? a.lse[r * a.lse_token + work.head * a.lse_head] : -INFINITY;
        begun = __shfl_sync(0xffffffffu, begun, 0, 16);
        if (there && begun != -INFINITY)
#pragma unroll
          for (int g = 0; g < HEAD / 64; g++) load_four(a.out, r, work.head, 64 * g + 4 * x, &o[i][4 * g]);
      }
      top[i] = begun, sum[i] = x == 0 && begun != -INFINITY ? 1 : 0;
    }
    unsigned seen = 0; // bits of the thread's rows that see a key, if SCORED
    for (int64_t k0 = begin, after; k0 < see.hi; k0 = after) {
      after = visible_from(k0 + COLUMNS);
      const int n = (int)least(COLUMNS, see.hi - k0), next = (int)least(COLUMNS, see.hi - after);
      float s[RT][CT];
      copies.wait<1>();
      __syncthreads();
      if (active) scores<HEAD>(s, qs, ks, depth);
      __syncthreads();
      if (next > 0) load_rows<HEAD, COLUMNS>(copies, ks, a.k, t.k + after, kv, next);
      copies.close();
      if (active) {
        const AttentionBand band = attention_band(a.mask, t.first + t.shift - k0);
        const KeyColumns<SCORED ? CT : 1> columns(scored, t.k + k0);
        const float far = (float)(k0 - t.first - t.shift); // distance of the tile's first pair
#pragma unroll
        for (int i = 0; i < RT; i++) {
          float m = top[i];
#pragma unroll
          for (int j = 0; j < CT; j++) {
            const int c = x + 16 * j, apart = c - (y + 16 * i);
            // The product is rounded here. If it were fused with the subtraction below, the
            // difference would not be exactly 0 for the largest score.
            if constexpr (SCORED) {
              bool sees = c < n && band.below <= apart && apart <= band.above;
              if (scored.blocks && sees) sees = scored.blocks[rows[y + 16 * i].at + columns.at[j]] != 0;
              float unused;
              s[i][j] = sees ? scored.capped(s[i][j], a.scale, unused) : -INFINITY;
              m = fmaxf(m, fmaf(scored.slope, far + apart, s[i][j]));
              seen |= (unsigned)sees << i;
              continue;
            }
            s[i][j] = c < n && band.below <= apart && apart <= band.above ? __fmul_rn(s[i][j], a.scale) : -INFINITY;
            m = fmaxf(m, s[i][j]);
          }
#pragma unroll
          for (int lane = 8; lane > 0; lane /= 2) m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, lane));
          // exp2f of scores in base 2 is not used: the rounding of the scores would be common to
          // all probabilities of a query.
          const float base = m == -INFINITY ? 0 : m, keep = expf(top[i] - base);
          top[i] = m;
          sum[i] *= keep;
#pragma unroll
          for (int j = 0; j < CT; j++) {
            if constexpr (SCORED) {
              s[i][j] = scored.exponential(s[i][j], far + (x + 16 * j - (y + 16 * i)), base);
              sum[i] += s[i][j];
              if (s[i][j] != 0) s[i][j] *= scored.factor(rows[y + 16 * i].bits, columns.bits[j]);
              continue;
            }
            s[i][j] = expf(s[i][j] - base);
            sum[i] += s[i][j];
          }
#pragma unroll
          for (int c = 0; c < HEAD / 16; c++) o[i][c] *= keep;
        }
        weights(ps, s);
      }
      copies.wait<1>();
      __syncthreads();
      if (active) accumulate<HEAD, HEAD / 64, RT, CT>(o, ps, vs, n, a.v.width);
      __syncthreads();
      if (next > 0) load_rows<HEAD, COLUMNS>(copies, vs, a.v, t.k + after, kv, next);
      copies.close();
    }
    copies.wait<0>();
    if (!active) continue;
    if (SCORED)
#pragma unroll
      for (int lane = 8; lane > 0; lane /= 2) seen |= __shfl_xor_sync(0xffffffffu, seen, lane);
#pragma unroll
    for (int i = 0; i < RT; i++) {
      const float l = row_sum(sum[i]);
      const int64_t r = t.first + y + 16 * i;
      if (y + 16 * i >= t.rows) continue;
      const AttentionRange row = attention_keys(a.mask, t.shift, t.sk, r, r + 1);
      const bool none = (SCORED ? !(seen >> i & 1) : row.lo >= row.hi) && top[i] == -INFINITY;
      const float f = none ? 0 : 1 / l;
      // a softmax to which no key was added keeps the bits of its lse
      if (x == 0)
        a.lse[(t.q + r) * a.lse_token + work.head * a.lse_head] = none ? -INFINITY : l == 1 ? top[i] : top[i] + logf(l);
#pragma unroll
      for (int g = 0; g < HEAD / 64; g++) {
        const float4 out = make_float4(o[i][4 * g] * f, o[i][4 * g + 1] * f, o[i][4 * g + 2] * f, o[i][4 * g + 3] * f);
        store_four(a.out, t.q + r, work.head, 64 * g + 4 * x, none ? make_float4(0, 0, 0, 0) : out);
      }
    }
  }
}

const AttentionKernel attention_forward_kernels[ATTENTION_SIZES] = {
    attention_forward_kernel<0, false>, attention_forward_kernel<1, false>, attention_forward_kernel<2, false>,
    attention_forward_kernel<3, false>};
const AttentionKernel attention_scored_forward_kernels[ATTENTION_SIZES] = {
    attention_forward_kernel<0, true>, attention_forward_kernel<1, true>, attention_forward_kernel<2, true>,
    attention_forward_kernel<3, true>};
