// The gated delta rule, forward pass (formulas in delta.h), and the transfer of a state over a
// shard of a sequence (DeltaState).
#include "delta.h"

// delta_norms computes the factors 1 / |row| of keys and queries. Half a warp has a row.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS) delta_norms_kernel(DeltaCall a) {
  constexpr int N = Wide<T>::LANES;
  const DeltaRows at;
  const int64_t rows = a.key_heads * a.tokens, all = a.q.data ? 2 * rows : rows;
  for (int64_t first = at.first; first < all; first += at.step) { // both halves of a warp take part
    const int64_t w = first + at.half;
    const bool there = w < all;
    const DeltaView &x = w < rows ? a.k : a.q;
    const int64_t i = there ? w < rows ? w : w - rows : 0, key = i / a.tokens, token = a.token0 + i % a.tokens;
    const T *p = x.row<T>(token, key);
    float sum = 0;
    for (int c = at.lane * N; there && c < x.width; c += DeltaRows::LANES * N) {
      float v[N];
      load_flat<N>(p + c, x.width - c, x.vectors, v);
#pragma unroll
      for (int e = 0; e < N; e++) sum = madd(v[e], v[e], sum);
    }
    sum = group_sum<DeltaRows::LANES>(sum, nullptr);
    if (there && at.lane == 0) (w < rows ? a.unit_k : a.unit_q)[a.row(key, token)] = 1 / sqrtf(sum + DELTA_EPS);
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

// delta_prepare computes T and P of a chunk and head, or one of them. It does not write the blocks
// of 16 x 32 above P's diagonal, which are not read.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, 2) delta_prepare_kernel(DeltaCall a) {
  constexpr int KEYS = DeltaTiles<sizeof(T)>::KEYS, STEP = KEYS + TILE_GAP, UNIT = Wide<T>::LANES;
  SHARED(T, shared);
  T *ks = shared, *qs = ks + DELTA_CHUNK * STEP;
  float *m = (float *)(qs + DELTA_CHUNK * STEP), *inverse = (float *)ks, *beta = m + DELTA_CHUNK * DELTA_WIDE;
  float2 *sums = (float2 *)(beta + DELTA_CHUNK);
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 32;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.chunks * a.value_heads; w += gridDim.x) {
    const int64_t head = w % a.value_heads, key = a.key_head[head];
    const DeltaChunk c = a.find(w / a.value_heads);
    const int rows = up16(c.rows);
    const bool active = m0 < rows && n0 <= m0;
    float kk[4][4], qk[4][4];
    zero(kk);
    zero(qk);
    for (int c0 = 0; c0 < a.dim_k; c0 += KEYS) {
      const int depth = up16((int)least(KEYS, a.dim_k - c0));
      __syncthreads(); // all threads have read the previous keys
      for (int at = 0; at < depth; at += 64) {
        copy_view<64>(copies, ks + at, STEP, a.k, c, key, c0 + at);
        if (a.scores) copy_view<64>(copies, qs + at, STEP, a.q, c, key, c0 + at);
      }
      copies.close();
      if (c0 == 0) delta_gates(a, c, head, sums, beta);
      copies.wait<0>();
      __syncthreads();
      if (!active) continue;
      if (!a.solved) tile_product<true, true>(kk, ks + m0 * STEP, STEP, ks + n0 * STEP, STEP, depth);
      if (a.scores) tile_product<true, true>(qk, qs + m0 * STEP, STEP, ks + n0 * STEP, STEP, depth);
    }
    if (active) {
      const int64_t at = a.row(key, c.token);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = m0 + lane.row + 8 * half;
        const bool there = i < c.rows;
        const float by_k = there && a.unit_k ? a.unit_k[at + i] : 1,
                    by_q = (there && a.unit_q ? a.unit_q[at + i] : 1) * a.scale;
#pragma unroll
        for (int x = 0; x < 8; x++) {
          const int j = n0 + x / 2 * 8 + lane.column + x % 2;
          float &b = kk[x / 2][2 * half + x % 2], &p = qk[x / 2][2 * half + x % 2], decay = 0;
          if (there && j <= i) {
            decay = expf((sums[i].x - sums[j].x) + (sums[i].y - sums[j].y));
            if (a.unit_k) decay *= a.unit_k[at + j];
          }
          // the elements of other tokens may be NaN
          b = there && j < i ? b * by_k * decay * beta[i] : 0;
          p = there && j <= i ? p * by_q * decay : 0;
        }
        if (a.solved) continue;
#pragma unroll
        for (int n = 0; n < 4; n++)
          put_pair(m + i * DELTA_WIDE + n0 + 8 * n + lane.column, kk[n][2 * half], kk[n][2 * half + 1]);
      }
      if (a.scores)
        store_results(
            qk, c.rows - m0, a.chunk - n0, true,
            [&](int row) { return a.rows_of<T>(a.scores, a.chunk, head, c.token + m0 + row) + n0; }, T());
    }
    if (a.solved) continue;
    __syncthreads(); // all threads have written m, and have read the keys
    delta_invert(m, inverse, rows);
    const int units = a.chunk / UNIT;
    for (int at = (int)threadIdx.x; at < c.rows * units; at += DELTA_THREADS) {
      const int i = at / units, j = at % units * UNIT;
      float x[UNIT];
#pragma unroll
      for (int e = 0; e < UNIT; e++) x[e] = j + e <= i ? inverse[i * DELTA_WIDE + j + e] : 0;
      store<UNIT>(a.solve_row<T>(head, c.token + i) + j, x);
    }
  }
}

