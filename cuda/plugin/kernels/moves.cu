// The kernel of moves.h, and the queue of a stream.
#include "moves.h"

namespace {

template <typename U> __device__ __forceinline__ void move_units(const Move &m, uint32_t lo) {
  int64_t from[MOVE_UNROLL], to[MOVE_UNROLL];
  U x[MOVE_UNROLL];
  // All loads of a thread are issued before its first store.
#pragma unroll
  for (int u = 0; u < MOVE_UNROLL; u++) {
    uint32_t i = lo + u * MOVE_THREADS + threadIdx.x;
    from[u] = -1;
    if (i >= m.units) continue;
    int64_t at[2] = {0, 0};
#pragma unroll
    for (int a = MOVE_AXES - 1; a > 0; a--) {
      const uint32_t q = m.copy.by[a - 1](i), r = i - q * m.copy.by[a - 1].divisor;
      at[0] += r * m.copy.step[0][a], at[1] += r * m.copy.step[1][a];
      i = q;
    }
    to[u] = at[0] + i * m.copy.step[0][0], from[u] = at[1] + i * m.copy.step[1][0];
    x[u] = ((const U *)m.src)[from[u]];
  }
#pragma unroll
  for (int u = 0; u < MOVE_UNROLL; u++)
    if (from[u] >= 0) ((U *)m.dst)[to[u]] = x[u];
}

template <typename T> __device__ __forceinline__ void rotate(const Move &m, uint32_t lo) {
  constexpr int K = Wide<T>::LANES;
  const MovedHeads &r = m.rope;
  RopeArgs<T> a;
  a.rows.heads = r.heads.divisor, a.rows.by = r.heads, a.rows.narrow = a.narrow = true;
  for (int i = 0; i < 2; i++) a.rows.token[i] = r.token[i], a.rows.head[i] = r.head[i];
  a.x = (const T *)m.src, a.y = (T *)m.dst, a.cosine = r.cosine, a.sine = r.sine, a.sign = r.sign;
  a.half = r.half, a.pairs = r.half / K, a.each = r.each.divisor, a.by = r.each;
  if (m.kind == MOVE_ROPE) {
    if (lo + threadIdx.x < m.units) rope_unit<T, K>(a, lo + threadIdx.x);
    return;
  }
  a.rows.rows = m.units;
  const NormArgs<T> b = {(const T *)r.w, r.rstd, 2 * a.half + (a.each - a.pairs) * K, r.rstd_token, r.eps, r.centre};
  rope_head<T, K>(a, b, lo + threadIdx.x / ROPE_LANES);
}

// moves_kernel: T is the type of the rotations. The move of a tile is the same for all threads of a
// block.
template <typename T> __global__ void __launch_bounds__(MOVE_THREADS) moves_kernel(const __grid_constant__ Moves all) {
  for (uint32_t tile = blockIdx.x; tile < all.first[all.n]; tile += gridDim.x) {
    int i = 0;
    while (tile >= all.first[i + 1]) i++;
    const Move &m = all.move[i];
    const uint32_t at = tile - all.first[i];
    const uint32_t copied = at * (MOVE_THREADS * MOVE_UNROLL);
    switch (m.kind) {
      case 1: move_units<uint8_t>(m, copied); break;
      case 2: move_units<uint16_t>(m, copied); break;
      case 4: move_units<uint32_t>(m, copied); break;
      case 8: move_units<uint2>(m, copied); break;
      case 16: move_units<uint4>(m, copied); break;
      case MOVE_ROPE: rotate<T>(m, at * MOVE_THREADS); break;
      default: rotate<T>(m, at * (MOVE_THREADS / ROPE_LANES));
    }
  }
}

} // namespace

void push_move(uly_stream *s, const Move &m, int type, int64_t units_of_tile) {
  Moves *q = s->group;
  const uint32_t tiles = (uint32_t)ceil_div(m.units, units_of_tile);
  const bool other = type && q->type && type != q->type, many = (int64_t)q->first[q->n] + tiles > INT32_MAX;
  if (q->n == MOVES || other || many) launch_group(s);
  q->move[q->n] = m;
  q->first[q->n + 1] = q->first[q->n] + tiles;
  q->n++;
  if (type) q->type = type;
}

bool queue_copy(uly_stream *s, const Plane &p, int64_t bytes, void *dst, const void *src) {
  if (!s->group || p.rank > MOVE_AXES || !is_narrow(p.elements())) return false;
  Move m;
  m.src = src, m.dst = dst, m.units = (uint32_t)p.elements(), m.kind = (int32_t)bytes;
  m.copy = {};
  for (int i = 0; i < MOVE_AXES; i++) { // missing axes are the outer ones
    const int a = i - (MOVE_AXES - p.rank);
    for (int o = 0; o < 2; o++) m.copy.step[o][i] = a >= 0 ? p.stride[o][a] : 0;
    if (i > 0) m.copy.by[i - 1] = Divider(a >= 0 ? p.shape[a] : 1);
  }
  push_move(s, m, 0, MOVE_THREADS * MOVE_UNROLL);
  return true;
}

void launch_group(uly_stream *s) {
  Moves *q = s->group;
  if (!q || q->n == 0) return;
  const unsigned grid = blocks_for(q->first[q->n], 1);
  if (q->type == ULY_F32) LAUNCH(moves_kernel<float>, grid, MOVE_THREADS, 0, s, *q);
  else LAUNCH(moves_kernel<bf16>, grid, MOVE_THREADS, 0, s, *q);
  q->n = q->type = 0;
}

void open_group(uly_stream *s) {
  if (!s->group) s->group = s->queue;
}

void close_group(uly_stream *s) {
  launch_group(s);
  s->group = nullptr;
}

Moves *new_queue() { return new Moves; }
void delete_queue(Moves *q) { delete q; }
