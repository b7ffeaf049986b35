// Copy: dst = src for tensors of one shape, with any strides, and a conversion between some types.
// Dense axes are copied in units of up to 16 bytes, transposes in tiles through shared memory, and
// other layouts element by element. One side may be host memory, which must be dense. A copy from
// or to the host that also converts or scatters goes through the stream's scratch.
#include "check.h"
#include "moves.h"

namespace {

constexpr int BLOCK = 256, UNROLL = 2;

// Same, Cast, Double, Halve and Half convert one unit of K elements from type From to type To.
template <typename U> struct Same {
  typedef U To;
  typedef U From;
  enum { K = 1 };
  static __device__ __forceinline__ void move(To *dst, const From *src) { *dst = *src; }
};
template <typename T, typename F, int N> struct Cast {
  typedef T To;
  typedef F From;
  enum { K = N };
  static __device__ __forceinline__ void move(To *dst, const From *src) {
    float x[N];
    load<N>(src, x);
    store<N>(dst, x);
  }
};
struct Double {
  typedef double To;
  typedef float From;
  enum { K = 1 };
  static __device__ __forceinline__ void move(To *dst, const From *src) { *dst = (double)*src; }
};
struct Halve {
  typedef float To;
  typedef double From;
  enum { K = 1 };
  static __device__ __forceinline__ void move(To *dst, const From *src) { *dst = (float)*src; }
};
struct Half {
  typedef float To;
  typedef __half From;
  enum { K = 1 };
  static __device__ __forceinline__ void move(To *dst, const From *src) { *dst = __half2float(*src); }
};

// copy_units copies units [first, first + units) of a plane. Operand 0 is dst.
template <typename M, bool NARROW> __global__ void __launch_bounds__(BLOCK)
    copy_units(Walk<2> w, int64_t first, int64_t units, typename M::To *dst, const typename M::From *src) {
  const int64_t stride = (int64_t)gridDim.x * BLOCK * UNROLL;
  for (int64_t i = (int64_t)blockIdx.x * BLOCK * UNROLL + threadIdx.x; i < units; i += stride) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int64_t j = i + u * BLOCK;
      if (j >= units) break;
      int64_t o[2];
      w.template at<NARROW>(first + j, o);
      M::move(dst + o[0], src + o[1]);
    }
  }
}

template <typename M>
void start_units(uly_stream *s, const Plane &p, int64_t first, int64_t n, void *dst, const void *src) {
  typedef typename M::To To;
  typedef typename M::From From;
  Walk<2> w(p, M::K);
  const unsigned grid = blocks_for(n / M::K, BLOCK * UNROLL);
  if (w.narrow)
    LAUNCH((copy_units<M, true>), grid, BLOCK, 0, s, w, first / M::K, n / M::K, (To *)dst, (const From *)src);
  else LAUNCH((copy_units<M, false>), grid, BLOCK, 0, s, w, first / M::K, n / M::K, (To *)dst, (const From *)src);
}

// copy_transposed transposes tiles of EDGE x EDGE elements. 32 threads read along the dense axis of
// src and write along the dense axis of dst.
template <typename U, int EDGE> __global__ void __launch_bounds__(BLOCK)
    copy_transposed(Transpose t, U *dst, const U *src) {
  __shared__ U tile[EDGE][EDGE + 4 / (sizeof(U) < 4 ? sizeof(U) : 4)];
  const int column = threadIdx.x % 32, row = threadIdx.x / 32;
  for (int64_t i = blockIdx.x; i < t.tiles; i += gridDim.x) {
    int64_t x0, y0, o[2];
    t.tile(i, EDGE, &x0, &y0, o);
    for (int x = row; x < EDGE; x += BLOCK / 32)
      for (int y = column; y < EDGE; y += 32)
        if (x0 + x < t.nx && y0 + y < t.ny) tile[y][x] = src[o[1] + (x0 + x) * t.src_x + y0 + y];
    __syncthreads();
    for (int y = row; y < EDGE; y += BLOCK / 32)
      for (int x = column; x < EDGE; x += 32)
        if (x0 + x < t.nx && y0 + y < t.ny) dst[o[0] + (y0 + y) * t.dst_y + x0 + x] = tile[y][x];
    __syncthreads();
  }
}

