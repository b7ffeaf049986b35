// Query heads that are not spread evenly over key heads, as a rank has them whose share ends within
// a group: cuDNN knows no such call. It is cut along heads into calls that it knows, which run one
// after another. A rank's share is at most three: the end of a group, whole groups, the beginning
// of one. No CUDA in here, so that the host can test it.
#pragma once

#include <initializer_list>

#include "kernels/attention_index.h"

// sdpa_part is query heads [q, q + hq) over key heads [k, k + hkv), as many to each. A key head is
// in one part, so that its gradient is written once.
struct sdpa_part {
  int64_t q, hq, k, hkv;
};

enum : int64_t { SDPA_PARTS = 8 };
struct sdpa_parts {
  int64_t n;
  sdpa_part part[SDPA_PARTS];
};

// sdpa_cut is NULL with the parts in order, else why there are none. kv_head is what the caller
// gave, not yet looked at.
inline const char *sdpa_cut(const AttentionArgs &a, sdpa_parts *parts) {
  *parts = {};
  if (a.q.ndim != 3 || a.k.ndim != 3 || a.v.ndim != 3 || a.out.ndim != 3)
    return "tensors of other axes than tokens, heads and features";
  const int64_t hq = a.q.shape[1], hkv = a.k.shape[1];
  if (hq == 0 || hkv == 0) return "nothing to do";
  if (!a.kv_head) {
    if (hq % hkv != 0) return "key heads that do not divide the query heads";
    parts->n = 1, parts->part[0] = {0, hq, 0, hkv};
    return nullptr;
  }
  int64_t kv = 0;
  for (int64_t from = 0, to; from < hq; from = to, kv++) { // the query heads of one key head
    for (to = from; to < hq && a.kv_head[to] == kv; to++) {}
    // nobody would write the gradient of one
    if (to == from) return "key heads that are left out, or out of order";
    sdpa_part *last = parts->n > 0 ? &parts->part[parts->n - 1] : nullptr;
    if (last && last->hq == last->hkv * (to - from)) {
      last->hq += to - from, last->hkv++;
      continue;
    }
    if (parts->n == SDPA_PARTS) return "query heads that take more than 8 calls to be spread evenly over key heads";
    parts->part[parts->n++] = {from, to - from, kv, 1};
  }
  return kv == hkv ? nullptr : "key heads that are left out, or out of order";
}

// sdpa_part_of is the call of a part: views of a's tensors, its own documents, mask and workspace.
inline AttentionArgs sdpa_part_of(AttentionArgs a, const sdpa_part &p) {
  auto heads = [](uly_tensor &t, int64_t from, int64_t n) {
    if (t.ndim < 2) return; // not given: gradients forward, and in a question for workspace
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
