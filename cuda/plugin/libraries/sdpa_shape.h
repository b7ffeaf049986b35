// Which calls of attention cuDNN gets, and with which arguments. The file includes no cuDNN;
// sdpa_shape_test.cpp tests it on the host.
//
// Documents of equal lengths, and single documents, are a dense call. Other documents are a packed
// call: cuDNN gets their offsets and lengths as arrays on the GPU. Building a plan takes up to a
// second. Therefore the number of documents, the longest document and the number of tokens of a
// packed call are rounded up, with empty documents at the end, and a new packing usually finds an
// existing plan.
#pragma once

#include <math.h>
#include <string.h>

#include "kernels/attention_index.h"

struct sdpa_strides {
  int64_t token, head;
};

// sdpa_shape is the key of a plan. Keys are compared byte by byte, including padding.
struct sdpa_shape {
  // packed: sq and sk are the lengths of the longest document, rounded up
  int64_t b, hq, hkv, sq, sk, d, dv;
  int64_t tokens_q, tokens_k; // of all documents; packed: rounded up
  sdpa_strides q, k, v, out, dout, dq, dk, dgv;
  // the window in cuDNN's terms: a query attends to this many keys, the last being its own; 0 = all
  int64_t left;
  int32_t causal; // right bound at the diagonal
  // the diagonal ends at the bottom right; otherwise it starts at the top left
  int32_t bottom_right;
  int32_t packed, backward;
  float scale;
  int32_t zero;
};

// cuDNN's masks hold indices in F32, which are exact up to SDPA_TOKENS. In the workspace that the
// frontend passes to the engine, the sums for all tokens come first. Multiples of SDPA_ROUND tokens
// keep the descriptors after them aligned.
enum : int64_t { SDPA_DOCUMENTS = 8192, SDPA_TOKENS = 1 << 24, SDPA_ROUND = 128 };

inline int64_t sdpa_bucket(int64_t n, int64_t least_) {
  int64_t p = least_;
  while (p < n) p *= 2;
  return p;
}

// sdpa_rows reports whether every query of a document with sq queries and sk keys attends to a key.
// For other queries, cuDNN's results differ from the results of the plug-in's kernels.
inline bool sdpa_rows(AttentionMask m, int64_t sq, int64_t sk) {
  return sk > 0 && (m.right < 0 || sk - sq + m.right >= 0);
}

// sdpa_by_lengths reports whether a dense call is sent as a packed call. This works around cuDNN
// bugs that occur if lengths are given by the extents of tensors, and not if they are given as
// arrays:
// - one query: out is wrong with a causal mask and shared key heads (release notes of 9.18.1), and
//   dk and dv are NaN if scores are far below zero (github.com/NVIDIA/cudnn-frontend/issues/1072);
// - backward without a causal mask: dq is NaN if all scores of a query are below -88 and a tile of
//   keys is not full (pull request 628 of the same repository);
// - backward with an odd number of statistics: the sums after them are not aligned to 16 bytes.
inline bool sdpa_by_lengths(const sdpa_shape &s) {
  return s.sq == 1 || (s.backward && ((!s.causal && s.sk % 128 != 0) || s.b * s.hq * s.sq % 4 != 0));
}

