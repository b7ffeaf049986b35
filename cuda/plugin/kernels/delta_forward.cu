// The gated delta rule, forward pass (formulas in delta.h), and the transfer of a state over a
// shard of a sequence (DeltaState).
#include "delta.h"

// delta_norms computes the factors 1 / |row| of keys and queries. A warp has a row.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS) delta_norms_kernel(DeltaCall a) {
  const int lane = (int)threadIdx.x % 32;
  const int64_t rows = a.key_heads * a.tokens, all = a.q.data ? 2 * rows : rows;
  for (int64_t w = (int64_t)blockIdx.x * (DELTA_THREADS / 32) + threadIdx.x / 32; w < all;
       w += (int64_t)gridDim.x * (DELTA_THREADS / 32)) {
    const DeltaView &x = w < rows ? a.k : a.q;
    const int64_t at = w < rows ? w : w - rows, key = at / a.tokens, token = a.token0 + at % a.tokens;
    const T *p = (const T *)x.data + token * x.token + key * x.head;
    float sum = 0;
    for (int c = lane; c < x.width; c += 32) {
      const float v = widen(p[c]);
      sum = madd(v, v, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) (w < rows ? a.unit_k : a.unit_q)[a.row(key, token)] = 1 / sqrtf(sum + DELTA_EPS);
  }
}

// Decays below DELTA_LOWEST are replaced by it. Their exp is zero, and their sums stay finite. NaN
// is kept.
constexpr float DELTA_LOWEST = -256;

// delta_gates sums the decays of a chunk, in F64, by the first warp. Rounding errors of the sums
// would become errors of their differences, the decays.
static __device__ __forceinline__ void delta_gates(const DeltaCall &a, const DeltaChunk &c, int64_t head, float2 *sums,
                                                   float *beta) {
  const int lane = (int)threadIdx.x;
  if (lane >= 32) return;
  double g[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = 2 * lane + i;
    const bool there = r < c.rows;
    const float x = there ? a.g.data[(c.token + r) * a.g.token + head * a.g.head] : 0;
    g[i] = x < DELTA_LOWEST ? DELTA_LOWEST : x;
    beta[r] = there ? a.beta.data[(c.token + r) * a.beta.token + head * a.beta.head] : 0;
  }
  double sum = g[0] + g[1];
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const double before = __shfl_up_sync(0xffffffffu, sum, by);
    if (lane >= by) sum += before;
  }
  const double end = __shfl_sync(0xffffffffu, sum, 31), both[2] = {sum - g[1], sum};
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int r = 2 * lane + i;
    const float hi = (float)both[i], lo = (float)(both[i] - hi);
    sums[r] = make_float2(hi, lo);
    if (r < c.rows) a.decay[a.row(head, c.token + r)] = make_float4(hi, lo, expf(hi), expf((float)(end - both[i])));
  }
}

// delta_invert computes T = (1 + A)⁻¹ for A [64][DELTA_WIDE], strictly lower triangular, 16 rows at
// a time: first the contribution of the rows above, then one column a thread. `rows` is a multiple
// of 16. Elements of T above the diagonal blocks are not written.
static __device__ __forceinline__ void delta_invert(const float *m, float *t, int rows) {
  const int r = (int)threadIdx.x / 16, x = (int)threadIdx.x % 16;
  for (int b = 0; b < rows; b += 16) {
    for (int c0 = 0; c0 <= b; c0 += 16) {
      const int c = c0 + x;
      float sum = c == b + r ? 1.0f : 0.0f;
      for (int j = c0; j < b; j++) sum = madd(-m[(b + r) * DELTA_WIDE + j], t[j * DELTA_WIDE + c], sum);
      t[(b + r) * DELTA_WIDE + c] = sum;
    }
    __syncthreads();
    const int c = (int)threadIdx.x;
    if (c < b + 16) {
      float column[16];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        column[i] = t[(b + i) * DELTA_WIDE + c];
#pragma unroll
        for (int j = 0; j < i; j++) column[i] = madd(-m[(b + i) * DELTA_WIDE + b + j], column[j], column[i]);
        t[(b + i) * DELTA_WIDE + c] = column[i];
      }
    }
    __syncthreads();
  }
}

