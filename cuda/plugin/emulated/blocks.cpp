// Grids, blocks, warps and threads. A thread is a function call on the stack of a fiber; only where
// it waits does it keep that stack, and another fiber takes up the threads that come next. So
// kernels without barriers pay a call for each thread.
#include <cxxabi.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "internal.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace uly_emulated {

// promised: the alignment of dynamic shared memory
enum : size_t { stack_bytes = 64 << 10, guard_bytes = 4096, zone = 256, promised = 16 };

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

static struct {
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
} block;

// --- fibers
// -----------------------------------------------------------------------------------------------------------------------------
static void fiber_main();

#ifdef __x86_64__
extern "C" void uly_emulated_switch(void **from, void *to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden uly_emulated_switch
.globl uly_emulated_switch
.type uly_emulated_switch, @function
uly_emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size uly_emulated_switch, .-uly_emulated_switch
)");
static void change(Fiber *from, Fiber *to) { uly_emulated_switch(&from->sp, to->sp); }
static void reset(Fiber *f) {
  void **top = reinterpret_cast<void **>(f->stack + stack_bytes);
  top[-2] = reinterpret_cast<void *>(&fiber_main);
  f->sp = top - 8; // six registers below the return address
  memset(f->sp, 0, 6 * sizeof(void *));
}
#else
static void change(Fiber *from, Fiber *to) { swapcontext(&from->context, &to->context); }
static void reset(Fiber *f) {
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack;
  f->context.uc_stack.ss_size = stack_bytes;
  f->context.uc_link = nullptr;
  makecontext(&f->context, fiber_main, 0);
}
#endif

