// Declarations that the sources of attention share: the arguments of the kernels, the kernels by
// head size, and the upload of the tables of documents.
#pragma once

#include "attention_index.h"
#include "plugin.h"

// AttentionView is a tensor [tokens, heads, width]. token and head are strides in elements. wide:
// four elements can be accessed as one vector; vectors: 16 bytes can.
struct AttentionView {
  void *data;
  int64_t token, head;
  int32_t width;
  bool bf16, wide, vectors;
};

// AttentionScores has what changes or hides scores; the scored kernels read it.
struct AttentionScores {
  float cap, per_cap;  // cap 0 = off
  const float *slopes; // [heads]; NULL = none
  uint32_t drop;       // dropout's probability times 2^24; 0 = off
  float kept;          // factor of the weights that dropout keeps
  uint64_t seed;
  int64_t head_at, query_at, key_at;                     // numbers of the first head, query and key
  const uint8_t *blocks;                                 // [1 or heads][rows of blocks][block_columns]; NULL = none
  int64_t blocks_head, blocks_row;                       // strides
  int64_t query_seq, key_seq, block_rows, block_columns; // in tokens
};

// AttentionCall has the arguments of the kernels.
struct AttentionCall {
  AttentionView q, k, v, out, dout, dq, dk, dv;
  float *lse;
  int64_t lse_token, lse_head;
  int64_t heads, kv_heads, queries, keys; // queries and keys of all documents
  int64_t documents, count_q, count_k;    // count_q, count_k: tiles of one head
  const int64_t *cu_q, *cu_k, *tiles_q, *tiles_k, *shift, *kv_head, *first;
  AttentionMask mask;
  float scale;
  float *delta, *sums;
  float *dq_sums;          // [heads][queries][d], in the order of add_to_sums; NULL = blocks do not add to dq
  const float *sinks;      // [heads]; NULL = none
  float *dsinks, *dslopes; // [heads]; NULL = not wanted
  float *terms;            // [heads][queries], terms of dslopes; NULL = not wanted
  AttentionScores scores;
  bool carry; // out and lse are the result over other keys
};

typedef void (*AttentionKernel)(AttentionCall);

// The kernels, by the index of their sizes in attention_sizes.
extern const AttentionKernel attention_forward_kernels[ATTENTION_SIZES], attention_dq_kernels[ATTENTION_SIZES],
    attention_dkv_kernels[ATTENTION_SIZES];
// The same with AttentionScores.
extern const AttentionKernel attention_scored_forward_kernels[ATTENTION_SIZES],
    attention_scored_dq_kernels[ATTENTION_SIZES], attention_scored_dkv_kernels[ATTENTION_SIZES];
__global__ void attention_delta(AttentionCall a);
// attention_head_sums writes dsinks and dslopes. It needs delta and the terms.
__global__ void attention_head_sums(AttentionCall a);

// The kernels on tensor cores, by the index of their sizes in attention_mma_sizes.
// attention_mma_begun_kernels are forward kernels for a softmax that has begun.
// attention_mma_gradient_kernels compute dk and dv and add to the sums of dq, from which
// attention_mma_dq_finish writes dq.
extern const AttentionKernel attention_mma_forward_kernels[ATTENTION_MMA_SIZES],
    attention_mma_begun_kernels[ATTENTION_MMA_SIZES], attention_mma_dq_kernels[ATTENTION_MMA_SIZES];
extern const AttentionKernel attention_mma_dkv_kernels[ATTENTION_MMA_SIZES],
    attention_mma_gradient_kernels[ATTENTION_MMA_SIZES];
// The kernels for Hopper, without AttentionScores.
extern const AttentionKernel attention_wgmma_forward_kernels[ATTENTION_MMA_SIZES],
    attention_wgmma_begun_kernels[ATTENTION_MMA_SIZES];
extern const AttentionKernel attention_wgmma_dq_kernels[ATTENTION_WGMMA_BACK_SIZES],
    attention_wgmma_dkv_kernels[ATTENTION_WGMMA_BACK_SIZES], attention_wgmma_delta_kernels[ATTENTION_WGMMA_BACK_SIZES];
// The same with AttentionScores; forward kernels also for a softmax that has begun.
extern const AttentionKernel attention_mma_scored_forward_kernels[ATTENTION_MMA_SIZES],
    attention_mma_scored_dq_kernels[ATTENTION_MMA_SIZES], attention_mma_scored_dkv_kernels[ATTENTION_MMA_SIZES],
    attention_mma_scored_gradient_kernels[ATTENTION_MMA_SIZES];
__global__ void attention_mma_delta(AttentionCall a);
__global__ void attention_mma_dq_finish(AttentionCall a);

// attention_upload writes the tables of documents and heads to the workspace, in stream order
// (tables.h).
int32_t attention_upload(uly_device *d, uly_stream *s, const uly_attention *a, const AttentionLayout &l, int64_t tile_q,
                         int64_t tile_k);

// attention_check fails for arguments with which a kernel would access memory outside of its
// tensors.
int32_t attention_check(uly_device *d, const AttentionArgs &a);
