// Walking several strided arrays of one shape together.
#pragma once
#include <stdint.h>

enum { ULY_OPERANDS = 5, ULY_AXES = 8 };

// uly_axes is a shape cut into units: an inner axis (run) that is cut into pieces, and what is left
// as rows. A task does `per` units.
typedef struct {
  int64_t run, piece;                   // elements of the inner axis, and of one unit
  int64_t units, per;                   // in all, and of a task
  int64_t rank, shape[ULY_AXES];        // outer axes
  int64_t step[ULY_OPERANDS][ULY_AXES]; // their strides in elements, by operand
  int64_t inner[ULY_OPERANDS];          // strides of the inner axis
} uly_axes;
