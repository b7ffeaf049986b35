// RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) over the last axis of x [N], [T, N] or [T, H,
// N]: rstd = 1 / sqrt(mean(x²) + eps), y = x · rstd · (w + centre). A group of 16, 32 or 256
// threads keeps a row in registers; longer rows are read twice. In AddRMSNorm, the same kernel
// computes x as the sum of two operands and writes it. Each block sums the weight's gradient over a
// part of the rows, and a second kernel adds the parts.
#include "check.h"
#include "columns.h"
#include "norm.h"
#include "values.h"

namespace {

constexpr int BLOCK = 256;

template <typename T> struct Forward {
  Rows rows; // x, y; with ADD: added, sum
  const T *x, *w;
  T *y;
  float *rstd;
  int64_t n;
  float eps, centre;
  const T *added;
  T *sum;
};

// norm_forward: a thread keeps M packs of its row in registers. M = 0 is for rows of any length,
// which are read twice; its launch bound of four blocks for each multiprocessor prevents the
// compiler from spilling registers to reach a higher occupancy. With ADD, the row is x + added,
// rounded to T and written to sum, as by Add. A row in registers is loaded before sum is written.
template <typename T, int G, int M, bool ADD, bool ALIGNED> __global__ void __launch_bounds__(BLOCK, M ? 1 : 4)
    norm_forward(Forward<T> a) {
  constexpr int K = Wide<T>::LANES, GROUPS = BLOCK / G;
  __shared__ float room[BLOCK / 32];
  const int lane = threadIdx.x % G;
  for (int64_t base = (int64_t)blockIdx.x * GROUPS; base < a.rows.rows; base += (int64_t)gridDim.x * GROUPS) {
    const int64_t r = base + threadIdx.x / G;
    // 0: the group has no row, but takes part in the barriers
    const int64_t n = r < a.rows.rows ? a.n : 0;
    int64_t t, h;
    a.rows.split(r, &t, &h);
    const T *x = a.x + t * a.rows.token[0] + h * a.rows.head[0];
    T *y = a.y + t * a.rows.token[1] + h * a.rows.head[1];
    const T *added = ADD ? a.added + t * a.rows.token[2] + h * a.rows.head[2] : nullptr;
    T *sum = ADD ? a.sum + t * a.rows.token[3] + h * a.rows.head[3] : nullptr;
    Pack<T, K> kept[M ? M : 1], more[M ? M : 1];
    float squares = 0;
    const auto read = [&](int m, int64_t c) {
      load_raw<ALIGNED, K>(x + c, n - c, kept[m]);
      if (ADD) load_raw<ALIGNED, K>(added + c, n - c, more[m]);
    };
    const auto add = [&](int m, int64_t c) {
      if (ADD) {
#pragma unroll
        for (int i = 0; i < K; i++) kept[m].v[i] = narrow<T>(widen(kept[m].v[i]) + widen(more[m].v[i]));
        store_raw<ALIGNED, K>(sum + c, n - c, kept[m]);
      }
#pragma unroll
      for (int i = 0; i < K; i++) squares += widen(kept[m].v[i]) * widen(kept[m].v[i]);
    };
    if (M) {
#pragma unroll
      for (int m = 0; m < M; m++) read(m, (m * G + lane) * K);
#pragma unroll
      for (int m = 0; m < M; m++) add(m, (m * G + lane) * K);
    } else {
      for (int64_t c = lane * K; c < n; c += G * K) {
        read(0, c);
        add(0, c);
      }
      if (ADD) x = sum;
    }
    const float rstd = 1.0f / sqrtf(group_sum<G>(squares, room) / (float)a.n + a.eps);
    if (lane == 0 && n > 0) a.rstd[r] = rstd;
    const auto write = [&](const Pack<T, K> &v, int64_t c) {
      float w[K];
      load_some<ALIGNED, K>(a.w + c, n - c, w);
#pragma unroll
      for (int i = 0; i < K; i++) w[i] = (w[i] + a.centre) * (widen(v.v[i]) * rstd);
      store_some<ALIGNED, K>(y + c, n - c, w);
    };
    if (M) {
#pragma unroll
      for (int m = 0; m < M; m++) write(kept[m], (m * G + lane) * K);
    } else {
      for (int64_t c = lane * K; c < n; c += G * K) {
        load_raw<ALIGNED, K>(x + c, n - c, kept[0]);
        write(kept[0], c);
      }
    }
    if (G == BLOCK) __syncthreads();
  }
}

template <typename T> struct Backward {
  Rows rows; // x, dy, dx
  const T *x, *w, *dy;
  const float *rstd;
  T *dx;
  float *partial; // [parts, n]
  int64_t n, parts;
  float centre;
  bool add;
};

// norm_gradient writes dx = rstd·dy·w - x·rstd³·mean(dy·w·x) of a unit of 16 bytes, plus `was` if
// add is set. w stands for weight + centre; mean is rstd³·mean(dy·w·x).
template <typename T, bool ALIGNED>
__device__ __forceinline__ void norm_gradient(const uint4 &x, const uint4 &dy, const uint4 &was, const uint4 &w, T *dx,
                                              int64_t left, float centre, float rstd, float mean, bool add) {
  constexpr int K = Wide<T>::LANES;
  float v[K];
#pragma unroll
  for (int i = 0; i < K; i++) v[i] = in_word<T>(dy, i) * rstd * (in_word<T>(w, i) + centre) - in_word<T>(x, i) * mean;
  if (add) {
#pragma unroll
    for (int i = 0; i < K; i++) v[i] += in_word<T>(was, i);
  }
  store_some<ALIGNED, K>(dx, left, v);
}

// norm_dot returns Σ dy·w·x of a unit of 16 bytes.
template <typename T>
__device__ __forceinline__ float norm_dot(const uint4 &x, const uint4 &dy, const uint4 &w, float centre) {
  constexpr int K = Wide<T>::LANES;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < K; i++) sum += in_word<T>(dy, i) * (in_word<T>(w, i) + centre) * in_word<T>(x, i);
  return sum;
}

