// Compares the registers that lanes pass to mma.m16n8k16 with NVIDIA's documentation (PTX ISA,
// "Matrix Fragments for mma.m16n8k16 with floating point type"). The emulated plug-in multiplies
// without these registers.
#define ULY_EMULATED
#include "mma.h"

#include "host_test.h"

#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// half_of returns the value in the lower (0) or upper (1) 16 bits of a register.
static float half_of(uint32_t r, int upper) { return upper ? word_lo(r) : word_hi(r); }

// number returns a value for a position that two BF16 numbers represent exactly; positions have
// different values.
static float number(int i) { return (float)((i * 7919 + 13) % 30011) / 64 - 200; }

template <bool A_DENSE, bool B_DENSE> static void fragments(int depth) {
  enum { COLUMNS = 24 };
  const int a_step = A_DENSE ? depth + 8 : 16 + 4, b_step = B_DENSE ? depth + 8 : COLUMNS + 4;
  alignas(16) static Word a[4096], b[4096];
  std::vector<double> ref(16 * COLUMNS), sum(16 * COLUMNS);
  for (int k = 0; k < depth; k++) {
    for (int m = 0; m < 16; m++) a[A_DENSE ? m * a_step + k : k * a_step + m] = to_word<bf16>(number(m * depth + k));
    for (int n = 0; n < COLUMNS; n++)
      b[B_DENSE ? n * b_step + k : k * b_step + n] = to_word<bf16>(number(5000 + n * depth + k));
    for (int m = 0; m < 16; m++)
      for (int n = 0; n < COLUMNS; n++)
        ref[m * COLUMNS + n] += (double)number(m * depth + k) * number(5000 + n * depth + k);
  }
  float lanes[32][COLUMNS / 8][4];
  for (int lane = 0; lane < 32; lane++) { // the product without tensor cores
    threadIdx.x = (unsigned)(64 + lane);
    zero(lanes[lane]);
    product<bf16, false, false, A_DENSE, B_DENSE>(lanes[lane], a, a_step, b, b_step, depth);
  }
  for (int k0 = 0; k0 < depth; k0 += 16)
    for (int n0 = 0; n0 < COLUMNS; n0 += 8) {
      FragmentA x[32];
      FragmentB y[32];
      for (int lane = 0; lane < 32; lane++) {
        threadIdx.x = (unsigned)lane;
        x[lane] = fragment_a<A_DENSE>(a, a_step, k0);
        y[lane] = fragment_b<B_DENSE>(B_DENSE ? b + n0 * b_step : b + n0, b_step, k0);
      }
      // The documentation, by element: a_i of a lane is row groupID (+ 8 for i in 2, 3, 6, 7) and
      // column threadID_in_group * 2 + (i & 1) (+ 8 for i >= 4); b_i is row threadID_in_group * 2 +
      // (i & 1) (+ 8 for i >= 2) and column groupID.
      double full_a[16][16], full_b[16][8];
      for (int lane = 0; lane < 32; lane++) {
        const int group = lane >> 2, in_group = lane % 4;
        for (int i = 0; i < 8; i++) {
          const int row = group + (i / 2 % 2 == 1 ? 8 : 0), column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
          full_a[row][column] = (double)half_of(x[lane].hi[i / 2], i & 1) + half_of(x[lane].lo[i / 2], i & 1);
        }
        for (int i = 0; i < 4; i++) {
          const int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
          full_b[row][group] = (double)half_of(y[lane].hi[i / 2], i & 1) + half_of(y[lane].lo[i / 2], i & 1);
        }
      }
      for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++)
          for (int k = 0; k < 16; k++) sum[m * COLUMNS + n0 + n] += full_a[m][k] * full_b[k][n];
    }
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < COLUMNS; n++) {
      const double want = ref[m * COLUMNS + n];
      CHECK(sum[m * COLUMNS + n] == want, "dense %d %d, depth %d: mma's [%d, %d] is %g, want %g", A_DENSE, B_DENSE,
            depth, m, n, sum[m * COLUMNS + n], want);
      // c_i of a lane is row groupID (+ 8 for i >= 2) and column threadID_in_group * 2 + (i & 1).
      // lo·lo is omitted: it is less than 1 for each product of up to 60000.
      const int lane = m % 8 * 4 + n % 8 / 2, i = m / 8 * 2 + n % 2;
      const double got = lanes[lane][n / 8][i];
      CHECK(fabs(got - want) <= depth, "dense %d %d, depth %d: the plain [%d, %d] is %g, want %g", A_DENSE, B_DENSE,
            depth, m, n, got, want);
    }
}

