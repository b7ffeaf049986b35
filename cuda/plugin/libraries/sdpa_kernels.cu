// Kernels that prepare the arguments of cuDNN's attention: tables of documents, and copies of the
// LSE.
#include "sdpa.h"
#include "kernels/values.h"

enum { THREADS = 256 };

struct TableArgs {
  const int64_t *cu_q, *cu_k;
  int64_t n, b;
  int32_t *lengths_q, *lengths_k;
  int64_t *offsets;
  int64_t token[SDPA_OFFSETS];
};

static __global__ void __launch_bounds__(THREADS) tables(TableArgs a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i > a.b) return;
  const int64_t at = i < a.n ? i : a.n, q = a.cu_q[at], k = a.cu_k[at];
  if (i < a.b) {
    a.lengths_q[i] = i < a.n ? static_cast<int32_t>(a.cu_q[i + 1] - q) : 0;
    a.lengths_k[i] = i < a.n ? static_cast<int32_t>(a.cu_k[i + 1] - k) : 0;
  }
#pragma unroll
  for (int w = 0; w < SDPA_OFFSETS; w++) {
    const bool keys = w == SDPA_K || w == SDPA_V || w == SDPA_DK || w == SDPA_DV;
    a.offsets[w * (a.b + 1) + i] = (keys ? k : q) * a.token[w];
  }
}

int32_t sdpa_tables(uly_device *d, uly_stream *s, const uly_attention &a, const AttentionLayout &l,
                    const sdpa_shape &shape, char *at) {
  const char *w = static_cast<const char *>(a.workspace.data);
  const sdpa_layout mine = sdpa_layout_of(shape);
  TableArgs t = {reinterpret_cast<const int64_t *>(w + l.cu_q),
                 reinterpret_cast<const int64_t *>(w + l.cu_k),
                 l.documents,
                 shape.b,
                 reinterpret_cast<int32_t *>(at + mine.lengths_q),
                 reinterpret_cast<int32_t *>(at + mine.lengths_k),
                 reinterpret_cast<int64_t *>(at + mine.offsets),
                 {}};
  for (int i = 0; i < SDPA_OFFSETS; i++) t.token[i] = sdpa_token(shape, i);
  LAUNCH(tables, blocks_for(shape.b + 1, THREADS), THREADS, 0, s, t);
  return check_launch(d, "Attention: documents for cuDNN");
}

struct StatsArgs {
  float *lse, *stats;
  int64_t lse_token, lse_head, heads, n;
  sdpa_statistics where;
  bool to_stats;
};

static __global__ void __launch_bounds__(THREADS) stats(StatsArgs a) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; i < a.n; i += step) {
    const int64_t t = i / a.heads, h = i % a.heads;
    float *lse = a.lse + t * a.lse_token + h * a.lse_head, *s = a.stats + a.where.at(t, h);
    *(a.to_stats ? s : lse) = *(a.to_stats ? lse : s);
  }
}

int32_t sdpa_stats(uly_device *d, uly_stream *s, const uly_attention &a, const sdpa_shape &shape, float *at,
                   bool to_stats) {
  const StatsArgs c = {
      static_cast<float *>(a.lse.data), at,      a.lse.stride[0], a.lse.stride[1], shape.hq, shape.hq * a.q.shape[0],
      sdpa_statistics_of(shape),        to_stats};
  LAUNCH(stats, blocks_for(c.n, THREADS), THREADS, 0, s, c);
  return check_launch(d, "Attention: LSE for cuDNN");
}