// NormRow is a thread's units of x and dy in one row of the backward pass. They stay as loaded
// (Word in values.h), so that a row can be in flight while another is summed.
template <typename T, int G, int M, bool ALIGNED> struct NormRow {
  enum { K = Wide<T>::LANES };
  uint4 x[M], dy[M];

  // load loads row r. Rows from `end` on are zeros.
  __device__ __forceinline__ void load(const Backward<T> &a, int64_t r, int64_t end) {
    const int c = threadIdx.x % G * K;
    const int64_t left = r < end ? a.n : 0;
    int64_t t, h;
    a.rows.split(r, &t, &h);
    const T *xs = a.x + t * a.rows.token[0] + h * a.rows.head[0] + c,
            *ds = a.dy + t * a.rows.token[1] + h * a.rows.head[1] + c;
#pragma unroll
    for (int m = 0; m < M; m++) {
      load_word<ALIGNED, K>(xs + m * G * K, left - c - m * G * K, x[m]);
      load_word<ALIGNED, K>(ds + m * G * K, left - c - m * G * K, dy[m]);
    }
  }
};

// norm_backward computes a part of the rows: group g of a block has rows g, g + GROUPS, …, and each
// thread sums the weight's gradient of its own columns. If rows are aligned, x and dy of the next
// row are loaded before a row is summed, and the dx to add to before the sum. A multiprocessor with
// two blocks then has 48 KB in flight for rows of 4096 in BF16. The thread's weights stay in
// registers. `room` alternates between rows, which saves a barrier for each row.
template <typename T, int G, int M, bool ALIGNED> __global__ void __launch_bounds__(BLOCK, M > 2 ? 1 : 2)
    norm_backward(Backward<T> a) {
  constexpr int K = Wide<T>::LANES, GROUPS = BLOCK / G;
  __shared__ float room[2][BLOCK / 32];
  __shared__ float sums[GROUPS == 1 ? 1 : GROUPS][GROUPS == 1 ? 1 : apart(G * M * K)];
  const int lane = threadIdx.x % G, group = threadIdx.x / G;
  uint4 w[M];
#pragma unroll
  for (int m = 0; m < M; m++) load_word<ALIGNED, K>(a.w + (m * G + lane) * K, a.n - (m * G + lane) * K, w[m]);
  for (int64_t part = blockIdx.x; part < a.parts; part += gridDim.x) {
    const int64_t first = part_at(a.rows.rows, a.parts, part), end = part_at(a.rows.rows, a.parts, part + 1);
    float dw[M][K];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
      for (int i = 0; i < K; i++) dw[m][i] = 0;
    NormRow<T, G, M, ALIGNED> next;
    if (ALIGNED) next.load(a, first + group, end);
    int turn = 0;
    for (int64_t r = first + group; r - group < end; r += GROUPS, turn ^= 1) {
      if (!ALIGNED) next.load(a, r, end); // single elements take more registers
      const NormRow<T, G, M, ALIGNED> row = next;
      if (ALIGNED) next.load(a, r + GROUPS, end);
      const int64_t n = r < end ? a.n : 0;
      int64_t t, h;
      a.rows.split(r, &t, &h);
      T *dx = a.dx + t * a.rows.token[2] + h * a.rows.head[2];
      const float rstd = n > 0 ? a.rstd[r] : 0.0f;
      uint4 was[M] = {};
      float dot = 0;
#pragma unroll
      for (int m = 0; m < M; m++)
        if (a.add) load_word<ALIGNED, K>(dx + (m * G + lane) * K, n - (m * G + lane) * K, was[m]);
#pragma unroll
      for (int m = 0; m < M; m++) dot += norm_dot<T>(row.x[m], row.dy[m], w[m], a.centre);
      const float mean = rstd * rstd * rstd * (group_sum<G>(dot, room[turn]) / (float)a.n);
#pragma unroll
      for (int m = 0; m < M; m++) {
        const int64_t c = (m * G + lane) * K;
        norm_gradient<T, ALIGNED>(row.x[m], row.dy[m], was[m], w[m], dx + c, n - c, a.centre, rstd, mean, a.add);
#pragma unroll
        for (int i = 0; i < K; i++) dw[m][i] += in_word<T>(row.dy[m], i) * rstd * in_word<T>(row.x[m], i);
      }
    }
    if (G == BLOCK) __syncthreads(); // the next part begins with the first half of the room
    float *partial = a.partial + part * a.n;
    if (GROUPS == 1) {
#pragma unroll
      for (int m = 0; m < M; m++) {
        const int64_t c = (m * G + lane) * K;
        store_some<ALIGNED, K>(partial + c, a.n - c, dw[m]);
      }
    } else {
#pragma unroll
      for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < K; i++) sums[group][apart((m * G + lane) * K) + i] = dw[m][i];
      __syncthreads();
      for (int c = threadIdx.x; c < a.n; c += BLOCK) {
        float sum = 0;
        for (int g = 0; g < GROUPS; g++) sum += sums[g][apart(c)];
        partial[c] = sum;
      }
      __syncthreads();
    }
  }
}

