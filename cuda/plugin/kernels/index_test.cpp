// Compares index.h with its definitions: small shapes element by element, and extents beyond any
// memory. cuda/headers_test.go compiles and runs this test.
#include "index.h"

#include "host_test.h"

#include <set>
#include <vector>

typedef long long ll;
static uint64_t state = 1;
static int64_t below(int64_t n) { // the high bits of Knuth's generator
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (int64_t)((unsigned __int128)(state) * (uint64_t)n >> 64);
}

static uly_tensor tensor(std::vector<int64_t> shape, std::vector<int64_t> stride) {
  uly_tensor t = {};
  t.dtype = ULY_F32, t.where = ULY_CUDA, t.ndim = (int8_t)shape.size();
  for (size_t i = 0; i < shape.size(); i++) t.shape[i] = shape[i], t.stride[i] = stride[i];
  return t;
}

// strided gives a shape random strides that do not overlap: its axes in some order, with gaps.
// `far` moves the outermost axis beyond 2^31.
static uly_tensor strided(const std::vector<int64_t> &shape, int64_t far) {
  const int n = (int)shape.size();
  std::vector<int64_t> stride(n);
  std::vector<int> order(n);
  for (int i = 0; i < n; i++) {
    const int j = (int)below(i + 1);
    order[i] = order[j], order[j] = i;
  }
  if (below(2)) // usually in the order of the shape
    for (int i = 0; i < n; i++) order[i] = n - 1 - i;
  int64_t step = below(4) ? 1 : 2;
  for (int i = 0; i < n; i++) {
    if (i == n - 1 && n > 1) step += far;
    stride[order[i]] = step;
    step = step * shape[order[i]] + (below(2) ? 0 : below(5));
  }
  return tensor(shape, stride);
}

static int64_t offset_of(const uly_tensor &t, int64_t i) { // offset of element i in row-major order
  int64_t o = 0;
  for (int a = t.ndim - 1; a >= 0; a--) o += i % t.shape[a] * t.stride[a], i /= t.shape[a];
  return o;
}

static void dividers() {
  for (int64_t d : {1ll, 2ll, 3ll, 5ll, 7ll, 10ll, 64ll, 127ll, 128ll, 641ll, 65535ll, 65536ll, 6700417ll, 1ll << 30,
                    (1ll << 31) - 1, (1ll << 31) - 2}) {
    const Divider by(d);
    for (int64_t q = 0; q < 3000; q++) {
      for (int64_t n : {q, q * d - 1, q * d, q * d + d - 1, INT32_MAX - q, below(1ll << 31)})
        if (n >= 0 && n <= INT32_MAX)
          CHECK((int64_t)by((uint32_t)n) == n / d, "%lld / %lld = %u", (ll)n, (ll)d, by((uint32_t)n));
    }
  }
}

