// Compares attention_index.h with its definitions: small documents pair by pair, and lengths beyond
// any memory. cuda/headers_test.go compiles and runs this test.
#include "attention_index.h"

#include "host_test.h"

#include <map>
#include <vector>

typedef long long ll;
typedef std::vector<int64_t> List;

static uint64_t state = 1;
static int64_t random_below(int64_t n) { // Knuth's generator
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (int64_t)((unsigned __int128)state * (uint64_t)n >> 64);
}

// list is a slice as Go passes it.
static uly_list list(const List &x) { return {x.data(), (int64_t)x.size(), (int64_t)x.size()}; }

static AttentionArgs question(int64_t tq, int64_t hq, int64_t tk, int64_t hkv, int dtype = ULY_F32) {
  AttentionArgs a = {};
  auto shape = [&](uly_tensor &t, int64_t n, int64_t h, int64_t d) {
    t.dtype = (uint8_t)dtype, t.ndim = 3, t.shape[0] = n, t.shape[1] = h, t.shape[2] = d;
  };
  shape(a.q, tq, hq, 8), shape(a.k, tk, hkv, 8), shape(a.v, tk, hkv, 6), shape(a.out, tq, hq, 6);
  return a;
}

// sees is the definition in device/ops.go.
static bool sees(const AttentionArgs &a, int64_t shift, int64_t i, int64_t j) {
  const uly_window &w = *a.window;
  const int64_t at = i + shift;
  return !(a.causal && j > at) && !(w.left >= 0 && at - j > w.left) && !(w.right >= 0 && j - at > w.right);
}

static void test_mask(const AttentionArgs &a, int64_t sq, int64_t sk, int64_t shift) {
  const AttentionMask m = attention_mask(a);
  auto text = [&](const char *what, int64_t from, int64_t to, AttentionRange got, int64_t lo, int64_t hi) {
    CHECK(hi > lo ? got.lo == lo && got.hi == hi : got.hi <= got.lo,
          "%s [%lld, %lld) of %lld x %lld, shift %lld, window %lld %lld, causal %d: [%lld, %lld), want [%lld, %lld)",
          what, (ll)from, (ll)to, (ll)sq, (ll)sk, (ll)shift, (ll)a.window->left, (ll)a.window->right, a.causal,
          (ll)got.lo, (ll)got.hi, (ll)lo, (ll)hi);
  };
  for (int64_t q0 = 0; q0 < sq; q0++)
    for (int64_t q1 = q0 + 1; q1 <= sq; q1++) {
      int64_t lo = sk, hi = 0;
      for (int64_t i = q0; i < q1; i++)
        for (int64_t j = 0; j < sk; j++)
          if (sees(a, shift, i, j)) lo = least(lo, j), hi = most(hi, j + 1);
      text("keys of queries", q0, q1, attention_keys(m, shift, sk, q0, q1), lo, hi);
    }
  for (int64_t k0 = 0; k0 < sk; k0++)
    for (int64_t k1 = k0 + 1; k1 <= sk; k1++) {
      int64_t lo = sq, hi = 0;
      for (int64_t i = 0; i < sq; i++)
        for (int64_t j = k0; j < k1; j++)
          if (sees(a, shift, i, j)) lo = least(lo, i), hi = most(hi, i + 1);
      text("queries of keys", k0, k1, attention_queries(m, shift, sq, k0, k1), lo, hi);
    }
  for (int64_t q0 = 0; q0 < sq; q0++)
    for (int64_t k0 = 0; k0 < sk; k0++) {
      const AttentionBand b = attention_band(m, q0 + shift - k0);
      for (int r = 0; q0 + r < sq; r++)
        for (int c = 0; k0 + c < sk; c++)
          CHECK((b.below <= c - r && c - r <= b.above) == sees(a, shift, q0 + r, k0 + c),
                "band of %lld %lld, %lld x %lld, shift %lld, window %lld %lld, causal %d: row %d, column %d", (ll)q0,
                (ll)k0, (ll)sq, (ll)sk, (ll)shift, (ll)a.window->left, (ll)a.window->right, a.causal, r, c);
    }
}

