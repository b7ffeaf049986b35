// Tests of the emulator: correct programs give the same result in every order, and incorrect
// programs are detected. cuda/emulated_test.go runs each case by name, with several seeds.
#include "emulated_test.h"

// --- values
// Each block sums a row, by shuffles and shared memory.
__global__ void sums(const float *x, float *y, int64_t n) {
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
  unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z),
           t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
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
    EXPECT(row[0] == 70 && row[1] == (lane < 3 ? lane : lane - 3) && row[2] == (lane % 8 + 3 < 8 ? lane + 3 : lane),
           "lane %d", lane);
    EXPECT((unsigned)row[3] == 0x49249249u && row[4] == 1 && row[5] == 13 && row[6] == 1 && row[7] == (lane ^ 1),
           "lane %d", lane);
  }
  int *dg = device<int>(24 * 64);
  FINE(cudaMemsetAsync(dg, 0, 24 * 64 * 4, s->s));
  LAUNCH(grid3, dim3(2, 3, 4), dim3(4, 4, 4), 0, s, dg);
  auto g = read(s, dg, 24 * 64);
  for (int i = 0; i < 24 * 64; i++) EXPECT(g[(size_t)i] == 100 * (i / 64) + i % 64, "%d", i);
  // A large memset returns pages to the system. The memory must still be zero, including its ends.
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
      EXPECT(again != again, "NaN is kept");
      continue;
    }
    EXPECT(__bfloat16_as_ushort(__float2bfloat16(f)) == u, "bf16 %04x", u);
    __half h = __ushort_as_half((unsigned short)u);
    float e = __half2float(h);
    if (e != e) EXPECT((__half_as_ushort(__float2half(e)) & 0x7fff) > 0x7c00, "NaN is kept");
    else EXPECT(__half_as_ushort(__float2half(e)) == u, "half %04x", u);
    if ((u & 0x7fff) >= 0x7bff || (u & 0x7fff) >= 0x7f7f) continue;
    // Half way to the next value rounds to the even value; slightly beside it, to the nearer value.
    float fn = __bfloat162float(__ushort_as_bfloat16((unsigned short)(u + 1))),
          en = __half2float(__ushort_as_half((unsigned short)(u + 1)));
    float fm = (float)(((double)f + fn) / 2), em = (float)(((double)e + en) / 2);
    unsigned even = u + (u & 1);
    EXPECT(__bfloat16_as_ushort(__float2bfloat16(fm)) == even, "bf16 between %04x and the next", u);
    EXPECT(__bfloat16_as_ushort(__float2bfloat16(nextafterf(fm, f))) == u &&
               __bfloat16_as_ushort(__float2bfloat16(nextafterf(fm, fn))) == u + 1,
           "bf16 %04x", u);
    EXPECT(__half_as_ushort(__float2half(em)) == even, "half between %04x and the next", u);
    EXPECT(__half_as_ushort(__float2half(nextafterf(em, e))) == u &&
               __half_as_ushort(__float2half(nextafterf(em, en))) == u + 1,
           "half %04x", u);
  }
  EXPECT(__half_as_ushort(__float2half(65519.996f)) == 0x7bff && __half_as_ushort(__float2half(65520)) == 0x7c00,
         "the largest half");
  EXPECT(__bfloat16_as_ushort(__float2bfloat16(3.4e38f)) == 0x7f80, "the largest bf16");
}

