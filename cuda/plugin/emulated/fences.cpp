// Detection of accesses outside of allocations.
//
// By default, red zones around each allocation show, after the kernel, what was written there;
// allocations are then aligned to exactly 256 bytes, as cudaMalloc guarantees. With
// ULYSSES_EMULATED_GUARD, the access itself stops the kernel: with n > 0, the end of every
// allocation, aligned to n bytes, touches a page without access; with -1, its start does.
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "heap.h"
#include "settings.h"

namespace uly_emulated {

Heap heap;

static const uint16_t zone_value = 0xffa5; // NaN in F32 and in BF16

void set_layout(Allocation *a) {
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

// If an allocation begins at the start of a page, the page before it has no access. No page is
// mapped behind the last page.
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

void make_fences(char *p, const Allocation &a) {
  if (guarded_before(a)) mprotect(p - page, page, PROT_NONE);
  if (a.offset < 0) return; // the process of the allocation has written the zones
  memcpy(p - zone_before(a), pattern(), zone_before(a));
  memcpy(p + a.bytes, pattern(), zone_behind(a));
}

Foreign::Foreign(int device) {
  for (auto &[p, a] : heap.all) {
    if (a.place != Place::device || has_access(device, a.device)) continue;
    mprotect(p - a.lead, a.mapped, PROT_NONE);
    a.hidden = true;
  }
}
Foreign::~Foreign() {
  for (auto &[p, a] : heap.all) {
    if (!a.hidden) continue;
    a.hidden = false;
    mprotect(p - a.lead, a.mapped, PROT_READ | PROT_WRITE);
    if (guarded_before(a)) mprotect(p - page, page, PROT_NONE);
  }
}

std::string check_fences(char *p, const Allocation &a) {
  struct {
    char *at;
    size_t n;
  } zones[2] = {{p - zone_before(a), zone_before(a)}, {p + a.bytes, zone_behind(a)}};
  std::string text;
  for (auto &z : zones) {
    if (!memcmp(z.at, pattern(), z.n)) continue;
    // Checked after the comparison: freed memory reads as zeros, which no kernel wrote.
    if (a.gone(p)) return "";
    size_t i = 0;
    while (z.at[i] == pattern()[i]) i++;
    if (text.empty())
      text = format("wrote at byte %lld of an allocation of %zu bytes", (long long)(z.at + i - p), a.bytes);
    memcpy(z.at, pattern(), z.n);
  }
  if (int32_t pid = text.empty() ? 0 : other_mapper(p, a))
    text += format(", or process %d did, which maps the memory as well", pid);
  return text;
}

int32_t other_mapper(char *p, const Allocation &a) {
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
    std::string t = check_fences(p, a);
    if (text.empty()) text = t;
  }
  return text;
}

std::string describe(const void *v) {
  auto *p = static_cast<char *>(const_cast<void *>(v));
  auto next = heap.all.upper_bound(p), it = next;
  if (it != heap.all.begin()) --it;
  // the nearer of the two allocations
  if (next != heap.all.end() && (it == next || next->first - p < p - (it->first + (int64_t)it->second.bytes)))
    it = next;
  const bool near = it != heap.all.end() && p >= it->first - it->second.lead && p < it->first + it->second.mapped;
  if (!near && !in_heap(v)) return format("address %p, which is not device memory", v);
  if (it == heap.all.end()) return format("address %p, in memory that has been freed", v);
  if (p >= it->first && p < it->first + it->second.bytes)
    return format("address %p, in memory of device %d, to which this device has no access (cudaDeviceEnablePeerAccess)",
                  v, it->second.device);
  return format(
      "address %p, %lld bytes from the start of an allocation of %zu bytes, outside of all allocations or in freed "
      "memory",
      v, (long long)(p - it->first), it->second.bytes);
}

} // namespace uly_emulated
