// Matrix products by cuBLASLt, with F32 sums and never in TF32. The algorithm and descriptors of a
// shape are chosen when the shape is first used, and kept. Later calls allocate nothing.
#include "gemm_cublaslt.h"

#include <cublasLt.h>
#include <string.h>

#include "bytes_key.h"
#include "dl.h"
#include "gemm_layout.h"

#define CALL(name, parameters, arguments) \
  FORWARD(LIB_CUBLASLT, true, cublasStatus_t, name, parameters, arguments, CUBLAS_STATUS_NOT_INITIALIZED)
CALL(cublasLtCreate, (cublasLtHandle_t * h), (h))
CALL(cublasLtDestroy, (cublasLtHandle_t h), (h))
CALL(cublasLtMatmulDescCreate, (cublasLtMatmulDesc_t * d, cublasComputeType_t c, cudaDataType_t s), (d, c, s))
CALL(cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t d), (d))
CALL(cublasLtMatmulDescSetAttribute,
     (cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void *v, size_t n), (d, a, v, n))
CALL(cublasLtMatrixLayoutCreate,
     (cublasLtMatrixLayout_t * l, cudaDataType t, uint64_t rows, uint64_t columns, int64_t ld),
     (l, t, rows, columns, ld))
CALL(cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t l), (l))
CALL(cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * p), (p))
CALL(cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t p), (p))
CALL(cublasLtMatmulPreferenceSetAttribute,
     (cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void *v, size_t n), (p, a, v, n))
CALL(cublasLtMatmulAlgoGetHeuristic,
     (cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
      cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t out, cublasLtMatmulPreference_t p, int asked,
      cublasLtMatmulHeuristicResult_t *results, int *found),
     (h, d, a, b, c, out, p, asked, results, found))
CALL(cublasLtMatmul,
     (cublasLtHandle_t h, cublasLtMatmulDesc_t what, const void *alpha, const void *a, cublasLtMatrixLayout_t la,
      const void *b, cublasLtMatrixLayout_t lb, const void *beta, const void *c, cublasLtMatrixLayout_t lc, void *d,
      cublasLtMatrixLayout_t ld, const cublasLtMatmulAlgo_t *algorithm, void *workspace, size_t bytes, cudaStream_t s),
     (h, what, alpha, a, la, b, lb, beta, c, lc, d, ld, algorithm, workspace, bytes, s))
FORWARD(LIB_CUBLASLT, true, const char *, cublasLtGetStatusString, (cublasStatus_t s), (s), "cuBLASLt is not loaded")

namespace {

// key has everything on which the choice of an algorithm may depend. Keys are compared byte by
// byte, including padding; key_of clears it.
struct key {
  gemm_plan p;
  uint32_t aligned[4]; // first, second, c, bias
  uint8_t in, out, bias, accumulate;
};
bool key_of(const uly_gemm &g, key *out) {
  memset(static_cast<void *>(out), 0, sizeof *out);
  auto view = [](const uly_tensor &t) { return gemm_view{t.shape[0], t.shape[1], t.stride[0], t.stride[1]}; };
  gemm_plan p;
  if (!gemm_plan_of(view(g.a), view(g.b), view(g.c), &p) || p.m == 0 || p.n == 0 || p.k == 0) return false;
  auto copy = [](gemm_operand &to, const gemm_operand &from) {
    to.rows = from.rows, to.columns = from.columns, to.ld = from.ld, to.transposed = from.transposed;
  };
  out->p.m = p.m, out->p.n = p.n, out->p.k = p.k;
  copy(out->p.first, p.first), copy(out->p.second, p.second), copy(out->p.c, p.c);
  const void *pointers[4] = {g.b.data, g.a.data, g.c.data, g.bias.data};
  for (int i = 0; i < 4; i++) out->aligned[i] = pointers[i] ? gemm_alignment(pointers[i]) : 0;
  out->in = g.a.dtype, out->out = g.c.dtype, out->bias = g.bias.data != nullptr, out->accumulate = g.accumulate != 0;
  return true;
}

// matmul has the descriptors and the algorithm of a product.
struct matmul {
  cublasLtMatmulDesc_t what = nullptr;
  cublasLtMatrixLayout_t first = nullptr, second = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm;
  size_t workspace = 0;
  bool ok = false;
  void close() {
    if (what) cublasLtMatmulDescDestroy(what);
    for (cublasLtMatrixLayout_t l : {first, second, c})
      if (l) cublasLtMatrixLayoutDestroy(l);
  }
};

cudaDataType_t type_of(uint8_t dtype) { return dtype == ULY_F32 ? CUDA_R_32F : CUDA_R_16BF; }

struct matmuls : library_state {
  cublasLtHandle_t handle = nullptr;
  BytesMap<key, matmul> known;
  ~matmuls() override {
    for (auto &p : known) p.second.close();
    if (handle) cublasLtDestroy(handle);
  }
};

matmul make_matmul(cublasLtHandle_t handle, const key &k, const void *bias) {
  matmul p;
  cublasLtMatmulPreference_t preference = nullptr;
  auto layout = [](cublasLtMatrixLayout_t *l, uint8_t type, const gemm_operand &o) {
    return cublasLtMatrixLayoutCreate(l, type_of(type), static_cast<uint64_t>(o.rows), static_cast<uint64_t>(o.columns),
                                      o.ld) == CUBLAS_STATUS_SUCCESS;
  };
  auto set = [&](cublasLtMatmulDescAttributes_t name, const auto &v) {
    return cublasLtMatmulDescSetAttribute(p.what, name, &v, sizeof v) == CUBLAS_STATUS_SUCCESS;
  };
  auto prefer = [&](cublasLtMatmulPreferenceAttributes_t name, const auto &v) {
    return cublasLtMatmulPreferenceSetAttribute(preference, name, &v, sizeof v) == CUBLAS_STATUS_SUCCESS;
  };
  const cublasOperation_t op[2] = {CUBLAS_OP_N, CUBLAS_OP_T};
  const cublasLtEpilogue_t epilogue = k.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
  const uint64_t workspace = STREAM_SCRATCH;
  // partial sums over k are added in F32, never in the type of C
  const uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  bool ok = cublasLtMatmulDescCreate(&p.what, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
            set(CUBLASLT_MATMUL_DESC_TRANSA, op[k.p.first.transposed]) &&
            set(CUBLASLT_MATMUL_DESC_TRANSB, op[k.p.second.transposed]) &&
            set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue) && (!k.bias || set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)) &&
            layout(&p.first, k.in, k.p.first) && layout(&p.second, k.in, k.p.second) && layout(&p.c, k.out, k.p.c) &&
            cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS &&
            prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace) &&
            prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, sums) &&
            prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, k.aligned[0]) &&
            prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, k.aligned[1]) &&
            prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, k.aligned[2]) &&
            prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, k.aligned[2]);
  cublasLtMatmulHeuristicResult_t best;
  int found = 0;
  p.ok = ok &&
         cublasLtMatmulAlgoGetHeuristic(handle, p.what, p.first, p.second, p.c, p.c, preference, 1, &best, &found) ==
             CUBLAS_STATUS_SUCCESS &&
         found == 1 && best.state == CUBLAS_STATUS_SUCCESS;
  if (p.ok) {
    p.algorithm = best.algo;
    p.workspace = best.workspaceSize;
  }
  if (preference) cublasLtMatmulPreferenceDestroy(preference);
  return p;
}

