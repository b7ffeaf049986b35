// Loads, stores and sums for kernels. Loads convert F32 and BF16 memory to float, in vectors of 16
// bytes if addresses and strides allow. Sums over a warp or a block have a fixed order of
// additions.
#pragma once

#include <initializer_list>

#include "index.h"
#include "plugin.h"

typedef __nv_bfloat16 bf16;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
template <typename T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) { return __float2bfloat16(x); }

// Wide<T>::LANES is the number of elements in a vector of 16 bytes.
template <typename T> struct Wide {
  enum { LANES = 16 / sizeof(T) };
};

template <typename T, int K> struct alignas(sizeof(T) * K) Pack {
  T v[K];
};

// Vector<BYTES> is the type that one store instruction of BYTES bytes writes.
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

// load reads K elements with one instruction. store writes them with as few instructions as
// possible. The address must be a multiple of the size of the K elements, at most 16 bytes. store
// requires global memory.
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
    // __stwb is one instruction. The compiler may split an assignment into smaller stores.
    if constexpr (sizeof w >= 8) __stwb(reinterpret_cast<decltype(w) *>(p + at), w);
    else *reinterpret_cast<decltype(w) *>(p + at) = w;
  }
}

// load_raw and store_raw are load_some and store_some without conversion to float. Rows of BF16
// that stay in registers then need half as many.
template <bool ALIGNED, int K, typename T>
__device__ __forceinline__ void load_raw(const T *p, int64_t n, Pack<T, K> &x) {
  if (ALIGNED && n > 0) {
    x = *reinterpret_cast<const Pack<T, K> *>(p);
  } else {
#pragma unroll
    for (int i = 0; i < K; i++) x.v[i] = !ALIGNED && i < n ? p[i] : narrow<T>(0.0f);
  }
}

template <bool ALIGNED, int K, typename T>
__device__ __forceinline__ void store_raw(T *p, int64_t n, const Pack<T, K> &x) {
  if (ALIGNED && n > 0) {
    typename Vector<sizeof x>::type w;
    memcpy(&w, &x, sizeof w);
    __stwb(reinterpret_cast<decltype(w) *>(p), w);
  } else {
#pragma unroll
    for (int i = 0; i < K; i++)
      if (!ALIGNED && i < n) p[i] = x.v[i];
  }
}

// Word is K elements in registers as one instruction loads them. load_word is load_raw for a Word,
// and in_word returns element i. Loads that are issued before others are used stay in Words: the
// compiler may keep each element of a Pack of BF16 in a register, and then waits for a load at
// once, to unpack it.
template <int K, typename T> using Word = typename Vector<K * sizeof(T)>::type;

template <bool ALIGNED, int K, typename T>
__device__ __forceinline__ void load_word(const T *p, int64_t n, Word<K, T> &x) {
  if (ALIGNED && n > 0) {
    x = *reinterpret_cast<const Word<K, T> *>(p);
  } else {
    Pack<T, K> elements;
    load_raw<false>(p, ALIGNED ? 0 : n, elements);
    memcpy(&x, &elements, sizeof x);
  }
}
// load_flat_word loads as many of K elements as exist. `wide`: p is a multiple of their size.
template <int K, typename T>
__device__ __forceinline__ void load_flat_word(const T *p, int left, bool wide, Word<K, T> &x) {
  if (wide && left >= K) load_word<true, K>(p, left, x);
  else load_word<false, K>(p, left, x);
}
template <typename T, typename W> __device__ __forceinline__ float in_word(const W &x, int i) {
  Pack<T, sizeof(W) / sizeof(T)> elements;
  memcpy(&elements, &x, sizeof x);
  return widen(elements.v[i]);
}

// load_some and store_some move the first n of K elements; n may be negative or greater than K.
// load_some reads missing elements as 0. If ALIGNED, they use one vector access, and n must be K or
// at most 0; otherwise they move single elements. A thread has the same elements in both cases, so
// sums do not depend on alignment.
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

