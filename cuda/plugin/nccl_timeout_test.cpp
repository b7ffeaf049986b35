// Tests of nccl_timeout.h, which a Go test compiles and runs.
#include "nccl_timeout.h"

#include <math.h>
#include <stdio.h>

#include <initializer_list>

static int failures;
#define CHECK(ok)                                         \
  do {                                                    \
    if (!(ok)) {                                          \
      printf("line %d: not so: %s\n", __LINE__, #ok);     \
      failures++;                                         \
    }                                                     \
  } while (0)

int main() {
  auto near = [](double x, double y) { return fabs(x - y) < 1e-9; };
  CHECK(near(nccl_seconds("10m", 7), 600) && near(nccl_seconds("1h30m", 7), 5400) && near(nccl_seconds("2.5s", 7), 2.5) && near(nccl_seconds("1m0s", 7), 60));
  CHECK(near(nccl_seconds("300ms", 7), 0.3) && nccl_seconds("0", 7) == 0 && nccl_seconds("0s", 7) == 0);
  for (const char *wrong : {"", "ten", "10", "10 m", "-3s", "3s x", "1e3s", "0x10s"}) CHECK(nccl_seconds(wrong, 7) == 7);
  CHECK(nccl_seconds(nullptr, 7) == 7);
  if (!failures) printf("ok\n");
  return failures != 0;
}