// sdpa_describe writes the shape of a call to *s and returns NULL, or returns why cuDNN does not
// get the call. a is a call of sdpa_split.h, with equal numbers of query heads for each key head.
// If cu_q is NULL, the result says whether cuDNN may get the call for some documents, and the shape
// is for one document.
inline const char *sdpa_describe(const AttentionArgs &a, sdpa_shape *s) {
  memset(static_cast<void *>(s), 0, sizeof *s);
  s->hq = a.q.shape[1], s->hkv = a.k.shape[1], s->d = a.q.shape[2], s->dv = a.v.shape[2];
  s->tokens_q = a.q.shape[0], s->tokens_k = a.k.shape[0];
  if (s->tokens_q == 0 || s->tokens_k == 0) return "there are no tokens";
  const uly_tensor *tensors[] = {&a.q, &a.k, &a.v, &a.out, &a.dout, &a.dq, &a.dk, &a.dv};
  // A query for workspace has no gradients. They are assumed to have the strides of their tensors.
  const bool gradients = a.backward && a.dq.ndim == 3;
  const int n = a.backward && gradients ? 8 : 4;
  for (int i = 0; i < n; i++) {
    const uly_tensor &t = *tensors[i];
    if (t.dtype != ULY_BF16) return "a type is not BF16";
    if (t.ndim != 3 || (t.shape[2] > 1 && t.stride[2] != 1)) return "the last axis of a tensor is not dense";
    if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return "memory is not aligned to 16 bytes";
    for (int axis = 0; axis < 2; axis++)
      if (t.shape[axis] > 1 && (t.stride[axis] % 8 != 0 || t.stride[axis] < t.shape[2]))
        return "a stride is not a multiple of 16 bytes";
  }
  // The backward pass of cuDNN 9.19 gives wrong dq and dk if a tensor extends over 2^31 elements;
  // out and dv are right (TestAttentionBeyond2To31 on an H100).
  auto last = [](const uly_tensor &t) { return (t.shape[0] - 1) * t.stride[0] + (t.shape[1] - 1) * t.stride[1]; };
  for (int i = 0; i < n && a.backward; i++)
    if (last(*tensors[i]) >= ((int64_t)1 << 31) - 256) return "backward of a tensor that extends over 2^31 elements";
  if (s->d % 8 != 0 || s->dv % 8 != 0 || s->d > 256 || s->dv > 256)
    return "head sizes are not multiples of 8, or exceed 256";
  if (s->tokens_q > SDPA_TOKENS || s->tokens_k > SDPA_TOKENS) return "there are more than 16 million tokens";
  if (!isfinite(a.scale)) return "the scale is not finite";

  const AttentionMask m = attention_mask(a);
  if (m.right > 0) return "the window includes later keys";
  s->causal = m.right == 0;
  s->left = m.left < 0 ? 0 : m.left + 1;
  s->scale = static_cast<float>(a.scale);
  s->backward = a.backward;

  // Wrong results on Hopper since 9.11. TransformerEngine does not use cuDNN for these sizes
  // either.
  if (s->backward && s->d != s->dv && least(s->d, s->dv) >= 128 && (s->d != 192 || s->dv != 128))
    return "backward with different head sizes of 128 or more";
  int64_t documents = 0;
  bool square = true, equal = true;
  for (int64_t i = 0; a.cu_q && i < a.cu_q.documents(); i++) {
    const int64_t sq = a.cu_q[i + 1] - a.cu_q[i], sk = a.cu_k[i + 1] - a.cu_k[i];
    if (sq == 0 && sk == 0) continue;
    // Before 9.25, cuDNN supports lengths of 0 only as padding, for queries and keys alike.
    if (sq == 0) return "a document has no queries";
    if (!sdpa_rows(m, sq, sk)) return "a query attends to no key";
    if (s->left && sq > sk) return "a document with a window has more queries than keys";
    equal = equal && (documents == 0 || (sq == s->sq && sk == s->sk));
    documents++;
    square = square && sq == sk;
    s->sq = most(s->sq, sq), s->sk = most(s->sk, sk);
  }
  if (!a.cu_q) {
    documents = 1;
    square = s->tokens_q == s->tokens_k;
    s->sq = s->tokens_q, s->sk = s->tokens_k;
  }
  if (documents > SDPA_DOCUMENTS) return "there are more than 8192 documents";
  s->bottom_right = !square && (s->causal || s->left);
  s->b = documents;
  s->packed = !equal || sdpa_by_lengths(*s);

  // The stride of an axis with one element is arbitrary. The dense stride is used, so that fewer
  // plans are built.
  auto strides = [](const uly_tensor &t) {
    const int64_t head = t.shape[1] > 1 ? t.stride[1] : t.shape[2];
    return sdpa_strides{t.shape[0] > 1 ? t.stride[0] : head * t.shape[1], head};
  };
  s->q = strides(a.q), s->k = strides(a.k), s->v = strides(a.v), s->out = strides(a.out);
  if (a.backward) {
    s->dout = strides(gradients ? a.dout : a.out);
    s->dq = strides(gradients ? a.dq : a.q), s->dk = strides(gradients ? a.dk : a.k),
    s->dgv = strides(gradients ? a.dv : a.v);
  }
  if (!s->packed) return nullptr;

  // cuDNN finds some sums by the token stride of a gradient, so all heads must lie within that
  // stride.
  auto by_token = [](const sdpa_strides &x, int64_t heads, int64_t width) {
    return x.head >= width && x.token >= (heads - 1) * x.head + width;
  };
  if (!by_token(s->q, s->hq, s->d) || !by_token(s->k, s->hkv, s->d) || !by_token(s->v, s->hkv, s->dv) ||
      !by_token(s->out, s->hq, s->dv))
    return "the heads of packed documents do not lie within a token's stride";
  if (a.backward && (!by_token(s->dout, s->hq, s->dv) || !by_token(s->dq, s->hq, s->d) ||
                     !by_token(s->dk, s->hkv, s->d) || !by_token(s->dgv, s->hkv, s->dv)))
    return "the heads of gradients of packed documents do not lie within a token's stride";
  if (a.backward && (s->d % 16 != 0 || s->dv % 16 != 0))
    return "backward of packed documents with head sizes that are not multiples of 16";
  s->b = sdpa_bucket(documents, 2);
  s->sq = sdpa_bucket(s->sq, 128), s->sk = sdpa_bucket(s->sk, 128);
  s->tokens_q = ceil_div(s->tokens_q, SDPA_ROUND) * SDPA_ROUND,
  s->tokens_k = ceil_div(s->tokens_k, SDPA_ROUND) * SDPA_ROUND;
  return nullptr;
}

