// Compares the calls of cuDNN with the definition of attention: by cuDNN's documentation, its masks
// must leave the same keys. cuda/headers_test.go compiles and runs this test.
#include "sdpa_shape.h"

#include "host_test.h"

#include <string>
#include <vector>

// A call whose tensors are stored token by token, with `gap` elements after each token.
struct call {
  AttentionArgs a = {};
  uly_window window = {-1, -1};
  std::vector<int64_t> cu_q{0}, cu_k{0};
  call(std::vector<int64_t> sq, std::vector<int64_t> sk, int64_t hq = 4, int64_t hkv = 2, int64_t d = 16,
       int64_t dv = 16, int64_t gap = 0) {
    for (int64_t n : sq) cu_q.push_back(cu_q.back() + n);
    for (int64_t n : sk) cu_k.push_back(cu_k.back() + n);
    a.scale = 0.25, a.causal = true;
    a.q = tensor(cu_q.back(), hq, d, gap), a.k = tensor(cu_k.back(), hkv, d, gap),
    a.v = tensor(cu_k.back(), hkv, dv, gap), a.out = tensor(cu_q.back(), hq, dv, gap);
  }
  static uly_tensor tensor(int64_t tokens, int64_t heads, int64_t width, int64_t gap) {
    uly_tensor t = {};
    t.dtype = ULY_BF16, t.where = ULY_CUDA, t.ndim = 3;
    t.shape[0] = tokens, t.shape[1] = heads, t.shape[2] = width;
    t.stride[0] = heads * width + gap, t.stride[1] = width, t.stride[2] = 1;
    return t;
  }
  void gradients() { a.backward = true, a.dq = a.q, a.dk = a.k, a.dv = a.v, a.dout = a.out; }
  const char *describe(sdpa_shape *s) {
    const auto list = [](const std::vector<int64_t> &x) {
      return uly_list{x.data(), static_cast<int64_t>(x.size()), static_cast<int64_t>(x.size())};
    };
    a.cu_q = list(cu_q), a.cu_k = list(cu_k), a.window = &window;
    return sdpa_describe(a, s);
  }
  bool refused(const char *why) {
    sdpa_shape s;
    const char *said = describe(&s);
    if (said && strstr(said, why)) return true;
    printf("said: %s\n", said ? said : "served");
    return false;
  }
};

static void masks() {
  int served = 0;
  for (int64_t sq = 1; sq <= 6; sq++)
    for (int64_t sk = 1; sk <= 6; sk++)
      for (int causal = 0; causal < 2; causal++)
        for (int64_t left = -1; left <= 7; left++)
          for (int64_t right = -1; right <= 7; right++) {
            call c({sq}, {sk});
            c.a.causal = causal, c.window = {left, right};
            sdpa_shape s;
            const char *why = c.describe(&s);
            bool empty = false, ahead = false, same = true;
            for (int64_t i = 0; i < sq; i++) {
              int64_t keys = 0;
              for (int64_t j = 0; j < sk; j++) {
                const int64_t at = i + sk - sq; // the definition (device/ops.go)
                const bool sees =
                    (!causal || j <= at) && (left < 0 || j >= at - left) && (right < 0 || j <= at + right);
                const int64_t row = i + (s.bottom_right ? sk - sq : 0); // in cuDNN
                const bool told = (!s.causal || j <= row) && (!s.left || j + s.left > row);
                keys += sees, same = same && sees == told, ahead = ahead || (sees && j > at);
              }
              empty = empty || keys == 0;
            }
            CHECK(why || (same && !empty), "%lld x %lld, causal %d, window %lld %lld: another mask", (long long)sq,
                  (long long)sk, causal, (long long)left, (long long)right);
            CHECK(!why || empty || right > 0 || (left >= 0 && sq > sk), "%lld x %lld, causal %d, window %lld %lld: %s",
                  (long long)sq, (long long)sk, causal, (long long)left, (long long)right, why);
            served += !why;
          }
  CHECK(served > 1000, "%d served", served);
}

