// Adds up the states between segments of a document (delta_index.h), in F32 and in order: the
// second step of a divided scan.
#include "delta.h"

// delta_join_kernel: a block has DELTA_JOIN_COLUMNS columns of the states of a document and head,
// and visits the joints of the document in the panel in order, or in reverse order if BACK. A
// thread has 4 columns of each STEP-th row.
template <bool BACK> __global__ void __launch_bounds__(DELTA_THREADS) delta_join_kernel(DeltaCall a) {
  constexpr int LANES = DELTA_JOIN_COLUMNS / 4, STEP = DELTA_THREADS / LANES, ROWS = DELTA_HEAD / STEP;
  __shared__ float state[DELTA_HEAD][DELTA_JOIN_COLUMNS];
  const int64_t slices = (a.dim_v + DELTA_JOIN_COLUMNS - 1) / DELTA_JOIN_COLUMNS;
  const int row0 = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES * 4;
  for (int64_t w = blockIdx.x; w < a.panel_documents * a.value_heads * slices; w += gridDim.x) {
    const int64_t head = w / slices % a.value_heads, document = a.document0 + w / slices / a.value_heads;
    const int column = (int)(w % slices) * DELTA_JOIN_COLUMNS + lane, left = a.dim_v - column;
    const bool wide = a.dim_v % 4 == 0;
    // the document's joints in the panel
    const int64_t lo = most(a.segments_before[document], a.segment0) - document,
                  hi = least(a.segments_before[document + 1], a.segment0 + a.segments) - 1 - document;
    for (int64_t i = 0; i < hi - lo; i++) {
      // the transition matrix of a segment is at the joint after it
      const int64_t joint = BACK ? hi - 1 - i : lo + i, of = BACK ? joint + 1 : joint;
      float *to = a.end_at(head, joint) + column;
      float sum[ROWS][4];
#pragma unroll
      for (int n = 0; n < ROWS; n++) {
        const int row = row0 + n * STEP;
#pragma unroll
        for (int e = 0; e < 4; e++) sum[n][e] = 0;
        if (row < a.dim_k) load_flat<4>(to + (int64_t)row * a.dim_v, left, wide, sum[n]);
      }
      if (i > 0) {
        const float *m = a.transition_at(head, of) + (BACK ? row0 : row0 * a.dim_k);
        const int by = BACK ? a.dim_k : 1, rows = BACK ? STEP : STEP * a.dim_k;
#pragma unroll 8
        for (int k = 0; k < a.dim_k; k++) {
          const float4 x = *reinterpret_cast<const float4 *>(&state[k][lane]);
#pragma unroll
          for (int n = 0; n < ROWS; n++) {
            const float f = row0 + n * STEP < a.dim_k ? m[k * by + n * rows] : 0;
            sum[n][0] = madd(f, x.x, sum[n][0]), sum[n][1] = madd(f, x.y, sum[n][1]);
            sum[n][2] = madd(f, x.z, sum[n][2]), sum[n][3] = madd(f, x.w, sum[n][3]);
          }
        }
      }
      __syncthreads(); // all threads have read the previous state
#pragma unroll
      for (int n = 0; n < ROWS; n++) {
        const int row = row0 + n * STEP;
        if (row >= a.dim_k) continue;
        *reinterpret_cast<float4 *>(&state[row][lane]) = make_float4(sum[n][0], sum[n][1], sum[n][2], sum[n][3]);
        if (i > 0) store_flat<4>(to + (int64_t)row * a.dim_v, left, wide, sum[n]);
      }
      __syncthreads();
    }
  }
}

const DeltaKernel delta_join[2] = {delta_join_kernel<false>, delta_join_kernel<false>};
const DeltaKernel delta_join_back[2] = {delta_join_kernel<true>, delta_join_kernel<true>};
