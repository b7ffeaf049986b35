// Values in kernels: F32 and BF16 alike as float, in vectors of 16 bytes where memory allows, and
// sums over a warp or a block in a fixed order.
#pragma once

#include "index.h"
#include "plugin.h"

typedef __nv_bfloat16 bf16;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return __float2bfloat16(x); }

#if defined(ULY_EMULATED) && !defined(__FMA__)
// A host without the instruction has two roundings: its fmaf is slow.
inline float madd(float a, float b, float c) { return a * b + c; }
#else
__device__ __forceinline__ float madd(float a, float b, float c) { return fmaf(a, b, c); }
#endif

// LANES is the elements of a vector of 16 bytes.
template <typename T> struct Wide {
  enum { LANES = 16 / sizeof(T) };
};

template <typename T, int K> struct alignas(sizeof(T) * K) Pack {
  T v[K];
};

// Vector is what BYTES are stored as at once.
template <int BYTES> struct Vector;
template <> struct Vector<16> {
  typedef uint4 type;
};
template <> struct Vector<8> {
  typedef uint2 type;
};
template <> struct Vector<4> {
  typedef uint32_t type;
};
template <> struct Vector<2> {
  typedef uint16_t type;
};

// load and store move K elements as one; the address is a multiple of their size, and what is
// stored to is no shared memory.
template <int K, typename T> __device__ __forceinline__ void load(const T *p, float (&x)[K]) {
  const Pack<T, K> a = *reinterpret_cast<const Pack<T, K> *>(p);
#pragma unroll
  for (int i = 0; i < K; i++) x[i] = widen(a.v[i]);
}
template <int K, typename T> __device__ __forceinline__ void store(T *p, const float (&x)[K]) {
  constexpr int N = K < Wide<T>::LANES ? K : Wide<T>::LANES;
#pragma unroll
  for (int at = 0; at < K; at += N) {
    Pack<T, N> a;
#pragma unroll
    for (int i = 0; i < N; i++) a.v[i] = narrow<T>(x[at + i]);
    typename Vector<sizeof a>::type w;
    memcpy(&w, &a, sizeof w);
    // an instruction: what is assigned the compiler may take apart
    if constexpr (sizeof w >= 8) __stwb(reinterpret_cast<decltype(w) *>(p + at), w);
    else *reinterpret_cast<decltype(w) *>(p + at) = w;
  }
}

// load_raw is load_some without widening: what is kept in registers takes no more of them than
// memory.
template <bool ALIGNED, int K, typename T>
__device__ __forceinline__ void load_raw(const T *p, int64_t n, Pack<T, K> &x) {
  if (ALIGNED && n > 0) {
    x = *reinterpret_cast<const Pack<T, K> *>(p);
  } else {
#pragma unroll
    for (int i = 0; i < K; i++) x.v[i] = !ALIGNED && i < n ? p[i] : narrow<T>(0.0f);
  }
}

// load_some and store_some move up to n of K elements (n may be negative): as one when ALIGNED,
// which also says that n is K or nothing; else one by one. What is missing reads as 0. The owner of
// an element is thus the same whatever the alignment, and so are sums.
template <bool ALIGNED, int K, typename T>
__device__ __forceinline__ void load_some(const T *p, int64_t n, float (&x)[K]) {
  if (ALIGNED) {
    if (n > 0) {
      load<K>(p, x);
    } else {
#pragma unroll
      for (int i = 0; i < K; i++) x[i] = 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < K; i++) x[i] = i < n ? widen(p[i]) : 0.0f;
  }
}
template <bool ALIGNED, int K, typename T>
__device__ __forceinline__ void store_some(T *p, int64_t n, const float (&x)[K]) {
  if (ALIGNED) {
    if (n > 0) store<K>(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < K; i++)
      if (i < n) p[i] = narrow<T>(x[i]);
  }
}

// load_flat and store_flat move up to K elements of an array that ends after n more, as one where
// they are aligned and all there.
template <int K, typename T>
__device__ __forceinline__ void load_flat(const T *p, int64_t n, bool aligned, float (&x)[K]) {
  if (aligned && n >= K) load<K>(p, x);
  else load_some<false, K>(p, n, x);
}
template <int K, typename T>
__device__ __forceinline__ void store_flat(T *p, int64_t n, bool aligned, const float (&x)[K]) {
  if (aligned && n >= K) store<K>(p, x);
  else store_some<false, K>(p, n, x);
}

// warp_sum is the sum over a warp, in every lane, by halves.
template <typename T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// block_sum is the sum over a block, in every thread, warps in order. `room` is shared, one value
// for each warp; the caller lets a barrier pass before room is used again.
template <typename T> __device__ __forceinline__ T block_sum(T x, T *room) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  T sum = 0;
  for (unsigned w = 0; w < blockDim.x / 32; w++) sum += room[w];
  return sum;
}

// group_sum is the sum over a group of G threads, in each of them: 16, 32, or more, which are the
// block; then `room` is as block_sum's.
template <int G> __device__ __forceinline__ float group_sum(float x, float *room) {
  if constexpr (G > 32) {
    return block_sum(x, room);
  } else {
#pragma unroll
    for (int i = G / 2; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
    return x;
  }
}

// sigmoid is for values of type T. BF16 keeps 8 bits: quick functions, wrong by some units of 2⁻²²,
// spare it some twenty instructions a value, for which there is no time between two reads of
// memory.
template <typename T> __device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 2) return __fdividef(1.0f, 1.0f + __expf(-x));
  else return 1.0f / (1.0f + expf(-x));
}
// silu_slope is the derivative of x·s where s is sigmoid(x).
__device__ __forceinline__ float silu_slope(float x, float s) { return s * fmaf(x, 1.0f - s, 1.0f); }

// aligned16 says that vectors of 16 bytes (of elements of `size` bytes) may be used on memory with
// these strides.
inline bool aligned16(const void *p, int64_t size, int64_t stride_a = 0, int64_t stride_b = 0) {
  const int64_t lanes = 16 / size;
  return (uintptr_t)p % 16 == 0 && stride_a % lanes == 0 && stride_b % lanes == 0;
}

// blocks_for is a grid for n things, `per_block` of them in a block at a time: kernels go on by
// whole grids. Few blocks do in the emulated plug-in, so that its tests see blocks go on.
inline unsigned blocks_for(int64_t n, int64_t per_block) {
#ifdef ULY_EMULATED
  constexpr int64_t limit = 7;
#else
  constexpr int64_t limit = 1 << 20;
#endif
  return (unsigned)most(1, least(ceil_div(n, per_block), limit));
}
