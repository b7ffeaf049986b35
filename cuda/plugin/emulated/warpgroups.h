// The functions of gpu/warpgroups.h in plain C++, for kernels that run on the host. Operands are
// found by their descriptors, as the PTX documentation defines them.
#pragma once

inline void sync_at(int barrier, int threads, ULY_EMULATED_HERE) {
  uly_emulated::partial_barrier(barrier, threads, true, file, line);
}
inline void arrive_at(int barrier, int threads, ULY_EMULATED_HERE) {
  uly_emulated::partial_barrier(barrier, threads, false, file, line);
}
template <int REGISTERS> void more_registers() {}
template <int REGISTERS> void less_registers() {}
inline void show_products() { uly_emulated::show_products(); }

namespace uly_emulated {

// Operand is the operand of a descriptor, with a swizzle of 128 bytes: the only one that is
// emulated. Within a panel, a row of 128 bytes has 64 elements.
struct Operand {
  uint32_t address, panel, eight_rows;
  explicit Operand(uint64_t descriptor)
      : address((uint32_t)(descriptor & 0x3fff) << 4),
        panel((uint32_t)(descriptor >> 16 & 0x3fff) << 4),
        eight_rows((uint32_t)(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1 || descriptor >> 46 & 0xffff)
      fail_kernel("a product with a descriptor of another swizzle");
  }
  // at returns the element of a row and a column; columns from 64 on are in the next panels.
  ULY_FAST __attribute__((always_inline)) const uint32_t *at(int row, int column) const {
    const uint32_t a = address + (uint32_t)(column / 64) * panel + (uint32_t)(row / 8) * eight_rows +
                       (uint32_t)(row % 8 * 128 + column % 64 * 2);
    return reinterpret_cast<const uint32_t *>(dynamic_shared() + (a ^ (a >> 7 & 7) << 4));
  }
};

} // namespace uly_emulated

// WarpgroupProducts computes each group when it is issued or as late as wait allows, at random. The
// sums of a late group are NaN until then. A kernel that reads or writes sums or operands too early
// gets other results in some orders, or stops.
class WarpgroupProducts {
 public:
  void begin() { begun = true; }
  template <int NT> void from_shared(float (&c)[NT][4], uint64_t x, uint64_t y, bool more) {
    add({&c[0][0], NT, x, y, more, {}, nullptr, {}});
  }
  template <int NT> void from_registers(float (&c)[NT][4], const uint32_t (&x)[4], uint64_t y) {
    Product p = {&c[0][0], NT, 0, y, true, {}, x, {}};
    memcpy(p.was, x, sizeof p.was);
    // a lane needs the two rows of four lanes
    const uint64_t mine[2] = {x[0] | (uint64_t)x[1] << 32, x[2] | (uint64_t)x[3] << 32};
    const uint64_t *all = uly_emulated::exchange(0xffffffffu, mine, 2, "wgmma", __FILE__, __LINE__);
    for (int k = 0; k < 8; k++) {
      const uint64_t both = all[k / 4 * 32 + (int)threadIdx.x % 32 / 4 * 4 + k % 4];
      p.rows[0][k] = (uint32_t)both, p.rows[1][k] = (uint32_t)(both >> 32);
    }
    add(p);
  }
  void close() { open = false; }
  template <int PENDING, class... Sums> void wait(const Sums &...) {
    if (open) uly_emulated::fail_kernel("wgmma.wait_group with an open group of products");
    while (groups.size() > PENDING) {
      complete(groups.front());
      groups.erase(groups.begin());
    }
    begun = false;
  }

 private:
  // Product is a product that was issued. was: the words of x in registers at that time.
  struct Product {
    float *c;
    int nt;
    uint64_t x, y;
    bool more;
    uint32_t rows[2][8]; // of x: two elements a word
    const uint32_t *held;
    uint32_t was[4];
  };
  struct Group {
    bool late;
    std::vector<Product> products;
    std::vector<float> sums; // of a late group, before it
  };
  std::vector<Group> groups;
  bool open = false, begun = false;

