// Embedding: y[t] = table[ids[t]] for table [V, N] and ids [T]. Backward: dtable[ids[t]] += dy[t]
// in F32, in the order of the tokens: each row of the table belongs to one block, which reads all
// ids. An id outside of the table is reported (faults.h).
#include "check.h"
#include "faults.h"
#include "values.h"

namespace {

// CHUNK: the ids that a block reads between barriers.
constexpr int BLOCK = 256, STEPS = 8, CHUNK = BLOCK * STEPS;

// embed_rows copies rows in units of type U.
template <typename U> __global__ void __launch_bounds__(BLOCK)
    embed_rows(U *y, const U *table, const int32_t *ids, int64_t y_row, int64_t table_row, int64_t vocabulary,
               int64_t units, int64_t each, Divider by, bool narrow, uly_fault *fault) {
  const int64_t stride = (int64_t)gridDim.x * BLOCK;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < units; i += stride) {
    const int64_t t = narrow ? (int64_t)by((uint32_t)i) : i / each, u = i - t * each;
    const int32_t id = ids[t];
    if (id >= 0 && id < vocabulary) y[t * y_row + u] = table[id * table_row + u];
    else if (u == 0) report(fault, ULY_OP_EMBEDDING_FORWARD, id, t);
  }
}

template <typename U> void start_rows(uly_stream *s, const uly_embedding *a, int64_t k) {
  const int64_t tokens = a->ids.shape[0], each = a->table.shape[1] / k, units = tokens * each;
  LAUNCH(embed_rows<U>, blocks_for(units, BLOCK), BLOCK, 0, s, (U *)a->y.data, (const U *)a->table.data,
         (const int32_t *)a->ids.data, a->y.stride[0] / k, a->table.stride[0] / k, a->table.shape[0], units, each,
         Divider(each), is_narrow(units), s->fault);
}

// one_row sets the stride of an axis of extent 1, which may have any value, to 0.
void one_row(uly_tensor &t) {
  if (t.shape[0] <= 1) t.stride[0] = 0;
}

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  uly_embedding a = *(const uly_embedding *)args;
  Check c(d, "EmbeddingForward");
  const int type = c.compute("table", a.table);
  c.rows("table", a.table, type, {-1, -1});
  c.dense("ids", a.ids, ULY_I32, {-1});
  c.rows("y", a.y, type, {a.ids.shape[0], a.table.shape[1]});
  if (c.failed() || elements(a.y) == 0) return c.code;
  one_row(a.table), one_row(a.y);
  const int64_t size = size_of(type), k = 16 / size;
  const bool wide = a.table.shape[1] % k == 0 && aligned16(a.table.data, size, a.table.stride[0]) &&
                    aligned16(a.y.data, size, a.y.stride[0]);
  if (wide) start_rows<uint4>(s, &a, k);
  else if (type == ULY_F32) start_rows<uint32_t>(s, &a, 1);
  else start_rows<uint16_t>(s, &a, 1);
  return check_launch(d, "cuda.EmbeddingForward");
}

template <typename T> struct Gradient {
  const int32_t *ids;
  const T *dy;
  float *dtable;
  int64_t tokens, n, vocabulary, dy_row, table_row, owners, bands; // bands: groups of BLOCK·K columns
  uly_fault *fault;
};

// embed_backward: a block has the rows of one owner (vocabulary_owners) in one group of columns.
// For each chunk of ids, it lists the tokens of its rows in order and adds their gradients in that
// order. The sum of the current row stays in registers until a token of another row follows.
template <typename T, bool ALIGNED> __global__ void __launch_bounds__(BLOCK, 3) embed_backward(Gradient<T> a) {
  constexpr int K = Wide<T>::LANES, AHEAD = 4;
  // the list: tokens within the chunk, and their rows of the table
  __shared__ int32_t token[CHUNK], row[CHUNK];
  __shared__ int found[STEPS][BLOCK / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t owner = blockIdx.x / a.bands, band = blockIdx.x - owner * a.bands;
  const int64_t column = (band * BLOCK + threadIdx.x) * K, left = a.n - column;
  int32_t at = -1; // the current row
  float sum[K];
  for (int64_t base = 0; base < a.tokens; base += CHUNK) {
    int32_t id[STEPS];
    unsigned mine = 0;
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const int64_t t = base + j * BLOCK + threadIdx.x;
      const bool there = t < a.tokens;
      id[j] = there ? a.ids[t] : 0;
      const bool inside = id[j] >= 0 && id[j] < a.vocabulary;
      if (there && inside && (id[j] & (a.owners - 1)) == owner) mine |= 1u << j;
      if (there && !inside && blockIdx.x == 0) report(a.fault, ULY_OP_EMBEDDING_BACKWARD, id[j], t);
    }
    // The barrier also separates this chunk's list from the additions of the previous chunk.
    if (!__syncthreads_or(mine != 0)) continue;
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const unsigned votes = __ballot_sync(0xffffffffu, mine >> j & 1);
      if (lane == 0) found[j][warp] = __popc(votes);
    }
    __syncthreads();
    int listed = 0; // tokens in the list so far
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
      const unsigned votes = __ballot_sync(0xffffffffu, mine >> j & 1);
      int before = listed;
      for (int w = 0; w < BLOCK / 32; w++) {
        if (w < warp) before += found[j][w];
        listed += found[j][w];
      }
      if (mine >> j & 1) {
        const int entry = before + __popc(votes & ((1u << lane) - 1));
        token[entry] = j * BLOCK + (int)threadIdx.x;
        row[entry] = id[j];
      }
    }
    __syncthreads();
    for (int e = 0; e < listed; e += AHEAD) {
      Pack<T, K> dy[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; k++)
        load_raw<ALIGNED, K>(a.dy + (base + token[e + k < listed ? e + k : e]) * a.dy_row + column,
                             e + k < listed ? left : 0, dy[k]);
#pragma unroll
      for (int k = 0; k < AHEAD; k++) {
        if (e + k >= listed) break;
        if (row[e + k] != at) {
          if (at >= 0) store_some<ALIGNED, K>(a.dtable + at * a.table_row + column, left, sum);
          at = row[e + k];
          load_some<ALIGNED, K>(a.dtable + at * a.table_row + column, left, sum);
        }
#pragma unroll
        for (int i = 0; i < K; i++) sum[i] += widen(dy[k].v[i]);
      }
    }
  }
  if (at >= 0) store_some<ALIGNED, K>(a.dtable + at * a.table_row + column, left, sum);
}

