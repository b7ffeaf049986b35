#include "slots.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <string>

#include "heap.h"
#include "settings.h"

namespace uly_emulated {

static_assert(sizeof(Handle) <= 64, "CUDA's handles have 64 bytes");
static const char magic[8] = {'u', 'l', 'y', '-', 'e', 'm', 'u', '1'};

void handle_write(int fd, int64_t offset, size_t mapped, size_t lead, int64_t bytes, char out[64]) {
  Handle h{};
  memcpy(h.magic, magic, 8);
  h.pid = (int32_t)getpid();
  h.fd = fd;
  h.offset = offset;
  h.mapped = (int64_t)mapped;
  h.lead = (int64_t)lead;
  h.bytes = bytes;
  memset(out, 0, 64);
  memcpy(out, &h, sizeof h);
}

bool handle_read(const char in[64], Handle *h) {
  memcpy(h, in, sizeof *h);
  return !memcmp(h->magic, magic, 8);
}

char *handle_map(const Handle &h, size_t mapped) {
  std::string path = format("/proc/%d/fd/%d", h.pid, h.fd);
  int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  // A page without access follows the mapping.
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

// Counters of a slot, a cache line apart.
struct Counters {
  std::atomic<uint64_t> recorded, completed, failed;
};
struct Slot {
  Counters *c;
  int32_t pid;
  int64_t offset; // of the page in the process's file
  int64_t at;     // of the slot in the page
  char *mapped;   // for an opened slot: its page, which stays mapped
};

Slot *slot_create() {
  static char *current = nullptr;
  static int64_t offset = 0, used = page;
  if (used + 64 > (int64_t)page) {
    current = heap_map(page, &offset);
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

void slot_handle(Slot *s, char out[64]) { handle_write(heap.fd, s->offset, page, 0, -s->at - 1, out); }

Slot *slot_open(const char in[64]) {
  Handle h;
  if (!handle_read(in, &h) || h.bytes >= 0 || h.pid == (int32_t)getpid()) return nullptr;
  char *p = handle_map(h, page);
  if (!p) return nullptr;
  int64_t at = -h.bytes - 1;
  return new Slot{reinterpret_cast<Counters *>(p + at), h.pid, h.offset, at, p};
}

} // namespace uly_emulated
