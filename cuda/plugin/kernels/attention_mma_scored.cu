// The kernels of attention on tensor cores with AttentionScores: a softmax may have begun. The
// gradient of slopes needs the dq kernel.
#include "attention_mma_kernels.h"

template <int SIZE> __global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 2)
    attention_mma_scored_forward_kernel(AttentionCall a) {
  attention_mma_forward<SIZE, true, true>(a);
}
template <int SIZE> __global__ void __launch_bounds__(ATTENTION_MMA_THREADS, 2)
    attention_mma_scored_dq_kernel(AttentionCall a) {
  attention_mma_dq<SIZE, true>(a);
}
template <int SIZE, bool DQ> __global__ void __launch_bounds__(MmaBackward<SIZE>::THREADS, 8 / MmaBackward<SIZE>::WARPS)
    attention_mma_scored_dkv_kernel(AttentionCall a) {
  attention_mma_dkv<SIZE, DQ, true>(a);
}

const AttentionKernel attention_mma_scored_forward_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_scored_forward_kernel<0>, attention_mma_scored_forward_kernel<1>,
    attention_mma_scored_forward_kernel<2>};
const AttentionKernel attention_mma_scored_dq_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_scored_dq_kernel<0>, attention_mma_scored_dq_kernel<1>, attention_mma_scored_dq_kernel<2>};
const AttentionKernel attention_mma_scored_dkv_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_scored_dkv_kernel<0, false>, attention_mma_scored_dkv_kernel<1, false>,
    attention_mma_scored_dkv_kernel<2, false>};
const AttentionKernel attention_mma_scored_gradient_kernels[ATTENTION_MMA_SIZES] = {
    attention_mma_scored_dkv_kernel<0, true>, attention_mma_scored_dkv_kernel<1, true>,
    attention_mma_scored_dkv_kernel<2, true>};
