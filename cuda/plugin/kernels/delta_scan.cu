// The scans of the gated delta rule in BF16 (formulas in delta.h and delta_backward.cu). A block
// has a slice of the columns of the state, or of its gradient, and loops over the chunks of a
// segment. A chunk is a chain of three products, each of which needs the one before. What a scan
// takes is the latency of this chain, so nothing else is in it:
//
//  - The state stays in registers in F32. It is transposed there, [columns, dim_k], so that the
//    result of each product, rounded, is the first operand of the next one without leaving the
//    registers of its warp (the layouts of mma.h). Columns of the state are independent of each
//    other: a warp has 16 of them.
//  - Two warps share the columns, with half of dim_k each. They exchange one result a chunk, the
//    sum over dim_k, and compute the product with T both.
//  - Further warps copy the tiles of following chunks to shared memory and prepare the factors of
//    their rows.
//
// The forward pass computes out from the same registers.
//
// Products are computed on tensor cores with sums in F32. Keys, queries, T, P, values and dout are
// BF16. The state, and the results that are factors of a further product, are two BF16 numbers each
// (Fragment): roundings to BF16 along the sequence would exceed twice the error of a plain
// implementation.
#include "delta_columns.h"

namespace {

constexpr int WARPS = DELTA_SCAN_WARPS, LOADERS = DELTA_SCAN_THREADS - 32 * WARPS;
constexpr int STEP = DELTA_SLICE + TILE_GAP; // of a tile of values or of dout

// Factors are the factors of a chunk's rows, and of its end.
struct Factors {
  float *end, *first, *second, *third, *fourth;
  __device__ __forceinline__ Factors(float *at, int rows)
      : end(at), first(at + 4), second(first + rows), third(second + rows), fourth(third + rows) {}
  // set writes the factors of a row of chunk c; the decay of the last row is the end's.
  __device__ __forceinline__ void set(const DeltaChunk &c, int row, float decay, float x, float y, float z,
                                      float w = 0) const {
    if (row == c.rows - 1) *end = decay;
    if (row < third - second) first[row] = x, second[row] = y, third[row] = z, fourth[row] = w;
  }
};

// QueryFactors has the factor of the L2 norm of a row's query as well.
struct QueryFactors : DeltaFactors {
  float unit_q;
  QueryFactors() = default;
  __device__ __forceinline__ QueryFactors(const DeltaCall &a, const DeltaChunk &c, int64_t head, int64_t key, int r)
      : DeltaFactors(a, c, head, key, r), unit_q(r < c.rows && a.unit_q ? a.unit_q[a.row(key, c.token + r)] : 1) {}
};

// Written is where a scan writes results of its n-th chunk: the state, and rows of X or Y. Both are
// at a fixed distance from the results of the chunk before.
struct Written {
  bf16 *states, *first_rows;
  int64_t by_state, by_rows;
  int from_state, partial, chunk, partial_rows, width, columns;
  bool full, other; // rows that Results::full writes, except in the partial chunk, and others

  // states, rows: of the first chunk, or NULL. The first state is not written if it is at an end of
  // the document. Chunk `partial` has partial_rows rows, the others are full. `whole`: the rows of
  // results in registers.
  __device__ __forceinline__ Written(const DeltaCall &a, int count, bf16 *states, bool ends, bf16 *rows, int partial,
                                     int partial_rows, int whole, int columns, int direction)
      : states(states),
        first_rows(rows),
        by_state((int64_t)direction * a.dim_k * a.dim_v),
        by_rows((int64_t)direction * a.chunk * a.dim_v),
        from_state(states ? ends : count),
        partial(partial_rows < a.chunk ? partial : -1),
        chunk(a.chunk),
        partial_rows(partial_rows),
        width(a.dim_v),
        columns(columns),
        full(rows && a.chunk == whole && a.dim_v % 2 == 0),
        other(rows && !full) {}
  __device__ __forceinline__ bool has_state(int n) const { return n >= from_state; }
  __device__ __forceinline__ bf16 *state(int n) const { return states + n * by_state; }
  // put writes this warp's half of the rows.
  template <int NT> __device__ __forceinline__ void put(const float (&x)[NT][4], int n, int half) const {
    rows(n).full(x, half, full && n != partial);
  }
  template <int NT> __device__ __forceinline__ void put_other(const float (&x)[NT][4], int n, int half) const {
    if (other || (full && n == partial)) rows(n).other(x, half);
  }

