// Adds up the states between segments of a document (delta_index.h), in F32 and in order: the
// second step of a divided scan.
#include "delta.h"

namespace {

constexpr int COLUMNS = DELTA_JOIN_COLUMNS;

// Join has the extents of a block for at most HEAD features of keys. A thread has 4 rows of the
// product with all COLUMNS columns, summed over a part of k; the SPLIT threads of these rows are
// neighbours. A tile has DEPTH columns of the transition matrix, or DEPTH rows if TRANSPOSED. Its
// rows are padded by 4 floats, the state's rows as well, so that neighbours read different banks.
template <bool TRANSPOSED, int HEAD> struct Join {
  static constexpr int SPLIT = 4 * DELTA_THREADS / HEAD, OWN = 4 * COLUMNS / SPLIT; // elements of a thread's result
  static constexpr int DEPTH = DELTA_JOIN_DEPTH, STEP = (TRANSPOSED ? HEAD : DEPTH) + 4, STATE_STEP = COLUMNS + 4,
                       TILE = (TRANSPOSED ? DEPTH : HEAD) * STEP, STAGES = delta_join_stages(HEAD);
  float *tiles, *state;
  Copies copies;
  int row, part; // the first of the thread's rows, and its part of k

  __device__ __forceinline__ explicit Join(float *shared)
      : tiles(shared),
        state(shared + STAGES * TILE),
        row((int)threadIdx.x / SPLIT * 4),
        part((int)threadIdx.x % SPLIT) {}

  // at returns where row k of the state is. A thread reads 4 neighbours of k of a row of the matrix
  // at once; the rows of the state for these are SPLIT apart.
  __device__ __forceinline__ float *at(int k) const {
    constexpr int GROUP = 4 * SPLIT;
    return state + (TRANSPOSED ? k : k / GROUP * GROUP + k % 4 * SPLIT + k % GROUP / 4) * STATE_STEP;
  }

  // copy copies the tile of columns (rows) k0 … k0 + DEPTH - 1 of a matrix to a stage.
  __device__ __forceinline__ void copy(const float *matrix, int dim_k, int k0, int stage) {
    float *const to = tiles + stage * TILE;
    const bool vectors = dim_k % 4 == 0;
    if (TRANSPOSED) {
#pragma unroll
      for (int c = 0; c < HEAD; c += 64)
        copy_tile<DELTA_THREADS, 64, DEPTH>(copies, to + c, STEP, matrix + (int64_t)k0 * dim_k + c, dim_k, vectors,
                                            dim_k - c, (int)least(DEPTH, dim_k - k0));
    } else {
      copy_tile<DELTA_THREADS, DEPTH, HEAD>(copies, to, STEP, matrix + k0, dim_k, vectors, dim_k - k0, dim_k);
    }
  }

  // add adds the product of a tile and the state's rows k0 … k0 + DEPTH - 1 to sum.
  __device__ __forceinline__ void add(float (&sum)[4 * COLUMNS], int k0, int stage) const {
    const float *const from = tiles + stage * TILE, *const rows = state + k0 * STATE_STEP;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 4 * SPLIT) {
      float m[4][4]; // TRANSPOSED: [k][row], otherwise [row][k]
#pragma unroll
      for (int i = 0; i < 4; i++)
        load<4>(TRANSPOSED ? from + (k + i * SPLIT + part) * STEP + row : from + (row + i) * STEP + k + 4 * part, m[i]);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c += 4) {
          float x[4];
          load<4>(rows + (k + i * SPLIT + part) * STATE_STEP + c, x);
#pragma unroll
          for (int r = 0; r < 4; r++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              float &to = sum[r * COLUMNS + c + e];
              to = madd(TRANSPOSED ? m[i][r] : m[r][i], x[e], to);
            }
        }
    }
  }

  // total adds the sums of the threads with the same rows. A thread keeps OWN elements, from
  // element OWN·part on: half of them remain after each step.
  template <int BY = SPLIT / 2, int N = 2 * COLUMNS>
  __device__ __forceinline__ void total(float (&sum)[4 * COLUMNS]) const {
    const bool upper = part & BY;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float own = upper ? sum[i + N] : sum[i], other = upper ? sum[i] : sum[i + N];
      sum[i] = own + __shfl_xor_sync(0xffffffffu, other, BY);
    }
    if constexpr (BY > 1) total<BY / 2, N / 2>(sum);
  }
};

} // namespace

