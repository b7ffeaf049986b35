// Index arithmetic of the operations: merging axes, offsets of elements, tiles, and the division of
// sums. The file includes no CUDA; index_test.cpp tests it on the host, with extents larger than
// any memory.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../../kernels.h"
#include "build.h"

#ifdef __CUDACC__
#define ULY_BOTH __host__ __device__ __forceinline__
#else
#define ULY_BOTH inline
#endif

enum { ULY_OPERANDS = 5, ULY_AXES = 8 };

ULY_BOTH int64_t ceil_div(int64_t n, int64_t d) { return (n + d - 1) / d; }

// Room counts the bytes of a workspace. take returns the offset of n elements, a multiple of 256.
struct Room {
  int64_t bytes;
  int64_t take(int64_t n, int64_t size) {
    const int64_t at = bytes;
    bytes = ceil_div(at + n * size, 256) * 256;
    return at;
  }
};
ULY_BOTH int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
ULY_BOTH int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

inline int64_t size_of(int dtype) {
  static const int8_t sizes[] = {0, 4, 2, 2, 8, 4, 8, 1};
  return dtype >= 0 && dtype <= ULY_U8 ? sizes[dtype] : 0;
}

// bf16_bits returns f as BF16, rounded to nearest even; a NaN stays a NaN.
inline uint16_t bf16_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return f != f ? (uint16_t)(u >> 16 | 0x40) : (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline int64_t elements(const uly_tensor &t) {
  int64_t n = 1;
  for (int i = 0; i < t.ndim; i++) n *= t.shape[i];
  return n;
}

// contiguous reports row-major order without gaps; axes of extent 1 may have any stride.
inline bool contiguous(const uly_tensor &t) {
  int64_t step = 1;
  for (int i = t.ndim - 1; i >= 0; i--) {
    if (t.shape[i] != 1 && t.stride[i] != step) return elements(t) == 0;
    step *= t.shape[i];
  }
  return true;
}

// is_narrow reports whether n items have numbers below 2^31, so that a Divider can be used.
inline bool is_narrow(int64_t n) { return n <= INT32_MAX && narrow_allowed(); }

// Divider divides numbers below 2^31 by multiplying with a constant (Granlund and Montgomery 1994,
// "Division by invariant integers using multiplication").
struct Divider {
  uint32_t divisor = 1, magic = 1, shift = 0;
  Divider() = default;
  explicit Divider(int64_t d) {
    if (d < 1 || d > INT32_MAX) return; // the walk is not narrow and does not use its Divider
    divisor = (uint32_t)d;
    while ((1ull << shift) < divisor) shift++;
    magic = (uint32_t)((1ull << 32) * ((1ull << shift) - divisor) / divisor + 1);
  }
  ULY_BOTH uint32_t operator()(uint32_t n) const { return ((uint32_t)((uint64_t)n * magic >> 32) + n) >> shift; }
};

// Plane is a shape with the strides of several operands. Axes of extent 1 are dropped, and axes
// that are contiguous in every operand are merged. The axes are in the order of one operand,
// largest stride first.
struct Plane {
  int rank = 0, count = 0;
  int64_t shape[ULY_AXES];
  int64_t stride[ULY_OPERANDS][ULY_AXES];

  int64_t elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank; i++) n *= shape[i];
    return n;
  }
};

// plane_of returns the plane of operands that have one shape, with the axes in the order of
// operands[by].
inline Plane plane_of(const uly_tensor *const *operands, int count, int by) {
  Plane p;
  p.count = count;
  const uly_tensor &first = *operands[by];
  int order[ULY_AXES], n = 0;
  for (int i = 0; i < first.ndim; i++) {
    if (first.shape[i] == 1) continue;
    int j = n++;
    for (; j > 0 && first.stride[order[j - 1]] < first.stride[i]; j--) order[j] = order[j - 1];
    order[j] = i;
  }
  for (int k = 0; k < n; k++) {
    const int a = order[k];
    bool extends = p.rank > 0;
    for (int o = 0; extends && o < count; o++)
      extends = p.stride[o][p.rank - 1] == operands[o]->stride[a] * operands[o]->shape[a];
    if (extends) p.shape[p.rank - 1] *= first.shape[a];
    else p.shape[p.rank++] = first.shape[a];
    for (int o = 0; o < count; o++) p.stride[o][p.rank - 1] = operands[o]->stride[a];
  }
  return p;
}

// fits_unit reports whether k elements can be accessed as one unit: in every operand, the innermost
// axis is dense, its extent is a multiple of k, and the address of every unit is a multiple of the
// unit's size.
inline bool fits_unit(const Plane &p, const void *const *data, const int64_t *sizes, int64_t k) {
  if (k == 1) return true;
  if (p.rank == 0 || p.shape[p.rank - 1] % k != 0) return false;
  for (int o = 0; o < p.count; o++) {
    if (p.stride[o][p.rank - 1] != 1 || (uintptr_t)data[o] % (uintptr_t)(k * sizes[o]) != 0) return false;
    for (int i = 0; i + 1 < p.rank; i++)
      if (p.stride[o][i] % k != 0) return false;
  }
  return true;
}

