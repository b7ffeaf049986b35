// What the emulator promises: programs that are right give one result in every order, and those that are not are found. Each case is run by
// name from cuda/emulated_test.go, with several seeds.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "cuda.h"

struct Stream { cudaStream_t s = nullptr; };
enum : unsigned { all = 0xffffffffu };

#define EXPECT(condition, ...)                                     \
  do {                                                             \
    if (!(condition)) {                                            \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);       \
      printf("" __VA_ARGS__);                                      \
      printf("\n");                                                \
      exit(1);                                                     \
    }                                                              \
  } while (0)
#define FINE(call)                                                                     \
  do {                                                                                 \
    cudaError_t fine_e = (call);                                                       \
    EXPECT(fine_e == cudaSuccess, "%s: %s", #call, cudaGetErrorString(fine_e));        \
  } while (0)

static Stream *stream() {
  auto *s = new Stream;
  FINE(cudaStreamCreateWithFlags(&s->s, cudaStreamNonBlocking));
  return s;
}
static cudaEvent_t event(unsigned flags = cudaEventDisableTiming) {
  cudaEvent_t e;
  FINE(cudaEventCreateWithFlags(&e, flags));
  return e;
}
template <class T> T *device(size_t n) {
  T *p;
  FINE(cudaMalloc(&p, n * sizeof(T)));
  return p;
}
template <class T> std::vector<T> read(Stream *s, const T *p, size_t n) {
  std::vector<T> v(n);
  FINE(cudaMemcpyAsync(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost, s->s));
  return v;
}

// fails expects that s has failed, and that the sentence names what is to be named.
static void fails(Stream *s, cudaError_t code, std::vector<const char *> words) {
  cudaError_t e = cudaStreamSynchronize(s->s);
  EXPECT(e == code, "%s: %s", cudaGetErrorName(e), cudaGetErrorString(e));
  std::string text = cudaGetErrorString(e);
  for (const char *w : words) EXPECT(text.find(w) != std::string::npos, "'%s' is not in '%s'", w, text.c_str());
  EXPECT(cudaStreamSynchronize(s->s) == code, "the failure of a stream stays");
  cudaGetLastError();
}

// --- values -----------------------------------------------------------------------------------------------------------------------------
__global__ void sums(const float *x, float *y, int64_t n) { // a block sums a row, by shuffles and shared memory
  __shared__ float part[32];
  float s = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) s += x[blockIdx.x * n + i];
  for (int d = 16; d; d >>= 1) s += __shfl_xor_sync(all, s, d);
  if ((threadIdx.x & 31) == 0) part[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x < 32) {
    s = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0;
    for (int d = 16; d; d >>= 1) s += __shfl_down_sync(all, s, d);
    if (threadIdx.x == 0) y[blockIdx.x] = s;
  }
}

__global__ void lanes(int *y) {
  int lane = threadIdx.x & 31, *row = y + threadIdx.x * 8;
  row[0] = __shfl_sync(all, lane * 10, 7);
  row[1] = __shfl_up_sync(all, lane, 3);
  row[2] = __shfl_down_sync(all, lane, 3, 8);
  row[3] = (int)__ballot_sync(all, lane % 3 == 0);
  row[4] = __any_sync(all, lane == 31) + 2 * __all_sync(all, lane < 31);
  row[5] = __syncthreads_count(threadIdx.x % 5 == 0);
  row[6] = __syncthreads_or(threadIdx.x == 63) + 2 * __syncthreads_and(threadIdx.x < 63);
  row[7] = (int)__shfl_xor_sync(all, (double)lane, 1);
}

__global__ void grid3(int *y) {
  unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z), t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  atomicAdd(&y[b * 64 + t], (int)(100 * b + t));
}