// delta_prepare computes B, T and P of a chunk and head; the pass determines which of them.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, 2) delta_prepare_kernel(DeltaCall a) {
  SHARED(Word, shared);
  Word *ks = shared, *qs = ks + DELTA_CHUNK * DELTA_WIDE;
  float *m = (float *)(qs + DELTA_CHUNK * DELTA_WIDE), *inverse = (float *)ks, *beta = m + DELTA_CHUNK * DELTA_WIDE;
  float2 *sums = (float2 *)(beta + DELTA_CHUNK);
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 32;
  for (int64_t w = blockIdx.x; w < a.chunks * a.value_heads; w += gridDim.x) {
    const int64_t head = w % a.value_heads, key = a.key_head[head];
    const DeltaChunk c = a.find(w / a.value_heads);
    const int rows = up16(c.rows);
    float kk[4][4], qk[4][4];
    zero(kk);
    zero(qk);
    __syncthreads();
    delta_gates(a, c, head, sums, beta);
    for (int c0 = 0; c0 < a.dim_k; c0 += 64) {
      const int depth = up16((int)least(64, a.dim_k - c0));
      if (c0 > 0) __syncthreads();
      fill_view<T, 64>(ks, DELTA_WIDE, a.k, c.token, key, c0, c.rows, rows, AsItIs());
      if (a.scores) fill_view<T, 64>(qs, DELTA_WIDE, a.q, c.token, key, c0, c.rows, rows, AsItIs());
      __syncthreads();
      if (m0 >= rows || n0 > m0) continue;
      product<T, true, true, true, true>(kk, ks + m0 * DELTA_WIDE, DELTA_WIDE, ks + n0 * DELTA_WIDE, DELTA_WIDE, depth);
      if (a.scores)
        product<T, true, true, true, true>(qk, qs + m0 * DELTA_WIDE, DELTA_WIDE, ks + n0 * DELTA_WIDE, DELTA_WIDE,
                                           depth);
    }
    if (m0 < rows) {
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int i = m0 + lane.row + e / 2 * 8, j = n0 + 8 * n + lane.column + e % 2;
          if (j >= a.chunk) continue;
          float b = 0, p = 0;
          if (i < c.rows && j <= i) {
            const float decay = expf((sums[i].x - sums[j].x) + (sums[i].y - sums[j].y));
            const int64_t at = a.row(key, c.token);
            const float by = a.unit_k ? a.unit_k[at + j] : 1;
            if (j < i) b = kk[n][e] * (a.unit_k ? a.unit_k[at + i] * by : 1) * decay;
            if (a.scores) p = qk[n][e] * (a.unit_q ? a.unit_q[at + i] * by : 1) * decay * a.scale;
          }
          if (i < c.rows) {
            const int64_t at = a.row(head, c.token + i) * a.chunk + j;
            if (a.scores) a.scores[at] = p;
            if (a.keys_product) a.keys_product[at] = b;
          }
          m[i * DELTA_WIDE + j] = b * beta[i];
        }
    }
    __syncthreads();
    if (a.solved) continue;
    delta_invert(m, inverse, rows);
    for (int at = (int)threadIdx.x; at < c.rows * a.chunk; at += DELTA_THREADS) {
      const int i = at / a.chunk, j = at % a.chunk;
      a.solve_row(head, c.token + i)[j] = j <= i ? inverse[i * DELTA_WIDE + j] : 0;
    }
  }
}