static void packed() {
  call c({100, 0, 300, 7}, {100, 0, 300, 7}, 8, 2, 64, 32, 16);
  sdpa_shape s;
  const char *why = c.describe(&s);
  CHECK(!why && s.packed && s.b == 4 && s.sq == 512 && s.sk == 512 && !s.bottom_right && s.tokens_q == 512,
        "three documents: %s", why ? why : "");
  CHECK(s.q.token == 8 * 64 + 16 && s.q.head == 64 && sdpa_token(s, SDPA_V) == 2 * 32 + 16 &&
            sdpa_token(s, SDPA_STATS) == 8,
        "strides");
  CHECK(sdpa_statistics_of(s).at(406, 7) == 406 * 8 + 7, "statistics");
  sdpa_shape other; // another packing with the same plan
  CHECK(!call({200, 200, 7}, {200, 200, 7}, 8, 2, 64, 32, 16).describe(&other) && other.b == 4 && other.sq == 256,
        "buckets");
  CHECK(sdpa_statistics_of(other).at(406, 7) == 406 * 8 + 7, "statistics after the longest document");
  CHECK(!call({150, 250, 11}, {150, 250, 11}, 8, 2, 64, 32, 16).describe(&s) && memcmp(&s, &other, sizeof s) == 0,
        "another packing needs another plan");
  CHECK(!call({100, 200}, {100, 300}).describe(&s) && s.bottom_right && s.b == 2 && s.sq == 256 && s.sk == 512,
        "fewer queries than keys");
  std::vector<int64_t> many(8192, 2);
  many[5] = 3;
  CHECK(!call(many, many).describe(&s) && s.packed && s.b == 8192, "8192 documents");
  const sdpa_layout l = sdpa_layout_of(s);
  CHECK(l.lengths_k >= l.lengths_q + 4 * s.b && l.offsets >= l.lengths_k + 4 * s.b &&
            l.stats >= l.offsets + 8 * SDPA_OFFSETS * (s.b + 1) && l.plan >= l.stats + 4 * s.hq * s.tokens_q,
        "ranges of the workspace overlap");
  for (int64_t at : {l.lengths_q, l.lengths_k, l.offsets, l.stats, l.plan})
    CHECK(at % 256 == 0, "a range that is not aligned");
  many.push_back(2);
  CHECK(call(many, many).refused("8192"), "8193 documents");
  const int64_t far = ((int64_t)1 << 31) / (4 * 128);
  call most({far - 1}, {far - 1}, 4, 4, 128, 128), over({far + 1}, {far + 1}, 4, 4, 128, 128);
  CHECK(!over.describe(&s), "forward over 2^31 elements");
  most.gradients(), over.gradients();
  CHECK(!most.describe(&s) && over.refused("2^31"), "backward over 2^31 elements");
}

static void dense() {
  sdpa_shape s;
  CHECK(!call({407}, {407}).describe(&s) && !s.packed && s.b == 1 && s.sq == 407 && s.tokens_q == 407,
        "one document is dense");
  CHECK(!call({0, 407, 0}, {0, 407, 0}).describe(&s) && !s.packed && s.b == 1, "one document with tokens is dense");
  CHECK(!call({70, 70, 0, 70}, {90, 90, 0, 90}, 6, 2).describe(&s) && !s.packed && s.b == 3 && s.sq == 70 &&
            s.sk == 90 && s.bottom_right,
        "documents of one length are dense");
  const sdpa_statistics where = sdpa_statistics_of(s);
  for (int64_t document = 0; document < 3; document++)
    for (int64_t row : {0, 1, 69})
      for (int64_t h : {0, 5})
        CHECK(where.at(document * 70 + row, h) == (document * 6 + h) * 70 + row, "statistics of document %lld",
              (long long)document);
  CHECK(!call({70, 70}, {90, 91}).describe(&s) && s.packed, "keys of two lengths");

  // Dense calls that are sent as packed calls.
  auto way = [&](int64_t sq, int64_t sk, int64_t hq, bool causal, bool backward) {
    call c({sq}, {sk}, hq, 1);
    if (backward) c.gradients();
    c.a.causal = causal;
    const char *why = c.describe(&s);
    return why ? 'r' : s.packed ? 'p' : 'd';
  };
  for (bool backward : {false, true})
    for (bool causal : {false, true}) {
      CHECK(way(1, 1, 4, causal, backward) == 'p' && way(1, 512, 4, causal, backward) == 'p', "one query");
      CHECK(way(256, 256, 4, causal, backward) == 'd' && way(256, 512, 1, causal, backward) == 'd', "whole tiles");
      CHECK(way(192, 192, 4, causal, backward) == (backward && !causal ? 'p' : 'd') &&
                way(256, 1000, 4, causal, backward) == (backward && !causal ? 'p' : 'd'),
            "a partial tile of keys");
      CHECK(way(77, 128, 6, causal, backward) == (backward ? 'p' : 'd') && way(77, 128, 4, causal, backward) == 'd',
            "statistics that are not a multiple of 16 bytes");
    }
}

