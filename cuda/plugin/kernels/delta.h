// The gated delta rule (Gated DeltaNet, arXiv:2412.06464, section 3.3, with the solve kept as a
// factor of X): formulas, kernel arguments, and tiles in shared memory (tile.h).
//
// For a chunk of a value head, let G be the sum of g from the chunk's start, E = exp(G), F =
// exp(Gend - G), M = exp(Gi - Gj) for j <= i, and S the state before the chunk. k and q are
// normalized if the call requests it. Then:
//
//   B = (k·kᵀ)·M below the diagonal,  T = (1 + beta·B)⁻¹,  P = scale·(q·kᵀ)·M up to the diagonal
//   X = T·(beta·(v - E·k·S)),  out = scale·E·q·S + P·X,  S ← exp(Gend)·S + kᵀ·(F·X)
//
// All chunks are prepared (B, T, P) and finished (out, gradients) in parallel. Between these, a
// block loops over the chunks of a segment (delta_index.h) with a slice of the state's columns: in
// the forward pass with S, in the backward pass with its gradient. In BF16, the forward pass
// computes out in this loop.
//
// Intermediate results in memory have the type of q, k and v. Decays, norms, and the states that
// panels and segments pass on are F32. Sums are F32.
//
// The forward pass saves T. The backward pass computes S and X again. A NaN in a row of v, k or q
// also reaches the earlier rows of its chunk, because 0·NaN is NaN.
#pragma once

#include "delta_index.h"
#include "tile.h"

// DeltaView is a tensor [tokens, heads, width]. token and head are strides in elements. wide: four
// elements can be accessed as one vector; vectors: 16 bytes can, and pairs at the end of a row.
struct DeltaView {
  void *data;
  int64_t token, head;
  int width;
  bool wide, vectors;

  template <typename T> __device__ __forceinline__ T *row(int64_t t, int64_t h) const {
    return (T *)data + t * token + h * head;
  }
};
struct DeltaGate {
  float *data;
  int64_t token, head;
}; // [tokens, heads] F32

// DeltaStored is a state or its gradient in memory: one at a seam, in the call's type and in BF16
// transposed, [dim_v, dim_k], or an argument in F32. If both are NULL, the state is zero.
template <typename T> struct DeltaStored {
  const T *seam;
  const float *argument;
  __device__ __forceinline__ explicit operator bool() const { return seam || argument; }
};

// DeltaCall has the arguments of the kernels for a panel (delta_index.h). Intermediate results have
// rows for the panel's tokens, solve for the tokens from solve_token on.
struct DeltaCall {
  DeltaView q, k, v, out, dout, dq, dk, dv;
  DeltaGate g, beta, dg, dbeta;
  int64_t value_heads, key_heads, all_documents;
  int64_t documents; // in the tables
  // the panel's chunks, tokens and documents, the first seam of its states, and the extents of rows
  // and states
  int64_t chunk0, chunks, token0, tokens, document0, panel_documents, seam0, rows, slots;
  int64_t solve_token, solve_rows;
  int dim_k, dim_v, chunk;
  // the panel's segments, their chunks, the panel's first joint, and the extent of joints
  int64_t segment0, segments, segment, joint0, joints;
  const int64_t *start, *chunks_before, *segments_before, *document, *key_head, *value_first;
  // states_in: the number of documents, from the first on, that have an initial state; states_out:
  // the number of documents, up to the last, that have a final state
  int64_t states_in, states_out;
  const float *state_in, *dstate_out;
  float *state_out, *dstate_in, *transition;
  // the state of the document that began before the panel, and that of the document that continues
  // after it; in the backward pass, their gradients from the following panel and to the preceding
  const float *carried_in, *dcarried_in;
  float *carried_out, *dcarried_out;
  // at joints: the states after the preceding segments, the gradients before the following ones,
  // and the segments' transition matrices
  float *ends, *dends, *transitions;
  float *unit_q, *unit_k;                                            // NULL = 1
  float4 *decay;                                                     // G as the sum of two floats, then E and F
  void *solve, *scores, *x, *y, *grad_q, *grad_k, *states, *dstates; // of the call's type
  float scale;
  // solved: the forward pass has saved T and what is at joints; partial: the scan computes each
  // segment for zero before it, and its transition matrix
  bool solved, normed, per_head, partial;
  int stages; // of the tiles of a scan in BF16
  // of a scan: the number of the grid's first block among the blocks of all its grids
  int64_t first_block;

