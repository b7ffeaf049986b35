// The choice of experts (device/experts.go, Route and RouteGrad): E logits of each token, of which
// the k largest are chosen; the choices are then sorted by expert, and by token within an expert.
//
// The sort counts the choices of each expert in parts of the tokens, adds the counts up, and
// gives each choice the next row of its part and expert. Its results are exact, so they do
// not depend on the parts. A warp has a token elsewhere.
#include "check.h"
#include "faults.h"
#include "values.h"

namespace {

// STAGED: choices of a part that are in shared memory at a time
enum {
  WARPS = 8,
  MAX_GROUPS = 32, // a lane has a group (keep)
  THREADS = 32 * WARPS,
  STAGED = 2048,
  SORT_THREADS = 1024
};
constexpr int64_t PART_TOKENS = 64, PARTS = 256; // minimum tokens of a part, maximum number of parts

struct RouteCall {
  float *logits;     // [T, E], then probabilities
  const float *bias; // [E], added to the probabilities for the choice; null = none
  int32_t *chosen, *rows, *offsets;
  float *weights;
  int32_t *counts; // [parts, E]: the choices of a part for each expert, then its first row
  int64_t tokens, experts, k, step, parts;
  bool normalize, sigmoid;
  int groups, kept_groups;
  float weight_scale;
  const int32_t *sequence;
  double *sequence_counts, *sums;
  int64_t sequences;
  uly_fault *fault;

  __device__ int64_t part(int64_t p) const { return part_at(tokens, parts, p); }
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

// order_of returns the logit and the expert as a number that falls in the order of choices: larger
// logits first, then lower experts. NaN is last, so the choices are always k different experts.
__device__ __forceinline__ unsigned long long order_of(float x, int64_t expert) {
  const uint32_t bits = __float_as_uint(x + 0.0f); // -0 becomes 0
  const uint32_t order = x != x ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
  return (unsigned long long)order << 32 | (0xffffffffu - (uint32_t)expert);
}

__device__ __forceinline__ unsigned long long warp_most(unsigned long long x) {
#pragma unroll
  for (int i = 16; i > 0; i /= 2) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, x, i);
    if (other > x) x = other;
  }
  return x;
}

// expert_at returns the expert of a number of order_of.
__device__ __forceinline__ int expert_at(unsigned long long order) { return (int)(0xffffffffu - (uint32_t)order); }

// keep returns the groups from which a token chooses, a bit for each: with sigmoids, the groups
// with the largest sums of their two largest x + bias, otherwise with the largest x. A warp calls
// it; a lane has a group.
__device__ __forceinline__ uint32_t keep(const RouteCall &a, const float *x, int lane) {
  if (a.groups == 1) return 1;
  const int n = (int)a.experts / a.groups;
  unsigned long long order = 0;
  if (lane < a.groups) {
    float first = -INFINITY, second = -INFINITY;
    for (int e = lane * n; e < (lane + 1) * n; e++) {
      const float y = a.bias ? x[e] + a.bias[e] : x[e];
      if (y > first) second = first, first = y;
      else if (y > second) second = y;
    }
    order = order_of(a.sigmoid ? first + second : first, lane);
  }
  uint32_t kept = 0;
  for (int j = 0; j < a.kept_groups; j++) {
    const int g = expert_at(warp_most(order));
    kept |= 1u << g;
    if (g == lane) order = 0;
  }
  return kept;
}

// choose writes the k experts of the kept groups with the largest x + bias. A warp calls it.
__device__ __forceinline__ void choose(const RouteCall &a, int32_t *chosen, const float *x, uint32_t kept, int lane) {
  const int experts = (int)a.experts, k = (int)a.k, n = experts / a.groups;
  unsigned long long last = ~0ull;
  for (int j = 0; j < k; j++) { // the largest below the last one
    unsigned long long best = 0;
    for (int e = lane; e < experts; e += 32) {
      if (a.groups > 1 && !(kept >> (e / n) & 1)) continue;
      const unsigned long long o = order_of(a.bias ? x[e] + a.bias[e] : x[e], e);
      if (o < last && o > best) best = o;
    }
    last = warp_most(best);
    if (lane == 0) chosen[j] = expert_at(last);
  }
}

