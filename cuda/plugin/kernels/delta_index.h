// Index arithmetic of the gated delta rule: chunks of documents, panels, and the layout of
// the workspace. The file includes no CUDA; delta_index_test.cpp tests it on the host.
//
// A document is divided into chunks from its start; all chunks but the last are full. A seam is the
// boundary between two chunks of a document. Kernels store states at seams only, because the states
// at the ends of a document are arguments. Therefore there are at most T / chunk stored states,
// even for short documents.
#pragma once

#include "index.h"

enum : int { DELTA_HEAD = ULY_DELTA_HEAD, DELTA_CHUNK = 64, DELTA_THREADS = 256, DELTA_SLICE = 32 };
// The sum of states at joints: columns of the states of a block, and columns or rows of a
// transition matrix in a tile.
enum : int { DELTA_JOIN_COLUMNS = 8, DELTA_JOIN_DEPTH = 32 };

ULY_BOTH int up16(int n) { return (n + 15) / 16 * 16; }
ULY_BOTH int up32(int n) { return (n + 31) / 32 * 32; }

constexpr int64_t DELTA_PANEL_TOKENS = 1ll << 40; // more are the same: sums must not overflow

constexpr float DELTA_EPS = 1e-6f; // added under the square root of the L2 norm of q and k

// Padded rows of 64 columns.
constexpr int DELTA_WIDE = DELTA_CHUNK + 8;

// DeltaTiles has the extents of tiles in shared memory for elements of SIZE bytes.
template <int SIZE> struct DeltaTiles {
  // columns of q and k that delta_prepare and (in F32) delta_out multiply at a time, and of X, Y,
  // v, dout and the states in delta_gradients
  static constexpr int KEYS = 256 / SIZE, SLICE = 128 / SIZE;
  static constexpr int SQUARE = DELTA_CHUNK * DELTA_WIDE; // elements of a tile of 64 rows and columns
  // delta_gradients: elements of all columns of a chunk's rows, in BF16 and if they fit, otherwise
  // of a slice; elements of 64 rows of a state in a slice
  static constexpr int VALUES = DELTA_CHUNK * (SIZE == 2 ? 128 + 8 : SLICE + 8), STATE = DELTA_CHUNK * (SLICE + 8);
  static constexpr int GRADIENT_FACTORS = 23 * DELTA_CHUNK; // floats
  // Bytes of shared memory. All are less than 99 KiB, the smallest limit of any GPU for a block.
  static constexpr int64_t PREPARE = SIZE * 2 * DELTA_CHUNK * (KEYS + 8) + 4 * (SQUARE + 5 * DELTA_CHUNK),
                           OUT = SIZE * (DELTA_CHUNK * (KEYS + 8) + KEYS * DELTA_WIDE + 2 * SQUARE),
                           GRADIENTS = SIZE * (2 * SQUARE + 3 * VALUES + 2 * STATE) + 4 * GRADIENT_FACTORS;
};
// delta_scan_bytes returns the shared memory of the scans in F32.
inline int64_t delta_scan_bytes(int dim_k, int chunk) {
  return 4 * ((int64_t)chunk * (up32(dim_k) + 8) + up16(dim_k) * (DELTA_SLICE + 4) + chunk * (chunk + 8) +
              2 * chunk * (DELTA_SLICE + 4) + 4 * chunk);
}

// Scans in BF16: warps that multiply, and threads of a block, of which the others copy.
enum : int { DELTA_SCAN_WARPS = 4, DELTA_SCAN_THREADS = 32 * DELTA_SCAN_WARPS + 64 };

