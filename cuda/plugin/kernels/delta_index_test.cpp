// Compares chunks, seams, groups of heads and workspaces of the gated delta rule with their
// definitions, also with extents beyond any memory. cuda/headers_test.go compiles and runs this
// test.
#include "delta_index.h"

#include "host_test.h"

#include <map>
#include <set>
#include <vector>

static uint64_t state = 1;
static int64_t below(int64_t n) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (int64_t)((state >> 33) % (uint64_t)n);
}

// Every token is in one chunk of its document, all chunks but the last are full, and seams are
// numbered without gaps.
static void chunks(const std::vector<int64_t> &cu, int64_t asked) {
  const int64_t documents = (int64_t)cu.size() - 1, tokens = cu.back();
  const DeltaShape s = delta_shape(tokens, 1, 1, 16, 16, asked, nullptr);
  const int64_t n = delta_documents(cu.data(), documents, tokens);
  const DeltaLayout l = delta_layout(s, n, DELTA_BACKWARD);
  std::map<int64_t, int64_t> at;
  const int64_t count = delta_tables(s, l, cu.data(), documents, false, [&](int64_t byte, int64_t value) {
    CHECK(byte >= 0 && byte + 8 <= l.unit_q && at.count(byte) == 0, "entry at byte %lld", (long long)byte);
    at[byte] = value;
  });
  std::vector<int64_t> start, before, document;
  for (int64_t i = 0; i <= n; i++) start.push_back(at[l.start + 8 * i]), before.push_back(at[l.chunks + 8 * i]);
  for (int64_t i = 0; i < n; i++) document.push_back(at[l.document + 8 * i]);
  int64_t token = 0, seams = 0;
  for (int64_t i = 0; i < count; i++) {
    const DeltaChunk c = delta_find(start.data(), before.data(), n, i, (int)s.chunk);
    const int64_t d = document[(size_t)c.document];
    CHECK(c.token == token && c.rows >= 1 && c.rows <= s.chunk, "chunk %lld is at %lld of %d rows, want %lld",
          (long long)i, (long long)c.token, c.rows, (long long)token);
    CHECK(cu[d] <= c.token && c.token + c.rows <= cu[d + 1], "chunk %lld is not in document %lld", (long long)i,
          (long long)d);
    CHECK(c.first == (c.token == cu[d]) && c.last == (c.token + c.rows == cu[d + 1]), "chunk %lld: first %d, last %d",
          (long long)i, c.first, c.last);
    CHECK(c.last || c.rows == s.chunk, "chunk %lld has %d rows and is not the last", (long long)i, c.rows);
    CHECK(c.first || c.seam - 1 == seams - 1, "chunk %lld: the seam before it is %lld, want %lld", (long long)i,
          (long long)c.seam - 1, (long long)seams - 1);
    CHECK(c.last || c.seam == seams, "chunk %lld: the seam after it is %lld, want %lld", (long long)i,
          (long long)c.seam, (long long)seams);
    token += c.rows, seams += !c.last;
  }
  CHECK(token == tokens && seams <= s.seams(), "%lld tokens, %lld seams of %lld", (long long)token, (long long)seams,
        (long long)s.seams());
}

// Groups of heads follow each other without gaps. The value heads of a key head are in one group.
// Key heads belong to the group in which their value heads end.
static void heads(const std::vector<int64_t> &key, int64_t key_heads, int64_t tokens) {
  const DeltaShape s = delta_shape(tokens, key_heads, (int64_t)key.size(), 128, 128, 0, key.data());
  const DeltaLayout l = delta_layout(s, 1, DELTA_BACKWARD);
  DeltaHeads h = {};
  for (int i = 0;; i++) {
    const DeltaHeads next = delta_heads(s, l, h);
    CHECK(next.lo == h.hi && next.key_lo == h.key_hi, "heads %lld.. after %lld", (long long)next.lo, (long long)h.hi);
    CHECK(next.hi - next.lo <= l.heads, "%lld heads, room for %lld", (long long)(next.hi - next.lo),
          (long long)l.heads);
    CHECK(next.hi > next.lo || s.value_heads == 0, "no heads");
    for (int64_t v = 0; v < s.value_heads; v++)
      CHECK((next.lo <= v && v < next.hi) == (next.key_lo <= key[(size_t)v] && key[(size_t)v] < next.key_hi),
            "value head %lld of key head %lld", (long long)v, (long long)key[(size_t)v]);
    h = next;
    if (h.hi == s.value_heads || i > 1000) break;
  }
  CHECK(h.hi == s.value_heads && h.key_hi == key_heads, "%lld heads, %lld key heads", (long long)h.hi,
        (long long)h.key_hi);
}

