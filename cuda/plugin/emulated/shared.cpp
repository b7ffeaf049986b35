// Shared memory of the running block: dynamic shared memory between red zones, and the __shared__
// variables.
#include <cxxabi.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>

#include "blocks.h"

namespace uly_emulated {

unsigned char *dynamic_shared() { return block.shared; }

// place_shared places dynamic shared memory between red zones, or next to a page without access
// (ULYSSES_EMULATED_GUARD, fences.cpp).
void place_shared(size_t bytes) {
  enum : size_t { room = 1 << 18 };
  // a page without access, the memory, a page without access
  static unsigned char *region = nullptr;
  if (!region) {
    void *p = mmap(nullptr, room + 2 * GUARD_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(static_cast<char *>(p) + GUARD_BYTES, room, PROT_READ | PROT_WRITE)) abort();
    region = static_cast<unsigned char *>(p);
  }
  unsigned char *first = region + GUARD_BYTES;
  const int64_t guard = setting("ULYSSES_EMULATED_GUARD", 0);
  if (guard < 0) block.shared = first;
  else if (guard > 0)
    block.shared = first + room - (bytes + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
  // aligned exactly as SHARED guarantees
  else block.shared = first + SHARED_ZONE + SHARED_ALIGNMENT;
  block.shared_bytes = bytes;
  block.fence[0] = guard < 0 ? first : block.shared - SHARED_ZONE;
  block.fence[1] = std::min(block.shared + bytes + SHARED_ZONE, first + room);
}

// makes the loader allocate this thread's thread_local data
static thread_local unsigned char touch;

// static_shared finds all __shared__ variables: the library's thread_local data.
Static static_shared() {
  volatile unsigned char *t = &touch;
  *t = 1;
  Static s{nullptr, 0, reinterpret_cast<const void *>(&static_shared)};
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *arg) {
        auto *s = static_cast<Static *>(arg);
        auto at = reinterpret_cast<uintptr_t>(s->code);
        bool mine = false;
        size_t bytes = 0;
        for (int i = 0; i < info->dlpi_phnum; i++) {
          auto &h = info->dlpi_phdr[i];
          if (h.p_type == PT_LOAD) mine |= at - (info->dlpi_addr + h.p_vaddr) < h.p_memsz;
          if (h.p_type == PT_TLS) bytes = h.p_memsz;
        }
        if (!mine) return 0;
        s->p = static_cast<unsigned char *>(info->dlpi_tls_data);
        s->bytes = s->p ? bytes : 0;
        return 1;
      },
      &s);
  return s;
}

void poison_static(const Static &s) {
  // the C++ library also has thread_local data there, which must be kept
  auto *kept = reinterpret_cast<unsigned char *>(abi::__cxa_get_globals());
  unsigned char copy[2 * sizeof(void *)];
  bool inside = kept >= s.p && kept < s.p + s.bytes;
  if (inside) memcpy(copy, kept, sizeof copy);
  poison(s.p, s.bytes);
  if (inside) memcpy(kept, copy, sizeof copy);
}

} // namespace uly_emulated