 private:
  __device__ __forceinline__ Results rows(int n) const {
    return {first_rows + n * by_rows, width, n == partial ? partial_rows : chunk, columns};
  }
};

// Loader copies tiles of a chunk of ROWS rows, by the threads after the products' warps.
template <int ROWS> struct Loader {
  Copies copies;
  int me; // number of the thread; it has row `me` of the factors
  __device__ __forceinline__ Loader() : me((int)threadIdx.x - 32 * WARPS) {}
  __device__ __forceinline__ bool loads() const { return me >= 0; }

  template <int COLUMNS> __device__ __forceinline__ void view(bf16 *to, int step, const DeltaView &x,
                                                              const DeltaChunk &c, int64_t head, int c0) {
    copy_tile<LOADERS, COLUMNS, ROWS>(copies, to, step, x.row<bf16>(c.token, head) + c0, x.token, x.vectors,
                                      x.width - c0, c.rows, ROWS, me);
  }
  // keys copies WIDTH columns of keys or queries.
  template <int WIDTH>
  __device__ __forceinline__ void keys(bf16 *to, const DeltaView &x, const DeltaChunk &c, int64_t head) {
#pragma unroll
    for (int at = 0; at < WIDTH; at += 64) view<64>(to + at, WIDTH + TILE_GAP, x, c, head, at);
  }
  // square copies rows of T or P, of a.chunk elements.
  __device__ __forceinline__ void square(const DeltaCall &a, bf16 *to, const bf16 *from, const DeltaChunk &c) {
    copy_tile<LOADERS, ROWS, ROWS>(copies, to, ROWS + TILE_GAP, from, a.chunk, true, a.chunk, c.rows, ROWS, me);
  }
};

// sync waits for all threads. Threads that copy and threads that multiply call it in loops of their
// own.
__device__ __forceinline__ void sync() { sync_warps<DELTA_SCAN_THREADS>(); }

// copy_chunks copies the tiles of `count` chunks to stages of shared memory, in the scan's order.
// load(n, tiles) copies the tiles of a chunk; fetch(n) loads the factors of its rows, which put(n,
// factors) writes to shared memory a chunk later, when they have come from memory. fetch and put
// are also called for chunks after the last one.
template <int ROWS, class Load, class Fetch, class Put>
__device__ __forceinline__ void copy_chunks(Loader<ROWS> &loader, bf16 *shared, int stages, int stage, int count,
                                            const Load &load, const Fetch &fetch, const Put &put) {
  auto copy = [&](int n, int to) {
    if (n < count) load(n, shared + to * stage);
    loader.copies.close();
  };
  for (int n = 0; n < (stages > 1 ? stages - 1 : 1); n++) copy(n, n);
  put(0, fetch(0));
  auto factors = fetch(1);
  int to = stages - 1;
  for (int n = 0; n < count; n++) {
    if (stages == 3) loader.copies.template wait<1>(); // the following chunk may still be on its way
    else loader.copies.template wait<0>();
    sync(); // the tiles have arrived
    sync(); // both at once, so that the other threads never wait for copies here
    if (stages == 1) sync();
    copy(n + (stages > 1 ? stages - 1 : 1), to);
    to = to + 1 == stages ? 0 : to + 1;
    put(n + 1, factors);
    factors = fetch(n + 2);
  }
}

// for_chunks calls first(n, tiles) for each chunk and, after a barrier, second(n, tiles).
template <class First, class Second>
__device__ __forceinline__ void for_chunks(const bf16 *shared, int stages, int stage, int count, const First &first,
                                           const Second &second) {
  int at = 0;
  for (int n = 0; n < count; n++) {
    const bf16 *tiles = shared + at * stage;
    at = at + 1 == stages ? 0 : at + 1;
    sync(); // the tiles have arrived, and all threads have read the tiles of the previous chunk
    first(n, tiles);
    sync(); // both halves of the sums are there
    second(n, tiles);
    if (stages == 1) sync(); // all threads have read the tiles
  }
}

} // namespace