// A plane of several operands visits every element of the tensors once, with elements at the same
// index together.
static void planes() {
  const int64_t extents[] = {1, 1, 2, 3, 4, 5, 8};
  for (int c = 0; c < 3000; c++) {
    std::vector<int64_t> shape;
    for (int64_t n = 1, rank = below(9); (int64_t)shape.size() < rank; n *= shape.back())
      shape.push_back(n > 300 ? 1 : extents[below(7)]);
    const int64_t far = c % 3 == 0 ? (1ll << 33) + 5 : 0;
    const uly_tensor a = strided(shape, far), b = strided(shape, far);
    const uly_tensor *operands[] = {&a, &b};
    const Plane p = plane_of(operands, 2, c % 2);
    CHECK(p.elements() == elements(a), "a plane of %lld elements for %lld", (ll)p.elements(), (ll)elements(a));
    std::set<std::pair<int64_t, int64_t>> want, narrow, wide;
    for (int64_t i = 0; i < elements(a); i++) want.insert({offset_of(a, i), offset_of(b, i)});
    CHECK((int64_t)want.size() == elements(a), "strides overlap");
    const Walk<2> w(p, 1);
    for (int64_t i = 0; i < w.units; i++) {
      int64_t o[2], q[2];
      w.at<true>(i, o), w.at<false>(i, q);
      narrow.insert({o[0], o[1]}), wide.insert({q[0], q[1]});
    }
    CHECK(w.narrow && narrow == want && wide == want, "case %d: the walk differs from the tensors", c);

    // Units of k elements are k aligned neighbours in both operands.
    const void *data[] = {(void *)(uintptr_t)(16 * below(3) + 4 * below(2)), (void *)(uintptr_t)4096};
    const int64_t sizes[] = {4, 4};
    for (int64_t k : {2, 4}) {
      if (!fits_unit(p, data, sizes, k)) continue;
      const Walk<2> u(p, k);
      const Walk<2> v(units_of(p, k), 1);
      std::set<std::pair<int64_t, int64_t>> seen;
      for (int64_t i = 0; i < u.units; i++) {
        int64_t o[2], q[2];
        u.at<true>(i, o), v.at<true>(i, q);
        CHECK(q[0] * k == o[0] && q[1] * k == o[1], "units of %lld: %lld and %lld", (ll)k, (ll)q[0], (ll)o[0]);
        CHECK(((uintptr_t)data[0] + o[0] * 4) % (k * 4) == 0 && o[1] % k == 0, "units of %lld that are not aligned",
              (ll)k);
        for (int64_t j = 0; j < k; j++) seen.insert({o[0] + j, o[1] + j});
      }
      CHECK(seen == want, "case %d: units of %lld differ from the tensors", c, (ll)k);
    }

    // The tiles of a transpose also cover the plane.
    if (c % 2 == 0 && Transpose::fits(p, 2)) {
      const int64_t edge = 3;
      const Transpose t(p, edge);
      std::set<std::pair<int64_t, int64_t>> seen;
      for (int64_t i = 0; i < t.tiles; i++) {
        int64_t x0, y0, o[2];
        t.tile(i, edge, &x0, &y0, o);
        for (int64_t x = x0; x < least(x0 + edge, t.nx); x++)
          for (int64_t y = y0; y < least(y0 + edge, t.ny); y++)
            CHECK(seen.insert({o[0] + y * t.dst_y + x, o[1] + x * t.src_x + y}).second, "case %d: a tile twice", c);
      }
      CHECK(seen == want, "case %d: tiles differ from the tensors", c);
    }
  }
}

// A plane in the order of the host's operand visits elements in the host's order.
static void order_of_host() {
  for (int c = 0; c < 300; c++) {
    const std::vector<int64_t> shape = {1 + below(4), 1 + below(4), 1 + below(4), 1 + below(4)};
    const uly_tensor host = tensor(shape, {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1}),
                     there = strided(shape, 0);
    const uly_tensor *operands[] = {&there, &host};
    const Walk<2> w(plane_of(operands, 2, 1), 1);
    for (int64_t i = 0; i < w.units; i++) {
      int64_t o[2];
      w.at<true>(i, o);
      CHECK(o[1] == i && o[0] == offset_of(there, i), "element %lld of the host at %lld and %lld", (ll)i, (ll)o[1],
            (ll)o[0]);
    }
  }
}