// The blocks of a multiprocessor for norm_backward_long. With four, a thread has 64 registers,
// which are enough for sm_90a; on sm_80 and sm_100 it spills 8 and 52 bytes.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 900
constexpr int LONG_BLOCKS = 4;
#else
constexpr int LONG_BLOCKS = 3;
#endif

// norm_backward_long writes dx for rows that are too long for registers. The weight's gradient is a
// column sum (columns.h).
template <typename T, bool ALIGNED> __global__ void __launch_bounds__(BLOCK, LONG_BLOCKS)
    norm_backward_long(Backward<T> a) {
  constexpr int K = Wide<T>::LANES;
  __shared__ float room[BLOCK / 32];
  for (int64_t r = blockIdx.x; r < a.rows.rows; r += gridDim.x) {
    int64_t t, h;
    a.rows.split(r, &t, &h);
    const T *x = a.x + t * a.rows.token[0] + h * a.rows.head[0], *dy = a.dy + t * a.rows.token[1] + h * a.rows.head[1];
    T *dx = a.dx + t * a.rows.token[2] + h * a.rows.head[2];
    const float rstd = a.rstd[r];
    float dot = 0;
#pragma unroll 2
    for (int64_t c = threadIdx.x * K; c < a.n; c += BLOCK * K) {
      uint4 xs, ds, w;
      load_word<ALIGNED, K>(x + c, a.n - c, xs);
      load_word<ALIGNED, K>(dy + c, a.n - c, ds);
      load_word<ALIGNED, K>(a.w + c, a.n - c, w);
      dot += norm_dot<T>(xs, ds, w, a.centre);
    }
    const float mean = rstd * rstd * rstd * (block_sum(dot, room) / (float)a.n);
    for (int64_t c = threadIdx.x * K; c < a.n; c += BLOCK * K) {
      uint4 xs, ds, was = {}, w;
      load_word<ALIGNED, K>(x + c, a.n - c, xs);
      load_word<ALIGNED, K>(dy + c, a.n - c, ds);
      load_word<ALIGNED, K>(a.w + c, a.n - c, w);
      if (a.add) load_word<ALIGNED, K>(dx + c, a.n - c, was);
      norm_gradient<T, ALIGNED>(xs, ds, was, w, dx + c, a.n - c, a.centre, rstd, mean, a.add);
    }
    __syncthreads();
  }
}

