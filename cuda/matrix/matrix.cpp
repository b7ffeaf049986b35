// matrix PROPERTIES [small]: what cuDNN serves of attention, on a GPU that need not be there: for
// each case the plan is built, as on the GPU that the file of properties describes, and its engine
// and workspace are printed. It proves that cuDNN has an engine for the case, not that the engine
// is right.
#include <stdio.h>
#include <string.h>

#include <fstream>
#include <sstream>
#include <vector>

#include "libraries/sdpa.h"

namespace {

enum lay { TOKENS, FUSED, HEADS }; // [T, H, D]; the same inside one [T, all of q, k, v]; [H, T, D]

struct item {
  const char *name;
  bool small; // for the part that tests run
  int64_t hq, hkv, d, dv;
  bool causal;
  int64_t left, right;
  std::vector<int64_t> sq, sk = {}; // lengths of documents; sk empty = sq
  lay layout = TOKENS;
  int dtype = ULY_BF16;
  std::vector<int64_t> kv_head = {};
};

std::vector<int64_t> times(int64_t n, int64_t length) { return std::vector<int64_t>(static_cast<size_t>(n), length); }
std::vector<int64_t> join(std::vector<int64_t> a, const std::vector<int64_t> &b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

const int64_t K = 1024, no = -1;
const std::vector<int64_t> mixed = join({2 * K}, times(6, K)); // documents of two lengths

const std::vector<item> items = {
    {"causal 8K, 32:8 heads", true, 32, 8, 128, 128, true, no, no, {8 * K}},
    {"causal 32K", false, 32, 8, 128, 128, true, no, no, {32 * K}},
    {"causal 128K", false, 32, 8, 128, 128, true, no, no, {128 * K}},
    {"causal 1M, 8:2 heads", false, 8, 2, 128, 128, true, no, no, {K * K}},
    {"full 8K", true, 32, 8, 128, 128, false, no, no, {8 * K}},
    {"a head for each (MHA)", false, 32, 32, 128, 128, true, no, no, {8 * K}},
    {"one key head (MQA)", false, 32, 1, 128, 128, true, no, no, {8 * K}},
    {"6:2 heads", false, 6, 2, 128, 128, true, no, no, {8 * K}},
    {"1:1 heads", false, 1, 1, 128, 128, true, no, no, {8 * K}},
    {"d 8", false, 32, 8, 8, 8, true, no, no, {8 * K}},
    {"d 16", false, 32, 8, 16, 16, true, no, no, {8 * K}},
    {"d 24", false, 32, 8, 24, 24, true, no, no, {8 * K}},
    {"d 32", false, 32, 8, 32, 32, true, no, no, {8 * K}},
    {"d 64", true, 32, 8, 64, 64, true, no, no, {8 * K}},
    {"d 72", false, 32, 8, 72, 72, true, no, no, {8 * K}},
    {"d 80", false, 32, 8, 80, 80, true, no, no, {8 * K}},
    {"d 96", false, 32, 8, 96, 96, true, no, no, {8 * K}},
    {"d 192 and 128", false, 16, 16, 192, 128, true, no, no, {8 * K}},
    {"d 64 and 128", false, 16, 16, 64, 128, true, no, no, {8 * K}},
    {"d 256 and 128", false, 16, 16, 256, 128, true, no, no, {8 * K}},
    {"d 256", false, 16, 8, 256, 256, true, no, no, {8 * K}},
    {"d 264", false, 16, 8, 264, 264, true, no, no, {8 * K}},
    {"d 12", false, 16, 8, 12, 12, true, no, no, {8 * K}},
    {"F32", true, 32, 8, 128, 128, true, no, no, {8 * K}, {}, TOKENS, ULY_F32},
    {"1000 tokens", false, 32, 8, 128, 128, true, no, no, {1000}},
    {"77 tokens", false, 32, 8, 128, 128, true, no, no, {77}},
    {"2 tokens", false, 32, 8, 128, 128, true, no, no, {2}},
    {"77 tokens, 3:1 heads", false, 3, 1, 128, 128, true, no, no, {77}},
    {"full, 1000 tokens", false, 32, 8, 128, 128, false, no, no, {1000}},
    {"1 token", false, 32, 8, 128, 128, true, no, no, {1}},
    {"causal, 2K queries of 8K keys", false, 32, 8, 128, 128, true, no, no, {2 * K}, {8 * K}},
    {"causal, 1 query of 8K keys", false, 32, 8, 128, 128, true, no, no, {1}, {8 * K}},
    {"full, 77 queries of 1000 keys", false, 32, 8, 128, 128, false, no, no, {77}, {1000}},
    {"full, 1000 queries of 77 keys", false, 32, 8, 128, 128, false, no, no, {1000}, {77}},
    {"causal, more queries than keys", true, 32, 8, 128, 128, true, no, no, {8 * K}, {2 * K}},
    {"causal, window of 1023 before", true, 32, 8, 128, 128, true, 1023, no, {8 * K}},
    {"causal, window of 0 before", false, 32, 8, 128, 128, true, 0, no, {8 * K}},
    {"causal, window, 2K queries of 8K keys", false, 32, 8, 128, 128, true, 511, no, {2 * K}, {8 * K}},
    {"window of 511 before, all after", false, 32, 8, 128, 128, false, 511, no, {8 * K}},
    {"window of 511 before, 2K queries of 8K keys", false, 32, 8, 128, 128, false, 511, no, {2 * K}, {8 * K}},
    {"window of 511 before, 8K queries of 2K keys", false, 32, 8, 128, 128, false, 511, no, {8 * K}, {2 * K}},
    {"window of 255 before and after", true, 32, 8, 128, 128, false, 255, 255, {8 * K}},
    {"window of 255 before, 0 after", false, 32, 8, 128, 128, false, 255, 0, {8 * K}},
    {"inside fused q, k, v", false, 32, 8, 128, 128, true, no, no, {8 * K}, {}, FUSED},
    {"heads before tokens", false, 32, 8, 128, 128, true, no, no, {8 * K}, {}, HEADS},
    {"Qwen2.5-7B, rank 1 of 8", true, 4, 2, 128, 128, true, no, no, {8 * K}, {}, TOKENS, ULY_BF16, {0, 0, 0, 1}},
    {"Qwen2.5-7B, rank 5 of 8", false, 3, 2, 128, 128, true, no, no, {8 * K}, {}, TOKENS, ULY_BF16, {0, 0, 1}},
    {"Llama, rank 0 of 3",
     false,
     11,
     3,
     128,
     128,
     true,
     no,
     no,
     {8 * K},
     {},
     TOKENS,
     ULY_BF16,
     {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2}},
    {"Llama, rank 1 of 3",
     true,
     11,
     4,
     128,
     128,
     true,
     no,
     no,
     {8 * K},
     {},
     TOKENS,
     ULY_BF16,
     {0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3}},
    {"Llama, rank 1 of 3, 77 tokens",
     false,
     11,
     4,
     128,
     128,
     true,
     no,
     no,
     {77},
     {},
     TOKENS,
     ULY_BF16,
     {0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3}},
    {"Llama, rank 1 of 6", false, 6, 2, 128, 128, true, no, no, {8 * K}, {}, TOKENS, ULY_BF16, {0, 0, 1, 1, 1, 1}},
    {"Llama, rank 3 of 6", false, 5, 2, 128, 128, true, no, no, {8 * K}, {}, TOKENS, ULY_BF16, {0, 0, 0, 1, 1}},
    {"a key head that is not used", false, 4, 3, 128, 128, true, no, no, {8 * K}, {}, TOKENS, ULY_BF16, {0, 0, 2, 2}},
    {"9 groups, none as large as the one before",
     false,
     13,
     9,
     128,
     128,
     true,
     no,
     no,
     {8 * K},
     {},
     TOKENS,
     ULY_BF16,
     {0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8}},
    {"2 documents of 4K", true, 32, 8, 128, 128, true, no, no, times(2, 4 * K)},
    {"2 documents of 4K, heads before tokens", false, 32, 8, 128, 128, true, no, no, times(2, 4 * K), {}, HEADS},
    {"3 documents", true, 32, 8, 128, 128, true, no, no, {4 * K, 3 * K, K}},
    {"3 documents, 3:1 heads, 1001 tokens", false, 3, 1, 128, 128, true, no, no, {500, 300, 201}},
    {"32 documents of 1K", false, 32, 8, 128, 128, true, no, no, times(32, K)},
    {"24K and 64 short documents", false, 32, 8, 128, 128, true, no, no, join({24 * K}, times(64, 128))},
    {"128K of documents of 8K", false, 32, 8, 128, 128, true, no, no, times(16, 8 * K)},
    {"64K in one and 4096 of 16", false, 32, 8, 128, 128, true, no, no, join({64 * K}, times(4096, 16))},
    {"documents, full", false, 32, 8, 128, 128, false, no, no, mixed},
    {"documents, MHA", false, 32, 32, 128, 128, true, no, no, mixed},
    {"documents, window of 511 before", false, 32, 8, 128, 128, true, 511, no, mixed},
    {"documents, window, all after", false, 32, 8, 128, 128, false, 511, no, mixed},
    {"documents, fewer queries than keys", false, 32, 8, 128, 128, true, no, no, {K, 2 * K, 512}, {2 * K, 2 * K, K}},
    {"documents, fewer queries than keys, window",
     false,
     32,
     8,
     128,
     128,
     true,
     100,
     no,
     {K, 2 * K, 512},
     {2 * K, 2 * K, K}},
    {"documents, full, more queries than keys",
     false,
     32,
     8,
     128,
     128,
     false,
     no,
     no,
     {K, 2 * K, 512},
     {128, 2 * K, K}},
    {"documents, one without queries", false, 32, 8, 128, 128, true, no, no, {K, 0, 512}, {K, K, 512}},
    {"documents, one whose queries see no key", false, 32, 8, 128, 128, false, no, no, {K, K}, {K, 0}},
    {"documents, d 64", false, 32, 8, 64, 64, true, no, no, mixed},
    {"documents, d 72", false, 32, 8, 72, 72, true, no, no, mixed},
    {"documents, d 96", false, 32, 8, 96, 96, true, no, no, mixed},
    {"documents, d 192 and 128", false, 16, 16, 192, 128, true, no, no, mixed},
    {"documents, d 256", false, 16, 8, 256, 256, true, no, no, mixed},
    {"documents inside fused q, k, v", false, 32, 8, 128, 128, true, no, no, mixed, {}, FUSED},
    {"documents, Qwen2.5-7B, rank 1 of 8",
     true,
     4,
     2,
     128,
     128,
     true,
     no,
     no,
     mixed,
     {},
     TOKENS,
     ULY_BF16,
     {0, 0, 0, 1}},
    {"documents, Llama, rank 1 of 3",
     false,
     11,
     4,
     128,
     128,
     true,
     no,
     no,
     mixed,
     {},
     FUSED,
     ULY_BF16,
     {0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3}},
    {"documents, heads before tokens", false, 32, 8, 128, 128, true, no, no, mixed, {}, HEADS},
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
  if (at == std::string::npos) return fprintf(stderr, "%s: not a file of properties\n", argv[1]), 2;
  const int sm = atoi(properties.c_str() + at + strlen("\"deviceVer\":")) / 10;
  const bool small = argc > 2 && !strcmp(argv[2], "small");

  int wrong = 0;
  printf("| case | pass | serves | engine, or why not | workspace, MiB |\n| --- | --- | --- | --- | --- |\n");
  for (const item &c : items) {
    for (int backward = 0; backward < 2; backward++) {
      if (small && !c.small) continue;
      const call x(c, backward);
      sdpa_subcalls cut;
      const char *why = sdpa_split(x.a, &cut);
      bool served = !why;
      std::string said = why ? why : "";
      int64_t bytes = 0; // the parts run one after another
      for (int64_t i = 0; served && i < cut.n; i++) {
        sdpa_shape shape;
        int64_t workspace = 0;
        std::string engine;
        why = sdpa_describe(sdpa_subcall_of(x.a, cut.call[i]), &shape);
        served = !why && sdpa_plan(shape, properties, sm, &workspace, &engine);
        if (!served) {
          said = why ? why : engine;
          break;
        }
        said += cut.n == 1
                    ? engine
                    : (i ? ", " : "") + std::to_string(shape.hq) + ":" + std::to_string(shape.hkv) + " " + engine;
        const int64_t all = sdpa_layout_of(shape).plan + workspace;
        bytes = most(bytes, all);
        if (shape.packed && all > sdpa_bound(shape)) {
          printf("%s: %lld bytes, but the bound says %lld\n", c.name, (long long)all, (long long)sdpa_bound(shape));
          wrong++;
        }
      }
      for (char &b : said) // one line, and no bars in it
        if (b == '\n' || b == '|') b = ' ';
      if (said.size() > 160) said = said.substr(0, 160) + "…";
      printf("| %s | %s | %s | %s | ", c.name, backward ? "backward" : "forward", served ? "cuDNN" : "own",
             said.c_str());
      if (served) printf("%.1f", static_cast<double>(bytes) / (1 << 20));
      printf(" |\n");
      fflush(stdout);
    }
  }
  return wrong != 0;
}
