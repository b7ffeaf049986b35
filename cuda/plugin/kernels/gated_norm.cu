// The gated RMSNorm of linear attention (Gated DeltaNet, arXiv:2412.06464): y = x · rstd · w ·
// silu(gate) over the last axis of x [T, N] or [T, H, N], rstd = 1 / sqrt(mean(x²) + eps). A group
// of 16 or 32 threads keeps a row in registers. Longer rows are computed by a block and read twice.
#include "check.h"
#include "columns.h"
#include "norm.h"
#include "values.h"

namespace {

constexpr int BLOCK = 256;

template <typename T> struct Forward {
  Rows rows; // x, gate, y
  const T *x, *gate, *w;
  T *y;
  float *rstd;
  int64_t n;
  float eps;
};

// gated_forward: in a group of 16 or 32 threads, a thread has one pack of the row. In a block, a
// thread has any number of packs.
template <typename T, int G, bool ALIGNED> __global__ void __launch_bounds__(BLOCK) gated_forward(Forward<T> a) {
  constexpr int K = Wide<T>::LANES, GROUPS = BLOCK / G;
  __shared__ float room[BLOCK / 32];
  const int lane = threadIdx.x % G;
  for (int64_t base = (int64_t)blockIdx.x * GROUPS; base < a.rows.rows; base += (int64_t)gridDim.x * GROUPS) {
    const int64_t r = base + threadIdx.x / G;
    // 0: the group has no row, but takes part in the barriers
    const int64_t n = r < a.rows.rows ? a.n : 0;
    int64_t t, h;
    a.rows.split(r, &t, &h);
    const T *x = a.x + t * a.rows.token[0] + h * a.rows.head[0],
            *gate = a.gate + t * a.rows.token[1] + h * a.rows.head[1];
    T *y = a.y + t * a.rows.token[2] + h * a.rows.head[2];
    float v[K], sum = 0;
    for (int64_t c = lane * K; c < n; c += G * K) {
      load_some<ALIGNED, K>(x + c, n - c, v);
#pragma unroll
      for (int i = 0; i < K; i++) sum = madd(v[i], v[i], sum);
    }
    const float rstd = 1.0f / sqrtf(group_sum<G>(sum, room) / (float)a.n + a.eps);
    if (lane == 0 && n > 0) a.rstd[r] = rstd;
    for (int64_t c = lane * K; c < n; c += G * K) {
      float w[K], g[K];
      if (G > 32) load_some<ALIGNED, K>(x + c, n - c, v);
      load_some<ALIGNED, K>(a.w + c, n - c, w);
      load_some<ALIGNED, K>(gate + c, n - c, g);
#pragma unroll
      for (int i = 0; i < K; i++) v[i] = v[i] * rstd * w[i] * (g[i] * sigmoid<T>(g[i]));
      store_some<ALIGNED, K>(y + c, n - c, v);
    }
    if (G > 32) __syncthreads();
  }
}

template <typename T> struct Backward {
  Rows rows; // x, gate, dy, dx, dgate
  const T *x, *gate, *dy, *w;
  const float *rstd;
  T *dx, *dgate;
  float *partial; // [parts, n]
  int64_t n, parts;
};

// Row has the addresses of one row's operands.
template <typename T> struct Row {
  const T *x, *gate, *dy;
  T *dx, *dgate;
  __device__ __forceinline__ Row(const Backward<T> &a, int64_t r) {
    int64_t t, h;
    a.rows.split(r, &t, &h);
    x = a.x + t * a.rows.token[0] + h * a.rows.head[0], gate = a.gate + t * a.rows.token[1] + h * a.rows.head[1];
    dy = a.dy + t * a.rows.token[2] + h * a.rows.head[2];
    dx = a.dx + t * a.rows.token[3] + h * a.rows.head[3], dgate = a.dgate + t * a.rows.token[4] + h * a.rows.head[4];
  }
};

// Unit is a pack of a row: x, the gradient of the normalized row (before the gate), and the gate's
// gradient.
template <typename T, bool ALIGNED> struct Unit {
  enum { K = Wide<T>::LANES };
  float x[K], dnorm[K], dgate[K], w[K];
  // read loads the pack, computes its gradients and returns Σ dnorm·w·x.
  __device__ __forceinline__ float read(const Backward<T> &a, const Row<T> &row, int64_t c, int64_t n, float rstd) {
    float g[K], d[K], sum = 0;
    load_some<ALIGNED, K>(row.x + c, n - c, x);
    load_some<ALIGNED, K>(row.gate + c, n - c, g);
    load_some<ALIGNED, K>(row.dy + c, n - c, d);
    load_some<ALIGNED, K>(a.w + c, n - c, w);
#pragma unroll
    for (int i = 0; i < K; i++) {
      const float s = sigmoid<T>(g[i]);
      dnorm[i] = d[i] * (g[i] * s);
      dgate[i] = d[i] * (x[i] * rstd * w[i]) * silu_slope(g[i], s);
      sum = madd(dnorm[i] * w[i], x[i], sum);
    }
    return sum;
  }
  __device__ __forceinline__ void write(const Row<T> &row, int64_t c, int64_t n, float rstd, float mean) {
    store_some<ALIGNED, K>(row.dgate + c, n - c, dgate);
#pragma unroll
    for (int i = 0; i < K; i++) dgate[i] = madd(dnorm[i] * rstd, w[i], -x[i] * mean);
    store_some<ALIGNED, K>(row.dx + c, n - c, dgate);
  }
};

// gated_backward computes a part of the rows: group g of a block has rows g, g + GROUPS, …, and
// each thread sums the weight's gradient of its own columns.
template <typename T, int G, bool ALIGNED> __global__ void __launch_bounds__(BLOCK) gated_backward(Backward<T> a) {
  constexpr int K = Wide<T>::LANES, GROUPS = BLOCK / G;
  __shared__ float sums[GROUPS][apart(G * K)];
  const int lane = threadIdx.x % G, group = threadIdx.x / G;
  const int64_t c = lane * K;
  for (int64_t part = blockIdx.x; part < a.parts; part += gridDim.x) {
    const int64_t end = part_at(a.rows.rows, a.parts, part + 1);
    float dw[K];
#pragma unroll
    for (int i = 0; i < K; i++) dw[i] = 0;
    for (int64_t base = part_at(a.rows.rows, a.parts, part); base < end; base += GROUPS) {
      const int64_t r = base + group, n = r < end ? a.n : 0;
      const Row<T> row(a, r);
      const float rstd = n > 0 ? a.rstd[r] : 0.0f;
      Unit<T, ALIGNED> u;
      const float mean = rstd * rstd * rstd * (group_sum<G>(u.read(a, row, c, n, rstd), nullptr) / (float)a.n);
#pragma unroll
      for (int i = 0; i < K; i++) dw[i] = madd(u.dnorm[i], u.x[i] * rstd, dw[i]);
      u.write(row, c, n, rstd, mean);
    }
#pragma unroll
    for (int i = 0; i < K; i++) sums[group][apart(lane * K) + i] = dw[i];
    __syncthreads();
    for (int e = threadIdx.x; e < a.n; e += BLOCK) {
      float sum = 0;
      for (int g = 0; g < GROUPS; g++) sum += sums[g][apart(e)];
      a.partial[part * a.n + e] = sum;
    }
    __syncthreads();
  }
}

// gated_backward_long writes dx and dgate for rows that are too long for a group. The weight's
// gradient is a column sum (columns.h).
template <typename T, bool ALIGNED> __global__ void __launch_bounds__(BLOCK) gated_backward_long(Backward<T> a) {
  constexpr int K = Wide<T>::LANES;
  __shared__ float room[BLOCK / 32];
  for (int64_t r = blockIdx.x; r < a.rows.rows; r += gridDim.x) {
    const Row<T> row(a, r);
    const float rstd = a.rstd[r];
    Unit<T, ALIGNED> u;
    float dot = 0;
    for (int64_t c = threadIdx.x * K; c < a.n; c += BLOCK * K) dot += u.read(a, row, c, a.n, rstd);
    const float mean = rstd * rstd * rstd * (block_sum(dot, room) / (float)a.n);
    for (int64_t c = threadIdx.x * K; c < a.n; c += BLOCK * K) {
      u.read(a, row, c, a.n, rstd);
      u.write(row, c, a.n, rstd, mean);
    }
    __syncthreads();
  }
}

// GatedRows supplies the rows dnorm·x·rstd, whose column sum is the weight's gradient.
template <typename T> struct GatedRows {
  enum { K = Wide<T>::LANES };
  Backward<T> a;
  GatedRows from(int64_t column) const {
    GatedRows r = *this;
    r.a.x += column, r.a.gate += column, r.a.dy += column;
    return r;
  }
  template <bool ALIGNED>
  __device__ __forceinline__ void get(int64_t r, int64_t column, int64_t left, float (&v)[K]) const {
    const Row<T> row(a, r);
    float g[K], d[K];
    load_some<ALIGNED, K>(row.x + column, left, v);
    load_some<ALIGNED, K>(row.gate + column, left, g);
    load_some<ALIGNED, K>(row.dy + column, left, d);
    const float rstd = a.rstd[r];
#pragma unroll
    for (int i = 0; i < K; i++) v[i] = d[i] * (g[i] * sigmoid<T>(g[i])) * (v[i] * rstd);
  }
};

// norm_shape checks the arguments that forward and backward share. It returns the type.
int norm_shape(Check &c, const uly_tensor &x, const uly_tensor &gate, const uly_tensor &w, const uly_tensor &rstd) {
  const int type = c.compute("x", x);
  if (x.ndim != 2 && x.ndim != 3) {
    c.refuse("x is %s: want [T, N] or [T, H, N]", text_of(x).c_str());
    return type;
  }
  check_norm(c, type, "x", x, w, rstd);
  c.rows("gate", gate, type, Shape(x));
  return type;
}

// aligned_rows reports whether all rows of the operands begin and end at multiples of 16 bytes.
template <typename T>
bool aligned_rows(const Rows &rows, std::initializer_list<const void *> operands, const void *w, int64_t n) {
  bool ok = n % Wide<T>::LANES == 0 && aligned16(w, sizeof(T));
  int o = 0;
  for (const void *p : operands) ok = ok && aligned16(p, sizeof(T), rows.token[o], rows.head[o]), o++;
  return ok;
}

template <typename T, int G> void start_forward(uly_stream *s, const Forward<T> &a, bool aligned) {
  const unsigned grid = blocks_for(a.rows.rows, BLOCK / G);
  if (aligned) LAUNCH((gated_forward<T, G, true>), grid, BLOCK, 0, s, a);
  else LAUNCH((gated_forward<T, G, false>), grid, BLOCK, 0, s, a);
}

template <typename T> void forward_of(uly_stream *s, const uly_gated_rmsnorm *p) {
  const uly_tensor *operands[] = {&p->x, &p->gate, &p->y};
  const int64_t n = p->w.shape[0], packs = ceil_div(n, Wide<T>::LANES);
  const Forward<T> a = {Rows(operands, 3),
                        (const T *)p->x.data,
                        (const T *)p->gate.data,
                        (const T *)p->w.data,
                        (T *)p->y.data,
                        (float *)p->rstd.data,
                        n,
                        (float)p->eps};
  const bool aligned = aligned_rows<T>(a.rows, {a.x, a.gate, a.y}, a.w, n);
  if (packs <= 16) start_forward<T, 16>(s, a, aligned);
  else if (packs <= 32) start_forward<T, 32>(s, a, aligned);
  else start_forward<T, 256>(s, a, aligned);
}

template <typename T, int G> void start_backward(uly_stream *s, Backward<T> &a, float *dw, bool aligned) {
  a.parts = parts_of(a.rows.rows, a.n, 16 * (BLOCK / G), s->scratch_bytes / 4);
  if (aligned) LAUNCH((gated_backward<T, G, true>), blocks_for(a.parts, 1), BLOCK, 0, s, a);
  else LAUNCH((gated_backward<T, G, false>), blocks_for(a.parts, 1), BLOCK, 0, s, a);
  start_fold(s, dw, a.n, a.parts);
}

template <typename T> void backward_of(uly_stream *s, const uly_gated_rmsnorm_grad *p) {
  const uly_tensor *operands[] = {&p->x, &p->gate, &p->dy, &p->dx, &p->dgate};
  const int64_t n = p->w.shape[0], packs = ceil_div(n, Wide<T>::LANES);
  Backward<T> a = {Rows(operands, 5),
                   (const T *)p->x.data,
                   (const T *)p->gate.data,
                   (const T *)p->dy.data,
                   (const T *)p->w.data,
                   (const float *)p->rstd.data,
                   (T *)p->dx.data,
                   (T *)p->dgate.data,
                   (float *)s->scratch,
                   n,
                   0};
  const bool aligned = aligned_rows<T>(a.rows, {a.x, a.gate, a.dy, a.dx, a.dgate}, a.w, n);
  float *dw = (float *)p->dw.data;
  if (packs <= 16) return start_backward<T, 16>(s, a, dw, aligned);
  if (packs <= 32) return start_backward<T, 32>(s, a, dw, aligned);
  // The column sums read dy and gate. They run before dx and dgate are written, which may be the
  // same memory.
  start_columns(s, GatedRows<T>{a}, aligned, a.rows.rows, n, dw);
  const unsigned grid = blocks_for(a.rows.rows, 1);
  if (aligned) LAUNCH((gated_backward_long<T, true>), grid, BLOCK, 0, s, a);
  else LAUNCH((gated_backward_long<T, false>), grid, BLOCK, 0, s, a);
}

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_gated_rmsnorm *a = (const uly_gated_rmsnorm *)args;
  Check c(d, "GatedRMSNormForward");
  const int type = norm_shape(c, a->x, a->gate, a->w, a->rstd);
  c.rows("y", a->y, type, Shape(a->x));
  if (c.failed() || elements(a->x) == 0) return c.code;
  if (type == ULY_F32) forward_of<float>(s, a);
  else forward_of<bf16>(s, a);
  return check_launch(d, "cuda.GatedRMSNormForward");
}

int32_t backward(uly_device *d, uly_stream *s, const void *args) {
  const uly_gated_rmsnorm_grad *a = (const uly_gated_rmsnorm_grad *)args;
  Check c(d, "GatedRMSNormBackward");
  const int type = norm_shape(c, a->x, a->gate, a->w, a->rstd);
  c.rows("dy", a->dy, type, Shape(a->x));
  c.rows("dx", a->dx, type, Shape(a->x));
  c.rows("dgate", a->dgate, type, Shape(a->x));
  c.dense("dw", a->dw, ULY_F32, Shape(a->w));
  if (c.failed() || elements(a->x) == 0) return c.code;
  if (type == ULY_F32) backward_of<float>(s, a);
  else backward_of<bf16>(s, a);
  return check_launch(d, "cuda.GatedRMSNormBackward");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_GATED_RMSNORM_FORWARD, "own", forward},
    {ULY_OP_GATED_RMSNORM_BACKWARD, "own", backward},
});
