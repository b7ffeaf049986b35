// Memory of the emulated device: one file without a name (memfd), mapped piece by piece into one
// range of addresses that are never given out twice. Other processes open the file through /proc,
// as CUDA IPC would map the memory of a GPU, and nothing is left behind when a process dies. What
// lies around allocations is fences.cpp's.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "heap.h"

namespace uly_emulated {

enum : size_t { poisoned = 64 << 10, large = 256 << 10 };
enum : uint64_t { space = 1ull << 38 };

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
  void *p = mmap(heap.base + heap.next, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, heap.fd,
                 *offset);
  if (p == MAP_FAILED) return nullptr;
  heap.next += mapped + page; // a page that nobody may touch lies between
  return static_cast<char *>(p);
}

static cudaError_t allocate(void **out, size_t bytes, Place place) {
  *out = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > space / 2) return cudaErrorMemoryAllocation;
  if (place == Place::device && heap.used + bytes > (uint64_t)setting("ULYSSES_EMULATED_MEMORY", 16ll << 30))
    return cudaErrorMemoryAllocation;
  Allocation a;
  a.bytes = bytes;
  a.place = place;
  cudaGetDevice(&a.device);
  lay(&a);
  char *start = take(a.mapped, &a.offset);
  if (!start) return cudaErrorMemoryAllocation;
  char *p = start + a.lead;
  a.notice(p)->owner = (int32_t)getpid();
  fence(p, a);
  // Fresh memory is NaN; of large allocations, the ends.
  size_t n = bytes < poisoned ? bytes : (size_t)poisoned;
  memset(p, 0xff, n);
  memset(p + bytes - n, 0xff, n);
  if (place == Place::device) heap.used += bytes;
  heap.all[p] = a;
  *out = p;
  return cudaSuccess;
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

void clear(void *p, int value, size_t bytes) {
  auto *c = static_cast<char *>(p);
  if (value == 0 && bytes >= large) { // holes read as zeros and cost nothing
    auto it = heap.all.upper_bound(c);
    if (it != heap.all.begin() && (--it)->second.offset >= 0) {
      size_t head = pages((uintptr_t)c) - (uintptr_t)c, middle = (bytes - head) / page * page;
      off_t at = it->second.offset + (off_t)it->second.lead + (c + head - it->first);
      memset(c, 0, head);
      if (fallocate(heap.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, (off_t)middle))
        memset(c + head, 0, middle);
      memset(c + head + middle, 0, bytes - head - middle);
      return;
    }
  }
  memset(p, value, bytes);
}

// replace_mapper changes the list of those that map an allocation of another process.
static void replace_mapper(Notice *n, int32_t was, int32_t now) {
  for (auto &m : n->mapper) {
    int32_t expected = was;
    if (m.compare_exchange_strong(expected, now)) return;
  }
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
  if (int32_t pid = mapper(it->first, a); pid && text.empty())
    text = format("frees it while process %d maps it (cudaIpcCloseMemHandle comes first)", pid);
  a.notice(it->first)->owner = 0;
  if (place == Place::device) heap.used -= a.bytes;
  heap.all.erase(it);
  fallocate(heap.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, a.offset, (off_t)a.mapped);
  mmap(heap.base + a.offset, a.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (text.empty()) return cudaSuccess;
  text = "found at cudaFree: somebody " + text;
  // who frees memory on the way out does not ask how it went
  fprintf(stderr, "emulated GPU: %s\n", text.c_str());
  return last(cudaErrorIllegalAddress, text);
}

// --- of other processes
// -----------------------------------------------------------------------------------------------------------------
struct Handle {
  char magic[8];
  int32_t pid, fd;
  // as an Allocation's; of an event bytes is -1 - its place in the page
  int64_t offset, mapped, lead, bytes;
};
static_assert(sizeof(Handle) <= 64, "CUDA's handles have 64 bytes");
static const char magic[8] = {'u', 'l', 'y', '-', 'e', 'm', 'u', '1'};

static void give(int64_t offset, size_t mapped, size_t lead, int64_t bytes, char out[64]) {
  Handle h{};
  memcpy(h.magic, magic, 8);
  h.pid = (int32_t)getpid();
  h.fd = heap.fd;
  h.offset = offset;
  h.mapped = (int64_t)mapped;
  h.lead = (int64_t)lead;
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
  // with a page behind it that nobody may touch
  char *p =
      static_cast<char *>(mmap(nullptr, mapped + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (p != MAP_FAILED &&
      mmap(p, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, h.offset) == MAP_FAILED) {
    munmap(p, mapped + page);
    p = static_cast<char *>(MAP_FAILED);
  }
  close(fd);
  return p == MAP_FAILED ? nullptr : p;
}

// --- events of several processes
// --------------------------------------------------------------------------------------------------------
// A slot is a line of shared memory: marks made, marks come past, and the first one that failed.
// Marks come past in the order made, because whoever records runs everything before the mark at
// once. Slots are not freed: another process may still look.
struct Counters {
  std::atomic<uint64_t> recorded, completed, failed;
};
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

void slot_handle(Slot *s, char out[64]) { give(s->offset, page, 0, -s->at - 1, out); }

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
  give(a.offset, a.mapped, a.lead, (int64_t)a.bytes, h->reserved);
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) {
  std::lock_guard<std::mutex> held(lock);
  Handle h;
  if (flags != cudaIpcMemLazyEnablePeerAccess || !take_handle(handle.reserved, &h) || h.bytes <= 0)
    return last(cudaErrorInvalidValue);
  // a GPU refuses its own process, too
  if (h.pid == (int32_t)getpid()) return last(cudaErrorDeviceUninitialized);
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
  a.lead = (size_t)h.lead;
  a.mapped = (size_t)h.mapped;
  a.handle = key;
  char *start = map_handle(h, a.mapped);
  if (!start) return last(cudaErrorInvalidResourceHandle);
  fence(start + a.lead, a);
  heap.all[start + a.lead] = a;
  *p = start + a.lead;
  replace_mapper(a.notice(start + a.lead), 0, (int32_t)getpid());
  return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *p) {
  std::unique_lock<std::mutex> held(lock);
  auto it = heap.all.find(static_cast<char *>(p));
  if (it == heap.all.end() || it->second.offset >= 0) return last(cudaErrorInvalidValue);
  drain(held);
  it = heap.all.find(static_cast<char *>(p));
  if (it == heap.all.end() || --it->second.refs > 0) return cudaSuccess;
  replace_mapper(it->second.notice(it->first), (int32_t)getpid(), 0);
  munmap(it->first - it->second.lead, it->second.mapped + page);
  heap.all.erase(it);
  return cudaSuccess;
}