  __device__ __forceinline__ int64_t row(int64_t head, int64_t token) const { return head * rows + token - token0; }
  // rows_of returns the row of a token in an intermediate result with rows of `width` elements.
  template <typename T> __device__ __forceinline__ T *rows_of(void *of, int width, int64_t head, int64_t token) const {
    return (T *)of + row(head, token) * width;
  }
  template <typename T> __device__ __forceinline__ T *solve_row(int64_t head, int64_t token) const {
    return (T *)solve + (head * solve_rows + token - solve_token) * chunk;
  }
  // state_of returns the state of a head among states [n, value heads, dim_k, dim_v].
  template <typename E> __device__ __forceinline__ E *state_of(E *states, int64_t n, int64_t head) const {
    return states + (n * value_heads + head) * dim_k * dim_v;
  }
  template <typename T> __device__ __forceinline__ T *at_seam(void *states, int64_t head, int64_t seam) const {
    return (T *)states + (head * slots + seam - seam0) * dim_k * dim_v;
  }
  // before and after return the state before a chunk and the gradient of the state after it.
  template <typename T> __device__ __forceinline__ DeltaStored<T> before(const DeltaChunk &c, int64_t head) const {
    if (!c.first) return {at_seam<T>(states, head, c.seam - 1), nullptr};
    const int64_t id = document[c.document];
    return {nullptr, id < states_in && state_in ? state_of(state_in, id, head) : nullptr};
  }
  template <typename T> __device__ __forceinline__ DeltaStored<T> after(const DeltaChunk &c, int64_t head) const {
    if (!c.last) return {at_seam<T>(dstates, head, c.seam), nullptr};
    const int64_t behind = document[c.document] - (all_documents - states_out);
    return {nullptr, behind >= 0 && dstate_out ? state_of(dstate_out, behind, head) : nullptr};
  }
  // end_at returns a state at a joint, or its gradient, of ends or dends.
  __device__ __forceinline__ float *end_at(float *of, int64_t head, int64_t joint) const {
    return of + (head * joints + joint - joint0) * dim_k * dim_v;
  }
  __device__ __forceinline__ float *transition_at(int64_t head, int64_t joint) const {
    return transitions + (head * joints + joint - joint0) * dim_k * dim_k;
  }
  __device__ __forceinline__ DeltaChunk find(int64_t n) const {
    return delta_find(start, chunks_before, documents, chunk0 + n, chunk);
  }
  __device__ __forceinline__ DeltaSegment find_segment(int64_t n) const {
    return delta_segment_at(chunks_before, segments_before, documents, segment0 + n, segment, chunk0, chunks);
  }
};

// DeltaFactors has the factors of row r of a chunk: the decays, the factor of the key's L2 norm,
// and beta. Missing rows have zero decays and beta, and unit 1.
struct DeltaFactors {
  float4 decay;
  float unit, beta;
  DeltaFactors() = default;
  __device__ __forceinline__ DeltaFactors(const DeltaCall &a, const DeltaChunk &c, int64_t head, int64_t key, int r) {
    const bool there = r < c.rows;
    decay = there ? a.decay[a.row(head, c.token + r)] : make_float4(0, 0, 0, 0);
    unit = there && a.unit_k ? a.unit_k[a.row(key, c.token + r)] : 1;
    beta = there ? a.beta.data[(c.token + r) * a.beta.token + head * a.beta.head] : 0;
  }
};

// DeltaRows divides rows among half warps: a thread has row first + half, if it exists, and then
// every `step` rows. A lane of a half has some neighbours of each LANES times as many.
struct DeltaRows {
  static constexpr int LANES = 16, OF_BLOCK = DELTA_THREADS / LANES;
  int64_t first, step;
  int half, lane;
  __device__ __forceinline__ DeltaRows()
      : first((int64_t)blockIdx.x * OF_BLOCK + threadIdx.x / 32 * 2),
        step((int64_t)gridDim.x * OF_BLOCK),
        half((int)threadIdx.x % 32 / LANES),
        lane((int)threadIdx.x % LANES) {}
};

typedef void (*DeltaKernel)(DeltaCall);

// The kernels, for F32 and for BF16.
extern const DeltaKernel delta_norms[2], delta_prepare[2], delta_gradients[2];
extern const DeltaKernel delta_out[1]; // for F32
// For F32, for BF16, and for BF16 with keys of more than 128 features.
extern const DeltaKernel delta_finish[3];
// The scans, for F32, and for BF16 with keys of at most 64, 128 and 256 features; then the scans
// in BF16 that compute out.
__global__ void delta_scan_f32(DeltaCall a);
__global__ void delta_scan_back_f32(DeltaCall a);
extern const DeltaKernel delta_scan[7], delta_scan_back[4];
// These add up the states, and their gradients, at joints, for keys of at most 128 and of at most
// DELTA_HEAD features.
extern const DeltaKernel delta_join[2], delta_join_back[2];

