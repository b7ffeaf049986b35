// Products of the rows of experts with the experts' matrices, and the gradients of the matrices
// (device/experts.go, GroupedGemm and GroupedGemmWeights; the method of MegaBlocks, Gale et al.
// 2022, arXiv:2211.15841). The numbers of rows are known on the GPU only: a launch has a block for
// each tile of the result that there may be, and a block finds its expert from the offsets.
//
// A block computes a tile of SIDE x SIDE results, a warp a quarter of it. Tiles of both factors are
// copied to shared memory STAGES - 1 steps ahead. Sums are in F32, in the order of the depth, so
// the result of a row does not depend on the other rows.
#include "check.h"
#include "faults.h"
#include "tile.h"

namespace {

enum { WARPS = 4, THREADS = 32 * WARPS };

// A warp has MT x NT results of 16 x 8. ACROSS_GAP: elements after each row of a tile that is not
// dense along the depth (see tile.h for both gaps).
template <typename T> struct Sizes;
template <> struct Sizes<bf16> {
  enum { SIDE = 128, DEPTH = 32, STAGES = 3, MT = 4, NT = 8, ACROSS_GAP = 8 };
};
template <> struct Sizes<float> {
  enum { SIDE = 64, DEPTH = 16, STAGES = 2, MT = 2, NT = 4, ACROSS_GAP = 4 };
};

template <typename T, bool DENSE> struct TileOf {
  typedef Sizes<T> Z;
  enum {
    STEP = DENSE ? Z::DEPTH + TILE_GAP : Z::SIDE + Z::ACROSS_GAP,
    ELEMENTS = STEP * (DENSE ? Z::SIDE : Z::DEPTH),
  };
};
template <typename T, bool A_DENSE, bool B_DENSE> constexpr int shared_bytes() {
  return Sizes<T>::STAGES * (TileOf<T, A_DENSE>::ELEMENTS + TileOf<T, B_DENSE>::ELEMENTS) * (int)sizeof(T);
}

// Factor is a matrix [lines, depth] from the first line of a tile on. It is DENSE along the depth,
// or along the lines.
template <typename T, bool DENSE> struct Factor {
  const T *p;
  int64_t stride;
  int lines;    // that exist, at most SIDE
  bool vectors; // its rows in memory begin at multiples of 16 bytes

  __device__ __forceinline__ Factor(const void *matrix, int64_t step, int64_t first, int64_t all, bool aligned)
      : p((const T *)matrix + (DENSE ? first * step : first)),
        stride(step),
        lines((int)least(Sizes<T>::SIDE, all - first)),
        vectors(aligned) {}

  // copy copies a tile that begins at k and has zeros beyond the lines and the depth.
  __device__ __forceinline__ void copy(Copies &copies, T *to, int64_t k, int64_t depth) const {
    typedef Sizes<T> Z;
    constexpr int STEP = TileOf<T, DENSE>::STEP;
    const int left = (int)least(Z::DEPTH, depth - k);
    if (DENSE) copy_tile<THREADS, Z::DEPTH, Z::SIDE>(copies, to, STEP, p + k, stride, vectors, left, lines, Z::SIDE);
    else
      copy_tile<THREADS, Z::SIDE, Z::DEPTH>(copies, to, STEP, p + k * stride, stride, vectors, lines, left, Z::DEPTH);
  }
};

// The results of a warp: 16·MT lines of A by 8·NT lines of B.
template <typename T> struct Results {
  float c[Sizes<T>::MT][Sizes<T>::NT][4];
  int m, n; // the first lines of the warp within the tile

  __device__ __forceinline__ Results()
      : m((int)threadIdx.x / 64 * 16 * Sizes<T>::MT), n((int)threadIdx.x / 32 % 2 * 8 * Sizes<T>::NT) {}
};

// add_product adds the product of two tiles in shared memory.
template <bool A_DENSE, bool B_DENSE>
__device__ __forceinline__ void add_product(Results<float> &r, const float *a, const float *b) {
  typedef Sizes<float> Z;
  constexpr int A_STEP = TileOf<float, A_DENSE>::STEP, B_STEP = TileOf<float, B_DENSE>::STEP;
#pragma unroll
  for (int i = 0; i < Z::MT; i++)
    tile_product<A_DENSE, B_DENSE>(r.c[i], a + (r.m + 16 * i) * (A_DENSE ? A_STEP : 1), A_STEP,
                                   b + r.n * (B_DENSE ? B_STEP : 1), B_STEP, Z::DEPTH);
}
template <bool A_DENSE, bool B_DENSE>
__device__ __forceinline__ void add_product(Results<bf16> &r, const bf16 *a, const bf16 *b) {
  typedef Sizes<bf16> Z;
  constexpr int A_STEP = TileOf<bf16, A_DENSE>::STEP, B_STEP = TileOf<bf16, B_DENSE>::STEP;
  const uint32_t at_a = (uint32_t)__cvta_generic_to_shared(
                     a + (A_DENSE ? r.m * A_STEP + quarters_down(A_STEP) : r.m + quarters_along(A_STEP))),
                 at_b = (uint32_t)__cvta_generic_to_shared(
                     b + (B_DENSE ? r.n * B_STEP + quarters_along(B_STEP) : r.n + quarters_down(B_STEP)));
#pragma unroll
  for (int k = 0; k < Z::DEPTH; k += 16) {
    uint32_t x[Z::MT][4];
#pragma unroll
    for (int i = 0; i < Z::MT; i++)
      ldmatrix<!A_DENSE>(x[i], at_a + 2 * (A_DENSE ? 16 * i * A_STEP + k : k * A_STEP + 16 * i));
#pragma unroll
    for (int n = 0; n < Z::NT; n += 2) {
      uint32_t y[4];
      ldmatrix<!B_DENSE>(y, at_b + 2 * (B_DENSE ? 8 * n * B_STEP + k : k * B_STEP + 8 * n));
#pragma unroll
      for (int i = 0; i < Z::MT; i++) mma_pair(r.c[i][n], r.c[i][n + 1], x[i], y);
    }
  }
}

// multiply computes A·Bᵀ for factors [lines, depth]. All threads take part.
template <typename T, bool A_DENSE, bool B_DENSE>
__device__ __forceinline__ void multiply(Results<T> &r, T *shared, const Factor<T, A_DENSE> &a,
                                         const Factor<T, B_DENSE> &b, int64_t depth) {
  typedef Sizes<T> Z;
  constexpr int A_SIZE = TileOf<T, A_DENSE>::ELEMENTS, STAGE = A_SIZE + TileOf<T, B_DENSE>::ELEMENTS;
  const int64_t steps = ceil_div(depth, Z::DEPTH);
  Copies copies;
  auto load = [&](int64_t i, int stage) {
    if (i < steps) {
      a.copy(copies, shared + stage * STAGE, i * Z::DEPTH, depth);
      b.copy(copies, shared + stage * STAGE + A_SIZE, i * Z::DEPTH, depth);
    }
    copies.close(); // also without copies: wait counts groups
  };
#pragma unroll
  for (int i = 0; i < Z::MT; i++) zero(r.c[i]);
  __syncthreads(); // all threads have read the tiles of the previous product
#pragma unroll
  for (int i = 0; i < Z::STAGES - 1; i++) load(i, i);
  for (int64_t i = 0; i < steps; i++) {
    const int stage = (int)(i % Z::STAGES);
    copies.template wait<Z::STAGES - 2>();
    __syncthreads(); // the tiles have arrived, and all threads have read the tiles of step i - 1
    load(i + Z::STAGES - 1, (stage + Z::STAGES - 1) % Z::STAGES);
    add_product<A_DENSE, B_DENSE>(r, shared + stage * STAGE, shared + stage * STAGE + A_SIZE);
  }
}

struct GroupedCall {
  const void *a, *b;
  void *c;
  const int32_t *offsets;
  int64_t rows, experts, lines_a, lines_b, depth; // lines_a: of a gradient; depth: of a product
  int64_t a_step, b_step, b_expert, c_step, c_expert;
  bool a_vectors, b_vectors, c_vectors;
  int op;
  uly_fault *fault;

