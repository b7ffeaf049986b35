#include "traffic.h"

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>

namespace uly_emulated {
namespace ptx {
namespace {

constexpr unsigned BANKS = 32, WORD_BYTES = 4, SECTOR = 32;

const char *file() {
  const char *name = getenv("ULYSSES_EMULATED_TRAFFIC");
  return name && *name ? name : nullptr;
}

// unique sorts values and returns how many different ones there are.
unsigned unique(uint64_t *values, unsigned n) {
  std::sort(values, values + n);
  return (unsigned)(std::unique(values, values + n) - values);
}

void count_shared(const Instruction &i, const uint64_t *at, uint32_t mask, unsigned bytes) {
  const unsigned together = BANKS * WORD_BYTES / std::max(bytes, WORD_BYTES);
  for (unsigned first = 0; first < 32; first += together) {
    uint64_t words[BANKS];
    unsigned n = 0, of_bank[BANKS] = {};
    for (unsigned l = first; l < first + together; l++)
      for (unsigned b = 0; b < bytes && mask >> l & 1; b += WORD_BYTES) words[n++] = (at[l] + b) / WORD_BYTES;
    if (!n) continue;
    n = unique(words, n);
    for (unsigned k = 0; k < n; k++) of_bank[words[k] % BANKS]++;
    i.counts.passes += *std::max_element(of_bank, of_bank + BANKS);
    i.counts.least_passes++;
  }
}

void count_global(const Instruction &i, const uint64_t *at, uint32_t mask, unsigned bytes) {
  uint64_t sectors[32], starts[32];
  unsigned n = 0;
  lanes(mask, [&](unsigned l) { sectors[n] = at[l] / SECTOR, starts[n++] = at[l]; });
  i.counts.sectors += unique(sectors, n);
  i.counts.least_sectors += (unique(starts, n) * bytes + SECTOR - 1) / SECTOR;
}

} // namespace

bool traffic_counted;
void begin_counts(const Program &p) {
  traffic_counted = file();
  if (traffic_counted)
    for (const Instruction &i : p.code) i.counts = {};
}

void count(Warp &w, const Instruction &i) {
  i.counts.runs++;
  for (const Access &a : i.accesses) {
    uint64_t at[32] = {};
    const uint32_t place = i.at[a.operand];
    lanes(w.now, [&](unsigned l) {
      at[l] = (a.width == LONG ? w.at<uint64_t>(place)[l] : w.at<uint32_t>(place)[l]) + (uint64_t)i.offset;
    });
    const uint64_t start = (uint64_t)w.block->shared.data(), first = at[__builtin_ctz(w.now)];
    if (a.space == Space::ANY && first - start < w.block->shared_bytes) {
      for (uint64_t &v : at) v -= start;
      count_shared(i, at, w.now, a.bytes);
    } else if (a.space == Space::SHARED) {
      count_shared(i, at, w.now, a.bytes);
    } else {
      count_global(i, at, w.now, a.bytes);
    }
  }
}

void write_counts(const Kernel &kernel, const std::string &symbol, const Program &p) {
  FILE *f = fopen(file(), "a");
  if (!f) throw Fault(format("cannot write %s (ULYSSES_EMULATED_TRAFFIC)", file()));
  for (const Instruction &i : p.code) {
    const Counts &c = i.counts;
    if (c.runs)
      fprintf(f, "%s\t%s\t%u\t%s\t%s\t%llu\t%llu\t%llu\t%llu\t%llu\n", kernel.name, symbol.c_str(), i.line,
              i.source.empty() ? "-" : i.source.c_str(), i.name.c_str(), (unsigned long long)c.runs,
              (unsigned long long)c.passes, (unsigned long long)c.least_passes, (unsigned long long)c.sectors,
              (unsigned long long)c.least_sectors);
  }
  fclose(f);
}

} // namespace ptx
} // namespace uly_emulated