// Extents and strides beyond 2^31.
static void large() {
  const int64_t T = 5ll << 31, H = 3, D = 128; // two trillion elements
  const uly_tensor a = tensor({T, H, D}, {H * D, D, 1}), b = tensor({T, H, D}, {D, T * D, 1});
  const uly_tensor *operands[] = {&a, &b};
  const Plane p = plane_of(operands, 2, 0);
  const Walk<2> w(p, 4);
  CHECK(!w.narrow && w.units == T * H * D / 4, "%lld units", (ll)w.units);
  for (int c = 0; c < 100000; c++) {
    const int64_t i = below(w.units);
    int64_t o[2];
    w.at<false>(i, o);
    const int64_t e = i * 4, t = e / (H * D), h = e / D % H, d = e % D;
    CHECK(o[0] == e && o[1] == h * T * D + t * D + d, "unit %lld at %lld and %lld", (ll)i, (ll)o[0], (ll)o[1]);
  }
  const int64_t side = 3ll << 30;
  const uly_tensor m = tensor({side, side / 4}, {side / 4, 1}), turned = tensor({side, side / 4}, {1, side});
  const uly_tensor *pair[] = {&m, &turned};
  const Transpose t(plane_of(pair, 2, 0), 32);
  for (int c = 0; c < 100000; c++) {
    const int64_t i = below(t.tiles);
    int64_t x, y, o[2];
    t.tile(i, 32, &x, &y, o);
    CHECK(x >= 0 && y >= 0 && x < t.nx && y < t.ny && x % 32 == 0 && y % 32 == 0 && y / 32 * t.across + x / 32 == i &&
              o[0] == 0 && o[1] == 0,
          "tile %lld at %lld, %lld", (ll)i, (ll)x, (ll)y);
  }
  // A narrow walk with offsets beyond 2^31.
  const uly_tensor spread = tensor({3, 65}, {(1ll << 40) + 1, 1});
  const uly_tensor *one[] = {&spread};
  const Walk<1> n(plane_of(one, 1, 0), 1);
  int64_t o[1];
  n.at<true>(194, o);
  CHECK(n.narrow && o[0] == (1ll << 41) + 2 + 64, "the last element at %lld", (ll)o[0]);

  const uly_tensor heads = tensor({1ll << 33, 5, 8}, {40, 8, 1});
  const uly_tensor *x[] = {&heads};
  const Rows rows(x, 1);
  for (int c = 0; c < 100000; c++) {
    const int64_t r = below(rows.rows);
    int64_t tk, h;
    rows.split(r, &tk, &h);
    CHECK(!rows.narrow && tk == r / 5 && h == r % 5, "row %lld is %lld, %lld", (ll)r, (ll)tk, (ll)h);
  }
}

static void small_rows() {
  const uly_tensor x = tensor({7, 3, 4}, {100, 10, 1}), one = tensor({1, 3, 4}, {999, 10, 1}), flat = tensor({4}, {1});
  const uly_tensor *a[] = {&x}, *b[] = {&one}, *c[] = {&flat};
  const Rows rows(a, 1), single(b, 1), vector(c, 1);
  for (int64_t r = 0; r < 21; r++) {
    int64_t t, h;
    rows.split(r, &t, &h);
    CHECK(t == r / 3 && h == r % 3 && rows.narrow, "row %lld is %lld, %lld", (ll)r, (ll)t, (ll)h);
  }
  CHECK(rows.rows == 21 && rows.token[0] == 100 && rows.head[0] == 10, "rows of [7, 3, 4]");
  CHECK(single.rows == 3 && single.token[0] == 0, "the stride of an axis of extent 1 is used");
  CHECK(vector.rows == 1 && vector.heads == 1, "rows of [4]");
}

static void parts() {
  for (int64_t all : {0ll, 1ll, 2ll, 63ll, 1000ll, 1025ll, (1ll << 40) + 77}) {
    for (int64_t n : {1ll, 2ll, 3ll, 64ll, 1024ll}) {
      CHECK(part_at(all, n, 0) == 0 && part_at(all, n, n) == all, "%lld parts of %lld do not cover it", (ll)n, (ll)all);
      for (int64_t p = 0; p < n; p++) {
        const int64_t size = part_at(all, n, p + 1) - part_at(all, n, p);
        CHECK(size == all / n || size == all / n + 1, "part %lld of %lld has %lld of %lld", (ll)p, (ll)n, (ll)size,
              (ll)all);
      }
    }
  }
  for (int64_t rows : {1ll, 100ll, 1ll << 20, 1ll << 40})
    for (int64_t n : {1ll, 4096ll, 1ll << 18, 1ll << 24, 1ll << 40})
      for (int64_t scratch : {1ll << 18, 1ll << 24}) {
        const int64_t p = parts_of(rows, n, 64, scratch);
        CHECK(p >= 1 && p <= ULY_MAX_PARTS && (p == 1 || (p * n <= scratch && p <= ceil_div(rows, 64))),
              "%lld parts of %lld rows of %lld", (ll)p, (ll)rows, (ll)n);
      }
  for (int64_t n : {1ll, 16384ll, 16385ll, 1ll << 24, (1ll << 24) + 1, (1ll << 40) + 3}) {
    const int64_t part = sum_part_elements(n);
    CHECK(part % 1024 == 0 && ceil_div(n, part) <= ULY_MAX_PARTS, "%lld elements in parts of %lld", (ll)n, (ll)part);
  }
  for (int64_t v : {1ll, 2ll, 3ll, 255ll, 256ll, 1000ll, 128256ll, 1ll << 40}) {
    const int64_t n = vocabulary_owners(v);
    CHECK((n & (n - 1)) == 0 && n <= 1024 && n <= v && (n == 1024 || 2 * n > v), "%lld owners of %lld rows", (ll)n,
          (ll)v);
  }
}