  // range returns the rows of an expert, inside of the rows that there are.
  __device__ __forceinline__ void range(int64_t e, int64_t *lo, int64_t *hi) const {
    const int32_t from = offsets[e], to = offsets[e + 1];
    *lo = least(most(from, 0), rows), *hi = least(most(to, *lo), rows);
    if (from != *lo || to != *hi || (e == 0 && from != 0) || (e + 1 == experts && to != rows))
      report(fault, op, e == 0 && from != 0 ? from : to, e == 0 && from != 0 ? 0 : e + 1);
  }
};

// Bias is the bias [E, N] of a product. p is null if there is none.
struct Bias {
  const void *p;
  int64_t expert; // elements from one expert to the next
};

// add_bias adds a bias to a warp's results. `bias` begins at their first column, and has `columns`
// elements from there on.
template <typename T> __device__ __forceinline__ void add_bias(Results<T> &r, const T *bias, int64_t columns) {
  const Lane lane;
#pragma unroll
  for (int n = 0; n < Sizes<T>::NT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int column = 8 * n + lane.column + e;
      const float x = column < columns ? widen(bias[column]) : 0.0f;
#pragma unroll
      for (int i = 0; i < Sizes<T>::MT; i++) r.c[i][n][e] += x, r.c[i][n][2 + e] += x;
    }
}

// grouped_rows computes C[r] = A[r]·B[e], and with BIAS adds bias[e]. One kernel for both cases
// would have 359 instructions instead of 338 in the loop over the depth.
template <typename T, bool B_DENSE, bool BIAS> __global__ void __launch_bounds__(THREADS, 2)
    grouped_rows(GroupedCall g, int64_t work, Bias bias) {
  typedef Sizes<T> Z;
  SHARED(T, shared);
  __shared__ int tiles_of[WARPS];
  __shared__ int64_t found[3]; // the expert, its rows from this tile on
  const int64_t across = ceil_div(g.lines_b, Z::SIDE), each = ceil_div(g.experts, THREADS);
  const int64_t first = least(threadIdx.x * each, g.experts), end = least(first + each, g.experts);
  Results<T> r;
  for (int64_t w = blockIdx.x; w < work; w += gridDim.x) {
    const int64_t tile = w / across, column = w % across * Z::SIDE;
    // A thread counts the tiles of `each` experts, and finds out whether one of them is this tile.
    int64_t lo, hi;
    int mine = 0;
    for (int64_t e = first; e < end; e++) {
      g.range(e, &lo, &hi);
      mine += (int)ceil_div(hi - lo, Z::SIDE);
    }
    int upto = mine; // tiles up to this thread's experts
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, upto, by);
      if ((int)threadIdx.x % 32 >= by) upto += other;
    }
    if (threadIdx.x % 32 == 31) tiles_of[threadIdx.x / 32] = upto;
    if (threadIdx.x == 0) found[0] = -1;
    __syncthreads();
    for (int i = 0; i < (int)threadIdx.x / 32; i++) upto += tiles_of[i];
    int64_t before = upto - mine;
    if (tile >= before && tile < upto)
      for (int64_t e = first; e < end; e++) {
        g.range(e, &lo, &hi);
        const int64_t n = ceil_div(hi - lo, Z::SIDE);
        if (tile >= before && tile < before + n) found[0] = e, found[1] = lo + (tile - before) * Z::SIDE, found[2] = hi;
        before += n;
      }
    __syncthreads();
    const int64_t expert = found[0], row = found[1], last = found[2];
    if (expert >= 0) {
      multiply<T, true, B_DENSE>(
          r, shared, Factor<T, true>(g.a, g.a_step, row, last, g.a_vectors),
          Factor<T, B_DENSE>((const T *)g.b + expert * g.b_expert, g.b_step, column, g.lines_b, g.b_vectors), g.depth);
      if (BIAS) add_bias(r, (const T *)bias.p + expert * bias.expert + column + r.n, g.lines_b - column - r.n);
#pragma unroll
      for (int i = 0; i < Z::MT; i++)
#pragma unroll
        for (int n = 0; n < Z::NT; n += 4) {
          float c[4][4];
#pragma unroll
          for (int j = 0; j < 16; j++) c[j / 4][j % 4] = r.c[i][n + j / 4][j % 4];
          const int64_t at = row + r.m + 16 * i, from = column + r.n + 8 * n;
          T *const to = (T *)g.c + at * g.c_step + from;
          store_results(
              c, (int)(last - at), (int)(g.lines_b - from), g.c_vectors, [&](int k) { return to + k * g.c_step; }, T());
        }
    }
    __syncthreads(); // all threads have read `found`
  }
}

