// Functions for single PTX instructions that CUDA C++ has no intrinsic for (PTX ISA 8.7).
// emulated/instructions.h has the same functions in plain C++.
#pragma once

#include <stdint.h>

// madd returns a·b + c with one rounding.
__device__ __forceinline__ float madd(float a, float b, float c) { return fmaf(a, b, c); }

// exp2_approx returns 2^x with an error of up to 2 units of 2^-23, and 0 where the result would be
// denormal.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Copies issues a thread's asynchronous copies from global to shared memory (cp.async). Copies form
// groups that complete in order. After wait, a thread sees its own copies. Other threads see them
// after the next barrier.
class Copies {
 public:
  // copy copies N floats (N is 4 or 1). If `present` is false, it writes N zeros and reads nothing.
  template <int N> __device__ __forceinline__ void copy(float *to, const float *from, bool present) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(to), bytes = present ? 4 * N : 0;
    if (N == 4)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
  }
  // close ends a group.
  __device__ __forceinline__ void close() { asm volatile("cp.async.commit_group;" ::: "memory"); }
  // wait returns when at most PENDING groups have not completed.
  template <int PENDING> __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
  }
};

// ldmatrix loads four matrices of 8 x 8 16-bit elements from shared memory, one register each. Lane
// l supplies the address of row l % 8 of matrix l / 8.
template <bool TRANSPOSED> __device__ __forceinline__ void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// transposed transposes a matrix of 8 x 8 16-bit elements: lane l has elements 2·(l % 4) and 2·(l %
// 4) + 1 of row l / 4, before and after.
__device__ __forceinline__ uint32_t transposed(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// mma adds A [16 x 16] · B [16 x 8] of BF16 to c [16 x 8] of F32, on tensor cores.
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// mma_pair multiplies A by the two halves of B [16 x 16] and adds to c0 and c1.
__device__ __forceinline__ void mma_pair(float (&c0)[4], float (&c1)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[4]) {
  mma(c0, a, {b[0], b[1]});
  mma(c1, a, {b[2], b[3]});
}

// store_if writes x to global memory if `there` is true. It is one instruction, where a condition
// in C++ may become a branch, over which the compiler does not move other instructions.
__device__ __forceinline__ void store_if(bool there, void *to, uint32_t x) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.u32 [%1], %2; }" ::"r"((uint32_t)there), "l"(to),
               "r"(x)
               : "memory");
}

// sync_warps is a barrier for all THREADS of a block, whose warps may call it in different places,
// where __syncthreads may not be called: bar.sync counts the warps that have come to it.
template <int THREADS> __device__ __forceinline__ void sync_warps() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// in_loop returns x. The compiler does not move what depends on the result out of a loop, where it
// would take registers.
__device__ __forceinline__ uint32_t in_loop(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// add_four adds x to four floats at p in global memory, a multiple of 16 bytes. Other threads may
// add to the same floats; the order of additions is not defined.
__device__ __forceinline__ void add_four(float *p, float4 x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x.x), "f"(x.y), "f"(x.z),
               "f"(x.w)
               : "memory");
#else
  atomicAdd(p, x.x);
  atomicAdd(p + 1, x.y);
  atomicAdd(p + 2, x.z);
  atomicAdd(p + 3, x.w);
#endif
}
