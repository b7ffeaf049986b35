// The emulated device's memory: heap.cpp allocates it, fences.cpp finds accesses outside of allocations.
// The caller of every function holds the lock (errors.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <map>
#include <string>

namespace uly_emulated {

enum : size_t { page = 4096, zone = 256, mappers = 60 };

enum class Place { pageable, pinned, device, invalid };

inline size_t pages(size_t bytes) { return (bytes + page - 1) / page * page; }

// A Notice is the first page of an allocation, before its fences: what its process and those that
// map it tell each other. Where there is none any more, it reads as zeros.
struct Notice {
  // the process; 0 once it is freed, which is so before anything of it goes
  std::atomic<int32_t> owner;
  std::atomic<int32_t> mapper[mappers];
};

// An Allocation is a notice, a fence, the caller's bytes, a fence: `mapped` bytes in all. A fence
// is a red zone of up to `zone` bytes, or a page that nobody may touch.
struct Allocation {
  size_t bytes = 0;
  Place place = Place::device;
  int64_t offset = -1;         // in this process's file; -1: of another process
  size_t lead = 0, mapped = 0; // lead: of notice and fence
  int refs = 1, device = 0;
  std::string handle; // of what another process gave

  Notice *notice(char *p) const { return reinterpret_cast<Notice *>(p - lead); }
  // its process has freed it, and CUDA says nothing of what is there
  bool gone(char *p) const { return offset < 0 && notice(p)->owner == 0; }
};

struct Heap {
  int fd = -1;
  char *base = nullptr;
  uint64_t next = 0, used = 0;
  std::map<char *, Allocation> all; // by the address that the caller has
};
extern Heap heap;

enum : uint64_t { space = 1ull << 38 }; // bytes of addresses
// in_heap reports whether p lies in the device's address space.
inline bool in_heap(const void *v) {
  auto *p = static_cast<const char *>(v);
  return heap.base && p >= heap.base && p < heap.base + space;
}

// heap_map maps `mapped` new bytes of the process's file and returns their address; NULL: no memory.
char *heap_map(size_t mapped, int64_t *offset);
// heap_allocate returns false where the limits of the device or the host do not allow the bytes.
bool heap_allocate(void **out, size_t bytes, Place place, int device);
// heap_free removes an allocation of this process. It returns what was wrong with it: a write outside
// of its bytes, or another process that still maps it.
std::string heap_free(std::map<char *, Allocation>::iterator it);
// place returns where memory lies. invalid: in the device's address space, and not wholly inside one
// allocation.
Place place(const void *p, size_t bytes);
void clear(void *p, int value, size_t bytes); // memset that returns pages of zeros to the system

// fences.cpp
// check_red_zones returns what has been written outside of allocations, and restores the red zones.
std::string check_red_zones();
std::string describe(const void *p); // where an address lies, for messages
void lay(Allocation *a);             // decides lead and mapped
// makes red zones, and pages of a new mapping that nobody may touch
void fence(char *p, const Allocation &a);
// what has been written beyond it, and mends it
std::string broken(char *p, const Allocation &a);
int32_t mapper(char *p, const Allocation &a); // another process that maps it; 0: none

} // namespace uly_emulated
