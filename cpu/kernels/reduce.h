// Sums. Partial sums are made by parts that shapes decide and are added in index order.
#pragma once
#include <stdint.h>

// column_args: x [rows, n] is cut into parts of rows; part p sums into partial + p*2*n (its second
// half is for a block of rows). Without partial there is one part, and it adds to dst itself.
typedef struct {
  const void *x;
  float *dst, *partial;
  int64_t rows, n, stride, parts, bf16;
} column_args;

// fold_args adds the parts' sums to dst [n].
typedef struct {
  const float *partial;
  float *dst;
  int64_t n, parts;
} fold_args;

typedef struct {
  const float *x;
  double *partial; // one a task
  int64_t n, piece;
  int64_t squares;
} sum_args;