// The workspace for unknown documents is enough for any documents, and that for many tokens is
// enough for fewer. The heads of a group fit into the limit.
static void sizes(int64_t tokens, int64_t key_heads, int64_t group, int64_t dk, int64_t dv) {
  const DeltaShape s = delta_shape(tokens, key_heads, key_heads * group, dk, dv, 0, nullptr);
  CHECK(s.group == group, "groups of %lld", (long long)s.group);
  for (DeltaPass pass : {DELTA_FORWARD, DELTA_BACKWARD, DELTA_STATE}) {
    const DeltaLayout all = delta_layout(s, tokens, pass), few = delta_layout(s, 1, pass);
    CHECK(few.bytes <= all.bytes && few.heads == all.heads, "%lld bytes for one document, %lld for any",
          (long long)few.bytes, (long long)all.bytes);
    CHECK(all.heads >= group && all.heads <= s.value_heads, "%lld heads at a time", (long long)all.heads);
    const int64_t one = tokens * (16 + 4 * s.chunk);
    CHECK(few.bytes > few.heads * one, "%lld bytes", (long long)few.bytes);
    for (int64_t fewer : {tokens / 2, tokens - tokens / 8, tokens - 1}) {
      const DeltaLayout less =
          delta_layout(delta_shape(fewer, key_heads, key_heads * group, dk, dv, 0, nullptr), 1, pass);
      CHECK(less.bytes <= few.bytes, "%lld bytes for %lld tokens, %lld for %lld", (long long)less.bytes,
            (long long)fewer, (long long)few.bytes, (long long)tokens);
    }
    CHECK(few.heads == s.value_heads || few.heads == group || few.bytes - few.decay <= DELTA_GROUP_BYTES + 4096,
          "%lld bytes of %lld heads", (long long)few.bytes, (long long)few.heads);
  }
}

int main() {
  for (int64_t dk = 1; dk <= DELTA_HEAD; dk++) {
    const int64_t bytes =
        most(delta_scan_bytes((int)dk, (int)delta_chunk(0, dk)), most(DELTA_PREPARE, most(DELTA_OUT, DELTA_GRADIENTS)));
    CHECK(bytes <= 99 << 10, "keys of %lld need %lld bytes of shared memory", (long long)dk, (long long)bytes);
  }
  for (int64_t asked : {0, 16, 17, 31, 32, 63, 64, 1000}) {
    const int64_t c = delta_chunk(asked, 128), wide = delta_chunk(asked, 129);
    CHECK(c % 16 == 0 && c >= 16 && c <= 64 && (asked == 0 || c <= asked) && wide <= 32 && wide <= c,
          "chunk %lld of %lld", (long long)c, (long long)asked);
    for (int round = 0; round < 200; round++) {
      std::vector<int64_t> cu = {0};
      for (int64_t i = below(12); i >= 0; i--) cu.push_back(cu.back() + (below(3) ? below(4) : below(300)));
      chunks(cu, asked);
    }
    chunks({0}, asked);
    chunks({0, 0, 0}, asked);
    for (int64_t n : {1, 63, 64, 65, 127, 128, 129}) chunks({0, n, 2 * n, 2 * n}, asked);
  }
  const int64_t far = 3ll << 32; // a chunk beyond 2^32 tokens
  const int64_t start[] = {0, far, far + 100}, before[] = {0, far / 64, far / 64 + 2};
  const DeltaChunk c = delta_find(start, before, 2, far / 64 + 1, 64);
  CHECK(c.document == 1 && c.token == far + 64 && c.rows == 36 && c.last && !c.first && c.seam == far / 64,
        "a chunk at %lld", (long long)c.token);
  for (int round = 0; round < 300; round++) {
    std::vector<int64_t> key;
    const int64_t key_heads = 1 + below(6);
    for (int64_t k = 0; k < key_heads; k++)
      for (int64_t i = below(5); i > 0; i--) key.push_back(k);
    heads(key, key_heads, 1ll << below(24));
  }
  for (int64_t tokens : {1, 64, 1000, 8192, 1 << 20, 1 << 26})
    for (int64_t group : {1, 2, 5})
      for (int64_t d : {16, 128, 256}) sizes(tokens, 8, group, d, 256 - d + 16);
  return test_status();
}
