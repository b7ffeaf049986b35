// The scans of the gated delta rule in F32 (formulas in delta.h and delta_backward.cu): a block has
// a slice of the columns of the state, or of its gradient, and loops over the chunks of a segment.
// All tiles of a chunk must fit into the shared memory of any GPU once.
#include "delta.h"

namespace {

// Fetched has four columns of some rows of a tile in registers, between global memory and a tile of
// COLUMNS columns. The source has rows [0, rows) of `width` elements; NULL and missing rows read as
// zeros. All threads of the block take part. Loads that are issued before the first put overlap. A
// write to shared memory between loads would make each load wait for the one before.
template <int COLUMNS> struct Fetched {
  enum { LANES = COLUMNS / 4, STEP = DELTA_THREADS / LANES, BATCH = STEP < DELTA_CHUNK ? DELTA_CHUNK / STEP : 1 };
  float x[BATCH][4];

  static __device__ __forceinline__ int column() { return (int)threadIdx.x % LANES * 4; }
  static __device__ __forceinline__ int row(int i) { return (int)threadIdx.x / LANES + i * STEP; }

  __device__ __forceinline__ Fetched(const float *from, int64_t stride, bool wide, int width, int rows) {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
#pragma unroll
      for (int e = 0; e < 4; e++) x[i][e] = 0;
      if (row(i) < rows && column() < width)
        load_flat<4>(from + row(i) * stride + column(), width - column(), wide, x[i]);
    }
  }
  // put writes rows [0, all) of columns [0, columns).
  __device__ __forceinline__ void put(float *to, int step, int all, int columns = COLUMNS) const {
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (row(i) < all && column() < columns)
        *reinterpret_cast<float4 *>(to + row(i) * step + column()) = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
  }
};

// fill loads a tile of F32 and writes it to shared memory. fill_view does so for a chunk's rows of
// a tensor, for columns from c0 on.
template <int COLUMNS> __device__ __forceinline__ void fill(float *to, int step, const float *from, int64_t stride,
                                                            bool wide, int width, int rows, int all) {
  Fetched<COLUMNS>(from, stride, wide, width, rows).put(to, step, all);
}
template <int COLUMNS> __device__ __forceinline__ void fill_view(float *to, int step, const DeltaView &x,
                                                                 const DeltaChunk &c, int64_t head, int c0) {
  fill<COLUMNS>(to, step, x.row<float>(c.token, head) + c0, x.token, x.wide, x.width - c0, c.rows, up16(c.rows));
}

// fill_chunk fills one tile with all columns of a chunk's keys or queries, multiplied by by(row),
// and another with the chunk's rows of a square matrix, T or P.
template <typename F> __device__ __forceinline__ void fill_chunk(float *keys, int step, float *square, int square_step,
                                                                 const DeltaCall &a, const DeltaView &x, int64_t key,
                                                                 const float *squares, const DeltaChunk &c, F by) {
  const float *data = x.row<float>(c.token, key);
  const int columns = up32(a.dim_k), all = up16(c.rows);
  auto put = [&](auto &f, float *to, int wanted) {
#pragma unroll
    for (int i = 0; i < f.BATCH; i++) {
      const float m = f.row(i) < c.rows ? by(f.row(i)) : 0;
#pragma unroll
      for (int e = 0; e < 4; e++) f.x[i][e] *= m;
    }
    f.put(to, step, all, wanted);
  };
  // The keys are loaded in two halves, whose width suits chunks of this size, and the square matrix
  // in one pass.
  if (a.chunk == DELTA_CHUNK) {
    Fetched<64> low(data, x.token, x.wide, x.width, c.rows), high(data + 64, x.token, x.wide, x.width - 64, c.rows);
    const Fetched<64> s(squares, DELTA_CHUNK, true, DELTA_CHUNK, c.rows);
    put(low, keys, columns);
    put(high, keys + 64, columns - 64);
    s.put(square, square_step, all);
    return;
  }
  for (int c0 = 0; c0 < columns; c0 += 32) {
    Fetched<32> part(data + c0, x.token, x.wide, x.width - c0, c.rows);
    put(part, keys + c0, 32);
  }
  for (int c0 = 0; c0 < a.chunk; c0 += 16)
    fill<16>(square + c0, square_step, squares + c0, a.chunk, true, a.chunk - c0, c.rows, all);
}

} // namespace

