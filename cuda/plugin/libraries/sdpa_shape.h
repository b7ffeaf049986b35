// Which attention cuDNN is asked for, and what it is told: no cuDNN in here, so that the host can
// test it.
//
// Documents of one length, and a single one, are a dense call. Others are packed: cuDNN then gets
// offsets and lengths as arrays on the GPU. A plan takes up to a second to build, so packed calls
// are told a rounded number of documents (those that are missing are empty), a rounded longest
// document and a rounded number of tokens: a new packing mostly finds its plan.
#pragma once

#include <math.h>
#include <string.h>

#include "kernels/attention_index.h"

struct sdpa_strides {
  int64_t token, head;
};

// All fields together are the key under which a plan is kept, compared byte by byte.
struct sdpa_shape {
  int64_t b, hq, hkv, sq, sk, d, dv; // packed: sq and sk of the longest document, rounded up
  int64_t tokens_q, tokens_k;        // in all; packed: rounded up
  sdpa_strides q, k, v, out, dout, dq, dk, dgv;
  // as cuDNN counts: a query sees this many keys up to its own; 0 = all
  int64_t left;
  int32_t causal;       // right bound at the diagonal
  int32_t bottom_right; // where the diagonal ends; without it, it starts top left
  int32_t packed, backward;
  float scale;
  int32_t zero;
};

// More tokens than SDPA_TOKENS are no indices in F32, which cuDNN's masks have. The workspace that
// its frontend hands on begins behind sums for all tokens; of whole SDPA_ROUND they leave it as
// aligned as they found it, which descriptors in it need.
enum : int64_t { SDPA_DOCUMENTS = 8192, SDPA_TOKENS = 1 << 24, SDPA_ROUND = 128 };

inline int64_t sdpa_bucket(int64_t n, int64_t least_) {
  int64_t p = least_;
  while (p < n) p *= 2;
  return p;
}

// sdpa_rows: every query of a document of sq queries and sk keys sees a key. cuDNN's results for
// others are not what ours are.
inline bool sdpa_rows(AttentionMask m, int64_t sq, int64_t sk) {
  return sk > 0 && (m.right < 0 || sk - sq + m.right >= 0);
}

// sdpa_by_lengths: a dense call that is asked as a packed one, for what cuDNN gets wrong where
// lengths are extents of tensors and not where it is told them:
//  - one query: with a causal mask and shared key heads out is wrong (release notes of 9.18.1); dk and dv are NaN where scores are far below zero
//    (github.com/NVIDIA/cudnn-frontend/issues/1072);
//  - backward without a causal mask: dq is NaN where all scores of a query are below -88 and a tile of keys is not full (pull request 628 there);
//  - backward: sums behind an odd number of statistics, which are not aligned to 16 bytes.
inline bool sdpa_by_lengths(const sdpa_shape &s) {
  return s.sq == 1 || (s.backward && ((!s.causal && s.sk % 128 != 0) || s.b * s.hq * s.sq % 4 != 0));
}