// The frontend passes the workspace after its own sums to the engine. In a packed call it must be
// aligned to 256 bytes, in a dense call to 16 bytes.
static void aligned() {
  for (int64_t hq : {1, 3, 4, 7})
    for (int64_t n = 2; n < 300; n += 7)
      for (int64_t d : {8, 16, 64}) {
        call some({n, n + 1}, {n, n + 1}, hq, 1, d, d, 8), one({n}, {n}, hq, 1, d, d);
        sdpa_shape s;
        some.gradients(), one.gradients();
        if (!some.describe(&s)) {
          const int64_t sums =
              s.tokens_q * s.dq.token + s.tokens_k * hq * (s.dk.token + s.dgv.token) + s.tokens_q * s.hq;
          CHECK(s.packed && 4 * sums % 256 == 0 && s.tokens_q >= 2 * n + 1, "packed: %lld bytes of sums",
                (long long)(4 * sums));
        } else {
          CHECK(d % 16 != 0, "refused");
        }
        if (!one.describe(&s) && !s.packed)
          CHECK(4 * s.hq * s.sq * (s.d + 1) % 16 == 0, "dense: %lld rows of %lld heads", (long long)n, (long long)hq);
      }
}

static void refusals() {
  auto with = [](auto change) {
    call c({64, 32}, {64, 32});
    change(c);
    return c;
  };
  CHECK(with([](call &c) { c.a.k.dtype = ULY_F32; }).refused("BF16"), "types");
  CHECK(with([](call &c) { c.a.q.stride[0] += 1; }).refused("16 bytes"), "strides");
  CHECK(with([](call &c) { c.a.v.stride[1] = 0; }).refused("16 bytes"), "all heads at one address");
  CHECK(with([](call &c) { c.a.out.data = reinterpret_cast<void *>(8); }).refused("aligned"), "alignment");
  CHECK(with([](call &c) { c.a.q.stride[2] = 2; }).refused("dense"), "last axis");
  CHECK(with([](call &c) { c.window.right = 3, c.a.causal = 0; }).refused("later keys"), "look ahead");
  CHECK(with([](call &c) { c.a.scale = NAN; }).refused("finite"), "scale");
  CHECK(call({64}, {64}, 4, 2, 264, 8).refused("head sizes"), "d 264");
  CHECK(call({64}, {64}, 4, 2, 20, 16).refused("16 bytes"), "d 20");
  CHECK(call({64, 0}, {0, 64}).refused("no key"), "queries without keys");
  CHECK(call({0}, {0}).refused("no tokens"), "no tokens");
  sdpa_shape s;
  // Packed, with heads before tokens: cuDNN would find its sums by the token stride.
  auto turned = [](uly_tensor &t) { t.stride[0] = t.shape[2], t.stride[1] = t.shape[0] * t.shape[2]; };
  CHECK(with([&](call &c) { turned(c.a.q); }).refused("token's stride"), "heads before tokens");
  CHECK(with([&](call &c) { c.gradients(), turned(c.a.dk); }).refused("gradients"), "gradients, heads before tokens");
  call dense({64, 64}, {64, 64});
  turned(dense.a.q);
  CHECK(!dense.describe(&s) && !s.packed && s.q.head == 128 * 16 && s.q.token == 16,
        "documents of one length, heads before tokens");
  CHECK(with([](call &c) { c.gradients(); }).describe(&s) == nullptr && s.backward, "backward");
  CHECK(call({64, 0}, {64, 64}).refused("no queries"), "a document without queries");
  call before({96}, {64}, 4, 2), within({64}, {96}, 4, 2);
  before.a.causal = 0, before.window.left = within.window.left = 5;
  CHECK(before.refused("more queries than keys") && !within.describe(&s), "a window and more queries than keys");
  for (int64_t dv : {64, 128, 192, 256})
    for (int64_t d : {64, 128, 192, 256}) {
      call differ({64, 32}, {64, 32}, 4, 2, d, dv);
      CHECK(!differ.describe(&s), "d %lld and %lld, forward", (long long)d, (long long)dv);
      differ.gradients();
      const bool served = d == dv || d < 128 || dv < 128 || (d == 192 && dv == 128);
      CHECK(served ? !differ.describe(&s) : differ.refused("of 128 or more"), "d %lld and %lld, backward", (long long)d,
            (long long)dv);
    }
  call eight({64, 32}, {64, 32}, 4, 2, 24, 24);
  CHECK(!eight.describe(&s), "d 24, forward");
  eight.gradients();
  CHECK(eight.refused("multiples of 16"), "d 24, backward");
}

