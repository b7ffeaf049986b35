// Apart from NCCL, so that it can be tested on the host.
#pragma once

#include <ctype.h>
#include <stdint.h>
#include <string.h>

#include <deque>

// nccl_seconds reads a duration as Go writes it ("10m", "1h30m", "2.5s", "300ms"); 0 is without
// end; `otherwise` is for nothing and nonsense.
inline double nccl_seconds(const char *text, double otherwise) {
  if (!text || !*text) return otherwise;
  if (!strcmp(text, "0")) return 0;
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

// Exchange is what a stream was told, between two marks; 0 is a mark that has still to be made.
template <class Mark> struct Exchange {
  Mark before{}, after{};
  const char *what = "";
};

// Exchanges are those of a stream that have not ended, the oldest first, and marks to use again.
template <class Mark> class Exchanges {
 public:
  Exchange<Mark> take(const char *what) {
    Exchange<Mark> x;
    if (!spare.empty()) {
      x = spare.back();
      spare.pop_back();
    }
    x.what = what;
    return x;
  }
  void give(const Exchange<Mark> &x) { spare.push_back(x); }
  void told(const Exchange<Mark> &x) { waiting.push_back(x); }

  // look forgets what the stream has come past, and returns for how long looks have found the
  // oldest exchange begun and not ended: what has not begun waits for this rank's own work, however
  // long that takes.
  template <class Passed> double look(double now, Passed passed) {
    while (!waiting.empty() && passed(waiting.front().after)) {
      spare.push_back(waiting.front());
      waiting.pop_front();
      since = -1;
    }
    if (waiting.empty() || !passed(waiting.front().before)) return 0;
    if (since < 0) since = now;
    return now - since;
  }
  const char *oldest() const { return waiting.empty() ? "" : waiting.front().what; }

  template <class F> void each(F f) {
    for (auto *list : {&waiting, &spare})
      for (auto &x : *list) f(x);
  }

 private:
  std::deque<Exchange<Mark>> waiting, spare;
  double since = -1; // when the oldest was first found begun; < 0: it was not
};
