// The kernels of attention for Hopper's products of warpgroups.
#include "attention_wgmma_backward.h"
#include "attention_wgmma_forward.h"

// run gives the warpgroups of a block their work and their registers.
template <class Block> __device__ __forceinline__ void run_warpgroups(const AttentionCall &a) {
  SHARED(bf16, shared);
  Block block(a, shared);
  if (threadIdx.x < WARPGROUP) {
    less_registers<REGISTERS_COPYING>();
    block.copy();
  } else {
    more_registers<REGISTERS>();
    block.compute();
  }
}

template <int SIZE, bool BEGUN> __global__ void __launch_bounds__(ATTENTION_WGMMA_THREADS, 1)
    attention_wgmma_forward_kernel(AttentionCall a) {
  run_warpgroups<WgmmaForward<SIZE, BEGUN>>(a);
}
template <int SIZE> __global__ void __launch_bounds__(ATTENTION_WGMMA_THREADS, 1)
    attention_wgmma_dq_kernel(AttentionCall a) {
  run_warpgroups<WgmmaDq<SIZE>>(a);
}
template <int SIZE> __global__ void __launch_bounds__(ATTENTION_WGMMA_THREADS, 1)
    attention_wgmma_dkv_kernel(AttentionCall a) {
  run_warpgroups<WgmmaDkv<SIZE>>(a);
}
template <int SIZE> __global__ void __launch_bounds__(WARPGROUP) attention_wgmma_delta_kernel(AttentionCall a) {
  SHARED(bf16, shared);
  attention_wgmma_delta<SIZE>(a, shared);
}

const AttentionKernel attention_wgmma_forward_kernels[ATTENTION_MMA_SIZES] = {attention_wgmma_forward_kernel<0, false>,
                                                                              attention_wgmma_forward_kernel<1, false>,
                                                                              attention_wgmma_forward_kernel<2, false>};
const AttentionKernel attention_wgmma_begun_kernels[ATTENTION_MMA_SIZES] = {attention_wgmma_forward_kernel<0, true>,
                                                                            attention_wgmma_forward_kernel<1, true>,
                                                                            attention_wgmma_forward_kernel<2, true>};
const AttentionKernel attention_wgmma_dq_kernels[ATTENTION_WGMMA_BACK_SIZES] = {attention_wgmma_dq_kernel<0>,
                                                                                attention_wgmma_dq_kernel<1>};
const AttentionKernel attention_wgmma_dkv_kernels[ATTENTION_WGMMA_BACK_SIZES] = {attention_wgmma_dkv_kernel<0>,
                                                                                 attention_wgmma_dkv_kernel<1>};
const AttentionKernel attention_wgmma_delta_kernels[ATTENTION_WGMMA_BACK_SIZES] = {attention_wgmma_delta_kernel<0>,
                                                                                   attention_wgmma_delta_kernel<1>};
