// The running block: its threads, warps, fibers and shared memory. blocks.cpp has threads and
// barriers of all threads, partial.cpp barriers of some, fibers.cpp stacks, shared.cpp shared
// memory, and signals.cpp accesses to invalid addresses.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#ifndef __x86_64__
#include <ucontext.h>
#endif

#include "cuda.h"
#include "settings.h"

namespace uly_emulated {

// run_grid runs the blocks of a kernel. It returns "" or an error.
std::string run_grid(const Kernel &kernel, dim3 grid, dim3 block, size_t shared, const std::function<void()> &body);

// Access identifies the thread that accesses memory. For shared memory, launch is the number of the
// block's run.
struct Access {
  uint64_t launch = 0, block = 0;
  // clock: of the warp; exchanges: of the warp; shown: calls of show_products of the thread
  unsigned thread = 0, clock = 0, exchanges = 0, shown = 0;
  bool by_product = false; // read as an operand of a product of a warpgroup
};
// access returns false if the memory belongs to one thread only, or if no thread runs
bool access(const void *p, Access *now, const char **where);
// ordered reports whether a barrier or an exchange orders an earlier access and one of the running
// thread. Both are of one launch and of one block.
bool ordered(const Access &before, const Access &now);
// is_shown reports whether the thread of an earlier write has called show_products since.
bool is_shown(const Access &write);
[[noreturn]] void race(const std::string &text); // fails the launch

// SHARED_ZONE: bytes of a red zone around dynamic shared memory. SHARED_ALIGNMENT: the alignment of
// SHARED.
enum : size_t { STACK_BYTES = 68 << 10, GUARD_BYTES = 64 << 10, SHARED_ZONE = 256, SHARED_ALIGNMENT = 16 };

struct Fiber {
#ifdef __x86_64__
  void *sp = nullptr;
#else
  ucontext_t context;
#endif
  unsigned char *stack = nullptr;
  size_t bytes = 0; // of the stack
};

struct Thread {
  Fiber *fiber = nullptr; // of a waiting thread
  int result = 0;         // of the last barrier
  unsigned shown = 0;     // calls of show_products
};

// Clock counts the barriers of each warp that order its accesses before this point.
typedef std::array<unsigned, 32> Clock;

struct Warp {
  // two tables of 4 words a lane, used alternately: when a lane writes the third exchange, all
  // lanes have read the first
  uint64_t slot[2][4 * 32];
  unsigned arrived = 0, exchanges = 0;
  const char *what = "", *file = "";
  int line = 0;
  Clock seen = {};      // its own entry is the clock of its accesses
  unsigned partial = 0; // `exchanges` when it last came to a partial barrier
  uint64_t ticket = 0;  // round of that barrier
};

// Partial is a barrier of some of the warps.
struct Partial {
  unsigned threads = 0, arrived = 0; // threads: that it is for; 0 = no warp has arrived
  unsigned came = 0;                 // bits of the warps that have arrived
  uint64_t round = 0;
  std::vector<unsigned> warps, waiting; // warps and threads that wait for this round
  Clock seen = {};                      // of the warps that have arrived
  const char *file = "";
  int line = 0;
};

struct Block {
  Kernel kernel;
  const std::function<void()> *body;
  unsigned threads = 0, current = 0, begun = 0, ended = 0;
  // launch: number of the grid; run: number of the block among all blocks that ran; number: block
  // in its grid
  uint64_t launch = 0, run = 0, number = 0;
  Steps order, lanes; // order of the threads, or of the warps and their lanes
  bool by_warp = false, fresh_first = false;
  std::vector<Thread> thread;
  std::vector<Warp> warp;
  std::vector<unsigned> ready; // threads that can continue; the last one runs next
  unsigned waiting = 0;        // threads at the block's barrier
  Partial partial[16];
  const char *file = "";
  int line = 0, any = 0, all = 1, count = 0;
  std::vector<Fiber *> fibers, idle;
  Fiber main, *running = nullptr;
  unsigned char *shared = nullptr;
  size_t shared_bytes = 0;
  unsigned char *fence[2] = {};         // start and end of the red zones around it
  const unsigned char *fixed = nullptr; // __shared__ variables
  size_t fixed_bytes = 0;
  std::string failure;
};
extern Block block;

// fibers.cpp
void change(Fiber *from, Fiber *to); // switches stacks
void reset(Fiber *f);                // makes f start at fiber_main
Fiber *idle_fiber();

// shared.cpp
void place_shared(size_t bytes);
struct Static {
  unsigned char *p;
  size_t bytes;
  const void *code;
};
Static static_shared();
void poison_static(const Static &s);

// signals.cpp
// Signals converts accesses to invalid addresses into failed launches during its lifetime.
struct Signals {
  Signals();
  ~Signals();
};
bool in_kernel(); // whether the calling thread runs a thread of a kernel

// blocks.cpp
void fiber_main();
void suspend(); // runs other threads until the current one is ready
bool same(const char *a, int la, const char *b, int lb);
void join(Clock *to, const Clock &from);
[[noreturn]] void fail(std::string text); // fails the launch
std::string where(const char *file, int line);

// partial.cpp
std::string partial_deadlock(); // threads that wait at partial barriers, "" if there are none
std::string partial_rest();     // arrivals for which no thread waited, "" if there are none
void reset_partial();

} // namespace uly_emulated
