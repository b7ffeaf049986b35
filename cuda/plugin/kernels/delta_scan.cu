// The scans of the gated delta rule in BF16 (formulas in delta.h and delta_backward.cu). A block
// has a slice of the columns of the state, or of its gradient, in registers in F32, and loops over
// the chunks of a segment. Products are computed on tensor cores from tiles of BF16 in shared
// memory, with sums in F32. Keys, queries, T and P are BF16 in memory. The state, and the results
// that are factors of a further product, are split (tile.h): roundings to BF16 along the sequence
// would exceed twice the error of a plain implementation.
//
// A chunk is a chain of three products, each of which needs the one before. What a scan takes is
// the latency of this chain and the transfer of the tiles. Therefore the tiles of the next chunk
// are copied while a chunk is computed, its factors are loaded to registers, and the tables of
// documents are read once.
#include "delta.h"

namespace {

constexpr int STEP = DELTA_SLICE + TILE_GAP;

// Factors are the factors of a chunk's rows, and of its end. A thread has a row.
struct Factors {
  float *end, *first, *second, *third;
  __device__ __forceinline__ Factors(float *at, int chunk)
      : end(at), first(at + 4), second(first + chunk), third(second + chunk) {}
};

// copy_columns copies all columns of a chunk's rows of keys or queries.
__device__ __forceinline__ void copy_columns(Copies &copies, bf16 *to, int step, const DeltaView &x,
                                             const DeltaChunk &c, int64_t head, int width) {
  for (int at = 0; at < width; at += 64) copy_view<64>(copies, to + at, step, x, c, head, at);
}
// copy_square copies a chunk's rows of T or P.
__device__ __forceinline__ void copy_square(Copies &copies, bf16 *to, const bf16 *from, int chunk, int rows) {
  copy_rows<64>(copies, to, DELTA_WIDE, from, chunk, 0, rows, up16(rows));
}

// store_state writes the tile of a slice to a state [dim_k, width], from column c0 on.
__device__ __forceinline__ void store_state(bf16 *to, const bf16 *tile, int dim_k, int width, int c0) {
  constexpr int LANES = DELTA_SLICE / 8;
  const int column = (int)threadIdx.x % LANES * 8;
  const bool vectors = width % 8 == 0; // states begin at multiples of 16 bytes
  for (int row = (int)threadIdx.x / LANES; row < dim_k; row += DELTA_THREADS / LANES) {
    const bf16 *from = tile + row * STEP + column;
    bf16 *at = to + (int64_t)row * width + c0 + column;
    if (vectors && c0 + column < width) *reinterpret_cast<uint4 *>(at) = *reinterpret_cast<const uint4 *>(from);
    else if (!vectors)
      for (int e = 0; e < 8; e++)
        if (c0 + column + e < width) at[e] = from[e];
  }
}

// store_rows writes two columns of rows of X or Y.
__device__ __forceinline__ void store_rows(const DeltaCall &a, void *of, int64_t head, const DeltaChunk &c, int row,
                                           int column, float x, float y) {
  if (of && row < c.rows && column < a.dim_v)
    store_two(a.rows_of<bf16>(of, a.dim_v, head, c.token + row) + column, a.dim_v - column, a.dim_v % 2 == 0, x, y);
}

} // namespace

