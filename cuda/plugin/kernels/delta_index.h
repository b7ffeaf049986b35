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

ULY_BOTH int up16(int n) { return (n + 15) / 16 * 16; }
ULY_BOTH int up32(int n) { return (n + 31) / 32 * 32; }

constexpr float DELTA_EPS = 1e-6f; // added under the square root of the L2 norm of q and k

// Bytes of shared memory. All are less than 99 KiB, the smallest limit of any GPU for a block.
// DELTA_WIDE and DELTA_NARROW are padded rows of dense tiles of 64 and 32 columns.
constexpr int DELTA_WIDE = DELTA_CHUNK + 8, DELTA_NARROW = DELTA_SLICE + 8;
constexpr int64_t DELTA_PREPARE = 4 * (2 * DELTA_CHUNK * DELTA_WIDE + DELTA_CHUNK * DELTA_WIDE + 5 * DELTA_CHUNK);
constexpr int64_t DELTA_OUT = 4 * (DELTA_CHUNK * DELTA_WIDE + DELTA_CHUNK * (DELTA_CHUNK + 4));
constexpr int64_t DELTA_GRADIENTS =
    4 * (2 * DELTA_CHUNK * DELTA_WIDE + 5 * DELTA_CHUNK * DELTA_NARROW + 18 * DELTA_CHUNK);
inline int64_t delta_scan_bytes(int dim_k, int chunk) {
  return 4 * ((int64_t)chunk * (up32(dim_k) + 8) + up16(dim_k) * (DELTA_SLICE + 4) + chunk * (chunk + 8) +
              2 * chunk * (DELTA_SLICE + 4) + 4 * chunk);
}

// DeltaShape has the extents that sizes depend on.
struct DeltaShape {
  int64_t tokens, key_heads, value_heads, dk, dv;
  int64_t chunk;           // tokens of a chunk, a multiple of 16
  const int64_t *key_head; // NULL: h / (value heads / key heads)

  int64_t key(int64_t h) const { return key_head ? key_head[h] : h / (value_heads / key_heads); }
};

// delta_chunk returns the tokens of a chunk, at most `limit` (0: no limit). Chunks of wide keys are
// shorter, so that a chunk and a slice of the state fit into the shared memory of any GPU.
inline int64_t delta_chunk(int64_t limit, int64_t dk) {
  const int64_t full = dk > 128 ? 32 : DELTA_CHUNK;
  return limit <= 0 || limit >= full ? full : limit / 16 * 16;
}

inline DeltaShape delta_shape(int64_t tokens, int64_t key_heads, int64_t value_heads, int64_t dk, int64_t dv,
                              int64_t chunk, const int64_t *key_head) {
  return {tokens, key_heads, value_heads, dk, dv, delta_chunk(chunk, dk), key_head};
}

// A call is computed in panels: ranges of the sequence with all heads. The state of the document
// that continues in the next panel is carried through memory in F32. Therefore the recurrence runs
// over the sequence once, results do not depend on the panels, and the intermediate results of a
// panel need DELTA_PANEL_BYTES, however long the sequence is. The forward pass saves the carried
// states; the backward pass computes panel by panel, from the last to the first, and computes the
// intermediate results of each panel again from its carried state.

// delta_row returns the bytes of intermediate results of a token and value head in the backward
// pass.
inline int64_t delta_row(const DeltaShape &s) {
  return 16 + 4 * (2 * s.chunk + 2 * s.dv + 2 * s.dk) + ceil_div(8 * s.dk * s.dv, s.chunk);
}

// delta_span returns the tokens of a panel, a multiple of the chunk. Panel n has the chunks that
// begin at tokens [n·span, (n + 1)·span).
inline int64_t delta_span(const DeltaShape &s) {
  const int64_t chunk = most(s.value_heads, 1) * delta_row(s) * s.chunk;
  return most(2, DELTA_PANEL_BYTES / chunk) * s.chunk;
}
inline int64_t delta_panels(const DeltaShape &s) { return most(1, ceil_div(s.tokens, delta_span(s))); }

// delta_state returns the bytes of the states of all heads.
inline int64_t delta_state(const DeltaShape &s) { return s.value_heads * s.dk * s.dv * 4; }

// Saved has the matrices T, [value heads][T][chunk] F32, then the carried states [panels - 1].
inline int64_t delta_saved_states(const DeltaShape &s) {
  return ceil_div(s.value_heads * s.tokens * s.chunk * 4, 256) * 256;
}
inline int64_t delta_saved(const DeltaShape &s) {
  return delta_saved_states(s) + ceil_div((delta_panels(s) - 1) * delta_state(s), 256) * 256;
}

enum DeltaPass { DELTA_FORWARD, DELTA_BACKWARD, DELTA_STATE };

// DeltaLayout is the layout of a workspace, in byte offsets: tables (int64), the carried states,
// and the intermediate results of a panel. All intermediate results but states have `rows` rows for
// each head.
struct DeltaLayout {
  // start [documents + 1]: first token; chunks [documents + 1]: number of chunks in the preceding
  // documents; document [documents]: index in the call's list
  int64_t start, chunks, document;
  int64_t key_head, first;     // [value heads] key head; [key heads + 1] first value head
  int64_t carried[2];          // [value heads][dk][dv] F32, used by panels alternately
  int64_t rows;                // most tokens of a panel
  int64_t slots;               // most states of a panel
  int64_t unit_q, unit_k;      // [key heads][rows] F32, with L2Norm
  int64_t decay;               // [value heads][rows] float4
  int64_t solve, scores, keys; // [value heads][rows][chunk] F32
  int64_t x, y;                // [value heads][rows][dv] F32
  int64_t dq, dk;              // [value heads][rows][dk] F32
  int64_t states, dstates;     // [value heads][slots][dk][dv] F32
  int64_t bytes;
};

