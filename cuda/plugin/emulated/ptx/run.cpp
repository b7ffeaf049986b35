// Runs kernels as PTX instructions: grids, blocks, warps, branches and barriers.
//
// The lanes of a warp run together. At a branch that they take differently, the lanes with the
// lower instruction run first, until they come to the others: so they meet again behind the
// branch. Blocks run one after another, and the warps of a block in a random order, each until it
// waits at a barrier or has run a random number of instructions.
#include "run.h"

#include <stdlib.h>

#include <algorithm>

#include "../settings.h"
#include "races.h"
#include "traffic.h"
#include "warp.h"

namespace uly_emulated {
namespace ptx {
namespace {

// find_next sets w.next.
void find_next(Warp &w) {
  w.next = ~0u;
  for (const Diverged &d : w.others) w.next = std::min(w.next, d.blocked ? 0 : d.pc);
}

// put_aside adds the lanes to those at another instruction.
void put_aside(Warp &w, uint32_t pc, uint32_t lanes, bool blocked) {
  for (Diverged &d : w.others)
    if (d.pc == pc) {
      d.lanes |= lanes;
      d.blocked = blocked;
      find_next(w);
      return;
    }
  w.others.push_back({pc, lanes, blocked});
  find_next(w);
}

// select chooses the lanes that run next: those at the lowest instruction, without those that wait
// for others to come to it. It returns false if there are none.
bool select(Warp &w) {
  if (w.active) put_aside(w, w.pc, w.active, false);
  size_t best = w.others.size();
  for (size_t n = 0; n < w.others.size(); n++)
    if (!w.others[n].blocked && (best == w.others.size() || w.others[n].pc < w.others[best].pc)) best = n;
  w.active = 0;
  if (best == w.others.size()) return false;
  w.pc = w.others[best].pc, w.active = w.others[best].lanes;
  w.others.erase(w.others.begin() + (int64_t)best);
  find_next(w);
  return true;
}

uint32_t needed(const Warp &w, const Instruction &i) { return i.kind == Kind::TOGETHER ? ~0u : w.alive; }
[[noreturn]] void lanes_missing(uint32_t came, uint32_t needs) {
  throw Fault(format("lanes %08x of the warp come to an instruction that needs %08x", came, needs));
}

// come brings a warp to a barrier: bar.sync n[, threads], bar.arrive n, threads, or bar.red.or.pred
// p, n, q.
void come(Warp &w, const Instruction &i) {
  Block &b = *w.block;
  const bool reduces = i.barrier == Arrival::ANY;
  const unsigned first = reduces ? 1 : 0, number = uniform(w, i.at[first], "the barrier");
  const unsigned threads = !reduces && i.at.size() > 1 ? uniform(w, i.at[1], "the barrier's threads") : b.threads;
  if (number > 15 || threads % 32 || !threads || threads > b.threads)
    throw Fault(format("barrier %u for %u of %u threads", number, threads, b.threads));
  Barrier &r = b.barriers[number];
  if (r.arrived && r.expected != threads)
    throw Fault(
        format("barrier %u for %u threads; others came to it for %u in line %u", number, threads, r.expected, r.line));
  if (r.came >> w.number & 1) throw Fault(format("a warp comes to barrier %u twice before the others", number));
  r.expected = threads, r.line = i.line;
  r.came |= 1u << w.number;
  r.arrived += 32;
  if (reduces) r.any |= (w.predicate(i.at[2]) & w.now) != 0;
  w.answer = reduces ? i.at[0] : ~0u;
  if (i.barrier != Arrival::LEAVES) w.waits = (int)number;
  if (b.races) b.races->arrive(w, number);
  if (r.arrived < r.expected) return;
  if (b.races) b.races->pass(number);
  for (Warp &o : b.warps)
    if (o.waits == (int)number) {
      o.waits = -1;
      if (o.answer != ~0u) o.predicate(o.answer) = r.any ? ~0u : 0;
    }
  r = {};
}

// end ends lanes.
void end(Warp &w) {
  for (unsigned l = 0; l < 32; l++)
    if (w.now >> l & 1 && w.copied[l] > w.waited[l])
      throw Fault("a thread ends before it has waited for a copy (cp.async)");
  if (!w.products.empty()) throw Fault("a thread ends before it has waited for a product (wgmma)");
  w.alive &= ~w.now;
  w.active &= ~w.now;
}

void run(Warp &w, const Instruction &i) {
  if (traffic_counted) count(w, i);
  i.run(w, i);
}

// run_warp runs a warp until it waits, ends or has run `most` instructions.
void run_warp(Warp &w, uint64_t most) {
  const std::vector<Instruction> &code = w.block->program->code;
  const Instruction *i = nullptr;
  try {
    for (uint64_t n = 0; n < most; n++) {
      if (w.pc >= w.next || !w.active) {
        if (!w.alive) return;
        if (!select(w)) {
          i = &code[w.others[0].pc];
          lanes_missing(w.others[0].lanes, needed(w, *i));
        }
      }
      if (w.pc >= code.size()) throw Fault("the end of the kernel without ret");
      i = &code[w.pc];
      w.now = w.active;
      if (i->has_guard) w.now &= i->negated ? ~w.predicate(i->guard) : w.predicate(i->guard);
      switch (i->kind) {
        case Kind::PLAIN:
          if (w.now) run(w, *i);
          w.pc++;
          break;
        case Kind::TOGETHER:
        case Kind::BARRIER: {
          if (!w.now) {
            w.pc++;
            break;
          }
          const uint32_t needs = needed(w, *i);
          if (w.now != needs) {
            if (w.now != w.active || (w.alive & needs) != needs) lanes_missing(w.now, needs);
            put_aside(w, w.pc, w.active, true);
            w.active = 0;
            break;
          }
          w.pc++;
          if (i->kind == Kind::TOGETHER) run(w, *i);
          else {
            come(w, *i);
            if (w.waits >= 0) return;
          }
          break;
        }
        case Kind::BRANCH: {
          const uint32_t stay = w.active & ~w.now;
          if (!w.now) {
            w.pc++;
          } else if (!stay) {
            w.pc = i->target;
          } else {
            put_aside(w, i->target, w.now, false);
            w.active = stay;
            w.pc++;
          }
          break;
        }
        case Kind::END:
          end(w);
          w.pc++;
          break;
      }
    }
  } catch (const Fault &f) {
    throw Fault(format("%s:%u: ", w.block->program->file.c_str(), i ? i->line : 0) + f.what() +
                format(", warp %u", w.number));
  }
}

// prepare sets the constants of a warp.
void prepare(Warp &w) {
  const Program &p = *w.block->program;
  for (const Constant &c : p.constants) {
    if (c.width == PREDICATE) w.predicate(c.at) = (uint32_t)c.value;
    for (unsigned l = 0; l < 32; l++) {
      if (c.width == HALF) w.at<uint16_t>(c.at)[l] = (uint16_t)c.value;
      if (c.width == WORD) w.at<uint32_t>(c.at)[l] = (uint32_t)c.value;
      if (c.width == LONG) w.at<uint64_t>(c.at)[l] = c.value;
    }
  }
}
void set_special(Warp &w, unsigned n, uint32_t value) {
  for (unsigned l = 0; l < 32; l++) w.at<uint32_t>(n * TABLE)[l] = value;
}

void run_block(Block &b, dim3 index, dim3 size) {
  poison(b.shared.data(), b.shared.size());
  if (b.races) b.races->begin();
  for (Barrier &r : b.barriers) r = {};
  for (Warp &w : b.warps) {
    unsigned char *registers = w.registers;
    const unsigned number = w.number;
    w = Warp();
    w.block = &b, w.number = number, w.registers = registers;
    w.active = w.alive = ~0u;
    const unsigned at[3] = {index.x, index.y, index.z};
    for (unsigned n = 0; n < 3; n++) set_special(w, 6 + n, at[n]);
    for (unsigned l = 0; l < 32; l++) {
      const unsigned t = number * 32 + l;
      w.at<uint32_t>(0)[l] = t % size.x;
      w.at<uint32_t>(TABLE)[l] = t / size.x % size.y;
      w.at<uint32_t>(2 * TABLE)[l] = t / size.x / size.y;
    }
  }
  std::vector<unsigned> ready;
  for (;;) {
    ready.clear();
    bool waiting = false;
    for (Warp &w : b.warps) {
      if (w.alive && w.waits < 0) ready.push_back(w.number);
      waiting |= w.waits >= 0;
    }
    if (ready.empty()) {
      if (!waiting) break;
      std::string text = "no warp can continue:";
      for (Warp &w : b.warps) text += w.waits >= 0 ? format(" %d", w.waits) : std::string(" -");
      throw Fault(text + " (the barriers at which the warps wait; - has ended)");
    }
    run_warp(b.warps[ready[random_below(ready.size())]], 1 + random_below(4096));
  }
  for (const Barrier &r : b.barriers)
    if (r.arrived) throw Fault("warps have arrived at a barrier for which none waits");
}

} // namespace
} // namespace ptx

bool as_ptx() {
  static const bool is = getenv("ULYSSES_EMULATED_PTX") != nullptr;
  return is;
}

namespace ptx {

std::string run_grid(const Kernel &kernel, dim3 grid, dim3 size, size_t shared,
                     const std::vector<Argument> &arguments) {
  static uint64_t launches = 0;
  uint64_t number = 0;
  try {
    const std::string name = symbol(kernel.address);
    if (name.empty()) throw Fault("its symbol is not in the library");
    const Program &p = program(name);
    if (arguments.size() != p.parameters.size())
      throw Fault(format("%zu arguments for %zu parameters", arguments.size(), p.parameters.size()));
    std::vector<unsigned char> parameters(p.parameter_bytes);
    for (size_t n = 0; n < arguments.size(); n++) {
      if (arguments[n].size() != p.parameters[n].bytes)
        throw Fault(format("argument %zu has %zu bytes, not %zu", n, arguments[n].size(), p.parameters[n].bytes));
      memcpy(&parameters[p.parameters[n].offset], arguments[n].data(), arguments[n].size());
    }
    Block b;
    b.program = &p;
    b.threads = size.x * size.y * size.z;
    b.launch = ++launches;
    b.parameters = parameters.data();
    b.shared_bytes = p.fixed_shared + (uint32_t)shared;
    b.shared.resize(b.shared_bytes);
    if (p.most_threads && b.threads > p.most_threads)
      throw Fault(format("%u threads, more than its %u (__launch_bounds__)", b.threads, p.most_threads));
    b.warps.resize(b.threads / 32);
    // Registers have the values of the last kernel, as on a GPU.
    static std::vector<std::vector<unsigned char>> registers;
    if (registers.size() < b.warps.size()) registers.resize(b.warps.size());
    for (unsigned n = 0; n < b.warps.size(); n++) {
      Warp &w = b.warps[n];
      if (registers[n].size() < p.register_bytes + 64) {
        registers[n].resize(p.register_bytes + 64);
        poison(registers[n].data(), registers[n].size());
      }
      w.block = &b, w.number = n;
      w.registers = registers[n].data() + (64 - (uintptr_t)registers[n].data() % 64) % 64;
      prepare(w);
      const unsigned values[6] = {size.x, size.y, size.z, grid.x, grid.y, grid.z};
      for (unsigned k = 0; k < 3; k++) set_special(w, 3 + k, values[k]), set_special(w, 9 + k, values[3 + k]);
    }
    static Races races;
    if (setting("ULYSSES_EMULATED_RACES", 0)) {
      races.prepare(b);
      b.races = &races;
    }
    begin_counts(p);
    const uint64_t blocks = (uint64_t)grid.x * grid.y * grid.z;
    const Steps order(blocks);
    for (uint64_t i = 0; i < blocks; i++) {
      number = order(i);
      run_block(
          b,
          dim3((unsigned)(number % grid.x), (unsigned)(number / grid.x % grid.y), (unsigned)(number / grid.x / grid.y)),
          size);
    }
    if (traffic_counted) write_counts(kernel, name, p);
  } catch (const Fault &f) {
    return format("kernel %s, block %llu: ", kernel.name, (unsigned long long)number) + f.what();
  }
  return "";
}

} // namespace ptx
} // namespace uly_emulated
