// Attention that is split along heads: the calls cover all heads, each has equal numbers of query
// heads for its key heads, and together they give the results of the whole call. A Go test compiles
// this test and runs it with the emulated plug-in, whose own kernels replace cuDNN.
#include "sdpa_split.h"

#include "host_test.h"

#include <dlfcn.h>

#include <vector>

typedef long long ll;
typedef std::vector<int64_t> List;

// list is a slice as Go passes it.
static uly_list list(const List &x) {
  const int64_t n = static_cast<int64_t>(x.size());
  return {x.data(), n, n};
}

static std::vector<uly_tensor *> queries(AttentionArgs &a) { return {&a.q, &a.out, &a.lse, &a.dout, &a.dq}; }
static std::vector<uly_tensor *> keys(AttentionArgs &a) { return {&a.k, &a.v, &a.dk, &a.dv}; }

// A call with tensors of 2^33 elements a token and 2^30 a head, or, if `transposed`, with these
// strides exchanged.
static AttentionArgs query(const List &kv_head, int64_t hkv, bool transposed = false) {
  AttentionArgs a = {};
  int64_t at = 1;
  auto shape = [&](uly_tensor *t, int64_t heads) {
    t->dtype = t == &a.lse ? ULY_F32 : ULY_BF16, t->ndim = t == &a.lse ? 2 : 3;
    t->data = reinterpret_cast<void *>(at++ << 50);
    t->shape[0] = 1 << 20, t->shape[1] = heads, t->shape[2] = 64;
    t->stride[0] = int64_t(1) << 33, t->stride[1] = int64_t(1) << 30, t->stride[2] = 1;
    if (transposed) std::swap(t->stride[0], t->stride[1]);
  };
  for (uly_tensor *t : queries(a)) shape(t, static_cast<int64_t>(kv_head.size()));
  for (uly_tensor *t : keys(a)) shape(t, hkv);
  a.kv_head = list(kv_head);
  return a;
}

static uintptr_t address(const uly_tensor &t, int64_t token, int64_t head) {
  return reinterpret_cast<uintptr_t>(t.data) +
         static_cast<uintptr_t>((token * t.stride[0] + head * t.stride[1]) * size_of(t.dtype));
}

// split checks the calls for a list in which all key heads are used: every head is in one call,
// with its own key head and at its own address. It returns the number of calls.
static int64_t split(const List &kv_head, int64_t hkv, bool transposed = false) {
  AttentionArgs a = query(kv_head, hkv, transposed);
  sdpa_subcalls parts;
  const char *why = sdpa_split(a, &parts);
  CHECK(!why, "%zu heads: %s", kv_head.size(), why);
  int64_t q = 0, k = 0;
  for (int64_t i = 0; i < parts.n; i++) {
    const sdpa_subcall &p = parts.call[i];
    CHECK(p.q == q && p.k == k && p.hq > 0 && p.hkv > 0 && p.hq % p.hkv == 0, "part %lld is %lld:%lld from %lld:%lld",
          (ll)i, (ll)p.hq, (ll)p.hkv, (ll)p.q, (ll)p.k);
    if (i > 0) CHECK(p.hq / p.hkv != parts.call[i - 1].hq / parts.call[i - 1].hkv, "calls that could be one");
    AttentionArgs b = sdpa_subcall_of(a, p);
    CHECK(b.q.shape[1] == p.hq && b.k.shape[1] == p.hkv && !b.kv_head, "a call with other heads");
    for (int64_t h = 0; h < p.hq; h++)
      CHECK(kv_head[static_cast<size_t>(q + h)] == k + attention_kv_head(b, h), "query head %lld has another key head",
            (ll)(q + h));
    for (int64_t token : {0, 1, (1 << 20) - 1}) {
      for (size_t t = 0; t < 5; t++)
        for (int64_t h = 0; h < p.hq; h++)
          CHECK(address(*queries(b)[t], token, h) == address(*queries(a)[t], token, q + h),
                "query head %lld has another address", (ll)(q + h));
      for (size_t t = 0; t < 4; t++)
        for (int64_t h = 0; h < p.hkv; h++)
          CHECK(address(*keys(b)[t], token, h) == address(*keys(a)[t], token, k + h),
                "key head %lld has another address", (ll)(k + h));
    }
    q += p.hq, k += p.hkv;
  }
  CHECK(q == static_cast<int64_t>(kv_head.size()) && k == hkv, "%lld of %zu query heads, %lld of %lld key heads", (ll)q,
        kv_head.size(), (ll)k, (ll)hkv);
  return parts.n;
}