// delta_scan_tiles writes the states at seams, and X. The slices after the values compute
// the transition: their initial state is the identity, and their values are zero. If OUT, it
// computes out instead: there are no such slices, and neither states nor X are written.
template <int HALF, bool OUT> __global__ void __launch_bounds__(DELTA_SCAN_THREADS, 1) delta_scan_tiles(DeltaCall a) {
  typedef DeltaScanTiles<HALF> Tiles;
  constexpr int ROWS = Tiles::ROWS, KEYS = 2 * HALF + TILE_GAP, SQUARE = ROWS + TILE_GAP, NT = ROWS / 8;
  SHARED(bf16, shared);
  constexpr int SOLVE = (OUT ? 2 : 1) * Tiles::KEYS, SCORES = SOLVE + Tiles::SQUARE,
                VALUES = SOLVE + (OUT ? 2 : 1) * Tiles::SQUARE; // of a stage; queries begin at KEYS
  float *const factors = (float *)(shared + a.stages * Tiles::stage(OUT));
  const Exchange<NT> exchange(factors + 2 * Tiles::FACTORS);
  const Exchange<NT / 2> exchange_out(factors + 2 * Tiles::FACTORS + WARPS * 16 * ROWS);
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, half = warp / 2, n0 = warp % 2 * 16, k0 = half * HALF;
  const int value_slices = (a.dim_v + DELTA_SLICE - 1) / DELTA_SLICE,
            slices =
                value_slices + (!OUT && (a.transition || a.partial) ? (a.dim_k + DELTA_SLICE - 1) / DELTA_SLICE : 0);
  Loader<ROWS> loader;
  const DeltaScan of_block(a, slices, value_slices, blockIdx.x);
  if (of_block.skipped(a)) return;
  const int head = (int)of_block.head, key = (int)of_block.key, c0 = of_block.c0;
  const int64_t lo = of_block.range.lo;
  const int count = (int)(of_block.range.hi - lo); // of a panel
  const bool identity = !OUT && of_block.identity;
  const DeltaDocument document(a.start, a.chunks_before, of_block.range.document);
  auto chunk = [&](int n) { return n < count ? document.at(lo + n, a.chunk) : DeltaChunk{}; };
  auto factors_of = [&](int n) { return Factors(factors + n % 2 * Tiles::FACTORS, ROWS); };
  if (loader.loads()) {
    copy_chunks(
        loader, shared, a.stages, Tiles::stage(OUT), count,
        [&](int n, bf16 *keys) {
          const DeltaChunk c = chunk(n);
          loader.template keys<2 * HALF>(keys, a.k, c, key);
          loader.square(a, keys + SOLVE, a.solve_row<bf16>(head, c.token), c);
          if (!identity) loader.template view<DELTA_SLICE>(keys + VALUES, STEP, a.v, c, head, c0);
          if (!OUT) return;
          loader.template keys<2 * HALF>(keys + Tiles::KEYS, a.q, c, key);
          loader.square(a, keys + SCORES, a.rows_of<bf16>(a.scores, a.chunk, head, c.token), c);
        },
        [&](int n) { return QueryFactors(a, chunk(n), head, key, loader.me); },
        [&](int n, const QueryFactors &row) { // E·unit, F·unit, beta, scale·E·unit of q
          factors_of(n).set(chunk(n), loader.me, row.decay.z, row.decay.z * row.unit, row.decay.w * row.unit, row.beta,
                            a.scale * row.decay.z * row.unit_q);
        });
    return;
  }
  DeltaColumns<HALF> s(a.dim_k, of_block.width, c0);
  of_block.begin(a, s);
  // The states before the chunks are written, except before a document's first chunk, and X.
  const Written to(a, count, !OUT && a.states ? a.at_seam<bf16>(a.states, head, document.seam + lo - 1) : nullptr,
                   lo == 0,
                   !OUT && a.x && !identity ? a.rows_of<bf16>(a.x, a.dim_v, head, chunk(0).token) + c0 + n0 : nullptr,
                   count - 1, chunk(count - 1).rows, ROWS, a.dim_v - c0 - n0, 1);
  bf16 *const outs = OUT ? a.out.row<bf16>(chunk(0).token, head) + c0 + n0 : nullptr;
  float r[NT][4], out[NT / 2][4];
  for_chunks(
      shared, a.stages, Tiles::stage(OUT), count,
      [&](int n, const bf16 *keys) {
        float q[NT][4];
        const Operand<true> queries(keys + Tiles::KEYS + k0, KEYS);
        zero(r);
        zero(q);
        s.times(r, Operand<true>(keys + k0, KEYS), to.state(n), to.has_state(n), [&](int k, const Fragment &x) {
          if (OUT) add_product(q, Rounded(x).x, queries, k);
        });
        exchange.put(r);
        if (OUT) exchange_out.put_half(q, out, half);
      },
      [&](int n, const bf16 *keys) {
        const Factors f = factors_of(n);
        const float end = *f.end;
        const Operand<true> solve(keys + SOLVE, SQUARE);
        const Across values(keys + VALUES + n0, STEP);
        exchange.add(r);
#pragma unroll
        for (int k = 0; k < NT; k += 2) {
          uint32_t v[4];
          values.load(v, 8 * k);
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float *const to = &r[k + i / 2][i % 2 * 2];
            const int at = 8 * (k + i / 2) + lane.column;
            const float2 e = pair_at(f.first + at), beta = pair_at(f.third + at), value = pair_of(identity ? 0 : v[i]);
            to[0] = beta.x * (value.x - e.x * to[0]), to[1] = beta.y * (value.y - e.y * to[1]);
          }
        }
        float x[NT][4];
        zero(x);
#pragma unroll
        for (int k = 0; k < NT; k += 2) add_product(x, Fragment(r[k], r[k + 1]).x, solve, 8 * k, k);
        if (OUT) {
          // the half of the rows from ROWS / 2·half on: scale·E·q·S + P·X
          const Operand<true> scores(keys + SCORES + half * (ROWS / 2) * SQUARE, SQUARE);
          exchange_out.add(out);
#pragma unroll
          for (int k = 0; k < NT / 2; k++) {
            const float2 by = pair_at(f.fourth + half * (ROWS / 2) + 8 * k + lane.column);
            out[k][0] *= by.x, out[k][1] *= by.y, out[k][2] *= by.x, out[k][3] *= by.y;
          }
#pragma unroll
          for (int k = 0; k < NT; k += 2)
            if (k < NT / 2 || half) add_product(out, Rounded(x[k], x[k + 1]).x, scores, 8 * k);
          const int rows = chunk(n).rows - half * (ROWS / 2);
          write_out(a.out, outs + (n * (int64_t)a.chunk + half * (ROWS / 2)) * a.out.token, out, rows,
                    a.dim_v - c0 - n0);
        } else {
          to.put(x, n, half);
        }
        const Operand<false> keys_across(keys + k0, KEYS);
        float sum[HALF / 8][4];
        zero(sum);
#pragma unroll
        for (int k = 0; k < NT; k += 2)
          add_product(sum, Fragment(x[k], x[k + 1], f.second + 8 * k).x, keys_across, 8 * k);
        if (!OUT) to.put_other(x, n, half);
        if (!OUT && a.dim_k != 2 * HALF && to.has_state(n)) s.write(to.state(n));
        s.decay(end, sum);
      });
  DeltaScan(a, slices, value_slices, in_loop(blockIdx.x)).end(a, s); // found again, to save registers in the loop
}

