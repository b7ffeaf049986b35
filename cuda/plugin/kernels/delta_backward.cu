// The gated delta rule, backward pass. With D the gradient of the state after a chunk, and W for
// dout, along the chunks from last to first:
//
//   Y = Tᵀ·(Pᵀ·W + F·k·D),  D ← exp(Gend)·D + scale·(E·q)ᵀ·W - (beta·E·k)ᵀ·Y
//
// and then, for each chunk,
//
//   dP = scale·(W·Xᵀ)·M,  dB = -beta·(Y·Xᵀ)·M,  dv = beta·Y
//   dq = scale·E·W·Sᵀ + dP·k,  dk = dPᵀ·q + (dB + dBᵀ)·k + F·X·Dᵀ - beta·E·Y·Sᵀ
//
// The gradient of the decay at token t is the sum of the terms that cross t: the pairs (i, j) with
// i >= t > j, the rows from t on with S, the rows before t with D, and S with D. Differences of
// cumulative sums would be equal, but with cancellation.
#include "delta.h"

// row_sum returns the sum over the four lanes that have a row.
static __device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// with_later adds to x, in the rows of a warp's result, the rows below: c[n][e] becomes the sum of
// its column from its row to the warp's last.
static __device__ __forceinline__ void with_later(float (&x)[4][4]) {
  const int lane = (int)threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 4; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float &upper = x[n][e], &lower = x[n][2 + e];
#pragma unroll
      for (int by = 4; by < 32; by *= 2) {
        const float u = __shfl_down_sync(0xffffffffu, upper, by), l = __shfl_down_sync(0xffffffffu, lower, by);
        if (lane + by < 32) upper += u, lower += l;
      }
      upper += __shfl_sync(0xffffffffu, lower, lane % 4);
    }
}

// Gradients is the shared memory of delta_gradients. In F32, the values have a slice of columns,
// and q and k reuse their memory.
template <typename T> struct Gradients {
  typedef DeltaTiles<sizeof(T)> Tiles;
  T *dps, *dbs, *ws, *xs, *ys, *ss, *ds, *qs, *ks;
  float2 *sums;
  float *es, *fs, *bs, *uq, *uk, *yv;
  // an entry for each half of the columns
  float *yb, *with_q, *with_k, *with_d, *crossing;
  float *strips, *room; // strips: sums of the columns of 16 rows
  __device__ __forceinline__ explicit Gradients(T *shared) {
    dps = shared, dbs = dps + Tiles::SQUARE, ws = dbs + Tiles::SQUARE, xs = ws + Tiles::VALUES, ys = xs + Tiles::VALUES,
    ss = ys + Tiles::VALUES, ds = ss + Tiles::STATE;
    qs = ON_CORES<T> ? ss : ws, ks = qs + Tiles::SQUARE;
    constexpr int N = DELTA_CHUNK;
    es = (float *)(ds + Tiles::STATE), fs = es + N, bs = fs + N, uq = bs + N, uk = uq + N, yv = uk + N;
    yb = yv + N, with_q = yb + 2 * N, with_k = with_q + 2 * N, with_d = with_k + 2 * N, crossing = with_d + 2 * N;
    strips = crossing + 2 * N, sums = (float2 *)(strips + 4 * N), room = (float *)(sums + N);
  }
};