// delta_scan_f32: a block has a slice of the state's columns and loops over the chunks of a
// segment. It writes the states at seams, and X. The slices after those for the values compute the
// transition: their initial state is the identity, and their values are zero.
__global__ void __launch_bounds__(DELTA_THREADS, 1) delta_scan_f32(DeltaCall a) {
  constexpr int STEP = DELTA_SLICE + 4;
  const int step = up32(a.dim_k) + 8, square = a.chunk + 8;
  SHARED(float, shared);
  float *ks = shared, *ss = ks + a.chunk * step, *ts = ss + up16(a.dim_k) * STEP, *rs = ts + a.chunk * square,
        *xs = rs + a.chunk * STEP;
  float *es = (float *)(xs + a.chunk * STEP), *ek = es + a.chunk, *fk = ek + a.chunk, *bs = fk + a.chunk;
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 16;
  const int value_slices = (a.dim_v + DELTA_SLICE - 1) / DELTA_SLICE,
            slices = value_slices + (a.transition || a.partial ? (a.dim_k + DELTA_SLICE - 1) / DELTA_SLICE : 0);
  const DeltaScan x(a, slices, value_slices, blockIdx.x);
  if (x.skipped(a)) return;
  const int64_t head = x.head, key = x.key;
  const DeltaSegment &range = x.range;
  const int width = x.width, c0 = x.c0;
  const bool identity = x.identity;
  const DeltaDocument document(a.start, a.chunks_before, range.document);
  DeltaSlice<2> s(a.dim_k, width, c0);
  x.begin(a, s);
  for (int64_t i = range.lo; i < range.hi; i++) {
    const DeltaChunk c = document.at(i, a.chunk);
    const int rows = up16(c.rows);
    if (!c.first && a.states) s.store(a.at_seam<float>(a.states, head, c.seam - 1));
    __syncthreads(); // all threads have read the previous chunk
    s.tile(ss, STEP);
    const int r = (int)threadIdx.x;
    const DeltaFactors f(a, c, head, key, r);
    fill_chunk(ks, step, ts, square, a, a.k, key, a.solve_row<float>(head, c.token), c, [](int) { return 1.0f; });
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
            load_two((const float *)a.v.data + (c.token + row) * a.v.token + head * a.v.head + column, width - column,
                     a.v.wide, v[n][half]);
        }
      zero(r);
      tile_product<true, false>(r, ks + m0 * step, step, ss + n0, STEP, up16(a.dim_k));
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int row = m0 + lane.row + e / 2 * 8;
          rs[row * STEP + n0 + 8 * n + lane.column + e % 2] = bs[row] * (v[n][e / 2][e % 2] - ek[row] * r[n][e]);
        }
    }
    __syncthreads();
    if (active) {
      float x[2][4];
      zero(x);
      tile_product<true, false>(x, ts + m0 * square, square, rs + n0, STEP, m0 + 16);
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = m0 + lane.row + 8 * half, column = n0 + 8 * n + lane.column;
          if (!identity && a.x && row < c.rows && c0 + column < width)
            store_two(a.rows_of<float>(a.x, a.dim_v, head, c.token + row) + c0 + column, width - c0 - column,
                      width % 2 == 0, x[n][2 * half], x[n][2 * half + 1]);
#pragma unroll
          for (int e = 0; e < 2; e++) xs[row * STEP + column + e] = fk[row] * x[n][2 * half + e];
        }
    }
    __syncthreads();
    s.add(es[c.rows - 1], ks, step, xs, STEP, rows);
  }
  x.end(a, s);
}

