#include "races.h"

#include <algorithm>

namespace uly_emulated {
namespace ptx {

void Races::prepare(const Block &b) {
  block = &b;
  warps.resize(b.warps.size());
  unsigned least = 16;
  for (const Instruction &i : b.program->code)
    for (const Access &a : i.accesses)
      if (a.space != Space::GLOBAL) least = std::min(least, a.bytes);
  shift = (unsigned)__builtin_ctz(least);
  const size_t n = (b.shared_bytes >> shift) + 1;
  if (places.size() < n) places.resize(n);
  if (readers.size() < places.size() * warps.size()) readers.resize(places.size() * warps.size());
}

void Races::begin() {
  number++;
  for (Order &o : warps) {
    o.now = {};
    o.seen.assign(warps.size(), 0);
    for (auto &s : o.shown) s.clear();
  }
  for (auto &a : arrived) a.assign(warps.size(), 0);
}

void Races::fail(const Actor &a, const char *does, const char *why, unsigned warp, uint8_t lane, uint32_t by,
                 const Place &p) const {
  auto who = [](unsigned w, uint8_t l) {
    return l == SEVERAL ? format("warp %u", w) : format("thread %u", w * 32 + l);
  };
  const Instruction &other = block->program->code[by];
  const std::string where = other.source.empty() ? format("line %u", other.line) : other.source;
  throw Fault(format("a race: %s %s byte %lld of shared memory %s %s with %s in %s", who(a.warp, a.lane).c_str(), does,
                     (long long)(&p - places.data()) << shift, why, who(warp, lane).c_str(), other.name.c_str(),
                     where.c_str()));
}

// ordered reports whether what a lane did before is ordered before what happens now.
inline bool Races::ordered(unsigned warp, uint8_t lane, Point when, const Actor &a) {
  if (warp != a.warp) return when.barriers < a.order.seen[warp];
  return when.syncs != a.order.now.syncs || (lane == a.lane && lane != SEVERAL);
}

inline Races::Place &Races::place(uint64_t n) {
  Place &p = places[n];
  if (p.block != number) {
    p = {};
    p.block = number;
  }
  return p;
}

inline void Races::check_write(const Actor &a, const Place &p, const char *does) const {
  if (!p.by) return;
  if (p.pending) fail(a, does, "during the copy of", p.warp, p.lane, p.by - 1, p);
  if (!ordered(p.warp, p.lane, p.when, a))
    fail(a, does, "and nothing orders it and the write of", p.warp, p.lane, p.by - 1, p);
}

inline void Races::read(const Actor &a, uint64_t n) {
  Place &p = place(n);
  check_write(a, p, "reads");
  Reader &r = reader(n, a.warp);
  if (!(p.readers >> a.warp & 1)) {
    p.readers |= 1u << a.warp;
    r = {a.order.now, index(a.by), 0, a.lane};
    return;
  }
  if (r.when.syncs != a.order.now.syncs) r.lane = a.lane;
  else if (r.lane != a.lane) r.lane = SEVERAL;
  r.when = a.order.now, r.by = index(a.by);
}

inline void Races::write(const Actor &a, uint64_t n) {
  Place &p = place(n);
  check_write(a, p, "writes");
  for (uint32_t left = p.readers; left; left &= left - 1) {
    const unsigned warp = (unsigned)__builtin_ctz(left);
    const Reader &r = reader(n, warp);
    if (r.pending) fail(a, "writes", "during the product of", warp, r.lane, r.by, p);
    if (!ordered(warp, r.lane, r.when, a))
      fail(a, "writes", "and nothing orders it and the read of", warp, r.lane, r.by, p);
  }
  p = {number, index(a.by) + 1, a.order.now, (uint32_t)a.order.shown[a.lane].size(), 0, a.warp, a.lane, false};
}

void Races::access(const Warp &w, const Instruction &i, unsigned lane, uint64_t at, uint64_t bytes, bool writes) {
  const Actor a = actor(w, i, lane);
  for (uint64_t n = at >> shift; n < (at + bytes) >> shift; n++)
    if (writes) write(a, n);
    else read(a, n);
}

void Races::begin_copy(const Warp &w, const Instruction &i, unsigned lane, uint64_t at, uint64_t bytes) {
  access(w, i, lane, at, bytes, true);
  for (uint64_t n = at >> shift; n < (at + bytes) >> shift; n++) place(n).pending = true;
}
// Nothing else has written the place since begin_copy: it would have failed.
void Races::end_copy(const Warp &w, const Instruction &i, unsigned lane, uint64_t at, uint64_t bytes) {
  for (uint64_t n = at >> shift; n < (at + bytes) >> shift; n++) place(n).pending = false;
  access(w, i, lane, at, bytes, true);
}

void Races::check_shown(const Actor &a, const Place &p) const {
  if (!p.by) return;
  const std::vector<Point> &fences = warps[p.warp].shown[p.lane];
  if (fences.size() > p.shown && ordered(p.warp, SEVERAL, fences[p.shown], a)) return;
  fail(a, "reads", "without fence.proxy.async behind the write of", p.warp, p.lane, p.by - 1, p);
}

void Races::begin_operand(const Warp &w, const Instruction &i, uint64_t at, uint64_t bytes) {
  const Actor a = actor(w, i, SEVERAL);
  for (uint64_t n = at >> shift; n < (at + bytes) >> shift; n++) {
    read(a, n);
    check_shown(a, place(n));
    reader(n, a.warp).pending++;
  }
}
// The wait orders the product before what any lane of its warp does next.
void Races::end_operand(const Warp &w, const Instruction &i, uint64_t at, uint64_t bytes) {
  Point when = warps[w.number].now;
  when.syncs--;
  for (uint64_t n = at >> shift; n < (at + bytes) >> shift; n++) {
    Reader &r = reader(n, w.number);
    r = {when, index(i), (uint16_t)(r.pending - 1), SEVERAL};
  }
}

void Races::show(const Warp &w) {
  Order &o = warps[w.number];
  lanes(w.now, [&](unsigned l) { o.shown[l].push_back(o.now); });
}

void Races::arrive(const Warp &w, unsigned barrier) {
  Order &o = warps[w.number];
  o.seen[w.number] = ++o.now.barriers;
  for (size_t k = 0; k < warps.size(); k++) arrived[barrier][k] = std::max(arrived[barrier][k], o.seen[k]);
}

void Races::pass(unsigned barrier) {
  std::vector<uint32_t> &all = arrived[barrier];
  for (const Warp &w : block->warps)
    if (w.waits == (int)barrier) {
      Order &o = warps[w.number];
      o.now.syncs++;
      for (size_t k = 0; k < warps.size(); k++) o.seen[k] = std::max(o.seen[k], all[k]);
    }
  all.assign(warps.size(), 0);
}

} // namespace ptx
} // namespace uly_emulated
