// Index arithmetic of the causal convolution: the documents of one launch, and the division of the
// backward pass. The file includes no CUDA; conv1d_index_test.cpp tests it on the host.
#pragma once

#include "index.h"

enum { ULY_DOCUMENTS = 240 }; // limited by the 4096 bytes of a kernel's arguments

// Documents is up to ULY_DOCUMENTS consecutive documents of a call, and their rows [from, to).
// Documents without rows are skipped.
struct Documents {
  int64_t from = 0, to = 0; // rows
  int32_t count = 0;
  int64_t start[ULY_DOCUMENTS];

  // next advances to the next documents of the list. *used counts the documents that earlier calls
  // have consumed. It returns false if none is left.
  bool next(const int64_t *cu, int64_t documents, int64_t *used) {
    count = 0;
    for (; *used < documents && count < ULY_DOCUMENTS; ++*used)
      if (cu[*used + 1] > cu[*used]) start[count++] = cu[*used];
    if (count == 0) return false;
    from = start[0], to = cu[*used];
    return true;
  }
  // at returns the document of a row. end returns the first row after a document.
  ULY_BOTH int32_t at(int64_t row) const {
    int32_t lo = 0, hi = count; // documents from hi on begin after the row
    while (hi - lo > 1) {
      const int32_t mid = (lo + hi) / 2;
      if (start[mid] <= row) lo = mid;
      else hi = mid;
    }
    return lo;
  }
  ULY_BOTH int64_t end(int32_t document) const { return document + 1 < count ? start[document + 1] : to; }
};

// A block of CONV_WARPS warps computes CONV_WARPS runs of rows, one run a warp, for CONV_TILE
// channels, CONV_LANES a lane. The runs of a block are one part of the weights' sums. A run has at
// least CONV_RUN rows if there are enough rows.
enum : int64_t { CONV_WARPS = 8, CONV_LANES = 4, CONV_TILE = 32 * CONV_LANES, CONV_RUN = 64 };

// ConvSplit is the division of the backward pass: rows into parts, and channels into groups (bands)
// whose scratch fits. A channel needs scratch for the weights' sums of every part and, for every
// run, for the width - 1 rows of dy after the run. The parts depend on rows and width only, so the
// sums of a channel do not depend on other channels.
struct ConvSplit {
  int64_t parts, runs, band;
  int64_t behind; // byte offset in the scratch of the rows after the runs

  // bytes of a channel in one part
  static int64_t bytes(int64_t width, int64_t size) { return 4 * width + CONV_WARPS * (width - 1) * size; }
  static bool fits(int64_t width, int64_t size, int64_t scratch) {
    return width <= scratch && CONV_TILE * bytes(width, size) <= scratch;
  }
  ConvSplit(int64_t rows, int64_t n, int64_t width, int64_t size, int64_t scratch) {
    const int64_t each = bytes(width, size);
    parts = most(1, least(least(ceil_div(rows, CONV_WARPS * CONV_RUN), ULY_MAX_PARTS), scratch / (CONV_TILE * each)));
    runs = CONV_WARPS * parts;
    band = least(ceil_div(n, CONV_TILE), scratch / (parts * each) / CONV_TILE) * CONV_TILE;
    behind = 4 * parts * width * band;
  }
};
