// Index arithmetic of the convolution: documents as its kernels are given them, and how its
// backward pass is cut. No CUDA in here: kernels and a host program (conv1d_index_test.cpp) include
// it alike.
#pragma once

#include "index.h"

enum { ULY_DOCUMENTS = 240 }; // a kernel's arguments are at most 4096 bytes

// Documents are some of a call's, which lie one behind the other in its rows. Those without rows
// are left out.
struct Documents {
  int64_t from = 0, to = 0; // rows
  int32_t count = 0;
  int64_t start[ULY_DOCUMENTS];

  // next takes those that come now: *used of the list are behind it and are counted on. It says
  // whether there were any.
  bool next(const int64_t *cu, int64_t documents, int64_t *used) {
    count = 0;
    for (; *used < documents && count < ULY_DOCUMENTS; ++*used)
      if (cu[*used + 1] > cu[*used]) start[count++] = cu[*used];
    if (count == 0) return false;
    from = start[0], to = cu[*used];
    return true;
  }
  // at is the document of a row, end the row behind it.
  ULY_BOTH int32_t at(int64_t row) const {
    int32_t lo = 0, hi = count; // documents from hi on begin behind the row
    while (hi - lo > 1) {
      const int32_t mid = (lo + hi) / 2;
      if (start[mid] <= row) lo = mid;
      else hi = mid;
    }
    return lo;
  }
  ULY_BOTH int64_t end(int32_t document) const { return document + 1 < count ? start[document + 1] : to; }
};

// A block of 8 warps does 8 runs of rows, which are a part of a sum, on 128 channels: four to a
// lane.
enum : int64_t { CONV_WARPS = 8, CONV_LANES = 4, CONV_TILE = 32 * CONV_LANES, CONV_RUN = 64 };

// ConvCut is how the backward pass divides rows into parts, and channels into bands whose scratch
// fits: for each channel, of every part the sums for the weights, of every run the width - 1 rows
// of dy behind it. Parts are a matter of rows and width alone: a channel's sums are the same beside
// however many others.
struct ConvCut {
  int64_t parts, runs, band;
  int64_t behind; // where the rows behind runs are in the scratch, in bytes

  // of a channel in one part
  static int64_t bytes(int64_t width, int64_t size) { return 4 * width + CONV_WARPS * (width - 1) * size; }
  static bool fits(int64_t width, int64_t size, int64_t scratch) {
    return width <= scratch && CONV_TILE * bytes(width, size) <= scratch;
  }
  ConvCut(int64_t rows, int64_t n, int64_t width, int64_t size, int64_t scratch) {
    const int64_t each = bytes(width, size);
    parts = most(1, least(least(ceil_div(rows, CONV_WARPS * CONV_RUN), ULY_MAX_PARTS), scratch / (CONV_TILE * each)));
    runs = CONV_WARPS * parts;
    band = least(ceil_div(n, CONV_TILE), scratch / (parts * each) / CONV_TILE) * CONV_TILE;
    behind = 4 * parts * width * band;
  }
};