// NormRows supplies the rows dy·x·rstd, whose column sum is the weight's gradient.
template <typename T> struct NormRows {
  enum { K = Wide<T>::LANES };
  Rows rows;
  const T *x, *dy;
  const float *rstd;
  NormRows from(int64_t column) const { return {rows, x + column, dy + column, rstd}; }
  template <bool ALIGNED>
  __device__ __forceinline__ void get(int64_t r, int64_t column, int64_t left, float (&v)[K]) const {
    int64_t t, h;
    rows.split(r, &t, &h);
    float g[K];
    load_some<ALIGNED, K>(x + t * rows.token[0] + h * rows.head[0] + column, left, v);
    load_some<ALIGNED, K>(dy + t * rows.token[1] + h * rows.head[1] + column, left, g);
    const float f = rstd[r];
#pragma unroll
    for (int i = 0; i < K; i++) v[i] *= g[i] * f;
  }
};

// norm_shape checks the arguments that all forward and backward passes share. It returns the type.
// `name` is the name of the input x.
int norm_shape(Check &c, const char *name, const uly_tensor &x, const uly_tensor &w, const uly_tensor &rstd) {
  const int type = c.compute(name, x);
  if (x.ndim < 1 || x.ndim > 3) {
    c.refuse("%s is %s: want [N], [T, N] or [T, H, N]", name, text_of(x).c_str());
    return type;
  }
  check_norm(c, type, name, x, w, rstd);
  return type;
}

// aligned_rows reports whether all rows of an operand begin at multiples of 16 bytes.
template <typename T> bool aligned_rows(const Rows &rows, int operand, const void *p) {
  return aligned16(p, sizeof(T), rows.token[operand], rows.head[operand]);
}

template <typename T, int G, int M, bool ADD> void start_forward(uly_stream *s, const Forward<T> &a, bool aligned) {
  const unsigned grid = blocks_for(a.rows.rows, BLOCK / G);
  if (aligned) LAUNCH((norm_forward<T, G, M, ADD, true>), grid, BLOCK, 0, s, a);
  else LAUNCH((norm_forward<T, G, M, ADD, false>), grid, BLOCK, 0, s, a);
}

