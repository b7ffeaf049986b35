// Compares the registers that lanes pass to mma.m16n8k16 with NVIDIA's documentation (PTX ISA,
// "Matrix Fragments for mma.m16n8k16 with floating point type"). The emulated plug-in multiplies
// without these registers.
#define ULY_EMULATED
#include "mma.h"

#include "host_test.h"

#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// FragmentA and FragmentB are a lane's registers by the documentation, by element: a_i of a lane is
// row groupID (+ 8 for i in 2, 3, 6, 7) and column threadID_in_group * 2 + (i & 1) (+ 8 for i >=
// 4); b_i is row threadID_in_group * 2 + (i & 1) (+ 8 for i >= 2) and column groupID. of(row,
// column) returns the bits of an element.
struct FragmentA {
  uint32_t of[4] = {};
  template <class F> FragmentA(int lane, F bits) {
    for (int i = 0; i < 8; i++)
      of[i / 2] |= (uint32_t)bits(lane / 4 + (i / 2 % 2 == 1 ? 8 : 0), lane % 4 * 2 + (i & 1) + (i >= 4 ? 8 : 0))
                   << 16 * (i & 1);
  }
};
struct FragmentB {
  uint32_t of[2] = {};
  template <class F> FragmentB(int lane, F bits) {
    for (int i = 0; i < 4; i++)
      of[i / 2] |= (uint32_t)bits(lane % 4 * 2 + (i & 1) + (i >= 2 ? 8 : 0), lane / 4) << 16 * (i & 1);
  }
};

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
  for (int l = 0; l < 32; l++) {
    threadIdx.x = (unsigned)(32 + l);
    const FragmentA x(l, [](int m, int k) { return m + 16 * k; });
    const FragmentB y(l, [](int k, int n) { return n + 8 * k; });
    const Lane at;
    for (int v = 0; v < 8; v++) {
      const int got = (int)(x.of[v / 2] >> 16 * (v & 1) & 0xffff);
      CHECK(got == of_a(l, v), "A: lane %d has position %d as its value %d, want %d", l, got, v, of_a(l, v));
    }
    for (int v = 0; v < 4; v++) {
      const int got = (int)(y.of[v / 2] >> 16 * (v & 1) & 0xffff);
      CHECK(got == of_b(l, v), "B: lane %d has position %d as its value %d, want %d", l, got, v, of_b(l, v));
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

// plain compares the registers that ldmatrix makes, and those made of results, with the
// documentation.
static void plain() {
  enum { STEP = 24 };
  static uint16_t p[16 * STEP];
  uint32_t r[32][4];
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) p[i * STEP + j] = (uint16_t)(0x3f80 + 16 * i + j);
  auto stored = [&](int row, int column) { return p[row * STEP + column]; };
  auto turned = [&](int row, int column) { return p[column * STEP + row]; };
  auto want = [&](const char *what, uint32_t got, uint32_t want, int lane, int i) {
    CHECK(got == want, "%s: lane %d has %x in register %d, want %x", what, lane, got, i, want);
  };
  matrices(p, quarters_down, STEP, false, r);
  for (int l = 0; l < 32; l++) {
    threadIdx.x = (unsigned)l;
    const FragmentA x(l, stored);
    for (int i = 0; i < 4; i++) want("A dense", r[l][i], x.of[i], l, i);
    float c[2][4]; // the same values as a result
    const Lane at;
    for (int n = 0; n < 2; n++)
      for (int e = 0; e < 4; e++)
        c[n][e] = __uint_as_float((uint32_t)stored(at.row + e / 2 * 8, at.column + 8 * n + e % 2) << 16);
    uint32_t a[4];
    fragment_of(a, c, 0);
    for (int i = 0; i < 4; i++) want("A of results", a[i], x.of[i], l, i);
  }
  matrices(p, quarters_along, STEP, true, r);
  for (int l = 0; l < 32; l++) {
    threadIdx.x = (unsigned)l;
    const FragmentA x(l, turned);
    for (int i = 0; i < 4; i++) want("A across", r[l][i], x.of[i], l, i);
  }
  for (bool dense : {true, false}) {
    matrices(p, dense ? quarters_along : quarters_down, STEP, !dense, r);
    for (int l = 0; l < 32; l++)
      for (int n = 0; n < 2; n++) {
        threadIdx.x = (unsigned)l;
        const FragmentB y(
            l, [&](int k, int column) { return dense ? turned(k, 8 * n + column) : stored(k, 8 * n + column); });
        for (int i = 0; i < 2; i++) want(dense ? "B dense" : "B across", r[l][2 * n + i], y.of[i], l, 2 * n + i);
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

int main() {
  layouts();
  plain();
  tiles<64>();
  tiles<128>();
  tiles<256>();
  return test_status();
}