// Every range of queries, and of keys, of every small document, under every mask and shift.
static void test_masks() {
  const int64_t sides[] = {-1, 0, 1, 2, 4, 9, INT64_MAX};
  const int N = 6;
  for (int64_t sq = 0; sq <= N; sq++)
    for (int64_t sk = 0; sk <= N; sk++)
      for (int64_t shift :
           {sk - sq, (int64_t)0, (int64_t)-3, (int64_t)4, (int64_t)ATTENTION_SHIFT, -(int64_t)ATTENTION_SHIFT})
        for (int64_t left : sides)
          for (int64_t right : sides)
            for (int causal = 0; causal < 2; causal++) {
              AttentionArgs a = question(sq, 1, sk, 1);
              const uly_window window = {left, right};
              const List shifts = {shift};
              a.window = &window, a.causal = causal, a.shift = list(shifts);
              test_mask(a, sq, sk, shift);
            }
}

// Tiles of a document with 2^40 queries and keys, or with different numbers of them.
static void test_far_masks() {
  for (int64_t extra : {(int64_t)0, (int64_t)5, (int64_t)1 << 35, -((int64_t)1 << 35)}) {
    const int64_t sq = (int64_t)1 << 40, sk = sq + extra;
    for (int64_t left : {(int64_t)-1, (int64_t)0, (int64_t)100, (int64_t)1 << 33})
      for (int64_t right : {(int64_t)-1, (int64_t)0, (int64_t)100, (int64_t)1 << 33})
        for (int causal = 0; causal < 2; causal++) {
          AttentionArgs a = question(sq, 1, sk, 1);
          const uly_window window = {left, right};
          a.window = &window, a.causal = causal;
          const AttentionMask m = attention_mask(a);
          for (int n = 0; n < 2000; n++) {
            const int64_t i = random_below(sq), at = i + extra;
            const AttentionRange keys = attention_keys(m, extra, sk, i, i + 1);
            for (int64_t j : {keys.lo - 1, keys.lo, keys.hi - 1, keys.hi, at, at - 100, at + 1})
              if (j >= 0 && j < sk)
                CHECK((keys.lo <= j && j < keys.hi) == sees(a, extra, i, j), "far: query %lld, key %lld", (ll)i, (ll)j);
            const int64_t j = random_below(sk);
            const AttentionRange queries = attention_queries(m, extra, sq, j, j + 1);
            for (int64_t q : {queries.lo - 1, queries.lo, queries.hi - 1, queries.hi})
              if (q >= 0 && q < sq)
                CHECK((queries.lo <= q && q < queries.hi) == sees(a, extra, q, j), "far: key %lld, query %lld", (ll)j,
                      (ll)q);
            const int64_t k0 = most(0, least(sk - 300, at - 300 + random_below(600)));
            const AttentionBand b = attention_band(m, i + extra - k0);
            for (int t = 0; t < 50; t++) {
              const int r = (int)random_below(256), c = (int)random_below(256);
              if (i + r < sq)
                CHECK((b.below <= c - r && c - r <= b.above) == sees(a, extra, i + r, k0 + c),
                      "far band: query %lld, key %lld", (ll)(i + r), (ll)(k0 + c));
            }
          }
        }
  }
}

static List bounds(int64_t n, int64_t documents) {
  List cu(documents + 1);
  for (int64_t i = 1; i < documents; i++) cu[i] = random_below(n + 1);
  for (int64_t i = 1; i < documents; i++)
    for (int64_t j = i + 1; j < documents; j++)
      if (cu[j] < cu[i]) std::swap(cu[i], cu[j]);
  cu[documents] = n;
  return cu;
}

