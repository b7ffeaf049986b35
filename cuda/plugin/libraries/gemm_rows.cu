// Registers cuBLASLt as a kernel of GEMM.
#include "gemm_cublaslt.h"
#include "kernels/gemm.h"
#include "kernels/values.h"

namespace {

enum { THREADS = 256 };

// spread_bias writes the bias to every row of C. cuBLASLt adds a bias only if it has the type of C;
// for other types, the product then accumulates into C.
__global__ void __launch_bounds__(THREADS) spread_bias(gemm_view c, float *pc, const bf16 *bias) {
  const int64_t n = c.rows * c.columns, step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; i < n; i += step)
    pc[i / c.columns * c.row + i % c.columns] = widen(bias[i % c.columns]);
}

bool cublaslt_fits(uly_device *d, const void *args) {
  const uly_gemm &g = *static_cast<const uly_gemm *>(args);
  return gemm_refusal(g).empty() && gemm_cublaslt_fits(d, g);
}

int32_t cublaslt(uly_device *d, uly_stream *s, const void *args) {
  const uly_gemm &g = *static_cast<const uly_gemm *>(args);
  if (g.bias.data && g.bias.dtype != g.c.dtype) {
    uly_gemm spread = g;
    LAUNCH(spread_bias, blocks_for(g.c.shape[0] * g.c.shape[1], THREADS), THREADS, 0, s, gemm_view_of(g.c),
           static_cast<float *>(g.c.data), static_cast<const bf16 *>(g.bias.data));
    TRY(check_launch(d, "Gemm"));
    spread.bias = {};
    spread.accumulate = 1;
    return gemm_cublaslt(d, s, spread);
  }
  return gemm_cublaslt(d, s, g);
}

} // namespace

static const RegisterKernels registered({{ULY_OP_GEMM, "cublaslt", cublaslt, cublaslt_fits}}, true);
