// Compares chunks, seams, panels and workspaces of the gated delta rule with their
// definitions, also with extents beyond any memory. cuda/headers_test.go compiles and runs this
// test.
#include "delta_index.h"

#include "host_test.h"

#include <algorithm>
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
  const DeltaShape s = delta_shape(2, tokens, 1, 1, 16, 16, asked, nullptr);
  const int64_t n = delta_documents(cu.data(), documents, tokens);
  const DeltaLayout l = delta_layout(s, n, DELTA_BACKWARD, true);
  std::map<int64_t, int64_t> at;
  const int64_t count =
      delta_tables(s, l, cu.data(), documents, false, DELTA_UNDIVIDED, [&](int64_t byte, int64_t value) {
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
  CHECK(token == tokens && seams <= tokens / s.chunk, "%lld tokens, %lld seams", (long long)token, (long long)seams);
}

// The borders of panels, in order and in reverse order, agree with the chunks: every chunk is in
// the panel in whose range it begins, and each panel fits into the memory of the layout.
static void panels(const std::vector<int64_t> &cu, int64_t asked, int64_t heads) {
  const int64_t documents = (int64_t)cu.size() - 1, tokens = cu.back();
  const DeltaShape s = delta_shape(2, tokens, 1, heads, 16, 16, asked, nullptr);
  const int64_t n = delta_documents(cu.data(), documents, tokens), stride = delta_stride(s), count = delta_panels(s);
  const DeltaLayout l = delta_layout(s, n, DELTA_BACKWARD, true);
  if (tokens == 0) return;
  struct Start {
    int64_t token, document, index, of;
  };
  std::vector<Start> starts; // of chunks
  int64_t document = 0;
  for (int64_t i = 0; i < documents; i++) {
    const int64_t rows = cu[i + 1] - cu[i], of = ceil_div(rows, s.chunk);
    for (int64_t j = 0; j < of; j++) starts.push_back({cu[i] + j * s.chunk, document, j, of});
    document += rows > 0;
  }
  starts.push_back({tokens, document, 0, 0});
  DeltaBorders border = {cu.data(), tokens, s.chunk, DELTA_UNDIVIDED};
  std::vector<DeltaBorder> found;
  for (int64_t p = 0; p <= count; p++) found.push_back(border(p * stride));
  for (int64_t p = count; p >= 0; p--) {
    const DeltaBorder again = border(p * stride), &b = found[(size_t)p];
    CHECK(again.chunk == b.chunk && again.token == b.token && again.document == b.document && again.seam == b.seam &&
              again.crossed == b.crossed,
          "border %lld differs in reverse order", (long long)p);
    int64_t chunk = 0, seam = 0;
    while (starts[(size_t)chunk].token < p * stride && starts[(size_t)chunk].token < tokens) chunk++;
    const Start &want = starts[(size_t)chunk];
    for (int64_t i = 0; i < chunk; i++) seam += starts[(size_t)i].index + 1 < starts[(size_t)i].of;
    seam -= want.index > 0;
    CHECK(b.chunk == chunk && b.token == want.token && b.document == want.document && b.crossed == (want.index > 0) &&
              b.seam == seam,
          "border %lld: chunk %lld, token %lld, document %lld, seam %lld, crossed %d; want %lld, %lld, %lld, %lld, %d",
          (long long)p, (long long)b.chunk, (long long)b.token, (long long)b.document, (long long)b.seam, b.crossed,
          (long long)chunk, (long long)want.token, (long long)want.document, (long long)seam, want.index > 0);
    if (p == count) continue;
    const DeltaBorder &next = found[(size_t)p + 1];
    const int64_t slots = next.seam + next.crossed - b.seam;
    CHECK(next.token - b.token <= l.rows && slots <= l.slots, "panel %lld: %lld tokens of %lld, %lld states of %lld",
          (long long)p, (long long)(next.token - b.token), (long long)l.rows, (long long)slots, (long long)l.slots);
  }
  CHECK(found[0].chunk == 0 && found[0].token == 0 && found.back().token == tokens &&
            found.back().chunk == (int64_t)starts.size() - 1 && found.back().document == n,
        "the panels do not have all chunks");
}

// Segments have every chunk of a panel once, in order. A joint is between two segments of a
// document in a panel, joints are numbered without gaps, and the layout has memory for them.
static void segments(const std::vector<int64_t> &cu, int64_t asked, int64_t heads, int64_t dv) {
  const int64_t documents = (int64_t)cu.size() - 1, tokens = cu.back();
  const DeltaShape s = delta_shape(2, tokens, 1, heads, 16, dv, asked, nullptr);
  const int64_t n = delta_documents(cu.data(), documents, tokens), of = delta_segment(s, cu.data(), documents);
  if (tokens == 0) return;
  const DeltaLayout l = delta_layout(s, n, DELTA_FORWARD, true);
  CHECK(delta_layout(s, n, DELTA_FORWARD, false).joints == 0, "joints without division");
  std::map<int64_t, int64_t> at;
  delta_tables(s, l, cu.data(), documents, false, of, [&](int64_t byte, int64_t value) { at[byte] = value; });
  std::vector<int64_t> before, segments_before;
  for (int64_t i = 0; i <= n; i++)
    before.push_back(at[l.chunks + 8 * i]), segments_before.push_back(at[l.segments + 8 * i]);
  DeltaBorders border = {cu.data(), tokens, s.chunk, of};
  for (int64_t p = 0; p < delta_panels(s); p++) {
    const DeltaBorder lo = border(p * delta_stride(s)), hi = border((p + 1) * delta_stride(s));
    const int64_t count = hi.segments_end - lo.segment, chunks = hi.chunk - lo.chunk, joint0 = lo.segment - lo.document,
                  joints = count - (hi.document + hi.crossed - lo.document);
    CHECK(joints >= 0 && joints <= l.joints, "%lld joints in a panel, room for %lld", (long long)joints,
          (long long)l.joints);
    int64_t chunk = lo.chunk, joint = 0;
    bool led = false;
    for (int64_t i = 0; i < count; i++) {
      const DeltaSegment x =
          delta_segment_at(before.data(), segments_before.data(), n, lo.segment + i, of, lo.chunk, chunks);
      const int64_t first = before[(size_t)x.document], all = before[(size_t)x.document + 1] - first;
      CHECK(first + x.lo == chunk && x.hi > x.lo && x.hi - x.lo <= of, "segment %lld has chunks %lld to %lld",
            (long long)i, (long long)x.lo, (long long)x.hi);
      CHECK(x.begins == (x.lo == 0) && x.ends == (x.hi == all) && x.follows == led, "segment %lld: begins %d, ends %d",
            (long long)i, x.begins, x.ends);
      CHECK(x.leads == (x.hi < all && first + x.hi < hi.chunk), "segment %lld leads %d", (long long)i, x.leads);
      CHECK(!x.leads || x.joint - joint0 == joint, "segment %lld: joint %lld, want %lld", (long long)i,
            (long long)(x.joint - joint0), (long long)joint);
      CHECK(!x.follows || x.joint - 1 - joint0 == joint - 1, "segment %lld: the joint before it is %lld", (long long)i,
            (long long)(x.joint - 1 - joint0));
      joint += x.leads, led = x.leads, chunk = first + x.hi;
    }
    CHECK(chunk == hi.chunk && joint == joints, "the segments end at chunk %lld of %lld, with %lld joints of %lld",
          (long long)chunk, (long long)hi.chunk, (long long)joint, (long long)joints);
  }
}

// turns returns the time of a scan in chunks: the blocks, each with a time, take turns on the
// multiprocessors in their order.
static int64_t turns(const std::vector<int64_t> &blocks) {
  std::vector<int64_t> free((size_t)DELTA_MULTIPROCESSORS, 0);
  int64_t end = 0;
  for (int64_t time : blocks) {
    int64_t &first = *std::min_element(free.begin(), free.end());
    first += time, end = most(end, first);
  }
  return end;
}

// scan_time returns the time of the scan of a sequence of one document, in chunks of the scan, by
// the blocks of its launches.
static int64_t scan_time(int64_t tokens, int64_t heads, bool divided) {
  const int64_t cu[2] = {0, tokens};
  const DeltaShape s = delta_shape(2, tokens, heads, heads, 128, 128, 0, nullptr);
  const int64_t of = divided ? delta_segment(s, cu, 1) : DELTA_UNDIVIDED, before[2] = {0, ceil_div(tokens, s.chunk)},
                segments_before[2] = {0, ceil_div(before[1], of)}, slices = s.dv / DELTA_SLICE;
  DeltaBorders border = {cu, tokens, s.chunk, of};
  int64_t time = 0;
  for (int64_t p = 0; p < delta_panels(s); p++) {
    const DeltaBorder lo = border(p * delta_stride(s)), hi = border((p + 1) * delta_stride(s));
    std::vector<int64_t> partial, whole;
    for (int64_t n = lo.segment; n < hi.segments_end; n++) {
      const DeltaSegment x = delta_segment_at(before, segments_before, 1, n, of, lo.chunk, hi.chunk - lo.chunk);
      for (int64_t i = 0; i < heads * slices; i++) whole.push_back(x.hi - x.lo);
      for (int64_t i = 0; x.leads && i < heads * slices * (x.follows ? 2 : 1); i++) partial.push_back(x.hi - x.lo);
    }
    time += turns(whole) + turns(partial) + (hi.segments_end - lo.segment - 1) * DELTA_FOLD_CHUNKS;
  }
  return time;
}

// The scan of few heads is faster with segments, with many heads it is not divided, and its time
// grows linearly with the sequence.
static void divisions() {
  for (int64_t tokens : {16 << 10, 32 << 10, 128 << 10, 1 << 20})
    for (int64_t heads : {1, 2, 4, 8, 16, 32, 64}) {
      const int64_t time = scan_time(tokens, heads, true), alone = scan_time(tokens, heads, false),
                    chunks = tokens / DELTA_CHUNK;
      if (getenv("DELTA_COSTS"))
        printf("%lld heads %lld tokens: the scan takes the time of %lld of %lld chunks\n", (long long)heads,
               (long long)tokens, (long long)time, (long long)alone);
      const int64_t tenths = heads <= 2 ? 3 : heads <= 4 ? 5 : heads <= 8 ? 7 : 10; // of the undivided time
      CHECK(10 * time <= tenths * alone + 10 * 32, "%lld heads, %lld tokens: %lld of %lld chunks", (long long)heads,
            (long long)tokens, (long long)time, (long long)alone);
      CHECK(heads < 16 || time == alone, "%lld heads are divided", (long long)heads);
      CHECK(heads > 32 || alone <= chunks + 1, "%lld heads: %lld chunks of %lld", (long long)heads, (long long)alone,
            (long long)chunks);
      const int64_t twice = scan_time(2 * tokens, heads, true);
      CHECK(twice <= 2 * time + 2 * time / 10 + 16, "%lld heads: %lld chunks for %lld tokens, %lld for twice as many",
            (long long)heads, (long long)time, (long long)tokens, (long long)twice);
    }
}

// The workspace for unknown documents is enough for any documents, and that for many tokens is
// enough for fewer. The intermediate results of a panel fit into DELTA_PANEL_BYTES, with the rows
// and the state that a panel has beyond its span.
static void sizes(int64_t tokens, int64_t key_heads, int64_t group, int64_t dk, int64_t dv) {
  const DeltaShape s = delta_shape(2, tokens, key_heads, key_heads * group, dk, dv, 0, nullptr);
  for (DeltaPass pass : {DELTA_FORWARD, DELTA_BACKWARD, DELTA_STATE}) {
    const DeltaLayout all = delta_layout(s, tokens, pass, true), few = delta_layout(s, 1, pass, true);
    CHECK(few.bytes <= all.bytes, "%lld bytes for one document, %lld for any", (long long)few.bytes,
          (long long)all.bytes);
    CHECK(few.bytes > few.rows * s.value_heads * (16 + s.size * s.chunk), "%lld bytes", (long long)few.bytes);
    for (int64_t fewer : {tokens / 2, tokens - tokens / 8, tokens - 1}) {
      const DeltaShape x = delta_shape(2, fewer, key_heads, key_heads * group, dk, dv, 0, nullptr);
      const DeltaLayout less = delta_layout(x, 1, pass, true);
      CHECK(less.bytes <= few.bytes && DeltaSaved(x, true).bytes <= DeltaSaved(s, true).bytes,
            "%lld bytes for %lld tokens, %lld for %lld", (long long)less.bytes, (long long)fewer, (long long)few.bytes,
            (long long)tokens);
    }
    const int64_t joints = few.joints * s.value_heads * 4 * dk * (dv + dk),
                  beyond =
                      s.value_heads * delta_row(s) * s.chunk + 2 * delta_state(s) + 8 * key_heads * few.rows + joints,
                  least_span = 2 * s.value_heads * delta_row(s) * s.chunk;
    CHECK(few.bytes - few.unit_q <= most(DELTA_PANEL_BYTES, least_span) + beyond + 16 * 256,
          "%lld bytes for a panel of %lld tokens", (long long)(few.bytes - few.unit_q), (long long)few.rows);
  }
}

// Cost of a call: how often the recurrence runs over the sequence, launches, bytes of saved
// activations and of the workspace, and operations of the matrix products (a multiply-add counts
// two) without the halves that are zero.
struct Cost {
  int64_t visits = 0, launches = 0, saved, workspace;
  double flops = 0;
};

static Cost cost(int64_t tokens, int64_t heads, DeltaPass pass) {
  const int64_t d = 128, cu[2] = {0, tokens};
  const DeltaShape s = delta_shape(2, tokens, heads, heads, d, d, 0, nullptr);
  Cost c;
  c.saved = DeltaSaved(s, true).bytes, c.workspace = delta_layout(s, 1, pass, true).bytes;
  const int64_t segment = delta_segment(s, cu, 1);
  DeltaBorders border = {cu, tokens, s.chunk, segment};
  const double square = (double)s.chunk * (double)s.chunk * d, state = (double)s.chunk * d * d;
  // forward: k·kᵀ, q·kᵀ, T·…, P·X, half of each; k·S, kᵀ·X, q·S. backward: those that compute
  // X and S again, and k·D, qᵀ·W, kᵀ·Y, W·Sᵀ, Y·Sᵀ, X·Dᵀ; Pᵀ·W, Tᵀ·…, W·Xᵀ, Y·Xᵀ, dP·k, dPᵀ·q,
  // half of each; dB·k
  const double chunk = pass == DELTA_FORWARD ? 4 * square + 6 * state : (3 + 6 + 2) * square + 2 * (2 + 6) * state;
  for (int64_t p = 0; p < delta_panels(s); p++) {
    const int64_t chunks = border((p + 1) * delta_stride(s)).chunk - border(p * delta_stride(s)).chunk;
    c.visits += chunks;
    c.launches += pass == DELTA_FORWARD ? 4 : 6; // with L2Norm
    c.flops += (double)(chunks * heads) * chunk;
  }
  return c;
}

// The recurrence runs over the sequence once, with all heads. The workspace does not grow with the
// sequence after the first panel; launches, saved bytes and operations grow linearly.
static void costs() {
  for (DeltaPass pass : {DELTA_FORWARD, DELTA_BACKWARD})
    for (int64_t heads : {2, 4, 32, 64}) {
      const int64_t base = 32 << 10;
      const Cost first = cost(base, heads, pass);
      for (int64_t times : {1, 2, 4, 8, 16, 32}) {
        const int64_t tokens = base * times;
        const Cost c = cost(tokens, heads, pass);
        CHECK(c.visits == tokens / DELTA_CHUNK, "%lld tokens, %lld heads: the scan visits %lld chunks",
              (long long)tokens, (long long)heads, (long long)c.visits);
        CHECK(c.launches <= first.launches * times, "%lld tokens, %lld heads: %lld launches", (long long)tokens,
              (long long)heads, (long long)c.launches);
        CHECK(c.saved <=
                  first.saved * times + times * delta_state(delta_shape(2, base, heads, heads, 128, 128, 0, nullptr)),
              "%lld tokens, %lld heads: %lld bytes saved", (long long)tokens, (long long)heads, (long long)c.saved);
        CHECK(c.workspace <= DELTA_PANEL_BYTES + (64ll << 20), "%lld tokens, %lld heads: workspace of %lld bytes",
              (long long)tokens, (long long)heads, (long long)c.workspace);
        CHECK(c.flops == first.flops * (double)times, "%lld tokens, %lld heads: %g operations", (long long)tokens,
              (long long)heads, c.flops);
        if (getenv("DELTA_COSTS"))
          printf("%s %lld heads %lld tokens: %lld launches, %.3f GB saved, %.3f GB workspace, %.1f GFLOP\n",
                 pass == DELTA_FORWARD ? "forward" : "backward", (long long)heads, (long long)tokens,
                 (long long)c.launches, (double)c.saved / 1e9, (double)c.workspace / 1e9, c.flops / 1e9);
      }
    }
}

template <int SIZE> static int64_t tiles() {
  typedef DeltaTiles<SIZE> T;
  return most(T::PREPARE, most(T::OUT, T::GRADIENTS));
}

int main() {
  // delta_gradients: two blocks on a multiprocessor with 228 KiB, of which each takes another KiB
  CHECK(2 * (DeltaTiles<2>::GRADIENTS + 1024) <= 228 << 10, "%d bytes", (int)DeltaTiles<2>::GRADIENTS);
  const int64_t LARGEST = most(tiles<2>(), tiles<4>());
  for (int64_t dk = 1; dk <= DELTA_HEAD; dk++) {
    const int chunk = (int)delta_chunk(0, dk);
    int64_t bytes = most(delta_scan_bytes((int)dk, chunk), LARGEST);
    for (bool queries : {false, true}) {
      CHECK(2 * delta_scan_half((int)dk) >= dk && chunk <= (dk > 128 ? 32 : 64), "keys of %lld", (long long)dk);
      bytes = most(bytes, delta_scan_tile_bytes((int)dk, queries, 1));
      const int stages = delta_scan_stages((int)dk, queries, 227 << 10),
                few = delta_scan_stages((int)dk, queries, 99 << 10);
      CHECK(stages == 3 && few >= (queries ? 1 : 2), "keys of %lld: %d stages, %d in 99 KiB", (long long)dk, stages,
            few);
    }
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
  // So many heads that a panel has two chunks, or only a few more.
  for (int64_t heads : {20, 2000, 1000000})
    for (int64_t asked : {0, 16, 48})
      for (int round = 0; round < 100; round++) {
        std::vector<int64_t> cu = {0};
        for (int64_t i = below(20); i >= 0; i--) cu.push_back(cu.back() + (below(3) ? below(70) : below(2000)));
        panels(cu, asked, heads);
      }
  // Segments: with few heads, with and without panels, and with more documents.
  for (int64_t heads : {1, 2, 3, 8, 40, 2000})
    for (int64_t asked : {0, 16, 48})
      for (int round = 0; round < 30; round++) {
        std::vector<int64_t> cu = {0};
        for (int64_t i = below(8); i >= 0; i--) cu.push_back(cu.back() + (below(3) ? below(20000) : below(300)));
        segments(cu, asked, heads, heads < 10 ? 128 : 16);
      }
  divisions();
  costs();
  for (int64_t tokens : {1, 64, 1000, 8192, 1 << 20, 1 << 26})
    for (int64_t group : {1, 2, 5})
      for (int64_t d : {16, 128, 256}) sizes(tokens, 8, group, d, 256 - d + 16);
  return test_status();
}
