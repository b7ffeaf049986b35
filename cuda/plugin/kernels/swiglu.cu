// SwiGLU, forward and backward (Shazeer 2020), element by element.
#include "check.h"
#include "values.h"

namespace {

constexpr int BLOCK = 256;

template <typename T, int K, bool NARROW> __global__ void __launch_bounds__(BLOCK)
    swiglu_forward(Walk<3> w, T *y, const T *gate, const T *up) {
  const int64_t stride = (int64_t)gridDim.x * BLOCK;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < w.units; i += stride) {
    int64_t o[3];
    float g[K], u[K];
    w.template at<NARROW>(i, o);
    load<K>(gate + o[1], g);
    load<K>(up + o[2], u);
#pragma unroll
    for (int j = 0; j < K; j++) g[j] = g[j] * sigmoid<T>(g[j]) * u[j];
    store<K>(y + o[0], g);
  }
}

// dgate, dup may be gate, up: a unit is read before it is written, by the same thread. RESTORE: dy
// becomes y.
template <typename T, int K, bool NARROW, bool RESTORE> __global__ void __launch_bounds__(BLOCK)
    swiglu_backward(Walk<5> w, T *dgate, T *dup, const T *gate, const T *up, T *dy) {
  const int64_t stride = (int64_t)gridDim.x * BLOCK;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < w.units; i += stride) {
    int64_t o[5];
    float g[K], u[K], d[K], y[K];
    w.template at<NARROW>(i, o);
    load<K>(gate + o[2], g);
    load<K>(up + o[3], u);
    load<K>(dy + o[4], d);
#pragma unroll
    for (int j = 0; j < K; j++) {
      const float s = sigmoid<T>(g[j]), ds = d[j] * s;
      y[j] = g[j] * s * u[j];
      d[j] = ds * u[j] * (1.0f + g[j] * (1.0f - s)); // silu' = σ·(1 + g·(1 - σ))
      u[j] = ds * g[j];
    }
    if (RESTORE) store<K>(dy + o[4], y);
    store<K>(dgate + o[0], d);
    store<K>(dup + o[1], u);
  }
}

template <typename T, int K> void start_forward(uly_stream *s, const Plane &p, const uly_swiglu *a) {
  const Walk<3> w(p, K);
  T *y = (T *)a->y.data;
  const T *gate = (const T *)a->gate.data, *up = (const T *)a->up.data;
  if (w.narrow) LAUNCH((swiglu_forward<T, K, true>), blocks_for(w.units, BLOCK), BLOCK, 0, s, w, y, gate, up);
  else LAUNCH((swiglu_forward<T, K, false>), blocks_for(w.units, BLOCK), BLOCK, 0, s, w, y, gate, up);
}

template <typename T, int K, bool RESTORE>
void start_backward(uly_stream *s, const Plane &p, const uly_swiglu_grad *a) {
  const Walk<5> w(p, K);
  T *dgate = (T *)a->dgate.data, *dup = (T *)a->dup.data, *dy = (T *)a->dy.data;
  const T *gate = (const T *)a->gate.data, *up = (const T *)a->up.data;
  if (w.narrow)
    LAUNCH((swiglu_backward<T, K, true, RESTORE>), blocks_for(w.units, BLOCK), BLOCK, 0, s, w, dgate, dup, gate, up,
           dy);
  else
    LAUNCH((swiglu_backward<T, K, false, RESTORE>), blocks_for(w.units, BLOCK), BLOCK, 0, s, w, dgate, dup, gate, up,
           dy);
}
template <typename T, int K> void start_backward(uly_stream *s, const Plane &p, const uly_swiglu_grad *a) {
  if (a->restore) start_backward<T, K, true>(s, p, a);
  else start_backward<T, K, false>(s, p, a);
}

template <typename T> void forward_of(uly_stream *s, const uly_swiglu *a) {
  const uly_tensor *operands[] = {&a->y, &a->gate, &a->up};
  const Plane p = plane_of(operands, 3, 0);
  const void *data[] = {a->y.data, a->gate.data, a->up.data};
  const int64_t sizes[] = {sizeof(T), sizeof(T), sizeof(T)};
  if (fits_unit(p, data, sizes, Wide<T>::LANES)) start_forward<T, Wide<T>::LANES>(s, p, a);
  else start_forward<T, 1>(s, p, a);
}

template <typename T> void backward_of(uly_stream *s, const uly_swiglu_grad *a) {
  const uly_tensor *operands[] = {&a->dgate, &a->dup, &a->gate, &a->up, &a->dy};
  const Plane p = plane_of(operands, 5, 0);
  const void *data[] = {a->dgate.data, a->dup.data, a->gate.data, a->up.data, a->dy.data};
  const int64_t sizes[] = {sizeof(T), sizeof(T), sizeof(T), sizeof(T), sizeof(T)};
  if (fits_unit(p, data, sizes, Wide<T>::LANES)) start_backward<T, Wide<T>::LANES>(s, p, a);
  else start_backward<T, 1>(s, p, a);
}

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_swiglu *a = (const uly_swiglu *)args;
  Check c(d, "SwiGLUForward");
  const int type = c.compute("gate", a->gate);
  c.rows("gate", a->gate, type, {-1, -1});
  c.rows("up", a->up, type, Shape(a->gate));
  c.rows("y", a->y, type, Shape(a->gate));
  if (c.failed() || elements(a->gate) == 0) return c.code;
  if (type == ULY_F32) forward_of<float>(s, a);
  else forward_of<bf16>(s, a);
  return started(d, "cuda.SwiGLUForward");
}

int32_t backward(uly_device *d, uly_stream *s, const void *args) {
  const uly_swiglu_grad *a = (const uly_swiglu_grad *)args;
  Check c(d, "SwiGLUBackward");
  const int type = c.compute("gate", a->gate);
  c.rows("gate", a->gate, type, {-1, -1});
  c.rows("up", a->up, type, Shape(a->gate));
  c.rows("dy", a->dy, type, Shape(a->gate));
  c.rows("dgate", a->dgate, type, Shape(a->gate));
  c.rows("dup", a->dup, type, Shape(a->gate));
  if (c.failed() || elements(a->gate) == 0) return c.code;
  if (type == ULY_F32) backward_of<float>(s, a);
  else backward_of<bf16>(s, a);
  return started(d, "cuda.SwiGLUBackward");
}

} // namespace

const uly_row swiglu_rows[] = {
    {ULY_OP_SWIGLU_FORWARD, "own", forward, nullptr},
    {ULY_OP_SWIGLU_BACKWARD, "own", backward, nullptr},
    {0, nullptr, nullptr, nullptr},
};