  void add(const Product &p) {
    if (!begun) uly_emulated::fail_kernel("a wgmma without wgmma.fence since the last wgmma.wait_group");
    if (!open) {
      groups.push_back({(uly_emulated::random64() & 1) != 0, {}, {}});
      open = true;
      Group &g = groups.back();
      if (g.late) {
        g.sums.assign(p.c, p.c + 4 * p.nt);
        for (int i = 0; i < 4 * p.nt; i++) p.c[i] = __builtin_nanf("0x1234");
      }
    }
    Group &g = groups.back();
    if (!g.products.empty() && g.products[0].c != p.c) uly_emulated::fail_kernel("a group of products with two sums");
    g.products.push_back(p);
    if (!g.late) run(p);
  }
  static void complete(Group &g) {
    for (const Product &p : g.products)
      if (p.held && memcmp(p.held, p.was, sizeof p.was))
        uly_emulated::fail_kernel("an operand of a wgmma in registers was changed before its group completed");
    if (!g.late) return;
    float *c = g.products[0].c;
    for (size_t i = 0; i < g.sums.size(); i++)
      if (uly_bits<uint32_t>(c[i]) != uly_bits<uint32_t>(__builtin_nanf("0x1234")))
        uly_emulated::fail_kernel("a sum of a wgmma was changed before its group completed");
    memcpy(c, g.sums.data(), g.sums.size() * sizeof(float));
    for (const Product &p : g.products) run(p);
  }

  // run computes this thread's sums, in the order of mma_pair.
  static ULY_FAST void run(const Product &p) {
    const int thread = (int)threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    const uly_emulated::Operand y(p.y);
    uint32_t x[2][8];
    if (p.held) memcpy(x, p.rows, sizeof x);
    uly_emulated::reads_operands(true);
    if (!p.held) {
      const uly_emulated::Operand a(p.x);
      for (int h = 0; h < 2; h++)
        for (int k = 0; k < 8; k++) x[h][k] = *a.at(row + 8 * h, 2 * k);
    }
    for (int n = 0; n < p.nt; n += 2) {
      float *c = p.c + 4 * n;
      EightFloats sum = {};
      if (p.more) memcpy(&sum, c, sizeof sum);
      uint32_t even[8][4], odd[8][4]; // elements 2k and 2k + 1 of the columns in c[n] and c[n + 1]
      for (int i = 0; i < 4; i += p.held ? 2 : 1) {
        const int at = 8 * (n + i / 2) + column + i % 2;
        for (int k = 0; k < 8; k++) {
          if (p.held) { // y has a row for each k
            const uint32_t upper = *y.at(2 * k, at), lower = *y.at(2 * k + 1, at);
            even[k][i] = upper << 16, even[k][i + 1] = upper & 0xffff0000u;
            odd[k][i] = lower << 16, odd[k][i + 1] = lower & 0xffff0000u;
          } else {
            const uint32_t both = *y.at(at, 2 * k);
            even[k][i] = both << 16, odd[k][i] = both & 0xffff0000u;
          }
        }
      }
      for (int k = 0; k < 8; k++) {
        const uint32_t x0 = x[0][k], x1 = x[1][k], *e = even[k], *o = odd[k];
        const EightWords rows = {x0, x0, x1, x1, x0, x0, x1, x1};
        add_product(sum, rows << 16, EightWords{e[0], e[1], e[0], e[1], e[2], e[3], e[2], e[3]});
        add_product(sum, rows & 0xffff0000u, EightWords{o[0], o[1], o[0], o[1], o[2], o[3], o[2], o[3]});
      }
      memcpy(c, &sum, sizeof sum);
    }
    uly_emulated::reads_operands(false);
    uly_emulated::count_multiply_adds(64 * p.nt);
  }
};