// delta_scan_back_f32: a block has a slice of the columns of the state's gradient, and loops over
// the chunks of a segment from last to first. It writes the gradients at seams, and Y.
__global__ void __launch_bounds__(DELTA_THREADS, 1) delta_scan_back_f32(DeltaCall a) {
  constexpr int STEP = DELTA_SLICE + 4;
  const int step = up32(a.dim_k) + 8, square = a.chunk + 4;
  SHARED(float, shared);
  float *ks = shared, *ss = ks + a.chunk * step, *ts = ss + up16(a.dim_k) * STEP, *ws = ts + a.chunk * (a.chunk + 8),
        *ys = ws + a.chunk * STEP;
  float *es = (float *)(ys + a.chunk * STEP), *fk = es + a.chunk, *bek = fk + a.chunk;
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 16;
  const int slices = (a.dim_v + DELTA_SLICE - 1) / DELTA_SLICE;
  const DeltaScan scan(a, slices, slices, blockIdx.x);
  if (scan.skipped_back(a)) return;
  const int64_t head = scan.head, key = scan.key;
  const DeltaSegment &range = scan.range;
  const int c0 = scan.c0;
  const DeltaDocument document(a.start, a.chunks_before, range.document);
  DeltaSlice<2> s(a.dim_k, a.dim_v, c0);
  scan.begin_back(a, s);
  for (int64_t i = range.hi - 1; i >= range.lo; i--) {
    const DeltaChunk c = document.at(i, a.chunk);
    const int rows = up16(c.rows);
    const bool active = m0 < rows;
    if (!c.last && a.dstates) s.store(a.at_seam<float>(a.dstates, head, c.seam));
    __syncthreads(); // all threads have read the following chunk
    s.tile(ss, STEP);
    const int r = (int)threadIdx.x;
    const DeltaFactors f(a, c, head, key, r);
    fill_view<DELTA_SLICE>(ws, STEP, a.dout, c, head, c0);
    fill_chunk(ks, step, ts, square, a, a.q, key, a.rows_of<float>(a.scores, a.chunk, head, c.token), c, [&](int row) {
      return a.scale * a.decay[a.row(head, c.token + row)].z * (a.unit_q ? a.unit_q[a.row(key, c.token + row)] : 1);
    });
    if (r < a.chunk) es[r] = f.decay.z, fk[r] = f.decay.w * f.unit, bek[r] = f.beta * f.decay.z * f.unit;
    __syncthreads();
    float x[2][4], y[2][4];
    zero(x);
    if (active) tile_product<false, false>(x, ts + m0 * square + m0, square, ws + m0 * STEP + n0, STEP, rows - m0);
    s.add(es[c.rows - 1], ks, step, ws, STEP, rows);
    __syncthreads();
    fill_chunk(ks, step, ts, square, a, a.k, key, a.solve_row<float>(head, c.token), c, [](int) { return 1.0f; });
    __syncthreads();
    if (active) {
      zero(y);
      tile_product<true, false>(y, ks + m0 * step, step, ss + n0, STEP, up16(a.dim_k));
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int row = m0 + lane.row + e / 2 * 8;
          ws[row * STEP + n0 + 8 * n + lane.column + e % 2] = madd(fk[row], y[n][e], x[n][e]);
        }
    }
    __syncthreads();
    if (active) {
      zero(y);
      tile_product<false, false>(y, ts + m0 * square + m0, square, ws + m0 * STEP + n0, STEP, rows - m0);
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = m0 + lane.row + 8 * half, column = n0 + 8 * n + lane.column;
          if (a.y && row < c.rows && c0 + column < a.dim_v)
            store_two(a.rows_of<float>(a.y, a.dim_v, head, c.token + row) + c0 + column, a.dim_v - c0 - column,
                      a.dim_v % 2 == 0, y[n][2 * half], y[n][2 * half + 1]);
#pragma unroll
          for (int e = 0; e < 2; e++) ys[row * STEP + column + e] = -bek[row] * y[n][2 * half + e];
        }
    }
    __syncthreads();
    s.add(1, ks, step, ys, STEP, rows);
  }
  scan.end_back(a, s);
}