// DeltaScanTiles has the extents of the tiles of the scans in BF16, in elements, for keys of at
// most 2·HALF features and chunks of at most ROWS tokens. A stage has the keys of a chunk, T, and
// the values. The scans that compute out or gradients have queries and P as well, and gradients
// dout instead of the values. Behind the stages are the factors of two chunks, and results of each
// warp. With two or three stages, the tiles of the following chunks are copied while a chunk is
// computed.
template <int HALF> struct DeltaScanTiles {
  static constexpr int ROWS = HALF > 64 ? 32 : DELTA_CHUNK, KEYS = ROWS * (2 * HALF + 8), SQUARE = ROWS * (ROWS + 8),
                       SLICE = ROWS * (DELTA_SLICE + 8), FACTORS = 4 * ROWS + 4, // floats
      RESULTS = DELTA_SCAN_WARPS * 16 * ROWS * 3 / 2;                            // floats
  static ULY_BOTH constexpr int stage(bool queries) { return (queries ? 2 : 1) * (KEYS + SQUARE) + SLICE; }
  static constexpr int64_t bytes(bool queries, int stages) {
    return 2 * (int64_t)stages * stage(queries) + 4 * (2 * FACTORS + RESULTS);
  }
};
// delta_scan_half returns HALF for keys of dim_k features.
inline int delta_scan_half(int dim_k) { return dim_k <= 64 ? 32 : dim_k <= 128 ? 64 : 128; }
inline int64_t delta_scan_tile_bytes(int dim_k, bool queries, int stages) {
  switch (delta_scan_half(dim_k)) {
    case 32: return DeltaScanTiles<32>::bytes(queries, stages);
    case 64: return DeltaScanTiles<64>::bytes(queries, stages);
    default: return DeltaScanTiles<128>::bytes(queries, stages);
  }
}
// delta_scan_stages returns the most stages, at most 3, that fit into `limit` bytes.
inline int delta_scan_stages(int dim_k, bool queries, int64_t limit) {
  int stages = 3;
  while (stages > 1 && delta_scan_tile_bytes(dim_k, queries, stages) > limit) stages--;
  return stages;
}

// delta_join_stages and delta_join_bytes return the tiles in shared memory, and its bytes, of a
// block that adds up states with at most `head` features of keys.
constexpr int delta_join_stages(int head) { return head <= 128 ? 4 : 2; }
constexpr int64_t delta_join_bytes(int head) {
  return 4 * (delta_join_stages(head) * head * (DELTA_JOIN_DEPTH + 4) + head * (DELTA_JOIN_COLUMNS + 4));
}

// DeltaShape has the extents that sizes depend on.
struct DeltaShape {
  int64_t size; // bytes of an element of q, k, v and of intermediate results
  int64_t tokens, key_heads, value_heads, dk, dv;
  int64_t chunk;           // tokens of a chunk, a multiple of 16
  const int64_t *key_head; // NULL: h / (value heads / key heads)
  int64_t panel = 0;       // most tokens of a panel; 0: as many as DELTA_PANEL_BYTES hold

  int64_t key(int64_t h) const { return key_head ? key_head[h] : h / (value_heads / key_heads); }
};

// delta_chunk returns the tokens of a chunk, at most `limit` (0: no limit). Chunks of wide keys are
// shorter, so that a chunk and a slice of the state fit into the shared memory of any GPU.
inline int64_t delta_chunk(int64_t limit, int64_t dk) {
  const int64_t full = dk > 128 ? 32 : DELTA_CHUNK;
  return limit <= 0 || limit >= full ? full : limit / 16 * 16;
}

inline DeltaShape delta_shape(int64_t size, int64_t tokens, int64_t key_heads, int64_t value_heads, int64_t dk,
                              int64_t dv, int64_t chunk, const int64_t *key_head, int64_t panel = 0) {
  return {size, tokens, key_heads, value_heads, dk, dv, delta_chunk(chunk, dk), key_head, panel};
}

// A call is computed in panels: ranges of the sequence with all heads. The state of the document
// that continues in the next panel is carried through memory in F32. Therefore the recurrence runs
// over the sequence once, results do not depend on the panels, and the intermediate results of a
// panel need the same memory, however long the sequence is: DELTA_PANEL_BYTES, or as much as the
// tokens of a panel need that the call requests. The forward pass saves the carried states; the
// backward pass computes panel by panel, from the last to the first, and computes the intermediate
// results of each panel again from its carried state.

