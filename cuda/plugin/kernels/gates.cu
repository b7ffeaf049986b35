// Gates of linear attention and of gated softmax attention. DeltaGates (Gated DeltaNet,
// arXiv:2412.06464), for a, b [T, H]: g = -exp(a_log) · softplus(a + dt_bias) and beta =
// sigmoid(b), both F32. SigmoidGate: y = x · sigmoid(gate), elementwise.
#include "check.h"
#include "columns.h"
#include "elementwise.h"

namespace {

constexpr int BLOCK = 256, WARPS = BLOCK / 32;

// A Parameter has the type T of the activations, or F32 (wide).
struct Parameter {
  const void *p;
  bool wide;
  template <typename T> __device__ __forceinline__ float get(int64_t i) const {
    return wide ? ((const float *)p)[i] : widen(((const T *)p)[i]);
  }
};

// softplus returns log(1 + eˣ); a NaN stays a NaN.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

template <typename T> struct Gates {
  const T *a, *b;
  Parameter a_log, dt_bias;
  int64_t a_row, b_row, heads;
};

template <typename T> __global__ void __launch_bounds__(BLOCK)
    gates_forward(Gates<T> p, int64_t n, Divider by, bool narrow, float *g, float *beta, int64_t g_row,
                  int64_t beta_row) {
  for (int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x; i < n; i += (int64_t)gridDim.x * BLOCK) {
    const int64_t t = narrow ? (int64_t)by((uint32_t)i) : i / p.heads, h = i - t * p.heads;
    g[t * g_row + h] =
        -expf(p.a_log.template get<T>(h)) * softplus(widen(p.a[t * p.a_row + h]) + p.dt_bias.template get<T>(h));
    beta[t * beta_row + h] = sigmoid<float>(widen(p.b[t * p.b_row + h]));
  }
}

template <typename T> struct GatesGradient {
  const float *dg, *dbeta;
  T *da, *db;
  int64_t dg_row, dbeta_row, da_row, db_row;
  float *partial; // [2, parts, heads]
  int64_t rows, parts;
};

// gates_backward computes a part of the rows: a lane has a head, and warp w has rows w, w + WARPS,
// …. da and db may be a and b, because a thread reads each element before it writes it.
template <typename T> __global__ void __launch_bounds__(BLOCK) gates_backward(Gates<T> p, GatesGradient<T> g) {
  __shared__ float room[2][WARPS][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t across = ceil_div(p.heads, 32);
  for (int64_t block = blockIdx.x; block < across * g.parts; block += gridDim.x) {
    const int64_t part = block / across, h = (block - part * across) * 32 + lane,
                  end = part_at(g.rows, g.parts, part + 1);
    float log_sum = 0, bias_sum = 0;
    if (h < p.heads) {
      const float bias = p.dt_bias.template get<T>(h), rate = -expf(p.a_log.template get<T>(h));
      for (int64_t t = part_at(g.rows, g.parts, part) + warp; t < end; t += WARPS) {
        const float x = widen(p.a[t * p.a_row + h]) + bias, beta = sigmoid<float>(widen(p.b[t * p.b_row + h]));
        const float scaled = g.dg[t * g.dg_row + h] * rate, da = scaled * sigmoid<float>(x);
        log_sum = madd(scaled, softplus(x), log_sum);
        bias_sum += da;
        const float db = g.dbeta[t * g.dbeta_row + h] * (beta * (1.0f - beta));
        g.da[t * g.da_row + h] = narrow<T>(da);
        g.db[t * g.db_row + h] = narrow<T>(db);
      }
    }
    room[0][warp][lane] = log_sum;
    room[1][warp][lane] = bias_sum;
    __syncthreads();
    if (warp < 2 && h < p.heads) {
      float sum = 0;
      for (int w = 0; w < WARPS; w++) sum += room[warp][w][lane];
      g.partial[(warp * g.parts + part) * p.heads + h] = sum;
    }
    __syncthreads();
  }
}

template <typename T>
Gates<T> gates_of(const uly_tensor &a, const uly_tensor &b, const uly_tensor &a_log, const uly_tensor &dt_bias) {
  return {(const T *)a.data,
          (const T *)b.data,
          {a_log.data, a_log.dtype == ULY_F32},
          {dt_bias.data, dt_bias.dtype == ULY_F32},
          a.stride[0],
          b.stride[0],
          a.shape[1]};
}

template <typename T> void gates_forward_of(uly_stream *s, const uly_delta_gates *a) {
  const int64_t n = elements(a->a), heads = a->a.shape[1];
  LAUNCH(gates_forward<T>, blocks_for(n, BLOCK), BLOCK, 0, s, gates_of<T>(a->a, a->b, a->a_log, a->dt_bias), n,
         Divider(heads), is_narrow(n), (float *)a->g.data, (float *)a->beta.data, a->g.stride[0], a->beta.stride[0]);
}

// gates_backward_of launches one kernel for each group of heads whose partial sums fit into the
// scratch. The parts do not depend on the number of heads, so neither do the sums of a head.
template <typename T> void gates_backward_of(uly_stream *s, const uly_delta_gates_grad *a) {
  const Gates<T> all = gates_of<T>(a->a, a->b, a->a_log, a->dt_bias);
  const int64_t rows = a->a.shape[0], room = s->scratch_bytes / 4;
  const int64_t parts = parts_of(rows, 64, 16 * WARPS, room), band = room / (2 * parts) / 32 * 32;
  for (int64_t h = 0; h < all.heads; h += band) {
    Gates<T> p = all;
    const int64_t size = sizeof(T);
    p.a += h, p.b += h, p.heads = least(band, all.heads - h);
    p.a_log.p = (const char *)p.a_log.p + h * (p.a_log.wide ? 4 : size),
    p.dt_bias.p = (const char *)p.dt_bias.p + h * (p.dt_bias.wide ? 4 : size);
    const GatesGradient<T> g = {(const float *)a->dg.data + h,
                                (const float *)a->dbeta.data + h,
                                (T *)a->da.data + h,
                                (T *)a->db.data + h,
                                a->dg.stride[0],
                                a->dbeta.stride[0],
                                a->da.stride[0],
                                a->db.stride[0],
                                (float *)s->scratch,
                                rows,
                                parts};
    LAUNCH(gates_backward<T>, blocks_for(ceil_div(p.heads, 32) * parts, 1), BLOCK, 0, s, p, g);
    start_fold(s, (float *)a->da_log.data + h, p.heads, parts);
    start_fold(s, (float *)a->ddt_bias.data + h, p.heads, parts, parts * p.heads);
  }
}

// gates_shape checks the arguments that forward and backward share. It returns the type.
int gates_shape(Check &c, const uly_tensor &a, const uly_tensor &b, const uly_tensor &a_log,
                const uly_tensor &dt_bias) {
  const int type = c.compute("a", a);
  c.rows("a", a, type, {-1, -1});
  c.rows("b", b, type, Shape(a));
  c.dense("ALog", a_log, a_log.dtype == ULY_F32 ? ULY_F32 : type, {a.shape[1]});
  c.dense("DtBias", dt_bias, dt_bias.dtype == ULY_F32 ? ULY_F32 : type, {a.shape[1]});
  return type;
}

int32_t delta_forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_delta_gates *a = (const uly_delta_gates *)args;
  Check c(d, "DeltaGatesForward");
  const int type = gates_shape(c, a->a, a->b, a->a_log, a->dt_bias);
  c.rows("g", a->g, ULY_F32, Shape(a->a));
  c.rows("beta", a->beta, ULY_F32, Shape(a->a));
  if (c.failed() || elements(a->a) == 0) return c.code;
  if (type == ULY_F32) gates_forward_of<float>(s, a);
  else gates_forward_of<bf16>(s, a);
  return check_launch(d, "cuda.DeltaGatesForward");
}

int32_t delta_backward(uly_device *d, uly_stream *s, const void *args) {
  const uly_delta_gates_grad *a = (const uly_delta_gates_grad *)args;
  Check c(d, "DeltaGatesBackward");
  const int type = gates_shape(c, a->a, a->b, a->a_log, a->dt_bias);
  c.rows("dg", a->dg, ULY_F32, Shape(a->a));
  c.rows("dbeta", a->dbeta, ULY_F32, Shape(a->a));
  c.rows("da", a->da, type, Shape(a->a));
  c.rows("db", a->db, type, Shape(a->a));
  c.dense("DALog", a->da_log, ULY_F32, {a->a.shape[1]});
  c.dense("DDtBias", a->ddt_bias, ULY_F32, {a->a.shape[1]});
  if (c.failed() || elements(a->a) == 0) return c.code;
  if (type == ULY_F32) gates_backward_of<float>(s, a);
  else gates_backward_of<bf16>(s, a);
  return check_launch(d, "cuda.DeltaGatesBackward");
}

// Operands: y, x, gate.
template <typename T> struct SigmoidForward {
  enum { OPERANDS = 3, READ = 0b110, WRITTEN = 0b001 };
  __device__ static void apply(float (&x)[3]) { x[0] = x[1] * sigmoid<T>(x[2]); }
};

// Operands: dx, dgate, x, gate, dy. dx and dgate may be dy and gate.
template <typename T> struct SigmoidBackward {
  enum { OPERANDS = 5, READ = 0b11100, WRITTEN = 0b00011 };
  __device__ static void apply(float (&x)[5]) {
    const float s = sigmoid<T>(x[3]);
    x[0] = x[4] * s;
    x[1] = x[0] * x[2] * (1.0f - s);
  }
};

// heads_or_rows requires [T, N] or [T, H, N].
void heads_or_rows(Check &c, const uly_tensor &x) {
  if (x.ndim != 2 && x.ndim != 3) c.refuse("x is %s: want [T, N] or [T, H, N]", text_of(x).c_str());
}

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_sigmoid_gate *a = (const uly_sigmoid_gate *)args;
  Check c(d, "SigmoidGateForward");
  const int type = c.compute("x", a->x);
  heads_or_rows(c, a->x);
  c.rows("x", a->x, type, Shape(a->x));
  c.rows("gate", a->gate, type, Shape(a->x));
  c.rows("y", a->y, type, Shape(a->x));
  if (c.failed() || elements(a->x) == 0) return c.code;
  launch_elementwise<SigmoidForward>(s, type, {&a->y, &a->x, &a->gate});
  return check_launch(d, "cuda.SigmoidGateForward");
}

int32_t backward(uly_device *d, uly_stream *s, const void *args) {
  const uly_sigmoid_gate_grad *a = (const uly_sigmoid_gate_grad *)args;
  Check c(d, "SigmoidGateBackward");
  const int type = c.compute("x", a->x);
  heads_or_rows(c, a->x);
  c.rows("x", a->x, type, Shape(a->x));
  c.rows("gate", a->gate, type, Shape(a->x));
  c.rows("dy", a->dy, type, Shape(a->x));
  c.rows("dx", a->dx, type, Shape(a->x));
  c.rows("dgate", a->dgate, type, Shape(a->x));
  if (c.failed() || elements(a->x) == 0) return c.code;
  launch_elementwise<SigmoidBackward>(s, type, {&a->dx, &a->dgate, &a->x, &a->gate, &a->dy});
  return check_launch(d, "cuda.SigmoidGateBackward");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_DELTA_GATES_FORWARD, "own", delta_forward},
    {ULY_OP_DELTA_GATES_BACKWARD, "own", delta_backward},
    {ULY_OP_SIGMOID_GATE_FORWARD, "own", forward},
    {ULY_OP_SIGMOID_GATE_BACKWARD, "own", backward},
});