// softmax replaces the logits of a token. A warp calls it.
__device__ __forceinline__ void softmax(float *x, int experts, int lane) {
  float top = -INFINITY, sum = 0;
  for (int e = lane; e < experts; e += 32) top = fmaxf(top, x[e]);
  top = warp_max(top);
  for (int e = lane; e < experts; e += 32) {
    x[e] = expf(x[e] - top);
    sum += x[e];
  }
  const float factor = 1.0f / warp_sum(sum);
  for (int e = lane; e < experts; e += 32) x[e] *= factor;
}

// divisor returns what the weights are divided by, given the sum of the probabilities.
__device__ __forceinline__ float divisor(const RouteCall &a, float sum) {
  if (!a.normalize) return 1;
  return a.sigmoid ? sum + 1e-20f : a.bias ? fmaxf(sum, 1e-12f) : sum;
}

// route_tokens chooses experts and computes the probabilities. Until route_rows, `rows` has the
// weights of the choices.
__global__ void __launch_bounds__(THREADS) route_tokens(RouteCall a) {
  const int lane = (int)threadIdx.x % 32, experts = (int)a.experts, k = (int)a.k;
  for (int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; t < a.tokens; t += (int64_t)gridDim.x * WARPS) {
    float *x = a.logits + t * a.step;
    int32_t *chosen = a.chosen + t * a.k;
    if (a.sigmoid) {
      for (int e = lane; e < experts; e += 32) x[e] = sigmoid<float>(x[e]);
      __syncwarp();
      choose(a, chosen, x, keep(a, x, lane), lane);
    } else if (a.bias) {
      softmax(x, experts, lane);
      choose(a, chosen, x, 1, lane);
    } else { // logits differ where their softmax may not
      choose(a, chosen, x, keep(a, x, lane), lane);
      softmax(x, experts, lane);
    }
    __syncwarp();
    float all = 0;
    for (int j = lane; j < k; j += 32) all += x[chosen[j]];
    all = divisor(a, warp_sum(all));
    for (int j = lane; j < k; j += 32) a.rows[t * a.k + j] = __float_as_int(x[chosen[j]] / all * a.weight_scale);
  }
}

// route_count counts the choices of the parts.
__global__ void __launch_bounds__(THREADS) route_count(RouteCall a) {
  for (int64_t p = blockIdx.x; p < a.parts; p += gridDim.x) {
    int32_t *counts = a.counts + p * a.experts;
    for (int64_t e = threadIdx.x; e < a.experts; e += THREADS) counts[e] = 0;
    __syncthreads();
    for (int64_t i = a.part(p) * a.k + threadIdx.x; i < a.part(p + 1) * a.k; i += THREADS)
      atomicAdd(&counts[a.chosen[i]], 1);
  }
}

// route_offsets is one block. It writes the first row of each expert, and of each part's choices of
// an expert.
__global__ void __launch_bounds__(SORT_THREADS) route_offsets(RouteCall a) {
  __shared__ int32_t room[SORT_THREADS];
  const int me = (int)threadIdx.x;
  int32_t before = 0; // rows of the experts that are done
  for (int64_t first = 0; first < a.experts; first += SORT_THREADS) {
    const int64_t e = first + me;
    int32_t *counts = a.counts + e, mine = 0;
    if (e < a.experts) {
#pragma unroll 8
      for (int64_t p = 0; p < a.parts; p++) mine += counts[p * a.experts];
    }
    room[me] = mine;
    __syncthreads();
    for (int by = 1; by < SORT_THREADS; by *= 2) { // sums up to each expert
      const int32_t other = me >= by ? room[me - by] : 0;
      __syncthreads();
      room[me] += other;
      __syncthreads();
    }
    if (e < a.experts) {
      int32_t row = before + room[me] - mine;
      a.offsets[e] = row;
#pragma unroll 8
      for (int64_t p = 0; p < a.parts; p++) {
        const int32_t n = counts[p * a.experts];
        counts[p * a.experts] = row;
        row += n;
      }
      if (e + 1 == a.experts) a.offsets[a.experts] = row;
    }
    before += room[SORT_THREADS - 1];
    __syncthreads();
  }
}