// The tables of the device, read by the tiles that blocks find in them.
static void test_tables(int64_t tq, int64_t tk, int64_t documents, bool every) {
  const List cu_q = bounds(tq, documents), cu_k = bounds(tk, documents);
  const int64_t hq = random_below(6), hkv = 1 + random_below(4);
  List kv_head(hq);
  for (int64_t h = 0; h < hq; h++) kv_head[h] = least(hkv - 1, (h ? kv_head[h - 1] : 0) + random_below(3));
  AttentionArgs a = question(tq, hq, tk, hkv);
  a.cu_q = list(cu_q), a.cu_k = list(cu_k), a.kv_head = list(kv_head);
  List shifts(documents);
  for (int64_t &x : shifts) x = random_below(100) - 50;
  if (random_below(2)) a.shift = list(shifts);
  const AttentionLayout l = attention_layout(a, true, false);
  const int tile_q = 1 << random_below(8), tile_k = 1 << random_below(8);
  std::map<int64_t, int64_t> put;
  attention_tables(a, l, tile_q, tile_k, [&](int64_t at, int64_t value) {
    CHECK(put.count(at) == 0 && at % 8 == 0 && at < l.tables,
          "an entry is written twice, or lies outside of the tables");
    put[at] = value;
  });
  auto table = [&](int64_t at, int64_t n) {
    List x(n);
    for (int64_t i = 0; i < n; i++) {
      CHECK(put.count(at + 8 * i), "entry %lld is missing", (ll)i);
      x[i] = put[at + 8 * i];
    }
    return x;
  };
  const List q = table(l.cu_q, l.documents + 1), k = table(l.cu_k, l.documents + 1),
             tiles_q = table(l.tiles_q, l.documents + 1), tiles_k = table(l.tiles_k, l.documents + 1),
             aligned = table(l.shift, l.documents);
  const List heads = table(l.kv_head, hq), first = table(l.first, hkv + 1);
  CHECK(put.size() == (size_t)(4 * (l.documents + 1) + l.documents + hq + hkv + 1), "entries that are not read");
  CHECK(tiles_q.back() == attention_count(a.cu_q, documents, tile_q) &&
            tiles_k.back() == attention_count(a.cu_k, documents, tile_k),
        "the number of tiles");
  for (int64_t kv = 0; kv < hkv; kv++)
    for (int64_t h = 0; h < hq; h++)
      CHECK((kv_head[h] == kv) == (first[kv] <= h && h < first[kv + 1]) && heads[h] == kv_head[h],
            "query head %lld, key head %lld", (ll)h, (ll)kv);
  for (bool keys : {false, true}) {
    const List &tiles = keys ? tiles_k : tiles_q, &cu = keys ? cu_k : cu_q;
    const int size = keys ? tile_k : tile_q;
    int64_t next = 0, document = 0; // the row at which the next tile must begin
    for (int64_t t = 0; t < tiles.back(); t++) {
      if (!every && t == 100) { // of long documents, only the ends are tested
        t = tiles.back() - 100;
        next = -1;
      }
      const AttentionTile x =
          attention_tile(q.data(), k.data(), aligned.data(), tiles.data(), l.documents, t, size, keys);
      const int64_t start = (keys ? x.k : x.q) + x.first;
      if (next < 0) next = start;
      while (cu[document + 1] <= start) document++;
      CHECK(
          start == next && x.rows > 0 && x.rows <= size && start >= cu[document] && start + x.rows <= cu[document + 1],
          "tile %lld has rows %lld + %d", (ll)t, (ll)start, x.rows);
      CHECK(x.q == cu_q[document] && x.sq == cu_q[document + 1] - x.q && x.k == cu_k[document] &&
                x.sk == cu_k[document + 1] - x.k && x.shift == (a.shift ? x.q + shifts[document] - x.k : x.sk - x.sq),
            "tile %lld has another document", (ll)t);
      next = start + x.rows;
    }
    CHECK(next == (keys ? tk : tq) || tiles.back() == 0, "tiles end at %lld", (ll)next);
  }
}

