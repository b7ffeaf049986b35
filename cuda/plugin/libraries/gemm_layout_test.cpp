// A simulated column-major library computes the products of gemm_plan_of. The result is compared
// with the definition. cuda/headers_test.go compiles and runs this test.
#include "gemm_layout.h"

#include "host_test.h"

#include <vector>

// The library: an element is at column·ld + row.
static void column_major(const gemm_plan &p, const double *first, const double *second, double *c, double beta,
                         const double *bias) {
  auto at = [](const gemm_operand &o, const double *x, int64_t i, int64_t j) {
    return o.transposed ? x[i * o.ld + j] : x[j * o.ld + i];
  };
  for (int64_t j = 0; j < p.n; j++) {
    for (int64_t i = 0; i < p.m; i++) {
      double sum = beta == 0 ? 0 : beta * c[j * p.c.ld + i];
      for (int64_t k = 0; k < p.k; k++) sum += at(p.first, first, i, k) * at(p.second, second, k, j);
      c[j * p.c.ld + i] = sum + (bias ? bias[i] : 0);
    }
  }
}

// Layouts of a rows × columns matrix: dense, with gaps between rows, transposed, transposed with
// gaps.
static gemm_view view(int layout, int64_t rows, int64_t columns) {
  int64_t gap = layout % 2 ? 3 : 0;
  return layout < 2 ? gemm_view{rows, columns, columns + gap, 1} : gemm_view{rows, columns, 1, rows + gap};
}

static void product(int64_t m, int64_t n, int64_t k, int la, int lb, int lc, int mode) {
  gemm_view a = view(la, m, k), b = view(lb, k, n), c = view(lc, m, n);
  auto values = [](const gemm_view &v, int seed) {
    // the gaps must not be read
    std::vector<double> x(static_cast<size_t>((v.rows + 4) * (v.columns + 4)), 1e30);
    for (int64_t i = 0; i < v.rows; i++)
      for (int64_t j = 0; j < v.columns; j++)
        x[static_cast<size_t>(i * v.row + j * v.column)] = static_cast<double>((i * 31 + j * 17 + seed) % 23 - 11);
    return x;
  };
  std::vector<double> xa = values(a, 1), xb = values(b, 2), got = values(c, 3), before = got, bias;
  for (int64_t j = 0; j < n; j++) bias.push_back(static_cast<double>(100 * j + 1));
  gemm_plan p;
  if (!gemm_plan_of(a, b, c, &p)) {
    CHECK(false, "%lldx%lldx%lld layouts %d %d %d: refused", (long long)m, (long long)n, (long long)k, la, lb, lc);
    return;
  }
  CHECK(p.first.ld >= p.first.rows && p.second.ld >= p.second.rows && p.c.ld >= p.c.rows && p.c.rows == p.m &&
            p.c.columns == p.n,
        "leading dimensions");
  CHECK((p.first.transposed ? p.first.columns : p.first.rows) == p.m &&
            (p.second.transposed ? p.second.rows : p.second.columns) == p.n,
        "extents");
  column_major(p, xb.data(), xa.data(), got.data(), mode == 2, mode == 1 ? bias.data() : nullptr);
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < n; j++) {
      size_t at = static_cast<size_t>(i * c.row + j * c.column);
      double want = mode == 1 ? bias[static_cast<size_t>(j)] : mode == 2 ? before[at] : 0;
      for (int64_t l = 0; l < k; l++)
        want += xa[static_cast<size_t>(i * a.row + l * a.column)] * xb[static_cast<size_t>(l * b.row + j * b.column)];
      CHECK(got[at] == want, "%lldx%lldx%lld layouts %d %d %d mode %d: c[%lld, %lld] is %g, want %g", (long long)m,
            (long long)n, (long long)k, la, lb, lc, mode, (long long)i, (long long)j, got[at], want);
      before[at] = got[at];
    }
  }
  CHECK(got == before, "written between the rows of c");
}

int main() {
  const int64_t sizes[] = {1, 2, 3, 5, 8};
  for (int64_t m : sizes)
    for (int64_t n : sizes)
      for (int64_t k : sizes)
        for (int i = 0; i < 4 * 4 * 2 * 3; i++) product(m, n, k, i % 4, i / 4 % 4, i / 16 % 2, i / 32);

  gemm_plan p;
  const gemm_view c = {4, 5, 5, 1};
  CHECK(!gemm_plan_of({4, 3, 6, 2}, {3, 5, 5, 1}, c, &p), "no axis of stride 1: accepted");
  CHECK(!gemm_plan_of({4, 3, 0, 1}, {3, 5, 5, 1}, c, &p), "all rows at one address: accepted");
  CHECK(!gemm_plan_of({4, 3, 2, 1}, {3, 5, 5, 1}, c, &p), "rows that overlap: accepted");
  CHECK(!gemm_plan_of({4, 3, -3, 1}, {3, 5, 5, 1}, c, &p), "rows backwards: taken");
  CHECK(!gemm_plan_of({4, 3, 3, 1}, {3, 5, 5, 1}, {4, 5, 1, 4}, &p), "a transposed c: accepted");
  // The stride of an axis of extent 1 is ignored.
  CHECK(gemm_plan_of({1, 3, 0, 1}, {3, 1, 1, 0}, {1, 1, -7, 9}, &p) && p.m == 1 && p.n == 1 && p.k == 3,
        "one row and one column: refused");
  CHECK(gemm_plan_of({1, 3, 9, 4}, {3, 5, 5, 1}, {1, 5, 0, 1}, &p) && p.second.transposed && p.second.ld == 4,
        "a row with gaps");
  // More than 2^31 elements.
  const int64_t far = 3000000000;
  CHECK(gemm_plan_of({far, 7, far, 1}, {7, 5, 1, far}, {far, 5, far, 1}, &p) && p.n == far && p.c.ld == far &&
            p.first.ld == far && p.second.ld == far,
        "far strides");
  alignas(256) static char memory[512];
  CHECK(gemm_alignment(memory) == 256 && gemm_alignment(memory + 16) == 16 && gemm_alignment(memory + 2) == 2 &&
            gemm_alignment(memory + 3) == 1,
        "alignment");
  return test_status();
}
