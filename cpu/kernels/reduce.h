// Arguments of sums. The rows or elements are split over tasks by the shape alone, and the partial
// sums are added in the order of the splits, so results do not depend on the number of threads.
#pragma once
#include <stdint.h>

// column_args: dst [n] += sum over the rows of x [rows, n]. Task s adds the rows of split s into
// partial + s*2*n: [n] for the split, and [n] for a block of rows. If partial is NULL there is one
// split, which adds to dst.
typedef struct {
  const void *x;
  float *dst, *partial;
  int64_t rows, n, stride, splits, bf16;
} column_args;

// fold_args: dst [n] += the partial sums of all splits. One task.
typedef struct {
  const float *partial;
  float *dst;
  int64_t n, splits;
} fold_args;

typedef struct {
  const float *x;
  double *partial;     // [tasks]
  int64_t n, per_task; // elements in all, and of a task
  int64_t squares;     // sum x² instead of x
} sum_args;