// The heads of any rank need at most three calls, and one call if the groups are equal.
static void shares() {
  for (int64_t group = 1; group <= 9; group++)
    for (int64_t lo = 0; lo < 40; lo++)
      for (int64_t hi = lo + 1; hi <= 40; hi++) {
        List kv_head;
        for (int64_t h = lo; h < hi; h++) kv_head.push_back(h / group - lo / group);
        const int64_t hkv = kv_head.back() + 1, n = split(kv_head, hkv, lo % 2);
        bool even = (hi - lo) % hkv == 0;
        for (int64_t h = 0; even && h < hi - lo; h++) even = kv_head[static_cast<size_t>(h)] == h / ((hi - lo) / hkv);
        CHECK(even ? n == 1 : n == 2 || n == 3, "heads %lld to %lld in groups of %lld: %lld calls", (ll)lo, (ll)hi,
              (ll)group, (ll)n);
      }
  const int64_t llama = split({0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3}, 4), qwen = split({0, 0, 0, 1}, 2);
  CHECK(llama == 3 && qwen == 2, "Llama on 3 ranks: %lld calls, Qwen2.5-7B on 8: %lld", (ll)llama, (ll)qwen);
  CHECK(split({0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7}, 8) == 8, "eight calls");
}

static void refusals() {
  auto refused = [](const List &kv_head, int64_t hkv, const char *want) {
    const AttentionArgs a = query(kv_head, hkv);
    sdpa_subcalls parts;
    const char *why = sdpa_split(a, &parts);
    CHECK(why && strstr(why, want), "%zu heads: %s, want %s", kv_head.size(), why ? why : "served", want);
  };
  refused({0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8}, 9, "more than 8");
  for (const List &list : {List{0, 0, 2, 2}, {1, 1, 2, 2}, {0, 0, 1, 1}, {0, 1, 0, 2}, {-1, 0, 1, 2}, {0, 1, 2, 3}})
    refused(list, 3, "skipped");
  refused({}, 2, "no heads");
  refused({0}, 0, "no heads");
  AttentionArgs a = query({0, 0, 0, 0}, 2);
  sdpa_subcalls parts;
  a.kv_head = {};
  CHECK(!sdpa_split(a, &parts) && parts.n == 1 && parts.call[0].hq == 4 && parts.call[0].hkv == 2, "no list");
  a.k.shape[1] = 3;
  const char *why = sdpa_split(a, &parts);
  CHECK(why && strstr(why, "divide"), "4 query heads for 3 key heads");
  a.k.ndim = 2;
  why = sdpa_split(a, &parts);
  CHECK(why && strstr(why, "[tokens"), "a matrix");
  a = query({0, 0, 0, 1}, 2); // a query for workspace has no gradients
  for (uly_tensor *t : {&a.dout, &a.dq, &a.dk, &a.dv}) *t = {};
  const AttentionArgs b = sdpa_subcall_of(a, {3, 1, 1, 1});
  CHECK(!b.dq.data && !b.dk.data && b.q.shape[1] == 1, "a query with gradients");
}

// --- tests that run the plug-in

static const uly_cuda_api *api;
static uly_device *device;
static uly_stream *stream;

static void fine(int32_t code, const char *what) {
  if (code == ULY_OK) return;
  printf("%s: %s\n", what, device ? api->error(device) : "no device");
  exit(1);
}
#define FINE(call) fine(call, #call)

static void begin(const char *plugin) {
  void *library = dlopen(plugin, RTLD_NOW);
  if (!library) printf("%s\n", dlerror()), exit(1);
  auto table = reinterpret_cast<const uly_cuda_api *(*)(uint32_t, uint32_t *)>(dlsym(library, "uly_cuda_plugin"));
  uint32_t have = 0;
  char text[512] = {};
  const uly_open how = {0, 0, "attention_forward=own,attention_backward=own"};
  if (!(api = table(ULY_CUDA_ABI, &have)) || api->open(&how, &device, text, sizeof text) != ULY_OK)
    printf("%s: %s\n", plugin, text), exit(1);
  FINE(api->stream_create(device, ULY_STREAM_COMPUTE, &stream));
}

// [T, H, D]; the same with gaps between heads and tokens; [H, T, D]
enum lay { TOKENS, APART, HEADS, LAYS };

// memory is a tensor and its gaps: random numbers, or, for a result, one repeated byte.
struct memory {
  int64_t bytes = 0;
  void *host = nullptr, *there = nullptr;
  void take(uly_tensor *t, int dtype, lay l, int64_t tokens, int64_t heads, int64_t width, uint64_t seed) {
    t->dtype = static_cast<uint8_t>(dtype), t->where = ULY_CUDA, t->ndim = width ? 3 : 2;
    const int64_t row = most(width, 1), gap = l == APART ? 8 : 0;
    t->shape[0] = tokens, t->shape[1] = heads, t->shape[2] = width;
    t->stride[0] = l == HEADS ? row : heads * (row + gap) + gap, t->stride[1] = l == HEADS ? tokens * row : row + gap,
    t->stride[2] = 1;
    bytes = size_of(dtype) * tokens * (heads * (row + gap) + gap);
    FINE(api->alloc_host(device, bytes, &host));
    FINE(api->alloc(device, bytes, &there));
    t->data = there;
    memset(host, 0x5a, static_cast<size_t>(bytes));
    for (int64_t i = 0; seed && i < bytes / size_of(dtype); i++) {
      seed = seed * 6364136223846793005ull + 1442695040888963407ull; // Knuth's generator
      const float f = static_cast<float>(static_cast<int64_t>(seed >> 40) - (1 << 23)) / (1 << 22);
      if (dtype == ULY_F32) static_cast<float *>(host)[i] = f;
      else static_cast<uint16_t *>(host)[i] = bf16_bits(f);
    }
    FINE(api->copy_bytes(device, stream, there, host, bytes));
  }
  std::vector<char> back() {
    FINE(api->copy_bytes(device, stream, host, there, bytes));
    FINE(api->stream_sync(device, stream));
    return {static_cast<char *>(host), static_cast<char *>(host) + bytes};
  }
  ~memory() {
    if (host) FINE(api->free_host(device, host));
    if (there) FINE(api->free(device, there));
  }
};

