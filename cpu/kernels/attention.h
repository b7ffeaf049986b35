// Arguments of the attention kernels, their block sizes and the sizes of their scratch. Tensors are
// packed: [tokens][heads][features] with any strides of token and head, and dense features.
// Document d has queries cuQ[d] .. cuQ[d+1]-1 and keys cuK[d] .. cuK[d+1]-1.
#pragma once
#include <stdint.h>

enum {
  ATT_MQ = 192, // queries in a block: their transposed panel and its tiles of scores stay in L2
  ATT_NK = 96,  // keys in a block: a tile of probabilities stays in L1
  // row stride of matrices whose columns are queries: an odd number of cache lines, so that rows
  // are spread over the L1 sets
  ATT_LQ = 208,
  ATT_CHUNK = 256,    // keys of a task that adds partial sums
  ATT_MAX_SPLITS = 4, // most splits of a key head in the backward pass
  // most keys for which a worker keeps dk and dv of one query head, if a key head has several
  ATT_KEY_RANGE = 42 * ATT_NK,
};

// The width of a window side without a bound: more than any number of rows, and sums with it do not
// overflow.
#define ATT_UNBOUNDED ((int64_t)1 << 60)

// attention_block is a range of queries of one document. Indices are rows of the packed tensors.
typedef struct {
  int64_t q0, q1; // queries [q0, q1); q0 = q1 is a document without queries
  int64_t k0, k1; // keys [k0, k1) of the document
  // query row i is aligned with key row i + shift; keys i + shift - left .. i + shift + right are
  // visible to it
  int64_t shift;
  int64_t document; // index of the document
  // With a block mask, all queries of the block are in this row of blocks, and key row j is at
  // j + key_at in its sequence.
  int64_t mask_row, key_at;
} attention_block;

// attention_split is a range of blocks, the work of one task of the backward pass. A document may
// extend over several splits; dk and dv of its keys are then the sum over the splits:
//   - A split whose last document continues in the next split writes dk and dv of this document's
//     keys to a partial sum.
//   - The split in which such a document ends adds them to the destination, dk and dv. For the
//     second and later query heads of a key head it uses a partial sum as well, the tail, because
//     the splits of a head are added before the heads are.
//
// In BF16 the destination is a partial sum of all keys, at the start of the key head's partial
// sums: sums stay in F32 and are rounded once. The query heads of a key head are then one sum
// without tails: if the heads are split over ranks, rounding the ranks' sums to BF16 changes more
// than the order of additions.
typedef struct {
  int64_t b0, b1; // blocks [b0, b1)
  // keys [k0, k1) of the partial sum, none if k0 = k1, and its offset in floats; it is dk
  // [k1-k0][d] followed by dv [k1-k0][dv]
  int64_t k0, k1, offset;
  int64_t t0, t1, tail; // keys [t0, t1) of the tail, and its offset
} attention_split;

typedef struct {
  int64_t bf16;      // type of q, k, v and dout
  int64_t out_bf16;  // type of out
  int64_t grad_bf16; // type of dq, dk and dv
  const void *q, *k, *v, *dout;
  void *out, *dq, *dk, *dv;
  float *lse;
  // strides of a token (_t) and of a head (_h), in elements
  int64_t q_t, q_h, k_t, k_h, v_t, v_h, out_t, out_h, lse_t, lse_h, dout_t, dout_h;
  int64_t dq_t, dq_h, dk_t, dk_h, dv_t, dv_h;
  int64_t heads, d, d_v; // query heads; features of a key and of a value
  // visible keys before and after the aligned key of a query; causal is right = 0
  int64_t left, right;
  float scale;
  int64_t carry;      // out and lse are the result over other keys
  const float *sinks; // [heads] or NULL
  // Scores are capped, biased or dropped: kernels compute them in passes of their own
  // (attention_scored.inc).
  int64_t scored;
  float cap;           // 0 = off
  const float *slopes; // [heads] or NULL
  // Dropout: a weight is dropped if its 24 random bits are below `drop` (0 = off); the others are
  // multiplied by kept.
  int64_t drop;
  float kept;
  uint64_t seed;
  int64_t head_at, query_at, key_at;
  // [1 or heads][rows][mask_columns] or NULL; mask_h is the stride of a head
  const uint8_t *mask;
  int64_t mask_h, mask_columns, block_columns;
  float *dsinks, *dslopes; // [heads] or NULL
  double *slope_sums;      // [heads][ATT_MAX_SPLITS]: terms of dslopes; NULL without slopes
  int64_t queries;         // rows of q
  const attention_block *blocks;
  int64_t n_blocks, group; // group: blocks of a task of the forward pass
  const int64_t *kv_head;  // [heads]: key head of a query head
  // [kv heads + 1]: the query heads of key head h are first[h] .. first[h+1]-1
  const int64_t *first;
  const attention_split *splits;
  int64_t n_splits, kv0; // kv0: first key head of this run
  // this run computes query heads j0 .. j1-1 of each key head: all of them, or one at a time if
  // there are partial sums
  int64_t j0, j1;
  int64_t keys;   // rows of k
  float *partial; // [key heads of a wave][partial_floats]
  int64_t partial_floats;
  float *scratch; // [workers][scratch_floats]
  int64_t scratch_floats;
} attention_args;

static inline int64_t attention_pad(int64_t n) { return (n + 63) / 64 * 64; }

// attention_spread is the row stride of copies of d features: an odd number of cache lines, so that
// rows are spread over the L1 sets.
static inline int64_t attention_spread(int64_t d) { return ((d + 15) / 16 | 1) * 16; }

// attention_bf16_floats is the additional scratch of BF16 in floats: a block of keys and values in
// the form in which the products read them, and probabilities in BF16.
static inline int64_t attention_bf16_floats(int64_t d, int64_t dv) {
  return ATT_NK * (attention_spread(d) + attention_spread(dv)) + ATT_NK / 2 * ATT_LQ;
}

// attention_forward_floats is the scratch of one worker in floats: Q transposed, scores, output
// transposed, running maximum and sum.
static inline int64_t attention_forward_floats(int64_t d, int64_t dv, int64_t bf16) {
  return (d + ATT_NK + dv + 2) * ATT_LQ + (bf16 ? attention_bf16_floats(d, dv) : 0);
}

// attention_backward_floats is the scratch of one worker in floats: Q, dO and dQ transposed,
// probabilities and gradients of scores, logsumexp and delta, dense copies of Q and dO, and dK and
// dV of one query head, for F32 and key heads with several query heads. If scores are capped,
// biased or dropped, gradients of probabilities and the rounding of logsumexp as well.
static inline int64_t attention_backward_floats(int64_t d, int64_t dv, int64_t bf16, int64_t grouped, int64_t scored) {
  return (scored ? (ATT_NK + 1) * ATT_LQ : 0) + (2 * d + dv + 2 * ATT_NK + 2) * ATT_LQ +
         ATT_MQ * (attention_pad(d) + attention_pad(dv)) +
         (bf16      ? attention_bf16_floats(d, dv)
          : grouped ? ATT_KEY_RANGE * (d + dv)
                    : 0);
}
