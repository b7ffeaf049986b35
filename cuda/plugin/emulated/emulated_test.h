// Declarations that the tests of the emulator share (emulated_test.cpp and the files beside it).
#pragma once
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "cuda.h"

struct Stream {
  cudaStream_t s = nullptr;
};
enum : unsigned { all = 0xffffffffu };

#define EXPECT(condition, ...)                               \
  do {                                                       \
    if (!(condition)) {                                      \
      printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      printf("" __VA_ARGS__);                                \
      printf("\n");                                          \
      exit(1);                                               \
    }                                                        \
  } while (0)
#define FINE(call)                                                              \
  do {                                                                          \
    cudaError_t fine_e = (call);                                                \
    EXPECT(fine_e == cudaSuccess, "%s: %s", #call, cudaGetErrorString(fine_e)); \
  } while (0)

inline Stream *stream() {
  auto *s = new Stream;
  FINE(cudaStreamCreateWithFlags(&s->s, cudaStreamNonBlocking));
  return s;
}
inline cudaEvent_t event(unsigned flags = cudaEventDisableTiming) {
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

// fails expects that s has failed with the code, and that the message contains the words.
inline void fails(Stream *s, cudaError_t code, std::vector<const char *> words) {
  cudaError_t e = cudaStreamSynchronize(s->s);
  EXPECT(e == code, "%s: %s", cudaGetErrorName(e), cudaGetErrorString(e));
  std::string text = cudaGetErrorString(e);
  for (const char *w : words) EXPECT(text.find(w) != std::string::npos, "'%s' is not in '%s'", w, text.c_str());
  EXPECT(cudaStreamSynchronize(s->s) == code, "the failure of a stream is permanent");
  cudaGetLastError();
}

inline __global__ void plus(int *x, int v) {
  if (threadIdx.x == 0) *x += v;
}
inline __global__ void times(int *x, int v) {
  if (threadIdx.x == 0) *x *= v;
}
inline __global__ void write_at(float *x, int64_t at) {
  if (threadIdx.x == 0) x[at] = 1;
}

// Cases in other files: devices_test.cpp, memory_test.cpp, processes_test.cpp, ptx_test.cpp,
// warpgroups_test.cpp.
void bounds();
void guards();
void alignment();
void devices();
void peers();
void warpgroups();
void warpgroup_races();
void ptx_instructions();
void processes(const char *self);
void death(const char *self);
void late(const char *self);
void reuse(const char *self);
// the other processes of these cases
int other(int in, int out);
int late_other(int in, int out, int events);
int reuse_other(int in, int out);
