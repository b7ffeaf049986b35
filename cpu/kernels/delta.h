// Arguments of the kernels of the gated delta rule (Yang, Kautz & Hatamizadeh 2024,
// arXiv:2412.06464), and the sizes of their scratch. Tensors are [tokens][heads][features] with any
// strides of token and head, and dense features; a key head serves one or several value heads.
#pragma once
#include <stdint.h>

enum {
  DELTA_C = 64, // most tokens of a chunk
  // row stride of [tokens][tokens] matrices of a chunk: an odd number of cache lines, so that rows
  // are spread over the L1 sets
  DELTA_LC = 80,
  DELTA_GROUP = 512, // documents with at most this many tokens together form one task of a head
  DELTA_ROWS = 256,  // tokens of a task that adds the gradients of value heads
};

// delta_document is a document with tokens.
typedef struct {
  int64_t t0, t1; // tokens [t0, t1)
  int64_t index;  // among all documents, empty ones included
  // number of saved states of a head in the documents before; a document saves one state for each
  // chunk but the first, whose state is StateIn or zero
  int64_t states;
} delta_document;

typedef struct {
  const void *q, *k, *v, *dout; // compute type
  void *out, *dq, *dk, *dv;
  const float *g, *beta;
  float *dg, *dbeta;
  // strides of a token (_t) and of a head (_h), in elements
  int64_t q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, out_t, out_h, dout_t, dout_h;
  int64_t dq_t, dq_h, dk_t, dk_h, dv_t, dv_h, dg_t, dg_h, dbeta_t, dbeta_h;
  int64_t heads, key_heads, d_k, d_v, tokens, chunk, l2norm, per_head;
  int64_t bf16;
  float scale;
  const float *state_in, *dstate_out; // [documents][heads][d_k][d_v]
  float *state_out, *dstate_in;
  // documents [0, with_in) start from a state in state_in; documents from from_out on write their
  // last state to state_out
  int64_t with_in, from_out;
  // DeltaState and DeltaStateGrad: [heads][d_k][d_v], [heads][d_k][d_k]
  float *state, *transition;
  const delta_document *documents;
  const int64_t *groups; // [n_groups + 1]: group r is documents groups[r] .. groups[r+1]-1
  int64_t n_groups;
  const int64_t *key_head; // [heads]
  // [key heads + 1]: the value heads of key head h are first[h] .. first[h+1]-1
  const int64_t *first;
  // [heads][saved_floats], or NULL: corrections [tokens][delta_ld(d_v)], then states
  // [..][d_k·delta_pad(d_v)]
  float *saved;
  int64_t saved_floats;
  float *scratch; // [workers][scratch_floats]
  int64_t scratch_floats;
  // The tasks of the backward pass are value heads. dq and dk of the first value head of a key head
  // are written to the tensors; dq and dk of the other value heads are written to extra, and
  // delta_add_heads adds them.
  int64_t by_value_head;
  // [value heads that are not the first of their key head][dq, dk][tokens][d_k], compute type
  void *extra;
} delta_args;

// a whole number of panels of any instruction set
static inline int64_t delta_pad(int64_t n) { return (n + 31) / 32 * 32; }
// an odd number of cache lines
static inline int64_t delta_ld(int64_t n) { return delta_pad(n) + 16; }

// delta_forward_floats is the scratch of one worker in floats: K, Q and scaled K; K transposed; the
// scores of K and Q; corrections; the state; in BF16 also values and results in F32.
static inline int64_t delta_forward_floats(int64_t dk, int64_t dv, int64_t bf16) {
  return DELTA_C * (3 * delta_ld(dk) + dk + 2 * DELTA_LC + (bf16 ? 2 : 1) * delta_ld(dv)) + dk * delta_pad(dv);
}

// delta_state_floats is the scratch of DeltaState and DeltaStateGrad in floats. DeltaState needs
// columns for the transition as well; DeltaStateGrad needs dout twice and the gradient of the
// corrections twice, which is more than the F32 values of DeltaState.
static inline int64_t delta_state_floats(int64_t dk, int64_t dv) {
  return delta_forward_floats(dk, dv, 0) + DELTA_C * (4 * delta_ld(dv) + delta_ld(dk)) + dk * delta_pad(dk);
}

// delta_backward_floats is the scratch of one worker in floats: K, Q, dK, dQ; K transposed; dout
// and the gradient of the corrections, each twice; corrections transposed; five matrices of scores;
// the state and its gradient transposed; the gradient, and an incoming state.
static inline int64_t delta_backward_floats(int64_t dk, int64_t dv) {
  return DELTA_C * (4 * delta_ld(dk) + dk + 4 * delta_ld(dv) + dv + 5 * DELTA_LC) + 2 * dv * delta_ld(dk) +
         2 * dk * delta_pad(dv);
}