// delta_scan_back_tiles loops from the last chunk to the first. It writes the gradients at seams,
// and Y.
template <int HALF> __global__ void __launch_bounds__(DELTA_SCAN_THREADS, 1) delta_scan_back_tiles(DeltaCall a) {
  typedef DeltaScanTiles<HALF> Tiles;
  constexpr int ROWS = Tiles::ROWS, KEYS = 2 * HALF + TILE_GAP, SQUARE = ROWS + TILE_GAP, NT = ROWS / 8;
  SHARED(bf16, shared);
  float *const factors = (float *)(shared + a.stages * Tiles::stage(true));
  const Exchange<NT> exchange(factors + 2 * Tiles::FACTORS);
  const Lane lane;
  const int warp = (int)threadIdx.x / 32, half = warp / 2, n0 = warp % 2 * 16, k0 = half * HALF;
  const int slices = (a.dim_v + DELTA_SLICE - 1) / DELTA_SLICE;
  Loader<ROWS> loader;
  const DeltaScan of_block(a, slices, slices, blockIdx.x);
  if (of_block.skipped_back(a)) return;
  const int head = (int)of_block.head, key = (int)of_block.key, c0 = of_block.c0;
  const int64_t hi = of_block.range.hi;
  const int count = (int)(hi - of_block.range.lo); // of a panel
  const DeltaDocument document(a.start, a.chunks_before, of_block.range.document);
  auto chunk = [&](int n) { return n < count ? document.at(hi - 1 - n, a.chunk) : DeltaChunk{}; };
  auto factors_of = [&](int n) { return Factors(factors + n % 2 * Tiles::FACTORS, ROWS); };
  if (loader.loads()) {
    copy_chunks(
        loader, shared, a.stages, Tiles::stage(true), count,
        [&](int n, bf16 *keys) {
          const DeltaChunk c = chunk(n);
          bf16 *const queries = keys + Tiles::KEYS, *const solve = queries + Tiles::KEYS,
                      *const scores = solve + Tiles::SQUARE;
          loader.template keys<2 * HALF>(keys, a.k, c, key);
          loader.template view<DELTA_SLICE>(scores + Tiles::SQUARE, STEP, a.dout, c, head, c0);
          loader.template keys<2 * HALF>(queries, a.q, c, key);
          loader.square(a, scores, a.rows_of<bf16>(a.scores, a.chunk, head, c.token), c);
          loader.square(a, solve, a.solve_row<bf16>(head, c.token), c);
        },
        [&](int n) { return QueryFactors(a, chunk(n), head, key, loader.me); },
        [&](int n, const QueryFactors &row) { // F·unit, -beta·E·unit, scale·E·unit of q
          factors_of(n).set(chunk(n), loader.me, row.decay.z, row.decay.w * row.unit,
                            -row.beta * row.decay.z * row.unit, a.scale * row.decay.z * row.unit_q);
        });
    return;
  }
  DeltaColumns<HALF> s(a.dim_k, a.dim_v, c0);
  of_block.begin_back(a, s);
  // The gradients of the states after the chunks are written, except after a document's last
  // chunk, and Y.
  const Written to(a, count, a.dstates ? a.at_seam<bf16>(a.dstates, head, document.seam + hi - 1) : nullptr,
                   hi == document.chunks, a.y ? a.rows_of<bf16>(a.y, a.dim_v, head, chunk(0).token) + c0 + n0 : nullptr,
                   0, chunk(0).rows, ROWS, a.dim_v - c0 - n0, -1);
  auto dout_of = [&](const bf16 *keys) { return Across(keys + 2 * (Tiles::KEYS + Tiles::SQUARE) + n0, STEP); };
  float r[NT][4], sum[HALF / 8][4];
  for_chunks(
      shared, a.stages, Tiles::stage(true), count,
      [&](int n, const bf16 *keys) {
        zero(r);
        s.times(r, Operand<true>(keys + k0, KEYS), to.state(n), to.has_state(n), [](int, const Fragment &) {});
        exchange.put(r);
        // The products with dout do not depend on the gradient of the state.
        const Across dout = dout_of(keys);
        const Operand<false> queries(keys + Tiles::KEYS + k0, KEYS);
        const Factors f = factors_of(n);
        zero(sum);
#pragma unroll
        for (int k = 0; k < NT; k += 2) {
          uint32_t rows[4];
          dout.load(rows, 8 * k);
          add_product(sum, Fragment(rows, f.third + 8 * k).x, queries, 8 * k);
        }
      },
      [&](int n, const bf16 *keys) {
        const Factors f = factors_of(n);
        const float end = *f.end;
        const Across dout = dout_of(keys);
        const Operand<false> solve(keys + 2 * Tiles::KEYS, SQUARE),
            scores(keys + 2 * Tiles::KEYS + Tiles::SQUARE, SQUARE), keys_across(keys + k0, KEYS);
        float x[NT][4], y[NT][4];
        zero(x);
#pragma unroll
        for (int k = NT - 2; k >= 0; k -= 2) {
          uint32_t rows[1][4];
          dout.load(rows[0], 8 * k);
          add_product(x, rows, scores, 8 * k, 0, k + 2);
        }
        exchange.add(r);
#pragma unroll
        for (int k = 0; k < NT; k++) {
          const float2 by = pair_at(f.first + 8 * k + lane.column);
#pragma unroll
          for (int e = 0; e < 4; e++) r[k][e] = madd(e % 2 ? by.y : by.x, r[k][e], x[k][e]);
        }
        zero(y);
#pragma unroll
        for (int k = NT - 2; k >= 0; k -= 2) add_product(y, Fragment(r[k], r[k + 1]).x, solve, 8 * k, 0, k + 2);
        to.put(y, n, half);
#pragma unroll
        for (int k = 0; k < NT; k += 2)
          add_product(sum, Fragment(y[k], y[k + 1], f.second + 8 * k).x, keys_across, 8 * k);
        to.put_other(y, n, half);
        if (a.dim_k != 2 * HALF && to.has_state(n)) s.write(to.state(n));
        s.decay(end, sum);
      });
  DeltaScan(a, slices, slices, in_loop(blockIdx.x)).end_back(a, s);
}

const DeltaKernel delta_scan[7] = {
    delta_scan_f32,
    delta_scan_tiles<32, false>,
    delta_scan_tiles<64, false>,
    delta_scan_tiles<128, false>,
    delta_scan_tiles<32, true>,
    delta_scan_tiles<64, true>,
    delta_scan_tiles<128, true>,
};
const DeltaKernel delta_scan_back[4] = {delta_scan_back_f32, delta_scan_back_tiles<32>, delta_scan_back_tiles<64>,
                                        delta_scan_back_tiles<128>};