// delta_scan: a block has a slice of the state's columns and loops over the chunks of a document.
// It writes the states at seams, and X. The slices after those for the values compute the
// transition: their initial state is the identity, and their values are zero.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, 1) delta_scan_kernel(DeltaCall a) {
  constexpr int STEP = DELTA_SLICE + 4;
  const int step = up32(a.dim_k) + 8, square = a.chunk + 8;
  SHARED(Word, shared);
  Word *ks = shared, *ss = ks + a.chunk * step, *ts = ss + up16(a.dim_k) * STEP, *rs = ts + a.chunk * square,
       *xs = rs + a.chunk * STEP;
  // Keys stay unnormalized, because BF16 represents them exactly. Their norms are in the factors
  // that multiply them.
  float *es = (float *)(xs + a.chunk * STEP), *ek = es + a.chunk, *fk = ek + a.chunk, *bs = fk + a.chunk;
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 16;
  const int value_slices = (a.dim_v + DELTA_SLICE - 1) / DELTA_SLICE,
            slices = value_slices + (a.transition ? (a.dim_k + DELTA_SLICE - 1) / DELTA_SLICE : 0);
  for (int64_t w = blockIdx.x; w < a.panel_documents * a.value_heads * slices; w += gridDim.x) {
    const int64_t head = w / slices % a.value_heads, document = a.document0 + w / slices / a.value_heads,
                  key = a.key_head[head], id = a.document[document];
    const bool identity = w % slices >= value_slices;
    const int width = identity ? a.dim_k : a.dim_v,
              c0 = (int)(w % slices - (identity ? value_slices : 0)) * DELTA_SLICE;
    const DeltaRange range(a, document);
    DeltaSlice s(a.dim_k, width, c0);
    float *transition = identity ? a.transition + head * a.dim_k * a.dim_k : nullptr;
    if (!range.begins) s.load(identity ? transition : a.state_of(a.carried_in, 0, head));
    else if (identity)
      s.each([&](int row, int column, float &x, float &y) { x = row == column, y = row == column + 1; });
    else if (id < a.states_in && a.state_in) s.load(a.state_of(a.state_in, id, head));
    for (int64_t i = range.lo; i < range.hi; i++) {
      const DeltaChunk c = delta_chunk_at(a.start, a.chunks_before, document, i, a.chunk);
      const int rows = up16(c.rows);
      if (!c.first && a.states) s.store(a.at_seam(a.states, head, c.seam - 1));
      __syncthreads(); // all threads have read the previous chunk
      s.template words<T>(ss, STEP);
      const int r = (int)threadIdx.x;
      const DeltaFactors f(a, c, head, key, r);
      fill_chunk<T>(ks, step, ts, square, a, a.k, key, a.solve_row(head, c.token), c, rows, [](int) { return 1.0f; });
      if (r < a.chunk) es[r] = f.decay.z, ek[r] = f.decay.z * f.unit, fk[r] = f.decay.w * f.unit, bs[r] = f.beta;
      __syncthreads();
      const bool active = m0 < rows;
      if (active) {
        float r[2][4], v[2][2][2];
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int row = m0 + lane.row + 8 * half, column = c0 + n0 + 8 * n + lane.column;
            v[n][half][0] = v[n][half][1] = 0;
            if (!identity && row < c.rows && column < width)
              load_two((const T *)a.v.data + (c.token + row) * a.v.token + head * a.v.head + column, width - column,
                       a.v.wide, v[n][half]);
          }
        zero(r);
        product<T, true, false, true, false>(r, ks + m0 * step, step, ss + n0, STEP, up16(a.dim_k));
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int row = m0 + lane.row + e / 2 * 8;
            rs[row * STEP + n0 + 8 * n + lane.column + e % 2] =
                to_word<T>(bs[row] * (v[n][e / 2][e % 2] - ek[row] * r[n][e]));
          }
      }
      __syncthreads();
      if (active) {
        float x[2][4];
        zero(x);
        product<T, false, false, true, false>(x, ts + m0 * square, square, rs + n0, STEP, m0 + 16);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int row = m0 + lane.row + 8 * half, column = n0 + 8 * n + lane.column;
            if (!identity && a.x && row < c.rows && c0 + column < width)
              store_two(a.x + a.row(head, c.token + row) * a.dim_v + c0 + column, width - c0 - column, width % 2 == 0,
                        x[n][2 * half], x[n][2 * half + 1]);
#pragma unroll
            for (int e = 0; e < 2; e++) xs[row * STEP + column + e] = to_word<T>(fk[row] * x[n][2 * half + e]);
          }
      }
      __syncthreads();
      s.template add<T, true, false>(es[c.rows - 1], ks, step, xs, STEP, rows);
    }
    const int64_t behind = id - (a.all_documents - a.states_out);
    if (identity) s.store(transition);
    else if (!range.ends) {
      if (a.carried_out) s.store(a.state_of(a.carried_out, 0, head));
    } else if (behind >= 0 && a.state_out) s.store(a.state_of(a.state_out, behind, head));
  }
}

