// Registers of the scans of the gated delta rule in BF16 (delta_scan.cu): operands and products of
// a warp, the state, and what two warps exchange and write to memory. All results are transposed:
// [16 columns, n rows] in the layout of mma.h.
#pragma once

#include "delta.h"

// Fragment is an operand [16 x 16] with 16 bits of mantissa: the roundings of its elements to BF16,
// and the roundings of what is left. The error of a product is 2^-17 of its terms, near that of
// F32, for twice the work.
struct Fragment {
  uint32_t x[2][4];
  // The elements are columns 0 … 15 of two results.
  __device__ __forceinline__ Fragment(const float (&left)[4], const float (&right)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float *c = i < 2 ? left : right;
      set(i, c[i % 2 * 2], c[i % 2 * 2 + 1]);
    }
  }
  // The same, multiplied by the factors of the columns.
  __device__ __forceinline__ Fragment(const float (&left)[4], const float (&right)[4], const float *by) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float *c = i < 2 ? left : right;
      set(i, factors(by, i), make_float2(c[i % 2 * 2], c[i % 2 * 2 + 1]));
    }
  }
  // The elements of a fragment of BF16, multiplied by the factors of the columns.
  __device__ __forceinline__ Fragment(const uint32_t (&of)[4], const float *by) {
#pragma unroll
    for (int i = 0; i < 4; i++) set(i, factors(by, i), pair_of(of[i]));
  }

 private:
  static __device__ __forceinline__ float2 factors(const float *by, int i) {
    return pair_at(by + i / 2 * 8 + Lane().column);
  }
  __device__ __forceinline__ void set(int i, float left, float right) {
    x[0][i] = pair(left, right), x[1][i] = pair_behind(x[0][i], left, right);
  }
  __device__ __forceinline__ void set(int i, float2 by, float2 v) { set(i, by.x * v.x, by.y * v.y); }
};

// Operand is a tile of a second operand in shared memory: element [k][n] is at n·step + k if it is
// DENSE, otherwise at k·step + n. load loads 16 x 16 elements.
template <bool DENSE> struct Operand {
  uint32_t at;
  int step;
  __device__ __forceinline__ Operand(const bf16 *tile, int step)
      : at((uint32_t)__cvta_generic_to_shared(tile + (DENSE ? quarters_along(step) : quarters_down(step)))),
        step(step) {}
  __device__ __forceinline__ void load(uint32_t (&y)[4], int k, int n) const {
    ldmatrix<!DENSE>(y, at + 2 * (DENSE ? n * step + k : k * step + n));
  }
};

// add_product adds the product of an operand [16 x 16], the sum of PARTS fragments, and rows k …
// k + 15 of b to tiles [lo, hi) of c. All tiles of b are loaded before the first product, and
// neighbouring products add to different tiles of c: an addition to the same one would wait.
template <int PARTS, bool DENSE, int NT>
__device__ __forceinline__ void add_product(float (&c)[NT][4], const uint32_t (&x)[PARTS][4], const Operand<DENSE> &b,
                                            int k, int lo = 0, int hi = NT) {
#pragma unroll
  for (int n0 = 0; n0 < NT; n0 += 8) {
    uint32_t y[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (n0 + 2 * i >= lo && n0 + 2 * i < hi) b.load(y[i], k, 8 * (n0 + 2 * i));
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (n0 + 2 * i >= lo && n0 + 2 * i < hi) mma_pair(c[n0 + 2 * i], c[n0 + 2 * i + 1], x[part], y[i]);
  }
}

// Across is a tile of rows of 16 columns or more. load loads rows k … k + 15, transposed, as a
// fragment.
struct Across {
  uint32_t at;
  int step;
  __device__ __forceinline__ Across(const bf16 *tile, int step)
      : at((uint32_t)__cvta_generic_to_shared(tile + quarters_along(step))), step(step) {}
  __device__ __forceinline__ void load(uint32_t (&x)[4], int k) const { ldmatrix<true>(x, at + 2 * k * step); }
};

// Rounded is a fragment of BF16.
struct Rounded {
  uint32_t x[1][4];
  __device__ __forceinline__ explicit Rounded(const Fragment &f) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[0][i] = f.x[0][i];
  }
  __device__ __forceinline__ Rounded(const float (&left)[4], const float (&right)[4]) {
    x[0][0] = pair(left[0], left[1]), x[0][1] = pair(left[2], left[3]);
    x[0][2] = pair(right[0], right[1]), x[0][3] = pair(right[2], right[3]);
  }
};

