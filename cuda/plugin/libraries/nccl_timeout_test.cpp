// Tests of nccl_timeout.h. cuda/headers_test.go compiles and runs them.
#include "nccl_timeout.h"

#include "host_test.h"

#include <math.h>

#include <initializer_list>

int main() {
  auto near = [](double x, double y) { return fabs(x - y) < 1e-9; };
  CHECK(near(nccl_seconds("10m", 7), 600) && near(nccl_seconds("1h30m", 7), 5400) &&
        near(nccl_seconds("2.5s", 7), 2.5) && near(nccl_seconds("1m0s", 7), 60));
  CHECK(near(nccl_seconds("300ms", 7), 0.3) && nccl_seconds("0", 7) == 0 && nccl_seconds("0s", 7) == 0);
  CHECK(nccl_seconds("off", 7) == 0 && nccl_seconds("+0", 7) == 0 && near(nccl_seconds("+1m", 7), 60));
  for (const char *wrong : {"", "auto", "ten", "10", "10 m", "-3s", "+", "++3s", "3s x", "1e3s", "0x10s"})
    CHECK(nccl_seconds(wrong, 7) == 7);
  CHECK(nccl_seconds(nullptr, 7) == 7);

  CHECK(nccl_poll_pause(0) == 0 && nccl_poll_pause(0.9e-3) == 0); // a thread that sleeps wakes up late
  CHECK(nccl_poll_pause(2e-3) == 50 && nccl_poll_pause(0.1) == 2000);

  int at = 0; // the last event that the stream has reached
  auto passed = [&](int mark) { return mark <= at; };
  PendingCollectives<int> x;
  CHECK(x.update(0, passed) == 0 && x.acquire("").before == 0);
  x.enqueued({10, 11, "first"});
  x.enqueued({20, 21, "second"});
  at = 9; // long work of this rank comes first
  CHECK(x.update(1000, passed) == 0 && x.update(2000, passed) == 0);
  at = 10;
  CHECK(x.update(2100, passed) == 0 && x.update(2130, passed) == 30 && !strcmp(x.oldest(), "first"));
  at = 19; // the first operation has completed; its time does not count for the second
  CHECK(x.update(2140, passed) == 0 && !strcmp(x.oldest(), "second"));
  at = 20;
  CHECK(x.update(2200, passed) == 0 && x.update(2207, passed) == 7);
  at = 21;
  CHECK(x.update(2300, passed) == 0 && !*x.oldest());
  int marks = 0;
  x.each([&](const Collective<int> &) { marks++; });
  CHECK(marks == 2);
  Collective<int> again = x.acquire("third");
  CHECK(again.before && again.after && !strcmp(again.what, "third"));
  return test_status();
}