template <typename U, int EDGE> void start_transposed(uly_stream *s, const Plane &p, void *dst, const void *src) {
  Transpose t(p, EDGE);
  LAUNCH((copy_transposed<U, EDGE>), blocks_for(t.tiles, 1), BLOCK, 0, s, t, (U *)dst, (const U *)src);
}

// start_same copies elements [first, first + n) of a plane without conversion. Elements have `size`
// bytes.
void start_same(uly_stream *s, const Plane &p, int64_t size, int64_t first, int64_t n, void *dst, const void *src) {
  const bool all = n == p.elements();
  if (all && Transpose::fits(p, 16)) {
    switch (size) {
      case 1: return start_transposed<uint8_t, 64>(s, p, dst, src);
      case 2: return start_transposed<uint16_t, 64>(s, p, dst, src);
      case 4: return start_transposed<uint32_t, 32>(s, p, dst, src);
      default: return start_transposed<uint64_t, 32>(s, p, dst, src);
    }
  }
  const void *data[] = {dst, src};
  const int64_t sizes[] = {size, size};
  int64_t k = all ? 16 / size : 1;
  while (!fits_unit(p, data, sizes, k)) k /= 2;
  const Plane units = units_of(p, k);
  if (all && queue_copy(s, units, k * size, dst, src)) return;
  switch (k * size) {
    case 1: return start_units<Same<uint8_t>>(s, units, first, n / k, dst, src);
    case 2: return start_units<Same<uint16_t>>(s, units, first, n / k, dst, src);
    case 4: return start_units<Same<uint32_t>>(s, units, first, n / k, dst, src);
    case 8: return start_units<Same<uint2>>(s, units, first, n / k, dst, src);
    default: return start_units<Same<uint4>>(s, units, first, n / k, dst, src);
  }
}

// The conversions, for single elements and for four dense elements at a time.
typedef void (*start_cast)(uly_stream *, const Plane &, int64_t first, int64_t n, void *dst, const void *src);
struct Kind {
  int from, to;
  start_cast one, four; // four: NULL if the conversion has no such kernel
};
const Kind casts[] = {
    {ULY_F32, ULY_BF16, start_units<Cast<bf16, float, 1>>, start_units<Cast<bf16, float, 4>>},
    {ULY_BF16, ULY_F32, start_units<Cast<float, bf16, 1>>, start_units<Cast<float, bf16, 4>>},
    {ULY_F32, ULY_F64, start_units<Double>, nullptr},
    {ULY_F64, ULY_F32, start_units<Halve>, nullptr},
    {ULY_F16, ULY_F32, start_units<Half>, nullptr},
};

const Kind *cast_of(int from, int to) {
  for (const Kind &k : casts)
    if (k.from == from && k.to == to) return &k;
  return nullptr;
}

// start copies elements [first, first + n) of a plane. Both operands are in device memory.
void start(uly_stream *s, const Plane &p, int from, int to, int64_t first, int64_t n, void *dst, const void *src) {
  if (n == 0) return;
  const int64_t sizes[] = {size_of(to), size_of(from)};
  if (from == to) return start_same(s, p, sizes[0], first, n, dst, src);
  const Kind *k = cast_of(from, to);
  const void *data[] = {dst, src};
  const bool fours = k->four && n == p.elements() && fits_unit(p, data, sizes, 4);
  (fours ? k->four : k->one)(s, p, first, n, dst, src);
}