// The launches of an optimizer cover the array once, and decide for every element as the list does.
static void ranges() {
  for (int c = 0; c < 400; c++) {
    const int64_t n = below(2000), count = c % 4 == 0 ? below(400) : below(10);
    std::vector<uly_range> list;
    for (int64_t at = 0; (int64_t)list.size() < count;) {
      const int64_t lo = at + below(8), hi = lo + below(8);
      if (hi > n) break;
      list.push_back({lo, hi});
      at = hi;
    }
    std::vector<char> decays(n);
    for (const uly_range &r : list)
      for (int64_t i = r.lo; i < r.hi; i++) decays[i] = 1;
    Ranges part;
    int64_t at = 0, used = 0;
    const uly_range none = {}, *first = list.empty() ? &none : list.data();
    while (part.to < n) {
      part.next(first, (int64_t)list.size(), n, &used);
      CHECK(part.from == at && part.to <= n, "a part [%lld, %lld) after %lld", (ll)part.from, (ll)part.to, (ll)at);
      if (part.to == at && used == (int64_t)list.size() && at < n)
        CHECK(false, "an empty launch at %lld of %lld", (ll)at, (ll)n);
      at = part.to;
      for (int64_t i = part.from; i < part.to; i++) {
        int64_t upto = 0;
        CHECK(part.decays(i, &upto) == (bool)decays[i] && upto > i, "case %d: element %lld", c, (ll)i);
        for (int64_t j = i; j < least(upto, part.to); j++)
          CHECK(decays[j] == decays[i], "case %d: element %lld differs from %lld", c, (ll)j, (ll)i);
      }
    }
  }
  Ranges everywhere;
  int64_t used = 0, upto = 0;
  everywhere.next(nullptr, 0, 1ll << 40, &used);
  CHECK(everywhere.decays((1ll << 40) - 1, &upto) && upto == 1ll << 40, "no list means all elements");
}

static void angles() {
  for (int c = 0; c < 2000000; c++) {
    const double f = 1.0 / (1 + (double)below(1 << 20)),
                 angle = (double)(float)f * (double)(c % 2 ? below(1ll << 31) : below(1 << 12)) * (c % 7 ? 1 : -1);
    double s, k;
    sine_cosine(angle, &s, &k);
    if (!(fabs(s - sin(angle)) < 1e-15 * 4 && fabs(k - cos(angle)) < 1e-15 * 4))
      CHECK(false, "an angle of %.17g: %.17g, %.17g", angle, s, k);
  }
  double s, c;
  sine_cosine(NAN, &s, &c);
  CHECK(s != s && c != c, "the angle NaN has sine %g", s);
  sine_cosine(0, &s, &c);
  CHECK(s == 0 && c == 1, "the angle 0 has sine %g, cosine %g", s, c);
}

static void roundings() {
  CHECK(bf16_bits(1.0f) == 0x3f80 && bf16_bits(1 + 1.0f / 256) == 0x3f80 && bf16_bits(1 + 3.0f / 256) == 0x3f82,
        "ties do not round to even");
  CHECK(bf16_bits(-INFINITY) == 0xff80 && (bf16_bits(NAN) & 0x7fff) > 0x7f80 && bf16_bits(3.4e38f) == 0x7f80,
        "Inf and NaN");
}

int main() {
  dividers();
  planes();
  order_of_host();
  large();
  small_rows();
  parts();
  ranges();
  angles();
  roundings();
  return test_status();
}