// delta_layout returns the layout. `documents` counts documents with tokens; only the tables depend
// on it.
inline DeltaLayout delta_layout(const DeltaShape &s, int64_t documents, DeltaPass pass) {
  DeltaLayout l = {};
  auto take = [&](int64_t n, int64_t size) {
    const int64_t at = l.bytes;
    l.bytes = ceil_div(at + n * size, 256) * 256;
    return at;
  };
  l.start = take(documents + 1, 8);
  l.chunks = take(documents + 1, 8);
  l.document = take(documents, 8);
  l.key_head = take(s.value_heads, 8);
  l.first = take(s.key_heads + 1, 8);
  if (pass != DELTA_STATE && delta_panels(s) > 1)
    for (int64_t &at : l.carried) at = take(delta_state(s), 1);
  // The last chunk of a panel can end up to a chunk after the panel's tokens.
  l.rows = least(s.tokens, delta_span(s) + s.chunk);
  l.slots = least(s.tokens, delta_span(s)) / s.chunk + 1; // with the state before the first chunk
  const int64_t n = s.value_heads * l.rows;
  l.unit_q = take(s.key_heads * l.rows, 4);
  l.unit_k = take(s.key_heads * l.rows, 4);
  l.decay = take(n, 16);
  l.scores = take(n * s.chunk, 4);
  if (pass == DELTA_BACKWARD) l.keys = take(n * s.chunk, 4);
  else l.solve = take(n * s.chunk, 4);
  if (pass == DELTA_STATE) return l;
  l.x = take(n * s.dv, 4);
  l.states = take(l.slots * delta_state(s), 1);
  if (pass == DELTA_FORWARD) return l;
  l.y = take(n * s.dv, 4);
  l.dq = take(n * s.dk, 4);
  l.dk = take(n * s.dk, 4);
  l.dstates = take(l.slots * delta_state(s), 1);
  return l;
}

inline int64_t delta_documents(const int64_t *cu, int64_t documents, int64_t tokens) {
  if (!cu) return tokens;
  int64_t n = 0;
  for (int64_t i = 0; i < documents; i++) n += cu[i + 1] > cu[i];
  return n;
}

// delta_tables calls put(byte offset, value) for every entry of the tables, and returns the number
// of chunks of all documents. Documents without tokens are skipped unless `all` is true.
template <class Put> int64_t delta_tables(const DeltaShape &s, const DeltaLayout &l, const int64_t *cu,
                                          int64_t documents, bool all, Put put) {
  int64_t n = 0, chunks = 0;
  put(l.start, 0);
  put(l.chunks, 0);
  for (int64_t i = 0; i < documents; i++) {
    if (cu[i + 1] == cu[i] && !all) continue;
    chunks += ceil_div(cu[i + 1] - cu[i], s.chunk);
    put(l.document + 8 * n, i);
    n++;
    put(l.start + 8 * n, cu[i + 1]);
    put(l.chunks + 8 * n, chunks);
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

// delta_chunk_at returns chunk i of a document.
ULY_BOTH DeltaChunk delta_chunk_at(const int64_t *start, const int64_t *chunks, int64_t document, int64_t i,
                                   int chunk) {
  DeltaChunk c;
  c.document = document;
  c.token = start[document] + i * chunk;
  c.rows = (int)least(chunk, start[document + 1] - c.token);
  c.seam = chunks[document] - document + i;
  c.first = i == 0;
  c.last = chunks[document] + i + 1 == chunks[document + 1];
  return c;
}

// delta_find returns chunk n of all documents.
ULY_BOTH DeltaChunk delta_find(const int64_t *start, const int64_t *chunks, int64_t documents, int64_t n, int chunk) {
  int64_t lo = 0, hi = documents; // chunks[lo] <= n < chunks[hi]
  while (hi - lo > 1) {
    const int64_t mid = lo + (hi - lo) / 2;
    if (chunks[mid] <= n) lo = mid;
    else hi = mid;
  }
  return delta_chunk_at(start, chunks, lo, n - chunks[lo], chunk);
}

// DeltaBorder is a boundary between panels: the first chunk that begins at or after a token. If the
// chunk is not the first of its document, seam is the seam before it.
struct DeltaBorder {
  int64_t chunk, token, document, seam;
  bool crossed; // by a document
};

// DeltaBorders finds borders. It keeps the document of the last border, so that all borders in
// order or in reverse order take one pass over the documents. It is for sequences with tokens.
struct DeltaBorders {
  const int64_t *cu, tokens, chunk;
  int64_t at = 0, document = 0, chunks = 0; // cu[at] is the start of `document`

  int64_t count() const { return ceil_div(cu[at + 1] - cu[at], chunk); }
  DeltaBorder operator()(int64_t token) {
    token = least(token, tokens);
    for (; token > cu[at + 1]; at++) chunks += count(), document += cu[at + 1] > cu[at];
    while (token < cu[at]) at--, chunks -= count(), document -= cu[at + 1] > cu[at];
    const int64_t i = ceil_div(token - cu[at], chunk);
    const bool end = i == count();
    return {chunks + i, least(cu[at] + i * chunk, cu[at + 1]), document + (end && i > 0),
            chunks - document + most(i - 1, 0), i > 0 && !end};
  }
};
