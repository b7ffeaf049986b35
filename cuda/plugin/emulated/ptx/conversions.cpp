// Conversions between types (cvt). Registers may be wider than the type that they hold.
#include <math.h>

#include <map>

#include "warp.h"

namespace uly_emulated {
namespace ptx {
namespace {

template <class D, class A, class RD, class RA, D (*F)(A)> void convert(Warp &w, const Instruction &i) {
  RD *d = w.at<RD>(i.at[0]);
  const RA *a = w.at<RA>(i.at[1]);
  lanes(w.now, [=](unsigned l) {
    A v;
    memcpy(&v, &a[l], sizeof v);
    const D result = F(v);
    if (sizeof(D) == sizeof(RD)) memcpy(&d[l], &result, sizeof result);
    else d[l] = (RD)result;
  });
}

template <class D, class A> D plain(A a) { return (D)a; }
uint16_t to_bf16(float f) { return __nv_bfloat16(f).__x; }
float from_bf16(uint16_t u) { return float(__ushort_as_bfloat16(u)); }
float from_f16(uint16_t u) { return float(__ushort_as_half(u)); }
float saturated(float a) { return a > 0 ? a < 1 ? a : 1 : 0; }
float whole(float a) { return truncf(a); }
double nearest(double a) { return nearbyint(a); }
int64_t whole_s64(double a) {
  if (a != a || a < -0x1p63) return INT64_MIN;
  return a >= 0x1p63 ? INT64_MAX : (int64_t)a;
}
// cvt.rn.bf16x2.f32 d, a, b: a is in the upper half
void pair(Warp &w, const Instruction &i) {
  uint32_t *d = w.at<uint32_t>(i.at[0]);
  const float *a = w.at<float>(i.at[1]), *b = w.at<float>(i.at[2]);
  lanes(w.now, [=](unsigned l) { d[l] = (uint32_t)to_bf16(a[l]) << 16 | to_bf16(b[l]); });
}

// by name, and the widths of the registers
typedef std::map<std::pair<std::string, std::pair<Width, Width>>, Run> Table;

Table make() {
  Table t;
  // Sign extension is done by the conversion to the destination's type.
  t[{"cvt.u64.u32", {LONG, WORD}}] = convert<uint64_t, uint32_t, uint64_t, uint32_t, plain<uint64_t, uint32_t>>;
  t[{"cvt.s64.s32", {LONG, WORD}}] = convert<int64_t, int32_t, uint64_t, uint32_t, plain<int64_t, int32_t>>;
  t[{"cvt.s64.s32", {LONG, LONG}}] = convert<int64_t, int32_t, uint64_t, uint64_t, plain<int64_t, int32_t>>;
  t[{"cvt.u32.u64", {WORD, LONG}}] = convert<uint32_t, uint64_t, uint32_t, uint64_t, plain<uint32_t, uint64_t>>;
  t[{"cvt.rn.f32.s32", {WORD, WORD}}] = convert<float, int32_t, uint32_t, uint32_t, plain<float, int32_t>>;
  t[{"cvt.rn.f32.u32", {WORD, WORD}}] = convert<float, uint32_t, uint32_t, uint32_t, plain<float, uint32_t>>;
  t[{"cvt.rn.f32.s64", {WORD, LONG}}] = convert<float, int64_t, uint32_t, uint64_t, plain<float, int64_t>>;
  t[{"cvt.rn.f32.f64", {WORD, LONG}}] = convert<float, double, uint32_t, uint64_t, plain<float, double>>;
  t[{"cvt.f64.f32", {LONG, WORD}}] = convert<double, float, uint64_t, uint32_t, plain<double, float>>;
  t[{"cvt.f32.bf16", {WORD, HALF}}] = convert<float, uint16_t, uint32_t, uint16_t, from_bf16>;
  t[{"cvt.f32.f16", {WORD, HALF}}] = convert<float, uint16_t, uint32_t, uint16_t, from_f16>;
  t[{"cvt.rn.bf16.f32", {HALF, WORD}}] = convert<uint16_t, float, uint16_t, uint32_t, to_bf16>;
  t[{"cvt.sat.f32.f32", {WORD, WORD}}] = convert<float, float, uint32_t, uint32_t, saturated>;
  t[{"cvt.rzi.f32.f32", {WORD, WORD}}] = convert<float, float, uint32_t, uint32_t, whole>;
  t[{"cvt.rni.f64.f64", {LONG, LONG}}] = convert<double, double, uint64_t, uint64_t, nearest>;
  t[{"cvt.rzi.s64.f64", {LONG, LONG}}] = convert<int64_t, double, uint64_t, uint64_t, whole_s64>;
  t[{"cvt.rn.bf16x2.f32", {WORD, WORD}}] = pair;
  return t;
}

} // namespace

Run conversion(const std::string &name, Width into, Width from) {
  static const Table all = make();
  auto it = all.find({name, {into, from}});
  return it == all.end() ? nullptr : it->second;
}

} // namespace ptx
} // namespace uly_emulated
