// SwiGLU (Shazeer 2020, arXiv:2002.05202): y = silu(gate) · up, elementwise, where silu(g) = g ·
// sigmoid(g). With gelu, g · sigmoid(z) instead, which equals GELU's approximation by tanh, g/2 ·
// (1 + tanh(z/2)) (Hendrycks & Gimpel 2016, arXiv:1606.08415). gate, up, y and the gradients are
// [T, N], F32 or BF16, with dense last axes.
#include "check.h"
#include "elementwise.h"

namespace {

// Operands: y, gate, up.
template <typename T> struct SwiGLUForward {
  enum { OPERANDS = 3, READ = 0b110, WRITTEN = 0b001 };
  __device__ static void apply(float (&x)[3]) { x[0] = x[1] * sigmoid<T>(x[1]) * x[2]; }
};

// Operands: dgate, dup, gate, up, dy. dgate and dup may be gate and up.
template <typename T> struct SwiGLUBackward {
  enum { OPERANDS = 5, READ = 0b11100, WRITTEN = 0b00011 };
  __device__ static void apply(float (&x)[5]) {
    const float g = x[2], u = x[3], s = sigmoid<T>(g), ds = x[4] * s;
    x[0] = ds * u * (1.0f + g * (1.0f - s)); // silu' = σ·(1 + g·(1 - σ))
    x[1] = ds * g;
  }
};

// The same, and y replaces dy, for a forward pass that did not save y.
template <typename T> struct SwiGLUBackwardRestore {
  enum { OPERANDS = 5, READ = 0b11100, WRITTEN = 0b10011 };
  __device__ static void apply(float (&x)[5]) {
    const float g = x[2], u = x[3], s = sigmoid<T>(g);
    SwiGLUBackward<T>::apply(x);
    x[4] = g * s * u;
  }
};

template <typename T> struct GELUForward {
  enum { OPERANDS = 3, READ = 0b110, WRITTEN = 0b001 };
  __device__ static void apply(float (&x)[3]) { x[0] = x[1] * sigmoid<T>(gelu_z(x[1])) * x[2]; }
};

template <typename T> struct GELUBackward {
  enum { OPERANDS = 5, READ = 0b11100, WRITTEN = 0b00011 };
  __device__ static void apply(float (&x)[5]) {
    const float g = x[2], u = x[3], s = sigmoid<T>(gelu_z(g)), ds = x[4] * s;
    x[0] = ds * u * (1.0f + g * gelu_slope(g) * (1.0f - s));
    x[1] = ds * g;
  }
};

template <typename T> struct GELUBackwardRestore {
  enum { OPERANDS = 5, READ = 0b11100, WRITTEN = 0b10011 };
  __device__ static void apply(float (&x)[5]) {
    const float g = x[2], u = x[3], s = sigmoid<T>(gelu_z(g));
    GELUBackward<T>::apply(x);
    x[4] = g * s * u;
  }
};

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_swiglu &a = *(const uly_swiglu *)args;
  Check c(d, "SwiGLUForward");
  const int type = c.compute("gate", a.gate);
  c.rows("gate", a.gate, type, {-1, -1});
  c.rows("up", a.up, type, Shape(a.gate));
  c.rows("y", a.y, type, Shape(a.gate));
  if (c.failed() || elements(a.gate) == 0) return c.code;
  if (a.gelu) launch_elementwise<GELUForward>(s, type, {&a.y, &a.gate, &a.up});
  else launch_elementwise<SwiGLUForward>(s, type, {&a.y, &a.gate, &a.up});
  return check_launch(d, "cuda.SwiGLUForward");
}

int32_t backward(uly_device *d, uly_stream *s, const void *args) {
  const uly_swiglu_grad &a = *(const uly_swiglu_grad *)args;
  Check c(d, "SwiGLUBackward");
  const int type = c.compute("gate", a.gate);
  c.rows("gate", a.gate, type, {-1, -1});
  c.rows("up", a.up, type, Shape(a.gate));
  c.rows("dy", a.dy, type, Shape(a.gate));
  c.rows("dgate", a.dgate, type, Shape(a.gate));
  c.rows("dup", a.dup, type, Shape(a.gate));
  if (c.failed() || elements(a.gate) == 0) return c.code;
  if (a.gelu && a.restore) launch_elementwise<GELUBackwardRestore>(s, type, {&a.dgate, &a.dup, &a.gate, &a.up, &a.dy});
  else if (a.gelu) launch_elementwise<GELUBackward>(s, type, {&a.dgate, &a.dup, &a.gate, &a.up, &a.dy});
  else if (a.restore) launch_elementwise<SwiGLUBackwardRestore>(s, type, {&a.dgate, &a.dup, &a.gate, &a.up, &a.dy});
  else launch_elementwise<SwiGLUBackward>(s, type, {&a.dgate, &a.dup, &a.gate, &a.up, &a.dy});
  return check_launch(d, "cuda.SwiGLUBackward");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_SWIGLU_FORWARD, "own", forward},
    {ULY_OP_SWIGLU_BACKWARD, "own", backward},
});
