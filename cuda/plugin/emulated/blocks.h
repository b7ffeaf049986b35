// The block that runs: its threads, warps, fibers and shared memory. The files of the block are
// blocks.cpp (threads and barriers), fibers.cpp (stacks), shared.cpp (shared memory) and signals.cpp
// (invalid addresses).
#pragma once

#include <functional>
#include <string>
#include <vector>

#ifndef __x86_64__
#include <ucontext.h>
#endif

#include "cuda.h"
#include "settings.h"

namespace uly_emulated {

// run_grid runs a kernel's blocks. It returns "" or what went wrong.
std::string run_grid(const Kernel &kernel, dim3 grid, dim3 block, size_t shared, const std::function<void()> &body);

// An Access is who touches memory while kernels run: in shared memory, launch is the number of the
// block's run.
struct Access {
  uint64_t launch = 0, block = 0;
  // barriers of the block, exchanges of the warp, that have passed
  unsigned thread = 0, epoch = 0, turn = 0;
};
// false where memory is a thread's own, or no thread runs
bool access(const void *p, Access *now, const char **where);
[[noreturn]] void race(const std::string &text); // fails the launch

// SHARED_ZONE: bytes of a red zone at dynamic shared memory. SHARED_ALIGNMENT: what SHARED promises.
enum : size_t { STACK_BYTES = 64 << 10, GUARD_BYTES = 4096, SHARED_ZONE = 256, SHARED_ALIGNMENT = 16 };

struct Fiber {
#ifdef __x86_64__
  void *sp = nullptr;
#else
  ucontext_t context;
#endif
  unsigned char *stack = nullptr;
};

struct Thread {
  Fiber *fiber = nullptr; // while it waits
  int result = 0;         // of the barrier
};

struct Warp {
  // by turns: whoever writes the third exchange knows that all have read the first
  uint64_t slot[2][32];
  unsigned arrived = 0, turn = 0;
  const char *what = "", *file = "";
  int line = 0;
};

struct Block {
  Kernel kernel;
  const std::function<void()> *body;
  unsigned threads = 0, current = 0, begun = 0, ended = 0, epoch = 0;
  // of the grid, of a block in any grid, of the block in its grid
  uint64_t launch = 0, run = 0, number = 0;
  Steps order, lanes; // of the threads that have not begun
  bool by_warp = false, fresh_first = false;
  std::vector<Thread> thread;
  std::vector<Warp> warp;
  std::vector<unsigned> ready; // may go on; the last one next
  unsigned waiting = 0;        // at the block's barrier
  const char *file = "";
  int line = 0, any = 0, all = 1, count = 0;
  std::vector<Fiber *> fibers, idle;
  Fiber main, *running = nullptr;
  unsigned char *shared = nullptr;
  size_t shared_bytes = 0;
  unsigned char *fence[2] = {};         // where the red zones around it begin and end
  const unsigned char *fixed = nullptr; // __shared__
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
void poison(const Static &s);

// signals.cpp
// Signals turns accesses to invalid addresses into failed launches while it lives.
struct Signals {
  Signals();
  ~Signals();
};
bool in_kernel(); // the calling thread runs a kernel's thread

// blocks.cpp
void fiber_main();
[[noreturn]] void fail(std::string text); // fails the launch
std::string where(const char *file, int line);

} // namespace uly_emulated