template <typename T, bool ADD> void start_norm(uly_stream *s, const Forward<T> &a) {
  constexpr int K = Wide<T>::LANES;
  bool aligned =
      a.n % K == 0 && aligned_rows<T>(a.rows, 0, a.x) && aligned_rows<T>(a.rows, 1, a.y) && aligned16(a.w, sizeof(T));
  if (ADD) aligned = aligned && aligned_rows<T>(a.rows, 2, a.added) && aligned_rows<T>(a.rows, 3, a.sum);
  const int64_t packs = ceil_div(a.n, K);
  if (packs <= 16) start_forward<T, 16, 1, ADD>(s, a, aligned);
  else if (packs <= 32) start_forward<T, 32, 1, ADD>(s, a, aligned);
  else if (packs <= 64) start_forward<T, 32, 2, ADD>(s, a, aligned);
  else if (packs <= 256) start_forward<T, 256, 1, ADD>(s, a, aligned);
  else if (packs <= 512) start_forward<T, 256, 2, ADD>(s, a, aligned);
  else if (packs <= 768) start_forward<T, 256, 3, ADD>(s, a, aligned);
  else if (packs <= 1024) start_forward<T, 256, 4, ADD>(s, a, aligned);
  else start_forward<T, 256, 0, ADD>(s, a, aligned);
}

// forward_of returns the kernel's arguments for the norm of x. p has the other arguments: it is a
// uly_rmsnorm or a uly_add_rmsnorm.
template <typename T, typename A> Forward<T> forward_of(const Rows &rows, const uly_tensor &x, const A *p) {
  return {rows,           (const T *)x.data,     (const T *)p->w.data,
          (T *)p->y.data, (float *)p->rstd.data, x.shape[x.ndim - 1],
          (float)p->eps,  (float)p->centre,      nullptr,
          nullptr};
}

template <typename T> void norm_of(uly_stream *s, const uly_rmsnorm *p) {
  const uly_tensor *operands[] = {&p->x, &p->y};
  start_norm<T, false>(s, forward_of<T>(Rows(operands, 2), p->x, p));
}

template <typename T> void add_norm_of(uly_stream *s, const uly_add_rmsnorm *p) {
  const uly_tensor *operands[] = {&p->a, &p->y, &p->b, &p->sum};
  Forward<T> a = forward_of<T>(Rows(operands, 4), p->a, p);
  a.added = (const T *)p->b.data, a.sum = (T *)p->sum.data;
  start_norm<T, true>(s, a);
}

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_rmsnorm *a = (const uly_rmsnorm *)args;
  Check c(d, "RMSNormForward");
  const int type = norm_shape(c, "x", a->x, a->w, a->rstd);
  c.rows("y", a->y, type, Shape(a->x));
  if (c.failed() || elements(a->x) == 0) return c.code;
  if (type == ULY_F32) norm_of<float>(s, a);
  else norm_of<bf16>(s, a);
  return check_launch(d, "cuda.RMSNormForward");
}

int32_t add_forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_add_rmsnorm *a = (const uly_add_rmsnorm *)args;
  Check c(d, "AddRMSNorm");
  const int type = norm_shape(c, "a", a->a, a->w, a->rstd);
  c.rows("b", a->b, type, Shape(a->a));
  c.rows("sum", a->sum, type, Shape(a->a));
  c.rows("y", a->y, type, Shape(a->a));
  if (c.failed() || elements(a->a) == 0) return c.code;
  if (a->sum.data == a->y.data) c.refuse("sum and y are the same memory; a and b may be overwritten, but not sum");
  if (c.failed()) return c.code;
  if (type == ULY_F32) add_norm_of<float>(s, a);
  else add_norm_of<bf16>(s, a);
  return check_launch(d, "cuda.AddRMSNorm");
}

