// Iteration over several strided arrays of the same shape.
#pragma once
#include <stdint.h>

enum { ULY_OPERANDS = 5, ULY_AXES = 8 };

// uly_axes divides a shape into units. The inner axis is divided into segments; each segment of
// each index of the outer axes is one unit. All strides are in elements.
typedef struct {
  int64_t length, segment;              // elements of the inner axis, and of one unit
  int64_t units, per_task;              // number of units in all, and of a task
  int64_t rank, shape[ULY_AXES];        // number of outer axes, and their extents
  int64_t step[ULY_OPERANDS][ULY_AXES]; // strides of the outer axes, by operand
  int64_t inner[ULY_OPERANDS];          // stride of the inner axis, by operand
} uly_axes;
