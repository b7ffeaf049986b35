// Grids, blocks, warps and threads. A thread is a function call on the stack of a fiber. A waiting
// thread keeps its stack, and another fiber runs the next threads. Therefore a kernel without
// barriers costs one function call for each thread.
#include "blocks.h"

#include <string.h>

#include <algorithm>

#include "heap.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace uly_emulated {

Block block;

static void select_thread(unsigned t) {
  block.current = t;
  if (blockDim.y == 1 && blockDim.z == 1) {
    threadIdx.x = t;
    return;
  }
  threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
}

// pick chooses the next thread to run; -1 if no thread can run.
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
  select_thread(t);
  Fiber *to = block.thread[t].fiber;
  block.thread[t].fiber = nullptr;
  if (!to) to = idle_fiber();
  block.running = to;
  change(from, to);
}

static void leave() { // to run_block, which checks the block's state
  Fiber *self = block.running;
  block.running = nullptr;
  change(self, &block.main);
}

void fiber_main() {
  for (;;) {
    (*block.body)();
    block.ended++;
    int t = pick();
    if (t >= 0 && !block.thread[t].fiber) {
      select_thread((unsigned)t);
      continue;
    }
    Fiber *self = block.running;
    block.idle.push_back(self);
    if (t < 0) leave();
    else resume(self, (unsigned)t);
    // The code that took this fiber from the idle fibers has selected the thread to run.
  }
}

[[noreturn]] void fail(std::string text) {
  block.failure = std::move(text);
  for (;;) leave();
}

std::string where(const char *file, int line) {
  const char *slash = file ? strrchr(file, '/') : nullptr;
  return format("%s:%d", slash ? slash + 1 : file ? file : "?", line);
}

// deadlock returns why no thread can continue.
static std::string deadlock() {
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
  const std::string partial = partial_deadlock();
  if (!partial.empty()) s += (s.empty() ? "" : ", ") + partial;
  if (block.ended) s += format(", %u have ended", block.ended);
  return s;
}

void suspend() {
  unsigned me = block.current;
  int t = pick();
  if (t == (int)me) {
    select_thread(me);
    return;
  }
  if (t < 0) fail(deadlock());
  Fiber *self = block.running;
  block.thread[me].fiber = self;
  resume(self, (unsigned)t);
}

bool same(const char *a, int la, const char *b, int lb) { return la == lb && (a == b || !strcmp(a, b)); }

void join(Clock *to, const Clock &from) {
  for (size_t w = 0; w < from.size(); w++) (*to)[w] = std::max((*to)[w], from[w]);
}

// A barrier orders what the warps did before it before what they do after it.
static void synchronize_clocks() {
  Clock all = {};
  for (size_t w = 0; w < block.warp.size(); w++) {
    block.warp[w].seen[w]++;
    join(&all, block.warp[w].seen);
  }
  for (Warp &w : block.warp) w.seen = all;
}

