// DeltaFold: y[h] = M[h] · x[h] + e[h] in F32, for transitions M [H, K, K] (or their transposes)
// and states x, e, y [H, K, N]. e is optional.
#include "check.h"
#include "values.h"

namespace {

// A block computes a tile of EDGE x EDGE elements. A thread has LANES neighbours of a row.
constexpr int BLOCK = 256, EDGE = 32, LANES = EDGE * EDGE / BLOCK;

struct Fold {
  const float *m, *x, *e;
  float *y;
  int64_t heads, k, n, down, across; // down, across: tiles of a head's result
  bool transpose;
};

__global__ void __launch_bounds__(BLOCK) delta_fold(Fold f) {
  __shared__ float m[EDGE][EDGE + 1], x[EDGE][EDGE];
  const int row = threadIdx.x / (EDGE / LANES), column = threadIdx.x % (EDGE / LANES) * LANES,
            lane = threadIdx.x % EDGE, warp = threadIdx.x / EDGE;
  for (int64_t b = blockIdx.x; b < f.heads * f.down * f.across; b += gridDim.x) {
    const int64_t tile = b / f.across, h = tile / f.down, r0 = (tile - h * f.down) * EDGE,
                  c0 = (b - tile * f.across) * EDGE;
    const float *hm = f.m + h * f.k * f.k, *hx = f.x + h * f.k * f.n;
    float sum[LANES] = {0, 0, 0, 0};
    for (int64_t k0 = 0; k0 < f.k; k0 += EDGE) {
#pragma unroll
      for (int i = 0; i < LANES; i++) { // the 32 lanes of a warp read along the dense axis
        const int line = warp + i * (BLOCK / EDGE);
        if (f.transpose) m[lane][line] = k0 + line < f.k && r0 + lane < f.k ? hm[(k0 + line) * f.k + r0 + lane] : 0.0f;
        else m[line][lane] = r0 + line < f.k && k0 + lane < f.k ? hm[(r0 + line) * f.k + k0 + lane] : 0.0f;
        x[line][lane] = k0 + line < f.k && c0 + lane < f.n ? hx[(k0 + line) * f.n + c0 + lane] : 0.0f;
      }
      __syncthreads();
      const int deep = (int)least(EDGE, f.k - k0);
#pragma unroll 8
      for (int k = 0; k < deep; k++)
#pragma unroll
        for (int i = 0; i < LANES; i++) sum[i] = madd(m[row][k], x[k][column + i], sum[i]);
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < LANES; i++) {
      const int64_t r = r0 + row, c = c0 + column + i, at = (h * f.k + r) * f.n + c;
      if (r < f.k && c < f.n) f.y[at] = f.e ? sum[i] + f.e[at] : sum[i];
    }
  }
}

int32_t fold(uly_device *d, uly_stream *s, const void *args) {
  const uly_delta_fold *a = (const uly_delta_fold *)args;
  Check c(d, "DeltaFold");
  c.dense("x", a->x, ULY_F32, {-1, -1, -1});
  c.dense("M", a->m, ULY_F32, {a->x.shape[0], a->x.shape[1], a->x.shape[1]});
  c.dense("y", a->y, ULY_F32, Shape(a->x));
  if (a->e.data) c.dense("e", a->e, ULY_F32, Shape(a->x));
  if (!c.failed() && a->y.data == a->x.data && elements(a->x) > 0)
    c.refuse("y must not be x: the product needs all of x");
  if (c.failed() || elements(a->x) == 0) return c.code;
  Fold f = {(const float *)a->m.data,
            (const float *)a->x.data,
            (const float *)a->e.data,
            (float *)a->y.data,
            a->x.shape[0],
            a->x.shape[1],
            a->x.shape[2],
            0,
            0,
            a->transpose != 0};
  f.down = ceil_div(f.k, EDGE), f.across = ceil_div(f.n, EDGE);
  LAUNCH(delta_fold, blocks_for(f.heads * f.down * f.across, 1), BLOCK, 0, s, f);
  return check_launch(d, "cuda.DeltaFold");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_DELTA_FOLD, "own", fold},
});
