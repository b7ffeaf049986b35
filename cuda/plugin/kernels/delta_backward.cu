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

// delta_scan_back: a block has a slice of the columns of the state's gradient, and loops over the
// chunks of a document from last to first. It writes the gradients at seams, and Y.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, 1) delta_scan_back_kernel(DeltaCall a) {
  constexpr int STEP = DELTA_SLICE + 4;
  const int step = up32(a.dim_k) + 8, square = a.chunk + 4;
  SHARED(Word, shared);
  Word *ks = shared, *ss = ks + a.chunk * step, *ts = ss + up16(a.dim_k) * STEP, *ws = ts + a.chunk * (a.chunk + 8),
       *ys = ws + a.chunk * STEP;
  float *es = (float *)(ys + a.chunk * STEP), *fk = es + a.chunk, *bek = fk + a.chunk;
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 16;
  const int slices = (a.dim_v + DELTA_SLICE - 1) / DELTA_SLICE;
  for (int64_t w = blockIdx.x; w < a.panel_documents * a.value_heads * slices; w += gridDim.x) {
    const int64_t head = w / slices % a.value_heads, document = a.document0 + w / slices / a.value_heads,
                  key = a.key_head[head], id = a.document[document];
    const int c0 = (int)(w % slices) * DELTA_SLICE;
    const int64_t behind = id - (a.all_documents - a.states_out);
    const DeltaRange range(a, document);
    DeltaSlice s(a.dim_k, a.dim_v, c0);
    if (!range.ends) s.load(a.state_of(a.dcarried_in, 0, head));
    else if (behind >= 0 && a.dstate_out) s.load(a.state_of(a.dstate_out, behind, head));
    for (int64_t i = range.hi - 1; i >= range.lo; i--) {
      const DeltaChunk c = delta_chunk_at(a.start, a.chunks_before, document, i, a.chunk);
      const int rows = up16(c.rows);
      const bool active = m0 < rows;
      if (!c.last && a.dstates) s.store(a.at_seam(a.dstates, head, c.seam));
      __syncthreads(); // all threads have read the following chunk
      s.template words<T>(ss, STEP);
      const int r = (int)threadIdx.x;
      const DeltaFactors f(a, c, head, key, r);
      fill_view<T, DELTA_SLICE>(ws, STEP, a.dout, c.token, head, c0, c.rows, rows, AsItIs());
      fill_chunk<T>(ks, step, ts, square, a, a.q, key, a.scores + a.row(head, c.token) * a.chunk, c, rows,
                    [&](int row) {
                      return a.scale * a.decay[a.row(head, c.token + row)].z *
                             (a.unit_q ? a.unit_q[a.row(key, c.token + row)] : 1);
                    });
      if (r < a.chunk) es[r] = f.decay.z, fk[r] = f.decay.w * f.unit, bek[r] = f.beta * f.decay.z * f.unit;
      __syncthreads();
      float x[2][4], y[2][4];
      zero(x);
      if (active)
        product<T, false, true, false, false>(x, ts + m0 * square + m0, square, ws + m0 * STEP + n0, STEP, rows - m0);
      s.template add<T, false, true>(es[c.rows - 1], ks, step, ws, STEP, rows);
      __syncthreads();
      fill_chunk<T>(ks, step, ts, square, a, a.k, key, a.solve_row(head, c.token), c, rows, [](int) { return 1.0f; });
      __syncthreads();
      if (active) {
        zero(y);
        product<T, true, false, true, false>(y, ks + m0 * step, step, ss + n0, STEP, up16(a.dim_k));
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int row = m0 + lane.row + e / 2 * 8;
            ws[row * STEP + n0 + 8 * n + lane.column + e % 2] = to_word<T>(madd(fk[row], y[n][e], x[n][e]));
          }
      }
      __syncthreads();
      if (active) {
        zero(y);
        product<T, false, false, false, false>(y, ts + m0 * square + m0, square, ws + m0 * STEP + n0, STEP, rows - m0);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int row = m0 + lane.row + 8 * half, column = n0 + 8 * n + lane.column;
            if (a.y && row < c.rows && c0 + column < a.dim_v)
              store_two(a.y + a.row(head, c.token + row) * a.dim_v + c0 + column, a.dim_v - c0 - column,
                        a.dim_v % 2 == 0, y[n][2 * half], y[n][2 * half + 1]);
#pragma unroll
            for (int e = 0; e < 2; e++) ys[row * STEP + column + e] = to_word<T>(-bek[row] * y[n][2 * half + e]);
          }
      }
      __syncthreads();
      s.template add<T, true, false>(1, ks, step, ys, STEP, rows);
    }
    if (!range.begins) s.store(a.state_of(a.dcarried_out, 0, head));
    else if (id < a.states_in && a.dstate_in) s.store(a.state_of(a.dstate_in, id, head));
  }
}