// staged copies between dense host memory and device memory with other strides or another type. The
// stream's scratch holds as many of the host's elements as fit, in the host's order and type;
// larger tensors are copied in several steps.
int32_t staged(uly_device *d, uly_stream *s, const uly_copy *a, bool to_device) {
  const uly_tensor &host = to_device ? a->src : a->dst, &there = to_device ? a->dst : a->src;
  const uly_tensor *operands[] = {&a->dst, &a->src};
  const Plane p = plane_of(operands, 2, to_device ? 1 : 0);
  const int64_t size = size_of(host.dtype), all = elements(host), count = s->scratch_bytes / size;
  for (int64_t at = 0; at < all; at += count) {
    const int64_t n = least(count, all - at);
    char *mine = (char *)host.data + at * size;
    if (to_device)
      TRY(check(d, cudaMemcpyAsync(s->scratch, mine, n * size, cudaMemcpyHostToDevice, s->s), "cuda.Copy"));
    if (p.rank <= 1 && contiguous(there)) { // n consecutive elements are also dense on the device
      Plane part = p;
      if (p.rank) part.shape[0] = n;
      char *those = (char *)there.data + at * size_of(there.dtype);
      start(s, part, a->src.dtype, a->dst.dtype, 0, n, to_device ? those : s->scratch, to_device ? s->scratch : those);
    } else {
      char *origin = s->scratch - at * size; // the address that element 0 would have
      start(s, p, a->src.dtype, a->dst.dtype, at, n, to_device ? there.data : origin, to_device ? origin : there.data);
    }
    TRY(check_launch(d, "cuda.Copy"));
    if (!to_device)
      TRY(check(d, cudaMemcpyAsync(mine, s->scratch, n * size, cudaMemcpyDeviceToHost, s->s), "cuda.Copy"));
  }
  return ULY_OK;
}

int32_t copy(uly_device *d, uly_stream *s, const void *args) {
  const uly_copy *a = (const uly_copy *)args;
  const uly_tensor &dst = a->dst, &src = a->src;
  if (!same_shape(dst, src) || (dst.where == ULY_HOST && src.where == ULY_HOST))
    return fail(d, ULY_INVALID_ARGUMENT,
                "cuda.Copy: %s into %s: the shapes must be equal, and one tensor must be in device memory",
                text_of(src).c_str(), text_of(dst).c_str());
  if (size_of(dst.dtype) == 0 || (dst.dtype != src.dtype && !cast_of(src.dtype, dst.dtype)))
    return fail(d, ULY_UNSUPPORTED,
                "cuda.Copy: %s into %s: supported conversions are F32 to and from BF16 and F64, and F16 to F32",
                text_of(src).c_str(), text_of(dst).c_str());
  const int64_t n = elements(dst);
  if (n == 0) return ULY_OK;
  if (!dst.data || !src.data)
    return fail(d, ULY_INVALID_ARGUMENT, "cuda.Copy: %s into %s: a tensor has no memory", text_of(src).c_str(),
                text_of(dst).c_str());
  const bool to_device = src.where == ULY_HOST, to_host = dst.where == ULY_HOST;
  if ((!to_host && misaligned(dst.data, dst.dtype)) || (!to_device && misaligned(src.data, src.dtype)))
    return fail(d, ULY_INVALID_ARGUMENT,
                "cuda.Copy: %s at %p into %s at %p: on the GPU an address must be a multiple of its type's bytes",
                text_of(src).c_str(), src.data, text_of(dst).c_str(), dst.data);
  if ((to_device && !contiguous(src)) || (to_host && !contiguous(dst)))
    return fail(d, ULY_UNSUPPORTED, "cuda.Copy: %s into %s: host memory must be dense", text_of(src).c_str(),
                text_of(dst).c_str());
  const bool flat = dst.dtype == src.dtype && contiguous(dst) && contiguous(src);
  if (flat && (to_device || to_host || !s->group)) {
    const cudaMemcpyKind kind = to_device ? cudaMemcpyHostToDevice
                                : to_host ? cudaMemcpyDeviceToHost
                                          : cudaMemcpyDeviceToDevice;
    return check(d, cudaMemcpyAsync(dst.data, src.data, n * size_of(dst.dtype), kind, s->s), "cuda.Copy");
  }
  if (to_device || to_host) { // not queued: the next copy through the scratch overwrites it
    Moves *const group = s->group;
    s->group = nullptr;
    const int32_t code = staged(d, s, a, to_device);
    s->group = group;
    return code;
  }
  const uly_tensor *operands[] = {&dst, &src};
  start(s, plane_of(operands, 2, 0), src.dtype, dst.dtype, 0, n, dst.data, src.data);
  return check_launch(d, "cuda.Copy");
}

} // namespace

static const RegisterKernels registered({{ULY_OP_COPY, "own", copy}});
