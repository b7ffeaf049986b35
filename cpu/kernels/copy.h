// Copies, casts, transposes and fills.
#pragma once
#include "axes.h"

// What one element becomes.
enum {
  COPY_1,
  COPY_2,
  COPY_4,
  COPY_8, // bytes moved as they are
  COPY_F32_BF16,
  COPY_BF16_F32,
  COPY_F32_F64,
  COPY_F64_F32,
  COPY_F16_F32,
};

typedef struct {
  uly_axes axes; // operand 0 is dst, 1 src
  void *dst;
  const void *src;
  int64_t kind;
  int64_t stream; // write around the caches: the array is larger than they are
} copy_args;

// turn_args is a transpose: dst is dense along x, src along y. The inner axis of axes is one of
// them, the other is given here.
typedef struct {
  uly_axes axes;
  void *dst;
  const void *src;
  int64_t size;         // bytes of an element
  int64_t along_x;      // the inner axis is x
  int64_t n;            // extent of the other axis
  int64_t dst_y, src_x; // strides
} turn_args;

typedef struct {
  uly_axes axes;
  void *dst;
  int64_t size;
  uint8_t value[8];
} fill_args;