int barrier(int mode, int value, const char *file, int line) {
  if (block.waiting == 0) {
    block.file = file, block.line = line;
    block.any = 0, block.all = 1, block.count = 0;
  } else if (!same(block.file, block.line, file, line)) {
    fail(format("thread %u waits at the barrier of %s, others at the barrier of %s", block.current,
                where(file, line).c_str(), where(block.file, block.line).c_str()));
  }
  block.any |= value != 0, block.all &= value != 0, block.count += value != 0;
  if (++block.waiting == block.threads) {
    int result = mode == 1 ? block.any : mode == 2 ? block.all : block.count;
    block.waiting = 0;
    synchronize_clocks();
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

const uint64_t *exchange(unsigned mask, const uint64_t *value, int words, const char *what, const char *file,
                         int line) {
  if (mask != 0xffffffffu)
    fail(format("%s of %s without all lanes of the warp: mask %08x", what, where(file, line).c_str(), mask));
  unsigned lane = block.current & 31;
  Warp &w = block.warp[block.current >> 5];
  if (w.arrived == 0) w.what = what, w.file = file, w.line = line;
  else if (!same(w.file, w.line, file, line))
    fail(format("lane %u of warp %u waits at the %s of %s, others at the %s of %s", lane, block.current >> 5, what,
                where(file, line).c_str(), w.what, where(w.file, w.line).c_str()));
  uint64_t *table = w.slot[w.exchanges & 1];
  for (int i = 0; i < words; i++) table[32 * i + (int)lane] = value[i];
  if (++w.arrived == 32) {
    w.arrived = 0;
    w.exchanges++;
    unsigned first = block.current & ~31u, r = (unsigned)random_below(1024);
    for (unsigned i = 0; i < 32; i++) block.ready.push_back(first + (((r | 1) * i + (r >> 5)) & 31));
  }
  suspend();
  return table;
}

static bool operands = false; // whether the running thread reads operands of a product
void reads_operands(bool on) { operands = on; }
void show_products() { block.thread[block.current].shown++; }
void fail_kernel(const char *why) { fail(format("thread %u: %s", block.current, why)); }

static bool in_fixed(const unsigned char *p) { return p >= block.fixed && p < block.fixed + block.fixed_bytes; }
static bool in_dynamic(const unsigned char *p) { return p >= block.shared && p < block.shared + block.shared_bytes; }

void need_global(const void *v, const char *what, const char *file, int line) {
  auto *p = static_cast<const unsigned char *>(v);
  if (in_fixed(p) || in_dynamic(p))
    fail(format("%s of shared memory in %s; it requires global memory", what, where(file, line).c_str()));
}

bool access(const void *v, Access *now, const char **where) {
  if (!in_kernel()) return false;
  auto *p = static_cast<const unsigned char *>(v);
  const bool fixed = in_fixed(p), dynamic = in_dynamic(p);
  if (!fixed && !dynamic && !in_heap(v)) return false;
  *where = fixed ? "__shared__ memory" : dynamic ? "dynamic shared memory" : "device memory";
  now->launch = fixed || dynamic ? block.run : block.launch;
  now->block = block.number;
  const unsigned warp = block.current >> 5;
  now->thread = block.current;
  now->clock = block.warp[warp].seen[warp];
  now->exchanges = block.warp[warp].exchanges;
  now->shown = block.thread[block.current].shown;
  now->by_product = operands;
  return true;
}

bool ordered(const Access &before, const Access &now) {
  return before.thread == now.thread || before.clock < block.warp[now.thread / 32].seen[before.thread / 32] ||
         (before.thread / 32 == now.thread / 32 && before.exchanges != now.exchanges);
}

bool is_shown(const Access &write) { return block.thread[write.thread].shown != write.shown; }

void race(const std::string &text) { fail(text); }

static uint64_t serial = 0; // number of grids and blocks so far

static bool run_block() {
  block.begun = block.ended = block.waiting = 0;
  block.run = ++serial;
  block.ready.clear();
  uint64_t r = random64();
  block.fresh_first = r & 1;
  block.by_warp = r & 6; // usually: consecutive threads of a warp keep its stacks in the cache
  block.order = Steps(block.by_warp ? block.threads / 32 : block.threads);
  block.lanes = Steps(32);
  if (block.shared_bytes) poison(block.fence[0], (size_t)(block.fence[1] - block.fence[0]));

  resume(&block.main, (unsigned)pick());

  if (block.failure.empty() && block.ended != block.threads) block.failure = deadlock();
  if (block.failure.empty()) block.failure = partial_rest();
  for (unsigned char *p = block.fence[0]; block.shared_bytes && block.failure.empty() && p < block.fence[1]; p++) {
    if (p == block.shared) p += block.shared_bytes - 1;
    else if (*p != poison_at(p))
      block.failure = format("it wrote outside of its %zu bytes of dynamic shared memory", block.shared_bytes);
  }
  if (block.failure.empty()) return true;
  // The stacks of threads that still wait are reset and reused.
  block.idle = block.fibers;
  for (Fiber *f : block.fibers) reset(f);
  for (Thread &t : block.thread) t.fiber = nullptr;
  for (Warp &w : block.warp) w.arrived = 0;
  reset_partial();
  operands = false;
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
  // The __shared__ variables of the whole library are too large to clear before each block.
  uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z, every = 1 + s.bytes / 16384;
  Steps order(blocks);
  for (uint64_t i = 0; i < blocks; i++) {
    uint64_t b = order(i);
    blockIdx = {(unsigned)(b % grid.x), (unsigned)(b / grid.x % grid.y), (unsigned)(b / grid.x / grid.y)};
    block.number = b;
    if (i % every == 0) poison_static(s);
    if (!run_block())
      return format("kernel %s (%s), block %llu: %s", kernel.name, where(kernel.file, kernel.line).c_str(),
                    (unsigned long long)b, block.failure.c_str());
  }
  return "";
}

} // namespace uly_emulated