// grouped_weights adds Aᵀ·B over the rows of each expert to C [E, M, N].
template <typename T> __global__ void __launch_bounds__(THREADS) grouped_weights(GroupedCall g, int64_t work) {
  typedef Sizes<T> Z;
  SHARED(T, shared);
  const int64_t across = ceil_div(g.lines_b, Z::SIDE), tiles = ceil_div(g.lines_a, Z::SIDE) * across;
  Results<T> r;
  const Lane lane;
  for (int64_t w = blockIdx.x; w < work; w += gridDim.x) {
    const int64_t e = w / tiles, line = w % tiles / across * Z::SIDE, column = w % across * Z::SIDE;
    int64_t lo, hi;
    g.range(e, &lo, &hi);
    if (lo == hi) continue; // the same for all threads
    multiply<T, false, false>(
        r, shared, Factor<T, false>((const T *)g.a + lo * g.a_step, g.a_step, line, g.lines_a, g.a_vectors),
        Factor<T, false>((const T *)g.b + lo * g.b_step, g.b_step, column, g.lines_b, g.b_vectors), hi - lo);
    const int from = r.n + lane.column, left = (int)least(Z::SIDE, g.lines_b - column) - from;
#pragma unroll
    for (int i = 0; i < Z::MT; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int64_t at = line + r.m + 16 * i + lane.row + 8 * half;
        if (at >= g.lines_a) continue;
        float *const to = (float *)g.c + e * g.c_expert + at * g.c_step + column + from;
        if (g.c_vectors && left >= 8 * Z::NT - 6) { // the lane has all its columns
          float sums[Z::NT][2];
#pragma unroll
          for (int n = 0; n < Z::NT; n++) load<2>(to + 8 * n, sums[n]);
#pragma unroll
          for (int n = 0; n < Z::NT; n++) {
#pragma unroll
            for (int j = 0; j < 2; j++) sums[n][j] += r.c[i][n][2 * half + j];
            store<2>(to + 8 * n, sums[n]);
          }
          continue;
        }
#pragma unroll
        for (int n = 0; n < Z::NT; n++) {
#pragma unroll
          for (int j = 0; j < 2; j++)
            if (8 * n + j < left) to[8 * n + j] += r.c[i][n][2 * half + j];
        }
      }
  }
}

