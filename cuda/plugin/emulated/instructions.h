// The functions of gpu/instructions.h in plain C++, for kernels that run on the host.
#pragma once

#ifdef __FMA__
#include <immintrin.h>
#endif
#include <math.h>
#include <string.h>

#include <vector>

// Without a fused multiply-add instruction, fmaf is a slow library function. Such a host rounds
// twice.
inline float madd(float a, float b, float c) {
  uly_emulated::count_multiply_adds(1);
#ifdef __FMA__
  return fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float exp2_approx(float x) { return exp2f(x); }

// Copies completes each copy immediately or as late as wait allows, at random. A kernel that reads
// before wait gets old values in some orders. A kernel fails if it ends before it has waited for
// its copies: they could replace what it has written to their places. It fails at a misaligned
// source also where no element is present and nothing is read: cp.async requires the alignment.
class Copies {
 public:
  Copies() = default;
  Copies(const Copies &) = delete;
  ~Copies() {
    if (copied >= waited) uly_emulated::fail_kernel("the kernel ends before it has waited for a copy (cp.async)");
  }
  template <int N> void copy(float *to, const float *from, bool present) {
    copied = group;
    if ((uintptr_t)from % (4 * N) != 0)
      uly_emulated::fail_kernel("the source of a copy (cp.async) is not a multiple of its bytes");
    const Late l = {to, from, N, group, present};
    if (uly_emulated::random64() & 1) l.run();
    else late.push_back(l);
  }
  void close() { group++; }
  template <int PENDING> void wait() {
    waited = group - PENDING > waited ? group - PENDING : waited;
    size_t kept = 0;
    for (const Late &l : late) {
      if (l.group < waited) l.run();
      else late[kept++] = l;
    }
    late.resize(kept);
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
  // copied: the last group with a copy; the groups before `waited` are complete
  int group = 0, copied = -1, waited = 0;
};

// ldmatrix follows the layout of the registers in the PTX documentation: lanes exchange their rows.
template <bool TRANSPOSED> void ldmatrix(uint32_t (&r)[4], uint32_t address) {
  const uint4 row = *reinterpret_cast<const uint4 *>(uly_emulated::dynamic_shared() + address);
  const uint64_t mine[2] = {row.x | (uint64_t)row.y << 32, row.z | (uint64_t)row.w << 32};
  const uint64_t *half = uly_emulated::exchange(0xffffffffu, mine, 2, "ldmatrix", __FILE__, __LINE__);
  const int lane = (int)threadIdx.x % 32, along = lane % 4 * 2, down = lane / 4;
  for (int m = 0; m < 4; m++) {
    auto at = [&](int row, int column) {
      return (uint32_t)(half[32 * (column / 4) + 8 * m + row] >> 16 * (column % 4) & 0xffff);
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

// The emulated tests spend much of their time in mma_pair. So a lane's 8 sums are a vector, and
// alignment is not checked: all addresses are of local variables and of exchange's table.
typedef float EightFloats __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));
#define ULY_FAST __attribute__((no_sanitize("alignment"))) inline

ULY_FAST __attribute__((always_inline)) void add_product(EightFloats &sum, const EightWords &x, const EightWords &y) {
#ifdef __FMA__
  sum = _mm256_fmadd_ps((EightFloats)x, (EightFloats)y, sum);
#else
  sum = (EightFloats)x * (EightFloats)y + sum;
#endif
}

ULY_FAST void mma_pair(float (&c0)[4], float (&c1)[4], const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  const uint64_t mine[4] = {a[0] | (uint64_t)a[1] << 32, a[2] | (uint64_t)a[3] << 32, b[0] | (uint64_t)b[1] << 32,
                            b[2] | (uint64_t)b[3] << 32};
  const uint64_t *all = uly_emulated::exchange(0xffffffffu, mine, 4, "mma", __FILE__, __LINE__);
  // Four lanes have two rows of A, and four have each column of B, two elements in 32 bits.
  const uint64_t *rows = all + (int)threadIdx.x % 32 / 4 * 4, *columns = all + 64 + (int)threadIdx.x % 4 * 8;
  EightFloats sum = {c0[0], c0[1], c0[2], c0[3], c1[0], c1[1], c1[2], c1[3]};
  for (int half = 0; half < 2; half++)
    for (int t = 0; t < 4; t++) {
      const uint32_t x0 = (uint32_t)rows[32 * half + t], x1 = (uint32_t)(rows[32 * half + t] >> 32);
      const uint32_t y0 = (uint32_t)(columns[t] >> 32 * half), y1 = (uint32_t)(columns[4 + t] >> 32 * half);
      const uint32_t y2 = (uint32_t)(columns[32 + t] >> 32 * half), y3 = (uint32_t)(columns[36 + t] >> 32 * half);
      const EightWords x = {x0, x0, x1, x1, x0, x0, x1, x1}, y = {y0, y1, y0, y1, y2, y3, y2, y3};
      add_product(sum, x << 16, y << 16);
      add_product(sum, x & 0xffff0000u, y & 0xffff0000u);
    }
  for (int e = 0; e < 4; e++) c0[e] = sum[e], c1[e] = sum[4 + e];
  uly_emulated::count_multiply_adds(128);
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