// delta_row returns the bytes of intermediate results of a token and value head in the backward
// pass.
inline int64_t delta_row(const DeltaShape &s) {
  return 16 + s.size * (2 * s.chunk + 2 * s.dv + 2 * s.dk) + ceil_div(2 * s.size * s.dk * s.dv, s.chunk);
}

// delta_span returns the most tokens of a panel: a multiple of the chunk, two chunks or more.
inline int64_t delta_span(const DeltaShape &s) {
  const int64_t chunk = most(s.value_heads, 1) * delta_row(s) * s.chunk;
  return most(2, s.panel > 0 ? least(s.panel, DELTA_PANEL_TOKENS) / s.chunk : DELTA_PANEL_BYTES / chunk) * s.chunk;
}
inline int64_t delta_panels(const DeltaShape &s) { return most(1, ceil_div(s.tokens, delta_span(s))); }

// delta_stride returns the tokens of a panel: the sequence is divided evenly. Panel n has the
// chunks that begin at tokens [n·stride, (n + 1)·stride).
inline int64_t delta_stride(const DeltaShape &s) {
  return most(1, ceil_div(ceil_div(s.tokens, s.chunk), delta_panels(s))) * s.chunk;
}

// Segments. A document with more chunks in a panel than a segment has is divided into segments,
// which are computed at the same time, if heads and slices alone leave multiprocessors idle:
//
//  1. For each segment, the state after it is computed for zero before it (for the first segment:
//     for its own state), and the transition matrix, if segments precede and follow it.
//  2. The states after the segments of a document are added up in order, by the arithmetic of
//     DeltaFold: state ← transition · state + state from zero. Both are F32.
//  3. Each segment is computed with the state before it.
//
// The backward scan does so from the last segment to the first, with the transposed matrices. The
// forward pass saves the states and matrices, so that the backward pass begins with step 3 for the
// states, and does steps 1 and 2 for their gradients alone. A joint is the boundary between two
// segments of a document in a panel. Segments are multiples of chunks from the start of a document.

// delta_most_segments returns the number of segments of one document that the multiprocessors can
// compute at the same time.
inline int64_t delta_most_segments(const DeltaShape &s) {
  return DELTA_MULTIPROCESSORS / most(1, s.value_heads * ceil_div(s.dv, DELTA_SLICE));
}
// delta_joints returns the most joints of a panel, for any documents. A joint follows
// at least the full chunks of a segment, but at the ends of the panel.
inline int64_t delta_joints(const DeltaShape &s) {
  const int64_t segments = delta_most_segments(s), chunks = least(s.tokens, delta_span(s)) / s.chunk;
  return segments < 2 || chunks < 2 ? 0 : least(segments, chunks) + 2;
}

constexpr int64_t DELTA_UNDIVIDED = INT64_MAX / 2; // chunks of a segment: a segment per document

// delta_segment returns the chunks of a segment. The choice depends on the shape and the documents
// alone, with a model of the time: blocks take turns on the multiprocessors, and a block needs one
// unit of time for each chunk. A division must save a tenth of the time.
inline int64_t delta_segment(const DeltaShape &s, const int64_t *cu, int64_t documents) {
  if (delta_joints(s) == 0) return DELTA_UNDIVIDED;
  const int64_t full = delta_stride(s) / s.chunk, slices = ceil_div(s.dv, DELTA_SLICE),
                moves = ceil_div(s.dk, DELTA_SLICE);
  int64_t longest = 0, chunks = 0;
  for (int64_t i = 0; i < documents; i++) {
    const int64_t n = ceil_div(cu[i + 1] - cu[i], s.chunk);
    longest = most(longest, n), chunks += n;
  }
  longest = least(longest, full), chunks = least(chunks, full);
  const int64_t least_time = ceil_div(chunks * s.value_heads * slices, DELTA_MULTIPROCESSORS);
  int64_t best = DELTA_UNDIVIDED, best_time = most(longest, least_time) * 9 / 10;
  if (least_time >= best_time) return best; // the documents alone fill the multiprocessors
  for (int64_t n = 2; n <= delta_most_segments(s); n++) {
    const int64_t segment = ceil_div(full, n);
    if (segment >= longest) continue;
    int64_t blocks = 0; // of step 1
    for (int64_t i = 0; i < documents; i++)
      if (cu[i + 1] - cu[i] > segment * s.chunk) {
        const int64_t of = ceil_div(least(ceil_div(cu[i + 1] - cu[i], s.chunk), full), segment);
        blocks += (of - 1) * slices + (of - 2) * moves;
      }
    const int64_t time = ceil_div(blocks * s.value_heads, DELTA_MULTIPROCESSORS) * segment + most(segment, least_time) +
                         (ceil_div(longest, segment) - 1) * DELTA_FOLD_CHUNKS;
    if (time < best_time) best = segment, best_time = time;
  }
  return best;
}