// row_sum returns the sum over the four lanes that have a row.
static __device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// delta_gradients computes the gradients of a chunk and head. The gradients of q and k are those
// before the L2 norm and before the sum over value heads.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, 1) delta_gradients_kernel(DeltaCall a) {
  constexpr int STEP = DELTA_CHUNK + 4, TILE = DELTA_CHUNK * DELTA_NARROW, PAIRS = DELTA_CHUNK + 1;
  SHARED(Word, shared);
  Word *dps = shared, *dbs = dps + DELTA_CHUNK * DELTA_WIDE, *ws = dbs + DELTA_CHUNK * DELTA_WIDE, *ys = ws + TILE,
       *xs = ys + TILE, *ss = xs + TILE, *ds = ss + TILE;
  Word *qs = ws, *ks = qs + DELTA_CHUNK * STEP; // reuse the memory from ws on
  float *pairs = (float *)ws;                   // reuses ws: [64][PAIRS]
  float2 *sums = (float2 *)(ds + TILE);
  float *es = (float *)(sums + DELTA_CHUNK), *fs = es + DELTA_CHUNK, *bs = fs + DELTA_CHUNK, *yv = bs + DELTA_CHUNK;
  // one entry for each half of the columns
  float *yb = yv + DELTA_CHUNK, *with_q = yb + 2 * DELTA_CHUNK, *with_k = with_q + 2 * DELTA_CHUNK,
        *with_d = with_k + 2 * DELTA_CHUNK;
  float *crossing = with_d + 2 * DELTA_CHUNK, *room = crossing + DELTA_CHUNK;
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, half_of = warp / 4, n0 = half_of * 32;
  for (int64_t w = blockIdx.x; w < a.chunks * a.value_heads; w += gridDim.x) {
    const int64_t head = w % a.value_heads, key = a.key_head[head];
    const DeltaChunk c = a.find(w / a.value_heads);
    const int64_t id = a.document[c.document], behind = id - (a.all_documents - a.states_out);
    const int rows = up16(c.rows);
    const bool active = m0 < rows;
    const float *s = !c.first                         ? a.at_seam(a.states, head, c.seam - 1)
                     : id < a.states_in && a.state_in ? a.state_of(a.state_in, id, head)
                                                      : nullptr;
    const float *d = !c.last                       ? a.at_seam(a.dstates, head, c.seam)
                     : behind >= 0 && a.dstate_out ? a.state_of(a.dstate_out, behind, head)
                                                   : nullptr;
    __syncthreads();
    for (int r = (int)threadIdx.x; r < DELTA_CHUNK; r += DELTA_THREADS) {
      const bool there = r < c.rows;
      const float4 g = there ? a.decay[a.row(head, c.token + r)] : make_float4(0, 0, 0, 0);
      sums[r] = make_float2(g.x, g.y);
      es[r] = g.z, fs[r] = g.w;
      bs[r] = there ? a.beta.data[(c.token + r) * a.beta.token + head * a.beta.head] : 0;
    }

    // W·Xᵀ and Y·Xᵀ; dv, and Y·v.
    float p[4][4], b[4][4], with_v[2] = {0, 0};
    zero(p);
    zero(b);
    for (int v0 = 0; v0 < a.dim_v; v0 += DELTA_SLICE) {
      __syncthreads();
      fill_view<T, DELTA_SLICE>(ws, DELTA_NARROW, a.dout, c.token, head, v0, c.rows, rows, AsItIs());
      fill_rows<T, DELTA_SLICE>(xs, DELTA_NARROW, a.x + a.row(head, c.token) * a.dim_v, a.dim_v, v0, c.rows, rows,
                                AsItIs());
      fill_rows<T, DELTA_SLICE>(
          ys, DELTA_NARROW, a.y + a.row(head, c.token) * a.dim_v, a.dim_v, v0, c.rows, rows,
          [&](int r, int column, float (&y)[4]) {
            const int64_t token = c.token + r, left = a.dim_v - v0 - column;
            float v[4];
            load_flat<4>((const T *)a.v.data + token * a.v.token + head * a.v.head + v0 + column, left, a.v.wide, v);
            const float sum = (y[0] * v[0] + y[1] * v[1]) + (y[2] * v[2] + y[3] * v[3]);
            const bool second = r >= DELTA_THREADS / 8; // a thread has rows r and r + 32
            with_v[0] += second ? 0 : sum;
            with_v[1] += second ? sum : 0;
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = bs[r] * y[i];
            store_flat<4>((T *)a.dv.data + token * a.dv.token + head * a.dv.head + v0 + column, left, a.dv.wide, v);
          });
      __syncthreads();
      if (!active || n0 > m0) continue;
      product<T, true, false, true, true>(p, ws + m0 * DELTA_NARROW, DELTA_NARROW, xs + n0 * DELTA_NARROW, DELTA_NARROW,
                                          DELTA_SLICE);
      product<T, false, false, true, true>(b, ys + m0 * DELTA_NARROW, DELTA_NARROW, xs + n0 * DELTA_NARROW,
                                           DELTA_NARROW, DELTA_SLICE);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
      for (int by = 1; by < 8; by *= 2) with_v[i] += __shfl_xor_sync(0xffffffffu, with_v[i], by);
      if (threadIdx.x % 8 == 0) yv[threadIdx.x / 8 + 32 * i] = with_v[i];
    }
    __syncthreads();

    // dP, dB + dBᵀ, and their contributions to the decays' gradients: `pairs`, below the diagonal.
    if (active) {
      float along[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int i = m0 + lane.row + e / 2 * 8, j = n0 + 8 * n + lane.column + e % 2;
          float dp = 0, db = 0, pair = 0;
          if (j <= i && i < c.rows) {
            const int64_t at = a.row(head, c.token + i) * a.chunk + j;
            const float decay = expf((sums[i].x - sums[j].x) + (sums[i].y - sums[j].y));
            dp = a.scale * decay * p[n][e];
            if (j < i) {
              const float in_b = -b[n][e] * a.keys_product[at];
              along[e / 2] += in_b;
              db = -bs[i] * decay * b[n][e];
              pair = madd(p[n][e], a.scores[at], bs[i] * in_b);
            }
          }
          dps[i * DELTA_WIDE + j] = to_word<T>(dp);
          pairs[i * PAIRS + j] = pair;
          if (j < i) dbs[i * DELTA_WIDE + j] = dbs[j * DELTA_WIDE + i] = to_word<T>(db);
          if (j == i) dbs[i * DELTA_WIDE + j] = 0;
        }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float sum = row_sum(along[i]);
        if (lane.column == 0) yb[half_of * DELTA_CHUNK + m0 + lane.row + 8 * i] = sum;
      }
    }
    __syncthreads();
    // The pairs with i >= t > j: first sums over i, down the columns, then over j.
    if ((int)threadIdx.x < c.rows) {
      const int j = (int)threadIdx.x;
      float sum = 0;
      for (int i = c.rows - 1; i > j; i--) pairs[i * PAIRS + j] = sum += pairs[i * PAIRS + j];
    }
    __syncthreads();
    if ((int)threadIdx.x < c.rows) {
      const int t = (int)threadIdx.x;
      float sum = 0;
      for (int j = 0; j < t; j++) sum += pairs[t * PAIRS + j];
      crossing[t] = sum;
    }

    // 64 columns of q and k at a time: W·Sᵀ, Y·Sᵀ and X·Dᵀ, their contributions to the decays'
    // gradients, and the gradients of q and k.
    float with_s_d = 0, sum_q[2] = {0, 0}, sum_k[2] = {0, 0}, sum_d[2] = {0, 0};
    for (int k0 = 0; k0 < a.dim_k; k0 += 64) {
      const int columns = (int)least(64, a.dim_k - k0);
      float yk[4][4];
      zero(p);  // W·Sᵀ, then dq
      zero(yk); // Y·Sᵀ
      zero(b);  // X·Dᵀ, then dk
      for (int v0 = 0; v0 < a.dim_v; v0 += DELTA_SLICE) {
        __syncthreads();
        fill_view<T, DELTA_SLICE>(ws, DELTA_NARROW, a.dout, c.token, head, v0, c.rows, rows, AsItIs());
        fill_rows<T, DELTA_SLICE>(xs, DELTA_NARROW, a.x + a.row(head, c.token) * a.dim_v, a.dim_v, v0, c.rows, rows,
                                  AsItIs());
        fill_rows<T, DELTA_SLICE>(ys, DELTA_NARROW, a.y + a.row(head, c.token) * a.dim_v, a.dim_v, v0, c.rows, rows,
                                  AsItIs());
        if (s) {
          fill_rows<T, DELTA_SLICE>(ss, DELTA_NARROW, s + (int64_t)k0 * a.dim_v, a.dim_v, v0, columns, 64,
                                    [&](int r, int column, float (&x)[4]) {
                                      if (!d) return;
                                      float y[4];
                                      const float *from = d + (int64_t)(k0 + r) * a.dim_v + v0 + column;
                                      load_flat<4>(from, a.dim_v - v0 - column,
                                                   a.dim_v % 4 == 0 && (uintptr_t)d % 16 == 0, y);
                                      with_s_d += (x[0] * y[0] + x[1] * y[1]) + (x[2] * y[2] + x[3] * y[3]);
                                    });
        }
        if (d)
          fill_rows<T, DELTA_SLICE>(ds, DELTA_NARROW, d + (int64_t)k0 * a.dim_v, a.dim_v, v0, columns, 64, AsItIs());
        __syncthreads();
        if (!active) continue;
        if (s) {
          product<T, true, false, true, true>(p, ws + m0 * DELTA_NARROW, DELTA_NARROW, ss + n0 * DELTA_NARROW,
                                              DELTA_NARROW, DELTA_SLICE);
          product<T, false, false, true, true>(yk, ys + m0 * DELTA_NARROW, DELTA_NARROW, ss + n0 * DELTA_NARROW,
                                               DELTA_NARROW, DELTA_SLICE);
        }
        if (d)
          product<T, false, false, true, true>(b, xs + m0 * DELTA_NARROW, DELTA_NARROW, ds + n0 * DELTA_NARROW,
                                               DELTA_NARROW, DELTA_SLICE);
      }
      __syncthreads();
      auto unit = [&](const float *factors) {
        return [&, factors](int r, int, float (&x)[4]) {
          const float by = factors ? factors[a.row(key, c.token + r)] : 1;
#pragma unroll
          for (int i = 0; i < 4; i++) x[i] *= by;
        };
      };
      fill_view<T, 64>(qs, STEP, a.q, c.token, key, k0, c.rows, rows, unit(a.unit_q));
      fill_view<T, 64>(ks, STEP, a.k, c.token, key, k0, c.rows, rows, unit(a.unit_k));
      __syncthreads();
      if (!active) continue;
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int i = m0 + lane.row + e / 2 * 8, at = i * STEP + n0 + 8 * n + lane.column + e % 2;
          const float q = of_word<T>(qs[at]), k = of_word<T>(ks[at]);
          sum_q[e / 2] = madd(p[n][e], q, sum_q[e / 2]);
          sum_k[e / 2] = madd(yk[n][e], k, sum_k[e / 2]);
          sum_d[e / 2] = madd(b[n][e], k, sum_d[e / 2]);
          p[n][e] *= a.scale * es[i];
          b[n][e] = madd(fs[i], b[n][e], -bs[i] * es[i] * yk[n][e]);
        }
      product<T, false, false, true, false>(p, dps + m0 * DELTA_WIDE, DELTA_WIDE, ks + n0, STEP, m0 + 16);
      product<T, false, false, false, false>(b, dps + m0 * DELTA_WIDE + m0, DELTA_WIDE, qs + m0 * STEP + n0, STEP,
                                             rows - m0);
      product<T, false, false, true, false>(b, dbs + m0 * DELTA_WIDE, DELTA_WIDE, ks + n0, STEP, rows);
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = m0 + lane.row + 8 * half, column = k0 + n0 + 8 * n + lane.column, left = a.dim_k - column;
          if (row >= c.rows || left <= 0) continue;
          const int64_t at = a.row(head, c.token + row) * a.dim_k + column;
          store_two(a.grad_q + at, left, a.dim_k % 2 == 0, p[n][2 * half], p[n][2 * half + 1]);
          store_two(a.grad_k + at, left, a.dim_k % 2 == 0, b[n][2 * half], b[n][2 * half + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float x = row_sum(sum_q[i]), y = row_sum(sum_k[i]), z = row_sum(sum_d[i]);
      if (lane.column == 0) {
        const int at = half_of * DELTA_CHUNK + m0 + lane.row + 8 * i;
        with_q[at] = x, with_k[at] = y, with_d[at] = z;
      }
    }
    // the barrier of block_sum also orders the writes above
    const float states = block_sum(with_s_d, room);
    if ((int)threadIdx.x < c.rows) {
      const int t = (int)threadIdx.x;
      const int64_t token = c.token + t;
      auto both = [](const float *x, int r) { return x[r] + x[DELTA_CHUNK + r]; };
      float after = 0, before = 0;
      for (int r = c.rows - 1; r >= t; r--) after += es[r] * (a.scale * both(with_q, r) - bs[r] * both(with_k, r));
      for (int r = 0; r < t; r++) before += fs[r] * both(with_d, r);
      a.dg.data[token * a.dg.token + head * a.dg.head] = crossing[t] + after + before + es[c.rows - 1] * states;
      a.dbeta.data[token * a.dbeta.token + head * a.dbeta.head] = yv[t] - es[t] * both(with_k, t) + both(yb, t);
    }
  }
}