// apart returns the place of element e in an array of shared memory with a gap behind each 32
// elements, one for each bank, so that lanes can write elements a multiple of 8 apart. Elements e …
// e + 7 are neighbours if e is a multiple of 8.
__device__ __forceinline__ constexpr int apart(int e) { return e + e / 32; }

// load_flat and store_flat move up to K elements, if n elements of the array remain. They use one
// vector access if the array is aligned and n is at least K.
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

// warp_sum returns the sum over a warp in every lane, as a tree of additions.
template <typename T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// block_sum returns the sum over a block in every thread. It adds the sums of the warps in order.
// `room` is shared memory of one value for each warp; a barrier must precede its next use.
template <typename T> __device__ __forceinline__ T block_sum(T x, T *room) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  T sum = 0;
  for (unsigned w = 0; w < blockDim.x / 32; w++) sum += room[w];
  return sum;
}

// group_sum returns the sum over a group of G threads in each of these threads. G is 16, 32, or the
// number of threads of the block; in the last case `room` is that of block_sum.
template <int G> __device__ __forceinline__ float group_sum(float x, float *room) {
  if constexpr (G > 32) {
    return block_sum(x, room);
  } else {
#pragma unroll
    for (int i = G / 2; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
    return x;
  }
}

// sigmoid returns 1 / (1 + e^-x) for a result that is stored as T. BF16 has 8 bits of mantissa, so
// the approximate functions, with errors of a few units of 2⁻²², are precise enough. They save
// about 20 instructions for each value in kernels that are limited by memory bandwidth.
template <typename T> __device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 2) return __fdividef(1.0f, 1.0f + __expf(-x));
  else return 1.0f / (1.0f + expf(-x));
}
// Sigmoid has s = sigmoid(x) and rest = 1 - s. The difference would have the rounding of s: where s
// is nearly 1, the difference is smaller than that.
template <typename T> struct Sigmoid {
  float s, rest;
  __device__ __forceinline__ explicit Sigmoid(float x) {
    float e, larger; // e^-|x|, and sigmoid(|x|)
    if constexpr (sizeof(T) == 2) e = __expf(-fabsf(x)), larger = __fdividef(1.0f, 1.0f + e);
    else e = expf(-fabsf(x)), larger = 1.0f / (1.0f + e);
    const float smaller = e * larger;
    s = x < 0 ? smaller : larger, rest = x < 0 ? larger : smaller;
  }
};
// silu_slope returns the derivative of x·sigmoid(x); s is sigmoid(x).
__device__ __forceinline__ float silu_slope(float x, float s) { return s * fmaf(x, 1.0f - s, 1.0f); }

// aligned16 reports whether every row of memory at p begins at a multiple of 16 bytes. Elements
// have `size` bytes; rows are stride_a and stride_b elements apart.
inline bool aligned16(const void *p, int64_t size, int64_t stride_a = 0, int64_t stride_b = 0) {
  const int64_t lanes = 16 / size;
  return (uintptr_t)p % 16 == 0 && stride_a % lanes == 0 && stride_b % lanes == 0;
}

// aligned_rows reports whether all rows of the tensors [T, N] begin at multiples of 16 bytes, and
// have whole units of 16 bytes. Absent tensors do not count.
inline bool aligned_rows(std::initializer_list<const uly_tensor *> all) {
  bool ok = true;
  for (const uly_tensor *t : all)
    if (t->dtype)
      ok = ok && t->shape[1] % (16 / size_of(t->dtype)) == 0 && aligned16(t->data, size_of(t->dtype), t->stride[0]);
  return ok;
}

// blocks_for returns the number of blocks for n items, per_block items for each block. The number
// is limited; kernels loop over their items with the grid's size as stride.
inline unsigned blocks_for(int64_t n, int64_t per_block) {
  return (unsigned)most(1, least(ceil_div(n, per_block), ELEMENTWISE_GRID_LIMIT));
}
