// Races in shared memory, by the order that PTX instructions give: two accesses to one place, at
// least one of them a write, that nothing orders ("Memory Consistency Model").
//
// Barriers order what warps do before they come to them before what warps that wait do next. Within
// a warp, only bar.warp.sync and barriers order what different lanes do: shuffles, votes, ldmatrix
// and mma do not. A copy of cp.async writes at any time until its lane has waited for it. A wgmma
// reads its operands at any time until its warp has waited for it; it sees what a lane has written
// if that lane runs fence.proxy.async after the write, before what orders the two ("Async proxy").
#pragma once

#include <vector>

#include "warp.h"

namespace uly_emulated {
namespace ptx {

class Races {
 public:
  // prepare is called before the blocks of a launch, begin before each of them.
  void prepare(const Block &b);
  void begin();

  // The functions below throw a Fault for a race. `at` is an address in the block's shared memory,
  // from 0 on.

  // access is a load or a store of a lane.
  void access(const Warp &w, const Instruction &i, unsigned lane, uint64_t at, uint64_t bytes, bool write);
  // Copies: begin_copy when they are issued, end_copy when they have been waited for.
  void begin_copy(const Warp &w, const Instruction &i, unsigned lane, uint64_t at, uint64_t bytes);
  void end_copy(const Warp &w, const Instruction &i, unsigned lane, uint64_t at, uint64_t bytes);
  // Operands of a product, in the same way.
  void begin_operand(const Warp &w, const Instruction &i, uint64_t at, uint64_t bytes);
  void end_operand(const Warp &w, const Instruction &i, uint64_t at, uint64_t bytes);

  void sync_warp(const Warp &w) { warps[w.number].now.syncs++; } // bar.warp.sync
  void show(const Warp &w);                                      // fence.proxy.async, of w.now
  void arrive(const Warp &w, unsigned barrier);
  // pass orders the warps that wait at a barrier behind all that have come to it, and ends its
  // round.
  void pass(unsigned barrier);

 private:
  // Point is when a warp did something: how often it had come to barriers, and how often its lanes
  // had been ordered.
  struct Point {
    uint32_t barriers = 0, syncs = 0;
  };
  struct Order {
    Point now;
    std::vector<uint32_t> seen;   // barriers of each warp before which all is ordered
    std::vector<Point> shown[32]; // fences of each lane
  };
  enum : uint8_t { SEVERAL = 32 }; // lanes of a warp
  // Reader is the last read of a warp, Place what was done last to a place.
  struct Reader {
    Point when;
    uint32_t by = 0;      // instruction
    uint16_t pending = 0; // operands of products that have not completed
    uint8_t lane = 0;
  };
  struct Place {
    uint32_t block = 0;   // the rest is of an earlier block if this is
    uint32_t by = 0;      // the instruction that has written it, + 1
    Point when;           // the write
    uint32_t shown = 0;   // fences of the lane before it
    uint32_t readers = 0; // warps that have read it since
    uint8_t warp = 0, lane = 0;
    bool pending = false; // a copy that has not been waited for
  };
  // Actor is what accesses memory now.
  struct Actor {
    const Instruction &by;
    const Order &order;
    uint8_t warp, lane;
  };

  const Block *block = nullptr;
  uint32_t number = 0; // of the block among all that ran
  unsigned shift = 0;  // log2 of the bytes of a place: of the kernel's smallest access
  std::vector<Place> places;
  std::vector<Reader> readers; // [warp][place]
  std::vector<Order> warps;
  std::vector<uint32_t> arrived[16]; // by barrier: what the warps had seen that have come to it

  Actor actor(const Warp &w, const Instruction &i, unsigned lane) const {
    return {i, warps[w.number], (uint8_t)w.number, (uint8_t)lane};
  }
  uint32_t index(const Instruction &i) const { return (uint32_t)(&i - block->program->code.data()); }
  Place &place(uint64_t n);
  Reader &reader(uint64_t n, unsigned warp) { return readers[warp * places.size() + n]; }
  void read(const Actor &a, uint64_t n);
  void write(const Actor &a, uint64_t n);
  void check_write(const Actor &a, const Place &p, const char *does) const;
  void check_shown(const Actor &a, const Place &p) const;
  static bool ordered(unsigned warp, uint8_t lane, Point when, const Actor &a);
  [[noreturn]] void fail(const Actor &a, const char *does, const char *why, unsigned warp, uint8_t lane, uint32_t by,
                         const Place &p) const;
};

} // namespace ptx
} // namespace uly_emulated