static void test_work() {
  for (bool keys : {false, true}) {
    const int64_t tiles = 5, heads = 3;
    List seen(tiles * heads);
    for (int64_t w = 0; w < tiles * heads; w++) {
      const AttentionWork x = attention_work(w, tiles, keys);
      seen[x.head * tiles + x.tile]++;
      CHECK(x.head == w / tiles && x.tile == (keys ? w % tiles : tiles - 1 - w % tiles), "work %lld", (ll)w);
    }
    for (int64_t n : seen) CHECK(n == 1, "a tile is computed %lld times", (ll)n);
    const AttentionWork far = attention_work(((int64_t)1 << 40) * 7 + 3, (int64_t)1 << 40, keys);
    CHECK(far.head == 7 && far.tile == (keys ? 3 : ((int64_t)1 << 40) - 4), "far work");
  }
}

// A workspace for unknown documents is enough for any documents, and its ranges do not overlap.
static void test_layout() {
  for (int n = 0; n < 3000; n++) {
    const int64_t tq = random_below(60), tk = random_below(60), hq = random_below(90), hkv = 1 + random_below(90),
                  documents = 1 + random_below(150);
    AttentionArgs a = question(tq, hq, tk, hkv, n % 2 ? ULY_F32 : ULY_BF16);
    const List cu_q = bounds(tq, documents), cu_k = bounds(tk, documents);
    const bool slopes = random_below(2);
    if (slopes) a.slopes.dtype = ULY_F32;
    for (int pass = 0; pass < 3; pass++) {
      const bool backward = pass > 0, adds = pass == 2;
      a.cu_q = a.cu_k = {};
      const AttentionLayout most_of = attention_layout(a, backward, adds);
      a.cu_q = list(cu_q), a.cu_k = list(cu_k);
      const AttentionLayout l = attention_layout(a, backward, adds);
      CHECK(l.bytes <= most_of.bytes && l.tables <= most_of.tables && l.documents <= tq + tk, "%lld bytes, bound %lld",
            (ll)l.bytes, (ll)most_of.bytes);
      const int64_t entries = 8 * (l.documents + 1);
      List ends = {l.cu_q,    l.cu_q + entries,          l.cu_k,    l.cu_k + entries,
                   l.tiles_q, l.tiles_q + entries,       l.tiles_k, l.tiles_k + entries,
                   l.shift,   l.shift + 8 * l.documents, l.kv_head, l.kv_head + 8 * hq,
                   l.first,   l.first + 8 * (hkv + 1),   l.tables};
      if (backward) {
        ends.insert(ends.end(),
                    {l.delta, l.delta + 4 * hq * tq, l.terms, l.terms + (slopes ? 4 * hq * tq : 0), l.sums});
        if (a.k.dtype == ULY_BF16 && hq > hkv) ends.push_back(l.sums + 4 * hkv * tk * 14);
        ends.push_back(l.dq_sums);
        if (adds) ends.push_back(l.dq_sums + 4 * hq * tq * 8);
      }
      ends.push_back(l.bytes);
      for (size_t i = 1; i < ends.size(); i++)
        CHECK(ends[i - 1] <= ends[i], "ranges of the workspace overlap: %lld after %lld", (ll)ends[i], (ll)ends[i - 1]);
    }
  }
}

// The blocks of a block mask in which rows lie, for sequences and blocks that are longer and
// shorter than a tile.
static void test_blocks() {
  for (int n = 0; n < 20000; n++) {
    const int64_t sizes[] = {1, 2, 16, 33, 64, 255, 256, 257, 1000, (int64_t)1 << 40};
    const int64_t size = sizes[random_below(10)], seq = 1 + random_below(n % 2 ? 700 : (int64_t)1 << 41),
                  row = random_below((int64_t)1 << 45);
    const AttentionBlocks b = attention_blocks(row, seq, size);
    for (int64_t c = 0; c < ATTENTION_BLOCK && row % seq + c < seq; c++)
      CHECK(b.of((int)c) == (row + c) % seq / size, "block of row %lld + %lld in sequences of %lld, blocks of %lld",
            (ll)row, (ll)c, (ll)seq, (ll)size);
  }
}

