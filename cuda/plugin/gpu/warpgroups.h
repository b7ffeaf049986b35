// Functions for the instructions of Hopper for warp specialization: products of warpgroups (wgmma),
// barriers of some warps, and registers that warpgroups hand over (PTX ISA 8.7). A warpgroup is
// four consecutive warps. emulated/warpgroups.h has the same functions in plain C++.
//
// The code is for sm_90a. A build for another GPU has functions that stop the kernel.
#pragma once

#include <stdint.h>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ULY_HOPPER(...) asm volatile(__VA_ARGS__)
#else
#define ULY_HOPPER(...) __trap()
#endif

// sync_at waits until `threads` threads of the block have come to a barrier, all threads of their
// warps. arrive_at counts the warp's threads without waiting. Accesses before either are visible to
// those that have waited. Barrier 0 is that of __syncthreads, barrier 1 that of sync_warps.
__device__ __forceinline__ void sync_at(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive_at(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// more_registers and less_registers set the registers of the warps of a warpgroup, which all call
// it. more_registers waits until others have handed over as many.
template <int REGISTERS> __device__ __forceinline__ void more_registers() {
  ULY_HOPPER("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void less_registers() {
  ULY_HOPPER("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// show_products makes the thread's earlier writes to shared memory visible to products of
// warpgroups that begin after the next barrier.
__device__ __forceinline__ void show_products() { ULY_HOPPER("fence.proxy.async.shared::cta;" :: : "memory"); }

#define ULY_TEN(d) "%" d "0, %" d "1, %" d "2, %" d "3, %" d "4, %" d "5, %" d "6, %" d "7, %" d "8, %" d "9, "
#define ULY_TO_30 ULY_TEN("") ULY_TEN("1") ULY_TEN("2")
#define ULY_TO_60 ULY_TO_30 ULY_TEN("3") ULY_TEN("4") ULY_TEN("5")
#define ULY_TO_120 ULY_TO_60 ULY_TEN("6") ULY_TEN("7") ULY_TEN("8") ULY_TEN("9") ULY_TEN("10") ULY_TEN("11")
#define ULY_SUMS_4(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define ULY_SUMS_16(c, i) ULY_SUMS_4(c, i), ULY_SUMS_4(c, i + 1), ULY_SUMS_4(c, i + 2), ULY_SUMS_4(c, i + 3)
#define ULY_SUMS_32(c) ULY_SUMS_16(c, 0), ULY_SUMS_16(c, 4)
#define ULY_SUMS_64(c) ULY_SUMS_32(c), ULY_SUMS_16(c, 8), ULY_SUMS_16(c, 12)
#define ULY_SUMS_128(c) ULY_SUMS_64(c), ULY_SUMS_16(c, 16), ULY_SUMS_16(c, 20), ULY_SUMS_16(c, 24), ULY_SUMS_16(c, 28)

// ULY_SHARED and ULY_HELD issue a product of COLUMNS columns with the names of its sums, their
// operands, and the numbers of the operands behind them.
#define ULY_SHARED(columns, names, sums, a, b, add)                                                  \
  ULY_HOPPER("{ .reg .pred p; setp.ne.u32 p, %" add ", 0; wgmma.mma_async.sync.aligned.m64n" columns \
             "k16.f32.bf16.bf16 {" names "}, %" a ", %" b ", p, 1, 1, 0, 0; }" : sums : "l"(x),      \
             "l"(y), "r"((uint32_t)more))
#define ULY_HELD(columns, names, sums, a0, a1, a2, a3, b, add)                                       \
  ULY_HOPPER("{ .reg .pred p; setp.ne.u32 p, %" add ", 0; wgmma.mma_async.sync.aligned.m64n" columns \
             "k16.f32.bf16.bf16 {" names "}, {%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b              \
             ", p, 1, 1, 1; }" : sums : "r"(x[0]),                                                   \
             "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(y), "n"(1))

// WarpgroupProducts issues products of a warpgroup, which run asynchronously: 64 rows x 8·NT
// columns of F32 sums, whose 16 rows of a warp are in the layout of mma.h. All threads of the
// warpgroup issue the same products. They form groups that complete in order.
//
// Until wait says that a product has completed, its sums and its operands may be neither read nor
// written. Before the first product, and before a product whose sums or operands in registers were
// written since the last product, `begin` is required.
class WarpgroupProducts {
 public:
  __device__ __forceinline__ void begin() { ULY_HOPPER("wgmma.fence.sync.aligned;" :: : "memory"); }
  // from_shared computes c = x·yᵀ, or adds to c if `more`. x [64 x 16] and y [8·NT x 16] are
  // descriptors of panels with a row for each row of c, and for each column of c.
  template <int NT> __device__ __forceinline__ void from_shared(float (&c)[NT][4], uint64_t x, uint64_t y, bool more) {
    static_assert(NT == 8 || NT == 16 || NT == 32, "products of 64, 128 or 256 columns");
    if constexpr (NT == 8) ULY_SHARED("64", ULY_TO_30 "%30, %31", ULY_SUMS_32(c), "32", "33", "34");
    else if constexpr (NT == 16) ULY_SHARED("128", ULY_TO_60 "%60, %61, %62, %63", ULY_SUMS_64(c), "64", "65", "66");
    else
      ULY_SHARED("256", ULY_TO_120 "%120, %121, %122, %123, %124, %125, %126, %127", ULY_SUMS_128(c), "128", "129",
                 "130");
  }
  // from_registers adds x·y to c. x [64 x 16] is in registers, the rows of a warp as A of mma; y
  // [16 x 8·NT] is a descriptor of panels with a row for each column of x.
  template <int NT>
  __device__ __forceinline__ void from_registers(float (&c)[NT][4], const uint32_t (&x)[4], uint64_t y) {
    static_assert(NT == 8 || NT == 16 || NT == 32, "products of 64, 128 or 256 columns");
    if constexpr (NT == 8) ULY_HELD("64", ULY_TO_30 "%30, %31", ULY_SUMS_32(c), "32", "33", "34", "35", "36", "37");
    else if constexpr (NT == 16)
      ULY_HELD("128", ULY_TO_60 "%60, %61, %62, %63", ULY_SUMS_64(c), "64", "65", "66", "67", "68", "69");
    else
      ULY_HELD("256", ULY_TO_120 "%120, %121, %122, %123, %124, %125, %126, %127", ULY_SUMS_128(c), "128", "129", "130",
               "131", "132", "133");
  }
  // close ends a group.
  __device__ __forceinline__ void close() { ULY_HOPPER("wgmma.commit_group.sync.aligned;" :: : "memory"); }
  // wait returns when at most PENDING groups have not completed. It is given the sums that have
  // completed and are used next: the compiler may move other uses of sums before the wait.
  template <int PENDING, int... NT> __device__ __forceinline__ void wait(float (&...completed)[NT][4]) {
    ULY_HOPPER("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    (pin(completed), ...);
  }

 private:
  template <int NT> static __device__ __forceinline__ void pin(float (&c)[NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; n++)
      asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
  }
};
