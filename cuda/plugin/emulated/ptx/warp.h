// A warp that runs PTX instructions, and its block.
#pragma once

#include <string.h>

#include <deque>

#include "../settings.h"
#include "program.h"

namespace uly_emulated {
namespace ptx {

// Copy is an asynchronous copy of one lane (cp.async) that has not been waited for.
struct Copy {
  unsigned lane;
  int group;
  bool made;
  uint32_t to, bytes, present;
  uint64_t from;
  const Instruction *by;
};

// Product is a product of a warpgroup (wgmma) that was issued, with the descriptors of its
// operands. x is HELD if A is in registers.
enum : uint64_t { HELD = ~0ull };
struct Product {
  const Instruction *by;
  uint64_t x, y;
  bool more; // the sums before are added
};
// Group is a group of products that has not been waited for. If it is late, they have not been
// computed.
struct Group {
  bool late;
  std::vector<Product> products;
};

// Diverged is lanes of a warp at another instruction.
struct Diverged {
  uint32_t pc, lanes;
  bool blocked; // the instruction needs more lanes
};

struct Block;
class Races;
struct Warp {
  Block *block = nullptr;
  unsigned number = 0; // in its block
  unsigned char *registers = nullptr;

  uint32_t pc = 0;
  uint32_t active = 0, alive = 0; // lanes: at pc, and that have not ended
  uint32_t now = 0;               // lanes that run the present instruction: active, with its guard
  std::vector<Diverged> others;
  uint32_t next = ~0u; // the first instruction of `others`; 0 if some of them are blocked

  int waits = -1;        // barrier at which it waits
  uint32_t answer = ~0u; // place of the predicate that it gets there (bar.red)

  std::vector<Copy> copies;
  int group[32] = {}, copied[32] = {}, waited[32] = {}; // cp.async, by lane
  std::deque<Group> products;
  bool open = false, fenced = false; // a group of products; wgmma.fence

  template <class T> T *at(uint32_t place) { return reinterpret_cast<T *>(registers + place); }
  uint32_t &predicate(uint32_t place) { return *at<uint32_t>(place); }
};

struct Barrier {
  unsigned expected = 0, arrived = 0;
  uint32_t came = 0; // warps
  bool any = false;
  uint32_t line = 0;
};

struct Block {
  const Program *program = nullptr;
  unsigned threads = 0;
  uint64_t launch = 0;
  const unsigned char *parameters = nullptr;
  std::vector<unsigned char> shared; // from SHARED_START on
  uint32_t shared_bytes = 0;
  std::vector<Warp> warps;
  Barrier barriers[16];
  Races *races = nullptr; // if they are looked for

  // shared_at returns shared memory at an address in the window.
  unsigned char *shared_at(uint64_t address, uint64_t bytes) {
    if (address < SHARED_START || address + bytes > SHARED_START + (uint64_t)shared_bytes)
      throw Fault(format("%llu bytes at %llu in shared memory, which ends at %llu", (unsigned long long)bytes,
                         (unsigned long long)address, (unsigned long long)SHARED_START + shared_bytes));
    return shared.data() + (address - SHARED_START);
  }
};

inline void aligned(uint64_t address, uint64_t bytes) {
  if (address % bytes)
    throw Fault(format("address %#llx, which is not a multiple of %llu bytes", (unsigned long long)address,
                       (unsigned long long)bytes));
}

// global_at checks an address of `bytes` bytes in device memory, or of pinned host memory.
unsigned char *global_at(Warp &w, const Instruction &i, uint64_t address, uint64_t bytes);

// lanes calls f for each lane of a mask. The compiler makes vectors of the loop over all lanes.
template <class F> __attribute__((always_inline)) inline void lanes(uint32_t mask, F f) {
  if (mask == ~0u) {
#pragma GCC ivdep
    for (unsigned l = 0; l < 32; l++) f(l);
    return;
  }
  for (; mask; mask &= mask - 1) f((unsigned)__builtin_ctz(mask));
}

// uniform returns the value of a word that all lanes have in common.
inline uint32_t uniform(Warp &w, uint32_t place, const char *what) {
  const uint32_t *v = w.at<uint32_t>(place), first = v[__builtin_ctz(w.now)];
  lanes(w.now, [&](unsigned l) {
    if (v[l] != first) throw Fault(format("lanes with different values of %s", what));
  });
  return first;
}

} // namespace ptx
} // namespace uly_emulated