// A query for workspace has no documents and no gradients. The result must be enough for all
// documents.
static void questions() {
  call c({4096}, {4096}, 32, 8, 128, 128);
  c.a.backward = true;
  sdpa_shape s;
  CHECK(sdpa_describe(c.a, &s) == nullptr && !s.packed && s.sq == 4096 && s.dq.token == s.q.token &&
            s.dgv.token == s.v.token,
        "a query");
  const int64_t bound = sdpa_bound(s);
  CHECK(bound >= 4 * 4096 * (32 * 128 + 32 * 128 * 2), "a bound without the sums");
  for (int64_t n : {2, 5, 64, 4096})
    for (int64_t longer : {0, 1}) { // the last one, so that lengths differ
      std::vector<int64_t> lengths(static_cast<size_t>(n), (4096 - longer) / n);
      lengths.back() = 4096 - (n - 1) * lengths[0];
      call some(lengths, lengths, 32, 8, 128, 128);
      some.gradients();
      sdpa_shape t;
      CHECK(!some.describe(&t) && sdpa_bound(t) <= bound, "%lld documents: beyond the bound", (long long)n);
    }
  sdpa_shape odd; // rounded like the calls that the bound is for
  CHECK(!call({4001}, {4001}).describe(&s) && !call({4000, 1}, {4000, 1}).describe(&odd) &&
            sdpa_bound(odd) == sdpa_bound(s),
        "a bound of tokens that are not rounded");
  call far({SDPA_TOKENS}, {SDPA_TOKENS}, 128, 128, 256, 256);
  CHECK(!far.describe(&s) && sdpa_layout_of(s).plan >= 4 * 128 * SDPA_TOKENS, "far lengths");
  const int64_t far_tokens = SDPA_TOKENS - 128;
  call wide({far_tokens}, {far_tokens}, 1, 1, 16, 16);
  wide.gradients();
  CHECK(!wide.describe(&s) && sdpa_bound(s) > 4 * 16 * far_tokens, "far lengths, backward");
  CHECK(call({SDPA_TOKENS + 1}, {SDPA_TOKENS + 1}).refused("16 million"), "too far");
}

int main() {
  masks();
  packed();
  dense();
  aligned();
  refusals();
  questions();
  return test_status();
}
