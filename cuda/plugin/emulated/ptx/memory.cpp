// Loads, stores, atomic operations and asynchronous copies. Global addresses are addresses of the
// host; shared addresses begin at SHARED_START.
#include <algorithm>

#include "../heap.h"
#include "races.h"
#include "warp.h"

namespace uly_emulated {
namespace ptx {

unsigned char *global_at(Warp &w, const Instruction &i, uint64_t address, uint64_t bytes) {
  auto *p = reinterpret_cast<unsigned char *>(address);
  if (i.launch == w.block->launch && address >= i.first && address + bytes <= i.last) return p;
  auto it = heap.all.upper_bound(reinterpret_cast<char *>(p));
  if (it != heap.all.begin()) {
    --it;
    const uint64_t first = (uint64_t)it->first, last = first + it->second.bytes;
    if (address >= first && address + bytes <= last && !it->second.hidden) {
      i.first = first, i.last = last, i.launch = w.block->launch;
      return p;
    }
  }
  if (!in_heap(p) && setting("ULYSSES_EMULATED_HOST", 0)) return p;
  throw Fault(format("%llu bytes at ", (unsigned long long)bytes) + describe(p));
}

namespace {

enum Space { ANY, GLOBAL, SHARED, PARAMETERS };

template <Space S> __attribute__((always_inline)) inline unsigned char *place_at(Warp &w, const Instruction &i,
                                                                                 uint64_t address, uint64_t bytes) {
  aligned(address, bytes);
  if (S == SHARED) return w.block->shared_at(address, bytes);
  if (S == PARAMETERS) {
    if (address + bytes > w.block->program->parameter_bytes)
      throw Fault(format("parameter at %llu", (unsigned long long)address));
    return const_cast<unsigned char *>(w.block->parameters) + address;
  }
  if (S == ANY) {
    const uint64_t from = address - (uint64_t)w.block->shared.data();
    if (from < w.block->shared_bytes) return w.block->shared_at(from + SHARED_START, bytes);
  }
  return global_at(w, i, address, bytes);
}
// address_of returns the address of a lane; its register is operand n.
__attribute__((always_inline)) inline uint64_t address_of(Warp &w, const Instruction &i, unsigned n, unsigned lane) {
  return (i.width == LONG ? w.at<uint64_t>(i.at[n])[lane] : w.at<uint32_t>(i.at[n])[lane]) + (uint64_t)i.offset;
}

// accessed looks for races of an access to shared memory.
template <Space S> __attribute__((always_inline)) inline void accessed(Warp &w, const Instruction &i, unsigned lane,
                                                                       const unsigned char *p, uint64_t bytes,
                                                                       bool write) {
  if ((S != SHARED && S != ANY) || !w.block->races) return;
  const uint64_t at = (uint64_t)(p - w.block->shared.data());
  if (at < w.block->shared_bytes) w.block->races->access(w, i, lane, at, bytes, write);
}

// T is the type in memory, R that of the register.
template <Space S, class T, class R> void load_as(Warp &w, const Instruction &i) {
  const unsigned n = i.count;
  lanes(w.now, [&](unsigned l) {
    const unsigned char *p = place_at<S>(w, i, address_of(w, i, n, l), n * sizeof(T));
    accessed<S>(w, i, l, p, n * sizeof(T), false);
    for (unsigned k = 0; k < n; k++) {
      T v;
      memcpy(&v, p + k * sizeof v, sizeof v);
      w.at<R>(i.at[k])[l] = (R)v;
    }
  });
}
template <Space S, class T, class R> void store_as(Warp &w, const Instruction &i) {
  const unsigned n = i.count;
  lanes(w.now, [&](unsigned l) {
    unsigned char *p = place_at<S>(w, i, address_of(w, i, 0, l), n * sizeof(T));
    accessed<S>(w, i, l, p, n * sizeof(T), true);
    for (unsigned k = 0; k < n; k++) {
      const T v = (T)w.at<R>(i.at[1 + k])[l];
      memcpy(p + k * sizeof v, &v, sizeof v);
    }
  });
}

template <Space S, class T> Run load_into(Width r) {
  if (r == LONG) return load_as<S, T, uint64_t>;
  if (r == WORD && sizeof(T) <= 4) return load_as<S, T, uint32_t>;
  if (r == HALF && sizeof(T) <= 2) return load_as<S, T, uint16_t>;
  return nullptr;
}
template <Space S, class T> Run store_from(Width r) {
  if (r == LONG) return store_as<S, T, uint64_t>;
  if (r == WORD && sizeof(T) <= 4) return store_as<S, T, uint32_t>;
  if (r == HALF && sizeof(T) <= 2) return store_as<S, T, uint16_t>;
  return nullptr;
}
template <Space S> Run load_from(const std::string &type, Width r) {
  if (type == "u8" || type == "b8") return load_into<S, uint8_t>(r);
  if (type == "s8") return load_into<S, int8_t>(r);
  if (type == "u16" || type == "b16") return load_into<S, uint16_t>(r);
  if (type == "s16") return load_into<S, int16_t>(r);
  if (type == "u32" || type == "b32" || type == "f32") return load_into<S, uint32_t>(r);
  if (type == "s32") return load_into<S, int32_t>(r);
  if (type == "u64" || type == "b64" || type == "f64" || type == "s64") return load_into<S, uint64_t>(r);
  return nullptr;
}
template <Space S> Run store_to(const std::string &type, Width r) {
  if (type == "u8" || type == "b8" || type == "s8") return store_from<S, uint8_t>(r);
  if (type == "u16" || type == "b16" || type == "s16") return store_from<S, uint16_t>(r);
  if (type == "u32" || type == "b32" || type == "f32" || type == "s32") return store_from<S, uint32_t>(r);
  if (type == "u64" || type == "b64" || type == "f64" || type == "s64") return store_from<S, uint64_t>(r);
  return nullptr;
}

// The old value, the address, the operand. One warp runs at a time.
template <class T> void atomic_add(Warp &w, const Instruction &i) {
  lanes(w.now, [&](unsigned l) {
    unsigned char *p = place_at<GLOBAL>(w, i, address_of(w, i, 1, l), sizeof(T));
    T old;
    memcpy(&old, p, sizeof old);
    const T sum = old + w.at<T>(i.at[2])[l];
    memcpy(p, &sum, sizeof sum);
    w.at<T>(i.at[0])[l] = old;
  });
}
void reduce_four(Warp &w, const Instruction &i) {
  lanes(w.now, [&](unsigned l) {
    unsigned char *p = place_at<GLOBAL>(w, i, address_of(w, i, 0, l), 16);
    for (unsigned k = 0; k < 4; k++) {
      float sum;
      memcpy(&sum, p + 4 * k, 4);
      sum += w.at<float>(i.at[1 + k])[l];
      memcpy(p + 4 * k, &sum, 4);
    }
  });
}

// Asynchronous copies: the address in shared memory, the source, the bytes, and how many of them
// are read; the others become zeros. Each copy is made at once or as late as the program allows, at
// random.
void complete(Warp &w, const Copy &c) {
  unsigned char *to = w.block->shared_at(c.to, c.bytes), value[16] = {};
  if (c.present) memcpy(value, global_at(w, *c.by, c.from, c.present), c.present);
  memcpy(to, value, c.bytes);
}
template <uint32_t BYTES> void copy(Warp &w, const Instruction &i) {
  const uint64_t random = random64();
  lanes(w.now, [&](unsigned l) {
    const uint64_t from = w.at<uint64_t>(i.at[1])[l];
    const uint32_t to = w.at<uint32_t>(i.at[0])[l], present = w.at<uint32_t>(i.at[3])[l];
    if (present > BYTES) throw Fault("a copy of more bytes than it writes");
    aligned(to, BYTES);
    aligned(from, BYTES);
    w.block->shared_at(to, BYTES);
    w.copied[l] = w.group[l] + 1;
    if (w.block->races) w.block->races->begin_copy(w, i, l, to - SHARED_START, BYTES);
    const Copy c = {l, w.group[l], (random >> l & 1) != 0, to, BYTES, present, from, &i};
    if (c.made) complete(w, c);
    w.copies.push_back(c);
  });
}
void commit(Warp &w, const Instruction &) {
  lanes(w.now, [&](unsigned l) { w.group[l]++; });
}
void wait(Warp &w, const Instruction &i) {
  const int pending = (int)uniform(w, i.at[0], "the groups of cp.async");
  lanes(w.now, [&](unsigned l) { w.waited[l] = std::max(w.waited[l], w.group[l] - pending); });
  size_t kept = 0;
  for (const Copy &c : w.copies) {
    if (!(w.now >> c.lane & 1) || c.group >= w.waited[c.lane]) {
      w.copies[kept++] = c;
      continue;
    }
    if (!c.made) complete(w, c);
    if (w.block->races) w.block->races->end_copy(w, *c.by, c.lane, c.to - SHARED_START, c.bytes);
  }
  w.copies.resize(kept);
}

void generic_shared(Warp &w, const Instruction &i) { // cvta.shared.u64
  const uint64_t *a = w.at<uint64_t>(i.at[1]);
  uint64_t *d = w.at<uint64_t>(i.at[0]);
  const uint64_t base = (uint64_t)w.block->shared.data() - SHARED_START;
  lanes(w.now, [=](unsigned l) { d[l] = a[l] + base; });
}
const Operation table[] = {
    {"atom.global.add.f64", "lal", atomic_add<double>, Kind::PLAIN, 8},
    {"atom.global.add.f32", "waw", atomic_add<float>, Kind::PLAIN, 4},
    {"atom.global.add.u32", "waw", atomic_add<uint32_t>, Kind::PLAIN, 4},
    {"red.relaxed.gpu.global.add.v4.f32", "awwww", reduce_four, Kind::PLAIN, 16},
    {"cp.async.cg.shared.global", "sgww", copy<16>, Kind::PLAIN, 16},
    {"cp.async.ca.shared.global", "sgww", copy<4>, Kind::PLAIN, 4},
    {"cp.async.commit_group", "", commit, Kind::PLAIN},
    {"cp.async.wait_group", "w", wait, Kind::PLAIN},
    {"cvta.shared.u64", "ll", generic_shared, Kind::PLAIN},
};

} // namespace

Run load(const std::string &space, const std::string &type, Width into) {
  if (space == "global") return load_from<GLOBAL>(type, into);
  if (space == "shared") return load_from<SHARED>(type, into);
  if (space == "param") return load_from<PARAMETERS>(type, into);
  return space.empty() ? load_from<ANY>(type, into) : nullptr;
}
Run store(const std::string &space, const std::string &type, Width from) {
  if (space == "global") return store_to<GLOBAL>(type, from);
  if (space == "shared") return store_to<SHARED>(type, from);
  return space.empty() ? store_to<ANY>(type, from) : nullptr;
}
const Operation *memory(const std::string &name) { return find(table, name); }

} // namespace ptx
} // namespace uly_emulated
