// What lies around allocations, so that a kernel that leaves one is found.
//
// A red zone shows what was written there, after the kernel; allocations are aligned to 256 bytes
// then, as cudaMalloc promises, and to no more. With ULYSSES_EMULATED_GUARD the kernel is stopped
// where it writes or reads: the end of every allocation touches a page that nobody may touch, as
// closely as alignment to that many bytes lets it (1: always), or, with -1, its start.
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "heap.h"
#include "settings.h"

namespace uly_emulated {

Heap heap;

static const uint16_t zone_value = 0xffa5; // a NaN in f32 and in bf16

void lay(Allocation *a) {
  const int64_t guard = setting("ULYSSES_EMULATED_GUARD", 0);
  if (guard < 0) {
    a->lead = 2 * page;
    a->mapped = pages(a->lead + a->bytes + zone);
  } else if (guard > 0) {
    const size_t whole = (a->bytes + (size_t)guard - 1) / (size_t)guard * (size_t)guard;
    a->mapped = pages(page + zone + whole);
    a->lead = a->mapped - whole;
  } else {
    a->lead = page + zone;
    a->mapped = pages(a->lead + a->bytes + zone);
  }
}

// The page before an allocation that begins with one is a fence; behind the last page nothing is
// mapped.
static bool guarded_before(const Allocation &a) { return a.lead == 2 * page; }
static size_t zone_before(const Allocation &a) { return guarded_before(a) ? 0 : (size_t)zone; }
static size_t zone_behind(const Allocation &a) {
  return a.mapped - a.lead - a.bytes < zone ? a.mapped - a.lead - a.bytes : (size_t)zone;
}

static const char *pattern() {
  static char whole[zone];
  static const bool made = [] {
    for (size_t i = 0; i < zone; i += 2) memcpy(whole + i, &zone_value, 2);
    return true;
  }();
  (void)made;
  return whole;
}

void fence(char *p, const Allocation &a) {
  if (guarded_before(a)) mprotect(p - page, page, PROT_NONE);
  if (a.offset < 0) return; // its process has made the zones
  memcpy(p - zone_before(a), pattern(), zone_before(a));
  memcpy(p + a.bytes, pattern(), zone_behind(a));
}

std::string broken(char *p, const Allocation &a) {
  struct {
    char *at;
    size_t n;
  } zones[2] = {{p - zone_before(a), zone_before(a)}, {p + a.bytes, zone_behind(a)}};
  std::string text;
  for (auto &z : zones) {
    if (!memcmp(z.at, pattern(), z.n)) continue;
    // asked for behind the look: what is freed reads as zeros, which nobody wrote
    if (a.gone(p)) return "";
    size_t i = 0;
    while (z.at[i] == pattern()[i]) i++;
    if (text.empty())
      text = format("wrote at byte %lld of an allocation of %zu bytes", (long long)(z.at + i - p), a.bytes);
    memcpy(z.at, pattern(), z.n);
  }
  if (int32_t pid = text.empty() ? 0 : mapper(p, a)) text += format(", unless process %d did, which has it too", pid);
  return text;
}

int32_t mapper(char *p, const Allocation &a) {
  auto alive = [&](int32_t pid) { return pid && pid != (int32_t)getpid() && kill(pid, 0) == 0; };
  Notice *n = a.notice(p);
  if (int32_t pid = n->owner; a.offset < 0 && alive(pid)) return pid;
  for (auto &m : n->mapper)
    if (int32_t pid = m; alive(pid)) return pid;
  return 0;
}

std::string check_red_zones() {
  std::string text;
  for (auto &[p, a] : heap.all) {
    std::string t = broken(p, a);
    if (text.empty()) text = t;
  }
  return text;
}

std::string describe(const void *v) {
  auto *p = static_cast<char *>(const_cast<void *>(v));
  auto next = heap.all.upper_bound(p), it = next;
  if (it != heap.all.begin()) --it;
  // the nearer one
  if (next != heap.all.end() && (it == next || next->first - p < p - (it->first + (int64_t)it->second.bytes)))
    it = next;
  const bool near = it != heap.all.end() && p >= it->first - it->second.lead && p < it->first + it->second.mapped;
  if (!near && !in_heap(v)) return format("address %p, which is no device memory", v);
  if (it == heap.all.end()) return format("address %p, in memory that has been freed", v);
  return format(
      "address %p, %lld bytes from the start of an allocation of %zu bytes and in none, or in memory that has been "
      "freed",
      v, (long long)(p - it->first), it->second.bytes);
}

} // namespace uly_emulated