// delta_gradients computes the gradients of a chunk and head. It stores the gradients of the
// normalized rows of q and k, times the factor of the L2 norm, for every value head.
//
// In BF16, X, Y, the states and the factors dP and dB are rounded to BF16 for the products. P and B
// are computed again from q and k, so that they are rounded nowhere.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, ON_CORES<T> ? 2 : 1)
    delta_gradients_kernel(DeltaCall a) {
  typedef DeltaTiles<sizeof(T)> Tiles;
  constexpr int SLICE = Tiles::SLICE, KSTEP = DELTA_WIDE, SSTEP = SLICE + TILE_GAP, UNIT = Wide<T>::LANES;
  SHARED(T, shared);
  const Gradients<T> t(shared);
  // All columns of the values stay in shared memory if there is room for them.
  const int all_step = (a.dim_v + SLICE - 1) / SLICE * SLICE + TILE_GAP;
  const bool resident = ON_CORES<T> && a.chunk * all_step <= Tiles::VALUES;
  const int vstep = resident ? all_step : SSTEP;
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, half_of = warp / 4, n0 = half_of * 32;
  constexpr bool ALONG = !ON_CORES<T>; // states are dense along the columns of the values
  const int s0 = ALONG ? n0 * SSTEP : n0;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.chunks * a.value_heads; w += gridDim.x) {
    const int head = (int)(w % a.value_heads), key = (int)a.key_head[head];
    const DeltaChunk c = a.find(w / a.value_heads);
    const int rows = up16(c.rows);
    const bool active = m0 < rows, lower = active && n0 <= m0;
    // The addresses of the states are found again for each copy, to save registers.
    const bool has_s(a.before<T>(c, head)), has_d(a.after<T>(c, head));

    auto copy_keys = [&](int c0, T *q, T *k) {
      copy_view<64>(copies, q, KSTEP, a.q, c, key, c0);
      copy_view<64>(copies, k, KSTEP, a.k, c, key, c0);
    };
    auto copy_values = [&](int v0) {
      const int at = resident ? v0 : 0;
      copy_view<SLICE>(copies, t.ws + at, vstep, a.dout, c, head, v0);
      copy_rows<SLICE>(copies, t.xs + at, vstep, a.rows_of<T>(a.x, a.dim_v, head, c.token), a.dim_v, v0, c.rows, rows);
      copy_rows<SLICE>(copies, t.ys + at, vstep, a.rows_of<T>(a.y, a.dim_v, head, c.token), a.dim_v, v0, c.rows, rows);
    };
    auto copy_states = [&](int k0, int v0) {
      if (has_s) copy_state<SLICE>(copies, t.ss, SSTEP, a.before<T>(c, head), a.dim_k, a.dim_v, k0, v0);
      if (has_d) copy_state<SLICE>(copies, t.ds, SSTEP, a.after<T>(c, head), a.dim_k, a.dim_v, k0, v0);
    };
    auto arrive = [&] {
      copies.close();
      copies.wait<0>();
      __syncthreads();
    };

    // q·kᵀ and k·kᵀ, 128 columns at a time
    float qk[4][4], kk[4][4];
    zero(qk);
    zero(kk);
    for (int c0 = 0; c0 < a.dim_k; c0 += 128) {
      __syncthreads(); // all threads have read the previous tiles
      copy_keys(c0, t.qs, t.ks);
      if (c0 + 64 < a.dim_k) copy_keys(c0 + 64, t.dps, t.dbs);
      copies.close();
      if (c0 > 0) {
        copies.wait<0>();
      } else {
        for (int v0 = 0; resident && v0 < a.dim_v; v0 += SLICE) copy_values(v0);
        copies.close();
        if (threadIdx.x < DELTA_CHUNK) {
          const int r = (int)threadIdx.x;
          const DeltaFactors f(a, c, head, key, r);
          t.sums[r] = make_float2(f.decay.x, f.decay.y);
          t.es[r] = f.decay.z, t.fs[r] = f.decay.w, t.bs[r] = f.beta, t.uk[r] = f.unit;
          t.uq[r] = r < c.rows && a.unit_q ? a.unit_q[a.row(key, c.token + r)] : 1;
        }
        copies.wait<1>(); // for the keys
      }
      __syncthreads();
      if (!lower) continue;
      const int depth = up16((int)least(64, a.dim_k - c0)), depth2 = up16((int)least(64, a.dim_k - c0 - 64));
      tile_product<true, true>(qk, t.qs + m0 * KSTEP, KSTEP, t.ks + n0 * KSTEP, KSTEP, depth);
      tile_product<true, true>(kk, t.ks + m0 * KSTEP, KSTEP, t.ks + n0 * KSTEP, KSTEP, depth);
      if (depth2 <= 0) continue;
      tile_product<true, true>(qk, t.dps + m0 * KSTEP, KSTEP, t.dbs + n0 * KSTEP, KSTEP, depth2);
      tile_product<true, true>(kk, t.dbs + m0 * KSTEP, KSTEP, t.dbs + n0 * KSTEP, KSTEP, depth2);
    }

    // W·Xᵀ and Y·Xᵀ; dv, and Y·v, of which a thread has a unit of 16 bytes in two rows
    float p[4][4], b[4][4], with_v[2] = {0, 0};
    zero(p);
    zero(b);
    for (int v0 = 0; v0 < a.dim_v; v0 += SLICE) {
      const int at = resident ? v0 : 0;
      if (v0 == 0 || !resident) {
        __syncthreads(); // all threads have read q and k, or the previous slice
        if (!resident) copy_values(v0);
        arrive();
      }
      if (v0 + SLICE >= a.dim_v && ON_CORES<T>) copy_states(0, 0);
      if (lower) {
        const int depth = up16((int)least(SLICE, a.dim_v - v0));
        tile_product<true, true>(p, t.ws + m0 * vstep + at, vstep, t.xs + n0 * vstep + at, vstep, depth);
        tile_product<true, true>(b, t.ys + m0 * vstep + at, vstep, t.xs + n0 * vstep + at, vstep, depth);
      }
      const int first = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8 * UNIT, left = a.dim_v - v0 - column;
      Word<UNIT, T> units[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = first + i * (DELTA_THREADS / 8);
        const T *v = a.v.row<T>(c.token + r, head) + v0 + column;
        load_flat_word<UNIT>(v, r < c.rows ? left : 0, a.v.vectors, units[i]);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = first + i * (DELTA_THREADS / 8);
        if (r >= c.rows || left <= 0) continue;
        float v[UNIT], sum = 0;
        const T *y = t.ys + r * vstep + at + column;
#pragma unroll
        for (int e = 0; e < UNIT; e += 2) {
          const float2 two = pair_at(y + e);
          sum = madd(two.y, in_word<T>(units[i], e + 1), madd(two.x, in_word<T>(units[i], e), sum));
          v[e] = t.bs[r] * two.x, v[e + 1] = t.bs[r] * two.y;
        }
        with_v[i] += sum;
        store_flat<UNIT>(a.dv.row<T>(c.token + r, head) + v0 + column, left, a.dv.vectors, v);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int by = 1; by < 8; by *= 2) with_v[i] += __shfl_xor_sync(0xffffffffu, with_v[i], by);
      if (threadIdx.x % 8 == 0) t.yv[threadIdx.x / 8 + 32 * i] = with_v[i];
    }

    // dP and dB, times the factors of the L2 norm, and their contributions to the decays'
    // gradients: the pairs (i, j) below the diagonal replace qk.
    float along[2] = {0, 0};
    if (lower) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = m0 + lane.row + 8 * half, last = i < c.rows ? i : -1; // last: of the columns that exist
        const float2 sum = t.sums[i];
        const float by_q = t.uq[i], by_k = t.uk[i], beta = t.bs[i];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const int j = n0 + 8 * n + lane.column;
          const float2 unit = pair_at(t.uk + j);
          float of[4], dp[2], db[2]; // of: the sums of two columns
          load<4>(reinterpret_cast<const float *>(t.sums + j), of);
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int at = 2 * half + e;
            float &pair = qk[n][at];
            // Without branches. What is computed for other elements may be infinite or NaN.
            const float decay = expf((sum.x - of[2 * e]) + (sum.y - of[2 * e + 1])) * (e ? unit.y : unit.x),
                        in_p = a.scale * decay * by_q * p[n][at], by = decay * by_k * b[n][at], in_b = -by * kk[n][at];
            const bool there = j + e <= last, below = j + e < last;
            dp[e] = there ? in_p : 0;
            db[e] = below ? -beta * by : 0;
            along[half] += below ? in_b : 0;
            pair = below ? madd(in_p, pair, beta * in_b) : 0;
          }
          put_pair(t.dps + i * DELTA_WIDE + j, dp[0], dp[1]);
          put_pair(t.dbs + i * DELTA_WIDE + j, db[0], db[1]);
        }
      }
      with_later(qk);
    } else {
      zero(qk);
    }
    if (lane.row == 0)
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) t.strips[m0 / 16 * DELTA_CHUNK + n0 + 8 * n + lane.column + e] = qk[n][e];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sum = row_sum(along[i]);
      if (lane.column == 0) t.yb[half_of * DELTA_CHUNK + m0 + lane.row + 8 * i] = sum;
    }
    __syncthreads();
    // The pairs with i >= t > j: qk has the sums over i in the warp's rows, the strips have the
    // sums in the rows below.
    {
      float sum[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int j = n0 + 8 * n + lane.column + e;
          float below = 0;
#pragma unroll
          for (int strip = 3; strip > 0; strip--) below += strip > m0 / 16 ? t.strips[strip * DELTA_CHUNK + j] : 0;
#pragma unroll
          for (int half = 0; half < 2; half++)
            if (lower && j < m0 + lane.row + 8 * half) sum[half] += qk[n][2 * half + e] + below;
        }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float all = row_sum(sum[half]);
        if (lane.column == 0) t.crossing[half_of * DELTA_CHUNK + m0 + lane.row + 8 * half] = all;
      }
    }

    // 64 columns of q and k at a time: W·Sᵀ, Y·Sᵀ and X·Dᵀ, their contributions to the decays'
    // gradients, and the gradients of q and k.
    float with_s_d = 0, sum_q[2] = {0, 0}, sum_k[2] = {0, 0}, sum_d[2] = {0, 0};
    for (int k0 = 0; k0 < a.dim_k; k0 += 64) {
      float yk[4][4];
      zero(p);  // W·Sᵀ, then dq
      zero(yk); // Y·Sᵀ
      zero(b);  // X·Dᵀ, then dk
      for (int v0 = 0; v0 < a.dim_v; v0 += SLICE) {
        const int at = resident ? v0 : 0, depth = up16((int)least(SLICE, a.dim_v - v0));
        __syncthreads(); // all threads have read the previous tiles
        if (!ON_CORES<T> || k0 + v0 > 0) copy_states(k0, v0);
        if (!resident) copy_values(v0);
        arrive();
        if (has_s && has_d)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int from = ((int)threadIdx.x / 8 + i * (DELTA_THREADS / 8)) * SSTEP + (int)threadIdx.x % 8 * UNIT;
#pragma unroll
            for (int e = 0; e < UNIT; e += 2) {
              const float2 x = pair_at(t.ss + from + e), y = pair_at(t.ds + from + e);
              with_s_d = madd(x.y, y.y, madd(x.x, y.x, with_s_d));
            }
          }
        if (!active) continue;
        if (has_s) {
          tile_product<true, ALONG>(p, t.ws + m0 * vstep + at, vstep, t.ss + s0, SSTEP, depth);
          tile_product<true, ALONG>(yk, t.ys + m0 * vstep + at, vstep, t.ss + s0, SSTEP, depth);
        }
        if (has_d) tile_product<true, ALONG>(b, t.xs + m0 * vstep + at, vstep, t.ds + s0, SSTEP, depth);
      }
      __syncthreads();
      copy_keys(k0, t.qs, t.ks);
      arrive();
      if (!active) continue;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = m0 + lane.row + 8 * half;
        const float e = t.es[i], by_q = a.scale * e * t.uq[i], by_k = -t.bs[i] * e * t.uk[i], by_d = t.fs[i] * t.uk[i];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const int at = i * KSTEP + n0 + 8 * n + lane.column;
          const float2 q = pair_at(t.qs + at), k = pair_at(t.ks + at);
          float *dq = &p[n][2 * half], *in_s = &yk[n][2 * half], *in_d = &b[n][2 * half];
          sum_q[half] = madd(dq[1], q.y, madd(dq[0], q.x, sum_q[half]));
          sum_k[half] = madd(in_s[1], k.y, madd(in_s[0], k.x, sum_k[half]));
          sum_d[half] = madd(in_d[1], k.y, madd(in_d[0], k.x, sum_d[half]));
