// Arguments of the attention kernels, and the layout of their workspace.
#pragma once
#include <stdint.h>

enum {
  ATT_MQ = 192, // queries in a block: their transposed panel and its tiles of scores stay in L2
  ATT_NK = 96,  // keys in a block: a tile of probabilities stays in L1
  // row stride of what has queries as lanes: an odd number of cache lines, so that rows spread over
  // the L1 sets
  ATT_LQ = 208,
  ATT_CHUNK = 256, // key rows in a task that adds partial sums
  ATT_PARTS = 4,   // most parts of a key head in the backward pass
  // most keys whose dk and dv a worker holds for one of several query heads of a key head
  ATT_RUN = 42 * ATT_NK,
};

// A side of the window that has no bound: far beyond every row, and far from overflow.
#define ATT_UNBOUNDED ((int64_t)1 << 60)

// attention_block is a run of queries of one document. All indices are rows of the packed tensors.
typedef struct {
  int64_t q0, q1; // the queries; q0 = q1 marks a document of keys alone
  int64_t k0, k1; // the document's keys
  // query row i stands at key row i + shift: it sees the keys from left of there to right of there
  int64_t shift;
  int64_t document; // index of the document
} attention_block;

// attention_part is the share of the blocks that one task of the backward pass works through. Key
// gradients of the last document go to a partial sum if later parts go on with it. Those of the
// first, if it began in earlier parts and ends here, go where they belong, but for the second query
// head of a key head and those behind it to a partial sum too, the tail: parts are added up before
// heads are.
//
// In BF16 dk and dv belong in partial sums as well, of all keys, at the start of a key head's: what
// is added up stays in F32 and is rounded once. There a key head's query heads are one sum, for
// where they are split over ranks the shares' rounding is more than any order of additions; so
// there are no tails.
typedef struct {
  int64_t b0, b1; // blocks
  // keys of the partial sum, k0 = k1 where there is none, and its place in floats: [k1-k0][d], then
  // [k1-k0][dv]
  int64_t k0, k1, offset;
  int64_t t0, t1, tail; // the same of the tail
} attention_part;

typedef struct {
  int64_t bf16; // q, k, v, dout, out, dq, dk and dv are of the compute type
  const void *q, *k, *v, *dout;
  void *out, *dq, *dk, *dv;
  float *lse;
  // strides of a token and of a head
  int64_t q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, lse_t, lse_h, dout_t, dout_h;
  int64_t dq_t, dq_h, dk_t, dk_h, dv_t, dv_h;
  int64_t heads, d, d_v;
  // keys that a query sees on either side of where it stands; causal is right 0
  int64_t left, right;
  float scale;
  const attention_block *blocks;
  int64_t n_blocks, group; // group: blocks in a task of the forward pass
  const int64_t *kv_head;  // [heads]
  // [kv heads + 1]: the query heads of key head h are first[h] .. first[h+1]-1
  const int64_t *first;
  const attention_part *parts;
  int64_t n_parts, kv0; // kv0: the first key head of this wave
  // query heads of each key head's that are this run's: all, or one where parts meet in partial
  // sums
  int64_t j0, j1;
  int64_t keys;   // rows of k
  float *partial; // [key heads of a wave][partial_floats]
  int64_t partial_floats;
  float *scratch; // [workers][scratch_floats]
  int64_t scratch_floats;
} attention_args;

static inline int64_t attention_pad(int64_t n) { return (n + 63) / 64 * 64; }

// attention_spread is the row stride of copies of d features: an odd number of cache lines.
static inline int64_t attention_spread(int64_t d) { return ((d + 15) / 16 | 1) * 16; }

// attention_bf16_floats is what BF16 takes beside: a block of keys and values as products read
// them, and probabilities in BF16.
static inline int64_t attention_bf16_floats(int64_t d, int64_t dv) {
  return ATT_NK * (attention_spread(d) + attention_spread(dv)) + ATT_NK / 2 * ATT_LQ;
}

// attention_forward_floats is one worker's scratch: Q transposed, scores, output transposed,
// running maximum and sum.
static inline int64_t attention_forward_floats(int64_t d, int64_t dv, int64_t bf16) {
  return (d + ATT_NK + dv + 2) * ATT_LQ + (bf16 ? attention_bf16_floats(d, dv) : 0);
}

// attention_backward_floats: Q, dO, dQ transposed, probabilities and their gradients, logsumexp and
// delta, dense copies of Q and dO, and in F32 where key heads serve several query heads dK and dV
// of one of these.
static inline int64_t attention_backward_floats(int64_t d, int64_t dv, int64_t bf16, int64_t grouped) {
  return (2 * d + dv + 2 * ATT_NK + 2) * ATT_LQ + ATT_MQ * (attention_pad(d) + attention_pad(dv)) +
         (bf16      ? attention_bf16_floats(d, dv)
          : grouped ? ATT_RUN * (d + dv)
                    : 0);
}
