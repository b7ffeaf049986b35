// Tensor cores: loads of matrices, products of a warp (mma) and of a warpgroup (wgmma).
#include <math.h>

#include "races.h"
#include "warp.h"

namespace uly_emulated {
namespace ptx {
namespace {

// Four matrices of 8 x 8 elements of 16 bits. Lane l has the address of row l % 8 of matrix l / 8.
template <bool TRANSPOSED> void load_matrices(Warp &w, const Instruction &i) {
  uint16_t element[4][8][8];
  const uint32_t *addresses = w.at<uint32_t>(i.at[4]);
  for (unsigned l = 0; l < 32; l++) {
    const uint64_t address = addresses[l] + (uint64_t)i.offset;
    aligned(address, 16);
    if (w.block->races) w.block->races->access(w, i, l, address - SHARED_START, 16, false);
    memcpy(element[l / 8][l % 8], w.block->shared_at(address, 16), 16);
  }
  for (unsigned m = 0; m < 4; m++) {
    uint32_t *d = w.at<uint32_t>(i.at[m]);
    for (unsigned l = 0; l < 32; l++) {
      const unsigned row = l / 4, column = l % 4 * 2;
      const uint16_t first = TRANSPOSED ? element[m][column][row] : element[m][row][column];
      const uint16_t second = TRANSPOSED ? element[m][column + 1][row] : element[m][row][column + 1];
      d[l] = (uint32_t)second << 16 | first;
    }
  }
}
void transpose(Warp &w, const Instruction &i) { // movmatrix
  const uint32_t *a = w.at<uint32_t>(i.at[1]);
  uint16_t element[8][8];
  for (unsigned l = 0; l < 32; l++) memcpy(&element[l / 4][l % 4 * 2], &a[l], 4);
  uint32_t *d = w.at<uint32_t>(i.at[0]);
  for (unsigned l = 0; l < 32; l++) d[l] = (uint32_t)element[l % 4 * 2 + 1][l / 4] << 16 | element[l % 4 * 2][l / 4];
}

float low(uint32_t pair) { return uly_bits<float>(pair << 16); }
float high(uint32_t pair) { return uly_bits<float>(pair & 0xffff0000u); }

// Left is 16 rows of A, of a warp: registers of row l / 4 and 8 below it, columns 2·(l % 4), 2·(l %
// 4) + 1, and 8 behind them.
struct Left {
  float a[16][16];
  void set(Warp &w, const uint32_t *at) {
    for (unsigned r = 0; r < 4; r++) {
      const uint32_t *v = w.at<uint32_t>(at[r]);
      for (unsigned l = 0; l < 32; l++) {
        float *p = &a[l / 4 + r % 2 * 8][l % 4 * 2 + r / 2 * 8];
        p[0] = low(v[l]), p[1] = high(v[l]);
      }
    }
  }
};
// add_columns computes 8 columns of a product: c is sums of row l / 4 and columns 2·(l % 4) and
// 2·(l % 4) + 1, and of the row 8 below. b [16][8].
void add_columns(Warp &w, const uint32_t *into, const uint32_t *from, bool more, const Left &left,
                 const float (*b)[8]) {
  float c[16][8] = {};
  if (more)
    for (unsigned e = 0; e < 4; e++) {
      const float *v = w.at<float>(from[e]);
      for (unsigned l = 0; l < 32; l++) c[l / 4 + e / 2 * 8][l % 4 * 2 + e % 2] = v[l];
    }
  for (unsigned r = 0; r < 16; r++)
    for (unsigned k = 0; k < 16; k++)
      for (unsigned n = 0; n < 8; n++) c[r][n] = __builtin_fmaf(left.a[r][k], b[k][n], c[r][n]);
  for (unsigned e = 0; e < 4; e++) {
    float *v = w.at<float>(into[e]);
    for (unsigned l = 0; l < 32; l++) v[l] = c[l / 4 + e / 2 * 8][l % 4 * 2 + e % 2];
  }
}

// Sums, A, B, sums before. The registers of B have rows 2·(l % 4), 2·(l % 4) + 1, and 8 below them,
// of column l / 4.
void multiply(Warp &w, const Instruction &i) {
  Left left;
  left.set(w, &i.at[4]);
  float b[16][8];
  for (unsigned r = 0; r < 2; r++) {
    const uint32_t *v = w.at<uint32_t>(i.at[8 + r]);
    for (unsigned l = 0; l < 32; l++)
      b[l % 4 * 2 + r * 8][l / 4] = low(v[l]), b[l % 4 * 2 + 1 + r * 8][l / 4] = high(v[l]);
  }
  add_columns(w, &i.at[0], &i.at[10], true, left, b);
}

// Panels is an operand in shared memory by its descriptor, with a swizzle of 128 bytes ("Matrix
// Descriptor Format"): rows of 64 elements, in groups of eight.
struct Panels {
  Block &block;
  uint32_t start, panel, eight_rows;
  Panels(Block &block, uint64_t descriptor)
      : block(block),
        start((uint32_t)(descriptor & 0x3fff) << 4),
        panel((uint32_t)(descriptor >> 16 & 0x3fff) << 4),
        eight_rows((uint32_t)(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1 || descriptor >> 46 & 0xffff || descriptor >> 14 & 3 || descriptor >> 30 & 3)
      throw Fault(format("a descriptor %#llx of another form than a swizzle of 128 bytes at base offset 0",
                         (unsigned long long)descriptor));
  }
  uint32_t address(unsigned row, unsigned column) const {
    const uint32_t a = start + column / 64 * panel + row / 8 * eight_rows + row % 8 * 128 + column % 64 * 2;
    return a ^ (a >> 7 & 7) << 4;
  }
  float at(unsigned row, unsigned column) const {
    uint16_t v;
    memcpy(&v, block.shared_at(address(row, column), 2), 2);
    return uly_bits<float>((uint32_t)v << 16);
  }
};

// operands calls f with the place and the bytes of the parts of a product's operands that this warp
// reads from shared memory, eight elements each.
template <class F> void operands(Warp &w, const Product &p, F f) {
  const bool held = p.x == HELD;
  auto part = [&](const Panels &o, unsigned row, unsigned column) {
    const uint32_t a = o.address(row, column);
    w.block->shared_at(a, 16);
    f(a - SHARED_START, 16);
  };
  if (!held)
    for (unsigned r = 0; r < 16; r++)
      for (unsigned k = 0; k < 16; k += 8) part(Panels(*w.block, p.x), w.number % 4 * 16 + r, k);
  const Panels y(*w.block, p.y);
  for (unsigned n = 0; n < p.by->count; n++)
    if (held)
      for (unsigned k = 0; k < 16; k++) part(y, k, 8 * n);
    else
      for (unsigned c = 0; c < 16; c++) part(y, 8 * n + c / 2, c % 2 * 8);
}

uint64_t one_descriptor(Warp &w, uint32_t place) {
  const uint64_t *v = w.at<uint64_t>(place);
  for (unsigned l = 1; l < 32; l++)
    if (v[l] != v[0]) throw Fault("lanes with different descriptors");
  return v[0];
}

// run_product computes the 16 rows of a warp of a product of its warpgroup.
void run_product(Warp &w, const Product &p) {
  const Instruction &i = *p.by;
  const bool held = p.x == HELD;
  const Panels y(*w.block, p.y);
  Left left;
  if (held) left.set(w, &i.at[4 * i.count]);
  else {
    const Panels x(*w.block, p.x);
    for (unsigned r = 0; r < 16; r++)
      for (unsigned k = 0; k < 16; k++) left.a[r][k] = x.at(w.number % 4 * 16 + r, k);
  }
  for (unsigned n = 0; n < i.count; n++) {
    float b[16][8];
    // a transposed B has a row for each k
    for (unsigned k = 0; k < 16; k++)
      for (unsigned c = 0; c < 8; c++) b[k][c] = held ? y.at(k, 8 * n + c) : y.at(8 * n + c, k);
    add_columns(w, &i.at[4 * n], &i.at[4 * n], p.more, left, b);
  }
}

// Operands: the sums, A (a descriptor, or four registers), the descriptor of B, whether the sums
// before are added (scale-d), scale-a, scale-b, and which operands in shared memory are transposed.
//
// A product is computed when it is issued, or as late as the wait of its group, at random by group.
// Its registers and its shared memory may not be used between. A program that does gets other
// results.
void issue(Warp &w, const Instruction &i) {
  const unsigned sums = 4 * i.count;
  const bool held = i.at.size() == sums + 9; // with A in registers
  const uint32_t *behind = &i.at[sums + (held ? 4 : 1)];
  auto is = [&](unsigned n, uint32_t want) { return w.at<uint32_t>(behind[n])[0] == want; };
  if (!is(2, 1) || !is(3, 1) || (held ? !is(4, 1) : !is(4, 0) || !is(5, 0)))
    throw Fault("a wgmma of a form that is not known");
  if (!w.fenced) throw Fault("a wgmma without wgmma.fence since the last wgmma.wait_group");
  const uint32_t more = w.predicate(behind[1]);
  if (more && more != ~0u) throw Fault("lanes with different scale-d");
  if (!w.open) {
    w.open = true;
    w.products.push_back({(random64() & 1) != 0, {}});
  }
  const Product p = {&i, held ? (uint64_t)HELD : one_descriptor(w, i.at[sums]), one_descriptor(w, behind[0]),
                     more != 0};
  if (Races *r = w.block->races)
    operands(w, p, [&](uint64_t at, uint64_t bytes) { r->begin_operand(w, i, at, bytes); });
  Group &g = w.products.back();
  g.products.push_back(p);
  if (!g.late) run_product(w, p);
}
void fence(Warp &w, const Instruction &) { w.fenced = true; }
void show(Warp &w, const Instruction &) {
  if (w.block->races) w.block->races->show(w);
}
void commit(Warp &w, const Instruction &) { w.open = false; }
void wait(Warp &w, const Instruction &i) {
  if (w.open) throw Fault("wgmma.wait_group with an open group of products");
  const uint32_t pending = w.at<uint32_t>(i.at[0])[0];
  while (w.products.size() > pending) {
    for (const Product &p : w.products.front().products) {
      if (w.products.front().late) run_product(w, p);
      if (Races *r = w.block->races)
        operands(w, p, [&](uint64_t at, uint64_t bytes) { r->end_operand(w, *p.by, at, bytes); });
    }
    w.products.pop_front();
  }
  w.fenced = false;
}

const Operation table[] = {
    {"ldmatrix.sync.aligned.m8n8.x4.shared.b16", "wwwwa", load_matrices<false>, Kind::TOGETHER, 16},
    {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16", "wwwwa", load_matrices<true>, Kind::TOGETHER, 16},
    {"movmatrix.sync.aligned.m8n8.trans.b16", "ww", transpose, Kind::TOGETHER},
    {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "wwwwwwwwwwwwww", multiply, Kind::TOGETHER},
    {"fence.proxy.async.shared::cta", "", show, Kind::PLAIN},
    {"wgmma.fence.sync.aligned", "", fence, Kind::TOGETHER},
    {"wgmma.commit_group.sync.aligned", "", commit, Kind::TOGETHER},
    {"wgmma.wait_group.sync.aligned", "w", wait, Kind::TOGETHER},
    // their operands depend on their form; program.cpp knows them
    {"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", nullptr, issue, Kind::TOGETHER},
    {"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", nullptr, issue, Kind::TOGETHER},
    {"wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16", nullptr, issue, Kind::TOGETHER},
};

} // namespace

const Operation *product(const std::string &name) { return find(table, name); }

} // namespace ptx
} // namespace uly_emulated
