// Small kernels beside cuDNN's attention.
#include "sdpa.h"
#include "values.h"

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

int32_t sdpa_tables(uly_device *d, uly_stream *s, const uly_attention &a, const AttentionLayout &l, const sdpa_shape &shape, char *at) {
  const char *w = static_cast<const char *>(a.workspace.data);
  const sdpa_layout mine = sdpa_lay(shape);
  TableArgs t = {reinterpret_cast<const int64_t *>(w + l.cu_q), reinterpret_cast<const int64_t *>(w + l.cu_k), l.documents, shape.b,
                 reinterpret_cast<int32_t *>(at + mine.lengths_q), reinterpret_cast<int32_t *>(at + mine.lengths_k), reinterpret_cast<int64_t *>(at + mine.offsets), {}};
  for (int i = 0; i < SDPA_OFFSETS; i++) t.token[i] = sdpa_token(shape, i);
  LAUNCH(tables, blocks_for(shape.b + 1, THREADS), THREADS, 0, s, t);
  return started(d, "Attention: documents for cuDNN");
}

struct StatsArgs {
  const float *src;
  float *dst;
  int64_t src_token, src_head, dst_token, dst_head, heads, n;
};

static __global__ void __launch_bounds__(THREADS) stats(StatsArgs a) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x; i < a.n; i += step) {
    const int64_t t = i / a.heads, h = i % a.heads;
    a.dst[t * a.dst_token + h * a.dst_head] = a.src[t * a.src_token + h * a.src_head];
  }
}

int32_t sdpa_stats(uly_device *d, uly_stream *s, const uly_attention &a, const sdpa_shape &shape, float *at, bool to_stats) {
  float *lse = static_cast<float *>(a.lse.data);
  const int64_t token = shape.packed ? shape.hq : 1, head = shape.packed ? 1 : shape.tokens_q;
  StatsArgs c = {lse, at, a.lse.stride[0], a.lse.stride[1], token, head, shape.hq, shape.hq * shape.tokens_q};
  if (!to_stats) c = {at, lse, token, head, a.lse.stride[0], a.lse.stride[1], c.heads, c.n};
  LAUNCH(stats, blocks_for(c.n, THREADS), THREADS, 0, s, c);
  return started(d, "Attention: LSE for cuDNN");
}