static Fiber *idle_fiber() {
  if (block.idle.empty()) {
    auto *p = static_cast<unsigned char *>(mmap(nullptr, guard_bytes + stack_bytes, PROT_READ | PROT_WRITE,
                                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (p == MAP_FAILED) {
      perror("the stack of an emulated thread");
      abort();
    }
    mprotect(p, guard_bytes, PROT_NONE);
    auto *f = new Fiber;
    f->stack = p + guard_bytes;
    reset(f);
    block.fibers.push_back(f);
    return f;
  }
  Fiber *f = block.idle.back();
  block.idle.pop_back();
  return f;
}

static void become(unsigned t) {
  block.current = t;
  if (blockDim.y == 1 && blockDim.z == 1) {
    threadIdx.x = t;
    return;
  }
  threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
}

// pick chooses the thread that runs next; -1: none can.
static int pick() {
  bool fresh = block.begun < block.threads;
  if (fresh && (block.fresh_first || block.ready.empty())) {
    unsigned i = block.begun++;
    if (!block.by_warp) return (int)block.order(i);
    return (int)(block.order(i / 32) * 32 + block.lanes(i % 32));
  }
  if (block.ready.empty()) return -1;
  int t = (int)block.ready.back();
  block.ready.pop_back();
  return t;
}

static void resume(Fiber *from, unsigned t) {
  become(t);
  Fiber *to = block.thread[t].fiber;
  block.thread[t].fiber = nullptr;
  if (!to) to = idle_fiber();
  block.running = to;
  change(from, to);
}

static void leave() { // to run_block, which looks at what there is
  Fiber *self = block.running;
  block.running = nullptr;
  change(self, &block.main);
}

static void fiber_main() {
  for (;;) {
    (*block.body)();
    block.ended++;
    int t = pick();
    if (t >= 0 && !block.thread[t].fiber) {
      become((unsigned)t);
      continue;
    }
    Fiber *self = block.running;
    block.idle.push_back(self);
    if (t < 0) leave();
    else resume(self, (unsigned)t);
    // whoever took this fiber from the idle ones has set the thread to run
  }
}

[[noreturn]] static void fail(std::string text) {
  block.failure = std::move(text);
  for (;;) leave();
}

static std::string where(const char *file, int line) {
  const char *slash = file ? strrchr(file, '/') : nullptr;
  return format("%s:%d", slash ? slash + 1 : file ? file : "?", line);
}

// stuck says why nobody can go on.
static std::string stuck() {
  std::string s;
  if (block.waiting)
    s = format("%u of %u threads wait at the barrier of %s", block.waiting, block.threads,
               where(block.file, block.line).c_str());
  for (size_t w = 0; w < block.warp.size(); w++) {
    Warp &p = block.warp[w];
    if (!p.arrived) continue;
    s += format("%s%u lanes of warp %zu wait at the %s of %s", s.empty() ? "" : ", ", p.arrived, w, p.what,
                where(p.file, p.line).c_str());
    break;
  }
  if (block.ended) s += format(", %u have ended", block.ended);
  return s;
}

static void suspend() {
  unsigned me = block.current;
  int t = pick();
  if (t == (int)me) {
    become(me);
    return;
  }
  if (t < 0) fail(stuck());
  Fiber *self = block.running;
  block.thread[me].fiber = self;
  resume(self, (unsigned)t);
}

static bool same(const char *a, int la, const char *b, int lb) { return la == lb && (a == b || !strcmp(a, b)); }

int barrier(int how, int value, const char *file, int line) {
  if (block.waiting == 0) {
    block.file = file, block.line = line;
    block.any = 0, block.all = 1, block.count = 0;
  } else if (!same(block.file, block.line, file, line)) {
    fail(format("thread %u waits at the barrier of %s, others at that of %s", block.current, where(file, line).c_str(),
                where(block.file, block.line).c_str()));
  }
  block.any |= value != 0, block.all &= value != 0, block.count += value != 0;
  if (++block.waiting == block.threads) {
    int result = how == 1 ? block.any : how == 2 ? block.all : block.count;
    block.waiting = 0;
    block.epoch++;
    Steps order(block.threads);
    for (unsigned i = 0; i < block.threads; i++) {
      unsigned t = (unsigned)order(i);
      block.thread[t].result = result;
      block.ready.push_back(t);
    }
  }
  unsigned me = block.current;
  suspend();
  return block.thread[me].result;
}

const uint64_t *exchange(unsigned mask, uint64_t value, const char *what, const char *file, int line) {
  if (mask != 0xffffffffu)
    fail(format("%s of %s without all lanes of the warp: mask %08x", what, where(file, line).c_str(), mask));
  unsigned lane = block.current & 31;
  Warp &w = block.warp[block.current >> 5];
  if (w.arrived == 0) w.what = what, w.file = file, w.line = line;
  else if (!same(w.file, w.line, file, line))
    fail(format("lane %u of warp %u waits at the %s of %s, others at the %s of %s", lane, block.current >> 5, what,
                where(file, line).c_str(), w.what, where(w.file, w.line).c_str()));
  uint64_t *table = w.slot[w.turn & 1];
  table[lane] = value;
  if (++w.arrived == 32) {
    w.arrived = 0;
    w.turn++;
    unsigned first = block.current & ~31u, r = (unsigned)below(1024);
    for (unsigned i = 0; i < 32; i++) block.ready.push_back(first + (((r | 1) * i + (r >> 5)) & 31));
  }
  suspend();
  return table;
}

// --- addresses that are not aligned
// -------------------------------------------------------------------------------------------------------
// Kernels are compiled with -fsanitize=alignment, which asks before each access whether the address
// suits the type, as a GPU does and x86 does not. Here is what it calls where one does not: struct
// and name are the compiler's (libsanitizer's ubsan_handlers.h).
struct Misaligned {
  const char *file;
  uint32_t line, column;
  const struct {
    uint16_t kind, info;
    char name[1];
  } *type;
  unsigned char log_alignment, access;
};
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1(Misaligned *m, uintptr_t at) {
  std::string text =
      format("%s: %s at address %#llx, which is no multiple of %d bytes", where(m->file, (int)m->line).c_str(),
             m->type->name, (unsigned long long)at, 1 << m->log_alignment);
  if (block.running) fail(text);
  fprintf(stderr, "%s\n", text.c_str()); // in host code of the plug-in
  abort();
}

// --- addresses that are nowhere
// -----------------------------------------------------------------------------------------------------------
// While a grid runs, a stray access of its thread becomes a failed launch: the thread goes on in
// stray(), on its fiber's stack. Signals of other threads go where they went before, which is Go's
// handler.
#ifdef __x86_64__
static struct {
  struct sigaction segv, bus;
} before;
static pthread_t executor;
static const void *volatile stray_address;

[[noreturn]] static void stray() {
  auto *p = static_cast<const unsigned char *>(const_cast<const void *>(stray_address));
  const unsigned char *stack = block.running->stack;
  if (p < stack && p >= stack - guard_bytes)
    fail(format("a thread needs more than %zu bytes of stack", (size_t)stack_bytes));
  fail("it touched " + describe(p));
}

static void on_signal(int number, siginfo_t *info, void *context) {
  struct sigaction &old = number == SIGSEGV ? before.segv : before.bus;
  if (pthread_equal(pthread_self(), executor) && block.running) {
    stray_address = info->si_addr;
    auto *c = static_cast<ucontext_t *>(context);
    c->uc_mcontext.gregs[REG_RSP] = (greg_t)(block.running->stack + stack_bytes - 8);
    c->uc_mcontext.gregs[REG_RIP] = (greg_t)&stray;
  } else if (old.sa_flags & SA_SIGINFO) {
    old.sa_sigaction(number, info, context);
  } else if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) {
    old.sa_handler(number);
  } else {
    sigaction(number, &old, nullptr); // and it comes again
  }
}

struct Signals {
  Signals() {
    executor = pthread_self();
    struct sigaction a{};
    a.sa_sigaction = on_signal;
    a.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigfillset(&a.sa_mask);
    sigdelset(&a.sa_mask, SIGSEGV);
    sigdelset(&a.sa_mask, SIGBUS);
    sigaction(SIGSEGV, &a, &before.segv);
    sigaction(SIGBUS, &a, &before.bus);
  }
  ~Signals() {
    sigaction(SIGSEGV, &before.segv, nullptr);
    sigaction(SIGBUS, &before.bus, nullptr);
  }
};
#else
struct Signals {};
#endif

// --- shared memory
// ----------------------------------------------------------------------------------------------------------------------
unsigned char *dynamic_shared() { return block.shared; }

// place_shared lays dynamic shared memory between red zones, or where it touches a page that nobody
// may touch (fences.cpp).
static void place_shared(size_t bytes) {
  enum : size_t { room = 1 << 18 };
  static unsigned char *region = nullptr; // a page, room, a page
  if (!region) {
    void *p = mmap(nullptr, room + 2 * guard_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(static_cast<char *>(p) + guard_bytes, room, PROT_READ | PROT_WRITE)) abort();
    region = static_cast<unsigned char *>(p);
  }
  unsigned char *first = region + guard_bytes;
  const int64_t guard = setting("ULYSSES_EMULATED_GUARD", 0);
  if (guard < 0) block.shared = first;
  else if (guard > 0) block.shared = first + room - (bytes + promised - 1) / promised * promised;
  else block.shared = first + zone + promised; // no better aligned than promised
  block.shared_bytes = bytes;
  block.fence[0] = guard < 0 ? first : block.shared - zone;
  block.fence[1] = std::min(block.shared + bytes + zone, first + room);
}

static thread_local unsigned char touch; // makes the thread's block of thread_local data exist

struct Static {
  unsigned char *p;
  size_t bytes;
  const void *code;
};

// static_shared finds all __shared__ variables: the library's thread_local data.
static Static static_shared() {
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

static void poison(const Static &s) {
  // a C++ library linked in has its own data there
  auto *kept = reinterpret_cast<unsigned char *>(abi::__cxa_get_globals());
  unsigned char copy[2 * sizeof(void *)];
  bool inside = kept >= s.p && kept < s.p + s.bytes;
  if (inside) memcpy(copy, kept, sizeof copy);
  memset(s.p, 0xff, s.bytes);
  if (inside) memcpy(kept, copy, sizeof copy);
}

// --- who is where
// ---------------------------------------------------------------------------------------------------------------------
bool access(const void *v, Access *now, const char **where) {
  if (!block.running || !pthread_equal(pthread_self(), executor)) return false;
  auto *p = static_cast<const unsigned char *>(v);
  const bool fixed = p >= block.fixed && p < block.fixed + block.fixed_bytes,
             dynamic = p >= block.shared && p < block.shared + block.shared_bytes;
  if (!fixed && !dynamic && !in_heap(v)) return false;
  *where = fixed ? "__shared__ memory" : dynamic ? "dynamic shared memory" : "device memory";
  now->launch = fixed || dynamic ? block.run : block.launch;
  now->block = block.number;
  now->thread = block.current;
  now->epoch = block.epoch;
  now->turn = block.warp[block.current >> 5].turn;
  return true;
}

void race(const std::string &text) { fail(text); }

// --- blocks
// -----------------------------------------------------------------------------------------------------------------------------
static uint64_t serial = 0; // of grids and blocks

static bool run_block() {
  block.begun = block.ended = block.waiting = 0;
  block.run = ++serial;
  block.ready.clear();
  uint64_t r = random64();
  block.fresh_first = r & 1;
  block.by_warp = r & 6; // mostly: it keeps a warp's stacks in the cache
  block.order = Steps(block.by_warp ? block.threads / 32 : block.threads);
  block.lanes = Steps(32);
  if (block.shared_bytes) memset(block.fence[0], 0xff, (size_t)(block.fence[1] - block.fence[0]));

  resume(&block.main, (unsigned)pick());

  if (block.failure.empty() && block.ended != block.threads) block.failure = stuck();
  for (unsigned char *p = block.fence[0]; block.shared_bytes && block.failure.empty() && p < block.fence[1]; p++) {
    if (p == block.shared) p += block.shared_bytes - 1;
    else if (*p != 0xff)
      block.failure = format("it wrote beyond its %zu bytes of dynamic shared memory", block.shared_bytes);
  }
  if (block.failure.empty()) return true;
  // Threads that were left waiting keep nothing: their stacks are used again from the start.
  block.idle = block.fibers;
  for (Fiber *f : block.fibers) reset(f);
  for (Thread &t : block.thread) t.fiber = nullptr;
  for (Warp &w : block.warp) w.arrived = 0;
  return false;
}

std::string run_grid(const Kernel &kernel, dim3 grid, dim3 size, size_t shared, const std::function<void()> &body) {
  block.kernel = kernel;
  block.body = &body;
  block.threads = size.x * size.y * size.z;
  block.failure.clear();
  if (block.thread.size() < block.threads) block.thread.resize(block.threads);
  block.warp.assign((block.threads + 31) / 32, Warp());
  place_shared(shared);
  blockDim = size;
  gridDim = grid;

  Signals signals;
  Static s = static_shared();
  block.fixed = s.p, block.fixed_bytes = s.bytes;
  block.launch = ++serial;
  // a whole library's shared memory is too much for each block
  uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z, every = 1 + s.bytes / 16384;
  Steps order(blocks);
  for (uint64_t i = 0; i < blocks; i++) {
    uint64_t b = order(i);
    blockIdx = {(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y)};
    block.number = b;
    if (i % every == 0) poison(s);
    if (!run_block())
      return format("kernel %s (%s), block %llu: %s", kernel.name, where(kernel.file, kernel.line).c_str(),
                    (unsigned long long)b, block.failure.c_str());
  }
  return "";
}

// --- order
// ------------------------------------------------------------------------------------------------------------------------------
int64_t setting(const char *name, int64_t otherwise) {
  const char *v = getenv(name);
  return v && *v ? strtoll(v, nullptr, 10) : otherwise;
}

uint64_t random64() { // splitmix64
  static uint64_t state = (uint64_t)setting("ULYSSES_EMULATED_SEED", 1) * 0x9e3779b97f4a7c15u;
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

Steps::Steps(uint64_t n) : n(n) {
  if (n < 2) return;
  start = below(n);
  do step = 1 + below(n - 1);
  while (std::gcd(step, n) != 1);
}

std::string format(const char *f, ...) {
  char text[1024];
  va_list args;
  va_start(args, f);
  vsnprintf(text, sizeof text, f, args);
  va_end(args);
  return text;
}

} // namespace uly_emulated
