// Arguments of copies, casts, transposes and fills.
#pragma once
#include "axes.h"

// The conversion of one element.
enum {
  COPY_1,
  COPY_2,
  COPY_4,
  COPY_8, // elements of 1, 2, 4 and 8 bytes, unchanged
  COPY_F32_BF16,
  COPY_BF16_F32,
  COPY_F32_F64,
  COPY_F64_F32,
  COPY_F16_F32,
};

typedef struct {
  uly_axes axes; // operands dst, src
  void *dst;
  const void *src;
  int64_t kind;   // COPY_*
  int64_t stream; // write around the caches, for arrays that are larger than the caches
} copy_args;

// transpose_args: dst is dense along the axis x, src along the axis y. One of them is the inner
// axis of axes; the other is described here.
typedef struct {
  uly_axes axes;
  void *dst;
  const void *src;
  int64_t size;         // bytes of an element
  int64_t along_x;      // the inner axis is x
  int64_t n;            // extent of the other axis
  int64_t dst_y, src_x; // strides of dst along y and of src along x, in elements
} transpose_args;

typedef struct {
  uly_axes axes;
  void *dst;
  int64_t size;
  uint8_t value[8]; // the first `size` bytes are the element
} fill_args;
