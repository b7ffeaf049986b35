// The functions of gpu/instructions.h in plain C++, for kernels that run on the host.
#pragma once

#include <math.h>
#include <string.h>

#include <vector>

// Without a fused multiply-add instruction, fmaf is a slow library function. Such a host rounds
// twice.
inline float madd(float a, float b, float c) {
  uly_emulated::count_multiply_add();
#ifdef __FMA__
  return fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float exp2_approx(float x) { return exp2f(x); }

// Copies completes each copy immediately or as late as wait allows, at random. A kernel that reads
// before wait gets old values in some orders.
class Copies {
 public:
  template <int N> void copy(float *to, const float *from, bool present) {
    const Late l = {to, from, N, group, present};
    if (uly_emulated::random64() & 1) l.run();
    else late.push_back(l);
  }
  void close() { group++; }
  template <int PENDING> void wait() {
    size_t n = 0;
    for (; n < late.size() && late[n].group < group - PENDING; n++) late[n].run();
    late.erase(late.begin(), late.begin() + (long)n);
  }

 private:
  struct Late {
    float *to;
    const float *from;
    int n, group;
    bool present;
    void run() const {
      if (n == 4)
        *reinterpret_cast<float4 *>(to) = present ? *reinterpret_cast<const float4 *>(from) : make_float4(0, 0, 0, 0);
      else *to = present ? *from : 0;
    }
  };
  std::vector<Late> late;
  int group = 0;
};

// ldmatrix follows the layout of the registers in the PTX documentation: lanes exchange their rows.
template <bool TRANSPOSED> void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  const uint4 row = *reinterpret_cast<const uint4 *>(uly_emulated::dynamic_shared() + address);
  uint64_t half[2][32];
  for (int i = 0; i < 2; i++)
    memcpy(half[i],
           uly_emulated::exchange(0xffffffffu, i ? row.z | (uint64_t)row.w << 32 : row.x | (uint64_t)row.y << 32,
                                  "ldmatrix", __FILE__, __LINE__),
           sizeof half[i]);
  const int lane = (int)threadIdx.x % 32, along = lane % 4 * 2, down = lane / 4;
  for (int m = 0; m < 4; m++) {
    auto at = [&](int row, int column) {
      return (uint32_t)(half[column / 4][8 * m + row] >> 16 * (column % 4) & 0xffff);
    };
    r[m] = TRANSPOSED ? at(along, down) | at(along + 1, down) << 16 : at(down, along) | at(down, along + 1) << 16;
  }
}

inline uint32_t transposed(uint32_t x) {
  const uint64_t *all = uly_emulated::exchange(0xffffffffu, x, "movmatrix", __FILE__, __LINE__);
  const int lane = (int)threadIdx.x % 32, row = lane % 4 * 2, column = lane / 4;
  auto at = [&](int row) { return (uint32_t)(all[4 * row + column / 2] >> 16 * (column % 2) & 0xffff); };
  return at(row) | at(row + 1) << 16;
}

// A single mma has no plain form: product (kernels/mma.h) uses fused multiply-adds on the host.
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) = delete;

inline void mma_pair(float (&c0)[4], float (&c1)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  const int lane = (int)threadIdx.x % 32;
  float x[2][16], y[4][16]; // this lane's rows of A and columns of B
  auto share = [](uint32_t lower, uint32_t upper) {
    return uly_emulated::exchange(0xffffffffu, lower | (uint64_t)upper << 32, "mma", __FILE__, __LINE__);
  };
  auto unpack_pair = [](float *to, uint32_t pair) {
    to[0] = __uint_as_float(pair << 16), to[1] = __uint_as_float(pair & 0xffff0000u);
  };
  for (int half = 0; half < 2; half++) {
    const uint64_t *all = share(a[2 * half], a[2 * half + 1]);
    for (int t = 0; t < 4; t++)
      for (int i = 0; i < 2; i++) unpack_pair(x[i] + 8 * half + 2 * t, (uint32_t)(all[lane / 4 * 4 + t] >> 32 * i));
  }
  for (int n = 0; n < 2; n++) {
    const uint64_t *all = share(b[2 * n], b[2 * n + 1]);
    for (int j = 0; j < 2; j++)
      for (int t = 0; t < 4; t++)
        for (int half = 0; half < 2; half++)
          unpack_pair(y[2 * n + j] + 8 * half + 2 * t, (uint32_t)(all[(lane % 4 * 2 + j) * 4 + t] >> 32 * half));
  }
  for (int k = 0; k < 16; k++)
    for (int e = 0; e < 4; e++) {
      c0[e] = madd(x[e / 2][k], y[e % 2][k], c0[e]);
      c1[e] = madd(x[e / 2][k], y[2 + e % 2][k], c1[e]);
    }
}

inline void store_if(bool there, void *to, uint32_t x) {
  if (there) *(uint32_t *)to = x;
}

template <int THREADS> inline void sync_warps() { __syncthreads(); }

inline uint32_t in_loop(uint32_t x) { return x; }

// Atomic additions of different threads are no race.
__attribute__((noinline, no_sanitize("thread"))) inline void add_four(float *p, float4 x) {
  float4 &sum = *reinterpret_cast<float4 *>(p);
  sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
}
