// Elementwise kernels: one kernel for every operation that computes each element from the elements
// at the same index of its operands. gates.cu has examples.
//
// An operation is a struct template F<T> over the type of the elements, float or bf16:
//
//   template <typename T> struct SigmoidForward {
//     enum { OPERANDS = 3, READ = 0b110, WRITTEN = 0b001 }; // bit o: operand o, here y, x, gate
//     __device__ static void apply(float (&x)[3]) { x[0] = x[1] * sigmoid<T>(x[2]); }
//   };
//
// apply computes one element in F32. A thread loads the operands in READ before it stores those in
// WRITTEN, so an output may use the memory of an input.
#pragma once

#include "values.h"

template <typename T, int N> struct ElementwiseOperands {
  T *data[N];
};

// elementwise_units computes units of K elements. NARROW: there are fewer than 2^31 units, so
// indices are divided by multiplication.
template <template <typename> class F, typename T, int K, bool NARROW> __global__ void __launch_bounds__(256)
    elementwise_units(Walk<F<T>::OPERANDS> walk, ElementwiseOperands<T, F<T>::OPERANDS> operands) {
  constexpr int N = F<T>::OPERANDS;
  const int64_t stride = (int64_t)gridDim.x * blockDim.x;
  for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < walk.units; i += stride) {
    int64_t offset[N];
    float x[N][K];
    walk.template at<NARROW>(i, offset);
#pragma unroll
    for (int o = 0; o < N; o++)
      if (F<T>::READ >> o & 1) load<K>(operands.data[o] + offset[o], x[o]);
#pragma unroll
    for (int j = 0; j < K; j++) {
      float element[N];
#pragma unroll
      for (int o = 0; o < N; o++)
        if (F<T>::READ >> o & 1) element[o] = x[o][j];
      F<T>::apply(element);
#pragma unroll
      for (int o = 0; o < N; o++)
        if (F<T>::WRITTEN >> o & 1) x[o][j] = element[o];
    }
#pragma unroll
    for (int o = 0; o < N; o++)
      if (F<T>::WRITTEN >> o & 1) store<K>(operands.data[o] + offset[o], x[o]);
  }
}

template <template <typename> class F, typename T, int K, int N>
void launch_elementwise(uly_stream *s, const Plane &p, const ElementwiseOperands<T, N> &operands) {
  const Walk<N> walk(p, K);
  if (walk.narrow) LAUNCH((elementwise_units<F, T, K, true>), blocks_for(walk.units, 256), 256, 0, s, walk, operands);
  else LAUNCH((elementwise_units<F, T, K, false>), blocks_for(walk.units, 256), 256, 0, s, walk, operands);
}

template <template <typename> class F, typename T, int N>
void launch_elementwise(uly_stream *s, const uly_tensor *const (&tensors)[N]) {
  ElementwiseOperands<T, N> operands;
  const void *data[N];
  int64_t sizes[N];
  for (int o = 0; o < N; o++) data[o] = operands.data[o] = (T *)tensors[o]->data, sizes[o] = sizeof(T);
  const Plane p = plane_of(tensors, N, 0);
  if (fits_unit(p, data, sizes, Wide<T>::LANES)) launch_elementwise<F, T, Wide<T>::LANES>(s, p, operands);
  else launch_elementwise<F, T, 1>(s, p, operands);
}

// launch_elementwise launches F on tensors of one shape and of `type`, ULY_F32 or ULY_BF16. The
// caller has checked shapes and types. There must be at least one element.
template <template <typename> class F, int N>
void launch_elementwise(uly_stream *s, int type, const uly_tensor *const (&tensors)[N]) {
  static_assert(N == F<float>::OPERANDS, "a tensor for each operand");
  if (type == ULY_F32) launch_elementwise<F, float>(s, tensors);
  else launch_elementwise<F, bf16>(s, tensors);
}