// Results is where results [16 columns, n rows], transposed in registers, are written: row r of
// memory begins at to + r·width, and `rows` and `columns` of it exist. full writes a full chunk of
// an even width, if `there`, with conditions that are the same for all rows: more would be in the
// way of other instructions. other writes any chunk. Both write one half of the rows; the other
// warp with these columns writes the other half.
struct Results {
  bf16 *to;
  int width, rows, columns;

  template <int NT> __device__ __forceinline__ void full(const float (&x)[NT][4], int half, bool there) const {
    const Lane lane;
    const int width = (int)in_loop((uint32_t)this->width);
    bf16 *const at = to + (4 * NT * half + lane.row) * width + lane.column;
    const bool left = there && lane.column < columns, right = there && lane.column + 8 < columns;
#pragma unroll
    for (int k = 0; k < NT / 4; k++) {
      uint32_t upper[4], lower[4];
      fragment_of(upper, x, k);
      fragment_of(lower, x, k + NT / 4);
#pragma unroll
      for (int i = 0; i < 4; i++) upper[i] = transposed(half ? lower[i] : upper[i]);
#pragma unroll
      for (int i = 0; i < 4; i++)
        store_if(i % 2 ? right : left, at + (16 * k + i / 2 * 8) * width + i % 2 * 8, upper[i]);
    }
  }
  template <int NT> __device__ __forceinline__ void other(const float (&x)[NT][4], int half) const {
    const Lane lane((int)in_loop(threadIdx.x));
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = 8 * n + lane.column + e % 2, column = lane.row + e / 2 * 8;
        if (2 * n / NT == half && row < rows && column < columns)
          to[row * width + column] = __float2bfloat16_rn(x[n][e]);
      }
  }
};

// write_out writes rows of out, transposed in registers, of which `rows` and `columns` exist.
template <int NT> __device__ __forceinline__ void write_out(const DeltaView &of, bf16 *to, const float (&x)[NT][4],
                                                            int rows, int columns) {
  const Lane lane;
  const bool full = of.vectors && rows >= 8 * NT;
  bf16 *const at = to + lane.row * of.token + lane.column;
#pragma unroll
  for (int k = 0; k < NT; k += 2) {
    Rounded r(x[k], x[k + 1]);
#pragma unroll
    for (int i = 0; i < 4; i++) r.x[0][i] = transposed(r.x[0][i]);
#pragma unroll
    for (int i = 0; i < 4; i++)
      store_if(full && lane.column + i % 2 * 8 < columns, at + (8 * k + i / 2 * 8) * of.token + i % 2 * 8, r.x[0][i]);
  }
  if (full) return;
  const Lane other((int)in_loop(threadIdx.x));
#pragma unroll
  for (int n = 0; n < NT; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = 8 * n + other.column + e % 2, column = other.row + e / 2 * 8;
      if (row < rows && column < columns) to[row * of.token + column] = __float2bfloat16_rn(x[n][e]);
    }
}

