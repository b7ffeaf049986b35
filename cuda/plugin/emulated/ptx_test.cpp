// Kernels that run as the PTX instructions of ptx/testdata. Their C++ is not run.
#include <math.h>
#include <stdlib.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "emulated_test.h"

extern "C" {
__global__ void ptx_branches(int *x) { *x = -1; }
__global__ void ptx_faults(float *, int) {}
__global__ void ptx_values(float *y, float, float) { *y = -1; }
__global__ void ptx_traffic(int *) {}
__global__ void ptx_races(void *, int) {}
__global__ void ptx_unknown(int) {}
__global__ void ptx_absent(int) {}
}

static void values_of(float a, float b, std::vector<float> want) {
  Stream *s = stream();
  float *y = device<float>(8);
  LAUNCH(ptx_values, 1, 32, 0, s, y, a, b);
  const std::vector<float> got = read(s, y, 6);
  FINE(cudaStreamSynchronize(s->s));
  for (size_t i = 0; i < want.size(); i++) {
    const bool approximate = i < 2 && fabsf(got[i] - want[i]) <= fabsf(want[i]) * 0x1p-22f;
    EXPECT(approximate || got[i] == want[i] || (got[i] != got[i] && want[i] != want[i]),
           "value %zu of %g, %g: %.9g, want %.9g", i, a, b, got[i], want[i]);
  }
}

// counts_of_traffic runs a kernel with accesses of different patterns. It sums up the columns of
// the emulator's file by instruction: runs, passes, least, sectors, least.
static void counts_of_traffic() {
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() / ("ulysses-traffic-" + std::to_string(getpid()));
  setenv("ULYSSES_EMULATED_TRAFFIC", file.c_str(), 1);
  Stream *s = stream();
  LAUNCH(ptx_traffic, 2, 32, 4096, s, device<int>(256));
  FINE(cudaStreamSynchronize(s->s));
  unsetenv("ULYSSES_EMULATED_TRAFFIC");
  std::map<std::string, std::array<long, 5>> got;
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string kernel, symbol, at, source, name;
    words >> kernel >> symbol >> at >> source >> name;
    EXPECT(symbol == "ptx_traffic" && source == "-", "a line of %s in %s", symbol.c_str(), source.c_str());
    for (long &sum : got[name]) {
      long n = -1;
      words >> n;
      sum += n;
    }
  }
  std::filesystem::remove(file);
  const std::map<std::string, std::array<long, 5>> want = {
      {"st.shared.u32", {4, 2 * (1 + 2), 4, 0, 0}},   // 4 and 8 bytes apart
      {"ld.shared.u32", {4, 2 * (32 + 1), 4, 0, 0}},  // 128 bytes apart, and one address
      {"st.shared.v4.u32", {2, 2 * 4, 8, 0, 0}},      // 16 bytes apart
      {"ld.shared.v4.u32", {2, 2 * 8, 8, 0, 0}},      // 32 bytes apart
      {"ld.global.u32", {4, 0, 0, 2 * (4 + 32), 16}}, // 4 and 32 bytes apart
      {"st.global.u32", {2, 0, 0, 2, 2}},             // eight lanes
      {"ld.u32", {2, 2, 2, 0, 0}},                    // shared memory by a general address
  };
  for (auto &[name, counts] : want)
    for (int i = 0; i < 5; i++)
      EXPECT(got[name][i] == counts[i], "%s: column %d is %ld, want %ld", name.c_str(), i, got[name][i], counts[i]);
}

// races_in_shared_memory runs kernels with races, which are found whatever the order of the warps,
// and at last one whose accesses are ordered.
static void races_in_shared_memory() {
  const std::vector<const char *> unordered = {"nothing orders it and the"}; // which comes first is random
  const std::vector<const char *> words[] = {
      {"reads byte", "nothing orders it and the write of thread", "with st.shared.u32 in line"},
      unordered,
      unordered,
      {"writes byte", "nothing orders it and the read of"},
      {"reads byte", "during the copy of", "cp.async.cg.shared.global"},
      {"reads byte", "nothing orders it and the write of"},
      {"reads byte", "without fence.proxy.async behind the write of"},
      {"reads byte", "without fence.proxy.async behind the write of"},
      {"writes byte", "during the product of warp"},
      unordered,
      unordered,
      {"a race: "},
      {"writes byte", "nothing orders it and the write of"},
      {"before it has waited for a product"}};
  setenv("ULYSSES_EMULATED_RACES", "1", 1);
  void *x = device<int>(8);
  int n = 0;
  for (auto w : words) {
    Stream *s = stream();
    LAUNCH(ptx_races, 1, n == 8 ? 32 : 256, 8192, s, x, n); // the product of one warp
    n++;
    w.push_back("kernel ptx_races");
    fails(s, cudaErrorLaunchFailure, w);
  }
  Stream *s = stream();
  LAUNCH(ptx_races, 2, 256, 8192, s, x, n);
  FINE(cudaStreamSynchronize(s->s));
  unsetenv("ULYSSES_EMULATED_RACES");
}

void ptx_instructions() {
  counts_of_traffic();
  races_in_shared_memory();
  Stream *s = stream();
  int *x = device<int>(32);
  LAUNCH(ptx_branches, 1, 32, 0, s, x);
  const std::vector<int> got = read(s, x, 32);
  FINE(cudaStreamSynchronize(s->s));
  int sum = 0;
  for (int l = 0; l < 32; l++) sum += l * (l - 1) / 2;
  for (int l = 0; l < 32; l++) EXPECT(got[l] == l * (l - 1) / 2 + sum, "lane %d: %d", l, got[l]);

  // div.approx, ex2.approx.ftz, fma.rm (·, ·, 1), max, cvt.sat, shl by more than 31
  values_of(0, 0x1p-30f, {0, 1, 1, 0x1p-30f, 0, 0});
  values_of(1, 0x1p127f, {0, 2, 0x1p127f, 0x1p127f, 1, 0}); // a divisor beyond 2^126
  values_of(INFINITY, 0x1p127f, {NAN, INFINITY, INFINITY, INFINITY, 1, 0});
  values_of(-0x1p-20f, 0x1p-20f, {-1, exp2f(-0x1p-20f), 1 - 0x1p-24f, 0x1p-20f, 0, 0}); // rounded down
  values_of(-127, NAN, {NAN, 0, NAN, -127, 0, 0});                                      // a denormal result

  float *y = device<float>(100);
  const std::vector<const char *> words[] = {{"lanes ffff0000", "needs ffffffff"},
                                             {"4 bytes at address", "not device memory"},
                                             {"4 bytes at address", "400 bytes from the start"},
                                             {"not a multiple of 16 bytes"},
                                             {"before it has waited for a copy"},
                                             {"division by zero"},
                                             {"no warp can continue: 1 -"},
                                             {"4 bytes at 1088 in shared memory, which ends at 1088"},
                                             {"lanes fffffff0"},
                                             {"a trap"}};
  int n = 0;
  for (auto w : words) {
    s = stream();
    LAUNCH(ptx_faults, 1, n == 6 ? 64 : 32, 64, s, y, n);
    n++;
    w.push_back("ptx_faults");
    fails(s, cudaErrorLaunchFailure, w);
  }
  LAUNCH(ptx_unknown, 1, 32, 0, s = stream(), 0);
  fails(s, cudaErrorLaunchFailure, {"cases.ptx", "an unknown instruction: brev.b32"});
  LAUNCH(ptx_absent, 1, 32, 0, s = stream(), 0);
  fails(s, cudaErrorLaunchFailure, {"no instructions of ptx_absent"});
}