template <typename F, typename... More> int32_t start(uly_device *d, uly_stream *s, const char *what, F kernel,
                                                      std::atomic<uint64_t> &allowed, int shared, const GroupedCall &g,
                                                      int64_t work, const More &...more) {
  if (shared > 48 << 10) TRY(allow_shared(d, (const void *)kernel, shared, allowed, what));
  LAUNCH(kernel, (unsigned)least(work, GRID_LIMIT), THREADS, (size_t)shared, s, g, work, more...);
  return check_launch(d, what);
}

template <typename T, bool B_DENSE, bool BIAS>
int32_t start_rows(uly_device *d, uly_stream *s, const GroupedCall &g, const Bias &bias) {
  static std::atomic<uint64_t> allowed;
  // An expert with rows has at most one tile that is not full.
  const int64_t tiles = g.rows / Sizes<T>::SIDE + least(g.experts, g.rows);
  return start(d, s, "cuda.GroupedGemm", grouped_rows<T, B_DENSE, BIAS>, allowed, shared_bytes<T, true, B_DENSE>(), g,
               tiles * ceil_div(g.lines_b, Sizes<T>::SIDE), bias);
}

template <typename T>
int32_t start_product(uly_device *d, uly_stream *s, bool dense, const GroupedCall &g, const Bias &bias) {
  if (bias.p) return dense ? start_rows<T, true, true>(d, s, g, bias) : start_rows<T, false, true>(d, s, g, bias);
  return dense ? start_rows<T, true, false>(d, s, g, bias) : start_rows<T, false, false>(d, s, g, bias);
}

template <typename T> int32_t start_weights(uly_device *d, uly_stream *s, const GroupedCall &g) {
  static std::atomic<uint64_t> allowed;
  return start(d, s, "cuda.GroupedGemmWeights", grouped_weights<T>, allowed, shared_bytes<T, false, false>(), g,
               g.experts * ceil_div(g.lines_a, Sizes<T>::SIDE) * ceil_div(g.lines_b, Sizes<T>::SIDE));
}

