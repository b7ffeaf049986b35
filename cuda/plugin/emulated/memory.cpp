// Memory of the emulated device: one file without a name (memfd), mapped piece by piece into one range of addresses that are never given
// out twice. Other processes open the file through /proc, as CUDA IPC would map the memory of a GPU, and nothing is left behind when a
// process dies.
//
// Before and after every allocation lies a red zone; what is written there is found after the kernel that did it. Allocations are aligned to 256
// bytes, as cudaMalloc promises, and to no more.
#include <atomic>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>

#include "internal.h"

namespace uly_emulated {

enum : size_t { page = 4096, zone = 256, lead = page + zone, poisoned = 64 << 10, large = 256 << 10 };
enum : uint64_t { space = 1ull << 38 };
static const uint16_t zone_value = 0xffa5; // a NaN in f32 and in bf16

static size_t pages(size_t bytes) { return (bytes + page - 1) / page * page; }

struct Allocation {
  size_t bytes = 0;
  Place place = Place::device;
  int64_t offset = -1; // in this process's file; -1: of another process
  size_t mapped = 0;
  int refs = 1, device = 0;
  std::string handle; // of what another process gave
};

static struct {
  int fd = -1;
  char *base = nullptr;
  uint64_t next = 0, used = 0;
  std::map<char *, Allocation> all; // by the address that the caller has
} heap;

static bool open_heap() {
  if (heap.base) return true;
  int fd = memfd_create("ulysses-emulated-gpu", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)space)) return false;
  void *p = mmap(nullptr, space, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return false;
  heap.fd = fd;
  heap.base = static_cast<char *>(p);
  return true;
}

// take maps new pages of the file.
static char *take(size_t mapped, int64_t *offset) {
  if (!open_heap() || heap.next + mapped + page > space) return nullptr;
  *offset = (int64_t)heap.next;
  void *p = mmap(heap.base + heap.next, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, heap.fd, *offset);
  if (p == MAP_FAILED) return nullptr;
  heap.next += mapped + page; // a page that nobody may touch lies between
  return static_cast<char *>(p);
}

static void mark(char *p) {
  for (size_t i = 0; i < zone; i += 2) memcpy(p + i, &zone_value, 2);
}

static cudaError_t allocate(void **out, size_t bytes, Place place) {
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > space / 2) return cudaErrorMemoryAllocation;
  if (place == Place::device && heap.used + bytes > (uint64_t)setting("ULYSSES_EMULATED_MEMORY", 16ll << 30)) return cudaErrorMemoryAllocation;
  Allocation a;
  a.bytes = bytes;
  a.place = place;
  cudaGetDevice(&a.device);
  a.mapped = pages(lead + bytes + zone);
  char *start = take(a.mapped, &a.offset);
  if (!start) return cudaErrorMemoryAllocation;
  char *p = start + lead;
  mark(p - zone);
  mark(p + bytes);
  // Fresh memory is NaN; of large allocations, the ends.
  size_t n = bytes < poisoned ? bytes : (size_t)poisoned;
  memset(p, 0xff, n);
  memset(p + bytes - n, 0xff, n);
  if (place == Place::device) heap.used += bytes;
  heap.all[p] = a;
  *out = p;
  return cudaSuccess;
}

static std::string broken(char *p, const Allocation &a) {
  char *zones[2] = {p - zone, p + a.bytes};
  std::string text;
  for (int z = 0; z < 2; z++) {
    for (size_t i = 0; i < zone; i++) {
      uint16_t v = zone_value;
      if (zones[z][i] == reinterpret_cast<char *>(&v)[i & 1]) continue;
      long long at = zones[z] + i - p;
      text = format("wrote at byte %lld of an allocation of %zu bytes", at, a.bytes);
      mark(zones[z]);
      break;
    }
  }
  return text;
}

std::string check_red_zones() {
  std::string text;
  for (auto &[p, a] : heap.all) {
    std::string t = broken(p, a);
    if (text.empty()) text = t;
  }
  return text;
}

Place place(const void *v, size_t bytes) {
  char *p = const_cast<char *>(static_cast<const char *>(v));
  auto it = heap.all.upper_bound(p);
  if (it != heap.all.begin()) {
    --it;
    size_t at = (size_t)(p - it->first);
    if (at < it->second.bytes) return bytes <= it->second.bytes - at ? it->second.place : Place::invalid;
    if (at < it->second.mapped) return Place::invalid;
  }
  bool ours = heap.base && p >= heap.base && p < heap.base + space;
  return ours ? Place::invalid : Place::pageable;
}

bool in_heap(const void *v) {
  auto *p = static_cast<const char *>(v);
  return heap.base && p >= heap.base && p < heap.base + space;
}

std::string describe(const void *v) {
  auto *p = static_cast<char *>(const_cast<void *>(v));
  auto it = heap.all.upper_bound(p);
  bool ours = heap.base && p >= heap.base && p < heap.base + space;
  if (!ours || it == heap.all.begin()) return format("address %p, which is no device memory", v);
  --it;
  return format("address %p, %lld bytes from the start of an allocation of %zu bytes and in none, or in memory that has been freed", v, (long long)(p - it->first), it->second.bytes);
}

