// Column sums over rows: the gradients of biases and of norm weights. The rows are divided into
// parts. One kernel writes the sums of the parts to scratch [parts, n], and a second kernel adds
// them to the result. The parts depend on shapes only, so the order of additions is the same on
// every GPU.
#pragma once

#include "values.h"

constexpr int COLUMN_WARPS = 8, FOLD_WARPS = 32;
constexpr int64_t COLUMN_PART_ROWS = 64; // minimum rows of a part

// column_part writes the sums of one part of the rows; a block has 32·K columns. A lane has K
// columns, and warp w has rows w, w + COLUMN_WARPS, …. S supplies the values: S::get<ALIGNED,
// K>(row, column, left, x) writes K values to x. The launch bound of three blocks for each
// multiprocessor prevents the compiler from spilling registers to reach a higher occupancy.
template <typename S, bool ALIGNED> __global__ void __launch_bounds__(COLUMN_WARPS * 32, 3)
    column_part(S source, int64_t rows, int64_t n, int64_t parts, float *partial) {
  constexpr int K = S::K;
  __shared__ float room[COLUMN_WARPS][32 * K];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t across = ceil_div(n, 32 * K);
  for (int64_t b = blockIdx.x; b < across * parts; b += gridDim.x) {
    const int64_t part = b / across, first = (b - part * across) * 32 * K, column = first + lane * K;
    float sum[K];
#pragma unroll
    for (int i = 0; i < K; i++) sum[i] = 0;
    const int64_t end = part_at(rows, parts, part + 1);
#pragma unroll 2
    for (int64_t r = part_at(rows, parts, part) + warp; r < end; r += COLUMN_WARPS) {
      float x[K];
      source.template get<ALIGNED>(r, column, n - column, x);
#pragma unroll
      for (int i = 0; i < K; i++) sum[i] += x[i];
    }
#pragma unroll
    for (int i = 0; i < K; i++) room[warp][lane * K + i] = sum[i];
    __syncthreads();
    for (int c = threadIdx.x; c < 32 * K; c += COLUMN_WARPS * 32) {
      float all = 0;
      for (int w = 0; w < COLUMN_WARPS; w++) all += room[w][c];
      if (first + c < n) partial[part * n + first + c] = all;
    }
    __syncthreads();
  }
}

// column_fold adds the parts' sums to dst [n]. A lane has a column, a warp has a range of the
// parts.
static __global__ void __launch_bounds__(FOLD_WARPS * 32)
    column_fold(float *dst, const float *partial, int64_t n, int64_t parts) {
  __shared__ float room[FOLD_WARPS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t b = blockIdx.x; b * 32 < n; b += gridDim.x) {
    const int64_t column = b * 32 + lane;
    float sum = 0;
    if (column < n)
      for (int64_t p = part_at(parts, FOLD_WARPS, warp), end = part_at(parts, FOLD_WARPS, warp + 1); p < end; p++)
        sum += partial[p * n + column];
    room[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && column < n) {
      sum = 0;
      for (int w = 0; w < FOLD_WARPS; w++) sum += room[w][lane];
      dst[column] += sum;
    }
    __syncthreads();
  }
}

// start_fold launches column_fold for partial sums that begin `at` floats into the stream's
// scratch.
inline void start_fold(uly_stream *s, float *dst, int64_t n, int64_t parts, int64_t at = 0) {
  LAUNCH(column_fold, blocks_for(n, 32), FOLD_WARPS * 32, 0, s, dst, (const float *)s->scratch + at, n, parts);
}

// start_columns adds the column sums to dst [n]. It processes as many columns at a time as fit into
// the stream's scratch with their partial sums.
template <typename S> void start_columns(uly_stream *s, S source, bool aligned, int64_t rows, int64_t n, float *dst) {
  constexpr int64_t WIDTH = 32 * S::K;
  const int64_t room = s->scratch_bytes / 4, parts = parts_of(rows, least(n, room), COLUMN_PART_ROWS, room);
  const int64_t band = room / parts / WIDTH * WIDTH;
  for (int64_t c = 0; c < n; c += band) {
    const int64_t m = least(band, n - c);
    const unsigned grid = blocks_for(ceil_div(m, WIDTH) * parts, 1);
    if (aligned)
      LAUNCH((column_part<S, true>), grid, COLUMN_WARPS * 32, 0, s, source.from(c), rows, m, parts,
             (float *)s->scratch);
    else
      LAUNCH((column_part<S, false>), grid, COLUMN_WARPS * 32, 0, s, source.from(c), rows, m, parts,
             (float *)s->scratch);
    start_fold(s, dst + c, m, parts);
  }
}