// route_rows gives choices their rows. A thread has an expert, and finds its choices in the order
// of the tokens.
__global__ void __launch_bounds__(THREADS) route_rows(RouteCall a) {
  __shared__ int32_t chosen[STAGED];
  for (int64_t p = blockIdx.x; p < a.parts; p += gridDim.x) {
    const int64_t end = a.part(p + 1) * a.k;
    for (int64_t at = a.part(p) * a.k; at < end; at += STAGED) {
      const int n = (int)least(STAGED, end - at);
      __syncthreads();
      for (int i = (int)threadIdx.x; i < n; i += THREADS) chosen[i] = a.chosen[at + i];
      __syncthreads();
      for (int64_t e = threadIdx.x; e < a.experts; e += THREADS) {
        int32_t *next = a.counts + p * a.experts + e, row = *next;
#pragma unroll 8
        for (int i = 0; i < n; i++)
          if (chosen[i] == e) {
            a.weights[row] = __int_as_float(a.rows[at + i]);
            a.rows[at + i] = row++;
          }
        *next = row;
      }
    }
  }
}

// route_sums adds the choices and the probabilities of sequences. The order of atomic additions is
// not defined, but they are exact: the sums of a part are rounded to multiples of 2^-32, which F64
// adds without an error up to 2^21 tokens.
__global__ void __launch_bounds__(THREADS) route_sums(RouteCall a) {
  for (int64_t p = blockIdx.x; p < a.parts; p += gridDim.x) {
    const int64_t lo = a.part(p), hi = a.part(p + 1);
    for (int64_t i = lo * a.k + threadIdx.x; i < hi * a.k; i += THREADS) {
      const int32_t q = a.sequence[i / a.k];
      if (q >= a.sequences) report(a.fault, ULY_OP_ROUTE_FORWARD, q, i / a.k);
      else if (q >= 0) atomicAdd(&a.sequence_counts[q * a.experts + a.chosen[i]], 1.0);
    }
    for (int64_t e = threadIdx.x; e < a.experts; e += THREADS) {
      int32_t now = -1; // the sequence of the sum
      double sum = 0;
      auto add = [&] {
        if (now >= 0 && now < a.sequences) atomicAdd(&a.sums[now * a.experts + e], rint(sum * 0x1p32) * 0x1p-32);
      };
      for (int64_t t = lo; t < hi; t++) {
        if (a.sequence[t] != now) add(), now = a.sequence[t], sum = 0;
        sum += a.logits[t * a.step + e];
      }
      add();
    }
  }
}

struct RouteGradCall {
  const float *probs, *weights, *dweights, *scale;
  const int32_t *chosen, *rows, *sequence;
  const double *counts;
  void *dlogits;
  int64_t tokens, experts, k, step, dstep, sequences;
  bool normalize, sigmoid;
  double weight_scale;
  uly_fault *fault;
};

// sigmoid_back writes the gradient of a token's logits. A weight w_j is c·p_j / d, where d is 1, or
// normalized Σ p_i over the chosen logits, and the derivative of p_j is p_j·(1 - p_j). A warp calls
// it.
template <typename T> __device__ __forceinline__ void sigmoid_back(const RouteGradCall &a, T *d, const float *p,
                                                                   const int32_t *chosen, const int32_t *row,
                                                                   int lane) {
  double sum = 0, by = 0;
  for (int64_t j = lane; j < a.k && a.normalize; j += 32) {
    by += p[chosen[j]];
    sum += (double)p[chosen[j]] * a.dweights[row[j]];
  }
  sum = warp_sum(sum), by = a.normalize ? warp_sum(by) + 1e-20 : 1;
  for (int64_t e = lane; e < a.experts; e += 32) d[e] = narrow<T>(0.0f);
  __syncwarp();
  for (int64_t j = lane; j < a.k; j += 32) {
    const double s = p[chosen[j]], g = a.dweights[row[j]] - sum / by;
    d[chosen[j]] = narrow<T>((float)(a.weight_scale / by * s * (1 - s) * g));
  }
}

