// CUDA's types that kernels use: vectors, bfloat16, half. Conversions round to nearest even and
// keep NaN, as on a GPU.
#pragma once

#include <stdint.h>
#include <string.h>

#define ULY_EMULATED_ALIGN(n) __attribute__((aligned(n), may_alias))
#define ULY_EMULATED_VECTOR2(name, type, bytes) \
  struct ULY_EMULATED_ALIGN(bytes) name {       \
    type x, y;                                  \
  };                                            \
  inline name make_##name(type x, type y) { return name{x, y}; }
#define ULY_EMULATED_VECTOR3(name, type)   \
  struct __attribute__((may_alias)) name { \
    type x, y, z;                          \
  };                                       \
  inline name make_##name(type x, type y, type z) { return name{x, y, z}; }
#define ULY_EMULATED_VECTOR4(name, type, bytes) \
  struct ULY_EMULATED_ALIGN(bytes) name {       \
    type x, y, z, w;                            \
  };                                            \
  inline name make_##name(type x, type y, type z, type w) { return name{x, y, z, w}; }

ULY_EMULATED_VECTOR2(char2, signed char, 2)
ULY_EMULATED_VECTOR2(uchar2, unsigned char, 2)
ULY_EMULATED_VECTOR2(short2, short, 4)
ULY_EMULATED_VECTOR2(ushort2, unsigned short, 4)
ULY_EMULATED_VECTOR2(int2, int, 8)
ULY_EMULATED_VECTOR2(uint2, unsigned, 8)
ULY_EMULATED_VECTOR2(float2, float, 8)
ULY_EMULATED_VECTOR2(double2, double, 16)
ULY_EMULATED_VECTOR2(longlong2, long long, 16)
ULY_EMULATED_VECTOR2(ulonglong2, unsigned long long, 16)
ULY_EMULATED_VECTOR3(int3, int)
ULY_EMULATED_VECTOR3(uint3, unsigned)
ULY_EMULATED_VECTOR3(float3, float)
ULY_EMULATED_VECTOR4(char4, signed char, 4)
ULY_EMULATED_VECTOR4(uchar4, unsigned char, 4)
ULY_EMULATED_VECTOR4(short4, short, 8)
ULY_EMULATED_VECTOR4(ushort4, unsigned short, 8)
ULY_EMULATED_VECTOR4(int4, int, 16)
ULY_EMULATED_VECTOR4(uint4, unsigned, 16)
ULY_EMULATED_VECTOR4(float4, float, 16)
ULY_EMULATED_VECTOR4(double4, double, 16)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

template <class To, class From> inline To uly_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// Conversions are explicit, so that no arithmetic in BF16 is written by accident: it would round
// after every operation.
struct __attribute__((may_alias)) __nv_bfloat16 {
  unsigned short __x;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float f) {
    uint32_t u = uly_bits<uint32_t>(f);
    if (f != f) __x = 0x7fff; // the GPU's NaN
    else __x = (unsigned short)((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return uly_bits<float>((uint32_t)__x << 16); }
};
typedef __nv_bfloat16 nv_bfloat16;
struct ULY_EMULATED_ALIGN(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
typedef __nv_bfloat162 nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline float __bfloat162float(__nv_bfloat16 b) { return float(b); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.__x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
  __nv_bfloat16 b;
  b.__x = u;
  return b;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return __nv_bfloat162{__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return __floats2bfloat162_rn(f.x, f.y); }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return __nv_bfloat162{x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 b) { return make_float2(float(b.x), float(b.y)); }
inline float __low2float(__nv_bfloat162 b) { return float(b.x); }
inline float __high2float(__nv_bfloat162 b) { return float(b.y); }

// __half is implemented here, because _Float16 would need library functions.
struct __attribute__((may_alias)) __half {
  unsigned short __x;
  __half() = default;
  explicit __half(float f) {
    uint32_t u = uly_bits<uint32_t>(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) {
      __x = 0x7fff;
      return;
    }
    // the value rounds to infinity
    if (a >= 0x477ff000) {
      __x = (unsigned short)(sign | 0x7c00);
      return;
    }
    // the value is subnormal, in units of 2^-24
    if (a < 0x38800000) {
      float m = uly_bits<float>(a) * 16777216.0f;
      int32_t i = (int32_t)m;
      float rest = m - (float)i;
      i += rest > 0.5f || (rest == 0.5f && (i & 1));
      __x = (unsigned short)(sign | (uint32_t)i);
      return;
    }
    a += 0xc8000fff + (a >> 13 & 1);
    __x = (unsigned short)(sign | a >> 13);
  }
  explicit operator float() const {
    uint32_t sign = (uint32_t)(__x & 0x8000) << 16, e = __x >> 10 & 31, m = __x & 1023;
    if (e == 31) return uly_bits<float>(sign | 0x7f800000 | m << 13);
    if (e == 0) {
      float f = (float)m / 16777216.0f;
      return sign ? -f : f;
    }
    return uly_bits<float>(sign | (e + 112) << 23 | m << 13);
  }
};
typedef __half half;
struct ULY_EMULATED_ALIGN(4) __half2 {
  __half x, y;
};
typedef __half2 half2;
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline float __half2float(__half h) { return float(h); }
inline __half2 __floats2half2_rn(float x, float y) { return __half2{__half(x), __half(y)}; }
inline float2 __half22float2(__half2 h) { return make_float2(float(h.x), float(h.y)); }
inline unsigned short __half_as_ushort(__half h) { return h.__x; }
inline __half __ushort_as_half(unsigned short u) {
  __half h;
  h.__x = u;
  return h;
}
