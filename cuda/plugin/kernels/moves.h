// Moves: copies and rotations that do not depend on each other, in one launch. An all-to-all packs
// and unpacks a block for each tensor and rank. With 8 ranks, these would be about 120 launches for
// the attention of a layer, and on short sequences they would take longer than the copies.
//
// While a stream has an open group (stream_group of the plug-in's table), Copy and Rope queue their
// calls if the kernel of moves.cu can run them. Any other use of the stream launches the queue
// first. Only the order of the calls of a group among each other is undefined.
#pragma once

#include "plugin.h"
#include "rope.h"

// MOVES is the number of calls of a launch. The parameters of a kernel are at most 4096 bytes.
enum : int { MOVES = 28, MOVE_THREADS = 256, MOVE_UNROLL = 2, MOVE_AXES = 4 };

// A Move copies units of a plane, or rotates heads, each with less than 2^31 units.
struct MovedUnits {
  int64_t step[2][MOVE_AXES]; // in units, of dst and src, from the outermost axis
  Divider by[MOVE_AXES - 1];  // extents of the inner axes
};
struct MovedHeads {
  const float *cosine, *sine;
  const void *w; // NULL = no norm
  float *rstd;
  int64_t token[2], head[2]; // strides of x and y
  int64_t rstd_token;
  Divider heads, each;
  uint32_t half;
  float sign, eps, centre;
};
struct Move {
  const void *src;
  void *dst;
  uint32_t units; // of a copy: units; of rotations: units of pairs, with a norm: heads
  int32_t kind;   // bytes of a unit of a copy; MOVE_ROPE; MOVE_NORM
  union {
    MovedUnits copy;
    MovedHeads rope;
  };
  Move() {}
};
enum : int32_t { MOVE_ROPE = 32, MOVE_NORM = 33 };

// Moves is the queue of a stream, and the argument of a launch. A tile is the work of a block at a
// time. first[i] is the number of tiles of the moves before i.
struct Moves {
  int32_t n = 0, type = 0; // type of rotations; 0 = none so far
  uint32_t first[MOVES + 1] = {};
  Move move[MOVES];
};
static_assert(sizeof(Moves) <= 4096, "the parameters of a kernel have more than 4096 bytes");

// push adds a move to the queue of a stream, and launches a full queue first.
void push_move(uly_stream *s, const Move &m, int type, int64_t units_of_tile);

// queue_copy queues a copy of units of `bytes` bytes. It returns false if the stream has no open
// group, or if the copy does not fit a Move.
bool queue_copy(uly_stream *s, const Plane &units, int64_t bytes, void *dst, const void *src);

// queue_rope queues rotations whose operands can be accessed in vectors.
template <typename T> bool queue_rope(uly_stream *s, const RopeArgs<T> &a, const NormArgs<T> &b) {
  const int64_t units = b.w ? a.rows.rows : a.rows.rows * a.each;
  if (!s->group || units == 0 || !is_narrow(a.rows.rows * a.each)) return false;
  Move m;
  m.src = a.x, m.dst = a.y, m.units = (uint32_t)units, m.kind = b.w ? MOVE_NORM : MOVE_ROPE;
  m.rope = {a.cosine,
            a.sine,
            b.w,
            b.rstd,
            {a.rows.token[0], a.rows.token[1]},
            {a.rows.head[0], a.rows.head[1]},
            b.token,
            Divider(a.rows.heads),
            Divider(a.each),
            (uint32_t)a.half,
            a.sign,
            b.eps,
            b.centre};
  push_move(s, m, sizeof(T) == 2 ? ULY_BF16 : ULY_F32, b.w ? MOVE_THREADS / ROPE_LANES : MOVE_THREADS);
  return true;
}
