// Building blocks of the F32 attention kernels: loading rows to tiles in shared memory, and two
// products of tiles in registers.
//
// A block has 16 x 16 threads, (y, x). Thread (y, x) has rows y, y + 16, … of a product, and
// columns x, x + 16, … of scores, or features 4x … 4x + 3 of each 64. All arithmetic is F32. Every
// sum runs along its axis in order, in one chain of additions. Therefore a result does not depend
// on the position of its row in a tile, and equal sums cancel exactly.
#pragma once

#include "attention.h"
#include "values.h"

// load_rows copies rows row … row + n of a head to a tile of ROWS rows of HEAD + ATTENTION_GAP
// floats. It writes zeros to the missing rows, and to the missing columns up to the next multiple
// of four, because products read them.
template <int HEAD, int ROWS> __device__ __forceinline__ void load_rows(Copies &copies, float *to,
                                                                        const AttentionView &x, int64_t row,
                                                                        int64_t head, int n) {
  constexpr int LANES = HEAD / 4, STEP = ATTENTION_THREADS / LANES;
  const int c = (int)threadIdx.x % LANES * 4;
  if (c >= x.width) return;
  const int64_t base = row * x.token + head * x.head + c;
  const int end = (n + 3) / 4 * 4;
  if (!x.bf16) {
    const float *p = (const float *)x.data;
#pragma unroll 1
    for (int r = (int)threadIdx.x / LANES; r < end; r += STEP) {
      const float *from = r < n ? p + base + r * x.token : p;
      float *at = to + r * (HEAD + ATTENTION_GAP) + c;
      if (x.wide) {
        copies.copy<4>(at, from, r < n);
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++) copies.copy<1>(at + e, c + e < x.width ? from + e : p, r < n && c + e < x.width);
      }
    }
    return;
  }
  const __nv_bfloat16 *p = (const __nv_bfloat16 *)x.data;
#pragma unroll 2
  for (int r = (int)threadIdx.x / LANES; r < end; r += STEP) {
    const __nv_bfloat16 *from = p + base + r * x.token;
    float4 y = make_float4(0, 0, 0, 0);
    if (r < n && x.wide) {
      const uint2 u = *reinterpret_cast<const uint2 *>(from); // BF16 is the upper half of F32
      y = make_float4(__uint_as_float(u.x << 16), __uint_as_float(u.x & 0xffff0000u), __uint_as_float(u.y << 16),
                      __uint_as_float(u.y & 0xffff0000u));
    } else if (r < n) {
      y.x = __bfloat162float(from[0]);
      if (c + 1 < x.width) y.y = __bfloat162float(from[1]);
      if (c + 2 < x.width) y.z = __bfloat162float(from[2]);
      if (c + 3 < x.width) y.w = __bfloat162float(from[3]);
    }
    *reinterpret_cast<float4 *>(to + r * (HEAD + ATTENTION_GAP) + c) = y;
  }
}