// delta_state returns the bytes of the states of all heads in F32.
inline int64_t delta_state(const DeltaShape &s) { return s.value_heads * s.dk * s.dv * 4; }

// DeltaSaved is the layout of what the forward pass saves: the matrices T, [value heads][T][chunk],
// then in F32 the carried states [panels - 1] and, for each panel, the states at joints and the
// transition matrices (DeltaLayout). `divided`: documents may be divided into segments.
struct DeltaSaved : Room {
  int64_t carried, ends, transitions;    // in bytes
  int64_t panel_ends, panel_transitions; // bytes of a panel
  DeltaSaved(const DeltaShape &s, bool divided) : Room() {
    const int64_t panels = delta_panels(s), joints = (divided ? delta_joints(s) : 0) * s.value_heads;
    panel_ends = joints * s.dk * s.dv * 4, panel_transitions = joints * s.dk * s.dk * 4;
    take(s.value_heads * s.tokens * s.chunk, s.size); // T
    carried = take(panels - 1, delta_state(s));
    ends = take(panels, panel_ends), transitions = take(panels, panel_transitions);
  }
};

enum DeltaPass { DELTA_FORWARD, DELTA_BACKWARD, DELTA_STATE };

// DeltaLayout is the layout of a workspace, in byte offsets: tables (int64), the carried states,
// and the intermediate results of a panel. All intermediate results but states have `rows` rows for
// each head.
struct DeltaLayout : Room {
  // start [documents + 1]: first token; chunks and segments [documents + 1]: their numbers in the
  // preceding documents; document [documents]: index in the call's list
  int64_t start, chunks, segments, document;
  int64_t key_head, first; // [value heads] key head; [key heads + 1] first value head
  int64_t carried[2];      // [value heads][dk][dv] F32, used by panels alternately
  int64_t joints;          // most joints of a panel
  int64_t ends;            // [value heads][joints][dk][dv] F32, in the backward pass gradients
  int64_t transitions;     // [value heads][joints][dk][dk] F32, in the forward pass
  int64_t rows;            // most tokens of a panel
  int64_t slots;           // most states of a panel
  int64_t unit_q, unit_k;  // [key heads][rows] F32, with L2Norm
  int64_t decay;           // [value heads][rows] float4
  // in the call's type
  int64_t solve, scores;   // [value heads][rows][chunk]
  int64_t x, y;            // [value heads][rows][dv]
  int64_t dq, dk;          // [value heads][rows][dk]
  int64_t states, dstates; // [value heads][slots][dk][dv], in BF16 [dv][dk]
};

