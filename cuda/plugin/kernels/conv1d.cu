// The short convolution of linear attention: causal along the tokens of each document, depthwise
// (each channel separately), followed by SiLU. x, y [T, N], w [N, width]; `before` [width - 1, N]
// has the rows before the first document. A lane has four channels and loops over a run of rows.
// For the usual width of 4, the preceding rows stay in registers.
#include "check.h"
#include "columns.h"
#include "conv1d_index.h"
#include "values.h"

namespace {

constexpr int BLOCK = 32 * CONV_WARPS, K = CONV_LANES, USUAL = 4;

template <typename T> struct Conv {
  const T *x, *w, *before; // before may be NULL
  int64_t x_row, before_row, n, width;

  // row loads row r of a document that begins at `begin`. r may be up to width - 1 rows before the
  // document.
  template <bool ALIGNED>
  __device__ __forceinline__ void row(int64_t r, int64_t begin, int64_t c, float (&v)[K]) const {
    const bool inside = r >= begin, early = !inside && begin == 0 && before != nullptr;
    const T *p = early ? before + (r + width - 1) * before_row : x + (inside ? r : begin) * x_row;
    load_some<ALIGNED, K>(p + c, inside || early ? n - c : 0, v);
  }
  __device__ __forceinline__ void weights(int64_t i, int64_t c, float (&v)[K]) const {
#pragma unroll
    for (int k = 0; k < K; k++) v[k] = c + k < n ? widen(w[(c + k) * width + i]) : 0.0f;
  }
  // sum returns the argument of SiLU, for any width.
  __device__ __forceinline__ void sum(int64_t t, int64_t begin, int64_t c, float (&s)[K]) const {
#pragma unroll
    for (int k = 0; k < K; k++) s[k] = 0;
    for (int64_t i = 0; i < width; i++) {
      float v[K], f[K];
      row<false>(t - width + 1 + i, begin, c, v);
      weights(i, c, f);
#pragma unroll
      for (int k = 0; k < K; k++) s[k] = madd(f[k], v[k], s[k]);
    }
  }
  Conv from(int64_t c) const {
    return {x + c, w + c * width, before ? before + c : nullptr, x_row, before_row, n - c, width};
  }
};

template <int W> __device__ __forceinline__ void shift(float (&x)[W][K]) {
#pragma unroll
  for (int i = 1; i < W; i++)
#pragma unroll
    for (int k = 0; k < K; k++) x[i - 1][k] = x[i][k];
}

// conv_forward: W is the width; W = 0 is for any width.
template <typename T, int W, bool ALIGNED> __global__ void __launch_bounds__(BLOCK, 2)
    conv_forward(Conv<T> a, Documents documents, T *y, int64_t y_row) {
  constexpr int AHEAD = 4, KEPT = W ? W : 1;
  const int64_t across = ceil_div(a.n, CONV_TILE),
                groups = ceil_div(documents.to - documents.from, CONV_RUN * CONV_WARPS);
  for (int64_t b = blockIdx.x; b < across * groups; b += gridDim.x) {
    const int64_t group = b / across, c = (b - group * across) * CONV_TILE + threadIdx.x % 32 * K;
    if (c >= a.n) continue;
    int64_t t = documents.from + (group * CONV_WARPS + threadIdx.x / 32) * CONV_RUN;
    const int64_t last = least(documents.to, t + CONV_RUN);
    if (t >= last) continue;
    float w[KEPT][K], x[KEPT][K];
#pragma unroll
    for (int i = 0; i < W; i++) a.weights(i, c, w[i]);
    for (int32_t document = documents.at(t); t < last; document++) {
      const int64_t begin = documents.start[document], stop = least(last, documents.end(document));
#pragma unroll
      for (int i = 1; i < W; i++) a.template row<ALIGNED>(t - W + i, begin, c, x[i]);
      for (; t < stop; t += W ? AHEAD : 1) {
        if constexpr (W == 0) {
          float s[K];
          a.sum(t, begin, c, s);
#pragma unroll
          for (int k = 0; k < K; k++) s[k] *= sigmoid<T>(s[k]);
          store_some<ALIGNED, K>(y + t * y_row + c, a.n - c, s);
        } else {
          Pack<T, K> next[AHEAD];
#pragma unroll
          for (int j = 0; j < AHEAD; j++)
            load_raw<ALIGNED, K>(a.x + (t + j) * a.x_row + c, t + j < stop ? a.n - c : 0, next[j]);
#pragma unroll
          for (int j = 0; j < AHEAD; j++) {
            shift(x);
            float s[K];
#pragma unroll
            for (int k = 0; k < K; k++) {
              x[W - 1][k] = widen(next[j].v[k]);
              s[k] = w[0][k] * x[0][k];
#pragma unroll
              for (int i = 1; i < W; i++) s[k] = madd(w[i][k], x[i][k], s[k]);
              s[k] *= sigmoid<T>(s[k]);
            }
            store_some<ALIGNED, K>(y + (t + j) * y_row + c, t + j < stop ? a.n - c : 0, s);
          }
        }
      }
      t = stop;
    }
  }
}

template <typename T> struct Gradient {
  const T *dy;
  T *dx;
  int64_t dy_row, dx_row;
  T *behind;      // [runs, width - 1, n]: the rows of dy after each run, if dx is dy; else NULL
  float *partial; // [parts, n, width]
  int64_t parts, runs;

  // row returns row t of dy for the run that ends at `last`.
  __device__ __forceinline__ const T *row(const Conv<T> &a, int64_t run, int64_t last, int64_t t) const {
    return t < last || !behind ? dy + t * dy_row : behind + (run * (a.width - 1) + t - last) * a.n;
  }
};

// bounds returns the rows of a run.
template <typename T> __device__ __forceinline__ void bounds(const Documents &d, const Gradient<T> &g, int64_t run,
                                                             int64_t *first, int64_t *last) {
  *first = d.from + part_at(d.to - d.from, g.runs, run);
  *last = d.from + part_at(d.to - d.from, g.runs, run + 1);
}

// conv_behind copies the width - 1 rows of dy after each run to scratch, before conv_backward
// overwrites them.
template <typename T, bool ALIGNED> __global__ void __launch_bounds__(BLOCK)
    conv_behind(Conv<T> a, Documents documents, Gradient<T> g) {
  for (int64_t b = blockIdx.x; b < g.runs * (a.width - 1); b += gridDim.x) {
    const int64_t run = b / (a.width - 1);
    int64_t first, last;
    bounds(documents, g, run, &first, &last);
    const int64_t t = last + b - run * (a.width - 1);
    for (int64_t c = threadIdx.x * K; t < documents.to && c < a.n; c += BLOCK * K) {
      float v[K];
      load_some<ALIGNED, K>(g.dy + t * g.dy_row + c, a.n - c, v);
      store_some<ALIGNED, K>(g.behind + b * a.n + c, a.n - c, v);
    }
  }
}

// conv_backward, for width W, computes dx of a part's runs and the part's sums for the weights. The
// loads of a row are issued AHEAD rows before their use: with two blocks, 32 KB of BF16 are in
// flight on a multiprocessor, 16 KB of F32. More rows would spill registers. A row of dy is loaded
// before it is overwritten.
template <typename T, int W, bool ALIGNED, bool BEHIND> __global__ void __launch_bounds__(BLOCK, 2)
    conv_backward(Conv<T> a, Documents documents, Gradient<T> g) {
  constexpr int AHEAD = !ALIGNED || sizeof(T) == 4 ? 1 : 4;
  __shared__ float room[CONV_WARPS][apart(CONV_TILE * W)];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t across = ceil_div(a.n, CONV_TILE);
  for (int64_t b = blockIdx.x; b < across * g.parts; b += gridDim.x) {
    const int64_t part = b / across, run = part * CONV_WARPS + warp, tile = (b - part * across) * CONV_TILE,
                  c = tile + lane * K;
    // ds: gradients of SiLU's argument in the last W rows
    float w[W][K], dw[W][K], x[W][K], ds[W][K];
#pragma unroll
    for (int i = 0; i < W; i++) {
      a.weights(i, c, w[i]);
#pragma unroll
      for (int k = 0; k < K; k++) dw[i][k] = 0;
    }
    int64_t first, last;
    bounds(documents, g, run, &first, &last);
    int32_t document = documents.at(first);
    for (int64_t from = c < a.n ? first : last; from < last; document++) {
      const int64_t begin = documents.start[document], end = documents.end(document), stop = least(last, end);
#pragma unroll
      for (int i = 0; i < W; i++) {
        if (i > 0) a.template row<ALIGNED>(from - W + i, begin, c, x[i]);
#pragma unroll
        for (int k = 0; k < K; k++) ds[i][k] = 0;
      }
      // Rows are counted from `from`. The last rows of the loop come after the run or the document;
      // the rows before them need their ds. Rows of dy from `own` on lie in `behind`.
      const int count = (int)(stop - from), bound = count + W - 1, there = (int)least(bound, end - from),
                own = (int)(last - from), left = ALIGNED ? K : (int)least(a.n - c, K);
      const T *next_x = a.x + from * a.x_row + c, *next_dy = g.row(a, run, last, from) + c;
      T *dx = g.dx + from * g.dx_row + c;
      Word<K, T> xs[AHEAD] = {}, dys[AHEAD] = {};
      const auto fetch = [&](int i, int j) { // leaves the packs of rows that do not exist
        if (BEHIND && i == own) next_dy = g.row(a, run, last, last) + c;
        if (i < there) {
          load_word<ALIGNED, K>(next_x, left, xs[j]);
          load_word<ALIGNED, K>(next_dy, left, dys[j]);
        }
        next_x += a.x_row, next_dy += BEHIND && i >= own ? a.n : g.dy_row;
      };
#pragma unroll
      for (int j = 0; j < AHEAD; j++) fetch(j, j);
      for (int base = 0; base < bound; base += AHEAD) {
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
          const int i = base + j;
          shift(x);
          shift(ds);
          float dy[K];
#pragma unroll
          for (int k = 0; k < K; k++) x[W - 1][k] = in_word<T>(xs[j], k), dy[k] = in_word<T>(dys[j], k);
          fetch(i + AHEAD, j);
          // A condition at its use would become a branch for each channel.
          const uint32_t mask = i < there ? ~0u : 0;
#pragma unroll
          for (int k = 0; k < K; k++) {
            float s = w[0][k] * x[0][k];
#pragma unroll
            for (int m = 1; m < W; m++) s = madd(w[m][k], x[m][k], s);
            ds[W - 1][k] = __uint_as_float(mask & __float_as_uint(dy[k] * silu_slope(s, sigmoid<T>(s))));
            if (i < count) {
#pragma unroll
              for (int m = 0; m < W; m++) dw[m][k] = madd(ds[W - 1][k], x[m][k], dw[m][k]);
            }
            dy[k] = w[W - 1][k] * ds[0][k];
#pragma unroll
            for (int m = 1; m < W; m++) dy[k] = madd(w[W - 1 - m][k], ds[m][k], dy[k]);
          }
          if (i >= W - 1 && i < bound) {
            store_some<ALIGNED, K>(dx, left, dy);
            dx += g.dx_row;
          }
        }
      }
      from = stop;
    }
#pragma unroll
    for (int i = 0; i < W; i++)
#pragma unroll
      for (int k = 0; k < K; k++) room[warp][apart((lane * K + k) * W + i)] = dw[i][k];
    __syncthreads();
    for (int e = threadIdx.x; e < CONV_TILE * W && tile * W + e < a.n * W; e += BLOCK) {
      float all = 0;
      for (int i = 0; i < CONV_WARPS; i++) all += room[i][apart(e)];
      g.partial[(part * a.n + tile) * W + e] = all;
    }
    __syncthreads();
  }
}