// Cute is a layout of CUTLASS: the position of lane l's value v (low to high in its registers),
// which is m + 16·k in A, n + 8·k in B, and m + 16·n in C.
struct Cute {
  int lane[2], value[3];
  int operator()(int l, int v) const {
    return l % 4 * lane[0] + l / 4 * lane[1] + v % 2 * value[0] + v / 2 % 2 * value[1] + v / 4 * value[2];
  }
};

// layouts compares fragments and results with a second source:
// MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN> of cute/atom/mma_traits_sm80.hpp.
static void layouts() {
  const Cute of_a = {{32, 1}, {16, 8, 128}}, of_b = {{16, 1}, {8, 64, 0}}, of_c = {{32, 1}, {16, 8, 0}};
  enum { STEP = 24 };
  alignas(16) static Word a[16 * STEP], b[8 * STEP];
  for (int k = 0; k < 16; k++) {
    for (int m = 0; m < 16; m++) a[m * STEP + k] = to_word<bf16>(number(m + 16 * k));
    for (int n = 0; n < 8; n++) b[n * STEP + k] = to_word<bf16>(number(1000 + n + 8 * k));
  }
  for (int l = 0; l < 32; l++) {
    threadIdx.x = (unsigned)(32 + l);
    const FragmentA x = fragment_a<true>(a, STEP, 0);
    const FragmentB y = fragment_b<true>(b, STEP, 0);
    const Lane at;
    for (int v = 0; v < 8; v++) {
      const float got = half_of(x.hi[v / 2], v & 1) + half_of(x.lo[v / 2], v & 1);
      CHECK(got == number(of_a(l, v)), "A: lane %d has %g as its value %d, want that of position %d", l, got, v,
            of_a(l, v));
    }
    for (int v = 0; v < 4; v++) {
      const float got = half_of(y.hi[v / 2], v & 1) + half_of(y.lo[v / 2], v & 1);
      CHECK(got == number(1000 + of_b(l, v)), "B: lane %d has %g as its value %d, want that of position %d", l, got, v,
            of_b(l, v));
      const int position = at.row + v / 2 * 8 + 16 * (at.column + v % 2);
      CHECK(position == of_c(l, v), "C: lane %d has position %d as its value %d, want %d", l, position, v, of_c(l, v));
    }
  }
}

// matrices is ldmatrix by its documentation: of each of four matrices of 8 x 8, lane l gets
// elements 2·(l % 4) and 2·(l % 4) + 1 of row l / 4, or, transposed, of column l / 4. Lanes
// 8·matrix … 8·matrix + 7 supply the starts of the rows.
static void matrices(const uint16_t *p, int (*quarters)(int), int step, bool transposed, uint32_t (&r)[32][4]) {
  int at[32];
  for (int l = 0; l < 32; l++) {
    threadIdx.x = (unsigned)(96 + l);
    at[l] = quarters(step);
    CHECK(at[l] % 8 == 0, "lane %d: a row of a matrix begins at element %d, not at 16 bytes", l, at[l]);
  }
  for (int matrix = 0; matrix < 4; matrix++)
    for (int l = 0; l < 32; l++) {
      uint32_t both[2];
      for (int i = 0; i < 2; i++) {
        const int row = transposed ? l % 4 * 2 + i : l / 4, column = transposed ? l / 4 : l % 4 * 2 + i;
        both[i] = p[at[8 * matrix + row] + column];
      }
      r[l][matrix] = both[0] | both[1] << 16;
    }
}