// delta_layout returns the layout. `documents` counts documents with tokens; only the tables depend
// on it. `divided`: documents may be divided into segments.
inline DeltaLayout delta_layout(const DeltaShape &s, int64_t documents, DeltaPass pass, bool divided) {
  DeltaLayout l = {};
  auto take = [&](int64_t n, int64_t size) { return l.take(n, size); };
  l.start = take(documents + 1, 8);
  l.chunks = take(documents + 1, 8);
  l.segments = take(documents + 1, 8);
  l.document = take(documents, 8);
  l.key_head = take(s.value_heads, 8);
  l.first = take(s.key_heads + 1, 8);
  if (pass != DELTA_STATE && delta_panels(s) > 1)
    for (int64_t &at : l.carried) at = take(delta_state(s), 1);
  l.joints = pass != DELTA_STATE && divided ? delta_joints(s) : 0;
  l.ends = take(l.joints * s.value_heads * s.dk * s.dv, 4);
  if (pass != DELTA_BACKWARD) l.transitions = take(l.joints * s.value_heads * s.dk * s.dk, 4);
  // The last chunk of a panel can end up to a chunk after the panel's tokens.
  l.rows = least(s.tokens, delta_span(s) + s.chunk);
  l.slots = least(s.tokens, delta_span(s)) / s.chunk + 1; // with the state before the first chunk
  const int64_t n = s.value_heads * l.rows;
  l.unit_q = take(s.key_heads * l.rows, 4);
  l.unit_k = take(s.key_heads * l.rows, 4);
  l.decay = take(n, 16);
  l.scores = take(n * s.chunk, s.size);
  if (pass != DELTA_BACKWARD) l.solve = take(n * s.chunk, s.size);
  if (pass == DELTA_STATE || (pass == DELTA_FORWARD && s.size == 2)) return l; // scans in BF16 compute out
  const int64_t states = l.slots * s.value_heads * s.dk * s.dv;
  l.x = take(n * s.dv, s.size);
  l.states = take(states, s.size);
  if (pass == DELTA_FORWARD) return l;
  l.y = take(n * s.dv, s.size);
  l.dq = take(n * s.dk, s.size);
  l.dk = take(n * s.dk, s.size);
  l.dstates = take(states, s.size);
  return l;
}

inline int64_t delta_documents(const int64_t *cu, int64_t documents, int64_t tokens) {
  if (!cu) return tokens;
  int64_t n = 0;
  for (int64_t i = 0; i < documents; i++) n += cu[i + 1] > cu[i];
  return n;
}

// delta_tables calls put(byte offset, value) for every entry of the tables, and returns the number
// of chunks of all documents. Documents without tokens are skipped unless `all` is true. `segment`
// is the number of chunks of a segment.
template <class Put> int64_t delta_tables(const DeltaShape &s, const DeltaLayout &l, const int64_t *cu,
                                          int64_t documents, bool all, int64_t segment, Put put) {
  int64_t n = 0, chunks = 0, segments = 0;
  put(l.start, 0);
  put(l.chunks, 0);
  put(l.segments, 0);
  for (int64_t i = 0; i < documents; i++) {
    if (cu[i + 1] == cu[i] && !all) continue;
    const int64_t of = ceil_div(cu[i + 1] - cu[i], s.chunk);
    chunks += of, segments += most(1, ceil_div(of, segment));
    put(l.document + 8 * n, i);
    n++;
    put(l.start + 8 * n, cu[i + 1]);
    put(l.chunks + 8 * n, chunks);
    put(l.segments + 8 * n, segments);
  }
  for (int64_t h = 0; h < s.value_heads; h++) put(l.key_head + 8 * h, s.key(h));
  for (int64_t k = 0, h = 0; k <= s.key_heads; k++) {
    while (h < s.value_heads && s.key(h) < k) h++;
    put(l.first + 8 * k, h);
  }
  return chunks;
}

// DeltaChunk is one chunk: `rows` tokens from `token` on. The seam before it is seam - 1 (none for
// the first chunk of a document), the seam after it is seam (none for the last).
struct DeltaChunk {              // document: index among the documents with tokens
  int64_t document, token, seam; // document: its index among those with tokens
  int rows;
  bool first, last;
};

// DeltaDocument is a document's part of the tables: its tokens [start, end), the seam after its
// first chunk, and the number of its chunks.
struct DeltaDocument {
  int64_t document, start, end, seam, chunks;
  ULY_BOTH DeltaDocument(const int64_t *starts, const int64_t *before, int64_t document)
      : document(document),
        start(starts[document]),
        end(starts[document + 1]),
        seam(before[document] - document),
        chunks(before[document + 1] - before[document]) {}
  ULY_BOTH DeltaChunk at(int64_t i, int chunk) const {
    DeltaChunk c;
    c.document = document;
    c.token = start + i * chunk;
    c.rows = (int)least(chunk, end - c.token);
    c.seam = seam + i;
    c.first = i == 0;
    c.last = i + 1 == chunks;
    return c;
  }
};