// The kernels for other widths compute the gradient of SiLU's argument each time they need it.

// conv_dx computes dx for any width.
template <typename T> __global__ void __launch_bounds__(BLOCK) conv_dx(Conv<T> a, Documents documents, Gradient<T> g) {
  const int64_t across = ceil_div(a.n, CONV_TILE);
  for (int64_t b = blockIdx.x; b < across * g.parts; b += gridDim.x) {
    const int64_t part = b / across, run = part * CONV_WARPS + threadIdx.x / 32,
                  c = (b - part * across) * CONV_TILE + threadIdx.x % 32 * K;
    int64_t first, last;
    bounds(documents, g, run, &first, &last);
    int32_t document = documents.at(first);
    for (int64_t t = c < a.n ? first : last; t < last; t++) {
      while (documents.end(document) <= t) document++;
      const int64_t begin = documents.start[document], stop = least(documents.end(document), t + a.width);
      float dx[K] = {0, 0, 0, 0};
      for (int64_t u = t; u < stop; u++) {
        float s[K], dy[K], w[K];
        a.sum(u, begin, c, s);
        load_some<false, K>(g.row(a, run, last, u) + c, a.n - c, dy);
        a.weights(a.width - 1 - (u - t), c, w);
#pragma unroll
        for (int k = 0; k < K; k++) dx[k] = madd(w[k], dy[k] * silu_slope(s[k], sigmoid<T>(s[k])), dx[k]);
      }
      store_some<false, K>(g.dx + t * g.dx_row + c, a.n - c, dx);
    }
  }
}