// delta_scan_tiles writes the states at seams, and X. The slices after the values compute
// the transition: their initial state is the identity, and their values are zero.
template <int N> __global__ void __launch_bounds__(DELTA_THREADS, 2 / N) delta_scan_tiles(DeltaCall a) {
  SHARED(bf16, shared);
  const DeltaScanTiles of(a.dim_k, a.chunk, false, a.stages);
  constexpr int KEYS = 128 * N + TILE_GAP;   // columns of a tile of keys
  const int low = of.state, rest = of.slice; // from a split tile to its second half
  bf16 *const state = shared + a.stages * of.stage, *const xs = state + 2 * of.state, *const rs_low = xs + 2 * of.slice;
  float *const factors = (float *)(shared + a.stages * of.stage + of.once);
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 16, me = (int)threadIdx.x;
  const int value_slices = (a.dim_v + DELTA_SLICE - 1) / DELTA_SLICE,
            slices = value_slices + (a.transition || a.partial ? (a.dim_k + DELTA_SLICE - 1) / DELTA_SLICE : 0);
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.segments * a.value_heads * slices; w += gridDim.x) {
    const DeltaScan of_block(a, w, slices, value_slices);
    if (of_block.skipped(a)) continue;
    const int head = (int)of_block.head, key = (int)of_block.key;
    const int64_t lo = of_block.range.lo, hi = of_block.range.hi;
    const bool identity = of_block.identity;
    const int width = of_block.width, c0 = of_block.c0;
    const DeltaDocument document(a.start, a.chunks_before, of_block.range.document);
    auto stage = [&](int64_t i) { return shared + (a.stages == 2 ? (int)(i & 1) : 0) * of.stage; };
    auto load = [&](int64_t i) {
      const DeltaChunk c = document.at(i, a.chunk);
      bf16 *const keys = stage(i), *const solve = keys + of.keys;
      copy_columns(copies, keys, KEYS, a.k, c, key, a.dim_k);
      copy_square(copies, solve, a.solve_row<bf16>(head, c.token), a.chunk, c.rows);
      if (!identity) copy_view<DELTA_SLICE>(copies, solve + of.square, STEP, a.v, c, head, c0);
      copies.close();
    };
    __syncthreads(); // all threads have read the tiles of the previous segment
    if (lo < hi) load(lo);
    DeltaFactors row(a, lo < hi ? document.at(lo, a.chunk) : DeltaChunk{}, head, key, me);
    DeltaSlice<N> s(a.dim_k, width, c0);
    of_block.begin(a, s);
    for (int64_t i = lo; i < hi; i++) {
      const DeltaChunk c = document.at(i, a.chunk);
      const int rows = up16(c.rows);
      const bool active = m0 < rows;
      bf16 *const keys = stage(i), *const solve = keys + of.keys, *const rs = solve + of.square; // values, then R
      const int rs_rest = (int)(rs_low - rs);
      const Factors f(factors + (int)(i & 1) * of.factors, a.chunk); // E·unit, F·unit, beta
      s.split(state, low, STEP);
      if (me < a.chunk)
        f.first[me] = row.decay.z * row.unit, f.second[me] = row.decay.w * row.unit, f.third[me] = row.beta;
      if (me == c.rows - 1) *f.end = row.decay.z;
      copies.wait<0>();
      __syncthreads(); // the tiles have arrived, and all threads have read the previous chunk
      if (i + 1 < hi) {
        if (a.stages == 2) load(i + 1);
        row = DeltaFactors(a, document.at(i + 1, a.chunk), head, key, me);
      }
      if (!c.first && a.states) store_state(a.at_seam<bf16>(a.states, head, c.seam - 1), state, a.dim_k, width, c0);
      if (active) {
        float r[2][4];
        zero(r);
        split_product<true>(r, keys + m0 * KEYS, KEYS, state + n0, low, STEP, up16(a.dim_k));
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = m0 + lane.row + 8 * half;
          const float ek = f.first[at], beta = f.third[at];
#pragma unroll
          for (int n = 0; n < 2; n++) {
            bf16 *const p = rs + at * STEP + n0 + 8 * n + lane.column;
            const float2 v = identity ? make_float2(0, 0) : pair_at(p);
            put_split(p, rs_rest, beta * (v.x - ek * r[n][2 * half]), beta * (v.y - ek * r[n][2 * half + 1]));
          }
        }
      }
      __syncthreads();
      if (active) {
        float x[2][4];
        zero(x);
        split_product<true>(x, solve + m0 * DELTA_WIDE, DELTA_WIDE, rs + n0, rs_rest, STEP, m0 + 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = m0 + lane.row + 8 * half;
          const float fk = f.second[at];
#pragma unroll
          for (int n = 0; n < 2; n++) {
            const int column = n0 + 8 * n + lane.column;
            const float u = x[n][2 * half], v = x[n][2 * half + 1];
            if (!identity) store_rows(a, a.x, head, c, at, c0 + column, u, v);
            put_split(xs + at * STEP + column, rest, fk * u, fk * v);
          }
        }
      }
      __syncthreads();
      s.add_split(*f.end, keys, KEYS, xs, rest, STEP, rows);
      if (a.stages == 1 && i + 1 < hi) {
        __syncthreads(); // all threads have read the tiles
        load(i + 1);
      }
    }
    DeltaScan(a, w, slices, value_slices).end(a, s); // found again, to save registers in the loop
  }
}

