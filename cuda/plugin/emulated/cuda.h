// CUDA C++ for g++ (C++17): enough of the language to compile and run the plug-in's kernels on the
// host, for tests without a GPU.
//
// A block runs on one OS thread. Its threads are fibers (blocks.cpp). Between two barriers, the
// threads run one after another in a random order. The blocks of a grid also run in a random order.
// Therefore tests see both orders of accesses that no barrier or event orders. Shared memory starts
// as NaN. The following fail the launch with a message: threads of a block that wait at different
// barriers, a shuffle without all lanes of a warp, a write outside of an allocation, and a
// misaligned address.
//
// The emulation does not show races that the random order misses (races/races.cpp finds those, in a
// separate build), the alignment of __shared__ arrays (the host aligns them better), the memory
// model, and speed.
#pragma once

#include <math.h>
#include <stdint.h>

#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime.h"

#pragma GCC diagnostic ignored "-Wunknown-pragmas" // #pragma unroll

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ __inline__ __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
// All thread_local data of the library is shared memory of kernels. The emulator fills it with NaN
// before a launch. Do not use thread_local for anything else.
#define __shared__ static thread_local

extern __attribute__((visibility("hidden"))) uint3 threadIdx, blockIdx;
extern __attribute__((visibility("hidden"))) dim3 blockDim, gridDim;
enum : int { warpSize = 32 };

namespace uly_emulated {
struct Kernel {
  const char *name, *file;
  int line;
  const void *address;
};
// launch enqueues a kernel. `pointers` has the kernel's parameters that are pointers, and NULL for
// the others. A pointer to host memory fails the launch, unless a test sets
// ULYSSES_EMULATED_HOST=1. `arguments` has the bytes of all parameters if kernels run as PTX
// instructions, and else nothing.
typedef std::vector<unsigned char> Argument;
void launch(const Kernel &kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t s, const void *const *pointers,
            int n, std::function<void()> body, std::vector<Argument> arguments);
bool as_ptx();                   // whether ULYSSES_EMULATED_PTX is set (ptx/run.h)
unsigned char *dynamic_shared(); // of the current block
uint64_t random64();
// range finds the allocation that contains device memory p
bool range(const void *p, void **base, size_t *bytes);
// generation returns the number of this allocation among all allocations of this process
bool generation(const void *p, uint64_t *number);
// count_multiply_adds counts in the build of make cuda-races (counts.h).
extern __attribute__((visibility("hidden"))) uint64_t multiply_adds;
#ifdef __SANITIZE_THREAD__
__attribute__((no_sanitize("thread"), noinline)) inline void count_multiply_adds(int n) {
  multiply_adds += (uint64_t)n;
}
#else
inline void count_multiply_adds(int) {}
#endif
// for tests: records an event that other processes see, and never completes the record
void claim(cudaEvent_t e);
int barrier(int mode, int value, const char *file, int line); // mode: 0 plain, 1 or, 2 and, 3 count
// exchange stores this lane's words, 4 at most, in a table of its warp, waits for all lanes and
// returns the table: the first word of 32 lanes, then the second.
const uint64_t *exchange(unsigned mask, const uint64_t *value, int words, const char *what, const char *file, int line);
inline const uint64_t *exchange(unsigned mask, uint64_t value, const char *what, const char *file, int line) {
  return exchange(mask, &value, 1, what, file, line);
}
// partial_barrier is a barrier for some warps, or counts this warp at one without waiting.
void partial_barrier(int number, int threads, bool wait, const char *file, int line);
// For products of warpgroups: show_products orders this thread's writes before them, and between
// reads_operands(true) and (false) reads are theirs.
void show_products();
void reads_operands(bool on);
[[noreturn]] void fail_kernel(const char *why);
void need_global(const void *p, const char *what, const char *file, int line); // stops at shared memory

template <class T> const void *pointer(const T &v) {
  if constexpr (std::is_pointer<T>::value) return reinterpret_cast<const void *>(v);
  else return nullptr;
}

template <class T> Argument bytes_of(const T &v) {
  auto *p = reinterpret_cast<const unsigned char *>(&v);
  return Argument(p, p + sizeof v);
}

template <class... P, class... A> void call(const char *name, const char *file, int line, void (*kernel)(P...),
                                            dim3 grid, dim3 block, size_t shared, cudaStream_t s, A &&...a) {
  static_assert(!(std::is_reference<P>::value || ...), "a kernel takes its parameters by value");
  static_assert((std::is_trivially_copyable<P>::value && ...), "a kernel's parameters are copied as bytes");
  std::tuple<std::remove_cv_t<P>...> args{static_cast<P>(std::forward<A>(a))...};
  const void *pointers[sizeof...(P) + 1];
  std::vector<Argument> arguments;
  std::apply(
      [&](const auto &...v) {
        int i = 0;
        ((pointers[i++] = pointer(v)), ...);
        (void)i;
        if (as_ptx()) (arguments.push_back(bytes_of(v)), ...);
      },
      args);
  launch(
      {name, file, line, reinterpret_cast<const void *>(kernel)}, grid, block, shared, s, pointers, (int)sizeof...(P),
      [kernel, args] { std::apply(kernel, args); }, std::move(arguments));
}

template <class T> uint64_t pack(T v) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a warp exchanges at most 8 bytes");
  uint64_t u = 0;
  memcpy(&u, &v, sizeof v);
  return u;
}
template <class T> T unpack(uint64_t u) {
  T v;
  memcpy(&v, &u, sizeof v);
  return v;
}
} // namespace uly_emulated