// one_ds returns the gradient of SiLU's argument for one channel.
template <typename T>
__device__ __forceinline__ float one_ds(const Conv<T> &a, int64_t t, int64_t begin, int64_t c, float dy) {
  float s = 0;
  for (int64_t i = 0; i < a.width; i++) {
    const int64_t r = t - a.width + 1 + i;
    if (r >= begin) s = madd(widen(a.w[c * a.width + i]), widen(a.x[r * a.x_row + c]), s);
    else if (begin == 0 && a.before)
      s = madd(widen(a.w[c * a.width + i]), widen(a.before[(r + a.width - 1) * a.before_row + c]), s);
  }
  return dy * silu_slope(s, sigmoid<T>(s));
}

// conv_dw computes the parts' sums for the weights, for any width. A lane has a tap of a channel, a
// warp a run of rows.
template <typename T> __global__ void __launch_bounds__(BLOCK, 2)
    conv_dw(Conv<T> a, Documents documents, Gradient<T> g) {
  __shared__ float room[CONV_WARPS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t n = a.n * a.width, across = ceil_div(n, 32);
  for (int64_t b = blockIdx.x; b < across * g.parts; b += gridDim.x) {
    const int64_t part = b / across, e = (b - part * across) * 32 + lane, c = e / a.width,
                  back = a.width - 1 - (e - c * a.width);
    int64_t first, last;
    bounds(documents, g, part * CONV_WARPS + warp, &first, &last);
    int32_t document = documents.at(first);
    float sum = 0;
    for (int64_t t = e < n ? first : last; t < last; t++) {
      while (documents.end(document) <= t) document++;
      const int64_t begin = documents.start[document], r = t - back;
      if (r < begin && (begin > 0 || !a.before)) continue;
      const float x = widen(r >= begin ? a.x[r * a.x_row + c] : a.before[(r + a.width - 1) * a.before_row + c]);
      sum = madd(one_ds(a, t, begin, c, widen(g.dy[t * g.dy_row + c])), x, sum);
    }
    room[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && e < n) {
      sum = 0;
      for (int i = 0; i < CONV_WARPS; i++) sum += room[i][lane];
      g.partial[part * n + e] = sum;
    }
    __syncthreads();
  }
}

// conv_before computes the gradient of the rows before the first document. That document has `rows`
// rows.
template <typename T> __global__ void __launch_bounds__(BLOCK)
    conv_before(Conv<T> a, int64_t rows, const T *dy, int64_t dy_row, T *dbefore, int64_t dbefore_row) {
  for (int64_t e = (int64_t)blockIdx.x * BLOCK + threadIdx.x; e < (a.width - 1) * a.n;
       e += (int64_t)gridDim.x * BLOCK) {
    const int64_t j = e / a.n, c = e - j * a.n;
    float sum = 0;
    for (int64_t t = 0; t <= j && t < rows; t++)
      sum = madd(widen(a.w[c * a.width + j - t]), one_ds(a, t, 0, c, widen(dy[t * dy_row + c])), sum);
    dbefore[j * dbefore_row + c] = narrow<T>(sum);
  }
}

template <typename T> bool aligned_packs(const void *p, int64_t row) {
  return (uintptr_t)p % (K * sizeof(T)) == 0 && row % K == 0;
}

template <typename T> Conv<T> conv_of(const uly_conv1d &p) {
  // Only the first document uses the rows before it. The first document may have no rows.
  const bool before = p.before.data && p.cu.documents() > 0 && p.cu[1] > 0;
  return {(const T *)p.x.data, (const T *)p.w.data, before ? (const T *)p.before.data : nullptr,
          p.x.stride[0],       p.before.stride[0],  p.x.shape[1],
          p.w.shape[1]};
}

template <typename T> bool aligned_conv(const Conv<T> &a) {
  return a.n % K == 0 && aligned_packs<T>(a.x, a.x_row) && (!a.before || aligned_packs<T>(a.before, a.before_row));
}

template <typename T> void forward_of(uly_stream *s, const uly_conv1d *p) {
  const Conv<T> a = conv_of<T>(*p);
  T *y = (T *)p->y.data;
  const int64_t y_row = p->y.stride[0];
  const bool aligned = aligned_conv(a) && aligned_packs<T>(y, y_row);
  Documents documents;
  for (int64_t used = 0; documents.next(p->cu, p->cu.documents(), &used);) {
    const unsigned grid =
        blocks_for(ceil_div(a.n, CONV_TILE) * ceil_div(documents.to - documents.from, CONV_RUN * CONV_WARPS), 1);
    if (a.width != USUAL) LAUNCH((conv_forward<T, 0, false>), grid, BLOCK, 0, s, a, documents, y, y_row);
    else if (aligned) LAUNCH((conv_forward<T, USUAL, true>), grid, BLOCK, 0, s, a, documents, y, y_row);
    else LAUNCH((conv_forward<T, USUAL, false>), grid, BLOCK, 0, s, a, documents, y, y_row);
  }
}

// conv_shape checks the arguments that forward and backward share. It returns the type.
int conv_shape(Check &c, const uly_conv1d &a) {
  const int type = c.compute("x", a.x);
  c.rows("x", a.x, type, {-1, -1});
  c.dense("w", a.w, type, {a.x.shape[1], -1});
  if (!c.failed() && a.w.shape[1] < 1) c.refuse("w is %s: the width must be at least 1", text_of(a.w).c_str());
  if (a.before.data) c.rows("before", a.before, type, {a.w.shape[1] - 1, a.x.shape[1]});
  c.documents("Cu", a.cu, a.x.shape[0]);
  return type;
}

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_conv1d *a = (const uly_conv1d *)args;
  Check c(d, "Conv1dForward");
  const int type = conv_shape(c, *a);
  c.rows("y", a->y, type, Shape(a->x));
  if (c.failed() || elements(a->x) == 0) return c.code;
  if (type == ULY_F32) forward_of<float>(s, a);
  else forward_of<bf16>(s, a);
  return check_launch(d, "cuda.Conv1dForward");
}

