// SwiGLU and its gradient, elementwise, in the forms of swiglu.h. gate, up, y and the gradients are
// [T, N], F32 or BF16, with dense last axes.
#include "check.h"
#include "elementwise.h"
#include "swiglu.h"

namespace {

template <typename Form> struct SwiGLU {
  // Operands: y, gate, up.
  template <typename T> struct Forward {
    enum { OPERANDS = 3, READ = 0b110, WRITTEN = 0b001 };
    __device__ static void apply(float (&x)[3]) { x[0] = SwiGLUOf<Form, T>(x[1], x[2]).y(); }
  };

  // Operands: dgate, dup, gate, up, dy. dgate and dup may be gate and up.
  template <typename T> struct Backward {
    enum { OPERANDS = 5, READ = 0b11100, WRITTEN = 0b00011 };
    __device__ static void apply(float (&x)[5]) {
      const SwiGLUOf<Form, T> of(x[2], x[3]);
      const float ds = x[4] * of.s;
      x[0] = of.dgate(ds);
      x[1] = of.dup(ds);
    }
  };

  // The same, and y replaces dy, for a forward pass that did not save y.
  template <typename T> struct BackwardRestore {
    enum { OPERANDS = 5, READ = 0b11100, WRITTEN = 0b10011 };
    __device__ static void apply(float (&x)[5]) {
      Backward<T>::apply(x);
      x[4] = SwiGLUOf<Form, T>(x[2], x[3]).y();
    }
  };
};

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_swiglu &a = *(const uly_swiglu *)args;
  Check c(d, "SwiGLUForward");
  const int type = c.compute("gate", a.gate);
  c.rows("gate", a.gate, type, {-1, -1});
  c.rows("up", a.up, type, Shape(a.gate));
  c.rows("y", a.y, type, Shape(a.gate));
  check_form(c, a);
  if (c.failed() || elements(a.gate) == 0) return c.code;
  with_form(a, [&](auto form) {
    launch_elementwise<SwiGLU<decltype(form)>::template Forward>(s, type, {&a.y, &a.gate, &a.up});
  });
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
  check_form(c, a);
  if (c.failed() || elements(a.gate) == 0) return c.code;
  with_form(a, [&](auto form) {
    typedef SwiGLU<decltype(form)> Of;
    const uly_tensor *const operands[] = {&a.dgate, &a.dup, &a.gate, &a.up, &a.dy};
    if (a.restore) launch_elementwise<Of::template BackwardRestore>(s, type, operands);
    else launch_elementwise<Of::template Backward>(s, type, operands);
  });
  return check_launch(d, "cuda.SwiGLUBackward");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_SWIGLU_FORWARD, "own", forward},
    {ULY_OP_SWIGLU_BACKWARD, "own", backward},
});