// run enqueues attention or its gradient.
static void run(int32_t op, const AttentionArgs &a) {
  uly_attention_grad g = {};
  g.attention = a, g.dout = a.dout, g.dq = a.dq, g.dk = a.dk, g.dv = a.dv;
  const bool backward = op == ULY_OP_ATTENTION_BACKWARD;
  FINE(api->enqueue(device, stream, op, &g, backward ? sizeof g : sizeof g.attention));
}

// results returns out, lse, dq, dk and dv, with the gaps in their memory.
static std::vector<std::vector<char>> results(const List &kv_head, int64_t hkv, int dtype, lay l, bool in_parts) {
  const List cu_q = {0, 40, 40, 71}, cu_k = {0, 37, 40, 80};
  const int64_t tq = cu_q.back(), tk = cu_k.back(), hq = static_cast<int64_t>(kv_head.size()), d = 16, dv = 24;
  AttentionArgs a = {};
  memory q, k, v, dout, out, lse, dq, dk, dgv, workspace;
  q.take(&a.q, dtype, l, tq, hq, d, 1), k.take(&a.k, dtype, l, tk, hkv, d, 2), v.take(&a.v, dtype, l, tk, hkv, dv, 3),
      dout.take(&a.dout, dtype, l, tq, hq, dv, 4);
  out.take(&a.out, dtype, l, tq, hq, dv, 0), lse.take(&a.lse, ULY_F32, l, tq, hq, 0, 0);
  dq.take(&a.dq, dtype, l, tq, hq, d, 0), dk.take(&a.dk, dtype, l, tk, hkv, d, 0),
      dgv.take(&a.dv, dtype, l, tk, hkv, dv, 0);
  a.cu_q = list(cu_q), a.cu_k = list(cu_k), a.kv_head = list(kv_head);
  a.causal = true, a.scale = 0.25;
  int64_t bytes[2] = {};
  for (int32_t backward : {0, 1}) { FINE(api->workspace(device, &a, backward, &bytes[backward])); }
  uly_tensor w = {};
  workspace.take(&w, ULY_U8, TOKENS, most(bytes[0], bytes[1]), 1, 0, 0);
  a.workspace = w, a.workspace.ndim = 1, a.workspace.stride[0] = 1;
  for (int32_t backward : {0, 1}) {
    a.backward = backward;
    const int32_t op = backward ? ULY_OP_ATTENTION_BACKWARD : ULY_OP_ATTENTION_FORWARD;
    sdpa_subcalls parts = {};
    if (in_parts) CHECK(!sdpa_split(a, &parts), "not cut");
    else run(op, a);
    for (int64_t i = 0; i < parts.n; i++) { run(op, sdpa_subcall_of(a, parts.call[i])); }
  }
  return {out.back(), lse.back(), dq.back(), dk.back(), dgv.back()};
}

// The sums of the plug-in's own kernels depend on lengths, head sizes and the mask only. Therefore
// the calls must give the bits of the whole call, and must not write between the tensors.
static void runs() {
  const char *const names[] = {"out", "lse", "dq", "dk", "dv"};
  const std::vector<std::pair<List, int64_t>> lists = {
      {{0, 0, 0, 1}, 2}, {{0, 1, 1, 1, 2}, 3}, {{0, 1, 1, 2, 2, 3, 3, 3}, 4}, {{0, 0, 1, 1}, 2}};
  for (const auto &list : lists)
    for (int dtype : {ULY_F32, ULY_BF16})
      for (int l = 0; l < LAYS; l++) {
        const auto whole = results(list.first, list.second, dtype, static_cast<lay>(l), false),
                   parts = results(list.first, list.second, dtype, static_cast<lay>(l), true);
        for (size_t i = 0; i < whole.size(); i++)
          CHECK(whole[i] == parts[i], "%s of %zu:%lld heads, type %d, layout %d: other bits if split", names[i],
                list.first.size(), (ll)list.second, dtype, l);
      }
  FINE(api->stream_destroy(device, stream));
  api->close(device);
}

int main(int argc, char **argv) {
  if (argc < 2) return printf("usage: sdpa_split_test PLUGIN\n"), 2;
  shares();
  refusals();
  begin(argv[1]);
  runs();
  return test_status();
}