static void values() {
  Stream *s = stream();
  std::vector<float> x(7 * 1000);
  for (size_t i = 0; i < x.size(); i++) x[i] = (float)(i % 17);
  float *dx = device<float>(x.size()), *dy = device<float>(7);
  for (float f : read(s, dx, x.size())) EXPECT(f != f, "fresh memory is NaN");
  FINE(cudaMemcpyAsync(dx, x.data(), x.size() * 4, cudaMemcpyHostToDevice, s->s));
  for (unsigned block : {32u, 256u, 1024u}) {
    LAUNCH(sums, 7, block, 0, s, dx, dy, 1000);
    FINE(cudaGetLastError());
    auto y = read(s, dy, 7);
    for (int r = 0; r < 7; r++) {
      float want = 0;
      for (int i = 0; i < 1000; i++) want += x[(size_t)r * 1000 + (size_t)i];
      EXPECT(y[(size_t)r] == want, "row %d: %g, not %g", r, y[(size_t)r], want);
    }
  }
  int *dl = device<int>(64 * 8);
  LAUNCH(lanes, 1, 64, 0, s, dl);
  auto l = read(s, dl, 64 * 8);
  for (int t = 0; t < 64; t++) {
    int lane = t & 31, *row = &l[(size_t)t * 8];
    EXPECT(row[0] == 70 && row[1] == (lane < 3 ? lane : lane - 3) && row[2] == (lane % 8 + 3 < 8 ? lane + 3 : lane), "lane %d", lane);
    EXPECT((unsigned)row[3] == 0x49249249u && row[4] == 1 && row[5] == 13 && row[6] == 1 && row[7] == (lane ^ 1), "lane %d", lane);
  }
  int *dg = device<int>(24 * 64);
  FINE(cudaMemsetAsync(dg, 0, 24 * 64 * 4, s->s));
  LAUNCH(grid3, dim3(2, 3, 4), dim3(4, 4, 4), 0, s, dg);
  auto g = read(s, dg, 24 * 64);
  for (int i = 0; i < 24 * 64; i++) EXPECT(g[(size_t)i] == 100 * (i / 64) + i % 64, "%d", i);
  // A large memset gives pages back and is zero all the same, up to its ends.
  size_t n = (8 << 20) + 12345;
  char *big = device<char>(n);
  FINE(cudaMemsetAsync(big + 1001, 0, n - 2002, s->s));
  auto b = read(s, big, n);
  for (size_t i = 0; i < n; i++) EXPECT((b[i] == 0) == (i >= 1001 && i < n - 1001), "byte %zu", i);
  FINE(cudaFree(big));
}

static void roundings() {
  for (uint32_t u = 0; u < 65536; u++) {
    __nv_bfloat16 b = __ushort_as_bfloat16((unsigned short)u);
    float f = __bfloat162float(b);
    if (f != f) {
      float again = __bfloat162float(__float2bfloat16(f));
      EXPECT(again != again, "a NaN stays");
      continue;
    }
    EXPECT(__bfloat16_as_ushort(__float2bfloat16(f)) == u, "bf16 %04x", u);
    __half h = __ushort_as_half((unsigned short)u);
    float e = __half2float(h);
    if (e != e) EXPECT((__half_as_ushort(__float2half(e)) & 0x7fff) > 0x7c00, "a NaN stays");
    else EXPECT(__half_as_ushort(__float2half(e)) == u, "half %04x", u);
    if ((u & 0x7fff) >= 0x7bff || (u & 0x7fff) >= 0x7f7f) continue;
    // half way to the next value: to the even one; a little beside it: to the nearer
    float fn = __bfloat162float(__ushort_as_bfloat16((unsigned short)(u + 1))), en = __half2float(__ushort_as_half((unsigned short)(u + 1)));
    float fm = (float)(((double)f + fn) / 2), em = (float)(((double)e + en) / 2);
    unsigned even = u + (u & 1);
    EXPECT(__bfloat16_as_ushort(__float2bfloat16(fm)) == even, "bf16 between %04x and the next", u);
    EXPECT(__bfloat16_as_ushort(__float2bfloat16(nextafterf(fm, f))) == u && __bfloat16_as_ushort(__float2bfloat16(nextafterf(fm, fn))) == u + 1, "bf16 %04x", u);
    EXPECT(__half_as_ushort(__float2half(em)) == even, "half between %04x and the next", u);
    EXPECT(__half_as_ushort(__float2half(nextafterf(em, e))) == u && __half_as_ushort(__float2half(nextafterf(em, en))) == u + 1, "half %04x", u);
  }
  EXPECT(__half_as_ushort(__float2half(65519.996f)) == 0x7bff && __half_as_ushort(__float2half(65520)) == 0x7c00, "half at its end");
  EXPECT(__bfloat16_as_ushort(__float2bfloat16(3.4e38f)) == 0x7f80, "bf16 at its end");
}