// load_four reads features c … c + 3 of a row of F32, as many as exist.
__device__ __forceinline__ void load_four(const AttentionView &x, int64_t row, int64_t head, int c, float *y) {
  if (c >= x.width) return;
  const float *p = (const float *)x.data + row * x.token + head * x.head + c;
  if (x.wide) {
    const float4 four = *reinterpret_cast<const float4 *>(p);
    y[0] = four.x, y[1] = four.y, y[2] = four.z, y[3] = four.w;
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (c + e < x.width) y[e] = p[e];
}

// store_four writes features c … c + 3 of a row, as many as exist.
__device__ __forceinline__ void store_four(const AttentionView &x, int64_t row, int64_t head, int c, float4 y) {
  if (c >= x.width) return;
  const int64_t at = row * x.token + head * x.head + c;
  const float part[4] = {y.x, y.y, y.z, y.w};
  if (!x.bf16) {
    float *p = (float *)x.data + at;
    if (x.wide) *reinterpret_cast<float4 *>(p) = y;
    else
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (c + e < x.width) p[e] = part[e];
    return;
  }
  __nv_bfloat16 *p = (__nv_bfloat16 *)x.data + at;
  __nv_bfloat16 low[4];
#pragma unroll
  for (int e = 0; e < 4; e++) low[e] = __float2bfloat16(part[e]);
  if (x.wide) {
    uint2 u;
    u.x = __bfloat16_as_ushort(low[0]) | (unsigned)__bfloat16_as_ushort(low[1]) << 16;
    u.y = __bfloat16_as_ushort(low[2]) | (unsigned)__bfloat16_as_ushort(low[3]) << 16;
    *reinterpret_cast<uint2 *>(p) = u;
  } else {
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (c + e < x.width) p[e] = low[e];
  }
}

// scores computes s[i][j] = row y + 16i of a · row x + 16j of b, over `depth` features, a multiple
// of four.
template <int HEAD, int RT, int CT>
__device__ __forceinline__ void scores(float (&s)[RT][CT], const float *a, const float *b, int depth) {
  constexpr int W = HEAD + ATTENTION_GAP;
  a += threadIdx.x / 16 * W;
  b += threadIdx.x % 16 * W;
#pragma unroll
  for (int i = 0; i < RT; i++)
#pragma unroll
    for (int j = 0; j < CT; j++) s[i][j] = 0;
#pragma unroll(HEAD < 256 ? 2 : 1)
  for (int c = 0; c < depth; c += 4) {
    float4 y[CT];
#pragma unroll
    for (int j = 0; j < CT; j++) y[j] = *reinterpret_cast<const float4 *>(b + 16 * j * W + c);
#pragma unroll
    for (int i = 0; i < RT; i++) {
      const float4 x = *reinterpret_cast<const float4 *>(a + 16 * i * W + c);
#pragma unroll
      for (int j = 0; j < CT; j++)
        s[i][j] = madd(x.w, y[j].w, madd(x.z, y[j].z, madd(x.y, y[j].y, madd(x.x, y[j].x, s[i][j]))));
    }
  }
}

// weights writes a thread's results of a product to a tile with rows of COLUMNS + ATTENTION_GAP
// floats. Only the warp that writes a row reads it.
template <int RT, int CT> __device__ __forceinline__ void weights(float *p, const float (&s)[RT][CT]) {
  constexpr int W = 16 * CT + ATTENTION_GAP;
  p += threadIdx.x / 16 * W + threadIdx.x % 16;
  __syncwarp(); // all lanes have read the previous tile
#pragma unroll
  for (int i = 0; i < RT; i++)
#pragma unroll
    for (int j = 0; j < CT; j++) p[16 * i * W + 16 * j] = s[i][j];
  __syncwarp();
}

// accumulate adds to o[i][4g + e] the sum of p[y + 16i][t] · b[t][64g + 4x + e] over t < n, with n
// rounded up to four, for groups g < G. With HEAD 256, groups of features beyond `width` are
// skipped.
template <int HEAD, int G, int RT, int CT>
__device__ __forceinline__ void accumulate(float (&o)[RT][4 * G], const float *p, const float *b, int n, int width) {
  constexpr int W = HEAD + ATTENTION_GAP, PW = 16 * CT + ATTENTION_GAP;
  p += threadIdx.x / 16 * PW;
  b += threadIdx.x % 16 * 4;
  for (int t = 0; t < n; t += 4) {
    float x[RT][4];
#pragma unroll
    for (int i = 0; i < RT; i++) {
      const float4 four = *reinterpret_cast<const float4 *>(p + 16 * i * PW + t);
      x[i][0] = four.x, x[i][1] = four.y, x[i][2] = four.z, x[i][3] = four.w;
    }
#pragma unroll
    for (int u = 0; u < 4; u++)
#pragma unroll
      for (int g = 0; g < G; g++) {
        if (HEAD == 256 && G > 1 && 64 * g >= width) continue;
        const float4 y = *reinterpret_cast<const float4 *>(b + (t + u) * W + 64 * g);
#pragma unroll
        for (int i = 0; i < RT; i++) {
          o[i][4 * g] = madd(x[i][u], y.x, o[i][4 * g]);
          o[i][4 * g + 1] = madd(x[i][u], y.y, o[i][4 * g + 1]);
          o[i][4 * g + 2] = madd(x[i][u], y.z, o[i][4 * g + 2]);
          o[i][4 * g + 3] = madd(x[i][u], y.w, o[i][4 * g + 3]);
        }
      }
  }
}

template <int RT, int N> __device__ __forceinline__ void clear(float (&o)[RT][N]) {
#pragma unroll
  for (int i = 0; i < RT; i++)
#pragma unroll
    for (int c = 0; c < N; c++) o[i][c] = 0;
}

// add_tile adds the product of a tile, which it sums separately: in one chain of additions over
// thousands of tokens, rounding errors would grow. With HEAD 256 it computes 64 features at a time,
// to save registers.
template <int HEAD, int RT, int CT>
__device__ __forceinline__ void add_tile(float (&o)[RT][HEAD / 16], const float *p, const float *b, int n, int width) {
  constexpr int G = HEAD == 256 ? 1 : HEAD / 64;
#pragma unroll
  for (int g = 0; g < HEAD / 64; g += G) {
    if (64 * g >= width) continue;
    float part[RT][4 * G];
    clear(part);
    accumulate<HEAD, G, RT, CT>(part, p, b + 64 * g, n, width);
#pragma unroll
    for (int i = 0; i < RT; i++)
#pragma unroll
      for (int c = 0; c < 4 * G; c++) o[i][4 * g + c] += part[i][c];
  }
}
