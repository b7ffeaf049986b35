// How a row-major product becomes what a column-major library is told. C = A·B of row-major
// matrices is, read column by column, Cᵀ = Bᵀ·Aᵀ: the library's first operand is B, its second A,
// and its m counts our columns.
#pragma once

#include <stdint.h>

// A matrix with a stride for each axis, in elements.
struct gemm_view {
  int64_t rows, columns, row, column;
};

// gemm_unit says which axis of a view is dense: 1 the columns', 0 the rows', -1 none. Along an axis
// of one element any stride will do.
inline int gemm_unit(const gemm_view &v) {
  if (v.column == 1 || v.columns <= 1) return 1;
  if (v.row == 1 || v.rows <= 1) return 0;
  return -1;
}

// One operand as a column-major library sees it: stored by columns of `rows` elements, `ld` apart,
// and transposed or not.
struct gemm_operand {
  int64_t rows, columns, ld;
  bool transposed;
};

// gemm_operand_of is a view's transpose (see above) as an operand; false when no leading dimension
// says where its elements are: rows that overlap, or go backwards.
inline bool gemm_operand_of(const gemm_view &v, gemm_operand *out) {
  int unit = gemm_unit(v);
  if (unit < 0) return false;
  *out = unit == 1 ? gemm_operand{v.columns, v.rows, v.row, false} : gemm_operand{v.rows, v.columns, v.column, true};
  if (out->columns <= 1) out->ld = out->rows; // never used; libraries check it all the same
  return out->ld >= out->rows;
}

// The product as the library is told: C (m × n, by columns) = op(first) (m × k) · op(second) (k ×
// n).
struct gemm_plan {
  int64_t m, n, k;
  gemm_operand first, second, c;
};

inline bool gemm_plan_of(const gemm_view &a, const gemm_view &b, const gemm_view &c, gemm_plan *out) {
  *out = {c.columns, c.rows, a.columns, {}, {}, {}};
  return gemm_operand_of(b, &out->first) && gemm_operand_of(a, &out->second) && gemm_operand_of(c, &out->c) &&
         !out->c.transposed;
}

// gemm_alignment is the largest power of two, at most 256, that divides an address.
inline uint32_t gemm_alignment(const void *p) {
  uint32_t a = 256;
  while (reinterpret_cast<uintptr_t>(p) % a) a /= 2;
  return a;
}