// --- barriers ---------------------------------------------------------------------------------------------------------------------------
template <bool barrier> __global__ void turn(float *x) { // reverses a block's values
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncthreads();
  x[threadIdx.x] = tile[127 - threadIdx.x];
}
template <bool barrier> __global__ void turn_dynamic(float *x) {
  SHARED(float, tile);
  tile[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncthreads();
  x[threadIdx.x] = tile[127 - threadIdx.x];
}
template <bool barrier> __global__ void turn_warps(float *x) {
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncwarp();
  x[threadIdx.x] = tile[(threadIdx.x & ~31u) + 31 - (threadIdx.x & 31)];
}
template <bool barrier> __global__ void rotate(float *x) { // one tile, used again and again
  __shared__ float tile[128];
  float v = x[threadIdx.x];
  for (int i = 0; i < 4; i++) {
    tile[threadIdx.x] = v;
    __syncthreads();
    v = tile[(threadIdx.x + 1) % 128];
    if (barrier) __syncthreads();
  }
  x[threadIdx.x] = v;
}
__global__ void next_block(float *x) { // a block reads what the next one writes
  if (threadIdx.x == 0) x[blockIdx.x * 32] = x[blockIdx.x * 32 + 32];
}
template <bool zeroed> __global__ void count(float *x) { // of shared memory that nobody has set
  __shared__ float n;
  if (zeroed) {
    if (threadIdx.x == 0) n = 0;
    __syncthreads();
  }
  atomicAdd(&n, 1.0f);
  __syncthreads();
  x[threadIdx.x] = n;
}

// right says in how many of 50 runs the kernel gave what it should.
template <class K, class W> int right(K kernel, W want) {
  Stream *s = stream();
  float *x = device<float>(128);
  int good = 0;
  for (int run = 0; run < 50; run++) {
    std::vector<float> v(128);
    for (int i = 0; i < 128; i++) v[(size_t)i] = (float)i;
    FINE(cudaMemcpyAsync(x, v.data(), 512, cudaMemcpyHostToDevice, s->s));
    LAUNCH(kernel, 1, 128, 512, s, x);
    v = read(s, x, 128);
    bool same = true;
    for (int i = 0; i < 128; i++) same &= v[(size_t)i] == want(i);
    good += same;
  }
  FINE(cudaFree(x));
  return good;
}

static void barriers() {
  auto turned = [](int i) { return (float)(127 - i); };
  auto warps = [](int i) { return (float)((i & ~31) + 31 - (i & 31)); };
  auto rotated = [](int i) { return (float)((i + 4) % 128); };
  auto counted = [](int) { return 128.0f; };
  EXPECT(right(turn<true>, turned) == 50 && right(turn<false>, turned) == 0, "__syncthreads");
  EXPECT(right(turn_dynamic<true>, turned) == 50 && right(turn_dynamic<false>, turned) == 0, "__syncthreads, dynamic shared memory");
  EXPECT(right(turn_warps<true>, warps) == 50 && right(turn_warps<false>, warps) == 0, "__syncwarp");
  EXPECT(right(rotate<true>, rotated) == 50 && right(rotate<false>, rotated) == 0, "the second barrier of a loop");
  EXPECT(right(count<true>, counted) == 50 && right(count<false>, counted) == 0, "shared memory without a start");
}

__global__ void leaves(int *x) {
  if (threadIdx.x >= 64) return;
  __syncthreads();
  x[threadIdx.x] = 1;
}
__global__ void forks(int *x) {
  if (threadIdx.x < 64) __syncthreads();
  else
    __syncthreads();
  x[threadIdx.x] = 1;
}
__global__ void half_a_warp(int *x) {
  if ((threadIdx.x & 31) < 16) x[threadIdx.x] = __shfl_xor_sync(all, 1, 1);
}
__global__ void masked(int *x) {
  if ((threadIdx.x & 31) < 16) x[threadIdx.x] = __shfl_xor_sync(0xffffu, 1, 1);
}
__global__ void mixed(int *x) { // lanes of one warp at different shuffles
  if (threadIdx.x & 1) x[threadIdx.x] = __shfl_xor_sync(all, 1, 1);
  else
    x[threadIdx.x] = __shfl_xor_sync(all, 2, 1);
}
__global__ void lost(int *x) { // one warp at a barrier, the other at a shuffle that is never complete
  if (threadIdx.x < 32) __syncthreads();
  else if (threadIdx.x < 48)
    x[0] = __shfl_xor_sync(all, 1, 1);
}

static void divergence() {
  int *x = device<int>(128);
  struct { void (*kernel)(int *); std::vector<const char *> words; } cases[] = {
      {leaves, {"leaves", "emulated_test.cpp", "64 of 128 threads wait at the barrier", "64 have ended"}},
      {forks, {"forks", "waits at the barrier of", "others at that of"}},
      {half_a_warp, {"half_a_warp", "16 lanes of warp", "__shfl_xor_sync"}},
      {masked, {"masked", "without all lanes", "0000ffff"}},
      {mixed, {"mixed", "others at the __shfl_xor_sync"}},
      {lost, {"lost"}},
  };
  const char *names[] = {"leaves", "forks", "half_a_warp", "masked", "mixed", "lost"};
  for (int round = 0; round < 10; round++) {
    int i = 0;
    for (auto &c : cases) {
      Stream *s = stream();
      uly_emulated::call(names[i++], __FILE__, __LINE__, c.kernel, 3, 128, 0, s->s, x);
      fails(s, cudaErrorLaunchFailure, c.words);
      FINE(cudaStreamDestroy(s->s));
      auto turned = [](int i) { return (float)(127 - i); };
      EXPECT(round || right(turn<true>, turned) == 50, "after a failure, others run");
    }
  }
}

// --- memory -----------------------------------------------------------------------------------------------------------------------------
__global__ void write_at(float *x, int64_t at) {
  if (threadIdx.x == 0) x[at] = 1;
}
__global__ void read_at(float *x, const float *from) {
  if (threadIdx.x == 5) x[0] = *from;
}
__global__ void write_shared(int64_t at) {
  SHARED(float, tile);
  if (threadIdx.x == 0) tile[at] = 1;
}
__global__ void read_shared(float *x, int64_t at) {
  SHARED(float, tile);
  if (threadIdx.x == 0) x[0] = tile[at];
}

// In a build that watches for races (-fsanitize=thread, races/races.cpp), each of these is found, in any order.
static void races() {
  float *x = device<float>(257);
  auto right = [](Stream *s) { FINE(cudaStreamSynchronize(s->s)); };
  auto wrong = [](Stream *s, const char *words) { fails(s, cudaErrorLaunchFailure, {words, "no barrier is between"}); };
  Stream *s;
#define CASE(kernel, blocks, shared, verdict, ...) s = stream(), LAUNCH(kernel, blocks, 128, shared, s, x), verdict(s, ##__VA_ARGS__)
  CASE(turn<true>, 1, 0, right);
  CASE(turn<false>, 1, 0, wrong, "__shared__ memory");
  CASE(turn_dynamic<true>, 1, 512, right);
  CASE(turn_dynamic<false>, 1, 512, wrong, "dynamic shared memory");
  CASE(turn_warps<true>, 1, 0, right);
  CASE(turn_warps<false>, 1, 0, wrong, "__shared__ memory");
  CASE(rotate<true>, 1, 0, right);
  CASE(rotate<false>, 1, 0, wrong, "__shared__ memory");
  CASE(turn<true>, 2, 0, wrong, "device memory"); // both blocks have one array
#undef CASE
  s = stream();
  LAUNCH(next_block, 1, 32, 0, s, x);
  right(s);
  LAUNCH(next_block, 7, 32, 0, s, x);
  wrong(s, "device memory");
}

template <class T> __global__ void write_as(char *x, int64_t at, T v) {
  if (threadIdx.x == 3) *reinterpret_cast<T *>(x + at) = v;
}
template <class T> __global__ void read_as(char *y, const char *x, int64_t at) {
  if (threadIdx.x != 3) return;
  const T v = *reinterpret_cast<const T *>(x + at);
  y[0] = (char)v.x;
}
__global__ void write_shared_as(int64_t at) {
  SHARED(char, tile);
  if (threadIdx.x == 0) *reinterpret_cast<double2 *>(tile + at) = make_double2(1, 2);
}

// Addresses suit their types, and memory is aligned as on a GPU, and no better: a host would not mind.
static void alignment() {
  char *x = device<char>(256), *y = device<char>(1);
  EXPECT((uintptr_t)x % 256 == 0 && (uintptr_t)x % 512 != 0, "%p", x);
  auto writes = [&](auto v, int64_t at) {
    Stream *s = stream();
    LAUNCH(write_as<decltype(v)>, 1, 32, 0, s, x, at, v);
    return s;
  };
  auto stops = [](Stream *s, const char *kernel, const char *multiple) { fails(s, cudaErrorLaunchFailure, {kernel, "emulated_test.cpp:", "which is no multiple of", multiple}); };
  FINE(cudaStreamSynchronize(writes(1.0f, 12)->s));
  FINE(cudaStreamSynchronize(writes(make_float4(1, 2, 3, 4), 48)->s));
  FINE(cudaStreamSynchronize(writes(__nv_bfloat16(1.0f), 6)->s));
  stops(writes(1.0f, 14), "write_as", "4 bytes");
  stops(writes(1.0, 12), "write_as", "8 bytes");
  stops(writes(make_float2(1, 2), 12), "write_as", "8 bytes");
  stops(writes(make_float4(1, 2, 3, 4), 8), "write_as", "16 bytes");
  stops(writes(__nv_bfloat16(1.0f), 5), "write_as", "2 bytes");
  Stream *s = stream();
  LAUNCH(read_as<uint4>, 1, 32, 0, s, y, x, 32);
  FINE(cudaStreamSynchronize(s->s));
  LAUNCH(read_as<uint4>, 1, 32, 0, s, y, x, 40);
  stops(s, "read_as", "16 bytes");
  s = stream();
  LAUNCH(write_shared_as, 1, 32, 256, s, 16);
  FINE(cudaStreamSynchronize(s->s));
  LAUNCH(write_shared_as, 1, 32, 256, s, 24);
  stops(s, "write_shared_as", "16 bytes");
}

static void bounds() {
  float *x = device<float>(101); // its end is not aligned to anything
  auto writes = [&](int64_t at) {
    Stream *s = stream();
    LAUNCH(write_at, 1, 32, 0, s, x, at);
    return s;
  };
  FINE(cudaStreamSynchronize(writes(0)->s));
  FINE(cudaStreamSynchronize(writes(100)->s));
  fails(writes(101), cudaErrorIllegalAddress, {"write_at", "byte 404", "404 bytes"});
  fails(writes(-1), cudaErrorIllegalAddress, {"write_at", "byte -4", "404 bytes"});
  fails(writes(150), cudaErrorIllegalAddress, {"byte 600"});
  Stream *s;
#ifdef __x86_64__
  fails(writes(1 << 20), cudaErrorLaunchFailure, {"write_at", "touched address", "4194304 bytes from the start of an allocation of 404 bytes"});
  float *gone = device<float>(101);
  FINE(cudaFree(gone));
  float *const nowhere[] = {nullptr, gone};
  for (float *from : nowhere) {
    s = stream();
    LAUNCH(read_at, 2, 64, 0, s, x, from);
    fails(s, cudaErrorLaunchFailure, {"read_at", "touched address"});
  }
#endif
  s = stream();
  LAUNCH(write_shared, 1, 32, 64, s, 15);
  FINE(cudaStreamSynchronize(s->s));
  LAUNCH(write_shared, 1, 32, 64, s, 16);
  fails(s, cudaErrorLaunchFailure, {"write_shared", "64 bytes of dynamic shared memory"});

  // What the host writes beside its memory is no kernel's doing.
  float *pinned;
  FINE(cudaMallocHost(&pinned, 400));
  pinned[100] = 1;
  fails(writes(0), cudaErrorIllegalAddress, {"before kernel write_at", "somebody wrote at byte 400 of an allocation of 400 bytes"});
  FINE(cudaStreamSynchronize(writes(0)->s));

  s = stream();
  std::vector<float> host(200);
  auto refused = [&](cudaError_t e) {
    EXPECT(e == cudaErrorInvalidValue, "%s", cudaGetErrorName(e));
    EXPECT(cudaGetLastError() == e, "the last error");
  };
  refused(cudaMemcpyAsync(x, host.data(), 102 * 4, cudaMemcpyHostToDevice, s->s));
  refused(cudaMemcpyAsync(x + 1, host.data(), 101 * 4, cudaMemcpyDefault, s->s));
  refused(cudaMemcpyAsync(host.data(), x - 1, 4, cudaMemcpyDefault, s->s));
  refused(cudaMemcpyAsync(host.data(), x, 4, cudaMemcpyHostToDevice, s->s));
  refused(cudaMemcpyAsync(x, host.data(), 4, cudaMemcpyDeviceToDevice, s->s));
  refused(cudaMemsetAsync(x + 100, 0, 8, s->s));
  refused(cudaMemsetAsync(host.data(), 0, 8, s->s));
  refused(cudaFree(x + 1));
  refused(cudaFreeHost(x));
  FINE(cudaFree(x));
  refused(cudaFree(x));
  refused(cudaMemcpyAsync(host.data(), x, 4, cudaMemcpyDefault, s->s));
  float *huge = nullptr;
  EXPECT(cudaMalloc(&huge, 1ull << 60) == cudaErrorMemoryAllocation && !huge, "out of memory");
  cudaGetLastError();

  LAUNCH(write_at, 1, 32, 0, s, host.data(), 0);
  EXPECT(cudaGetLastError() == cudaErrorInvalidDevicePointer, "a pointer to host memory");

  auto configuration = [&](const char *word) {
    EXPECT(cudaGetLastError() == cudaErrorInvalidConfiguration, "a launch that no GPU takes");
    std::string text = cudaGetErrorString(cudaErrorInvalidConfiguration);
    EXPECT(text.find(word) != std::string::npos, "%s", text.c_str());
  };
  float *y = device<float>(32);
  LAUNCH(write_at, 0, 32, 0, s, y, 0), configuration("empty");
  LAUNCH(write_at, 1, 33, 0, s, y, 0), configuration("multiple of 32");
  LAUNCH(write_at, 1, 1056, 0, s, y, 0), configuration("1056");
  LAUNCH(write_at, dim3(1, 65536), 32, 0, s, y, 0), configuration("65536");
  LAUNCH(write_shared, 1, 32, 49 << 10, s, 0), configuration("cudaFuncSetAttribute");
  EXPECT(cudaFuncSetAttribute(write_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10) == cudaErrorInvalidValue, "beyond what an SM has");
  cudaGetLastError();
  FINE(cudaFuncSetAttribute(write_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
  LAUNCH(write_shared, 1, 32, 200 << 10, s, 0);
  FINE(cudaGetLastError());
  FINE(cudaStreamSynchronize(s->s));
}

// With guards a kernel is stopped where it leaves its memory, also where it reads.
static void guards() {
#ifdef __x86_64__
  auto stops = [](Stream *s, const char *kernel, const char *where) { fails(s, cudaErrorLaunchFailure, {kernel, "touched address", where}); };
  struct { const char *guard; int64_t outside; } modes[] = {{"1", 101}, {"16", 104}, {"-1", -1}};
  for (auto &m : modes) {
    setenv("ULYSSES_EMULATED_GUARD", m.guard, 1);
    float *x = device<float>(101), *y = device<float>(1), *pinned;
    FINE(cudaMallocHost(&pinned, 404));
    EXPECT((uintptr_t)(m.outside < 0 ? x : x + m.outside) % 4096 == 0, "%p", (void *)x);
    std::string where = std::to_string(4 * m.outside) + " bytes from the start of an allocation of 404 bytes";
    for (float *p : {x, pinned}) {
      Stream *s = stream();
      LAUNCH(write_at, 1, 32, 0, s, p, 0);
      LAUNCH(write_at, 1, 32, 0, s, p, 100);
      LAUNCH(read_at, 1, 32, 0, s, y, p + 100);
      FINE(cudaStreamSynchronize(s->s));
      LAUNCH(write_at, 1, 32, 0, s, p, m.outside);
      stops(s, "write_at", where.c_str());
      s = stream();
      LAUNCH(read_at, 1, 32, 0, s, y, p + m.outside);
      stops(s, "read_at", where.c_str());
    }
    if (m.outside == 104) { // what alignment leaves is a red zone
      Stream *s = stream();
      LAUNCH(write_at, 1, 32, 0, s, x, 101);
      fails(s, cudaErrorIllegalAddress, {"write_at", "byte 404"});
    }
    Stream *s = stream();
    const int64_t edge = m.outside < 0 ? -1 : 64;
    LAUNCH(read_shared, 1, 32, 256, s, y, edge < 0 ? 0 : 63);
    FINE(cudaStreamSynchronize(s->s));
    LAUNCH(read_shared, 1, 32, 256, s, y, edge);
    stops(s, "read_shared", "");
    FINE(cudaFree(x));
    FINE(cudaFree(y));
    FINE(cudaFreeHost(pinned));
  }
  unsetenv("ULYSSES_EMULATED_GUARD");
#endif
}

// --- order ------------------------------------------------------------------------------------------------------------------------------
__global__ void plus(int *x, int v) { if (threadIdx.x == 0) *x += v; }
__global__ void times(int *x, int v) { if (threadIdx.x == 0) *x *= v; }

static void order() {
  Stream *a = stream(), *b = stream();
  cudaEvent_t e = event(), never = event();
  int *x = device<int>(1), seen[64] = {};
  for (int i = 0; i < 50; i++) { // 0 + 3 and · 5 on two streams
    FINE(cudaMemsetAsync(x, 0, 4, a->s));
    FINE(cudaStreamSynchronize(a->s));
    LAUNCH(plus, 1, 32, 0, a, x, 3);
    LAUNCH(times, 1, 32, 0, b, x, 5);
    Stream *first = i & 1 ? a : b;
    FINE(cudaStreamSynchronize(first->s));
    FINE(cudaStreamSynchronize((i & 1 ? b : a)->s));
    seen[read(a, x, 1)[0]]++;
  }
  EXPECT(seen[3] + seen[15] == 50 && seen[3] >= 5 && seen[15] >= 5, "unordered streams: %d and %d", seen[3], seen[15]);
  for (int i = 0; i < 50; i++) { // ordered by an event, and the event recorded again, later, does not matter
    FINE(cudaMemsetAsync(x, 0, 4, a->s));
    LAUNCH(plus, 1, 32, 0, a, x, 3);
    FINE(cudaEventRecord(e, a->s));
    FINE(cudaStreamWaitEvent(b->s, e, 0));
    FINE(cudaStreamWaitEvent(b->s, never, 0));
    LAUNCH(times, 1, 32, 0, b, x, 5);
    FINE(cudaEventRecord(e, b->s));
    FINE(cudaStreamWaitEvent(a->s, e, 0));
    LAUNCH(plus, 1, 32, 0, a, x, 1);
    FINE(cudaEventRecord(e, a->s));
    if (i % 3 == 0) FINE(cudaStreamSynchronize(a->s));
    else if (i % 3 == 1) FINE(cudaEventSynchronize(e));
    else
      while (cudaEventQuery(e) == cudaErrorNotReady) {}
    int got = read(a, x, 1)[0];
    EXPECT(got == 16, "ordered streams: %d", got);
  }
  // A wait is for the record before it, not for later ones: this would wait for itself.
  FINE(cudaMemsetAsync(x, 0, 4, a->s));
  FINE(cudaEventRecord(e, a->s));
  FINE(cudaStreamWaitEvent(b->s, e, 0));
  LAUNCH(plus, 1, 32, 0, b, x, 7);
  FINE(cudaEventRecord(e, b->s));
  FINE(cudaStreamSynchronize(b->s));
  EXPECT(read(a, x, 1)[0] == 7, "an event recorded again");
  // A failure goes along with the events.
  Stream *bad = stream(), *after = stream();
  int *y = device<int>(1);
  LAUNCH(leaves, 1, 128, 0, bad, y);
  FINE(cudaEventRecord(e, bad->s));
  FINE(cudaStreamWaitEvent(after->s, e, 0));
  LAUNCH(plus, 1, 32, 0, after, x, 7);
  fails(after, cudaErrorLaunchFailure, {"leaves"});
  EXPECT(cudaEventSynchronize(e) == cudaErrorLaunchFailure, "the event of a failed stream");
  cudaGetLastError();
  // A destroyed stream's work is done all the same.
  Stream *c = stream();
  LAUNCH(plus, 1, 32, 0, c, x, 1);
  FINE(cudaStreamDestroy(c->s));
  FINE(cudaDeviceSynchronize() == cudaErrorLaunchFailure ? cudaSuccess : cudaErrorUnknown); // bad's
  EXPECT(read(a, x, 1)[0] == 8, "a destroyed stream");
}

static void lazy() {
  Stream *s = stream();
  int *flag, *x = device<int>(4);
  FINE(cudaMallocHost(&flag, 16));
  *flag = 0;
  LAUNCH(plus, 1, 32, 0, s, flag, 1);
  EXPECT(*flag == 0, "nothing runs before it must");
  EXPECT(cudaStreamQuery(s->s) != cudaErrorInvalidValue, "a question");
  FINE(cudaStreamSynchronize(s->s));
  EXPECT(*flag == 1 && cudaStreamQuery(s->s) == cudaSuccess, "and then it does");
  // From pageable memory the copy has been made when the call returns; pinned memory is read when the copy runs.
  int host = 5;
  *flag = 5;
  FINE(cudaMemcpyAsync(x, &host, 4, cudaMemcpyHostToDevice, s->s));
  FINE(cudaMemcpyAsync(x + 1, flag, 4, cudaMemcpyHostToDevice, s->s));
  host = *flag = 6;
  auto v = read(s, x, 2);
  EXPECT(v[0] == 5 && v[1] == 6, "%d %d", v[0], v[1]);
  // Into pinned memory it comes later, into pageable memory at once.
  FINE(cudaMemcpyAsync(flag, x, 4, cudaMemcpyDeviceToHost, s->s));
  EXPECT(*flag == 6, "not before somebody waits");
  FINE(cudaMemcpyAsync(&host, x, 4, cudaMemcpyDeviceToHost, s->s));
  EXPECT(host == 5 && *flag == 5, "%d %d", host, *flag);
  // cudaFree waits for what runs.
  LAUNCH(plus, 1, 32, 0, s, flag, 10);
  FINE(cudaFree(x));
  EXPECT(*flag == 15, "cudaFree");
}

// --- processes --------------------------------------------------------------------------------------------------------------------------
struct Letter { cudaIpcMemHandle_t memory; cudaIpcEventHandle_t ready; };

static void send(int fd, const void *p, size_t n) { EXPECT(write(fd, p, n) == (ssize_t)n, "a pipe"); }
static bool receive(int fd, void *p, size_t n) {
  for (size_t at = 0; at < n;) {
    ssize_t got = read(fd, (char *)p + at, n - at);
    if (got <= 0) return false;
    at += (size_t)got;
  }
  return true;
}

// The other process: waits for ready, multiplies, tells by its own event.
static int other(int in, int out) {
  Letter letter;
  EXPECT(receive(in, &letter, sizeof letter), "a letter");
  int *x;
  cudaEvent_t ready, done = event(cudaEventDisableTiming | cudaEventInterprocess);
  FINE(cudaIpcOpenMemHandle((void **)&x, letter.memory, cudaIpcMemLazyEnablePeerAccess));
  void *again;
  FINE(cudaIpcOpenMemHandle(&again, letter.memory, cudaIpcMemLazyEnablePeerAccess));
  EXPECT(again == x, "one mapping");
  FINE(cudaIpcCloseMemHandle(again));
  FINE(cudaIpcOpenEventHandle(&ready, letter.ready));
  cudaIpcEventHandle_t h;
  FINE(cudaIpcGetEventHandle(&h, done));
  send(out, &h, sizeof h);
  Stream *s = stream();
  char go;
  while (receive(in, &go, 1)) {
    if (go == 'f') { // run something after x has been freed
      LAUNCH(write_at, 1, 32, 0, s, device<float>(100), 99);
      FINE(cudaStreamSynchronize(s->s));
      send(out, &go, 1);
      continue;
    }
    if (go == 'x') { // write where nothing is
      LAUNCH(write_at, 1, 32, 0, s, (float *)x, 1000);
      fails(s, cudaErrorIllegalAddress, {"byte 4000"});
      FINE(cudaStreamDestroy(s->s));
      s = stream();
      go = 'g';
    }
    FINE(cudaStreamWaitEvent(s->s, ready, 0));
    LAUNCH(times, 1, 32, 0, s, x + 999, 5);
    FINE(cudaEventRecord(done, s->s));
    send(out, &go, 1);
  }
  FINE(cudaIpcCloseMemHandle(x));
  return 0;
}

static void processes(const char *self) {
  int to[2], from[2];
  EXPECT(!pipe(to) && !pipe(from), "pipes");
  pid_t child = fork();
  if (child == 0) {
    close(to[1]);
    close(from[0]);
    std::string in = std::to_string(to[0]), out = std::to_string(from[1]);
    setenv("ULYSSES_EMULATED_SEED", "77", 1);
    execl(self, self, "other", in.c_str(), out.c_str(), (char *)nullptr);
    _exit(9);
  }
  close(to[0]);
  close(from[1]);
  int *x = device<int>(1000);
  Letter letter;
  cudaEvent_t ready = event(cudaEventDisableTiming | cudaEventInterprocess), done, plain = event();
  FINE(cudaIpcGetMemHandle(&letter.memory, x));
  FINE(cudaIpcGetEventHandle(&letter.ready, ready));
  void *own;
  EXPECT(cudaIpcOpenMemHandle(&own, letter.memory, cudaIpcMemLazyEnablePeerAccess) == cudaErrorDeviceUninitialized, "its own handle");
  EXPECT(cudaIpcOpenEventHandle(&done, letter.ready) == cudaErrorInvalidResourceHandle, "its own event");
  cudaIpcEventHandle_t h;
  EXPECT(cudaIpcGetEventHandle(&h, plain) == cudaErrorInvalidResourceHandle, "an event that was not made for it");
  cudaGetLastError();
  send(to[1], &letter, sizeof letter);
  EXPECT(receive(from[0], &h, sizeof h), "the other's event");
  FINE(cudaIpcOpenEventHandle(&done, h));

  Stream *a = stream(), *b = stream();
  for (int i = 0; i < 30; i++) {
    FINE(cudaMemsetAsync(x, 0, 4000, a->s));
    LAUNCH(plus, 1, 32, 0, a, x + 999, 3);
    FINE(cudaEventRecord(ready, a->s));
    char go = i == 20 ? 'x' : 'g';
    send(to[1], &go, 1);
    EXPECT(receive(from[0], &go, 1), "the other process");
    FINE(cudaStreamWaitEvent(b->s, done, 0));
    LAUNCH(plus, 1, 32, 0, b, x + 999, 1);
    int got = read(b, x + 999, 1)[0];
    EXPECT(got == 16, "round %d: %d", i, got);
  }
  EXPECT(cudaEventRecord(ready, b->s) == cudaErrorInvalidValue, "its marks are in another stream");
  EXPECT(cudaFree(x) == cudaErrorIllegalAddress, "the other process still maps it");
  std::string text = cudaGetErrorString(cudaErrorIllegalAddress);
  EXPECT(text.find("maps it") != std::string::npos, "%s", text.c_str());
  cudaGetLastError();
  char freed = 'f'; // is this process's fault alone: no kernel of the other's wrote there
  send(to[1], &freed, 1);
  receive(from[0], &freed, 1);
  close(to[1]);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the other process: %d", status);
}

// A process that dies while others wait for its event: they are told.
static void death(const char *self) {
  (void)self;
  int from[2];
  EXPECT(!pipe(from), "pipe");
  pid_t child = fork();
  if (child == 0) {
    // Claims a mark that never comes: it waits for an event of its parent that is not recorded to the end.
    cudaEvent_t e = event(cudaEventDisableTiming | cudaEventInterprocess);
    cudaIpcEventHandle_t h;
    FINE(cudaIpcGetEventHandle(&h, e));
    send(from[1], &h, sizeof h);
    for (;;) pause();
  }
  cudaIpcEventHandle_t h;
  EXPECT(receive(from[0], &h, sizeof h), "a handle");
  cudaEvent_t e;
  FINE(cudaIpcOpenEventHandle(&e, h));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  Stream *s = stream();
  FINE(cudaStreamWaitEvent(s->s, e, 0)); // never recorded: holds nobody up
  FINE(cudaStreamSynchronize(s->s));
  // Marked as made, and not come past.
  uly_emulated::claim(e);
  FINE(cudaStreamWaitEvent(s->s, e, 0));
  fails(s, cudaErrorLaunchTimeout, {"which has ended"});
}

int main(int argc, char **argv) {
  std::string name = argc > 1 ? argv[1] : "";
  if (name == "other") return other(atoi(argv[2]), atoi(argv[3]));
  struct { const char *name; void (*run)(const char *); } cases[] = {
      {"values", [](const char *) { values(); }},         {"roundings", [](const char *) { roundings(); }}, {"barriers", [](const char *) { barriers(); }},
      {"divergence", [](const char *) { divergence(); }}, {"bounds", [](const char *) { bounds(); }},       {"guards", [](const char *) { guards(); }},       {"alignment", [](const char *) { alignment(); }}, {"races", [](const char *) { races(); }}, {"order", [](const char *) { order(); }},
      {"lazy", [](const char *) { lazy(); }},             {"processes", processes},                         {"death", death},
  };
  int ran = 0;
  for (auto &c : cases)
    if (name == c.name) c.run(argv[0]), ran++;
  EXPECT(ran, "no case '%s'", name.c_str());
  printf("%s: fine\n", name.c_str());
}