// start_backward launches the kernels for a group of channels and one set of documents.
template <typename T> void start_backward(uly_stream *s, const Conv<T> &a, const Documents &documents,
                                          const Gradient<T> &g, bool aligned, float *dw) {
  const int64_t n = a.n * a.width;
  if (g.behind) {
    const unsigned grid = blocks_for(g.runs * (a.width - 1), 1);
    if (aligned) LAUNCH((conv_behind<T, true>), grid, BLOCK, 0, s, a, documents, g);
    else LAUNCH((conv_behind<T, false>), grid, BLOCK, 0, s, a, documents, g);
  }
  const unsigned grid = blocks_for(ceil_div(a.n, CONV_TILE) * g.parts, 1);
  if (a.width == USUAL) {
    if (aligned && g.behind) LAUNCH((conv_backward<T, USUAL, true, true>), grid, BLOCK, 0, s, a, documents, g);
    else if (aligned) LAUNCH((conv_backward<T, USUAL, true, false>), grid, BLOCK, 0, s, a, documents, g);
    else if (g.behind) LAUNCH((conv_backward<T, USUAL, false, true>), grid, BLOCK, 0, s, a, documents, g);
    else LAUNCH((conv_backward<T, USUAL, false, false>), grid, BLOCK, 0, s, a, documents, g);
  } else {
    // The sums read dy. They run before dx is written, which may be the same memory.
    LAUNCH(conv_dw<T>, blocks_for(ceil_div(n, 32) * g.parts, 1), BLOCK, 0, s, a, documents, g);
    LAUNCH(conv_dx<T>, grid, BLOCK, 0, s, a, documents, g);
  }
  start_fold(s, dw, n, g.parts);
}