void clear(void *p, int value, size_t bytes) {
  auto *c = static_cast<char *>(p);
  if (value == 0 && bytes >= large) { // holes read as zeros and cost nothing
    auto it = heap.all.upper_bound(c);
    if (it != heap.all.begin() && (--it)->second.offset >= 0) {
      size_t head = pages((uintptr_t)c) - (uintptr_t)c, middle = (bytes - head) / page * page;
      off_t at = it->second.offset + (off_t)lead + (c + head - it->first);
      memset(c, 0, head);
      if (fallocate(heap.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, (off_t)middle)) memset(c + head, 0, middle);
      memset(c + head + middle, 0, bytes - head - middle);
      return;
    }
  }
  memset(p, value, bytes);
}

// Who maps an allocation from another process: process ids at the start of its first page.
enum : int { mappers = 64 };
static std::atomic<int32_t> *mappers_of(char *p) { return reinterpret_cast<std::atomic<int32_t> *>(p - lead); }

static void replace_mapper(char *p, int32_t was, int32_t now) {
  for (int i = 0; i < mappers; i++) {
    int32_t expected = was;
    if (mappers_of(p)[i].compare_exchange_strong(expected, now)) return;
  }
}

static int32_t mapper(char *p) {
  for (int i = 0; i < mappers; i++)
    if (int32_t pid = mappers_of(p)[i]; pid && kill(pid, 0) == 0) return pid;
  return 0;
}

static cudaError_t release(void *v, Place place) {
  if (!v) return cudaSuccess;
  std::unique_lock<std::mutex> held(lock);
  auto it = heap.all.find(static_cast<char *>(v));
  if (it == heap.all.end() || it->second.place != place || it->second.offset < 0) return last(cudaErrorInvalidValue);
  drain(held); // as cudaFree does
  it = heap.all.find(static_cast<char *>(v));
  if (it == heap.all.end()) return last(cudaErrorInvalidValue);
  Allocation a = it->second;
  std::string text = broken(it->first, a);
  if (int32_t pid = mapper(it->first); pid && text.empty()) text = format("frees it while process %d maps it (cudaIpcCloseMemHandle comes first)", pid);
  if (place == Place::device) heap.used -= a.bytes;
  heap.all.erase(it);
  fallocate(heap.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, a.offset, (off_t)a.mapped);
  mmap(heap.base + a.offset, a.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return text.empty() ? cudaSuccess : last(cudaErrorIllegalAddress, "found at cudaFree: somebody " + text);
}

// --- of other processes -----------------------------------------------------------------------------------------------------------------
struct Handle {
  char magic[8];
  int32_t pid, fd;
  int64_t offset, bytes; // offset of the mapping, bytes that the caller may use; 0 = an event
};
static_assert(sizeof(Handle) <= 64, "CUDA's handles have 64 bytes");
static const char magic[8] = {'u', 'l', 'y', '-', 'e', 'm', 'u', '1'};

static void give(int64_t offset, int64_t bytes, char out[64]) {
  Handle h{};
  memcpy(h.magic, magic, 8);
  h.pid = (int32_t)getpid();
  h.fd = heap.fd;
  h.offset = offset;
  h.bytes = bytes;
  memset(out, 0, 64);
  memcpy(out, &h, sizeof h);
}

static bool take_handle(const char in[64], Handle *h) {
  memcpy(h, in, sizeof *h);
  return !memcmp(h->magic, magic, 8);
}

static char *map_handle(const Handle &h, size_t mapped) {
  std::string path = format("/proc/%d/fd/%d", h.pid, h.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void *p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, h.offset);
  close(fd);
  return p == MAP_FAILED ? nullptr : static_cast<char *>(p);
}

// --- events of several processes --------------------------------------------------------------------------------------------------------
// A slot is a line of shared memory: marks made, marks come past, and the first one that failed. Marks come past in the order made, because
// whoever records runs everything before the mark at once. Slots are not freed: another process may still look.
struct Counters { std::atomic<uint64_t> recorded, completed, failed; };
struct Slot {
  Counters *c;
  int32_t pid;
  int64_t offset; // of the page
  int64_t at;     // within the page
  char *mapped;   // opened: to be given back never, a page each
};

Slot *slot_create() {
  static char *current = nullptr;
  static int64_t offset = 0, used = page;
  if (used + 64 > (int64_t)page) {
    current = take(page, &offset);
    if (!current) return nullptr;
    used = 0;
  }
  auto *s = new Slot{reinterpret_cast<Counters *>(current + used), (int32_t)getpid(), offset, used, nullptr};
  used += 64;
  return s;
}

uint64_t slot_record(Slot *s) { return ++s->c->recorded; }
uint64_t slot_recorded(Slot *s) { return s->c->recorded; }
int32_t slot_owner(Slot *s) { return s->pid; }

void slot_complete(Slot *s, uint64_t n, bool failed) {
  uint64_t none = 0;
  if (failed) s->c->failed.compare_exchange_strong(none, n);
  uint64_t was = s->c->completed;
  while (was < n && !s->c->completed.compare_exchange_weak(was, n)) {}
}

bool slot_completed(Slot *s, uint64_t n, bool *failed) {
  if (s->c->completed < n) return false;
  uint64_t f = s->c->failed;
  *failed = f && f <= n;
  return true;
}

void slot_handle(Slot *s, char out[64]) { give(s->offset, -s->at - 1, out); }

Slot *slot_open(const char in[64]) {
  Handle h;
  if (!take_handle(in, &h) || h.bytes >= 0 || h.pid == (int32_t)getpid()) return nullptr;
  char *p = map_handle(h, page);
  if (!p) return nullptr;
  int64_t at = -h.bytes - 1;
  return new Slot{reinterpret_cast<Counters *>(p + at), h.pid, h.offset, at, p};
}

} // namespace uly_emulated

