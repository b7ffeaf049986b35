// Memory: accesses outside of allocations, and misaligned addresses.
#include "emulated_test.h"

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
// copies 16 bytes or, if they are not present, zeros
__global__ void copy_from(const float *x, bool present) {
  SHARED(float, tile);
  Copies copies;
  if (threadIdx.x == 0) copies.copy<4>(tile, x, present);
  copies.close();
  copies.wait<0>();
}

// stores and loads with a cache operator, which requires global memory
__global__ void through_cache(float *x, bool fixed) {
  SHARED(float, tile);
  __shared__ float own[32];
  if (x) __stwb(x, __ldcg(x) + 1);
  else if (fixed) __stwb(own + threadIdx.x, 1.0f);
  else __stcs(tile + threadIdx.x, 1.0f);
}

// Misaligned accesses fail, and memory is aligned exactly as on a GPU. A host would accept both.
void alignment() {
  char *x = device<char>(256), *y = device<char>(1);
  EXPECT((uintptr_t)x % 256 == 0 && (uintptr_t)x % 512 != 0, "%p", x);
  auto writes = [&](auto v, int64_t at) {
    Stream *s = stream();
    LAUNCH(write_as<decltype(v)>, 1, 32, 0, s, x, at, v);
    return s;
  };
  auto stops = [](Stream *s, const char *kernel, const char *multiple) {
    fails(s, cudaErrorLaunchFailure, {kernel, "memory_test.cpp:", "which is not a multiple of", multiple});
  };
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
  for (bool present : {true, false}) {
    s = stream();
    LAUNCH(copy_from, 1, 32, 16, s, reinterpret_cast<float *>(x + 16), present);
    FINE(cudaStreamSynchronize(s->s));
    LAUNCH(copy_from, 1, 32, 16, s, reinterpret_cast<float *>(x + 20), present);
    fails(s, cudaErrorLaunchFailure, {"copy_from", "not a multiple of its bytes"});
  }
}

void bounds() {
  float *x = device<float>(101); // its end is not aligned
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
  fails(writes(1 << 20), cudaErrorLaunchFailure,
        {"write_at", "accessed address", "4194304 bytes from the start of an allocation of 404 bytes"});
  float *gone = device<float>(101);
  FINE(cudaFree(gone));
  float *const nowhere[] = {nullptr, gone};
  for (float *from : nowhere) {
    s = stream();
    LAUNCH(read_at, 2, 64, 0, s, x, from);
    fails(s, cudaErrorLaunchFailure, {"read_at", "accessed address"});
  }
#endif
  s = stream();
  LAUNCH(write_shared, 1, 32, 64, s, 15);
  FINE(cudaStreamSynchronize(s->s));
  LAUNCH(write_shared, 1, 32, 64, s, 16);
  fails(s, cudaErrorLaunchFailure, {"write_shared", "64 bytes of dynamic shared memory"});
  s = stream();
  LAUNCH(through_cache, 1, 32, 128, s, x, false);
  FINE(cudaStreamSynchronize(s->s));
  for (bool fixed : {false, true}) {
    s = stream();
    LAUNCH(through_cache, 1, 32, 128, s, nullptr, fixed);
    fails(s, cudaErrorLaunchFailure,
          {"through_cache", fixed ? "__stwb" : "__stcs", "of shared memory in memory_test.cpp:"});
  }

  // A write of the host beside its memory is not attributed to a kernel.
  float *pinned;
  FINE(cudaMallocHost(&pinned, 400));
  pinned[100] = 1;
  fails(writes(0), cudaErrorIllegalAddress,
        {"before kernel write_at", "something wrote at byte 400 of an allocation of 400 bytes"});
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
    EXPECT(cudaGetLastError() == cudaErrorInvalidConfiguration, "an invalid launch configuration");
    std::string text = cudaGetErrorString(cudaErrorInvalidConfiguration);
    EXPECT(text.find(word) != std::string::npos, "%s", text.c_str());
  };
  float *y = device<float>(32);
  LAUNCH(write_at, 0, 32, 0, s, y, 0), configuration("empty");
  LAUNCH(write_at, 1, 33, 0, s, y, 0), configuration("multiple of 32");
  LAUNCH(write_at, 1, 1056, 0, s, y, 0), configuration("1056");
  LAUNCH(write_at, dim3(1, 65536), 32, 0, s, y, 0), configuration("65536");
  LAUNCH(write_shared, 1, 32, 49 << 10, s, 0), configuration("cudaFuncSetAttribute");
  EXPECT(cudaFuncSetAttribute(write_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 228 << 10) ==
             cudaErrorInvalidValue,
         "more than a multiprocessor has");
  cudaGetLastError();
  FINE(cudaFuncSetAttribute(write_shared, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
  LAUNCH(write_shared, 1, 32, 200 << 10, s, 0);
  FINE(cudaGetLastError());
  FINE(cudaStreamSynchronize(s->s));
}

// With guards, a kernel is stopped at an access outside of its memory, also at a read.
void guards() {
#ifdef __x86_64__
  auto stops = [](Stream *s, const char *kernel, const char *where) {
    fails(s, cudaErrorLaunchFailure, {kernel, "accessed address", where});
  };
  struct {
    const char *guard;
    int64_t outside;
  } modes[] = {{"1", 101}, {"16", 104}, {"-1", -1}};
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
    if (m.outside == 104) { // the gap that alignment leaves is a red zone
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
