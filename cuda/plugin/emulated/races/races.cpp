// Detection of races in kernels: two accesses to one byte, at least one of them a write, that no
// barrier orders. Kernels are compiled with -fsanitize=thread, which calls the functions in this
// file before each access (make cuda-races). The compiler's own runtime would treat fibers that run
// one after another as one thread.
//
// For each byte of device memory and of a block's shared memory, a cell records the last writer and
// readers. Within a block, barriers order the accesses of the warps that come to them; within a
// warp, exchanges do as well. Between the blocks of a launch, accesses are not ordered. Operands of
// products of warpgroups in shared memory must be shown to them (show_products) as well.
#include <dlfcn.h>

#include <memory>
#include <unordered_map>

#include "../blocks.h"
#include "../counts.h"
#include "../heap.h"

namespace uly_emulated {
namespace {

struct Cell {
  // the last reader, the last reader of another warp, and the last reader of another thread of the
  // same warp
  Access writer, reader[3];
  bool many = false; // several blocks have read it
};

enum : size_t { page_bits = 12, page_limit = 4096 };
struct Page {
  Cell cell[1 << page_bits];
};
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;

// cell returns the cell of an address. Cells of earlier launches are not needed any more. The
// cells of page_limit pages take 2 GB.
Cell &cell(uintptr_t at, uint64_t launch) {
  static uintptr_t last = 0;
  static Page *page = nullptr;
  static uint64_t current = 0;
  if (launch != current && pages.size() > page_limit) pages.clear(), page = nullptr;
  current = launch;
  if (at >> page_bits != last || !page) {
    last = at >> page_bits;
    std::unique_ptr<Page> &p = pages[last];
    if (!p) p.reset(new Page());
    page = p.get();
  }
  return page->cell[at & ((1 << page_bits) - 1)];
}

std::string name(const Access &a) { return format("thread %u of block %llu", a.thread, (unsigned long long)a.block); }

// location returns a code address in the format of addr2line.
std::string location(const void *code) {
  Dl_info info;
  if (!dladdr(code, &info) || !info.dli_fname) return format("%p", code);
  return format("%s +%#zx", info.dli_fname, (size_t)((const char *)code - (const char *)info.dli_fbase));
}

void touch(const void *p, size_t bytes, bool write, const void *code) {
  Access now;
  const char *where;
  if (!access(p, &now, &where)) return;
  if (counting()) {
    if (in_heap(p)) count_access(bytes, write);
    return; // counting alone, for larger calls than those that are checked
  }
  for (size_t i = 0; i < bytes; i++) {
    Cell &c = cell((uintptr_t)p + i, now.launch);
    const char *what = nullptr;
    const Access *other = nullptr;
    auto parallel = [&](const Access &a) {
      return a.launch == now.launch && (a.block != now.block || !ordered(a, now));
    };
    if (parallel(c.writer)) what = "written", other = &c.writer;
    if (write && !what)
      for (const Access &r : c.reader)
        if (parallel(r) || (r.launch == now.launch && c.many)) what = "read", other = &r;
    if (!what && now.by_product && c.writer.launch == now.launch && c.writer.block == now.block && !is_shown(c.writer))
      race(format("a product of %s reads %s that %s has written without show_products: address %p", name(now).c_str(),
                  where, name(c.writer).c_str(), p));
    if (what)
      race(format("%s %s %s that %s has %s, without a barrier between: address %p, code at %s", name(now).c_str(),
                  write ? "writes" : "reads", where, name(*other).c_str(), what, p, location(code).c_str()));
    if (write) {
      c.writer = now;
    } else {
      Access &last = c.reader[0];
      if (last.launch != now.launch) {
        c.many = false;
        for (Access &r : c.reader) r = {};
      } else if (last.block != now.block) {
        c.many = true;
      } else if (last.thread != now.thread) {
        c.reader[last.thread / 32 == now.thread / 32 ? 2 : 1] = last;
      }
      last = now;
    }
  }
}

} // namespace
} // namespace uly_emulated

#define FACE(name) extern "C" __attribute__((visibility("hidden"))) void __tsan_##name
#define SIZED(n)                                                                                      \
  FACE(read##n)(void *p) { uly_emulated::touch(p, n, false, __builtin_return_address(0)); }           \
  FACE(write##n)(void *p) { uly_emulated::touch(p, n, true, __builtin_return_address(0)); }           \
  FACE(unaligned_read##n)(void *p) { uly_emulated::touch(p, n, false, __builtin_return_address(0)); } \
  FACE(unaligned_write##n)(void *p) { uly_emulated::touch(p, n, true, __builtin_return_address(0)); }
SIZED(1)
SIZED(2)
SIZED(4)
SIZED(8)
SIZED(16)
FACE(read_range)(void *p, size_t n) { uly_emulated::touch(p, n, false, __builtin_return_address(0)); }
FACE(write_range)(void *p, size_t n) { uly_emulated::touch(p, n, true, __builtin_return_address(0)); }
FACE(init)() {}
FACE(vptr_update)(void **, void *) {}
FACE(vptr_read)(void **) {}
FACE(func_entry)(void *) {}
FACE(func_exit)() {}
// Atomic operations of host code.
extern "C" __attribute__((visibility("hidden"))) uint8_t __tsan_atomic8_load(const volatile uint8_t *p, int) {
  return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
extern "C" __attribute__((visibility("hidden"))) uint64_t __tsan_atomic64_load(const volatile uint64_t *p, int) {
  return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
extern "C" __attribute__((visibility("hidden"))) uint64_t __tsan_atomic64_fetch_or(volatile uint64_t *p, uint64_t v,
                                                                                   int) {
  return __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);
}