// --- barriers
template <bool barrier> __global__ void reverse(float *x) { // reverses a block's values
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncthreads();
  x[threadIdx.x] = tile[127 - threadIdx.x];
}
template <bool barrier> __global__ void reverse_dynamic(float *x) {
  SHARED(float, tile);
  tile[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncthreads();
  x[threadIdx.x] = tile[127 - threadIdx.x];
}
template <bool barrier> __global__ void reverse_warps(float *x) {
  __shared__ float tile[128];
  tile[threadIdx.x] = x[threadIdx.x];
  if (barrier) __syncwarp();
  x[threadIdx.x] = tile[(threadIdx.x & ~31u) + 31 - (threadIdx.x & 31)];
}
template <bool barrier> __global__ void rotate(float *x) { // uses one tile several times
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
__global__ void next_block(float *x) { // a block reads what the next block writes
  if (threadIdx.x == 0) x[blockIdx.x * 32] = x[blockIdx.x * 32 + 32];
}
template <bool zeroed> __global__ void count(float *x) { // counts in uninitialized shared memory
  __shared__ float n;
  if (zeroed) {
    if (threadIdx.x == 0) n = 0;
    __syncthreads();
  }
  atomicAdd(&n, 1.0f);
  __syncthreads();
  x[threadIdx.x] = n;
}

// right returns in how many of 50 runs the kernel gave the expected result.
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
  auto reversed = [](int i) { return (float)(127 - i); };
  auto warps = [](int i) { return (float)((i & ~31) + 31 - (i & 31)); };
  auto rotated = [](int i) { return (float)((i + 4) % 128); };
  auto counted = [](int) { return 128.0f; };
  EXPECT(right(reverse<true>, reversed) == 50 && right(reverse<false>, reversed) == 0, "__syncthreads");
  EXPECT(right(reverse_dynamic<true>, reversed) == 50 && right(reverse_dynamic<false>, reversed) == 0,
         "__syncthreads, dynamic shared memory");
  EXPECT(right(reverse_warps<true>, warps) == 50 && right(reverse_warps<false>, warps) == 0, "__syncwarp");
  EXPECT(right(rotate<true>, rotated) == 50 && right(rotate<false>, rotated) == 0,
         "a missing second barrier in a loop");
  EXPECT(right(count<true>, counted) == 50 && right(count<false>, counted) == 0, "uninitialized shared memory");
}

__global__ void leaves(int *x) {
  if (threadIdx.x >= 64) return;
  __syncthreads();
  x[threadIdx.x] = 1;
}
__global__ void forks(int *x) {
  if (threadIdx.x < 64) __syncthreads();
  else __syncthreads();
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
  else x[threadIdx.x] = __shfl_xor_sync(all, 2, 1);
}
// One warp waits at a barrier, the other at a shuffle that never completes.
__global__ void lost(int *x) {
  if (threadIdx.x < 32) __syncthreads();
  else if (threadIdx.x < 48) x[0] = __shfl_xor_sync(all, 1, 1);
}
__global__ void forgets(int *x) { // does not wait for the second group of copies
  __shared__ float tile[2][128];
  Copies copies;
  for (int i = 0; i < 2; i++) {
    copies.copy<1>(&tile[i][threadIdx.x], reinterpret_cast<const float *>(x) + threadIdx.x, true);
    copies.close();
  }
  copies.wait<1>();
}

static void divergence() {
  int *x = device<int>(128);
  struct {
    void (*kernel)(int *);
    std::vector<const char *> words;
  } cases[] = {
      {leaves, {"leaves", "emulated_test.cpp", "64 of 128 threads wait at the barrier", "64 have ended"}},
      {forks, {"forks", "waits at the barrier of", "others at the barrier of"}},
      {half_a_warp, {"half_a_warp", "16 lanes of warp", "__shfl_xor_sync"}},
      {masked, {"masked", "without all lanes", "0000ffff"}},
      {mixed, {"mixed", "others at the __shfl_xor_sync"}},
      {lost, {"lost"}},
      {forgets, {"forgets", "ends before it has waited for a copy"}},
  };
  const char *names[] = {"leaves", "forks", "half_a_warp", "masked", "mixed", "lost", "forgets"};
  for (int round = 0; round < 10; round++) {
    int i = 0;
    for (auto &c : cases) {
      Stream *s = stream();
      uly_emulated::call(names[i++], __FILE__, __LINE__, c.kernel, 3, 128, 0, s->s, x);
      fails(s, cudaErrorLaunchFailure, c.words);
      FINE(cudaStreamDestroy(s->s));
      auto reversed = [](int i) { return (float)(127 - i); };
      EXPECT(round || right(reverse<true>, reversed) == 50, "kernels after a failure");
    }
  }
}

// In a build that detects races (-fsanitize=thread, races/races.cpp), each of these races is found,
// in any order.
static void races() {
  float *x = device<float>(257);
  auto right = [](Stream *s) { FINE(cudaStreamSynchronize(s->s)); };
  auto wrong = [](Stream *s, const char *words) {
    fails(s, cudaErrorLaunchFailure, {words, "without a barrier between"});
  };
  Stream *s;
#define CASE(kernel, blocks, shared, verdict, ...) \
  s = stream(), LAUNCH(kernel, blocks, 128, shared, s, x), verdict(s, ##__VA_ARGS__)
  CASE(reverse<true>, 1, 0, right);
  CASE(reverse<false>, 1, 0, wrong, "__shared__ memory");
  CASE(reverse_dynamic<true>, 1, 512, right);
  CASE(reverse_dynamic<false>, 1, 512, wrong, "dynamic shared memory");
  CASE(reverse_warps<true>, 1, 0, right);
  CASE(reverse_warps<false>, 1, 0, wrong, "__shared__ memory");
  CASE(rotate<true>, 1, 0, right);
  CASE(rotate<false>, 1, 0, wrong, "__shared__ memory");
  CASE(reverse<true>, 2, 0, wrong, "device memory"); // both blocks use the same array
#undef CASE
  s = stream();
  LAUNCH(next_block, 1, 32, 0, s, x);
  right(s);
  LAUNCH(next_block, 7, 32, 0, s, x);
  wrong(s, "device memory");
}

// --- order

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
  // The streams are ordered by an event. A later record of the event has no influence.
  for (int i = 0; i < 50; i++) {
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
  // A wait is for the record before it and not for later records. Otherwise this stream would wait
  // for itself.
  FINE(cudaMemsetAsync(x, 0, 4, a->s));
  FINE(cudaEventRecord(e, a->s));
  FINE(cudaStreamWaitEvent(b->s, e, 0));
  LAUNCH(plus, 1, 32, 0, b, x, 7);
  FINE(cudaEventRecord(e, b->s));
  FINE(cudaStreamSynchronize(b->s));
  EXPECT(read(a, x, 1)[0] == 7, "an event recorded again");
  // A failure is passed on by events.
  Stream *bad = stream(), *after = stream();
  int *y = device<int>(1);
  LAUNCH(leaves, 1, 128, 0, bad, y);
  FINE(cudaEventRecord(e, bad->s));
  FINE(cudaStreamWaitEvent(after->s, e, 0));
  LAUNCH(plus, 1, 32, 0, after, x, 7);
  fails(after, cudaErrorLaunchFailure, {"leaves"});
  EXPECT(cudaEventSynchronize(e) == cudaErrorLaunchFailure, "the event of a failed stream");
  cudaGetLastError();
  // The work of a destroyed stream still runs.
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
  EXPECT(*flag == 0, "work runs only when it must");
  EXPECT(cudaStreamQuery(s->s) != cudaErrorInvalidValue, "a question");
  FINE(cudaStreamSynchronize(s->s));
  EXPECT(*flag == 1 && cudaStreamQuery(s->s) == cudaSuccess, "work runs on synchronization");
  // A copy from pageable memory has read its source when the call returns. A copy from pinned
  // memory reads its source when the copy runs.
  int host = 5;
  *flag = 5;
  FINE(cudaMemcpyAsync(x, &host, 4, cudaMemcpyHostToDevice, s->s));
  FINE(cudaMemcpyAsync(x + 1, flag, 4, cudaMemcpyHostToDevice, s->s));
  host = *flag = 6;
  auto v = read(s, x, 2);
  EXPECT(v[0] == 5 && v[1] == 6, "%d %d", v[0], v[1]);
  // A copy to pinned memory runs later, a copy to pageable memory at once.
  FINE(cudaMemcpyAsync(flag, x, 4, cudaMemcpyDeviceToHost, s->s));
  EXPECT(*flag == 6, "a copy to pinned memory runs on synchronization");
  FINE(cudaMemcpyAsync(&host, x, 4, cudaMemcpyDeviceToHost, s->s));
  EXPECT(host == 5 && *flag == 5, "%d %d", host, *flag);
  // cudaFree waits for all work.
  LAUNCH(plus, 1, 32, 0, s, flag, 10);
  FINE(cudaFree(x));
  EXPECT(*flag == 15, "cudaFree");
}

int main(int argc, char **argv) {
  std::string name = argc > 1 ? argv[1] : "";
  if (name == "other") return other(atoi(argv[2]), atoi(argv[3]));
  if (name == "late_other") return late_other(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]));
  if (name == "reuse_other") return reuse_other(atoi(argv[2]), atoi(argv[3]));
  struct {
    const char *name;
    void (*run)(const char *);
  } cases[] = {
      {"values", [](const char *) { values(); }},
      {"roundings", [](const char *) { roundings(); }},
      {"barriers", [](const char *) { barriers(); }},
      {"divergence", [](const char *) { divergence(); }},
      {"bounds", [](const char *) { bounds(); }},
      {"guards", [](const char *) { guards(); }},
      {"alignment", [](const char *) { alignment(); }},
      {"devices", [](const char *) { devices(); }},
      {"peers", [](const char *) { peers(); }},
      {"races", [](const char *) { races(); }},
      {"warpgroups", [](const char *) { warpgroups(); }},
      {"warpgroup_races", [](const char *) { warpgroup_races(); }},
      {"ptx", [](const char *) { ptx_instructions(); }},
      {"order", [](const char *) { order(); }},
      {"lazy", [](const char *) { lazy(); }},
      {"processes", processes},
      {"death", death},
      {"late", late},
      {"reuse", reuse},
  };
  int ran = 0;
  for (auto &c : cases)
    if (name == c.name) c.run(argv[0]), ran++;
  EXPECT(ran, "no case '%s'", name.c_str());
  printf("%s: fine\n", name.c_str());
}