template <typename T> void backward_of(uly_stream *s, const uly_conv1d_grad *p) {
  const Conv<T> a = conv_of<T>(p->conv1d);
  Gradient<T> g = {
      (const T *)p->dy.data, (T *)p->dx.data, p->dy.stride[0], p->dx.stride[0], nullptr, (float *)s->scratch, 0, 0};
  const bool aligned = aligned_conv(a) && aligned_packs<T>(g.dy, g.dy_row) && aligned_packs<T>(g.dx, g.dx_row);
  if (p->dbefore.data && a.width > 1)
    LAUNCH(conv_before<T>, blocks_for((a.width - 1) * a.n, BLOCK), BLOCK, 0, s, a,
           p->conv1d.cu.documents() > 0 ? p->conv1d.cu[1] : 0, g.dy, g.dy_row, (T *)p->dbefore.data,
           p->dbefore.stride[0]);
  Documents documents;
  for (int64_t used = 0; documents.next(p->conv1d.cu, p->conv1d.cu.documents(), &used);) {
    const ConvSplit split(documents.to - documents.from, a.n, a.width, sizeof(T), s->scratch_bytes);
    g.parts = split.parts, g.runs = split.runs,
    g.behind = g.dx == g.dy && a.width > 1 ? (T *)(s->scratch + split.behind) : nullptr;
    for (int64_t c = 0; c < a.n; c += split.band) {
      Conv<T> band = a.from(c);
      band.n = least(split.band, a.n - c);
      Gradient<T> its = g;
      its.dy += c, its.dx += c;
      start_backward(s, band, documents, its, aligned, (float *)p->dw.data + c * a.width);
    }
  }
}

