// The gated delta rule, forward pass (formulas in delta.h), and the transfer of a state over a
// shard of a sequence (DeltaState).
#include "delta.h"

// delta_norms computes the factors 1 / |row| of keys and queries. Half a warp has a row of the keys
// and the same row of the queries, if there are any. Both are loaded before one is used: 64 KB are
// in flight on a multiprocessor.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, 8) delta_norms_kernel(DeltaCall a) {
  constexpr int N = Wide<T>::LANES;
  const DeltaRows at;
  const int64_t rows = a.key_heads * a.tokens;
  for (int64_t first = at.first; first < rows; first += at.step) { // both halves of a warp take part
    const bool there = first + at.half < rows, has_q = a.q.data;
    const int64_t w = there ? first + at.half : 0, key = w / a.tokens, token = a.token0 + w % a.tokens;
    float sum[2] = {0, 0};
    for (int c = at.lane * N; there && c < a.dim_k; c += DeltaRows::LANES * N) {
      Word<N, T> x[2];
      auto fetch = [&](const DeltaView &of, bool has, Word<N, T> &to) {
        const int left = has ? a.dim_k - c : 0;
        const T *p = of.row<T>(token, key) + c;
        load_flat_word<N>(p, left, of.vectors, to);
      };
      fetch(a.k, true, x[0]);
      fetch(a.q, has_q, x[1]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int e = 0; e < N; e++) {
          const float v = in_word<T>(x[i], e);
          sum[i] = madd(v, v, sum[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) sum[i] = group_sum<DeltaRows::LANES>(sum[i], nullptr);
    if (!there || at.lane > 0) continue;
    a.unit_k[a.row(key, token)] = 1 / sqrtf(sum[0] + DELTA_EPS);
    if (has_q) a.unit_q[a.row(key, token)] = 1 / sqrtf(sum[1] + DELTA_EPS);
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

// delta_merge completes the inverses of blocks of 2·SIZE rows of 1 + A, whose halves are inverted:
// the lower left quarter of an inverse is -T22·(A21·T11). A thread has SIZE / 8 neighbours of a
// row, a warp eight rows. A21·T11 is written above the diagonal of A.
template <int SIZE> static __device__ __forceinline__ void delta_merge(float *m, float *t, int rows) {
  const uint32_t thread = in_loop(threadIdx.x);
  constexpr int C = SIZE / 8, STEP = DELTA_WIDE;
  const int eight = (int)(thread / 64 * 8), b = eight / SIZE * 2 * SIZE, i = eight % SIZE + (int)(thread % 32 / 4),
            c = (int)(thread / 32 % 2 * (SIZE / 2) + thread % 4 * C);
  const float *from = m + (b + SIZE + i) * STEP + b; // row i of A21
  float *between = m + b * STEP + b + SIZE, *to = t + (b + SIZE + i) * STEP + b;
  const bool there = b + SIZE + i < rows;
  // product adds row [lo, hi) · y [lo, hi) to the thread's elements.
  auto product = [&](float (&sum)[C], const float *row, const float *y, int lo, int hi) {
#pragma unroll 1
    for (int k = lo; k < hi; k += 8) {
      float x[8];
      load<4>(row + k, reinterpret_cast<float (&)[4]>(x[0]));
      load<4>(row + k + 4, reinterpret_cast<float (&)[4]>(x[4]));
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float z[C];
        load<C>(y + (k + j) * STEP + c, z);
#pragma unroll
        for (int e = 0; e < C; e++) sum[e] = madd(x[j], z[e], sum[e]);
      }
    }
  };
  auto put = [&](float *row, const float (&sum)[C]) {
#pragma unroll
    for (int e = 0; e < C; e += 2) put_pair(row + c + e, sum[e], sum[e + 1]);
  };
  float sum[C] = {};
  // T11 is zero in the blocks of 16 above its diagonal, and T22 to the right of row i's.
  if (there) {
    product(sum, from, t + b * STEP + b, c / 16 * 16, SIZE);
    put(between + i * STEP, sum);
  }
  __syncthreads();
  if (there) {
#pragma unroll
    for (int e = 0; e < C; e++) sum[e] = 0;
    product(sum, to + SIZE, between, 0, i / 16 * 16 + 16);
#pragma unroll
    for (int e = 0; e < C; e++) sum[e] = -sum[e];
    put(to, sum);
  }
  __syncthreads();
}

// delta_invert computes T = (1 + A)⁻¹ for A [64][DELTA_WIDE], strictly lower triangular: first the
// diagonal blocks of 16 rows, one column a thread, then blocks of 32 rows, then all. `rows` is a
// multiple of 16. Elements of T above the diagonal blocks are not written, and elements of A above
// them are overwritten.
static __device__ __forceinline__ void delta_invert(float *m, float *t, int rows) {
  const int x = (int)in_loop(threadIdx.x), b = x & ~15;
  if (x < rows) {
    const float *from = m + b * DELTA_WIDE + b;
    float column[16];
#pragma unroll
    for (int g = 0; g < 16; g += 4) {
#pragma unroll
      for (int i = g; i < g + 4; i++) column[i] = b + i == x ? 1 : 0;
#pragma unroll
      for (int j = 0; j <= g; j += 4) {
        float y[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) load<4>(from + (g + i) * DELTA_WIDE + j, y[i]);
#pragma unroll
        for (int k = 0; k < 4; k++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (j + k < g + i) column[g + i] = madd(-y[i][k], column[j + k], column[g + i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) t[(b + i) * DELTA_WIDE + x] = column[i];
  }
  __syncthreads();
  if (rows > 16) delta_merge<16>(m, t, rows);
  if (rows > 32) delta_merge<32>(m, t, rows);
}

// delta_prepare computes T and P of a chunk and head, or one of them. It does not write the blocks
// of 16 x 32 above P's diagonal, which are not read.
template <typename T> __global__ void __launch_bounds__(DELTA_THREADS, ON_CORES<T> ? 3 : 2)
    delta_prepare_kernel(DeltaCall a) {
  constexpr int KEYS = DeltaTiles<sizeof(T)>::KEYS, STEP = KEYS + TILE_GAP, UNIT = Wide<T>::LANES;
  SHARED(T, shared);
  T *ks = shared, *qs = ks + DELTA_CHUNK * STEP;
  float *m = (float *)(qs + DELTA_CHUNK * STEP), *inverse = (float *)ks, *beta = m + DELTA_CHUNK * DELTA_WIDE;
  float2 *sums = (float2 *)(beta + DELTA_CHUNK);
  float *units = (float *)(sums + DELTA_CHUNK); // of the keys, then of the queries
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 32;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.chunks * a.value_heads; w += gridDim.x) {
    const int64_t head = w % a.value_heads, key = a.key_head[head];
    const DeltaChunk c = a.find(w / a.value_heads);
    const int rows = up16(c.rows);
    const bool active = m0 < rows && n0 <= m0;
    auto copy_keys = [&](int c0) {
      for (int at = 0; at < KEYS && c0 + at < a.dim_k; at += 64) {
        copy_view<64>(copies, ks + at, STEP, a.k, c, key, c0 + at);
        if (a.scores) copy_view<64>(copies, qs + at, STEP, a.q, c, key, c0 + at);
      }
      copies.close();
    };
    __syncthreads(); // all threads have read the previous tiles
    copy_keys(0);
    delta_gates(a, c, head, sums, beta);
    if (threadIdx.x >= DELTA_THREADS / 2) { // other warps
      const int r = (int)threadIdx.x % DELTA_CHUNK;
      const float *of = threadIdx.x / DELTA_CHUNK % 2 == 0 ? a.unit_k : a.unit_q;
      units[threadIdx.x - DELTA_THREADS / 2] = of && r < c.rows ? of[a.row(key, c.token) + r] : 1;
    }
    float kk[4][4], qk[4][4];
    zero(kk);
    zero(qk);
    for (int c0 = 0; c0 < a.dim_k; c0 += KEYS) {
      if (c0 > 0) {
        __syncthreads(); // all threads have read the previous keys
        copy_keys(c0);
      }
      copies.wait<0>();
      __syncthreads();
      if (!active) continue;
      const int depth = up16((int)least(KEYS, a.dim_k - c0));
      if (!a.solved) tile_product<true, true>(kk, ks + m0 * STEP, STEP, ks + n0 * STEP, STEP, depth);
      if (a.scores) tile_product<true, true>(qk, qs + m0 * STEP, STEP, ks + n0 * STEP, STEP, depth);
    }
    if (active) {
      const Lane lane((int)in_loop(threadIdx.x));
      int last[2]; // of the columns of a row that exist
      float2 sum[2];
      float by_k[2], by_q[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = m0 + lane.row + 8 * half;
        last[half] = i < c.rows ? i : -1;
        sum[half] = sums[i], by_k[half] = units[i], by_q[half] = units[DELTA_CHUNK + i] * a.scale;
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int j = n0 + 8 * n + lane.column;
        float of[4], unit[2]; // the sums and units of two columns
        load<4>(reinterpret_cast<const float *>(sums + j), of);
        load<2>(units + j, unit);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int i = m0 + lane.row + 8 * half;
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float &b = kk[n][2 * half + e], &p = qk[n][2 * half + e];
            const float decay = expf((sum[half].x - of[2 * e]) + (sum[half].y - of[2 * e + 1])) * unit[e];
            // the elements of other tokens may be NaN
            b = j + e < last[half] ? b * by_k[half] * decay * beta[i] : 0;
            p = j + e <= last[half] ? p * by_q[half] * decay : 0;
          }
          if (!a.solved) put_pair(m + i * DELTA_WIDE + j, kk[n][2 * half], kk[n][2 * half + 1]);
        }
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

// delta_out computes out in F32 for a chunk, a head and 64 columns. In BF16, the scan does.
__global__ void __launch_bounds__(DELTA_THREADS, 3) delta_out_kernel(DeltaCall a) {
  constexpr int KEYS = DeltaTiles<4>::KEYS, STEP = KEYS + TILE_GAP;
  SHARED(float, shared);
  float *qs = shared, *ss = qs + DELTA_CHUNK * STEP, *ps = ss + KEYS * DELTA_WIDE, *xs = ps + DELTA_CHUNK * DELTA_WIDE;
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 32, slices = (a.dim_v + 63) / 64;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.chunks * a.value_heads * slices; w += gridDim.x) {
    const int64_t head = w / slices % a.value_heads, key = a.key_head[head];
    const DeltaChunk c = a.find(w / slices / a.value_heads);
    const int c0 = (int)(w % slices) * 64, rows = up16(c.rows);
    const DeltaStored<float> s = a.before<float>(c, head);
    const bool active = m0 < rows;
    __syncthreads(); // all threads have read the previous tiles
    copy_rows<64>(copies, ps, DELTA_WIDE, a.rows_of<float>(a.scores, a.chunk, head, c.token), a.chunk, 0, c.rows, rows);
    copy_rows<64>(copies, xs, DELTA_WIDE, a.rows_of<float>(a.x, a.dim_v, head, c.token), a.dim_v, c0, c.rows, rows);
    float o[4][4];
    zero(o);
    for (int k0 = 0; s && k0 < a.dim_k; k0 += KEYS) {
      const int depth = (int)least(KEYS, a.dim_k - k0);
      if (k0 > 0) __syncthreads();
      for (int at = 0; at < depth; at += 64) copy_view<64>(copies, qs + at, STEP, a.q, c, key, k0 + at);
      copy_state<64>(copies, ss, DELTA_WIDE, s, a.dim_k, a.dim_v, k0, c0);
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
        [&](int row) { return a.out.row<float>(c.token + m0 + row, head) + c0 + n0; }, 0.0f);
  }
}

const DeltaKernel delta_norms[2] = {delta_norms_kernel<float>, delta_norms_kernel<bf16>};
const DeltaKernel delta_prepare[2] = {delta_prepare_kernel<float>, delta_prepare_kernel<bf16>};
const DeltaKernel delta_out[1] = {delta_out_kernel};