// delta_out computes out for a chunk, a head and 64 columns.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, 2) delta_out_kernel(DeltaCall a) {
  constexpr int STEP = DELTA_CHUNK + 4;
  SHARED(Word, shared);
  Word *as = shared, *bs = as + DELTA_CHUNK * DELTA_WIDE;
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 32, slices = (a.dim_v + 63) / 64;
  for (int64_t w = blockIdx.x; w < a.chunks * a.value_heads * slices; w += gridDim.x) {
    const int64_t head = w / slices % a.value_heads, key = a.key_head[head];
    const DeltaChunk c = a.find(w / slices / a.value_heads);
    const int c0 = (int)(w % slices) * 64, rows = up16(c.rows);
    const int64_t id = a.document[c.document];
    const float *s = !c.first                         ? a.at_seam(a.states, head, c.seam - 1)
                     : id < a.states_in && a.state_in ? a.state_of(a.state_in, id, head)
                                                      : nullptr;
    const bool active = m0 < rows;
    float o[4][4];
    zero(o);
    for (int k0 = 0; s && k0 < a.dim_k; k0 += 64) {
      const int depth = (int)least(64, a.dim_k - k0);
      __syncthreads();
      fill_view<T, 64>(as, DELTA_WIDE, a.q, c.token, key, k0, c.rows, rows, AsItIs());
      fill_rows<T, 64>(bs, STEP, s + (int64_t)k0 * a.dim_v, a.dim_v, c0, depth, up16(depth), AsItIs());
      __syncthreads();
      if (active) product<T, true, false, true, false>(o, as + m0 * DELTA_WIDE, DELTA_WIDE, bs + n0, STEP, up16(depth));
    }
    if (s && active) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = m0 + lane.row + 8 * half;
        const float by = row < c.rows ? a.decay[a.row(head, c.token + row)].z * a.scale *
                                            (a.unit_q ? a.unit_q[a.row(key, c.token + row)] : 1)
                                      : 0;
#pragma unroll
        for (int n = 0; n < 4; n++) o[n][2 * half] *= by, o[n][2 * half + 1] *= by;
      }
    }
    __syncthreads();
    fill_rows<T, 64>(as, DELTA_WIDE, a.scores + a.row(head, c.token) * a.chunk, a.chunk, 0, c.rows, rows, AsItIs());
    fill_rows<T, 64>(bs, STEP, a.x + a.row(head, c.token) * a.dim_v, a.dim_v, c0, c.rows, rows, AsItIs());
    __syncthreads();
    if (!active) continue;
    product<T, false, false, true, false>(o, as + m0 * DELTA_WIDE, DELTA_WIDE, bs + n0, STEP, m0 + 16);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = m0 + lane.row + 8 * half, column = c0 + n0 + 8 * n + lane.column;
        if (row < c.rows && column < a.dim_v)
          store_two((T *)a.out.data + (c.token + row) * a.out.token + head * a.out.head + column, a.dim_v - column,
                    a.out.wide, o[n][2 * half], o[n][2 * half + 1]);
      }
  }
}

const DeltaKernel delta_norms[2] = {delta_norms_kernel<float>, delta_norms_kernel<bf16>};
const DeltaKernel delta_prepare[2] = {delta_prepare_kernel<float>, delta_prepare_kernel<bf16>};
const DeltaKernel delta_scan[2] = {delta_scan_kernel<float>, delta_scan_kernel<bf16>};
const DeltaKernel delta_out[2] = {delta_out_kernel<float>, delta_out_kernel<bf16>};
