// Splitting attention along heads. cuDNN requires the same number of query heads for every key
// head. A rank whose query heads begin or end within a group of a key head has other numbers. Such
// a call is split into calls with equal numbers, which run one after another. A rank needs at most
// three: the end of a group, whole groups, and the beginning of a group. The file includes no CUDA;
// sdpa_split_test.cpp tests it on the host.
#pragma once

#include <initializer_list>

#include "kernels/attention_index.h"

// sdpa_subcall has query heads [q, q + hq) and key heads [k, k + hkv), with hq / hkv query heads
// for each key head. A key head is in one call, so that its gradient is written once.
struct sdpa_subcall {
  int64_t q, hq, k, hkv;
};

enum : int64_t { SDPA_SUBCALLS = 8 };
struct sdpa_subcalls {
  int64_t n;
  sdpa_subcall call[SDPA_SUBCALLS];
};

// sdpa_split writes the calls to *parts, in order, and returns NULL; or it returns why there are
// none. kv_head may be invalid, because the call has not been checked yet.
inline const char *sdpa_split(const AttentionArgs &a, sdpa_subcalls *parts) {
  *parts = {};
  if (a.q.ndim != 3 || a.k.ndim != 3 || a.v.ndim != 3 || a.out.ndim != 3)
    return "tensors must be [tokens, heads, features]";
  if (a.sinks.dtype || a.slopes.dtype || a.block_mask.dtype || a.shift || a.softcap != 0 || a.dropout != 0 || a.carry)
    return "sinks, slopes, block masks, shifts, soft caps, dropout and carry are left to the plug-in's kernels";
  const int64_t hq = a.q.shape[1], hkv = a.k.shape[1];
  if (hq == 0 || hkv == 0) return "there are no heads";
  if (!a.kv_head) {
    if (hq % hkv != 0) return "the number of key heads does not divide that of query heads";
    parts->n = 1, parts->call[0] = {0, hq, 0, hkv};
    return nullptr;
  }
  int64_t kv = 0;
  for (int64_t from = 0, to; from < hq; from = to, kv++) { // the query heads of one key head
    for (to = from; to < hq && a.kv_head[to] == kv; to++) {}
    // A key head without query heads: no call would write its gradient.
    if (to == from) return "key heads are skipped or out of order";
    sdpa_subcall *last = parts->n > 0 ? &parts->call[parts->n - 1] : nullptr;
    if (last && last->hq == last->hkv * (to - from)) {
      last->hq += to - from, last->hkv++;
      continue;
    }
    if (parts->n == SDPA_SUBCALLS)
      return "the query heads would need more than 8 calls with equal numbers for each key head";
    parts->call[parts->n++] = {from, to - from, kv, 1};
  }
  return kv == hkv ? nullptr : "key heads are skipped or out of order";
}

// sdpa_subcall_of returns the arguments of a call: views of a's tensors, and the documents, mask
// and workspace of a.
inline AttentionArgs sdpa_subcall_of(AttentionArgs a, const sdpa_subcall &p) {
  auto heads = [](uly_tensor &t, int64_t from, int64_t n) {
    if (t.ndim < 2) return; // absent: gradients in the forward pass and in a query for workspace
    t.data =
        reinterpret_cast<void *>(reinterpret_cast<uintptr_t>(t.data) +
                                 static_cast<uintptr_t>(t.stride[1]) * static_cast<uintptr_t>(from * size_of(t.dtype)));
    t.shape[1] = n;
  };
  for (uly_tensor *t : {&a.q, &a.out, &a.lse, &a.dout, &a.dq}) heads(*t, p.q, p.hq);
  for (uly_tensor *t : {&a.k, &a.v, &a.dk, &a.dv}) heads(*t, p.k, p.hkv);
  a.kv_head = {};
  return a;
}