// DeltaColumns is a slice of a state [dim_k, 32 columns from c0 of `width`], transposed in
// registers: a warp has 16 columns and HALF rows, from row0 on.
template <int HALF> struct DeltaColumns {
  static constexpr int N = HALF / 8;
  float c[N][4];
  int row0, column0, rows, width;

  __device__ __forceinline__ DeltaColumns(int rows, int width, int c0)
      : row0((int)threadIdx.x / 64 * HALF), column0(c0 + (int)threadIdx.x / 32 % 2 * 16), rows(rows), width(width) {
    zero(c);
  }
  // each calls f for the elements that exist, with their row and column in the state.
  template <typename F> __device__ __forceinline__ void each(F f, int thread = (int)threadIdx.x) {
    const Lane lane(thread);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = row0 + 8 * n + lane.column + e % 2, column = column0 + lane.row + e / 2 * 8;
        if (row < rows && column < width) f(row, column, c[n][e]);
      }
  }
  __device__ __forceinline__ void identity() {
    each([](int row, int column, float &x) { x = row == column; });
  }
  __device__ __forceinline__ void load(const float *from) {
    each([&](int row, int column, float &x) { x = from[(int64_t)row * width + column]; });
  }
  __device__ __forceinline__ void store(float *to) {
    each([&](int row, int column, float x) { to[(int64_t)row * width + column] = x; });
  }
  // times computes the product with rows of dim_k elements, of which b has this warp's half, and
  // writes the roundings of the state, [width, dim_k], if `writes` and there are as many rows as in
  // registers. also(k, fragment) is called for each 16 rows of the state.
  template <int NT, class F> __device__ __forceinline__ void times(float (&r)[NT][4], const Operand<true> &b,
                                                                   bf16 *state, bool writes, const F &also) const {
    const Lane at;
    const int column = column0 + at.row;
    bf16 *const left = state + (int64_t)column * rows + row0 + at.column, *const right = left + 8 * (int64_t)rows;
    writes = writes && rows == 2 * HALF;
    const bool in_left = writes && column < width, in_right = writes && column + 8 < width;
#pragma unroll
    for (int k = 0; k < HALF; k += 16) {
      const Fragment x(c[k / 8], c[k / 8 + 1]);
      add_product(r, x.x, b, k);
#pragma unroll
      for (int i = 0; i < 4; i++)
        store_if(i % 2 ? in_right : in_left, (i % 2 ? right : left) + k + i / 2 * 8, x.x[0][i]);
      also(k, x);
    }
  }
  // write writes the roundings of a state with fewer rows.
  __device__ __forceinline__ void write(bf16 *state) {
    each([&](int row, int column, float x) { state[(int64_t)column * rows + row] = __float2bfloat16_rn(x); },
         (int)in_loop(threadIdx.x));
  }
  // decay multiplies the state by `by` and adds a sum, so that the state is rounded once.
  __device__ __forceinline__ void decay(float by, const float (&sum)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) c[n][e] = madd(by, c[n][e], sum[n][e]);
  }
};

// Exchange adds the results of the two warps that share columns. put writes a warp's own result,
// and after a barrier, add adds the other's. Both get the same sum. put_half is for twice as many
// tiles, of which each warp gets the sum of one half.
template <int NT> struct Exchange {
  float4 *mine, *other;
  __device__ __forceinline__ explicit Exchange(void *shared) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    mine = (float4 *)shared + warp * NT * 32 + lane, other = (float4 *)shared + (warp ^ 2) * NT * 32 + lane;
  }
  __device__ __forceinline__ void put(const float (&r)[NT][4]) const {
#pragma unroll
    for (int n = 0; n < NT; n++) mine[32 * n] = make_float4(r[n][0], r[n][1], r[n][2], r[n][3]);
  }
  __device__ __forceinline__ void add(float (&r)[NT][4]) const {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      const float4 x = other[32 * n];
      r[n][0] += x.x, r[n][1] += x.y, r[n][2] += x.z, r[n][3] += x.w;
    }
  }
  // put_half writes the other warp's half and returns this warp's in `own`.
  __device__ __forceinline__ void put_half(const float (&r)[2 * NT][4], float (&own)[NT][4], int half) const {
    float others[NT][4];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        own[n][e] = half ? r[NT + n][e] : r[n][e], others[n][e] = half ? r[n][e] : r[NT + n][e];
    put(others);
  }
};