// units_of returns the plane whose elements are units of k elements.
inline Plane units_of(Plane p, int64_t k) {
  if (k == 1) return p;
  p.shape[p.rank - 1] /= k;
  for (int o = 0; o < p.count; o++)
    for (int i = 0; i + 1 < p.rank; i++) p.stride[o][i] /= k;
  return p;
}

// Walk computes the offsets, in elements, of unit i of a plane in N operands. A narrow walk has
// fewer than 2^31 units and divides by multiplication. Offsets have 64 bits in both cases.
template <int N> struct Walk {
  int rank = 0;
  bool narrow = true;
  int64_t units = 1, shape[ULY_AXES];
  int64_t step[N][ULY_AXES];
  Divider by[ULY_AXES];

  Walk() = default;
  Walk(const Plane &p, int64_t k) {
    rank = p.rank;
    for (int i = 0; i < rank; i++) {
      const int64_t unit = i == rank - 1 ? k : 1;
      shape[i] = p.shape[i] / unit;
      for (int o = 0; o < N; o++) step[o][i] = p.stride[o][i] * unit;
      units *= shape[i];
      by[i] = Divider(shape[i]);
    }
    narrow = is_narrow(units);
  }

  template <bool NARROW> ULY_BOTH void at(int64_t i, int64_t (&offset)[N]) const {
    for (int o = 0; o < N; o++) offset[o] = 0;
    for (int a = rank - 1; a > 0; a--) {
      const int64_t q = NARROW ? (int64_t)by[a]((uint32_t)i) : i / shape[a];
      const int64_t r = i - q * shape[a];
      for (int o = 0; o < N; o++) offset[o] += r * step[o][a];
      i = q;
    }
    if (rank > 0)
      for (int o = 0; o < N; o++) offset[o] += i * step[o][0];
  }
};

// Transpose describes a copy whose dst is dense along axis x and whose src is dense along axis y.
// The copy uses square tiles with `edge` elements a side, ordered by the plane's other axes, then
// y, then x.
struct Transpose {
  // extents; strides along the axis that is dense in the other operand
  int64_t nx = 0, ny = 0, dst_y = 0, src_x = 0;
  int64_t across = 0, down = 0, tiles = 0;
  Walk<2> outer;

  static bool fits(const Plane &p, int64_t minimum) {
    const int y = dense_axis(p);
    return y >= 0 && p.shape[p.rank - 1] >= minimum && p.shape[y] >= minimum;
  }
  Transpose(const Plane &p, int64_t edge) {
    const int x = p.rank - 1, y = dense_axis(p);
    nx = p.shape[x], ny = p.shape[y], dst_y = p.stride[0][y], src_x = p.stride[1][x];
    across = ceil_div(nx, edge), down = ceil_div(ny, edge);
    Plane rest = p;
    rest.rank = 0;
    for (int i = 0; i < p.rank; i++) {
      if (i == x || i == y) continue;
      rest.shape[rest.rank] = p.shape[i];
      for (int o = 0; o < 2; o++) rest.stride[o][rest.rank] = p.stride[o][i];
      rest.rank++;
    }
    outer = Walk<2>(rest, 1);
    tiles = outer.units * across * down;
  }
  // tile returns the first element of tile i along x and y, and the offsets of the tile's other
  // axes.
  ULY_BOTH void tile(int64_t i, int64_t edge, int64_t *x, int64_t *y, int64_t (&offset)[2]) const {
    const int64_t row = i / across;
    *x = (i - row * across) * edge;
    *y = row % down * edge;
    outer.at<false>(row / down, offset);
  }

 private:
  static int dense_axis(const Plane &p) {
    if (p.rank < 2 || p.stride[0][p.rank - 1] != 1 || p.stride[1][p.rank - 1] == 1) return -1;
    for (int i = 0; i + 1 < p.rank; i++)
      if (p.stride[1][i] == 1) return i;
    return -1;
  }
};

// Rows describes the leading axes of [N], [T, N] or [T, H, N] in up to ULY_OPERANDS operands. Row r
// is head r % heads of token r / heads.
struct Rows {
  int64_t rows = 1, heads = 1;
  int64_t token[ULY_OPERANDS] = {}, head[ULY_OPERANDS] = {};
  bool narrow = true;
  Divider by;

  Rows() = default;
  Rows(const uly_tensor *const *operands, int count) {
    const int leading = operands[0]->ndim - 1;
    if (leading > 0) rows = operands[0]->shape[0];
    if (leading > 1) heads = operands[0]->shape[1];
    rows *= heads;
    for (int o = 0; o < count; o++) {
      if (leading > 0 && operands[o]->shape[0] > 1) token[o] = operands[o]->stride[0];
      if (leading > 1 && heads > 1) head[o] = operands[o]->stride[1];
    }
    narrow = is_narrow(rows);
    by = Divider(heads);
  }
  ULY_BOTH void split(int64_t r, int64_t *t, int64_t *h) const {
    *t = heads == 1 ? r : narrow ? (int64_t)by((uint32_t)r) : r / heads;
    *h = r - *t * heads;
  }
};