// start_backward gives each group at least 16 rows of a part, so that there are few partial sums.
template <typename T, int G, int M> void start_backward(uly_stream *s, Backward<T> &a, float *dw, bool aligned) {
  a.parts = parts_of(a.rows.rows, a.n, 16 * (BLOCK / G), s->scratch_bytes / 4);
  if (aligned) LAUNCH((norm_backward<T, G, M, true>), blocks_for(a.parts, 1), BLOCK, 0, s, a);
  else LAUNCH((norm_backward<T, G, M, false>), blocks_for(a.parts, 1), BLOCK, 0, s, a);
  start_fold(s, dw, a.n, a.parts);
}

template <typename T> void backward_of(uly_stream *s, const uly_rmsnorm_grad *p) {
  constexpr int K = Wide<T>::LANES;
  const uly_tensor *operands[] = {&p->x, &p->dy, &p->dx};
  const int64_t n = p->x.shape[p->x.ndim - 1], packs = ceil_div(n, K);
  Backward<T> a = {Rows(operands, 3),
                   (const T *)p->x.data,
                   (const T *)p->w.data,
                   (const T *)p->dy.data,
                   (const float *)p->rstd.data,
                   (T *)p->dx.data,
                   (float *)s->scratch,
                   n,
                   0,
                   (float)p->centre,
                   p->add_dx != 0};
  const bool aligned = n % K == 0 && aligned_rows<T>(a.rows, 0, a.x) && aligned_rows<T>(a.rows, 1, a.dy) &&
                       aligned_rows<T>(a.rows, 2, a.dx) && aligned16(a.w, sizeof(T));
  float *dw = (float *)p->dw.data;
  if (packs <= 16) return start_backward<T, 16, 1>(s, a, dw, aligned);
  if (packs <= 32) return start_backward<T, 32, 1>(s, a, dw, aligned);
  if (packs <= 64) return start_backward<T, 32, 2>(s, a, dw, aligned);
  if (packs <= 256) return start_backward<T, 256, 1>(s, a, dw, aligned);
  if (packs <= 512) return start_backward<T, 256, 2>(s, a, dw, aligned);
  if (packs <= 768) return start_backward<T, 256, 3>(s, a, dw, aligned);
  if (packs <= 1024) return start_backward<T, 256, 4>(s, a, dw, aligned);
  // The column sums read dy. They run before dx is written, which may be the same memory.
  start_columns(s, NormRows<T>{a.rows, a.x, a.dy, a.rstd}, aligned, a.rows.rows, n, dw);
  const unsigned grid = blocks_for(a.rows.rows, 1);
  if (aligned) LAUNCH((norm_backward_long<T, true>), grid, BLOCK, 0, s, a);
  else LAUNCH((norm_backward_long<T, false>), grid, BLOCK, 0, s, a);
}

int32_t backward(uly_device *d, uly_stream *s, const void *args) {
  const uly_rmsnorm_grad *a = (const uly_rmsnorm_grad *)args;
  Check c(d, "RMSNormBackward");
  const int type = norm_shape(c, "x", a->x, a->w, a->rstd);
  c.rows("dy", a->dy, type, Shape(a->x));
  c.rows("dx", a->dx, type, Shape(a->x));
  c.dense("dw", a->dw, ULY_F32, {a->x.ndim > 0 ? a->x.shape[a->x.ndim - 1] : 0});
  if (c.failed() || elements(a->x) == 0) return c.code;
  if (type == ULY_F32) backward_of<float>(s, a);
  else backward_of<bf16>(s, a);
  return check_launch(d, "cuda.RMSNormBackward");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_RMSNORM_FORWARD, "own", forward},
    {ULY_OP_ADD_RMSNORM, "own", add_forward},
    {ULY_OP_RMSNORM_BACKWARD, "own", backward},
});