int32_t product(uly_device *d, uly_stream *s, const void *args) {
  const uly_grouped_gemm &a = *(const uly_grouped_gemm *)args;
  Check c(d, "GroupedGemm");
  const int type = c.compute("A", a.a);
  c.rows("A", a.a, type, {-1, -1});
  if (c.failed()) return c.code;
  const int64_t rows = a.a.shape[0], k = a.a.shape[1];
  c.shape("B", a.b, type, {-1, k, -1});
  if (c.failed()) return c.code;
  const int64_t experts = a.b.shape[0], n = a.b.shape[2], by_k = a.b.stride[1], by_n = a.b.stride[2];
  if (a.bias.dtype) c.rows("bias", a.bias, type, {experts, n});
  c.rows("C", a.c, type, {rows, n});
  c.dense("offsets", a.offsets, ULY_I32, {experts + 1});
  const bool dense = by_k == 1 || k == 1; // along the depth
  if (!dense && by_n != 1 && n > 1) c.refuse("B is %s: the stride of K or of N must be 1", text_of(a.b).c_str());
  if (c.failed() || rows * n == 0 || experts == 0) return c.code;
  const int64_t size = size_of(type);
  GroupedCall g = {};
  g.a = a.a.data, g.b = a.b.data, g.c = a.c.data, g.offsets = (const int32_t *)a.offsets.data;
  g.rows = rows, g.experts = experts, g.lines_b = n, g.depth = k;
  g.a_step = a.a.stride[0], g.b_step = dense ? by_n : by_k, g.b_expert = a.b.stride[0], g.c_step = a.c.stride[0];
  const Bias bias = {a.bias.data, a.bias.stride[0]};
  g.a_vectors = aligned16(g.a, size, g.a_step), g.b_vectors = aligned16(g.b, size, g.b_step, g.b_expert);
  g.c_vectors = aligned16(g.c, size, g.c_step);
  g.op = ULY_OP_GROUPED_GEMM, g.fault = s->fault;
  return type == ULY_F32 ? start_product<float>(d, s, dense, g, bias) : start_product<bf16>(d, s, dense, g, bias);
}

int32_t gradient(uly_device *d, uly_stream *s, const void *args) {
  const uly_grouped_gemm_weights &a = *(const uly_grouped_gemm_weights *)args;
  Check c(d, "GroupedGemmWeights");
  const int type = c.compute("A", a.a);
  c.rows("A", a.a, type, {-1, -1});
  if (c.failed()) return c.code;
  const int64_t rows = a.a.shape[0], m = a.a.shape[1];
  c.rows("B", a.b, type, {rows, -1});
  if (c.failed()) return c.code;
  const int64_t n = a.b.shape[1];
  c.rows("C", a.c, ULY_F32, {-1, m, n});
  if (c.failed()) return c.code;
  const int64_t experts = a.c.shape[0];
  c.dense("offsets", a.offsets, ULY_I32, {experts + 1});
  if (c.failed() || experts * rows * m * n == 0) return c.code;
  const int64_t size = size_of(type);
  GroupedCall g = {};
  g.a = a.a.data, g.b = a.b.data, g.c = a.c.data, g.offsets = (const int32_t *)a.offsets.data;
  g.rows = rows, g.experts = experts, g.lines_a = m, g.lines_b = n;
  g.a_step = a.a.stride[0], g.b_step = a.b.stride[0], g.c_expert = a.c.stride[0], g.c_step = a.c.stride[1];
  g.a_vectors = aligned16(g.a, size, g.a_step), g.b_vectors = aligned16(g.b, size, g.b_step);
  g.c_vectors = (uintptr_t)g.c % 8 == 0 && g.c_step % 2 == 0 && g.c_expert % 2 == 0;
  g.op = ULY_OP_GROUPED_GEMM_WEIGHTS, g.fault = s->fault;
  return type == ULY_F32 ? start_weights<float>(d, s, g) : start_weights<bf16>(d, s, g);
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_GROUPED_GEMM, "own", product},
    {ULY_OP_GROUPED_GEMM_WEIGHTS, "own", gradient},
});
