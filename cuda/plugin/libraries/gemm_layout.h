// Conversion of a row-major product to the arguments of a column-major library. A row-major matrix,
// read by columns, is its transpose: C = A·B becomes Cᵀ = Bᵀ·Aᵀ. Therefore the library's first
// operand is B, its second operand is A, and its m is the number of columns of C.
#pragma once

#include <stdint.h>

// A matrix with a stride for each axis, in elements.
struct gemm_view {
  int64_t rows, columns, row, column;
};

// gemm_unit returns which axis of a view is dense: 1 the axis of columns, 0 the axis of rows, -1
// none. The stride of an axis with one element is ignored.
inline int gemm_unit(const gemm_view &v) {
  if (v.column == 1 || v.columns <= 1) return 1;
  if (v.row == 1 || v.rows <= 1) return 0;
  return -1;
}

// gemm_operand is an operand of a column-major library: `columns` columns of `rows` elements, `ld`
// elements apart, transposed or not.
struct gemm_operand {
  int64_t rows, columns, ld;
  bool transposed;
};

// gemm_operand_of converts the transpose of a view to an operand. It returns false if no leading
// dimension describes the view: its rows overlap, or a stride is negative.
inline bool gemm_operand_of(const gemm_view &v, gemm_operand *out) {
  int unit = gemm_unit(v);
  if (unit < 0) return false;
  *out = unit == 1 ? gemm_operand{v.columns, v.rows, v.row, false} : gemm_operand{v.rows, v.columns, v.column, true};
  if (out->columns <= 1) out->ld = out->rows; // unused, but libraries check it
  return out->ld >= out->rows;
}

// gemm_plan is the product in the library's terms: C (m × n, by columns) = op(first) (m × k) ·
// op(second) (k × n).
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