#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  uly_emulated::call(#kernel, __FILE__, __LINE__, (kernel), (grid), (block), (shared), (stream)->s, ##__VA_ARGS__)
#define SHARED(type, name) type *name = reinterpret_cast<type *>(uly_emulated::dynamic_shared())

#define ULY_EMULATED_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(ULY_EMULATED_HERE) { uly_emulated::barrier(0, 0, file, line); }
inline int __syncthreads_or(int v, ULY_EMULATED_HERE) { return uly_emulated::barrier(1, v, file, line); }
inline int __syncthreads_and(int v, ULY_EMULATED_HERE) { return uly_emulated::barrier(2, v, file, line); }
inline int __syncthreads_count(int v, ULY_EMULATED_HERE) { return uly_emulated::barrier(3, v, file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, ULY_EMULATED_HERE) {
  uly_emulated::exchange(mask, 0, "__syncwarp", file, line);
}

template <class T> T __shfl_sync(unsigned mask, T v, int from, int width = 32, ULY_EMULATED_HERE) {
  const uint64_t *all = uly_emulated::exchange(mask, uly_emulated::pack(v), "__shfl_sync", file, line);
  int lane = (int)(threadIdx.x & 31);
  return uly_emulated::unpack<T>(all[(lane & ~(width - 1)) + (from & (width - 1))]);
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, ULY_EMULATED_HERE) {
  const uint64_t *all = uly_emulated::exchange(mask, uly_emulated::pack(v), "__shfl_xor_sync", file, line);
  int lane = (int)(threadIdx.x & 31), from = lane ^ bits;
  // as on the GPU: a lane cannot read from later groups
  return uly_emulated::unpack<T>(all[from > (lane | (width - 1)) ? lane : from]);
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, ULY_EMULATED_HERE) {
  const uint64_t *all = uly_emulated::exchange(mask, uly_emulated::pack(v), "__shfl_down_sync", file, line);
  int lane = (int)(threadIdx.x & 31), from = lane + (int)by;
  return uly_emulated::unpack<T>(all[from > (lane | (width - 1)) ? lane : from]);
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, ULY_EMULATED_HERE) {
  const uint64_t *all = uly_emulated::exchange(mask, uly_emulated::pack(v), "__shfl_up_sync", file, line);
  int lane = (int)(threadIdx.x & 31), from = lane - (int)by;
  return uly_emulated::unpack<T>(all[from < (lane & ~(width - 1)) ? lane : from]);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, ULY_EMULATED_HERE) {
  const uint64_t *all = uly_emulated::exchange(mask, predicate != 0, "__ballot_sync", file, line);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= (unsigned)all[i] << i;
  return bits;
}
inline int __any_sync(unsigned mask, int predicate, ULY_EMULATED_HERE) {
  return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, ULY_EMULATED_HERE) {
  return __ballot_sync(mask, predicate, file, line) == 0xffffffffu;
}

// The address of dynamic shared memory: bytes from its start.
inline size_t __cvta_generic_to_shared(const void *p) {
  return (size_t)(static_cast<const unsigned char *>(p) - uly_emulated::dynamic_shared());
}

// Only one thread runs at a time, so atomics need no lock. The check for races does not see them:
// threads may access a word atomically without a barrier between. So it does not find a race
// between an atomic and an ordinary access either.
#define ULY_ATOMIC __attribute__((noinline, no_sanitize("thread"))) inline
#define ULY_EMULATED_ATOMICS(type)              \
  ULY_ATOMIC type atomicAdd(type *p, type v) {  \
    type old = *p;                              \
    *p = old + v;                               \
    return old;                                 \
  }                                             \
  ULY_ATOMIC type atomicExch(type *p, type v) { \
    type old = *p;                              \
    *p = v;                                     \
    return old;                                 \
  }
#define ULY_EMULATED_INT_ATOMICS(type)                     \
  ULY_EMULATED_ATOMICS(type)                               \
  ULY_ATOMIC type atomicMax(type *p, type v) {             \
    type old = *p;                                         \
    if (v > old) *p = v;                                   \
    return old;                                            \
  }                                                        \
  ULY_ATOMIC type atomicMin(type *p, type v) {             \
    type old = *p;                                         \
    if (v < old) *p = v;                                   \
    return old;                                            \
  }                                                        \
  ULY_ATOMIC type atomicOr(type *p, type v) {              \
    type old = *p;                                         \
    *p = old | v;                                          \
    return old;                                            \
  }                                                        \
  ULY_ATOMIC type atomicAnd(type *p, type v) {             \
    type old = *p;                                         \
    *p = old & v;                                          \
    return old;                                            \
  }                                                        \
  ULY_ATOMIC type atomicCAS(type *p, type if_is, type v) { \
    type old = *p;                                         \
    if (old == if_is) *p = v;                              \
    return old;                                            \
  }
ULY_EMULATED_INT_ATOMICS(int)
ULY_EMULATED_INT_ATOMICS(unsigned)
ULY_EMULATED_INT_ATOMICS(unsigned long long)
ULY_EMULATED_ATOMICS(float)
ULY_EMULATED_ATOMICS(double)
ULY_ATOMIC unsigned atomicInc(unsigned *p, unsigned wrap) {
  unsigned old = *p;
  *p = old >= wrap ? 0 : old + 1;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline void __trap() { uly_emulated::exchange(0, 0, "__trap", nullptr, 0); }

// The loads and stores with a cache operator require global memory. On a GPU an address of shared
// memory is an illegal address there.
#define ULY_EMULATED_LOAD(name)                              \
  template <class T> T name(const T *p, ULY_EMULATED_HERE) { \
    uly_emulated::need_global(p, #name, file, line);         \
    return *p;                                               \
  }
#define ULY_EMULATED_STORE(name)                               \
  template <class T> void name(T *p, T v, ULY_EMULATED_HERE) { \
    uly_emulated::need_global(p, #name, file, line);           \
    *p = v;                                                    \
  }
ULY_EMULATED_LOAD(__ldg)
ULY_EMULATED_LOAD(__ldcs)
ULY_EMULATED_LOAD(__ldcg)
ULY_EMULATED_LOAD(__ldca)
ULY_EMULATED_LOAD(__ldlu)
ULY_EMULATED_STORE(__stcs)
ULY_EMULATED_STORE(__stcg)
ULY_EMULATED_STORE(__stwb)
ULY_EMULATED_STORE(__stwt)

// min and max have CUDA's overloads. For floats they are fminf and fmaxf, which ignore a NaN.
#define ULY_EMULATED_MINMAX(type)                              \
  constexpr type min(type a, type b) { return b < a ? b : a; } \
  constexpr type max(type a, type b) { return a < b ? b : a; }
ULY_EMULATED_MINMAX(int)
ULY_EMULATED_MINMAX(unsigned)
ULY_EMULATED_MINMAX(long)
ULY_EMULATED_MINMAX(unsigned long)
ULY_EMULATED_MINMAX(long long)
ULY_EMULATED_MINMAX(unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
inline float __int_as_float(int i) { return uly_bits<float>(i); }
inline int __float_as_int(float f) { return uly_bits<int>(f); }
inline float __uint_as_float(unsigned u) { return uly_bits<float>(u); }
inline unsigned __float_as_uint(float f) { return uly_bits<unsigned>(f); }
inline long long __double_as_longlong(double d) { return uly_bits<long long>(d); }
inline double __longlong_as_double(long long i) { return uly_bits<double>(i); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}

#include "instructions.h"