// The derivative of the softmax of all logits at p, for the gradient g_e of p_e, is p_e·(g_e -
// Σ p_i·g_i). A weight w_j is c·p_j; a normalized one is c times the softmax of the chosen logits
// alone. The balancing loss has the gradient scale·counts_e of p_e.
template <typename T> __global__ void __launch_bounds__(THREADS) route_backward(RouteGradCall a) {
  const int lane = (int)threadIdx.x % 32;
  for (int64_t t = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32; t < a.tokens; t += (int64_t)gridDim.x * WARPS) {
    const float *p = a.probs + t * a.step;
    const int32_t *chosen = a.chosen + t * a.k, *row = a.rows + t * a.k;
    T *d = (T *)a.dlogits + t * a.dstep;
    const int32_t q = a.sequence ? a.sequence[t] : -1;
    if (q >= a.sequences && lane == 0) report(a.fault, ULY_OP_ROUTE_BACKWARD, q, t);
    const double *counts = q >= 0 && q < a.sequences ? a.counts + q * a.experts : nullptr;
    const double scale = counts ? a.scale[q] : 0;
    bool inside = true;
    for (int64_t j = lane; j < a.k; j += 32) {
      const bool ok = row[j] >= 0 && row[j] < a.tokens * a.k && chosen[j] >= 0 && chosen[j] < a.experts;
      if (!ok) report(a.fault, ULY_OP_ROUTE_BACKWARD, row[j], t);
      inside = inside && ok;
    }
    if (!__all_sync(0xffffffffu, inside)) continue;
    if (a.sigmoid) {
      sigmoid_back<T>(a, d, p, chosen, row, lane);
      continue;
    }
    double sum = 0, balance = 0;
    for (int64_t j = lane; j < a.k; j += 32) sum += (double)a.weights[row[j]] * a.dweights[row[j]];
    sum = warp_sum(sum);
    if (counts) {
      for (int64_t e = lane; e < a.experts; e += 32) balance += counts[e] * p[e];
      balance = warp_sum(balance);
    }
    const double all = a.normalize ? 0 : sum;
    for (int64_t e = lane; e < a.experts; e += 32) {
      double g = -all;
      if (counts) g += scale * (counts[e] - balance);
      d[e] = narrow<T>((float)(g * p[e]));
    }
    __syncwarp();
    for (int64_t j = lane; j < a.k; j += 32) {
      const int64_t e = chosen[j];
      double g = a.weights[row[j]] * (a.dweights[row[j]] - sum / a.weight_scale);
      if (counts) g += scale * (counts[e] - balance) * p[e];
      d[e] = narrow<T>((float)g);
    }
  }
}

// choices requires the tensors of T·k choices among `among` experts. It returns k.
int64_t choices(Check &c, const uly_tensor &experts, const uly_tensor &rows, int64_t tokens, int64_t among) {
  c.dense("experts", experts, ULY_I32, {tokens, -1});
  if (c.failed()) return 0;
  const int64_t k = experts.shape[1];
  c.dense("rows", rows, ULY_I32, {tokens, k});
  if (k < 1 || k > among || among > INT32_MAX || tokens > INT32_MAX / most(1, k))
    c.refuse("%lld tokens choose %lld of %lld experts; choose at least 1 and at most all, less than 2^31 in total",
             (long long)tokens, (long long)k, (long long)among);
  return k;
}

// grouped requires groups of experts of which k experts can be chosen, and sets them in r.
void grouped(Check &c, RouteCall &r, const uly_route &a, int64_t experts, int64_t k) {
  const int64_t groups = most(1, a.groups), kept = most(1, a.kept_groups);
  if (groups > MAX_GROUPS || kept > groups || experts % groups != 0 || k > kept * (experts / groups) ||
      (groups > 1 && experts / groups < 2))
    c.refuse(
        "%lld experts are in %lld groups, of which %lld are kept, and a token chooses %lld experts; groups must be "
        "equal, at most 32 with at least 2 experts each, and the kept ones need enough experts",
        (long long)experts, (long long)groups, (long long)kept, (long long)k);
  r.sigmoid = a.sigmoid, r.groups = (int)groups, r.kept_groups = (int)kept;
  r.weight_scale = a.weight_scale != 0 ? (float)a.weight_scale : 1;
  if (!a.sigmoid && a.bias.dtype != 0 && groups > 1)
    c.refuse("%lld groups with a bias and without sigmoid are not built", (long long)groups);
}

