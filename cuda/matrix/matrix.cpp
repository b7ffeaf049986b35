// matrix PROPERTIES [small]: prints which cases of attention cuDNN supports on a GPU that the file
// PROPERTIES describes. No GPU is needed. For each case it builds the plan and prints the engine
// and the workspace. This shows that cuDNN has an engine for the case, not that its results are
// right.
#include <stdio.h>
#include <string.h>

#include <fstream>
#include <sstream>
#include <vector>

#include "libraries/sdpa.h"

namespace {

// How q, k and v are stored: [T, H, D]; [T, all heads of q, k, v, D]; [H, T, D].
enum storage { TOKENS, FUSED, HEADS };

// item is a case: attention of documents with lengths sq. The defaults are causal attention in
// BF16, 32 query heads, 8 key heads and head size 128.
struct item {
  const char *name;
  std::vector<int64_t> sq, sk = {}; // lengths of documents; sk empty = sq
  int64_t hq = 32, hkv = 8, d = 128, dv = 128;
  std::vector<int64_t> kv_head = {};
  bool causal = true;
  int64_t left = -1, right = -1;
  storage layout = TOKENS;
  int dtype = ULY_BF16;
  bool small = false; // among the cases that `small` selects

  item(const char *name, std::vector<int64_t> sq) : name(name), sq(std::move(sq)) {}
  item &keys(std::vector<int64_t> lengths) { return sk = std::move(lengths), *this; }
  item &heads(int64_t query, int64_t key) { return hq = query, hkv = key, *this; }
  // groups gives each query head its key head.
  item &groups(int64_t key, std::vector<int64_t> heads) {
    return hq = static_cast<int64_t>(heads.size()), hkv = key, kv_head = std::move(heads), *this;
  }
  item &sizes(int64_t qk, int64_t v) { return d = qk, dv = v, *this; }
  item &full() { return causal = false, *this; }
  item &window(int64_t before, int64_t after) { return left = before, right = after, *this; }
  item &stored(storage s) { return layout = s, *this; }
  item &type(int t) { return dtype = t, *this; }
  item &quick() { return small = true, *this; }
};

std::vector<int64_t> times(int64_t n, int64_t length) { return std::vector<int64_t>(static_cast<size_t>(n), length); }
std::vector<int64_t> join(std::vector<int64_t> a, const std::vector<int64_t> &b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const int64_t K = 1024, no = -1;                               // no: a window without a bound
const std::vector<int64_t> mixed = join({2 * K}, times(6, K)); // documents of two lengths

const std::vector<item> items = {
    item("causal 8K, 32:8 heads", {8 * K}).quick(),
    item("causal 32K", {32 * K}),
    item("causal 128K", {128 * K}),
    item("causal 1M, 8:2 heads", {K * K}).heads(8, 2),
    item("full 8K", {8 * K}).full().quick(),
    item("a head for each (MHA)", {8 * K}).heads(32, 32),
    item("one key head (MQA)", {8 * K}).heads(32, 1),
    item("6:2 heads", {8 * K}).heads(6, 2),
    item("1:1 heads", {8 * K}).heads(1, 1),
    item("d 8", {8 * K}).sizes(8, 8),
    item("d 16", {8 * K}).sizes(16, 16),
    item("d 24", {8 * K}).sizes(24, 24),
    item("d 32", {8 * K}).sizes(32, 32),
    item("d 64", {8 * K}).sizes(64, 64).quick(),
    item("d 72", {8 * K}).sizes(72, 72),
    item("d 80", {8 * K}).sizes(80, 80),
    item("d 96", {8 * K}).sizes(96, 96),
    item("d 192 and 128", {8 * K}).heads(16, 16).sizes(192, 128),
    item("d 64 and 128", {8 * K}).heads(16, 16).sizes(64, 128),
    item("d 256 and 128", {8 * K}).heads(16, 16).sizes(256, 128),
    item("d 256", {8 * K}).heads(16, 8).sizes(256, 256),
    item("d 264", {8 * K}).heads(16, 8).sizes(264, 264),
    item("d 12", {8 * K}).heads(16, 8).sizes(12, 12),
    item("F32", {8 * K}).type(ULY_F32).quick(),
    item("1000 tokens", {1000}),
    item("77 tokens", {77}),
    item("2 tokens", {2}),
    item("77 tokens, 3:1 heads", {77}).heads(3, 1),
    item("full, 1000 tokens", {1000}).full(),
    item("1 token", {1}),
    item("causal, 2K queries of 8K keys", {2 * K}).keys({8 * K}),
    item("causal, 1 query of 8K keys", {1}).keys({8 * K}),
    item("full, 77 queries of 1000 keys", {77}).keys({1000}).full(),
    item("full, 1000 queries of 77 keys", {1000}).keys({77}).full(),
    item("causal, more queries than keys", {8 * K}).keys({2 * K}).quick(),
    item("causal, window of 1023 before", {8 * K}).window(1023, no).quick(),
    item("causal, window of 0 before", {8 * K}).window(0, no),
    item("causal, window, 2K queries of 8K keys", {2 * K}).keys({8 * K}).window(511, no),
    item("window of 511 before, all after", {8 * K}).full().window(511, no),
    item("window of 511 before, 2K queries of 8K keys", {2 * K}).keys({8 * K}).full().window(511, no),
    item("window of 511 before, 8K queries of 2K keys", {8 * K}).keys({2 * K}).full().window(511, no),
    item("window of 255 before and after", {8 * K}).full().window(255, 255).quick(),
    item("window of 255 before, 0 after", {8 * K}).full().window(255, 0),
    item("inside fused q, k, v", {8 * K}).stored(FUSED),
    item("heads before tokens", {8 * K}).stored(HEADS),
    item("Qwen2.5-7B, rank 1 of 8", {8 * K}).groups(2, {0, 0, 0, 1}).quick(),
    item("Qwen2.5-7B, rank 5 of 8", {8 * K}).groups(2, {0, 0, 1}),
    item("Llama, rank 0 of 3", {8 * K}).groups(3, {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2}),
    item("Llama, rank 1 of 3", {8 * K}).groups(4, {0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3}).quick(),
    item("Llama, rank 1 of 3, 77 tokens", {77}).groups(4, {0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3}),
    item("Llama, rank 1 of 6", {8 * K}).groups(2, {0, 0, 1, 1, 1, 1}),
    item("Llama, rank 3 of 6", {8 * K}).groups(2, {0, 0, 0, 1, 1}),
    item("a key head that is not used", {8 * K}).groups(3, {0, 0, 2, 2}),
    item("9 groups, none as large as the one before", {8 * K}).groups(9, {0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8}),
    item("2 documents of 4K", times(2, 4 * K)).quick(),
    item("2 documents of 4K, heads before tokens", times(2, 4 * K)).stored(HEADS),
    item("3 documents", {4 * K, 3 * K, K}).quick(),
    item("3 documents, 3:1 heads, 1001 tokens", {500, 300, 201}).heads(3, 1),
    item("32 documents of 1K", times(32, K)),
    item("24K and 64 short documents", join({24 * K}, times(64, 128))),
    item("128K of documents of 8K", times(16, 8 * K)),
    item("64K in one and 4096 of 16", join({64 * K}, times(4096, 16))),
    item("documents, full", mixed).full(),
    item("documents, MHA", mixed).heads(32, 32),
    item("documents, window of 511 before", mixed).window(511, no),
    item("documents, window, all after", mixed).full().window(511, no),
    item("documents, fewer queries than keys", {K, 2 * K, 512}).keys({2 * K, 2 * K, K}),
    item("documents, fewer queries than keys, window", {K, 2 * K, 512}).keys({2 * K, 2 * K, K}).window(100, no),
    item("documents, full, more queries than keys", {K, 2 * K, 512}).keys({128, 2 * K, K}).full(),
    item("documents, one without queries", {K, 0, 512}).keys({K, K, 512}),
    item("documents, one whose queries see no key", {K, K}).keys({K, 0}).full(),
    item("documents, d 64", mixed).sizes(64, 64),
    item("documents, d 72", mixed).sizes(72, 72),
    item("documents, d 96", mixed).sizes(96, 96),
    item("documents, d 192 and 128", mixed).heads(16, 16).sizes(192, 128),
    item("documents, d 256", mixed).heads(16, 8).sizes(256, 256),
    item("documents inside fused q, k, v", mixed).stored(FUSED),
    item("documents, Qwen2.5-7B, rank 1 of 8", mixed).groups(2, {0, 0, 0, 1}).quick(),
    item("documents, Llama, rank 1 of 3", mixed).groups(4, {0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3}).stored(FUSED),
    item("documents, heads before tokens", mixed).stored(HEADS),
};

struct call {
  AttentionArgs a = {};
  uly_window window;
  std::vector<int64_t> cu_q{0}, cu_k{0};

  call(const item &c, bool backward) {
    const std::vector<int64_t> &sk = c.sk.empty() ? c.sq : c.sk;
    for (int64_t n : c.sq) cu_q.push_back(cu_q.back() + n);
    for (int64_t n : sk) cu_k.push_back(cu_k.back() + n);
    const auto list = [](const std::vector<int64_t> &x) {
      return uly_list{x.data(), static_cast<int64_t>(x.size()), static_cast<int64_t>(x.size())};
    };
    a.cu_q = list(cu_q), a.cu_k = list(cu_k);
    if (!c.kv_head.empty()) a.kv_head = list(c.kv_head);
    window = {c.left, c.right}, a.window = &window, a.causal = c.causal, a.backward = backward;
    a.scale = 1 / sqrt(static_cast<double>(c.d));
    const int64_t row = c.hq * c.d + c.hkv * (c.d + c.dv), tq = cu_q.back(), tk = cu_k.back();
    auto tensor = [&](int64_t tokens, int64_t heads, int64_t width, bool inside) {
      uly_tensor t = {};
      t.dtype = static_cast<uint8_t>(c.dtype), t.where = ULY_CUDA, t.ndim = 3;
      t.shape[0] = tokens, t.shape[1] = heads, t.shape[2] = width, t.stride[2] = 1;
      t.stride[0] = c.layout == HEADS ? width : c.layout == FUSED && inside ? row : heads * width;
      t.stride[1] = c.layout == HEADS ? tokens * width : width;
      return t;
    };
    a.q = a.dq = tensor(tq, c.hq, c.d, true), a.k = a.dk = tensor(tk, c.hkv, c.d, true),
    a.v = a.dv = tensor(tk, c.hkv, c.dv, true);
    a.out = a.dout = tensor(tq, c.hq, c.dv, false);
  }
};

} // namespace

int main(int argc, char **argv) {
  if (argc < 2) return fprintf(stderr, "usage: matrix PROPERTIES [small]\n"), 2;
  std::ifstream file(argv[1]);
  std::stringstream text;
  text << file.rdbuf();
  const std::string properties = text.str();
  const size_t at = properties.find("\"deviceVer\":");
  if (at == std::string::npos) return fprintf(stderr, "%s: not a description of a GPU (no deviceVer)\n", argv[1]), 2;
  const int sm = atoi(properties.c_str() + at + strlen("\"deviceVer\":")) / 10;
  const bool small = argc > 2 && !strcmp(argv[2], "small");

  int wrong = 0;
  printf("| case | pass | serves | engine, or why not | workspace, MiB |\n| --- | --- | --- | --- | --- |\n");
  for (const item &c : items) {
    for (int backward = 0; backward < 2; backward++) {
      if (small && !c.small) continue;
      const call x(c, backward);
      sdpa_subcalls subcalls;
      const char *why = sdpa_split(x.a, &subcalls);
      bool supported = !why;
      std::string result = why ? why : "";
      int64_t bytes = 0; // the calls run one after another and share the workspace
      for (int64_t i = 0; supported && i < subcalls.n; i++) {
        sdpa_shape shape;
        int64_t workspace = 0;
        std::string engine;
        why = sdpa_describe(sdpa_subcall_of(x.a, subcalls.call[i]), &shape);
        supported = !why && sdpa_plan(shape, properties, sm, &workspace, &engine);
        if (!supported) {
          result = why ? why : engine;
          break;
        }
        result += subcalls.n == 1
                      ? engine
                      : (i ? ", " : "") + std::to_string(shape.hq) + ":" + std::to_string(shape.hkv) + " " + engine;
        const int64_t all = sdpa_layout_of(shape).plan + workspace;
        bytes = most(bytes, all);
        if (shape.packed && all > sdpa_bound(shape)) {
          printf("%s: %lld bytes, more than the bound of %lld\n", c.name, (long long)all, (long long)sdpa_bound(shape));
          wrong++;
        }
      }
      for (char &b : result) // a cell of the table is one line without bars
        if (b == '\n' || b == '|') b = ' ';
      if (result.size() > 160) result = result.substr(0, 160) + "…";
      printf("| %s | %s | %s | %s | ", c.name, backward ? "backward" : "forward", supported ? "cuDNN" : "own",
             result.c_str());
      if (supported) printf("%.1f", static_cast<double>(bytes) / (1 << 20));
      printf(" |\n");
      fflush(stdout);
    }
  }
  return wrong != 0;
}
