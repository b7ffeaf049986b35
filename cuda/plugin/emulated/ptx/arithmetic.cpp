// The instructions that compute in registers: PTX ISA 9.0, "Integer Arithmetic" to "Data Movement",
// without conversions (conversions.cpp). Approximate instructions have errors as large as the
// documentation allows.
#include <fenv.h>
#include <math.h>

#include "races.h"
#include "warp.h"

namespace uly_emulated {
namespace ptx {
namespace {

typedef uint16_t h16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

// unary, binary and ternary apply a function to registers.
template <class D, class A, D (*F)(A)> void unary(Warp &w, const Instruction &i) {
  D *d = w.at<D>(i.at[0]);
  const A *a = w.at<A>(i.at[1]);
  lanes(w.now, [=](unsigned l) { d[l] = F(a[l]); });
}
template <class D, class A, class B, D (*F)(A, B)> void binary(Warp &w, const Instruction &i) {
  D *d = w.at<D>(i.at[0]);
  const A *a = w.at<A>(i.at[1]);
  const B *b = w.at<B>(i.at[2]);
  lanes(w.now, [=](unsigned l) { d[l] = F(a[l], b[l]); });
}
template <class D, class A, class B, class C, D (*F)(A, B, C)> void ternary(Warp &w, const Instruction &i) {
  D *d = w.at<D>(i.at[0]);
  const A *a = w.at<A>(i.at[1]);
  const B *b = w.at<B>(i.at[2]);
  const C *c = w.at<C>(i.at[3]);
  lanes(w.now, [=](unsigned l) { d[l] = F(a[l], b[l], c[l]); });
}
// compare writes a predicate.
template <class T, bool (*F)(T, T)> void compare(Warp &w, const Instruction &i) {
  const T *a = w.at<T>(i.at[1]), *b = w.at<T>(i.at[2]);
  u32 bits = 0;
  for (unsigned l = 0; l < 32; l++) bits |= (u32)F(a[l], b[l]) << l;
  u32 &d = w.predicate(i.at[0]);
  d = (d & ~w.now) | (bits & w.now);
}
template <u32 (*F)(u32, u32)> void logic(Warp &w, const Instruction &i) {
  u32 &d = w.predicate(i.at[0]);
  d = (d & ~w.now) | (F(w.predicate(i.at[1]), w.predicate(i.at[i.at.size() - 1])) & w.now);
}
template <class T> void select(Warp &w, const Instruction &i) {
  T *d = w.at<T>(i.at[0]);
  const T *a = w.at<T>(i.at[1]), *b = w.at<T>(i.at[2]);
  const u32 p = w.predicate(i.at[3]);
  lanes(w.now, [=](unsigned l) { d[l] = p >> l & 1 ? a[l] : b[l]; });
}

template <class T> T same(T a) { return a; }
template <class T> T add(T a, T b) { return (T)(a + b); }
template <class T> T sub(T a, T b) { return (T)(a - b); }
template <class T> T mul(T a, T b) { return (T)(a * b); }
template <class T> T mad(T a, T b, T c) { return (T)(a * b + c); }
template <class T> T negative(T a) { return (T)-a; }
template <class T> T both(T a, T b) { return (T)(a & b); }
template <class T> T either(T a, T b) { return (T)(a | b); }
template <class T> T differ(T a, T b) { return (T)(a ^ b); }
template <class T> T inverse(T a) { return (T)~a; }
u32 inverse_of(u32 a, u32) { return ~a; }
u32 same_as(u32 a, u32) { return a; }
template <class T> T least(T a, T b) { return b < a ? b : a; }
template <class T> T most(T a, T b) { return a < b ? b : a; }
// Shifts by more than the width are shifts by the width.
template <class T> T left(T a, u32 n) { return n < 8 * sizeof(T) ? (T)(a << n) : 0; }
template <class T> T right(T a, u32 n) { return n < 8 * sizeof(T) ? (T)(a >> n) : a < 0 ? (T)-1 : 0; }
template <class D, class A> D wide(A a, A b) { return (D)a * (D)b; }
s32 high_s32(s32 a, s32 b) { return (s32)((s64)a * b >> 32); }
u64 high_u64(u64 a, u64 b) { return (u64)((unsigned __int128)a * b >> 64); }
// The result of a division by zero is not defined.
template <class T> T quotient(T a, T b) {
  if (b == 0) throw Fault("a division by zero");
  return b == (T)-1 ? (T)(0 - (u64)a) : (T)(a / b);
}
template <class T> T remainder(T a, T b) {
  if (b == 0) throw Fault("a division by zero");
  return b == (T)-1 && (T)-1 < 0 ? 0 : (T)(a % b);
}
template <> u32 quotient(u32 a, u32 b) {
  if (b == 0) throw Fault("a division by zero");
  return a / b;
}
template <> u64 quotient(u64 a, u64 b) {
  if (b == 0) throw Fault("a division by zero");
  return a / b;
}
u32 ones(u32 a) { return (u32)__builtin_popcount(a); }
void insert(Warp &w, const Instruction &i) { // bfi.b32
  u32 *d = w.at<u32>(i.at[0]);
  const u32 *a = w.at<u32>(i.at[1]), *b = w.at<u32>(i.at[2]), *c = w.at<u32>(i.at[3]), *n = w.at<u32>(i.at[4]);
  lanes(w.now, [=](unsigned l) {
    const u32 position = c[l] & 255, length = n[l] & 255;
    u32 mask = length < 32 ? (1u << length) - 1 : ~0u;
    mask = position < 32 ? mask << position : 0;
    d[l] = (b[l] & ~mask) | ((position < 32 ? a[l] << position : 0) & mask);
  });
}

template <class T> T fused(T a, T b, T c);
template <> f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
template <> f64 fused(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
template <class T> T ratio(T a, T b) { return a / b; }
// min and max return the other operand if one is NaN, and -0 is less than 0.
template <class T> T least_float(T a, T b) {
  return a != a ? b : b != b ? a : a == b ? (signbit(a) ? a : b) : b < a ? b : a;
}
template <class T> T most_float(T a, T b) {
  return a != a ? b : b != b ? a : a == b ? (signbit(a) ? b : a) : a < b ? b : a;
}
u32 minus(u32 a) { return a ^ 0x80000000u; }
u64 minus_f64(u64 a) { return a ^ 1ull << 63; }
u32 absolute(u32 a) { return a & 0x7fffffffu; }
u32 with_sign(u32 a, u32 b) { return (a & 0x80000000u) | (b & 0x7fffffffu); }
f32 root(f32 a) { return sqrtf(a); }
f32 inverted(f32 a) { return 1.0f / a; }

// near returns a number that may be the approximation of x, before its rounding: up to `units`
// units of 2^-23 from it, always the same for the same operands. With the rounding, ex2 and rcp are
// wrong by up to 1 unit. (Functions of CUDA that use ex2, as expf, are documented to be wrong by 1
// unit.)
f32 near(f64 x, f32 a, f32 b, f64 units) {
  u64 hash = ((u64)uly_bits<u32>(a) << 32 | uly_bits<u32>(b)) * 0x9e3779b97f4a7c15ull;
  hash = (hash ^ hash >> 29) * 0xbf58476d1ce4e5b9ull;
  const f64 part = (f64)(s64)(hash ^ hash >> 32) * 0x1p-63; // between -1 and 1
  return (f32)(x * (1 + part * units * 0x1p-23));
}
// flushed returns 0 with the sign of a for denormal numbers (.ftz).
f32 flushed(f32 a) { return fabsf(a) < 0x1p-126f ? copysignf(0, a) : a; }
// ex2.approx(0) is 1.
f32 exp2_near(f32 a) { return a == 0 ? 1 : near(exp2((f64)a), a, 0, 0.5); }
f32 exp2_flushed(f32 a) { return flushed(exp2_near(flushed(a))); }
f32 inverted_flushed(f32 a) {
  a = flushed(a);
  return a == 0 ? copysignf(INFINITY, a) : flushed(near(1.0 / a, a, 0, 0.5));
}
// div.approx is a·(1/b), and 0 for b between 2^126 and 2^128.
f32 ratio_near(f32 a, f32 b) {
  if (fabsf(b) > 0x1p126f && fabsf(b) < INFINITY) return isinf(a) ? NAN : copysignf(0, a) * copysignf(1, b);
  if (fabsf(b) < 0x1p-126f) return a * (1.0f / b);
  return a * (fabsf(b) < INFINITY ? near(1.0 / b, b, 0, 0.5) : 1.0f / b);
}
f32 ratio_flushed(f32 a, f32 b) { return flushed(ratio_near(flushed(a), flushed(b))); }

// Rounding has another direction of rounding during its lifetime.
struct Rounding {
  const int before = fegetround();
  explicit Rounding(int direction) { fesetround(direction); }
  ~Rounding() { fesetround(before); }
};
// The functions are called through volatile pointers: the compiler does not move the arithmetic out
// of the other direction.
f32 fused_f32(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
f32 add_f32(f32 a, f32 b) { return a + b; }
f32 (*volatile fused_in_direction)(f32, f32, f32) = fused_f32;
f32 (*volatile add_in_direction)(f32, f32) = add_f32;
void fused_down(Warp &w, const Instruction &i) {
  f32 *d = w.at<f32>(i.at[0]);
  const f32 *a = w.at<f32>(i.at[1]), *b = w.at<f32>(i.at[2]), *c = w.at<f32>(i.at[3]);
  const Rounding down(FE_DOWNWARD);
  auto *f = fused_in_direction;
  lanes(w.now, [=](unsigned l) { d[l] = f(a[l], b[l], c[l]); });
}
void add_to_zero(Warp &w, const Instruction &i) {
  f32 *d = w.at<f32>(i.at[0]);
  const f32 *a = w.at<f32>(i.at[1]), *b = w.at<f32>(i.at[2]);
  const Rounding zero(FE_TOWARDZERO);
  auto *f = add_in_direction;
  lanes(w.now, [=](unsigned l) { d[l] = f(a[l], b[l]); });
}

template <class T> bool eq(T a, T b) { return a == b; }
template <class T> bool ne(T a, T b) { return a != b; }
template <class T> bool lt(T a, T b) { return a < b; }
template <class T> bool le(T a, T b) { return a <= b; }
template <class T> bool gt(T a, T b) { return a > b; }
template <class T> bool ge(T a, T b) { return a >= b; }
// The comparisons whose names end in u are true for NaN.
template <class T> bool geu(T a, T b) { return !(a < b); }
template <class T> bool leu(T a, T b) { return !(a > b); }
template <class T> bool gtu(T a, T b) { return !(a <= b); }
template <class T> bool ltu(T a, T b) { return !(a >= b); }
template <class T> bool equ(T a, T b) { return !(a < b || a > b); }
template <class T> bool neu(T a, T b) { return !(a == b); }
template <class T> bool nan(T a, T b) { return a != a || b != b; }
template <class T> bool num(T a, T b) { return a == a && b == b; }

// pack and unpack are mov with two registers on one side.
template <class D, class A> void pack(Warp &w, const Instruction &i) {
  D *d = w.at<D>(i.at[0]);
  const A *a = w.at<A>(i.at[1]), *b = w.at<A>(i.at[2]);
  lanes(w.now, [=](unsigned l) { d[l] = (D)a[l] | (D)b[l] << 8 * sizeof(A); });
}
template <class D, class A> void unpack(Warp &w, const Instruction &i) {
  D *d = w.at<D>(i.at[0]), *e = w.at<D>(i.at[1]);
  const A *a = w.at<A>(i.at[2]);
  lanes(w.now, [=](unsigned l) {
    const A v = a[l];
    d[l] = (D)v, e[l] = (D)(v >> 8 * sizeof(D));
  });
}

void all_lanes(Warp &w, uint32_t mask) {
  if (uniform(w, mask, "the member mask") != ~0u) throw Fault("a member mask that has not all lanes");
}
enum Shuffle { UP, DOWN, BUTTERFLY, INDEX };
// d, its predicate, a, b, c, the mask. c has the last lane in bits 0 to 4 and the bits that divide
// the lanes into segments in bits 8 to 12.
template <Shuffle HOW> void shuffle(Warp &w, const Instruction &i) {
  all_lanes(w, i.at[5]);
  u32 *d = w.at<u32>(i.at[0]), a[32], in_range = 0;
  const u32 *b = w.at<u32>(i.at[3]), *c = w.at<u32>(i.at[4]);
  memcpy(a, w.at<u32>(i.at[2]), sizeof a);
  u32 result[32];
  for (u32 l = 0; l < 32; l++) {
    const u32 by = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
    const u32 last = (l & segment) | (clamp & ~segment), first = l & segment;
    const int from = (int)(HOW == UP          ? l - by
                           : HOW == DOWN      ? l + by
                           : HOW == BUTTERFLY ? (l ^ by)
                                              : (first | (by & ~segment)));
    const bool inside = HOW == UP ? from >= (int)last : from <= (int)last;
    result[l] = a[inside ? from : (int)l];
    in_range |= (u32)inside << l;
  }
  memcpy(d, result, sizeof result);
  w.predicate(i.at[1]) = in_range;
}
enum Vote { ANY, ALL };
template <Vote HOW> void vote(Warp &w, const Instruction &i) {
  all_lanes(w, i.at[2]);
  const u32 p = w.predicate(i.at[1]);
  w.predicate(i.at[0]) = (HOW == ANY ? p != 0 : p == ~0u) ? ~0u : 0;
}
void ballot(Warp &w, const Instruction &i) {
  all_lanes(w, i.at[2]);
  const u32 p = w.predicate(i.at[1]);
  u32 *d = w.at<u32>(i.at[0]);
  lanes(~0u, [=](unsigned l) { d[l] = p; });
}
void sync_warp(Warp &w, const Instruction &i) {
  all_lanes(w, i.at[0]);
  if (w.block->races) w.block->races->sync_warp(w);
}
void nothing(Warp &, const Instruction &) {}
void trap(Warp &, const Instruction &) { throw Fault("a trap"); }

const Kind plain = Kind::PLAIN, together = Kind::TOGETHER;

#define BINARY(name, letter, type, f) {name, letter letter letter, binary<type, type, type, f<type>>, plain}
#define UNARY(name, letter, type, f) {name, letter letter, unary<type, type, f<type>>, plain}
#define INTEGERS(name, f)                                                                               \
  BINARY(name ".s32", "w", u32, f), BINARY(name ".u32", "w", u32, f), BINARY(name ".s64", "l", u64, f), \
      BINARY(name ".u64", "l", u64, f)
#define SIGNED(name, f)                                                                                 \
  BINARY(name ".s32", "w", s32, f), BINARY(name ".u32", "w", u32, f), BINARY(name ".s64", "l", s64, f), \
      BINARY(name ".u64", "l", u64, f)
#define BITS(name, f) \
  BINARY(name ".b16", "h", h16, f), BINARY(name ".b32", "w", u32, f), BINARY(name ".b64", "l", u64, f)
#define SHIFT(name, letter, type, f) {name, letter letter "w", binary<type, type, u32, f<type>>, plain}
#define COMPARE(name, letter, type, f) {name, "p" letter letter, compare<type, f<type>>, plain}
#define COMPARE_INTEGERS(name, f)                                                           \
  COMPARE("setp." name ".s16", "h", s16, f), COMPARE("setp." name ".u16", "h", h16, f),     \
      COMPARE("setp." name ".s32", "w", s32, f), COMPARE("setp." name ".u32", "w", u32, f), \
      COMPARE("setp." name ".s64", "l", s64, f), COMPARE("setp." name ".u64", "l", u64, f)
#define COMPARE_BITS(name, f)                                                           \
  COMPARE("setp." name ".b16", "h", h16, f), COMPARE("setp." name ".b32", "w", u32, f), \
      COMPARE("setp." name ".b64", "l", u64, f)
#define COMPARE_FLOATS(name, f) COMPARE("setp." name ".f32", "w", f32, f), COMPARE("setp." name ".f64", "l", f64, f)
#define MOVE(name, type16, type32, type64) \
  UNARY(name type16, "h", h16, same), UNARY(name type32, "w", u32, same), UNARY(name type64, "l", u64, same)
#define SELECT(type, letter, register) {"selp." type, letter letter letter "p", select<register>, plain}
#define PREDICATES(name, f) {name ".pred", "ppp", logic<f<u32>>, plain}

const Operation table[] = {
    INTEGERS("add", add),
    INTEGERS("sub", sub),
    INTEGERS("mul.lo", mul),
    SIGNED("min", least),
    SIGNED("max", most),
    SIGNED("div", quotient),
    SIGNED("rem", remainder),
    {"mad.lo.s32", "wwww", ternary<u32, u32, u32, u32, mad<u32>>, plain},
    {"mad.lo.u32", "wwww", ternary<u32, u32, u32, u32, mad<u32>>, plain},
    {"mad.lo.s64", "llll", ternary<u64, u64, u64, u64, mad<u64>>, plain},
    {"mul.wide.s32", "lww", binary<s64, s32, s32, wide<s64, s32>>, plain},
    {"mul.wide.u32", "lww", binary<u64, u32, u32, wide<u64, u32>>, plain},
    {"mul.wide.u16", "whh", binary<u32, h16, h16, wide<u32, h16>>, plain},
    {"mul.hi.s32", "www", binary<s32, s32, s32, high_s32>, plain},
    {"mul.hi.u64", "lll", binary<u64, u64, u64, high_u64>, plain},
    UNARY("neg.s32", "w", u32, negative),
    UNARY("neg.s64", "l", u64, negative),
    BITS("and", both),
    BITS("or", either),
    BITS("xor", differ),
    UNARY("not.b32", "w", u32, inverse),
    UNARY("not.b64", "l", u64, inverse),
    PREDICATES("and", both),
    PREDICATES("or", either),
    PREDICATES("xor", differ),
    {"not.pred", "pp", logic<inverse_of>, plain},
    {"mov.pred", "pp", logic<same_as>, plain},
    SHIFT("shl.b32", "w", u32, left),
    SHIFT("shl.b64", "l", u64, left),
    SHIFT("shr.u32", "w", u32, right),
    SHIFT("shr.u64", "l", u64, right),
    SHIFT("shr.s32", "w", s32, right),
    SHIFT("shr.s64", "l", s64, right),
    {"bfi.b32", "wwwww", insert, plain},
    {"popc.b32", "ww", unary<u32, u32, ones>, plain},
    MOVE("mov", ".u16", ".u32", ".u64"),
    MOVE("mov", ".b16", ".b32", ".b64"),
    UNARY("mov.f32", "w", u32, same),
    UNARY("mov.f64", "l", u64, same),
    {"pack.b32", "whh", pack<u32, h16>, plain},
    {"pack.b64", "lww", pack<u64, u32>, plain},
    {"unpack.b32", "hhw", unpack<h16, u32>, plain},
    {"unpack.b64", "wwl", unpack<u32, u64>, plain},
    SELECT("b16", "h", h16),
    SELECT("u16", "h", h16),
    SELECT("b32", "w", u32),
    SELECT("u32", "w", u32),
    SELECT("s32", "w", u32),
    SELECT("f32", "w", u32),
    SELECT("b64", "l", u64),
    SELECT("u64", "l", u64),
    SELECT("s64", "l", u64),
    SELECT("f64", "l", u64),
    BINARY("add.f32", "w", f32, add),
    BINARY("add.rn.f32", "w", f32, add),
    BINARY("add.f64", "l", f64, add),
    BINARY("sub.f32", "w", f32, sub),
    BINARY("sub.rn.f32", "w", f32, sub),
    BINARY("sub.f64", "l", f64, sub),
    BINARY("mul.f32", "w", f32, mul),
    BINARY("mul.rn.f32", "w", f32, mul),
    BINARY("mul.f64", "l", f64, mul),
    {"fma.rn.f32", "wwww", ternary<f32, f32, f32, f32, fused<f32>>, plain},
    {"fma.rn.f64", "llll", ternary<f64, f64, f64, f64, fused<f64>>, plain},
    {"fma.rm.f32", "wwww", fused_down, plain},
    {"add.rz.f32", "www", add_to_zero, plain},
    BINARY("div.rn.f32", "w", f32, ratio),
    BINARY("div.rn.f64", "l", f64, ratio),
    {"div.approx.f32", "www", binary<f32, f32, f32, ratio_near>, plain},
    {"div.approx.ftz.f32", "www", binary<f32, f32, f32, ratio_flushed>, plain},
    {"rcp.rn.f32", "ww", unary<f32, f32, inverted>, plain},
    {"rcp.approx.ftz.f32", "ww", unary<f32, f32, inverted_flushed>, plain},
    {"sqrt.rn.f32", "ww", unary<f32, f32, root>, plain},
    {"ex2.approx.f32", "ww", unary<f32, f32, exp2_near>, plain},
    {"ex2.approx.ftz.f32", "ww", unary<f32, f32, exp2_flushed>, plain},
    BINARY("min.f32", "w", f32, least_float),
    BINARY("min.f64", "l", f64, least_float),
    BINARY("max.f32", "w", f32, most_float),
    BINARY("max.f64", "l", f64, most_float),
    {"neg.f32", "ww", unary<u32, u32, minus>, plain},
    {"neg.f64", "ll", unary<u64, u64, minus_f64>, plain},
    {"abs.f32", "ww", unary<u32, u32, absolute>, plain},
    {"copysign.f32", "www", binary<u32, u32, u32, with_sign>, plain},
    COMPARE_INTEGERS("eq", eq),
    COMPARE_INTEGERS("ne", ne),
    COMPARE_INTEGERS("lt", lt),
    COMPARE_INTEGERS("le", le),
    COMPARE_INTEGERS("gt", gt),
    COMPARE_INTEGERS("ge", ge),
    COMPARE_BITS("eq", eq),
    COMPARE_BITS("ne", ne),
    COMPARE_FLOATS("eq", eq),
    COMPARE_FLOATS("lt", lt),
    COMPARE_FLOATS("le", le),
    COMPARE_FLOATS("gt", gt),
    COMPARE_FLOATS("ge", ge),
    COMPARE_FLOATS("equ", equ),
    COMPARE_FLOATS("neu", neu),
    COMPARE_FLOATS("ltu", ltu),
    COMPARE_FLOATS("leu", leu),
    COMPARE_FLOATS("gtu", gtu),
    COMPARE_FLOATS("geu", geu),
    COMPARE_FLOATS("nan", nan),
    COMPARE_FLOATS("num", num),
    {"shfl.sync.up.b32", "wpwwww", shuffle<UP>, together},
    {"shfl.sync.down.b32", "wpwwww", shuffle<DOWN>, together},
    {"shfl.sync.bfly.b32", "wpwwww", shuffle<BUTTERFLY>, together},
    {"shfl.sync.idx.b32", "wpwwww", shuffle<INDEX>, together},
    {"vote.sync.any.pred", "ppw", vote<ANY>, together},
    {"vote.sync.all.pred", "ppw", vote<ALL>, together},
    {"vote.sync.ballot.b32", "wpw", ballot, together},
    {"bar.warp.sync", "w", sync_warp, together},
    // addresses in the window of global memory are addresses
    UNARY("cvta.to.global.u64", "l", u64, same),
    {"trap", "", trap, plain},
    {"setmaxnreg.inc.sync.aligned.u32", "w", nothing, together},
    {"setmaxnreg.dec.sync.aligned.u32", "w", nothing, together},
};

} // namespace

const Operation *arithmetic(const std::string &name) { return find(table, name); }

} // namespace ptx
} // namespace uly_emulated
