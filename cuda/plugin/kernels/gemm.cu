// GEMM: C [M, N] = A [M, K] · B [K, N] (+ bias [N], or + C), F32 or BF16, with any strides and one
// dense axis. The kernel "naive" multiplies tiles in shared memory with F32 fused multiply-adds, in
// the order of k. libraries/gemm_rows.cu registers cuBLASLt.
#include "gemm.h"
#include "check.h"
#include "values.h"

static bool matrix(const uly_tensor &t, int64_t rows, int64_t columns) {
  return t.where == ULY_CUDA && t.ndim == 2 && t.shape[0] == rows && t.shape[1] == columns;
}

// gemm_refusal checks only what memory safety needs.
std::string gemm_refusal(const uly_gemm &g) {
  int64_t m = g.a.shape[0], k = g.a.shape[1], n = g.b.shape[1];
  std::string product = text_of(g.a) + " · " + text_of(g.b) + " -> " + text_of(g.c) + ": ";
  bool types = (g.a.dtype == ULY_F32 || g.a.dtype == ULY_BF16) && g.b.dtype == g.a.dtype &&
               (g.c.dtype == g.a.dtype || g.c.dtype == ULY_F32);
  if (!types || !matrix(g.a, m, k) || !matrix(g.b, k, n) || !matrix(g.c, m, n))
    return product +
           "the shapes must be [M, K], [K, N], [M, N], in F32 or BF16 in device memory; C may be F32 if A and B are "
           "BF16";
  const uly_tensor &bias = g.bias;
  if (bias.data && (g.accumulate || bias.dtype != g.b.dtype || bias.where != ULY_CUDA || bias.ndim != 1 ||
                    bias.shape[0] != n || (n > 1 && bias.stride[0] != 1)))
    return "bias " + text_of(bias) + ", accumulate " + std::to_string(g.accumulate) + ": a bias must be dense, [" +
           std::to_string(n) + "], have B's type, and exclude accumulation";
  if (gemm_unit(gemm_view_of(g.a)) < 0 || gemm_unit(gemm_view_of(g.b)) < 0 || (n > 1 && g.c.stride[1] != 1))
    return product + "A and B need an axis of stride 1, and C needs a last axis of stride 1";
  for (const uly_tensor *t : {&g.a, &g.b, &g.c})
    if (t->data == nullptr && elements(*t) > 0) return product + "a matrix has no memory";
  for (const uly_tensor *t : {&g.a, &g.b, &g.c, &bias})
    if (misaligned(t->data, t->dtype)) return product + "addresses must be multiples of the element size";
  return "";
}

namespace {

// A thread computes SIDE x SIDE elements of C.
enum { TILE = 64, DEPTH = 16, THREADS = 256, SIDE = 4, PITCH = TILE + 4 };

// fetch copies a tile of TILE lines (rows of A, columns of B) by DEPTH steps of k to shared memory,
// with zeros beyond the matrix. Consecutive threads read along the axis that is dense in memory.
template <class T> __device__ __forceinline__ void fetch(float (*tile)[PITCH], const T *x, int64_t line0, int64_t lines,
                                                         int64_t by_line, int64_t k0, int64_t depth, int64_t by_k) {
  for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
    int line = by_line == 1 ? i % TILE : i / DEPTH, k = by_line == 1 ? i / TILE : i % DEPTH;
    bool inside = line0 + line < lines && k0 + k < depth;
    tile[k][line] = inside ? widen(x[(line0 + line) * by_line + (k0 + k) * by_k]) : 0.0f;
  }
}

struct naive_args {
  gemm_view a, b, c;
  int64_t across, tiles; // tiles of C: in a row of tiles, and in all
  const void *pa, *pb, *bias;
  void *pc;
  int accumulate;
};

template <class T, class C> __global__ void __launch_bounds__(THREADS) naive_gemm(naive_args g) {
  __shared__ __align__(16) float ta[DEPTH][PITCH];
  __shared__ __align__(16) float tb[DEPTH][PITCH];
  const int across = threadIdx.x % (TILE / SIDE) * SIDE, down = threadIdx.x / (TILE / SIDE) * SIDE;
  for (int64_t t = blockIdx.x; t < g.tiles; t += gridDim.x) {
    const int64_t i0 = t / g.across * TILE, j0 = t % g.across * TILE;
    float sum[SIDE][SIDE] = {};
    for (int64_t k0 = 0; k0 < g.a.columns; k0 += DEPTH) {
      fetch(ta, static_cast<const T *>(g.pa), i0, g.a.rows, g.a.row, k0, g.a.columns, g.a.column);
      fetch(tb, static_cast<const T *>(g.pb), j0, g.b.columns, g.b.column, k0, g.a.columns, g.b.row);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < DEPTH; k++) {
        const float4 a = *reinterpret_cast<const float4 *>(&ta[k][down]),
                     b = *reinterpret_cast<const float4 *>(&tb[k][across]);
        const float x[SIDE] = {a.x, a.y, a.z, a.w}, y[SIDE] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < SIDE; i++)
#pragma unroll
          for (int j = 0; j < SIDE; j++) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < SIDE; i++) {
      const int64_t row = i0 + down + i;
#pragma unroll
      for (int j = 0; j < SIDE; j++) {
        const int64_t column = j0 + across + j;
        if (row >= g.c.rows || column >= g.c.columns) continue;
        C *c = static_cast<C *>(g.pc) + row * g.c.row + column;
        float v = sum[i][j];
        if (g.bias) v += widen(static_cast<const T *>(g.bias)[column]);
        if (g.accumulate) v += widen(*c);
        *c = narrow<C>(v);
      }
    }
  }
}

int32_t naive(uly_device *d, uly_stream *s, const void *args) {
  const uly_gemm &g = *static_cast<const uly_gemm *>(args);
  std::string no = gemm_refusal(g);
  if (!no.empty()) return fail(d, ULY_INVALID_ARGUMENT, "cuda.Gemm: %s", no.c_str());
  naive_args n = {gemm_view_of(g.a), gemm_view_of(g.b), gemm_view_of(g.c), 0,        0,
                  g.a.data,          g.b.data,          g.bias.data,       g.c.data, g.accumulate};
  n.across = (n.c.columns + TILE - 1) / TILE;
  n.tiles = n.across * ((n.c.rows + TILE - 1) / TILE);
  if (n.tiles == 0) return ULY_OK;
  // The stride of an axis of extent 1 may have any value. fetch needs a stride of 1 only along a
  // dense axis.
  const int blocks = static_cast<int>(n.tiles < 1 << 30 ? n.tiles : 1 << 30);
  if (g.a.dtype == ULY_F32) {
    LAUNCH((naive_gemm<float, float>), blocks, THREADS, 0, s, n);
  } else if (g.c.dtype == ULY_F32) {
    LAUNCH((naive_gemm<bf16, float>), blocks, THREADS, 0, s, n);
  } else {
    LAUNCH((naive_gemm<bf16, bf16>), blocks, THREADS, 0, s, n);
  }
  return check_launch(d, "Gemm");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_GEMM, "naive", naive},
});
