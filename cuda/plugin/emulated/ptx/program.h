// Kernels as PTX instructions: the program that nvcc has compiled for GPUs (program.cpp reads it),
// and the warps that run it on the host (run.cpp). References are to the PTX ISA 9.0.
//
// A warp's registers are tables of 32 values, one for each lane. An operand is the place of a
// table, in bytes from the warp's first; constants are tables, too. A predicate is a word with a
// bit for each lane.
#pragma once

#include <stdint.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "../cuda.h"

namespace uly_emulated {
namespace ptx {

// Fault is an error that fails the launch: an instruction that a GPU would not run either, whose
// result is not defined, or that the interpreter does not know.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum Width : uint8_t { PREDICATE, HALF, WORD, LONG }; // of a register: 1, 16, 32 or 64 bits

// Kind is what an instruction needs of its warp. TOGETHER: all 32 lanes come to it; BARRIER: all
// lanes that have not ended.
enum class Kind : uint8_t { PLAIN, TOGETHER, BARRIER, BRANCH, END };

// Arrival is how a warp comes to a barrier: bar.sync, bar.arrive, which does not wait, or
// bar.red.or, which waits and gets whether a predicate is true in any lane.
enum class Arrival : uint8_t { WAITS, LEAVES, ANY };

// Access is an access to memory, for the counts of traffic.h: the bytes of a lane, and the operand
// with its address. ANY is shared or device memory.
enum class Space : uint8_t { ANY, GLOBAL, SHARED };
struct Access {
  Space space;
  uint8_t operand;
  unsigned bytes;
  Width width; // of the address
};
// Counts are sums over the warps of a launch (traffic.h).
struct Counts {
  uint64_t runs = 0, passes = 0, least_passes = 0, sectors = 0, least_sectors = 0;
};

struct Warp;
struct Instruction {
  void (*run)(Warp &, const Instruction &) = nullptr; // for the lanes of w.now
  Kind kind = Kind::PLAIN;
  Arrival barrier = Arrival::WAITS;
  bool negated = false; // the guard
  uint8_t count = 1;    // elements of a load or a store; columns / 8 of a product
  Width width = LONG;   // of the register of an address
  uint32_t guard = 0;   // a predicate, if has_guard
  bool has_guard = false;
  uint32_t target = 0;      // of a branch
  std::vector<uint32_t> at; // operands in their order
  int64_t offset = 0;       // of an address
  uint32_t line = 0;        // in the file
  std::string name, source; // file:line of the source, if nvcc has written it
  std::vector<Access> accesses;
  mutable Counts counts;
  mutable uint64_t first = 0, last = 0; // the allocation that it has accessed last: [first, last)
  mutable uint64_t launch = 0;          // when that was
};

struct Parameter {
  size_t offset, bytes;
};

struct Constant {
  uint32_t at;
  Width width;
  uint64_t value;
};

// Special registers have fixed places, each with the table of a word: tid, ntid, ctaid, nctaid, in
// x, y and z.
enum : uint32_t { SPECIALS = 12, TABLE = 128 };

// The first bytes of shared memory belong to the system, on GPUs of compute capability 8.0 and up.
enum : uint32_t { SHARED_START = 1024 };

struct Program {
  std::string file;
  std::vector<Instruction> code;
  std::vector<Constant> constants;
  std::vector<Parameter> parameters;
  size_t parameter_bytes = 0, register_bytes = 0;
  uint32_t fixed_shared = 0; // bytes of __shared__ variables; dynamic shared memory is behind them
  unsigned most_threads = 0; // .maxntid
};

// program returns the kernel of a symbol of this library, from the files of the folder
// ULYSSES_EMULATED_PTX.
const Program &program(const std::string &symbol);
// symbol returns the name of a function of this library.
std::string symbol(const void *function);

// Operation is an instruction by its name. operands has a letter for the width of each operand: p,
// h, w or l, or a, s or g for an address (program.cpp). bytes are what a lane accesses there.
struct Operation {
  const char *name, *operands;
  void (*run)(Warp &, const Instruction &);
  Kind kind;
  unsigned bytes = 0;
};
// find returns the operation of a name, NULL if the table does not have it.
template <size_t N> const Operation *find(const Operation (&table)[N], const std::string &name) {
  for (const Operation &o : table)
    if (name == o.name) return &o;
  return nullptr;
}
// the operations of a file
const Operation *arithmetic(const std::string &name);
const Operation *memory(const std::string &name);
const Operation *product(const std::string &name);

// Memory operations. `space` is "global", "shared", "param" or "" (any). They return NULL for types
// that they do not have.
typedef void (*Run)(Warp &, const Instruction &);
Run load(const std::string &space, const std::string &type, Width into);
Run store(const std::string &space, const std::string &type, Width from);
Run conversion(const std::string &name, Width into, Width from);

} // namespace ptx
} // namespace uly_emulated