// copy_view copies columns c0 … c0 + COLUMNS - 1 of a chunk's rows of a tensor to a tile
// (copy_tile). copy_rows does so for rows of `width` elements of an intermediate result, and
// copy_state for rows of a state from row k0 on.
template <int COLUMNS, typename T> __device__ __forceinline__ void copy_view(Copies &copies, T *to, int step,
                                                                             const DeltaView &x, const DeltaChunk &c,
                                                                             int64_t head, int c0) {
  copy_tile<DELTA_THREADS, COLUMNS, DELTA_CHUNK>(copies, to, step, x.row<T>(c.token, head) + c0, x.token, x.vectors,
                                                 x.width - c0, c.rows, up16(c.rows));
}
template <int COLUMNS, typename T> __device__ __forceinline__ void copy_rows(Copies &copies, T *to, int step,
                                                                             const T *from, int width, int c0, int rows,
                                                                             int all) {
  const bool vectors = width % Wide<T>::LANES == 0 && (uintptr_t)from % 16 == 0;
  copy_tile<DELTA_THREADS, COLUMNS, DELTA_CHUNK>(copies, to, step, from + c0, width, vectors, width - c0, rows, all);
}
// copy_state copies rows k0 … k0 + 63 and columns c0 … c0 + COLUMNS - 1 of a state, in BF16
// transposed: row k of column c is at c·step + k.
template <int COLUMNS> __device__ __forceinline__ void copy_state(Copies &copies, float *to, int step,
                                                                  const DeltaStored<float> &s, int dim_k, int dim_v,
                                                                  int k0, int c0) {
  const float *from = (s.seam ? s.seam : s.argument) + (int64_t)k0 * dim_v;
  copy_rows<COLUMNS>(copies, to, step, from, dim_v, c0, (int)least(64, dim_k - k0), 64);
}
template <int COLUMNS> __device__ __forceinline__ void copy_state(Copies &copies, bf16 *to, int step,
                                                                  const DeltaStored<bf16> &s, int dim_k, int dim_v,
                                                                  int k0, int c0) {
  const int columns = (int)least(COLUMNS, dim_v - c0);
  if (s.seam) return copy_rows<64>(copies, to, step, s.seam + (int64_t)c0 * dim_k, dim_k, k0, columns, COLUMNS);
#pragma unroll 1
  for (int i = (int)threadIdx.x; i < 32 * COLUMNS; i += DELTA_THREADS) {
    const int row = i / COLUMNS * 2, column = i % COLUMNS;
    const float *from = s.argument + (int64_t)(k0 + row) * dim_v + c0 + column;
    const bool there = column < columns;
    put_pair(to + column * step + row, there && k0 + row < dim_k ? from[0] : 0,
             there && k0 + row + 1 < dim_k ? from[dim_v] : 0);
  }
}

// load_two and store_two move two neighbouring columns of a lane, as many as exist, of a tensor or
// of dense rows of `width` floats.
template <typename E> __device__ __forceinline__ void load_two(const E *p, int left, bool wide, float (&x)[2]) {
  load_flat<2>(p, left, wide, x);
}
template <typename E> __device__ __forceinline__ void store_two(E *p, int left, bool wide, float x, float y) {
  const float both[2] = {x, y};
  store_flat<2>(p, left, wide, both);
}
template <typename E> __device__ __forceinline__ bool even(const E *p, int width) {
  return width % 2 == 0 && (uintptr_t)p % (2 * sizeof(E)) == 0;
}

// DeltaSlice is a slice of a state [dim_k, 32 columns from c0 of `width`] in a block's registers:
// warp w has rows 16(w + 8i) … 16(w + 8i) + 15, for i < N.
template <int N> struct DeltaSlice {
  float c[N][4][4];
  int rows, width, c0;

  __device__ __forceinline__ DeltaSlice(int rows, int width, int c0) : rows(rows), width(width), c0(c0) {
#pragma unroll
    for (int i = 0; i < N; i++) zero(c[i]);
  }
  // first returns the first of rows i. These rows exist if it is less than `rows`.
  __device__ __forceinline__ int first(int i) const { return ((int)threadIdx.x / 32 + 8 * i) * 16; }

  // each calls f for the pairs of elements that exist, with their row and column in the state.
  template <typename F> __device__ __forceinline__ void each(F f) {
    const Lane lane;
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int row = first(i) + lane.row + 8 * half, column = c0 + 8 * n + lane.column;
          if (row < rows && column < width) f(row, column, c[i][n][2 * half], c[i][n][2 * half + 1]);
        }
  }
  __device__ __forceinline__ void identity() {
    each([](int row, int column, float &x, float &y) { x = row == column, y = row == column + 1; });
  }
  __device__ __forceinline__ void load(const float *from) {
    const bool wide = even(from, width);
    each([&](int row, int column, float &x, float &y) {
      float both[2];
      load_two(from + (int64_t)row * width + column, width - column, wide, both);
      x = both[0], y = both[1];
    });
  }
  template <typename E> __device__ __forceinline__ void store(E *to) {
    const bool wide = even(to, width);
    each([&](int row, int column, float x, float y) {
      store_two(to + (int64_t)row * width + column, width - column, wide, x, y);
    });
  }
  // tile writes the slice to a tile of F32.
  __device__ __forceinline__ void tile(float *to, int step) const {
    const Lane lane;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (first(i) < rows)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            put_pair(to + (first(i) + lane.row + 8 * half) * step + 8 * n + lane.column, c[i][n][2 * half],
                     c[i][n][2 * half + 1]);
  }
  // add multiplies the slice by `by` and adds keysᵀ·values of two tiles of `depth` rows. The
  // product is summed separately, so that the state is rounded once.
  __device__ __forceinline__ void add(float by, const float *keys, int step, const float *values, int values_step,
                                      int depth) {
#pragma unroll
    for (int i = 0; i < N; i++)
      if (first(i) < rows) {
        float part[4][4];
        zero(part);
        tile_product<false, false>(part, keys + first(i), step, values, values_step, depth);
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) c[i][n][e] = madd(by, c[i][n][e], part[n][e]);
      }
  }
};

