// Arguments of the gated delta kernels, and the layout of their memory.
#pragma once
#include <stdint.h>

enum {
  DELTA_C = 64, // most tokens of a chunk
  // row stride of what is [tokens][tokens]: an odd number of cache lines, so that rows spread over
  // the L1 sets
  DELTA_LC = 80,
  DELTA_RUN = 512,  // documents up to as many tokens together are one task of a head
  DELTA_ROWS = 256, // tokens of a task that adds up value heads
};

// delta_document is one that is not empty.
typedef struct {
  int64_t t0, t1; // its tokens
  int64_t index;  // among all documents
  // saved states of a head before its own: one a chunk but the first, whose state is StateIn's or
  // zero
  int64_t states;
} delta_document;

typedef struct {
  const void *q, *k, *v, *dout; // of the compute type
  void *out, *dq, *dk, *dv;
  const float *g, *beta;
  float *dg, *dbeta;
  // strides of a token and of a head
  int64_t q_t, q_h, k_t, k_h, v_t, v_h, g_t, g_h, beta_t, beta_h, out_t, out_h, dout_t, dout_h;
  int64_t dq_t, dq_h, dk_t, dk_h, dv_t, dv_h, dg_t, dg_h, dbeta_t, dbeta_h;
  int64_t heads, key_heads, d_k, d_v, tokens, chunk, l2norm, per_head;
  int64_t bf16;
  float scale;
  const float *state_in, *dstate_out; // [documents][heads][d_k][d_v]
  float *state_out, *dstate_in;
  // documents [0, with_in) have a state before them, those from from_out on one behind them
  int64_t with_in, from_out;
  // of DeltaState and DeltaStateGrad: [heads][d_k][d_v], [heads][d_k][d_k]
  float *state, *transition;
  const delta_document *documents;
  const int64_t *runs; // [n_runs + 1]: run r is documents runs[r] .. runs[r+1]-1
  int64_t n_runs;
  const int64_t *key_head; // [heads]
  // [key heads + 1]: the value heads of key head h are first[h] .. first[h+1]-1
  const int64_t *first;
  // [heads][saved_floats], or NULL: corrections [tokens][delta_ld(d_v)], then states
  // [..][d_k·delta_pad(d_v)]
  float *saved;
  int64_t saved_floats;
  float *scratch; // [workers][scratch_floats]
  int64_t scratch_floats;
  // backward's tasks are value heads; dq and dk of all but a key head's first one then wait in
  int64_t apart;
  // [heads that are not their key head's first][dq, dk][tokens][d_k], of the compute type
  void *waiting;
} delta_args;

// a whole number of panels of any instruction set
static inline int64_t delta_pad(int64_t n) { return (n + 31) / 32 * 32; }
// an odd number of cache lines
static inline int64_t delta_ld(int64_t n) { return delta_pad(n) + 16; }

// delta_forward_floats: K, Q, scaled K; K transposed; scores of either; corrections; the state; in
// BF16 values and results in F32.
static inline int64_t delta_forward_floats(int64_t dk, int64_t dv, int64_t bf16) {
  return DELTA_C * (3 * delta_ld(dk) + dk + 2 * DELTA_LC + (bf16 ? 2 : 1) * delta_ld(dv)) + dk * delta_pad(dv);
}

// delta_state_floats: DeltaState has as many columns for the transition; DeltaStateGrad dout twice
// and the corrections' gradient twice, more than DeltaState's values in F32.
static inline int64_t delta_state_floats(int64_t dk, int64_t dv) {
  return delta_forward_floats(dk, dv, 0) + DELTA_C * (4 * delta_ld(dv) + delta_ld(dk)) + dk * delta_pad(dk);
}

// delta_backward_floats: K, Q, dK, dQ; K transposed; dout and the corrections' gradient, each
// twice; corrections transposed; five times scores; the state and its gradient transposed; the
// gradient, and a state that came in.
static inline int64_t delta_backward_floats(int64_t dk, int64_t dv) {
  return DELTA_C * (4 * delta_ld(dk) + dk + 4 * delta_ld(dv) + dv + 5 * DELTA_LC) + 2 * dv * delta_ld(dk) +
         2 * dk * delta_pad(dv);
}