// delta_scan_back_tiles loops from the last chunk to the first. It writes the gradients at seams,
// and Y.
template <int N> __global__ void __launch_bounds__(DELTA_THREADS, 1) delta_scan_back_tiles(DeltaCall a) {
  SHARED(bf16, shared);
  const DeltaScanTiles of(a.dim_k, a.chunk, true, a.stages);
  constexpr int KEYS = 128 * N + TILE_GAP;   // columns of a tile of keys
  const int low = of.state, rest = of.slice; // from a split tile to its second half
  // Y and the gradient share a tile. scaled: scale·E·unit·dout
  bf16 *const state = shared + a.stages * of.stage, *const ys = state, *const rs = state + 2 * of.state,
              *const scaled = rs + 2 * of.slice;
  float *const factors = (float *)(shared + a.stages * of.stage + of.once);
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, m0 = warp % 4 * 16, n0 = warp / 4 * 16, me = (int)threadIdx.x;
  const int slices = (a.dim_v + DELTA_SLICE - 1) / DELTA_SLICE;
  Copies copies;
  for (int64_t w = blockIdx.x; w < a.segments * a.value_heads * slices; w += gridDim.x) {
    const DeltaScan of_block(a, w, slices, slices);
    if (of_block.skipped_back(a)) continue;
    const int head = (int)of_block.head, key = (int)of_block.key;
    const int64_t lo = of_block.range.lo, hi = of_block.range.hi;
    const int c0 = of_block.c0;
    const DeltaDocument document(a.start, a.chunks_before, of_block.range.document);
    auto stage = [&](int64_t i) { return shared + (a.stages == 2 ? (int)(i & 1) : 0) * of.stage; };
    auto load = [&](int64_t i) {
      const DeltaChunk c = document.at(i, a.chunk);
      bf16 *const keys = stage(i), *const queries = keys + of.keys, *const solve = queries + of.keys,
                  *const scores = solve + of.square;
      copy_view<DELTA_SLICE>(copies, scores + of.square, STEP, a.dout, c, head, c0);
      copy_square(copies, scores, a.rows_of<bf16>(a.scores, a.chunk, head, c.token), a.chunk, c.rows);
      copy_columns(copies, keys, KEYS, a.k, c, key, a.dim_k);
      copy_columns(copies, queries, KEYS, a.q, c, key, a.dim_k);
      copy_square(copies, solve, a.solve_row<bf16>(head, c.token), a.chunk, c.rows);
      copies.close();
    };
    // unit_of_query returns the norm's factor of a row's query.
    auto unit_of_query = [&](const DeltaChunk &c) {
      return me < c.rows && a.unit_q ? a.unit_q[a.row(key, c.token + me)] : 1;
    };
    __syncthreads(); // all threads have read the tiles of the previous segment
    if (lo < hi) load(hi - 1);
    const DeltaChunk begun = lo < hi ? document.at(hi - 1, a.chunk) : DeltaChunk{};
    DeltaFactors row(a, begun, head, key, me);
    float unit_q = unit_of_query(begun);
    DeltaSlice<N> s(a.dim_k, a.dim_v, c0);
    of_block.begin_back(a, s);
    for (int64_t i = hi - 1; i >= lo; i--) {
      const DeltaChunk c = document.at(i, a.chunk);
      const int rows = up16(c.rows);
      const bool active = m0 < rows;
      bf16 *const keys = stage(i), *const queries = keys + of.keys, *const solve = queries + of.keys,
                  *const scores = solve + of.square, *const ws = scores + of.square;
      const Factors f(factors + (int)(i & 1) * of.factors, a.chunk); // F·unit, -beta·E·unit, scale·E·unit of q
      s.split(state, low, STEP);
      if (me < a.chunk)
        f.first[me] = row.decay.w * row.unit, f.second[me] = -row.beta * row.decay.z * row.unit,
        f.third[me] = a.scale * row.decay.z * unit_q;
      if (me == c.rows - 1) *f.end = row.decay.z;
      copies.wait<0>();
      __syncthreads(); // the tiles have arrived
      if (i > lo) {
        if (a.stages == 2) load(i - 1);
        const DeltaChunk before = document.at(i - 1, a.chunk);
        row = DeltaFactors(a, before, head, key, me), unit_q = unit_of_query(before);
      }
      if (!c.last && a.dstates) store_state(a.at_seam<bf16>(a.dstates, head, c.seam), state, a.dim_k, a.dim_v, c0);
      if (active) {
        float x[2][4], y[2][4];
        zero(x);
        zero(y);
        tile_product<false, false>(x, scores + m0 * DELTA_WIDE + m0, DELTA_WIDE, ws + m0 * STEP + n0, STEP, rows - m0);
        split_product<true>(y, keys + m0 * KEYS, KEYS, state + n0, low, STEP, up16(a.dim_k));
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = m0 + lane.row + 8 * half;
          const float fk = f.first[at], eq = f.third[at];
#pragma unroll
          for (int n = 0; n < 2; n++) {
            const int p = at * STEP + n0 + 8 * n + lane.column;
            const float2 dout = pair_at(ws + p);
            put_split(scaled + p, rest, eq * dout.x, eq * dout.y);
            put_split(rs + p, rest, madd(fk, y[n][2 * half], x[n][2 * half]),
                      madd(fk, y[n][2 * half + 1], x[n][2 * half + 1]));
          }
        }
      }
      __syncthreads();
      if (active) {
        float y[2][4];
        zero(y);
        split_product<false>(y, solve + m0 * DELTA_WIDE + m0, DELTA_WIDE, rs + m0 * STEP + n0, rest, STEP, rows - m0);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int at = m0 + lane.row + 8 * half;
          const float bek = f.second[at];
#pragma unroll
          for (int n = 0; n < 2; n++) {
            const int column = n0 + 8 * n + lane.column;
            const float u = y[n][2 * half], v = y[n][2 * half + 1];
            store_rows(a, a.y, head, c, at, c0 + column, u, v);
            put_split(ys + at * STEP + column, low, bek * u, bek * v);
          }
        }
      }
      s.add_split(*f.end, queries, KEYS, scaled, rest, STEP, rows);
      __syncthreads();
      s.add_split(1, keys, KEYS, ys, low, STEP, rows);
      __syncthreads(); // all threads have read the tiles
      if (a.stages == 1 && i > lo) load(i - 1);
    }
    DeltaScan(a, w, slices, slices).end_back(a, s);
  }
}

const DeltaKernel delta_scan[3] = {delta_scan_f32, delta_scan_tiles<1>, delta_scan_tiles<2>};
const DeltaKernel delta_scan_back[3] = {delta_scan_back_f32, delta_scan_back_tiles<1>, delta_scan_back_tiles<2>};