// delta_out computes out for a chunk, a head and 64 columns.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, 3) delta_out_kernel(DeltaCall a) {
  constexpr int KEYS = DeltaTiles<sizeof(T)>::KEYS, STEP = KEYS + TILE_GAP;
  SHARED(T, shared);
  T *qs = shared, *ss = qs + DELTA_CHUNK * STEP, *ps = ss + KEYS * DELTA_WIDE, *xs = ps + DELTA_CHUNK * DELTA_WIDE;
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 32, slices = (a.dim_v + 63) / 64;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.chunks * a.value_heads * slices; w += gridDim.x) {
    const int64_t head = w / slices % a.value_heads, key = a.key_head[head];
    const DeltaChunk c = a.find(w / slices / a.value_heads);
    const int c0 = (int)(w % slices) * 64, rows = up16(c.rows);
    const DeltaStored<T> s = a.before<T>(c, head);
    const bool active = m0 < rows;
    __syncthreads(); // all threads have read the previous tiles
    copy_rows<64>(copies, ps, DELTA_WIDE, a.rows_of<T>(a.scores, a.chunk, head, c.token), a.chunk, 0, c.rows, rows);
    copy_rows<64>(copies, xs, DELTA_WIDE, a.rows_of<T>(a.x, a.dim_v, head, c.token), a.dim_v, c0, c.rows, rows);
    float o[4][4];
    zero(o);
    for (int k0 = 0; s && k0 < a.dim_k; k0 += KEYS) {
      const int depth = (int)least(KEYS, a.dim_k - k0);
      if (k0 > 0) __syncthreads();
      for (int at = 0; at < depth; at += 64) copy_view<64>(copies, qs + at, STEP, a.q, c, key, k0 + at);
      copy_state<64>(copies, ss, DELTA_WIDE, s, a.dim_v, k0, c0, depth, up16(depth));
      copies.close();
      copies.wait<0>();
      __syncthreads();
      if (active) tile_product<true, false>(o, qs + m0 * STEP, STEP, ss + n0, DELTA_WIDE, up16(depth));
    }
    if (!s) {
      copies.close();
      copies.wait<0>();
      __syncthreads();
    }
    if (!active) continue;
#pragma unroll
    for (int half = 0; s && half < 2; half++) {
      const int row = m0 + lane.row + 8 * half;
      const float by = row < c.rows ? a.decay[a.row(head, c.token + row)].z * a.scale *
                                          (a.unit_q ? a.unit_q[a.row(key, c.token + row)] : 1)
                                    : 0;
#pragma unroll
      for (int n = 0; n < 4; n++) o[n][2 * half] *= by, o[n][2 * half + 1] *= by;
    }
    tile_product<true, false>(o, ps + m0 * DELTA_WIDE, DELTA_WIDE, xs + n0, DELTA_WIDE, m0 + 16);
    store_results(
        o, c.rows - m0, a.dim_v - c0 - n0, a.out.vectors,
        [&](int row) { return a.out.row<T>(c.token + m0 + row, head) + c0 + n0; }, T());
  }
}

const DeltaKernel delta_norms[2] = {delta_norms_kernel<float>, delta_norms_kernel<bf16>};
const DeltaKernel delta_prepare[2] = {delta_prepare_kernel<float>, delta_prepare_kernel<bf16>};
const DeltaKernel delta_out[2] = {delta_out_kernel<float>, delta_out_kernel<bf16>};
