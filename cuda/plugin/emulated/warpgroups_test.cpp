// Products of warpgroups and barriers of some warps. The operands of the products are written by
// the definition of their layout, and the results compared with sums in double.
#include "emulated_test.h"
#include "kernels/warpgroups.h"

typedef uint16_t half_word; // a BF16

static float value(half_word x) {
  const uint32_t u = (uint32_t)x << 16;
  float f;
  memcpy(&f, &u, sizeof f);
  return f;
}

enum How { RIGHT, NO_BEGIN, NO_WAIT, EARLY_WRITE, EARLY_OPERAND, NOT_SHOWN, NO_BARRIER };

// at is the position of an element in panels of 64 columns and `rows` rows.
static int at(int rows, int row, int column) {
  return column / 64 * rows * 64 + row * 64 + (column % 64 ^ row % 8 * 8);
}

// multiply computes the product of x [64, DEPTH] and y into out [64, 8·NT]: y is [8·NT, DEPTH] if
// SHARED_X, then both are in shared memory, and [DEPTH, 8·NT] otherwise.
template <int NT, int DEPTH, bool SHARED_X>
__global__ void multiply(float *out, const half_word *x, const half_word *y, int how) {
  SHARED(half_word, shared);
  constexpr int ROWS = SHARED_X ? 8 * NT : DEPTH, COLUMNS = SHARED_X ? DEPTH : 8 * NT;
  half_word *ys = shared + 64 * DEPTH;
  for (int i = (int)threadIdx.x; i < 64 * DEPTH; i += 128) shared[at(64, i / DEPTH, i % DEPTH)] = x[i];
  for (int i = (int)threadIdx.x; i < ROWS * COLUMNS; i += 128) ys[at(ROWS, i / COLUMNS, i % COLUMNS)] = y[i];
  if (how != NOT_SHOWN) show_products();
  if (how != NO_BARRIER) sync_at(3, 128);
  float c[NT][4];
  for (auto &four : c)
    for (float &v : four) v = 0;
  const int row = (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4, column = (int)threadIdx.x % 4 * 2;
  uint32_t held[4];
  WarpgroupProducts products;
  if (how != NO_BEGIN) products.begin();
  const uint64_t px = panels((uint32_t)__cvta_generic_to_shared(shared), 64 * 128),
                 py = panels((uint32_t)__cvta_generic_to_shared(ys), ROWS * 128);
  for (int k = 0; k < DEPTH; k += 16) {
    if (SHARED_X) {
      auto step = [&](int rows) { return (uint64_t)(k / 64 * rows * 128 + k % 64 * 2) / 16; };
      products.from_shared(c, px + step(64), py + step(ROWS), k > 0);
      continue;
    }
    for (int i = 0; i < 4; i++) {
      const half_word *two = x + (row + i % 2 * 8) * DEPTH + k + column + i / 2 * 8;
      held[i] = two[0] | (uint32_t)two[1] << 16;
    }
    products.begin();
    products.from_registers(c, held, py + (uint64_t)k * 128 / 16);
    products.close();
    if (how == EARLY_OPERAND) held[0] = 0;
    products.wait<0>();
  }
  if (SHARED_X) products.close();
  if (how == EARLY_WRITE) c[0][0] = 1;
  if (how != NO_WAIT) products.wait<0>();
  for (int n = 0; n < NT; n++)
    for (int e = 0; e < 4; e++) out[(row + e / 2 * 8) * 8 * NT + 8 * n + column + e % 2] = c[n][e];
  products.wait<0>();
}

// Multiplied is the result of a run: how many of its launches were right, and an error.
struct Multiplied {
  int right = 0, failed = 0;
  std::string error;
};

template <int NT, int DEPTH, bool SHARED_X> static Multiplied multiplied(How how, int launches) {
  constexpr int COLUMNS = 8 * NT, OUT = 64 * COLUMNS, BYTES = 2 * (64 + COLUMNS) * DEPTH;
  std::vector<half_word> x(64 * DEPTH), y((size_t)COLUMNS * DEPTH);
  uint32_t state = 7;
  auto fill = [&](std::vector<half_word> &v) {
    for (half_word &h : v) {
      state = state * 1664525 + 1013904223;
      const float f = (float)(int)(state >> 20) / 2048 - 1; // 12 bits of which BF16 keeps 8
      uint32_t u;
      memcpy(&u, &f, sizeof u);
      h = (half_word)(u >> 16);
    }
  };
  fill(x), fill(y);
  half_word *dx = device<half_word>(x.size()), *dy = device<half_word>(y.size());
  float *out = device<float>(OUT);
  Multiplied m;
  FINE(cudaFuncSetAttribute(multiply<NT, DEPTH, SHARED_X>, cudaFuncAttributeMaxDynamicSharedMemorySize, BYTES));
  for (int i = 0; i < launches; i++) {
    Stream *s = stream();
    FINE(cudaMemcpyAsync(dx, x.data(), 2 * x.size(), cudaMemcpyHostToDevice, s->s));
    FINE(cudaMemcpyAsync(dy, y.data(), 2 * y.size(), cudaMemcpyHostToDevice, s->s));
    auto kernel = multiply<NT, DEPTH, SHARED_X>;
    LAUNCH(kernel, 1, 128, BYTES, s, out, dx, dy, (int)how);
    if (cudaStreamSynchronize(s->s) != cudaSuccess) {
      m.error = cudaGetErrorString(cudaStreamSynchronize(s->s));
      m.failed++;
      cudaGetLastError();
      continue;
    }
    const std::vector<float> got = read(s, out, OUT);
    bool same = true;
    for (int r = 0; r < 64; r++)
      for (int c = 0; c < COLUMNS; c++) {
        double sum = 0, size = 0;
        for (int k = 0; k < DEPTH; k++) {
          const double term = (double)value(x[(size_t)(r * DEPTH + k)]) *
                              value(y[(size_t)(SHARED_X ? c * DEPTH + k : k * COLUMNS + c)]);
          sum += term, size += fabs(term);
        }
        same &= fabs(got[(size_t)(r * COLUMNS + c)] - sum) <= 1e-6 * size;
      }
    m.right += same;
  }
  return m;
}

#define FAILS(m, words) \
  EXPECT(m.failed > 0 && m.error.find(words) != std::string::npos, "%d: %s", m.failed, m.error.c_str())

// --- barriers of some warps

// relay passes numbers from one warp to two others through two buffers.
__global__ void relay(int *out, int how) {
  enum { FULL = 2, FREE = 4, TWO = 64, ALL = 96 };
  __shared__ int buffer[2][32];
  const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
  int sum = 0;
  for (int i = 0; i < 9; i++) {
    const int b = i % 2;
    if (warp == 0) {
      if (i >= 2) sync_at(FREE + b, ALL);
      buffer[b][lane] = i * lane;
      arrive_at(FULL + b, ALL);
    } else {
      if (how != NO_WAIT) sync_at(FULL + b, ALL);
      else arrive_at(FULL + b, ALL);
      sum += buffer[b][31 - lane];
      arrive_at(FREE + b, ALL);
    }
  }
  if (warp == 0 && how != NO_BARRIER) sync_at(FREE, ALL), sync_at(FREE + 1, ALL);
  if (warp != 0) out[threadIdx.x - 32] = sum;
}
__global__ void miscounted(int *x) {
  if (threadIdx.x < 32) sync_at(2, 64);
  else sync_at(2, 96);
  x[threadIdx.x] = 1;
}
__global__ void alone(int *x) {
  if (threadIdx.x < 32) sync_at(2, 64);
  x[threadIdx.x] = 1;
}

static void partial() {
  int *x = device<int>(128);
  int right = 0;
  for (int round = 0; round < 20; round++) {
    for (How how : {RIGHT, NO_WAIT}) {
      Stream *s = stream();
      LAUNCH(relay, 1, 96, 0, s, x, (int)how);
      if (how == NO_WAIT && cudaStreamSynchronize(s->s) != cudaSuccess) { // it may also come twice
        cudaGetLastError();
        continue;
      }
      const std::vector<int> got = read(s, x, 64);
      bool same = true;
      for (int i = 0; i < 64; i++) same &= got[(size_t)i] == 36 * (31 - i % 32);
      if (how == RIGHT) EXPECT(same, "numbers that are passed by barriers");
      else right += same;
    }
    Stream *s = stream();
    LAUNCH(relay, 1, 96, 0, s, x, (int)NO_BARRIER);
    fails(s, cudaErrorLaunchFailure, {"relay", "64 threads have arrived at barrier", "for which no thread waits"});
    s = stream();
    LAUNCH(miscounted, 1, 96, 0, s, x);
    fails(s, cudaErrorLaunchFailure, {"miscounted", "comes to barrier 2 for"});
    s = stream();
    LAUNCH(alone, 1, 96, 0, s, x);
    fails(s, cudaErrorLaunchFailure, {"alone", "32 threads wait at barrier 2", "where 32 of 64 have arrived"});
  }
  EXPECT(right < 20, "a warp that does not wait at a barrier");
}

void warpgroups() {
  partial();
  EXPECT((multiplied<8, 64, true>(RIGHT, 10).right == 10), "64 columns");
  EXPECT((multiplied<16, 128, true>(RIGHT, 10).right == 10), "128 columns");
  EXPECT((multiplied<32, 192, true>(RIGHT, 3).right == 3), "256 columns");
  EXPECT((multiplied<8, 64, false>(RIGHT, 10).right == 10), "64 columns, x in registers");
  EXPECT((multiplied<16, 128, false>(RIGHT, 10).right == 10), "128 columns, x in registers");
  EXPECT((multiplied<32, 64, false>(RIGHT, 3).right == 3), "256 columns, x in registers");
  FAILS((multiplied<8, 64, true>(NO_BEGIN, 1)), "without wgmma.fence");
  FAILS((multiplied<8, 64, true>(EARLY_WRITE, 20)), "a sum of a wgmma was changed");
  FAILS((multiplied<8, 64, false>(EARLY_OPERAND, 20)), "an operand of a wgmma in registers was changed");
  EXPECT((multiplied<8, 64, true>(NO_WAIT, 20).right < 20), "sums are read before wait");
  EXPECT((multiplied<8, 64, true>(NO_BARRIER, 20).right < 20), "operands are read before a barrier");
}

// In a build that detects races, a product also needs show_products, and barriers of some warps
// order the accesses of these warps.
void warpgroup_races() {
  EXPECT((multiplied<8, 64, true>(RIGHT, 3).right == 3), "a product");
  FAILS((multiplied<8, 64, true>(NOT_SHOWN, 1)), "without show_products");
  FAILS((multiplied<8, 64, true>(NO_BARRIER, 1)), "without a barrier between");
  int *x = device<int>(128);
  for (How how : {RIGHT, NO_WAIT}) {
    Stream *s = stream();
    LAUNCH(relay, 1, 96, 0, s, x, (int)how);
    if (how == RIGHT) FINE(cudaStreamSynchronize(s->s));
    else fails(s, cudaErrorLaunchFailure, {"__shared__ memory", "without a barrier between"});
  }
}
