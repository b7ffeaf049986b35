// Allocations of the emulated device: one file without a name (memfd), which is mapped into one
// range of addresses, allocation by allocation. Each address is used once. Other processes open the
// file through /proc, as CUDA IPC maps the memory of a GPU. Nothing remains when a process dies.
#include "heap.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "settings.h"

namespace uly_emulated {

enum : size_t { poisoned = 64 << 10, large = 256 << 10 };
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

char *heap_map(size_t mapped, int64_t *offset) {
  if (!open_heap() || heap.next + mapped + page > space) return nullptr;
  *offset = (int64_t)heap.next;
  void *p = mmap(heap.base + heap.next, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, heap.fd,
                 *offset);
  if (p == MAP_FAILED) return nullptr;
  heap.next += mapped + page; // a page without access lies between allocations
  return static_cast<char *>(p);
}

int file_of(const Allocation &a, int64_t *at) {
  *at = a.fd < 0 ? a.offset : 0;
  return a.fd < 0 ? heap.fd : a.fd;
}

// own_file gives new memory a file of its own. Its number, which is in the handle, is that of a
// freed allocation of the same size if there is one.
static bool own_file(Allocation *a, char *start) {
  a->fd = memfd_create("ulysses-emulated-allocation", MFD_CLOEXEC);
  if (a->fd < 0 || ftruncate(a->fd, (off_t)a->mapped)) return false;
  std::vector<int> &spare = heap.spare[a->bytes];
  if (!spare.empty()) {
    dup2(a->fd, spare.back());
    close(a->fd);
    a->fd = spare.back();
    spare.pop_back();
  }
  return mmap(start, a->mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, a->fd, 0) != MAP_FAILED;
}

bool heap_allocate(void **out, size_t bytes, Place place, int device) {
  *out = nullptr;
  if (bytes == 0) return true;
  if (bytes > space / 2) return false;
  if (place == Place::device && heap.used + bytes > (uint64_t)setting("ULYSSES_EMULATED_MEMORY", 16ll << 30))
    return false;
  Allocation a;
  a.bytes = bytes;
  a.place = place;
  a.device = device;
  set_layout(&a);
  char *start = heap_map(a.mapped, &a.offset);
  if (!start) return false;
  if (place == Place::device && setting("ULYSSES_EMULATED_REUSE", 0) && !own_file(&a, start)) return false;
  a.generation = ++heap.made;
  char *p = start + a.lead;
  a.notice(p)->owner = (int32_t)getpid();
  make_fences(p, a);
  // of large allocations, only the ends
  const size_t n = bytes < poisoned ? bytes : (size_t)poisoned;
  poison(p, n);
  poison(p + bytes - n, n);
  if (place == Place::device) heap.used += bytes;
  heap.all[p] = a;
  *out = p;
  return true;
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

void clear(void *p, int value, size_t bytes) {
  auto *c = static_cast<char *>(p);
  if (value == 0 && bytes >= large) { // holes read as zeros and use no memory
    auto it = heap.all.upper_bound(c);
    if (it != heap.all.begin() && (--it)->second.offset >= 0) {
      size_t head = pages((uintptr_t)c) - (uintptr_t)c, middle = (bytes - head) / page * page;
      int64_t begin = 0;
      const int fd = file_of(it->second, &begin);
      off_t at = begin + (off_t)it->second.lead + (c + head - it->first);
      memset(c, 0, head);
      if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, (off_t)middle)) memset(c + head, 0, middle);
      memset(c + head + middle, 0, bytes - head - middle);
      return;
    }
  }
  memset(p, value, bytes);
}

std::string heap_free(std::map<char *, Allocation>::iterator it) {
  Allocation a = it->second;
  std::string text = check_fences(it->first, a);
  if (int32_t pid = other_mapper(it->first, a); pid && text.empty() && a.fd < 0)
    text = format("freed the memory while process %d maps it (call cudaIpcCloseMemHandle first)", pid);
  a.notice(it->first)->owner = 0;
  if (a.place == Place::device) heap.used -= a.bytes;
  heap.all.erase(it);
  if (a.fd >= 0) heap.spare[a.bytes].push_back(a.fd);
  else fallocate(heap.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, a.offset, (off_t)a.mapped);
  mmap(heap.base + a.offset, a.mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return text;
}

} // namespace uly_emulated
