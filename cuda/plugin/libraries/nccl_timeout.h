// Timeouts of collectives. The file includes neither NCCL nor CUDA; nccl_timeout_test.cpp tests it
// on the host.
#pragma once

#include <ctype.h>
#include <stdint.h>
#include <string.h>

#include <deque>

// nccl_seconds parses ULYSSES_TIMEOUT and returns seconds: a duration in Go's format ("10m",
// "+1h30m", "2.5s", "300ms"), or "off". 0 means no timeout. It returns `otherwise` for NULL, "",
// "auto" and invalid text.
inline double nccl_seconds(const char *text, double otherwise) {
  if (!text || !*text) return otherwise;
  if (!strcmp(text, "off")) return 0;
  if (*text == '+') text++;
  if (!strcmp(text, "0")) return 0;
  if (!*text) return otherwise;
  double sum = 0;
  while (*text) {
    const char *end = text;
    double x = 0, place = 1;
    for (; isdigit(static_cast<unsigned char>(*end)); end++) x = x * 10 + (*end - '0');
    if (*end == '.')
      for (end++; isdigit(static_cast<unsigned char>(*end)); end++) x += (place /= 10) * (*end - '0');
    if (end == text) return otherwise;
    static const struct {
      const char *name;
      double seconds;
    } units[] = {{"ms", 1e-3}, {"us", 1e-6}, {"ns", 1e-9}, {"h", 3600}, {"m", 60}, {"s", 1}};
    double scale = -1;
    for (const auto &u : units) {
      if (strncmp(end, u.name, strlen(u.name)) == 0) {
        scale = u.seconds;
        text = end + strlen(u.name);
        break;
      }
    }
    if (scale < 0) return otherwise;
    sum += x * scale;
  }
  return sum;
}

// nccl_poll_pause returns the microseconds that a thread sleeps after it has polled NCCL for
// `waited` seconds; 0: it yields. NCCL enqueues a group in a thread of its own, by estimate in some
// tens of microseconds, and a sleep takes longer. A first group makes connections.
inline int64_t nccl_poll_pause(double waited) {
  if (waited < 1e-3) return 0;
  return waited < 50e-3 ? 50 : 2000;
}

// Collective is an operation of a stream between two events. An event that is 0 has not been
// created yet.
template <class Mark> struct Collective {
  Mark before{}, after{};
  const char *what = "";
};

// PendingCollectives has the operations of a stream that have not completed, the oldest first, and
// events for reuse.
template <class Mark> class PendingCollectives {
 public:
  Collective<Mark> acquire(const char *what) {
    Collective<Mark> x;
    if (!spare.empty()) {
      x = spare.back();
      spare.pop_back();
    }
    x.what = what;
    return x;
  }
  void release(const Collective<Mark> &x) { spare.push_back(x); }
  void enqueued(const Collective<Mark> &x) { waiting.push_back(x); }

  // update removes the operations that the stream has completed. It returns the seconds for which
  // calls of update have found the oldest operation started but not completed. Before an operation
  // starts, it waits for this rank's own work, which has no time limit.
  template <class Reached> double update(double now, Reached reached) {
    while (!waiting.empty() && reached(waiting.front().after)) {
      spare.push_back(waiting.front());
      waiting.pop_front();
      since = -1;
    }
    if (waiting.empty() || !reached(waiting.front().before)) return 0;
    if (since < 0) since = now;
    return now - since;
  }
  const char *oldest() const { return waiting.empty() ? "" : waiting.front().what; }

  template <class F> void each(F f) {
    for (auto *list : {&waiting, &spare})
      for (auto &x : *list) f(x);
  }

 private:
  std::deque<Collective<Mark>> waiting, spare;
  double since = -1; // when update first found the oldest operation started; < 0: not started
};