// sdpa_layout is the plug-in's share of cuDNN's workspace, in bytes from the end of the tables of
// documents.
struct sdpa_layout {
  int64_t lengths_q, lengths_k; // [b] int32
  int64_t offsets;              // [SDPA_OFFSETS][b + 1] int64
  // the LSE in cuDNN's layout: F32, dense, [queries, heads] if packed, else [documents, heads,
  // queries]
  int64_t stats;
  int64_t plan; // start of cuDNN's own workspace
};
enum { SDPA_Q, SDPA_K, SDPA_V, SDPA_OUT, SDPA_STATS, SDPA_DOUT, SDPA_DQ, SDPA_DK, SDPA_DV, SDPA_OFFSETS };

inline sdpa_layout sdpa_layout_of(const sdpa_shape &s) {
  sdpa_layout l = {};
  Room room = {};
  if (s.packed) {
    l.lengths_q = room.take(s.b, 4), l.lengths_k = room.take(s.b, 4);
    l.offsets = room.take(SDPA_OFFSETS * (s.b + 1), 8);
  }
  l.stats = room.take(s.tokens_q * s.hq, 4);
  l.plan = room.bytes;
  return l;
}

// sdpa_statistics locates the LSE of a token and head in cuDNN's layout: [tokens, heads] if packed,
// else [documents, heads, rows].
struct sdpa_statistics {
  int64_t rows, document, token, head; // rows of a document, and strides
  ULY_BOTH int64_t at(int64_t t, int64_t h) const { return t / rows * document + t % rows * token + h * head; }
};
inline sdpa_statistics sdpa_statistics_of(const sdpa_shape &s) {
  if (s.packed) return {s.tokens_q, 0, s.hq, 1};
  return {s.sq, s.hq * s.sq, 1, s.sq};
}

// sdpa_token returns the unit of an array of offsets: the elements between two tokens of a tensor.
inline int64_t sdpa_token(const sdpa_shape &s, int which) {
  const int64_t tokens[SDPA_OFFSETS] = {s.q.token,    s.k.token,  s.v.token,  s.out.token, s.hq,
                                        s.dout.token, s.dq.token, s.dk.token, s.dgv.token};
  return tokens[which];
}

// sdpa_bound returns an upper bound of the bytes for a call with several documents, whatever their
// lengths. cuDNN does not get a call that needs more. In the backward pass, cuDNN sums dq over all
// tokens in F32, and dk and dv for every query head if several query heads share a key head.
inline int64_t sdpa_bound(const sdpa_shape &s) {
  sdpa_shape any = s;
  any.packed = 1;
  any.b = least(SDPA_DOCUMENTS, sdpa_bucket(s.tokens_q + s.tokens_k, 2));
  any.tokens_q = ceil_div(s.tokens_q, SDPA_ROUND) * SDPA_ROUND,
  any.tokens_k = ceil_div(s.tokens_k, SDPA_ROUND) * SDPA_ROUND;
  int64_t bytes = sdpa_layout_of(any).plan + (32 << 20);
  if (!s.backward) return bytes;
  auto row = [](const sdpa_strides &x, int64_t dense) { return most(x.token, dense); };
  bytes += 4 * any.tokens_q * (row(s.q, s.hq * s.d) + s.hq);
  const int64_t group = s.hq / s.hkv;
  if (group > 1) bytes += 4 * any.tokens_k * group * (row(s.k, s.hkv * s.d) + row(s.v, s.hkv * s.dv));
  return bytes;
}