// Dropout keeps what the function Keeps of testkit/ref keeps: the hash of a few numbers, and the
// share of many.
static void test_dropout() {
  int64_t kept = 0;
  const int64_t n = 300;
  for (int64_t q = 0; q < n; q++)
    for (int64_t k = 0; k < n; k++) kept += keeps(query_bits(head_bits(7, 3), q), key_bits(7, k), 3 << 22);
  CHECK(kept > n * n / 4 - 900 && kept < n * n / 4 + 900, "dropout of 3/4 keeps %lld of %lld", (ll)kept, (ll)(n * n));
  CHECK(mix64(0) == 0xe220a8397b1dcdafull, "SplitMix64");
}

// The shared memory of a block is available: 227 KiB on Hopper, and 99 KiB on the GPUs with the
// least (sm_86, sm_89, sm_120).
static void test_sizes() {
  for (int64_t d = 1; d <= ATTENTION_HEAD; d++)
    for (bool small : {false, true})
      for (bool backward : {false, true}) {
        const AttentionSize &s = attention_size(d, 1, small);
        CHECK(s.head >= d && attention_shared(s, backward, true) <= (small ? 99 : 227) * 1024,
              "head size %lld: %lld bytes", (ll)d, (ll)attention_shared(s, backward, true));
        CHECK(&s == &attention_size(1, d, small), "head sizes %lld and 1", (ll)d);
      }
  for (int64_t d = 1; d <= ATTENTION_HEAD; d++) {
    const AttentionMmaSize &m = attention_mma_size(d, 1);
    for (bool scored : {false, true}) { // the tables of scored kernels need more than 99 KiB
      const ll small = 99 * 1024, hopper = 227 * 1024, forward = attention_mma_shared(m, scored),
               dq = attention_mma_dq_shared(m, scored), dkv = attention_mma_dkv_shared(m, scored),
               allowed = scored ? hopper : small;
      CHECK(m.head >= d && forward <= allowed && dq <= allowed && dkv <= (d <= 128 ? allowed : hopper),
            "head size %lld on tensor cores: %lld, %lld and %lld bytes", (ll)d, forward, dq, dkv);
      // eight warps on a multiprocessor of Hopper; each block needs 1 KiB more for the system
      CHECK(2 * (most(forward, dq) + 1024) <= 228 * 1024 && 8 / m.warps * (dkv + 1024) <= 228 * 1024,
            "head size %lld on tensor cores: less than eight warps on a multiprocessor", (ll)d);
    }
    CHECK(&m == &attention_mma_size(1, d), "head sizes %lld and 1 on tensor cores", (ll)d);
    // Rows of tiles are swizzled in units of 64 columns. A warp has whole strips of 16 rows,
    // columns come in pairs of eight, and a block has a thread for the statistics of each query.
    const int warps = ATTENTION_MMA_THREADS / 32, across = m.warps / 2;
    CHECK(m.head % 64 == 0 && m.rows % (16 * warps) == 0 && m.dq_rows % (16 * warps) == 0 && m.columns % 16 == 0 &&
              m.dq_columns % 16 == 0 && ATTENTION_MMA_BACK % (16 * across) == 0 && m.head % (16 * across) == 0 &&
              ATTENTION_MMA_BACK <= 32 * m.warps,
          "tiles for head size %lld on tensor cores", (ll)d);
  }
}

int main() {
  test_masks();
  test_far_masks();
  for (int n = 0; n < 2000; n++) test_tables(random_below(300), random_below(300), 1 + random_below(40), true);
  for (int n = 0; n < 200; n++)
    test_tables(random_below((int64_t)1 << 40), random_below((int64_t)1 << 40), 1 + random_below(40), false);
  test_work();
  test_layout();
  test_blocks();
  test_dropout();
  test_sizes();
  return test_status();
}