// DeltaScan is the work of a block of a scan: a slice of the columns of a head's state, in a
// segment. begin loads the state (forward) or the gradient (backward) that the segment begins with,
// end stores what it ends with.
struct DeltaScan {
  int64_t head, key, id; // id: the document in the call's list
  DeltaSegment range;
  int width, c0;
  bool identity; // computes the transition matrix

  // A segment and a head have `slices` blocks, of which the first value_slices have columns of the
  // values. block is blockIdx.x.
  __device__ __forceinline__ DeltaScan(const DeltaCall &a, int slices, int value_slices, uint32_t block) {
    const int64_t work = a.first_block + block;
    head = work / slices % a.value_heads;
    key = a.key_head[head];
    range = a.find_segment(work / slices / a.value_heads);
    id = a.document[range.document];
    identity = work % slices >= value_slices;
    width = identity ? a.dim_k : a.dim_v;
    c0 = (int)(work % slices - (identity ? value_slices : 0)) * DELTA_SLICE;
  }

  // The state after the first segment is computed with the state before it, and that after the last
  // one is not needed.
  __device__ __forceinline__ bool skipped(const DeltaCall &a) const {
    return a.partial && !(range.leads && (range.follows || !identity));
  }
  __device__ __forceinline__ float *transition(const DeltaCall &a) const {
    return a.partial ? a.transition_at(head, range.joint) : a.transition + head * a.dim_k * a.dim_k;
  }
  template <class S> __device__ __forceinline__ void begin(const DeltaCall &a, S &s) const {
    const float *from = nullptr;
    if (identity && (a.partial || range.begins)) s.identity();
    else if (identity) from = transition(a);
    else if (range.follows) from = a.partial ? nullptr : a.end_at(a.ends, head, range.joint - 1);
    else if (!range.begins) from = a.state_of(a.carried_in, 0, head);
    else if (id < a.states_in && a.state_in) from = a.state_of(a.state_in, id, head);
    if (from) s.load(from);
  }
  template <class S> __device__ __forceinline__ void end(const DeltaCall &a, S &s) const {
    const int64_t behind = id - (a.all_documents - a.states_out);
    float *to = nullptr;
    if (identity) to = transition(a);
    else if (range.leads) to = a.partial ? a.end_at(a.ends, head, range.joint) : nullptr;
    else if (!range.ends) to = a.carried_out ? a.state_of(a.carried_out, 0, head) : nullptr;
    else if (behind >= 0 && a.state_out) to = a.state_of(a.state_out, behind, head);
    if (to) s.store(to);
  }

  // No segment needs the gradient before the first.
  __device__ __forceinline__ bool skipped_back(const DeltaCall &a) const { return a.partial && !range.follows; }
  template <class S> __device__ __forceinline__ void begin_back(const DeltaCall &a, S &s) const {
    const int64_t behind = id - (a.all_documents - a.states_out);
    const float *from = nullptr;
    if (range.leads) from = a.partial ? nullptr : a.end_at(a.dends, head, range.joint);
    else if (!range.ends) from = a.state_of(a.dcarried_in, 0, head);
    else if (behind >= 0 && a.dstate_out) from = a.state_of(a.dstate_out, behind, head);
    if (from) s.load(from);
  }
  template <class S> __device__ __forceinline__ void end_back(const DeltaCall &a, S &s) const {
    float *to = nullptr;
    if (range.follows) to = a.partial ? a.end_at(a.dends, head, range.joint - 1) : nullptr;
    else if (!range.begins) to = a.state_of(a.dcarried_out, 0, head);
    else if (id < a.states_in && a.dstate_in) to = a.state_of(a.dstate_in, id, head);
    if (to) s.store(to);
  }
};