// plain compares the registers that ldmatrix makes of plain BF16, and those made of results, with
// the fragments of words.
static void plain() {
  enum { STEP = 24 };
  static uint16_t p[16 * STEP];
  alignas(16) static Word rows[16 * STEP];
  uint32_t r[32][4];
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) {
      p[i * STEP + j] = (uint16_t)(0x3f80 + 16 * i + j);
      rows[i * STEP + j] = p[i * STEP + j];
    }
  auto want = [&](const char *what, uint32_t got, uint32_t want, int lane, int i) {
    CHECK(got == want, "%s: lane %d has %x in register %d, want %x", what, lane, got, i, want);
  };
  matrices(p, quarters_down, STEP, false, r);
  for (int l = 0; l < 32; l++) {
    threadIdx.x = (unsigned)l;
    const FragmentA x = fragment_a<true>(rows, STEP, 0);
    for (int i = 0; i < 4; i++) want("A dense", r[l][i], x.hi[i], l, i);
    float c[2][4]; // the same values as a result
    const Lane at;
    for (int n = 0; n < 2; n++)
      for (int e = 0; e < 4; e++) c[n][e] = word_hi(p[(at.row + e / 2 * 8) * STEP + at.column + 8 * n + e % 2]);
    uint32_t a[4];
    fragment_of(a, c, 0);
    for (int i = 0; i < 4; i++) want("A of results", a[i], x.hi[i], l, i);
  }
  matrices(p, quarters_along, STEP, true, r);
  for (int l = 0; l < 32; l++) {
    threadIdx.x = (unsigned)l;
    const FragmentA x = fragment_a<false>(rows, STEP, 0);
    for (int i = 0; i < 4; i++) want("A across", r[l][i], x.hi[i], l, i);
  }
  for (bool dense : {true, false}) {
    matrices(p, dense ? quarters_along : quarters_down, STEP, !dense, r);
    for (int l = 0; l < 32; l++)
      for (int n = 0; n < 2; n++) {
        threadIdx.x = (unsigned)l;
        const FragmentB y =
            dense ? fragment_b<true>(rows + 8 * n * STEP, STEP, 0) : fragment_b<false>(rows + 8 * n, STEP, 0);
        for (int i = 0; i < 2; i++) want(dense ? "B dense" : "B across", r[l][2 * n + i], y.hi[i], l, 2 * n + i);
      }
  }
}

// tiles compares swizzled tiles with tiles whose rows follow each other: each element has a
// position of its own in its row, lanes supply the same rows, and the eight rows of a matrix are in
// all of the 32 banks of four bytes.
template <int WIDTH> static void tiles() {
  for (int row = 0; row < 16; row++) {
    bool taken[WIDTH] = {};
    for (int column = 0; column < WIDTH; column++) {
      const int at = swizzled<WIDTH>(row, column) - row * WIDTH;
      CHECK(at >= 0 && at < WIDTH && !taken[at] && at % 8 == column % 8, "row %d, column %d of %d is at %d", row,
            column, WIDTH, at);
      taken[at] = true;
    }
  }
  for (bool down : {true, false})
    for (int l = 0; l < 32; l++) {
      threadIdx.x = (unsigned)(64 + l);
      auto at = [&](int lane) { return down ? swizzled_down<WIDTH>(lane) : swizzled_along<WIDTH>(lane); };
      const int plain = down ? quarters_down(WIDTH) : quarters_along(WIDTH);
      CHECK(at(l) == swizzled<WIDTH>(plain / WIDTH, plain % WIDTH), "lane %d supplies element %d", l, at(l));
      for (int other = l / 8 * 8; other < l; other++)
        CHECK(at(l) % 64 != at(other) % 64, "lanes %d and %d read the same banks", other, l);
    }
}

static void words() {
  for (int i = 0; i < 100000; i++) {
    const float x = ldexpf((float)(i * 2654435761u % 1000003) / 1000003 - 0.5f, i % 60 - 30),
                back = of_word<bf16>(to_word<bf16>(x));
    CHECK(fabsf(back - x) <= ldexpf(fabsf(x), -17), "%.9g becomes %.9g", x, back);
    const float low = word_hi(to_word<bf16>(x)); // a BF16 value is exact and has no second number
    CHECK(to_word<bf16>(low) >> 16 == 0 && of_word<bf16>(to_word<bf16>(low)) == low, "%.9g is not kept", low);
    CHECK(of_word<float>(to_word<float>(x)) == x, "%.9g is not kept", x);
  }
  const float nan = of_word<bf16>(to_word<bf16>(NAN));
  CHECK(nan != nan, "a NaN becomes %g", nan);
}

int main() {
  words();
  layouts();
  plain();
  tiles<64>();
  tiles<128>();
  tiles<256>();
  for (int depth = 16; depth <= 64; depth += 16) {
    fragments<true, true>(depth);
    fragments<true, false>(depth);
    fragments<false, true>(depth);
    fragments<false, false>(depth);
  }
  return test_status();
}