// unsupported records why cuBLASLt does not support a call. The message appears if ULYSSES_KERNEL
// selects cuBLASLt.
std::nullptr_t unsupported(uly_device *d, const std::string &why) {
  fail(d, ULY_UNSUPPORTED, "cuBLASLt: %s", why.c_str());
  return nullptr;
}

// find returns NULL if the library is missing or has no algorithm for the call.
matmul *find(uly_device *d, const uly_gemm &g) {
  key k;
  if (!key_of(g, &k)) return unsupported(d, "a matrix has no elements, or its rows overlap");
  if (!library_open(LIB_CUBLASLT)) return unsupported(d, library_reason(LIB_CUBLASLT));
  library_state *&slot = libraries_of(d).gemm;
  if (!slot) slot = new matmuls;
  matmuls &all = *static_cast<matmuls *>(slot);
  if (!all.handle) {
    const cublasStatus_t status = cublasLtCreate(&all.handle);
    if (status != CUBLAS_STATUS_SUCCESS) {
      all.handle = nullptr;
      return unsupported(d, std::string("cublasLtCreate: ") + cublasLtGetStatusString(status));
    }
  }
  auto at = all.known.find(k);
  if (at == all.known.end()) at = all.known.emplace(k, make_matmul(all.handle, k, g.bias.data)).first;
  return at->second.ok ? &at->second : unsupported(d, "no algorithm for this shape");
}

} // namespace

bool gemm_cublaslt_fits(uly_device *d, const uly_gemm &g) {
  uly_gemm alone = g;
  if (g.bias.data && g.bias.dtype != g.c.dtype) { // gemm_rows.cu then writes the bias to C first
    alone.bias = {};
    alone.accumulate = 1;
  }
  return find(d, alone) != nullptr;
}

int32_t gemm_cublaslt(uly_device *d, uly_stream *s, const uly_gemm &g) {
  matmul *p = find(d, g);
  if (!p) return ULY_UNSUPPORTED; // find has recorded the reason
  const float one = 1, beta = g.accumulate ? 1 : 0;
  if (g.bias.data)
    cublasLtMatmulDescSetAttribute(p->what, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g.bias.data, sizeof g.bias.data);
  cublasStatus_t status =
      cublasLtMatmul(static_cast<matmuls *>(libraries_of(d).gemm)->handle, p->what, &one, g.b.data, p->first, g.a.data,
                     p->second, &beta, g.c.data, p->c, g.c.data, p->c, &p->algorithm, s->scratch, p->workspace, s->s);
  if (status != CUBLAS_STATUS_SUCCESS)
    return fail(d, ULY_DEVICE, "cuda.Gemm: cublasLtMatmul of [%lld, %lld] · [%lld, %lld]: %s", (long long)g.a.shape[0],
                (long long)g.a.shape[1], (long long)g.b.shape[0], (long long)g.b.shape[1],
                cublasLtGetStatusString(status));
  return ULY_OK;
}