int32_t backward(uly_device *d, uly_stream *s, const void *args) {
  const uly_conv1d_grad *a = (const uly_conv1d_grad *)args;
  Check c(d, "Conv1dBackward");
  const int type = conv_shape(c, a->conv1d);
  const int64_t width = a->conv1d.w.shape[1], n = a->conv1d.x.shape[1];
  c.rows("dy", a->dy, type, Shape(a->conv1d.x));
  c.rows("dx", a->dx, type, Shape(a->conv1d.x));
  c.dense("dw", a->dw, ULY_F32, {n, width});
  if (a->dbefore.data) c.rows("dbefore", a->dbefore, type, {width - 1, n});
  if (!c.failed() && !ConvSplit::fits(width, size_of(type), s->scratch_bytes))
    return fail(d, ULY_UNSUPPORTED,
                "cuda.Conv1dBackward: width %lld: the sums do not fit into the %lld bytes of a stream's scratch",
                (long long)width, (long long)s->scratch_bytes);
  if (c.failed() || n == 0) return c.code;
  if (type == ULY_F32) backward_of<float>(s, a);
  else backward_of<bf16>(s, a);
  return check_launch(d, "cuda.Conv1dBackward");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_CONV1D_FORWARD, "own", forward},
    {ULY_OP_CONV1D_BACKWARD, "own", backward},
});