// delta_finish computes the gradients of q and k through the L2 norm, sums them over a key head's
// value heads in order, and rounds them. A warp has a row. The gradient of a row of one feature is
// parallel to the row: the remainder after the subtraction, 1 - x² = DELTA_EPS·unit² of it, is
// smaller than its rounding error, so it is computed directly.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS) delta_finish_kernel(DeltaCall a) {
  constexpr int PARTS = DELTA_HEAD / 32;
  const int lane = (int)threadIdx.x % 32;
  const int64_t heads = a.per_head ? a.value_heads : a.key_heads, all = a.tokens * heads;
  for (int64_t w = (int64_t)blockIdx.x * (DELTA_THREADS / 32) + threadIdx.x / 32; w < 2 * all;
       w += (int64_t)gridDim.x * (DELTA_THREADS / 32)) {
    const bool is_q = w < all;
    const int64_t at = is_q ? w : w - all, token = a.token0 + at / heads, out = at % heads;
    const int64_t key = a.per_head ? a.key_head[out] : out, lo = a.per_head ? out : a.value_first[out],
                  hi = a.per_head ? out + 1 : a.value_first[out + 1];
    const DeltaView &of = is_q ? a.q : a.k, &to = is_q ? a.dq : a.dk;
    const float unit = a.normed ? (is_q ? a.unit_q : a.unit_k)[a.row(key, token)] : 1;
    const bool one = a.normed && a.dim_k == 1;
    const float by = one ? unit * DELTA_EPS * unit * unit : unit;
    float sum[PARTS], x[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const int c = lane + 32 * i;
      sum[i] = 0;
      x[i] = a.normed && !one && c < a.dim_k ? unit * widen(((const T *)of.data)[token * of.token + key * of.head + c])
                                             : 0;
    }
    for (int64_t h = lo; h < hi; h++) {
      const float *from = (is_q ? a.grad_q : a.grad_k) + a.row(h, token) * a.dim_k;
      float g[PARTS], along = 0;
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        const int c = lane + 32 * i;
        g[i] = c < a.dim_k ? from[c] : 0;
        along = madd(x[i], g[i], along);
      }
      along = a.normed ? warp_sum(along) : 0;
#pragma unroll
      for (int i = 0; i < PARTS; i++) {
        const float y = widen(narrow<T>(by * (g[i] - x[i] * along)));
        sum[i] = h == lo ? y : sum[i] + y;
      }
    }
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
      const int c = lane + 32 * i;
      if (c < a.dim_k) ((T *)to.data)[token * to.token + out * to.head + c] = narrow<T>(sum[i]);
    }
  }
}

const DeltaKernel delta_scan_back[2] = {delta_scan_back_kernel<float>, delta_scan_back_kernel<bf16>};
const DeltaKernel delta_gradients[2] = {delta_gradients_kernel<float>, delta_gradients_kernel<bf16>};
const DeltaKernel delta_finish[2] = {delta_finish_kernel<float>, delta_finish_kernel<bf16>};