#pragma unroll
          for (int x = 0; x < 2; x++) dq[x] *= by_q, in_d[x] = madd(by_d, in_d[x], by_k * in_s[x]);
        }
      }
      const T *dp = t.dps + m0 * DELTA_WIDE, *db = t.dbs + m0 * DELTA_WIDE, *ks = t.ks + n0;
      tile_product<true, false>(p, dp, DELTA_WIDE, ks, KSTEP, m0 + 16);
      tile_product<false, false>(b, dp + m0, DELTA_WIDE, t.qs + m0 * KSTEP + n0, KSTEP, rows - m0);
      tile_product<true, false>(b, db, DELTA_WIDE, ks, KSTEP, m0 + 16);
      tile_product<false, false>(b, db + m0, DELTA_WIDE, ks + m0 * KSTEP, KSTEP, rows - m0);
      const int left = a.dim_k - k0 - n0;
      const bool vectors = a.dim_k % UNIT == 0;
      auto to = [&](void *of) {
        return [&, of](int row) { return a.rows_of<T>(of, a.dim_k, head, c.token + m0 + row) + k0 + n0; };
      };
      store_results(p, c.rows - m0, left, vectors, to(a.grad_q), T());
      store_results(b, c.rows - m0, left, vectors, to(a.grad_k), T());
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float x = row_sum(sum_q[i]), y = row_sum(sum_k[i]), z = row_sum(sum_d[i]);
      const int r = m0 + lane.row + 8 * i;
      if (lane.column == 0) {
        const int at = half_of * DELTA_CHUNK + r;
        t.with_q[at] = x * t.uq[r], t.with_k[at] = y * t.uk[r], t.with_d[at] = z * t.uk[r];
      }
    }
    // the barrier of block_sum also orders the writes above
    const float states = block_sum(with_s_d, t.room);
    const int line = (int)threadIdx.x;
    if (line >= 32) continue;
    // The first warp has two rows a lane. It sums the rows from t on, and those before t.
    float after[2], before[2];
    auto both = [](const float *x, int r) { return x[r] + x[DELTA_CHUNK + r]; };
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = 2 * line + i;
      const bool there = r < c.rows;
      after[i] = there ? t.es[r] * (a.scale * both(t.with_q, r) - t.bs[r] * both(t.with_k, r)) : 0;
      before[i] = there ? t.fs[r] * both(t.with_d, r) : 0;
    }
    float later = after[0] + after[1], earlier = before[0] + before[1];
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const float x = __shfl_down_sync(0xffffffffu, later, by), y = __shfl_up_sync(0xffffffffu, earlier, by);
      if (line + by < 32) later += x;
      if (line >= by) earlier += y;
    }
    const float x = __shfl_down_sync(0xffffffffu, later, 1), y = __shfl_up_sync(0xffffffffu, earlier, 1);
    const float next = line < 31 ? x : 0, previous = line > 0 ? y : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int r = 2 * line + i;
      if (r >= c.rows) continue;
      const int64_t token = c.token + r;
      const float from = i == 0 ? later : after[1] + next, until = i == 0 ? previous : previous + before[0];
      a.dg.data[token * a.dg.token + head * a.dg.head] = both(t.crossing, r) + from + until + t.es[c.rows - 1] * states;
      a.dbeta.data[token * a.dbeta.token + head * a.dbeta.head] = t.yv[r] - t.es[r] * both(t.with_k, r) + both(t.yb, r);
    }
  }
}

