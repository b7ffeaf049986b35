// The emulated device's memory: heap.cpp allocates it, fences.cpp detects accesses outside of
// allocations. The caller of every function must hold the lock (errors.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <map>
#include <string>
#include <vector>

namespace uly_emulated {

enum : size_t { page = 4096, zone = 256, mappers = 60 };

enum class Place { pageable, pinned, device, invalid };

inline size_t pages(size_t bytes) { return (bytes + page - 1) / page * page; }

// Notice is the first page of an allocation, before its fences. The process that allocated the
// memory and the processes that map it communicate through it. After the memory is freed, it reads
// as zeros.
struct Notice {
  // the process that allocated the memory; 0 once it is freed, before the memory itself goes
  std::atomic<int32_t> owner;
  std::atomic<int32_t> mapper[mappers];
};

// Allocation consists of a notice, a fence, the caller's bytes and a fence: `mapped` bytes. A fence
// is a red zone of up to `zone` bytes, or a page without access.
struct Allocation {
  size_t bytes = 0;
  Place place = Place::device;
  int64_t offset = -1;         // in the address space; -1 for memory of another process
  int fd = -1;                 // its own file, at 0 (REUSE); else it is in the heap's file, at offset
  size_t lead = 0, mapped = 0; // lead: bytes of notice and first fence
  int refs = 1, device = 0;
  bool hidden = false;     // from the kernel that runs (Foreign)
  uint64_t generation = 0; // differs between any two allocations of this process
  std::string handle;      // for memory of another process

  Notice *notice(char *p) const { return reinterpret_cast<Notice *>(p - lead); }
  // whether the process that allocated the memory has freed it; CUDA does not define its content
  // then
  bool gone(char *p) const { return offset < 0 && notice(p)->owner == 0; }
};

struct Heap {
  int fd = -1;
  char *base = nullptr;
  uint64_t next = 0, used = 0, made = 0;
  std::map<char *, Allocation> all;         // by the caller's address
  std::map<size_t, std::vector<int>> spare; // numbers of the files of freed allocations, by bytes (REUSE)
};
extern Heap heap;

enum : uint64_t { space = 1ull << 38 }; // bytes of the address space
// in_heap reports whether p lies in the device's address space.
inline bool in_heap(const void *v) {
  auto *p = static_cast<const char *>(v);
  return heap.base && p >= heap.base && p < heap.base + space;
}

// heap_map maps `mapped` new bytes of the process's file and returns their address; NULL if there
// is no memory.
char *heap_map(size_t mapped, int64_t *offset);
// heap_allocate returns false if the limits of the device or the host do not allow the bytes.
bool heap_allocate(void **out, size_t bytes, Place place, int device);
// file_of returns the file of an allocation of this process, and its position there.
int file_of(const Allocation &a, int64_t *at);
// heap_free frees an allocation of this process. It returns "" or an error: a write outside of its
// bytes, or another process that still maps it.
std::string heap_free(std::map<char *, Allocation>::iterator it);
// place returns the kind of memory. invalid: in the device's address space, but not entirely inside
// one allocation.
Place place(const void *p, size_t bytes);
void clear(void *p, int value, size_t bytes); // memset that returns pages of zeros to the system

// has_access reports whether kernels of a device can access the memory of another one
// (devices.cpp).
bool has_access(int device, int other);

// fences.cpp
// Foreign hides the memory that kernels of a device cannot access, while it exists.
class Foreign {
 public:
  explicit Foreign(int device);
  ~Foreign();
};
// check_red_zones returns the first write outside of an allocation, and restores the red zones.
std::string check_red_zones();
std::string describe(const void *p); // the location of an address, for messages
void set_layout(Allocation *a);      // sets lead and mapped
// make_fences writes the red zones, or removes access to the pages around a new mapping
void make_fences(char *p, const Allocation &a);
// check_fences returns what was written outside of the allocation, and restores its red zones
std::string check_fences(char *p, const Allocation &a);
int32_t other_mapper(char *p, const Allocation &a); // another process that maps it; 0 if there is none

} // namespace uly_emulated
