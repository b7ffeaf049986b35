// Compares conv1d_index.h with its definitions. cuda/headers_test.go compiles and runs this test.
#include "conv1d_index.h"

#include "host_test.h"

#include <vector>

typedef long long ll;

// Every row of every document is in exactly one launch, with the bounds of its document.
static void documents(const std::vector<int64_t> &lengths) {
  std::vector<int64_t> cu = {0};
  for (int64_t n : lengths) cu.push_back(cu.back() + n);
  Documents d;
  int64_t used = 0, row = 0, launches = 0;
  size_t at = 0;
  while (d.next(cu.data(), (int64_t)lengths.size(), &used)) {
    launches++;
    CHECK(d.from == row && d.count <= ULY_DOCUMENTS, "a launch of %d documents from row %lld, want %lld", (int)d.count,
          (ll)d.from, (ll)row);
    for (; row < d.to; row++) {
      while (cu[at + 1] <= row) at++;
      const int32_t i = d.at(row);
      CHECK(d.start[i] == cu[at] && d.end(i) == cu[at + 1], "row %lld is in [%lld, %lld), want [%lld, %lld)", (ll)row,
            (ll)d.start[i], (ll)d.end(i), (ll)cu[at], (ll)cu[at + 1]);
    }
  }
  CHECK(row == cu.back() && used == (int64_t)lengths.size(), "%lld rows of %lld", (ll)row, (ll)cu.back());
  CHECK(launches <= ceil_div((int64_t)lengths.size(), ULY_DOCUMENTS), "%lld launches for %lld documents", (ll)launches,
        (ll)lengths.size());
}

static void cuts() {
  for (int64_t scratch : {1ll << 20, 64ll << 20})
    for (int64_t size : {2, 4})
      for (int64_t rows : {1ll, 511ll, 513ll, 32768ll, 1ll << 20, 1ll << 40})
        for (int64_t width : {1, 2, 4, 5, 100}) {
          int64_t parts = 0;
          for (int64_t n : {1, 127, 128, 129, 8192, 1 << 20}) {
            const ConvSplit c(rows, n, width, size, scratch);
            CHECK(parts == 0 || parts == c.parts, "%lld parts of %lld rows of %lld channels, %lld for fewer",
                  (ll)c.parts, (ll)rows, (ll)n, (ll)parts);
            parts = c.parts;
            CHECK(c.parts >= 1 && c.parts <= ULY_MAX_PARTS && c.band >= CONV_TILE && c.band % CONV_TILE == 0 &&
                      c.band < n + CONV_TILE,
                  "%lld parts, %lld channels of %lld", (ll)c.parts, (ll)c.band, (ll)n);
            CHECK(c.behind + c.runs * (width - 1) * c.band * size <= scratch,
                  "%lld rows, width %lld, %lld channels: more than the scratch", (ll)rows, (ll)width, (ll)c.band);
            CHECK(ConvSplit::fits(width, size, scratch), "width %lld does not fit", (ll)width);
          }
        }
  CHECK(!ConvSplit::fits(1ll << 62, 4, 1 << 20) && !ConvSplit::fits(1 << 20, 4, 64 << 20),
        "a width that does not fit is accepted");
}

int main() {
  documents({});
  documents({0});
  documents({5});
  documents({0, 0, 3, 0, 1, 0});
  std::vector<int64_t> many;
  for (int i = 0; i < 5 * ULY_DOCUMENTS + 7; i++) {
    many.push_back(i % 7 == 3 ? 0 : 1 + i * i % 11);
    if (i % ULY_DOCUMENTS < 2 || i % 97 == 0) documents(many);
  }
  documents(std::vector<int64_t>(3 * ULY_DOCUMENTS, 0));
  cuts();
  return test_status();
}
