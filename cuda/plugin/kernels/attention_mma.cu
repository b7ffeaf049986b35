// The kernels of attention on tensor cores without AttentionScores, and the kernels before and
// after them.
#include "attention_mma_kernels.h"

template <int SIZE, bool BEGUN> __global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 2)
    attention_mma_forward_kernel(AttentionCall a) {
  attention_mma_forward<SIZE, BEGUN, false>(a);
}
template <int SIZE> __global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 2)
    attention_mma_dq_kernel(AttentionCall a) {
  attention_mma_dq<SIZE, false>(a);
}
template <int SIZE, bool DQ> __global__ void __launch_bounds__(MmaBackward<SIZE>::THREADS, MmaBackward<SIZE>::BLOCKS)
    attention_mma_dkv_kernel(AttentionCall a) {
  attention_mma_dkv<SIZE, DQ, false>(a);
}

// attention_mma_delta writes delta [head][query] as the diagonal of dout·outᵀ. It uses the
// instruction and the order of the products for dP, so that dS is exactly 0 for a query with a
// single key. A warp has 16 queries.
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS) attention_mma_delta(AttentionCall a) {
  const Lane at;
  const int64_t strips = ceil_div(a.queries, 16), n = a.heads * strips;
  for (int64_t w = (int64_t)blockIdx.x * MMA_WARPS + threadIdx.x / 32; w < n; w += (int64_t)gridDim.x * MMA_WARPS) {
    const int64_t head = w / strips, first = w % strips * 16;
    int64_t row[2];
    const bf16 *x[2], *y[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      row[i] = first + at.row + 8 * i;
      const int64_t r = least(row[i], a.queries - 1);
      x[i] = (const bf16 *)a.dout.data + r * a.dout.token + head * a.dout.head;
      y[i] = (const bf16 *)a.out.data + r * a.out.token + head * a.out.head;
    }
    float c[2][4];
    zero(c);
    auto two = [](const bf16 *p, bool wide) {
      return wide ? *reinterpret_cast<const uint32_t *>(p)
                  : (uint32_t)__bfloat16_as_ushort(p[0]) | (uint32_t)__bfloat16_as_ushort(p[1]) << 16;
    };
    for (int k = at.column; k < a.out.width; k += 16) {
      uint32_t g[4], o[4]; // g in A's order; o in B's order, which has neighbours along k first
#pragma unroll
      for (int i = 0; i < 4; i++)
        g[i] = two(x[i % 2] + k + i / 2 * 8, a.dout.wide), o[i] = two(y[i / 2] + k + i % 2 * 8, a.out.wide);
      mma_pair(c[0], c[1], g, o);
    }
    const float sum[2] = {at.row % 2 ? c[0][1] : c[0][0], at.row % 2 ? c[1][3] : c[1][2]};
    // of the four lanes of a row, one has the diagonal element
    if (at.column != at.row / 2 * 2) continue;
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (row[i] < a.queries) a.delta[head * a.queries + row[i]] = sum[i];
  }
}

// attention_mma_dq_finish writes dq from its sums. A thread has 16 features.
__global__ void __launch_bounds__(ATTENTION_MMA_THREADS) attention_mma_dq_finish(AttentionCall a) {
  const int64_t groups = a.dq.width / 16, n = a.heads * a.queries * groups;
  for (int64_t w = (int64_t)blockIdx.x * ATTENTION_MMA_THREADS + threadIdx.x; w < n;
       w += (int64_t)gridDim.x * ATTENTION_MMA_THREADS) {
    const int64_t group = w % groups, row = w / groups % a.queries, head = w / groups / a.queries;
    float sums[16], dq[2][8];
    load<16>(a.dq_sums + 16 * w, sums);
#pragma unroll
    for (int i = 0; i < 16; i++) dq[i / 2 % 2][i / 4 * 2 + i % 2] = sums[i] * a.scale;
    const int64_t to = row * a.dq.token + head * a.dq.head + 16 * group;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (a.dq.bf16) store_flat<8>((bf16 *)a.dq.data + to + 8 * half, 8, a.dq.vectors, dq[half]);
      else store_flat<8>((float *)a.dq.data + to + 8 * half, 8, a.dq.vectors, dq[half]);
    }
  }
}

const AttentionKernel attention_mma_forward_kernels[ATTENTION_MMA_SIZES] = {attention_mma_forward_kernel<0, false>,
                                                                            attention_mma_forward_kernel<1, false>,
                                                                            attention_mma_forward_kernel<2, false>};
const AttentionKernel attention_mma_begun_kernels[ATTENTION_MMA_SIZES] = {attention_mma_forward_kernel<0, true>,
                                                                          attention_mma_forward_kernel<1, true>,
                                                                          attention_mma_forward_kernel<2, true>};
const AttentionKernel attention_mma_dq_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_dq_kernel<0>, attention_mma_dq_kernel<1>, attention_mma_dq_kernel<2>};
const AttentionKernel attention_mma_dkv_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_dkv_kernel<0, false>, attention_mma_dkv_kernel<1, false>, attention_mma_dkv_kernel<2, false>};
const AttentionKernel attention_mma_gradient_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_dkv_kernel<0, true>, attention_mma_dkv_kernel<1, true>, attention_mma_dkv_kernel<2, true>};