int32_t forward(uly_device *d, uly_stream *s, const void *args) {
  const uly_route &a = *(const uly_route *)args;
  Check c(d, "RouteForward");
  c.rows("logits", a.logits, ULY_F32, {-1, -1});
  if (c.failed()) return c.code;
  const int64_t tokens = a.logits.shape[0], experts = a.logits.shape[1];
  const int64_t k = choices(c, a.experts, a.rows, tokens, experts);
  c.dense("weights", a.weights, ULY_F32, {tokens * k});
  c.dense("offsets", a.offsets, ULY_I32, {experts + 1});
  if (a.bias.dtype != 0) c.dense("bias", a.bias, ULY_F32, {experts});
  const bool counted = a.sequence.dtype != 0;
  if (counted) {
    c.dense("sequence", a.sequence, ULY_I32, {tokens});
    c.dense("counts", a.counts, ULY_F64, {-1, experts});
    c.dense("sums", a.sums, ULY_F64, {a.counts.shape[0], experts});
  }
  if (experts > s->scratch_bytes / 4)
    c.refuse("%lld experts are more than a GPU's scratch has room for", (long long)experts);
  RouteCall r = {};
  grouped(c, r, a, experts, k);
  if (c.failed()) return c.code;
  r.logits = (float *)a.logits.data, r.chosen = (int32_t *)a.experts.data, r.rows = (int32_t *)a.rows.data;
  r.offsets = (int32_t *)a.offsets.data, r.weights = (float *)a.weights.data, r.counts = (int32_t *)s->scratch;
  r.tokens = tokens, r.experts = experts, r.k = k, r.step = a.logits.stride[0], r.normalize = a.normalize;
  r.parts = parts_of(tokens, experts, most(PART_TOKENS, ceil_div(tokens, PARTS)), s->scratch_bytes / 4);
  r.fault = s->fault, r.bias = a.bias.dtype != 0 ? (const float *)a.bias.data : nullptr;
  if (tokens > 0) LAUNCH(route_tokens, blocks_for(tokens, WARPS), THREADS, 0, s, r);
  LAUNCH(route_count, blocks_for(r.parts, 1), THREADS, 0, s, r);
  LAUNCH(route_offsets, 1, SORT_THREADS, 0, s, r);
  if (tokens > 0) LAUNCH(route_rows, blocks_for(r.parts, 1), THREADS, 0, s, r);
  if (counted && tokens > 0) {
    r.sequence = (const int32_t *)a.sequence.data, r.sequences = a.counts.shape[0];
    r.sequence_counts = (double *)a.counts.data, r.sums = (double *)a.sums.data;
    LAUNCH(route_sums, blocks_for(r.parts, 1), THREADS, 0, s, r);
  }
  return check_launch(d, "cuda.RouteForward");
}

int32_t backward(uly_device *d, uly_stream *s, const void *args) {
  const uly_route_grad &a = *(const uly_route_grad *)args;
  Check c(d, "RouteBackward");
  c.rows("probs", a.probs, ULY_F32, {-1, -1});
  if (c.failed()) return c.code;
  const int64_t tokens = a.probs.shape[0], experts = a.probs.shape[1];
  const int64_t k = choices(c, a.experts, a.rows, tokens, experts);
  c.dense("weights", a.weights, ULY_F32, {tokens * k});
  c.dense("dweights", a.dweights, ULY_F32, {tokens * k});
  const int type = c.compute("dlogits", a.dlogits);
  c.rows("dlogits", a.dlogits, type, {tokens, experts});
  RouteGradCall r = {};
  if (a.sigmoid && a.sequence.dtype != 0) c.refuse("a gradient of the balance of experts with sigmoid is not built");
  if (a.sequence.dtype != 0) {
    c.dense("sequence", a.sequence, ULY_I32, {tokens});
    c.dense("counts", a.counts, ULY_F64, {-1, experts});
    c.dense("scale", a.scale, ULY_F32, {a.counts.shape[0]});
    r.sequence = (const int32_t *)a.sequence.data, r.sequences = a.counts.shape[0];
    r.counts = (const double *)a.counts.data, r.scale = (const float *)a.scale.data;
  }
  if (c.failed() || tokens == 0) return c.code;
  r.probs = (const float *)a.probs.data, r.weights = (const float *)a.weights.data;
  r.dweights = (const float *)a.dweights.data, r.chosen = (const int32_t *)a.experts.data;
  r.rows = (const int32_t *)a.rows.data, r.dlogits = a.dlogits.data;
  r.tokens = tokens, r.experts = experts, r.k = k, r.step = a.probs.stride[0], r.dstep = a.dlogits.stride[0];
  r.normalize = a.normalize, r.sigmoid = a.sigmoid, r.weight_scale = a.weight_scale != 0 ? a.weight_scale : 1;
  r.fault = s->fault;
  const unsigned grid = blocks_for(tokens, WARPS);
  if (type == ULY_F32) LAUNCH(route_backward<float>, grid, THREADS, 0, s, r);
  else LAUNCH(route_backward<bf16>, grid, THREADS, 0, s, r);
  return check_launch(d, "cuda.RouteBackward");
}

} // namespace

static const RegisterKernels registered({
    {ULY_OP_ROUTE_FORWARD, "own", forward},
    {ULY_OP_ROUTE_BACKWARD, "own", backward},
});
