// Barriers of some of the warps of a block (bar.sync and bar.arrive). All lanes of a warp come
// together, as the instructions require. The count of the last warp ends the round.
#include "blocks.h"

namespace uly_emulated {

static void end_round(Partial &p) {
  for (unsigned w : p.warps) join(&block.warp[w].seen, p.seen);
  Steps order(p.waiting.size());
  for (unsigned i = 0; i < p.waiting.size(); i++) block.ready.push_back(p.waiting[(size_t)order(i)]);
  p.waiting.clear(), p.warps.clear();
  p.arrived = p.threads = p.came = 0;
  p.seen = {};
  p.round++;
}

void partial_barrier(int number, int threads, bool wait, const char *file, int line) {
  const unsigned me = block.current, warp = me >> 5;
  Warp &w = block.warp[warp];
  exchange(0xffffffffu, 0, wait ? "bar.sync" : "bar.arrive", file, line);
  if (number < 0 || number > 15 || threads < 32 || threads % 32 || (unsigned)threads > block.threads)
    fail(format("%s: barrier %d for %d of %u threads", where(file, line).c_str(), number, threads, block.threads));
  Partial &p = block.partial[number];
  if (w.partial != w.exchanges) { // the first lane counts its warp
    w.partial = w.exchanges;
    if (p.threads && p.threads != (unsigned)threads)
      fail(format("warp %u comes to barrier %d for %d threads at %s, others for %u at %s", warp, number, threads,
                  where(file, line).c_str(), p.threads, where(p.file, p.line).c_str()));
    if (p.came >> warp & 1)
      fail(
          format("warp %u comes to barrier %d of %s twice before the others", warp, number, where(file, line).c_str()));
    p.came |= 1u << warp;
    p.threads = (unsigned)threads, p.file = file, p.line = line;
    w.ticket = p.round;
    w.seen[warp]++;
    join(&p.seen, w.seen);
    if (wait) p.warps.push_back(warp);
    p.arrived += 32;
    if (p.arrived >= p.threads) end_round(p);
  }
  if (!wait || p.round != w.ticket) return;
  p.waiting.push_back(me);
  suspend();
}

std::string partial_deadlock() {
  for (int i = 0; i < 16; i++) {
    const Partial &p = block.partial[i];
    if (!p.waiting.empty())
      return format("%zu threads wait at barrier %d of %s, where %u of %u have arrived", p.waiting.size(), i,
                    where(p.file, p.line).c_str(), p.arrived, p.threads);
  }
  return "";
}

std::string partial_rest() {
  for (int i = 0; i < 16; i++)
    if (const Partial &p = block.partial[i]; p.arrived) {
      const std::string text = format("%u threads have arrived at barrier %d of %s, for which no thread waits",
                                      p.arrived, i, where(p.file, p.line).c_str());
      reset_partial();
      return text;
    }
  return "";
}

void reset_partial() {
  for (Partial &p : block.partial) p = {};
}

} // namespace uly_emulated