using namespace uly_emulated;

cudaError_t cudaMalloc(void **p, size_t bytes) {
  std::lock_guard<std::mutex> held(lock);
  return last(allocate(p, bytes, Place::device));
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *v) {
  std::lock_guard<std::mutex> held(lock);
  *out = {};
  out->device = -2; // as CUDA says of memory that it does not know
  Place at = place(v, 1);
  if (at != Place::device && at != Place::pinned) return cudaSuccess;
  const Allocation &a = (--heap.all.upper_bound(static_cast<char *>(const_cast<void *>(v))))->second;
  out->type = at == Place::device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  out->device = a.device;
  out->devicePointer = const_cast<void *>(v);
  if (at == Place::pinned) out->hostPointer = out->devicePointer;
  return cudaSuccess;
}

bool uly_emulated::range(const void *v, void **base, size_t *bytes) {
  std::lock_guard<std::mutex> held(lock);
  if (place(v, 1) != Place::device) return false;
  auto it = --heap.all.upper_bound(static_cast<char *>(const_cast<void *>(v)));
  *base = it->first;
  *bytes = it->second.bytes;
  return true;
}

cudaError_t cudaFree(void *p) { return release(p, Place::device); }
cudaError_t cudaMallocHost(void **p, size_t bytes) {
  std::lock_guard<std::mutex> held(lock);
  return last(allocate(p, bytes, Place::pinned));
}
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned) { return cudaMallocHost(p, bytes); }
cudaError_t cudaFreeHost(void *p) { return release(p, Place::pinned); }

cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  std::lock_guard<std::mutex> held(lock);
  *total = (size_t)setting("ULYSSES_EMULATED_MEMORY", 16ll << 30);
  *free = *total > heap.used ? *total - heap.used : 0;
  return cudaSuccess;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *v) {
  std::lock_guard<std::mutex> held(lock);
  auto *p = static_cast<char *>(v);
  auto it = heap.all.upper_bound(p);
  if (it == heap.all.begin()) return last(cudaErrorInvalidValue);
  --it;
  Allocation &a = it->second;
  if (p >= it->first + a.bytes || a.place != Place::device || a.offset < 0) return last(cudaErrorInvalidValue);
  give(a.offset, (int64_t)a.bytes, h->reserved);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) {
  std::lock_guard<std::mutex> held(lock);
  Handle h;
  if (flags != cudaIpcMemLazyEnablePeerAccess || !take_handle(handle.reserved, &h) || h.bytes <= 0) return last(cudaErrorInvalidValue);
  if (h.pid == (int32_t)getpid()) return last(cudaErrorDeviceUninitialized); // a GPU refuses its own process, too
  if (setting("ULYSSES_EMULATED_IPC", 2) < 2) return last(cudaErrorMapBufferObjectFailed);
  std::string key(handle.reserved, sizeof handle.reserved);
  for (auto &[at, a] : heap.all)
    if (a.handle == key) {
      a.refs++;
      *p = at;
      return cudaSuccess;
    }
  Allocation a;
  a.bytes = (size_t)h.bytes;
  a.mapped = pages(lead + a.bytes + zone);
  a.handle = key;
  char *start = map_handle(h, a.mapped);
  if (!start) return last(cudaErrorInvalidResourceHandle);
  heap.all[start + lead] = a;
  *p = start + lead;
  replace_mapper(start + lead, 0, (int32_t)getpid());
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *p) {
  std::unique_lock<std::mutex> held(lock);
  auto it = heap.all.find(static_cast<char *>(p));
  if (it == heap.all.end() || it->second.offset >= 0) return last(cudaErrorInvalidValue);
  drain(held);
  it = heap.all.find(static_cast<char *>(p));
  if (it == heap.all.end() || --it->second.refs > 0) return cudaSuccess;
  replace_mapper(it->first, (int32_t)getpid(), 0);
  munmap(it->first - lead, it->second.mapped);
  heap.all.erase(it);
  return cudaSuccess;
}