// Sums over many rows or elements are divided into parts. The number of parts and their bounds
// depend on shapes only, so the order of additions is the same on every GPU.
enum : int64_t { ULY_MAX_PARTS = 1024 };

// parts_of returns the number of parts of a sum over rows. Each part has at least `minimum` rows,
// and the n partial sums of all parts fit into `scratch` values.
ULY_BOTH int64_t parts_of(int64_t rows, int64_t n, int64_t minimum, int64_t scratch) {
  return most(1, least(least(ceil_div(rows, minimum), ULY_MAX_PARTS), scratch / most(n, 1)));
}
// part_at returns the first of n items that belongs to part p of `parts`. The part ends at
// part_at(p + 1).
ULY_BOTH int64_t part_at(int64_t all, int64_t parts, int64_t p) { return all / parts * p + least(p, all % parts); }

// sum_part_elements returns the elements of one part of a sum over a flat array: a multiple of
// 1024, so that no vector crosses a boundary of parts.
ULY_BOTH int64_t sum_part_elements(int64_t n) {
  return most(1 << 14, ceil_div(ceil_div(n, ULY_MAX_PARTS), 1024) * 1024);
}

// vocabulary_owners returns the number of blocks among which the backward pass of an embedding
// distributes the table's rows: a power of two, at most 1024. Row `id` belongs to block id &
// (owners - 1). Neighbouring ids belong to different blocks, because frequent tokens often have
// neighbouring ids.
ULY_BOTH int64_t vocabulary_owners(int64_t vocabulary) {
  int64_t n = 1;
  while (n < 1024 && 2 * n <= vocabulary) n *= 2;
  return n;
}

// Ranges are the arguments of one launch of an optimizer: the elements [from, to) to update, and up
// to ULY_RANGES index ranges in which weights decay.
enum { ULY_RANGES = 64 };
struct Ranges {
  int64_t from = 0, to = 0;
  int32_t everywhere = 0, count = 0;
  uly_range range[ULY_RANGES];

  // next advances to the next elements of n. *used counts the ranges of the list that earlier calls
  // have consumed.
  void next(const uly_range *list, int64_t ranges, int64_t n, int64_t *used) {
    from = to, to = n, count = 0, everywhere = list == nullptr;
    if (everywhere) return;
    for (; *used < ranges && count < ULY_RANGES; ++*used) range[count++] = list[*used];
    if (*used < ranges) to = range[count - 1].hi;
  }
  // decays reports whether element i decays. The answer is the same for elements [i, *upto).
  ULY_BOTH bool decays(int64_t i, int64_t *upto) const {
    if (everywhere) return *upto = to, true;
    // ranges before lo begin at or before i, ranges from hi on begin after i
    int lo = 0, hi = count;
    while (lo < hi) {
      const int mid = (lo + hi) / 2;
      if (range[mid].lo <= i) lo = mid + 1;
      else hi = mid;
    }
    if (lo > 0 && i < range[lo - 1].hi) return *upto = range[lo - 1].hi, true;
    *upto = lo < count ? range[lo].lo : to;
    return false;
  }
};

// sine_cosine computes the sine and cosine of an angle with an error of 1e-15 for |angle| < 2^31.
// It subtracts multiples of π/2 in three steps of fused multiply-adds (Cody and Waite 1980) and
// evaluates Taylor series on [-π/4, π/4]. CUDA's sincos has a code path for huge angles that uses
// local memory.
ULY_BOTH void sine_cosine(double angle, double *sine, double *cosine) {
  const double turns = rint(angle * 0.63661977236758134308);
  double x = fma(-turns, 1.57079632679489655800e+00, angle);
  x = fma(-turns, 6.12323399573676603587e-17, x);
  x = fma(-turns, -1.49738490485916983e-33, x);
  const double z = x * x;
  double s = 2.8114572543455207632e-15;
  s = fma(s, z, -7.6471637318198164759e-13);
  s = fma(s, z, 1.6059043836821614599e-10);
  s = fma(s, z, -2.5052108385441718775e-08);
  s = fma(s, z, 2.7557319223985890653e-06);
  s = fma(s, z, -1.9841269841269841270e-04);
  s = fma(s, z, 8.3333333333333333333e-03);
  s = fma(s, z, -1.6666666666666666667e-01);
  s = fma(s * z, x, x);
  double c = 4.7794773323873852974e-14;
  c = fma(c, z, -1.1470745597729724714e-11);
  c = fma(c, z, 2.0876756987868098979e-09);
  c = fma(c, z, -2.7557319223985890653e-07);
  c = fma(c, z, 2.4801587301587301587e-05);
  c = fma(c, z, -1.3888888888888888889e-03);
  c = fma(c, z, 4.1666666666666666667e-02);
  c = fma(c, z, -0.5);
  c = fma(c, z, 1.0);
  const int64_t quarter = (int64_t)turns;
  const double a = quarter & 1 ? c : s, b = quarter & 1 ? s : c;
  *sine = quarter & 2 ? -a : a;
  *cosine = (quarter + 1) & 2 ? -b : b;
}
