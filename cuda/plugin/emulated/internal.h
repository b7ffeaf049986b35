// What the files of the emulator share. Everything runs under one lock: a kernel may run on any
// thread that waits for something.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "cuda.h"

namespace uly_emulated {

extern std::mutex lock;

uint64_t random64(); // under the lock; seeded by ULYSSES_EMULATED_SEED
inline uint64_t below(uint64_t n) { return (uint64_t)((unsigned __int128)random64() * n >> 64); }
int64_t setting(const char *name, int64_t otherwise); // a number from the environment

struct Failure {
  cudaError_t code = cudaSuccess;
  std::string text;
  explicit operator bool() const { return code != cudaSuccess; }
};
std::string format(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Steps is the order 0 … n-1 shuffled cheaply: start + i·step mod n, where step and n have no
// common factor.
struct Steps {
  uint64_t n = 1, start = 0, step = 1;
  Steps() = default;
  explicit Steps(uint64_t n);
  uint64_t operator()(uint64_t i) const {
    return n >> 32 ? (uint64_t)((start + (unsigned __int128)i * step) % n) : (start + i * step) % n;
  }
};

// blocks.cpp
// what went wrong
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

// memory.cpp
bool in_heap(const void *p);
enum class Place { pageable, pinned, device, invalid };
// invalid: in the device's address space, but not wholly inside one allocation
Place place(const void *p, size_t bytes);
// what has been written beyond an allocation, and mends it
std::string check_red_zones();
std::string describe(const void *p);          // where an address lies, for people
void clear(void *p, int value, size_t bytes); // memset that gives pages back
struct Slot;                                  // an event that other processes see
Slot *slot_create();
uint64_t slot_record(Slot *s); // the number of the new mark
uint64_t slot_recorded(Slot *s);
void slot_complete(Slot *s, uint64_t n, bool failed);
bool slot_completed(Slot *s, uint64_t n, bool *failed);
int32_t slot_owner(Slot *s); // the process
void slot_handle(Slot *s, char handle[64]);
Slot *slot_open(const char handle[64]);

// runtime.cpp
void drain(std::unique_lock<std::mutex> &held); // runs everything
// last keeps the code for cudaGetLastError and the text for cudaGetErrorString, of this thread, and
// returns the code.
cudaError_t last(cudaError_t code, const std::string &text = "");
} // namespace uly_emulated