// delta_chunk_at returns chunk i of a document.
ULY_BOTH DeltaChunk delta_chunk_at(const int64_t *start, const int64_t *chunks, int64_t document, int64_t i,
                                   int chunk) {
  return DeltaDocument(start, chunks, document).at(i, chunk);
}

// delta_document returns the document that has chunk or segment n of all documents. before
// [documents + 1] has the numbers in the preceding documents.
ULY_BOTH int64_t delta_document(const int64_t *before, int64_t documents, int64_t n) {
  int64_t lo = 0, hi = documents; // before[lo] <= n < before[hi]
  while (hi - lo > 1) {
    const int64_t mid = lo + (hi - lo) / 2;
    if (before[mid] <= n) lo = mid;
    else hi = mid;
  }
  return lo;
}

// delta_find returns chunk n of all documents.
ULY_BOTH DeltaChunk delta_find(const int64_t *start, const int64_t *chunks, int64_t documents, int64_t n, int chunk) {
  const int64_t document = delta_document(chunks, documents, n);
  return delta_chunk_at(start, chunks, document, n - chunks[document], chunk);
}

// DeltaSegment has the chunks [lo, hi) of a segment that are in a panel, counted from the start of
// the document. The joint after it is joint, the joint before it joint - 1.
struct DeltaSegment {
  int64_t document, lo, hi, joint;
  bool begins, ends;   // has the document's start, its end
  bool follows, leads; // a joint is before it, after it
};

// delta_segment_at returns segment n of all documents, within a panel of `of` chunks from chunk0
// on. chunks and segments are the tables.
ULY_BOTH DeltaSegment delta_segment_at(const int64_t *chunks, const int64_t *segments, int64_t documents, int64_t n,
                                       int64_t segment, int64_t chunk0, int64_t of) {
  DeltaSegment x;
  x.document = delta_document(segments, documents, n);
  const int64_t before = chunks[x.document], all = chunks[x.document + 1] - before, i = n - segments[x.document];
  const int64_t lo = most(chunk0 - before, 0), hi = least(chunk0 + of - before, all); // of the panel
  x.lo = most(i * segment, lo), x.hi = least((i + 1) * segment, hi);
  x.begins = x.lo == 0, x.ends = x.hi == all;
  x.follows = x.lo > lo, x.leads = x.hi < hi;
  x.joint = n - x.document;
  return x;
}

// DeltaBorder is a boundary between panels: the first chunk that begins at or after a token. If the
// chunk is not the first of its document, seam is the seam before it. The segments of the preceding
// panel end before segments_end. The following panel begins with segment. A segment that the border
// divides is in both.
struct DeltaBorder {
  int64_t chunk, token, document, seam, segment, segments_end;
  bool crossed; // by a document
};

// DeltaBorders finds borders. It keeps the document of the last border, so that all borders in
// order or in reverse order take one pass over the documents. It is for sequences with tokens.
struct DeltaBorders {
  const int64_t *cu, tokens, chunk, of;                   // of: chunks of a segment
  int64_t at = 0, document = 0, chunks = 0, segments = 0; // cu[at] is the start of `document`

  int64_t count() const { return ceil_div(cu[at + 1] - cu[at], chunk); }
  void pass(int by) { chunks += by * count(), segments += by * ceil_div(count(), of), document += by * (count() > 0); }
  DeltaBorder operator()(int64_t token) {
    token = least(token, tokens);
    for (; token > cu[at + 1]; at++) pass(1);
    while (token < cu[at]) at--, pass(-1);
    const int64_t i = ceil_div(token - cu[at], chunk);
    const bool end = i == count();
    const int64_t segments_end = segments + ceil_div(i, of);
    return {chunks + i,
            least(cu[at] + i * chunk, cu[at + 1]),
            document + (end && i > 0),
            chunks - document + most(i - 1, 0),
            end ? segments_end : segments + i / of,
            segments_end,
            i > 0 && !end};
  }
};