template <typename T> void backward_of(uly_stream *s, const uly_embedding_grad *p) {
  constexpr int K = Wide<T>::LANES;
  const int64_t n = p->dtable.shape[1], vocabulary = p->dtable.shape[0], owners = vocabulary_owners(vocabulary),
                bands = ceil_div(n, BLOCK * K);
  const Gradient<T> a = {(const int32_t *)p->ids.data,
                         (const T *)p->dy.data,
                         (float *)p->dtable.data,
                         p->ids.shape[0],
                         n,
                         vocabulary,
                         p->dy.stride[0],
                         p->dtable.stride[0],
                         owners,
                         bands,
                         s->fault};
  const bool table = (uintptr_t)a.dtable % (4 * K) == 0 && a.table_row % K == 0;
  const unsigned grid = (unsigned)(owners * bands);
  if (n % K == 0 && table && aligned16(a.dy, sizeof(T), a.dy_row))
    LAUNCH((embed_backward<T, true>), grid, BLOCK, 0, s, a);
  else LAUNCH((embed_backward<T, false>), grid, BLOCK, 0, s, a);
}

int32_t backward(uly_device *d, uly_stream *s, const void *args) {
  uly_embedding_grad a = *(const uly_embedding_grad *)args;
  Check c(d, "EmbeddingBackward");
  const int type = c.compute("dy", a.dy);
  c.rows("dtable", a.dtable, ULY_F32, {-1, -1});
  c.dense("ids", a.ids, ULY_I32, {-1});
  c.rows("dy", a.dy, type, {a.ids.shape[0], a.dtable.shape[1]});
  if (c.failed() || elements(a.dy) == 0) return c.code;
  one_row(a.dtable), one_row(a.dy);
  if (type == ULY_F32) backward_of<float>(s, &a);
  else backward_of<bf16>(s, &a);
  return check_launch(d, "cuda.EmbeddingBackward");
}

} // namespace

int32_t fault_error(uly_device *d, uly_fault *fault) {
  if (fault == nullptr || fault->op == 0) return ULY_OK;
  const uly_fault f = *fault;
  fault->op = 0;
  if (f.op == 1 + ULY_OP_CROSS_ENTROPY)
    return fail(d, ULY_INTERNAL,
                "cuda.CrossEntropy: target %d of row %lld is outside of the logits; check the ids in the data", f.id,
                (long long)f.at);
  if (f.op == 1 + ULY_OP_ROUTE_FORWARD || f.op == 1 + ULY_OP_ROUTE_BACKWARD)
    return fail(d, ULY_INTERNAL, "cuda.%s: %d of token %lld is outside of the sequences, experts or rows",
                f.op == 1 + ULY_OP_ROUTE_FORWARD ? "RouteForward" : "RouteBackward", f.id, (long long)f.at);
  if (f.op == 1 + ULY_OP_SPREAD_ROWS || f.op == 1 + ULY_OP_COMBINE_ROWS)
    return fail(d, ULY_INTERNAL, "cuda.%s: row %d of token %lld does not exist",
                f.op == 1 + ULY_OP_SPREAD_ROWS ? "SpreadRows" : "CombineRows", f.id, (long long)f.at);
  if (f.op == 1 + ULY_OP_GROUPED_GEMM || f.op == 1 + ULY_OP_GROUPED_GEMM_WEIGHTS)
    return fail(d, ULY_INTERNAL, "cuda.%s: offset %lld is %d; offsets must rise from 0 to the number of rows",
                f.op == 1 + ULY_OP_GROUPED_GEMM ? "GroupedGemm" : "GroupedGemmWeights", (long long)f.at, f.id);
  return fail(d, ULY_INTERNAL, "cuda.%s: id %d of token %lld is outside of the table; check the ids in the data",
              f.op == 1 + ULY_OP_EMBEDDING_FORWARD ? "EmbeddingForward" : "EmbeddingBackward", f.id, (long long)f.at);
}

static const RegisterKernels registered({
    {ULY_OP_EMBEDDING_FORWARD, "own", forward},
    {ULY_OP_EMBEDDING_BACKWARD, "own", backward},
});