// delta_join_kernel: a block has COLUMNS columns of the states of a document and head, and visits
// the joints of the document in the panel in order, or in reverse order if BACK. Tiles of the
// transition matrices are copied some tiles ahead, because they do not depend on the states.
template <bool BACK, int HEAD> __global__ void __launch_bounds__(DELTA_THREADS) delta_join_kernel(DeltaCall a) {
  typedef Join<BACK, HEAD> Block;
  constexpr int AHEAD = Block::STAGES - 1, OWN = Block::OWN;
  SHARED(float, shared);
  Block b(shared);
  const int own_row = b.row + b.part * OWN / COLUMNS, own_column = b.part * OWN % COLUMNS;
  const int64_t slices = (a.dim_v + COLUMNS - 1) / COLUMNS, square = (int64_t)a.dim_k * a.dim_k;
  for (int i = (int)threadIdx.x; i < HEAD * Block::STATE_STEP; i += DELTA_THREADS) b.state[i] = 0; // missing rows
  for (int64_t w = blockIdx.x; w < a.panel_documents * a.value_heads * slices; w += gridDim.x) {
    const int64_t head = w / slices % a.value_heads, document = a.document0 + w / slices / a.value_heads;
    const int column = (int)(w % slices) * COLUMNS + own_column, left = a.dim_v - column;
    const bool wide = a.dim_v % 4 == 0, there = own_row < a.dim_k && left > 0;
    // the document's joints in the panel
    const int64_t lo = most(a.segments_before[document], a.segment0) - document,
                  hi = least(a.segments_before[document + 1], a.segment0 + a.segments) - 1 - document;
    const int joints = (int)(hi - lo);
    if (joints < 2) continue;
    auto joint = [&](int i) { return BACK ? hi - 1 - i : lo + i; };
    int at = 1, at_k = 0, stage = 0;                              // the tile that is copied next
    const float *matrix = a.transition_at(head, joint(1) + BACK); // of a segment: at the joint after it
    auto copy = [&] {
      if (at < joints) b.copy(matrix, a.dim_k, at_k, stage);
      b.copies.close();
      stage = stage + 1 == Block::STAGES ? 0 : stage + 1, at_k += Block::DEPTH;
      if (at_k >= a.dim_k) at++, at_k = 0, matrix += BACK ? -square : square;
    };
    __syncthreads(); // all threads have read the tiles of the previous columns
    for (int n = 0; n < AHEAD; n++) copy();
    for (int i = 0, of = 0; i < joints; i++) {
      float *const to = a.end_at(BACK ? a.dends : a.ends, head, joint(i)) + (int64_t)own_row * a.dim_v + column;
      float own[OWN / 4][4] = {}, sum[4 * COLUMNS] = {};
#pragma unroll
      for (int c = 0; c < OWN / 4; c++)
        if (there) load_flat<4>(to + 4 * c, left - 4 * c, wide, own[c]);
      for (int k = 0; i > 0 && k < a.dim_k; k += Block::DEPTH) {
        b.copies.template wait<AHEAD - 1>();
        __syncthreads(); // the tile has arrived and the state is written; all threads have read the tile before
        copy();
        b.add(sum, k, of);
        of = of + 1 == Block::STAGES ? 0 : of + 1;
      }
      if (i > 0) b.total(sum);
      __syncthreads(); // all threads have read the previous state
      if (!there) continue;
#pragma unroll
      for (int c = 0; c < OWN / 4; c++) {
#pragma unroll
        for (int e = 0; e < 4; e++) own[c][e] += sum[4 * c + e];
        *reinterpret_cast<float4 *>(b.at(own_row) + own_column + 4 * c) =
            make_float4(own[c][0], own[c][1], own[c][2], own[c][3]);
        if (i > 0) store_flat<4>(to + 4 * c, left - 4 * c, wide, own[c]);
      }
    }
  }
}

const DeltaKernel delta_join[2] = {delta_join_kernel<false, 128>, delta_join_kernel<false, DELTA_HEAD>};
const DeltaKernel delta_join_back[2] = {delta_join_kernel<true, 128>, delta_join_kernel<true, DELTA_HEAD>};