// sdpa_describe is NULL when cuDNN is asked, else why it is not; a is a part of sdpa_parts.h, whose
// query heads are spread evenly. With cu_q NULL, whether it may be for some documents; the shape is
// then of one.
inline const char *sdpa_describe(const AttentionArgs &a, sdpa_shape *s) {
  memset(static_cast<void *>(s), 0, sizeof *s);
  s->hq = a.q.shape[1], s->hkv = a.k.shape[1], s->d = a.q.shape[2], s->dv = a.v.shape[2];
  s->tokens_q = a.q.shape[0], s->tokens_k = a.k.shape[0];
  if (s->tokens_q == 0 || s->tokens_k == 0) return "nothing to do";
  const uly_tensor *tensors[] = {&a.q, &a.k, &a.v, &a.out, &a.dout, &a.dq, &a.dk, &a.dv};
  // a question for workspace comes without: then they lie as the others do
  const bool gradients = a.backward && a.dq.ndim == 3;
  const int n = a.backward && gradients ? 8 : 4;
  for (int i = 0; i < n; i++) {
    const uly_tensor &t = *tensors[i];
    if (t.dtype != ULY_BF16) return "types other than BF16";
    if (t.ndim != 3 || (t.shape[2] > 1 && t.stride[2] != 1)) return "tensors whose last axis is not dense";
    if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return "memory that is not aligned to 16 bytes";
    for (int axis = 0; axis < 2; axis++)
      if (t.shape[axis] > 1 && (t.stride[axis] % 8 != 0 || t.stride[axis] < t.shape[2]))
        return "strides that are not a multiple of 16 bytes";
  }
  if (s->d % 8 != 0 || s->dv % 8 != 0 || s->d > 256 || s->dv > 256)
    return "head sizes that are not multiples of 8 up to 256";
  if (s->tokens_q > SDPA_TOKENS || s->tokens_k > SDPA_TOKENS) return "more than 16 million tokens";
  if (!isfinite(a.scale)) return "a scale that is not finite";

  const AttentionMask m = attention_mask(a);
  if (m.right > 0) return "windows that look ahead";
  s->causal = m.right == 0;
  s->left = m.left < 0 ? 0 : m.left + 1;
  s->scale = static_cast<float>(a.scale);
  s->backward = a.backward;

  // Wrong on Hopper from 9.11 on; TransformerEngine does not ask for it either.
  if (s->backward && s->d != s->dv && least(s->d, s->dv) >= 128 && (s->d != 192 || s->dv != 128))
    return "head sizes from 128 on that differ, backward";
  int64_t documents = 0;
  bool square = true, equal = true;
  for (int64_t i = 0; a.cu_q && i < a.cu_q.documents(); i++) {
    const int64_t sq = a.cu_q[i + 1] - a.cu_q[i], sk = a.cu_k[i + 1] - a.cu_k[i];
    if (sq == 0 && sk == 0) continue;
    // before 9.25 cuDNN knows lengths of 0 as padding alone, for queries and keys alike
    if (sq == 0) return "documents without queries";
    if (!sdpa_rows(m, sq, sk)) return "documents with queries that see no key";
    if (s->left && sq > sk) return "windows of documents with more queries than keys";
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
  if (documents > SDPA_DOCUMENTS) return "more than 8192 documents";
  s->bottom_right = !square && (s->causal || s->left);
  s->b = documents;
  s->packed = !equal || sdpa_by_lengths(*s);

  // along an axis of one element any stride will do: a plain one, for fewer plans
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

  // Where cuDNN finds room for sums by a gradient's token stride, all heads have to lie within it.
  auto by_token = [](const sdpa_strides &x, int64_t heads, int64_t width) {
    return x.head >= width && x.token >= (heads - 1) * x.head + width;
  };
  if (!by_token(s->q, s->hq, s->d) || !by_token(s->k, s->hkv, s->d) || !by_token(s->v, s->hkv, s->dv) ||
      !by_token(s->out, s->hq, s->dv))
    return "packed documents that do not lie token by token";
  if (a.backward && (!by_token(s->dout, s->hq, s->dv) || !by_token(s->dq, s->hq, s->d) ||
                     !by_token(s->dk, s->hkv, s->d) || !by_token(s->dgv, s->hkv, s->dv)))
    return "gradients of packed documents that do not lie token by token";
  if (a.backward && (s->d % 16 != 0 || s->dv % 16 != 0))
    return "packed documents with head sizes that are not multiples of 16, backward";
  s->b = sdpa_bucket(documents, 2);
  s->sq = sdpa_bucket(s->sq, 128), s->sk = sdpa_bucket(s->sk, 128);
  s->tokens_q = ceil_div(s->tokens_q, SDPA_ROUND) * SDPA_ROUND,
  s->tokens_k = ceil_div(s->tokens_k, SDPA_ROUND) * SDPA_ROUND;
  return nullptr;
}

// The parts of cuDNN's workspace that are ours, in bytes from where the tables of documents end.
struct sdpa_layout {
  int64_t lengths_q, lengths_k; // [b] int32
  int64_t offsets;              // [SDPA_OFFSETS][b + 1] int64
  // the LSE as cuDNN has it: F32, dense [queries, heads] when packed, else [documents, heads,
  // queries]
  int64_t stats;
  int64_t plan; // from here on cuDNN's own
};
enum { SDPA_Q, SDPA_K, SDPA_V, SDPA_OUT, SDPA_STATS, SDPA_DOUT, SDPA_DQ, SDPA_DK, SDPA_DV, SDPA_OFFSETS };

inline sdpa_layout sdpa_lay(const sdpa_shape &s) {
  sdpa_layout l = {};
  int64_t at = 0;
  auto take = [&](int64_t bytes) {
    const int64_t here = at;
    at = ceil_div(at + bytes, 256) * 256;
    return here;
  };
  if (s.packed) {
    l.lengths_q = take(4 * s.b), l.lengths_k = take(4 * s.b);
    l.offsets = take(8 * SDPA_OFFSETS * (s.b + 1));
  }
  l.stats = take(4 * s.tokens_q * s.hq);
  l.plan = at;
  return l;
}

// sdpa_statistics is where cuDNN has the LSE of a token and a head: packed [tokens, heads], else
// [documents, heads, rows].
struct sdpa_statistics {
  int64_t rows, document, token, head; // of how many rows a document is, and strides
  ULY_BOTH int64_t at(int64_t t, int64_t h) const { return t / rows * document + t % rows * token + h * head; }
};
inline sdpa_statistics sdpa_statistics_of(const sdpa_shape &s) {
  if (s.packed) return {s.tokens_q, 0, s.hq, 1};
  return {s.sq, s.hq * s.sq, 1, s.sq};
}

// What an array of offsets counts in: elements of a token.
inline int64_t sdpa_token(const sdpa_shape &s, int which) {
  const int64_t tokens[SDPA_OFFSETS] = {s.q.token,    s.k.token,  s.v.token,  s.out.token, s.hq,
                                        s.dout.token, s.dq.token, s.dk.token, s.dgv.token};
  return tokens[which];
}

// sdpa_bound is the most bytes that a call of several documents may take, whatever they are; one
// that would take more is not cuDNN's. Backward, cuDNN sums dq over all tokens in F32, and dk and
// dv for every query head where several share a key head.
inline int64_t sdpa_bound(const sdpa_shape &s) {
  sdpa_shape any = s;
  any.packed = 1;
  any.b = least(SDPA_DOCUMENTS, sdpa_bucket(s.tokens_q + s.tokens_k, 2));
  any.tokens_q = ceil_div(s.tokens_q, SDPA_ROUND) * SDPA_ROUND,
  any.tokens_k = ceil_div(s.tokens_k, SDPA_ROUND) * SDPA_ROUND;
  int64_t bytes = sdpa_lay(any).plan + (32 << 20);
  if (!s.backward) return bytes;
  auto row = [](const sdpa_strides &x, int64_t dense) { return most(x.token, dense); };
  bytes += 4 * any.tokens_q * (row(s.q, s.hq * s.d) + s.hq);
  const int64_t group = s.hq / s.hkv;
  if (group > 1) bytes += 4 * any.tokens_k * group * (row(s.k, s.hkv * s.d) + row(s.v, s.hkv * s.dv));
  return bytes;
}
