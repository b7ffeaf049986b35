// Fill: dst = value, for any strides and any type but F16. Add: dst = a + b, for F32 or BF16 with
// dense last axes. Scale: x *= f, for dense F32 or BF16. Each reads and writes memory once, in
// vectors of 16 bytes if addresses and strides allow.
#include <string.h>

#include "check.h"
#include "elementwise.h"

namespace {

constexpr int BLOCK = 256;

template <typename U, bool NARROW> __global__ void __launch_bounds__(BLOCK) fill_units(Walk<1> w, U *dst, U value) {
  const int64_t stride = (int64_t)gridDim.x * BLOCK;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < w.units; i += stride) {
    int64_t o[1];
    w.template at<NARROW>(i, o);
    dst[o[0]] = value;
  }
}

template <typename U> void start_fill(uly_stream *s, const Plane &p, void *dst, const unsigned char *pattern) {
  U value;
  memcpy(&value, pattern, sizeof value);
  const Walk<1> w(p, 1);
  if (w.narrow) LAUNCH((fill_units<U, true>), blocks_for(w.units, BLOCK), BLOCK, 0, s, w, (U *)dst, value);
  else LAUNCH((fill_units<U, false>), blocks_for(w.units, BLOCK), BLOCK, 0, s, w, (U *)dst, value);
}

int32_t fill(uly_device *d, uly_stream *s, const void *args) {
  const uly_fill *a = (const uly_fill *)args;
  const uly_tensor *dst = &a->dst;
  Check c(d, "Fill");
  if (dst->dtype == ULY_F16 || size_of(dst->dtype) == 0) c.refuse("%s: F16 is not supported", text_of(*dst).c_str());
  c.shape("dst", *dst, dst->dtype, Shape(*dst));
  if (c.failed() || elements(*dst) == 0) return c.code;

  const int64_t size = size_of(dst->dtype);
  union {
    float f32;
    uint16_t bf16;
    double f64;
    int64_t i64; // the first bytes of i64 are the value in any shorter integer type
    unsigned char bytes[16];
  } value;
  switch (dst->dtype) {
    case ULY_F32: value.f32 = (float)a->value; break;
    case ULY_BF16: value.bf16 = bf16_bits((float)a->value); break;
    case ULY_F64: value.f64 = a->value; break;
    default: value.i64 = (int64_t)a->value; break;
  }
  for (int64_t i = size; i < 16; i++) value.bytes[i] = value.bytes[i - size];

  const Plane p = plane_of(&dst, 1, 0);
  const void *data[] = {dst->data};
  int64_t k = 16 / size;
  while (!fits_unit(p, data, &size, k)) k /= 2;
  const Plane units = units_of(p, k);
  switch (k * size) {
    case 1: start_fill<uint8_t>(s, units, dst->data, value.bytes); break;
    case 2: start_fill<uint16_t>(s, units, dst->data, value.bytes); break;
    case 4: start_fill<uint32_t>(s, units, dst->data, value.bytes); break;
    case 8: start_fill<uint2>(s, units, dst->data, value.bytes); break;
    default: start_fill<uint4>(s, units, dst->data, value.bytes); break;
  }
  return check_launch(d, "cuda.Fill");
}

// Operands: dst, a, b. dst may be a or b.
template <typename T> struct Add {
  enum { OPERANDS = 3, READ = 0b110, WRITTEN = 0b001 };
  __device__ static void apply(float (&x)[3]) { x[0] = x[1] + x[2]; }
};

int32_t add(uly_device *d, uly_stream *s, const void *args) {
  const uly_add *a = (const uly_add *)args;
  Check c(d, "Add");
  const int type = c.compute("dst", a->dst);
  c.rows("dst", a->dst, type, Shape(a->dst));
  c.rows("a", a->a, type, Shape(a->dst));
  c.rows("b", a->b, type, Shape(a->dst));
  if (c.failed() || elements(a->dst) == 0) return c.code;
  launch_elementwise<Add>(s, type, {&a->dst, &a->a, &a->b});
  return check_launch(d, "cuda.Add");
}

template <typename T> __global__ void __launch_bounds__(BLOCK) scale_flat(T *x, int64_t n, float f, bool aligned) {
  constexpr int K = Wide<T>::LANES;
  const int64_t stride = (int64_t)gridDim.x * BLOCK * K;
  for (int64_t i = ((int64_t)blockIdx.x * BLOCK + threadIdx.x) * K; i < n; i += stride) {
    float v[K];
    load_flat<K>(x + i, n - i, aligned, v);
#pragma unroll
    for (int j = 0; j < K; j++) v[j] *= f;
    store_flat<K>(x + i, n - i, aligned, v);
  }
}

template <typename T> void scale_of(uly_stream *s, const uly_scale *a) {
  const int64_t n = elements(a->x);
  LAUNCH(scale_flat<T>, blocks_for(n, BLOCK * Wide<T>::LANES), BLOCK, 0, s, (T *)a->x.data, n, (float)a->f,
         aligned16(a->x.data, sizeof(T)));
}

int32_t scale(uly_device *d, uly_stream *s, const void *args) {
  const uly_scale *a = (const uly_scale *)args;
  Check c(d, "Scale");
  const int type = c.compute("x", a->x);
  c.dense("x", a->x, type, Shape(a->x));
  if (c.failed() || elements(a->x) == 0) return c.code;
  if (type == ULY_F32) scale_of<float>(s, a);
  else scale_of<bf16>(s, a);
  return check_launch(d, "cuda.Scale");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_FILL, "own", fill},
    {ULY_OP_ADD, "own", add},
    {ULY_OP_SCALE, "own", scale},
});