// delta_finish computes the gradients of q and k through the L2 norm, from delta_gradients'
// results, sums them over a key head's value heads in order, and rounds them. Half a warp has a
// row, a lane PARTS units of 16 bytes. The gradient of a row of one feature is parallel to the row:
// the remainder after the subtraction, 1 - x² = DELTA_EPS·unit² of it, is smaller than its rounding
// error, so it is computed directly.
//
// The row and the results of AHEAD value heads are loaded before the first of them is used: 48
// bytes a thread, 48 KB on a multiprocessor with four blocks.
template <typename T, int PARTS> __global__ void __launch_bounds__(DELTA_THREADS, PARTS == 1 ? 4 : 2)
    delta_finish_kernel(DeltaCall a) {
  constexpr int N = Wide<T>::LANES, AHEAD = 2;
  typedef Word<N, T> Units[PARTS];
  const DeltaRows rows;
  const int64_t heads = a.per_head ? a.value_heads : a.key_heads, all = a.tokens * heads;
  const bool vectors = a.dim_k % N == 0, one = a.normed && a.dim_k == 1;  // vectors: of delta_gradients' results
  for (int64_t first = rows.first; first < 2 * all; first += rows.step) { // both halves of a warp take part
    const int64_t w = first + rows.half;
    const bool there = w < 2 * all, is_q = w < all;
    const int64_t at = !there ? 0 : is_q ? w : w - all, token = a.token0 + at / heads, out = at % heads;
    const int64_t key = a.per_head ? a.key_head[out] : out, lo = a.per_head ? out : a.value_first[out];
    const int own = !there       ? 0
                    : a.per_head ? 1
                                 : (int)(a.value_first[out + 1] - lo),
              both = (int)most(own, __shfl_xor_sync(0xffffffffu, own, DeltaRows::LANES)); // the most of both halves
    const DeltaView &of = is_q ? a.q : a.k, &to = is_q ? a.dq : a.dk;
    auto column = [&](int i) { return (rows.lane + DeltaRows::LANES * i) * N; };
    auto fetch = [&](const T *from, bool has, bool wide, Units &units) {
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        const int left = has ? a.dim_k - column(i) : 0;
        load_flat_word<N>(from + column(i), left, wide, units[i]);
      }
    };
    const float unit = a.normed ? (is_q ? a.unit_q : a.unit_k)[a.row(key, token)] : 1;
    Units row, next[AHEAD];
    fetch(of.row<T>(token, key), there && a.normed && !one, of.vectors, row);
    const T *from = a.rows_of<T>(is_q ? a.grad_q : a.grad_k, a.dim_k, lo, token);
    auto fetch_heads = [&](int h) {
#pragma unroll
      for (int j = 0; j < AHEAD; j++, from += a.rows * a.dim_k) fetch(from, h + j < own, vectors, next[j]);
    };
    fetch_heads(0);
    float sum[PARTS][N], x[PARTS][N]; // -0 + y is y, also if y is -0
#pragma unroll
    for (int i = 0; i < PARTS; i++)
#pragma unroll
      for (int e = 0; e < N; e++) sum[i][e] = own > 0 ? -0.0f : 0.0f, x[i][e] = in_word<T>(row[i], e) * unit;
#pragma unroll 1
    for (int h = 0; h < both; h += AHEAD) {
#pragma unroll
      for (int j = 0; j < AHEAD; j++) {
        if (h + j >= both) break;
        float g[PARTS][N], along = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++)
#pragma unroll
          for (int e = 0; e < N; e++) {
            g[i][e] = in_word<T>(next[j][i], e);
            along = madd(x[i][e], g[i][e], along);
          }
        along = a.normed ? group_sum<DeltaRows::LANES>(along, nullptr) : 0;
        if (h + j >= own) continue;
#pragma unroll
        for (int i = 0; i < PARTS; i++)
#pragma unroll
          for (int e = 0; e < N; e++) {
            const bool parallel = one && i + e == 0; // the other features of such a row do not exist
            sum[i][e] += widen(narrow<T>(parallel ? DELTA_EPS * unit * unit * g[i][e] : g[i][e] - x[i][e] * along));
          }
      }
      if (h + AHEAD < both) fetch_heads(h + AHEAD);
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++)
      if (there && column(i) < a.dim_k)
        store_flat<N>(to.row<T>(token, out) + column(i), a.dim_k - column(i), to.vectors, sum[i]);
  }
}

const DeltaKernel delta_gradients[2] = {delta_gradients_kernel<float>, delta_gradients_kernel<bf16>};
const DeltaKernel delta_finish[3] = {delta_finish_kernel<float, 4>, delta_finish_kernel<bf16, 1>,
                                     delta_finish_kernel<bf16, 2>};
