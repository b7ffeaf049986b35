// Forms of SwiGLU (device.SwiGLU): y = g·s·u with s = sigmoid(z(g)). A form has functions gate and
// up, which return g and u, and z. For the derivatives, gz returns g·z'(g), and moves_gate and
// moves_up report whether g and u change with gate and up.
#pragma once

#include "check.h"
#include "values.h"

// SiLU is silu(gate)·up (Shazeer 2020, arXiv:2002.05202).
struct SiLU {
  static __device__ __forceinline__ float gate(float x) { return x; }
  static __device__ __forceinline__ float up(float x) { return x; }
  static __device__ __forceinline__ float z(float g) { return g; }
  static __device__ __forceinline__ float gz(float g) { return g; }
  static __device__ __forceinline__ bool moves_gate(float) { return true; }
  static __device__ __forceinline__ bool moves_up(float) { return true; }
};

// GELU is GELU's approximation by tanh, g/2 · (1 + tanh(z/2)) = g · sigmoid(z) (Hendrycks & Gimpel
// 2016, arXiv:1606.08415), times up.
struct GELU : SiLU {
  static __device__ __forceinline__ float z(float g) { return g * fmaf(0.0713548163f, g * g, 1.59576912f); }
  static __device__ __forceinline__ float gz(float g) { return g * fmaf(0.214064449f, g * g, 1.59576912f); }
};

// Clamped is the form of gpt-oss. A NaN must reach y, so its limits are comparisons: fminf would
// return the limit.
struct Clamped {
  static __device__ __forceinline__ float gate(float x) { return x > 7.0f ? 7.0f : x; }
  static __device__ __forceinline__ float up(float x) { return (x > 7.0f ? 7.0f : x < -7.0f ? -7.0f : x) + 1.0f; }
  static __device__ __forceinline__ float z(float g) { return 1.702f * g; }
  static __device__ __forceinline__ float gz(float g) { return 1.702f * g; }
  static __device__ __forceinline__ bool moves_gate(float x) { return x < 7.0f; }
  static __device__ __forceinline__ bool moves_up(float x) { return x < 7.0f && x > -7.0f; }
};

// SwiGLUOf has the values of one element that is stored as T.
template <typename Form, typename T> struct SwiGLUOf {
  float gate, up, g, u, s, rest;

  __device__ __forceinline__ SwiGLUOf(float gate, float up) : gate(gate), up(up), g(Form::gate(gate)), u(Form::up(up)) {
    const Sigmoid<T> of(Form::z(g));
    s = of.s, rest = of.rest;
  }

  __device__ __forceinline__ float y() const { return g * s * u; }

  // dgate and dup return the gradients, given ds = s·dy. The derivative of g·s is
  // s·(1 + g·z'·(1 - s)). With GELU, g·z' grows as g³, and would multiply the rounding of s.
  __device__ __forceinline__ float dgate(float ds) const {
    return Form::moves_gate(gate) ? ds * u * fmaf(Form::gz(g), rest, 1.0f) : 0.0f;
  }
  __device__ __forceinline__ float dup(float ds) const { return Form::moves_up(up) ? ds * g : 0.0f; }
};

// check_form refuses arguments of an operation that name two forms.
template <typename A> void check_form(Check &c, const A &a) {
  if (a.gelu && a.clamped) c.refuse("GELU and Clamped are both set; set at most one of them");
}

// with_form calls f with a value of the form that the arguments of an operation name.
template <typename A, typename F> void with_form(const A &a, const F &f) {
  if (a.gelu) f(GELU());
  else if (a.clamped) f(Clamped());
  else f(SiLU());
}
