// The functions that a host links. Each one clears the thread's error message and calls a function
// of export.go, with handles as integers. The Go function writes the error message. No code here
// reads memory of the caller.
#include <stdint.h>

#include "_cgo_export.h"
#include "message.h"
#include "thread.h"
#include "ulysses.h"

// The kinds of handles, as in handles.go.
enum { CONTEXT = 1, PLAN = 2, BATCH = 3 };

// GO evaluates a call of Go code with the host's signals blocked.
#define GO(call)                 \
  ({                             \
    struct uly_go_call go;       \
    uly_enter_go(&go);           \
    __auto_type result = (call); \
    uly_leave_go(&go);           \
    result;                      \
  })

// H is a handle or a user pointer as an integer, P a pointer without const: Go's functions have
// these types.
#define H(x) ((uintptr_t)(x))
#define P(x) ((void *)(uintptr_t)(x))

API uint32_t ulysses_version(void) { return ULYSSES_VERSION; }

API const char *ulysses_build_info(void) {
  char *info = uly_info_buffer();
  GO((uly_build_info(info, ULY_INFO_BYTES), 0));
  return info;
}

API ulysses_status ulysses_context_create_local(const ulysses_options *o, ulysses_context **out) {
  return GO(uly_context_create_local(P(o), out, uly_clear_error()));
}
API ulysses_status ulysses_context_create_mpi(int64_t fcomm, const ulysses_options *o,
                                              ulysses_context **out) {
  return GO(uly_context_create_mpi(fcomm, P(o), out, uly_clear_error()));
}
API ulysses_status ulysses_context_create_host(const ulysses_host_comm *h, const ulysses_options *o,
                                               ulysses_context **out) {
  return GO(uly_context_create_host(P(h), P(o), out, uly_clear_error()));
}
API ulysses_status ulysses_context_query(const ulysses_context *c, ulysses_context_info *out) {
  return GO(uly_context_query(H(c), out, uly_clear_error()));
}
API ulysses_status ulysses_context_async_error(ulysses_context *c) {
  return GO(uly_context_async_error(H(c), uly_clear_error()));
}
API void ulysses_context_abort(ulysses_context *c, ulysses_status why) {
  GO(uly_context_abort(H(c), why, uly_clear_error()));
}
API void ulysses_context_destroy(ulysses_context *c) {
  GO(uly_destroy(CONTEXT, H(c), uly_clear_error()));
}

API ulysses_status ulysses_attention_plan(ulysses_context *c, const ulysses_attention_desc *d,
                                          ulysses_plan **out) {
  return GO(uly_attention_plan(H(c), P(d), out, uly_clear_error()));
}
API ulysses_status ulysses_gdn_plan(ulysses_context *c, const ulysses_gdn_desc *d,
                                    ulysses_plan **out) {
  return GO(uly_gdn_plan(H(c), P(d), out, uly_clear_error()));
}
API ulysses_status ulysses_gdn_forward(ulysses_plan *p, const ulysses_batch *b,
                                       const ulysses_gdn_args *a) {
  return GO(uly_gdn_forward(H(p), H(b), P(a), uly_clear_error()));
}
API ulysses_status ulysses_gdn_backward(ulysses_plan *p, const ulysses_batch *b,
                                        const ulysses_gdn_args *a, const ulysses_gdn_grads *g) {
  return GO(uly_gdn_backward(H(p), H(b), P(a), P(g), uly_clear_error()));
}
API ulysses_status ulysses_gdn_layer_sizes(const ulysses_plan *p, const ulysses_batch *b,
                                           ulysses_sizes *out) {
  return GO(uly_gdn_layer_sizes(H(p), H(b), out, uly_clear_error()));
}
API ulysses_status ulysses_gdn_layer_forward(ulysses_plan *p, const ulysses_batch *b,
                                             const ulysses_gdn_layer_args *a) {
  return GO(uly_gdn_layer_forward(H(p), H(b), P(a), uly_clear_error()));
}
API ulysses_status ulysses_gdn_layer_backward(ulysses_plan *p, const ulysses_batch *b,
                                              const ulysses_gdn_layer_args *a,
                                              const ulysses_gdn_layer_grads *g) {
  return GO(uly_gdn_layer_backward(H(p), H(b), P(a), P(g), uly_clear_error()));
}
API const char *ulysses_plan_json(const ulysses_plan *p) {
  return GO(uly_plan_json(H(p), uly_clear_error()));
}
API void ulysses_plan_destroy(ulysses_plan *p) { GO(uly_destroy(PLAN, H(p), uly_clear_error())); }
API ulysses_status ulysses_plan_sizes(const ulysses_plan *p, const ulysses_batch *b,
                                      ulysses_sizes *out) {
  return GO(uly_plan_sizes(H(p), H(b), out, uly_clear_error()));
}

API ulysses_status ulysses_batch_create(ulysses_context *c, const ulysses_batch_desc *d,
                                        ulysses_batch **out) {
  return GO(uly_batch_create(H(c), P(d), out, uly_clear_error()));
}
API ulysses_status ulysses_batch_query(const ulysses_batch *b, ulysses_batch_info *out) {
  return GO(uly_batch_query(H(b), out, uly_clear_error()));
}
API ulysses_status ulysses_batch_positions(const ulysses_batch *b, int64_t *out) {
  return GO(uly_batch_positions(H(b), out, uly_clear_error()));
}
API void ulysses_batch_destroy(ulysses_batch *b) {
  GO(uly_destroy(BATCH, H(b), uly_clear_error()));
}

API ulysses_status ulysses_seq_to_heads(ulysses_plan *p, const ulysses_batch *b,
                                        const ulysses_reshard_args *a) {
  return GO(uly_reshard(H(p), H(b), P(a), 1, uly_clear_error()));
}
API ulysses_status ulysses_heads_to_seq(ulysses_plan *p, const ulysses_batch *b,
                                        const ulysses_reshard_args *a) {
  return GO(uly_reshard(H(p), H(b), P(a), 0, uly_clear_error()));
}
API ulysses_status ulysses_seq_to_heads_start(ulysses_plan *p, const ulysses_batch *b,
                                              const ulysses_reshard_args *a,
                                              ulysses_request **out) {
  return GO(uly_reshard_start(H(p), H(b), P(a), 1, out, uly_clear_error()));
}
API ulysses_status ulysses_heads_to_seq_start(ulysses_plan *p, const ulysses_batch *b,
                                              const ulysses_reshard_args *a,
                                              ulysses_request **out) {
  return GO(uly_reshard_start(H(p), H(b), P(a), 0, out, uly_clear_error()));
}
API ulysses_status ulysses_request_wait(ulysses_request *r) {
  return GO(uly_request_wait(H(r), uly_clear_error()));
}
API ulysses_status ulysses_reshard_workspace(ulysses_plan *p, const ulysses_batch *b,
                                             const ulysses_reshard_args *a, int32_t to_heads,
                                             uint64_t *bytes) {
  return GO(uly_reshard_workspace(H(p), H(b), P(a), to_heads, bytes, uly_clear_error()));
}

API ulysses_status ulysses_halo_forward(ulysses_context *c, const ulysses_batch *b,
                                        const ulysses_halo_args *a) {
  return GO(uly_halo(H(c), H(b), P(a), 1, uly_clear_error()));
}
API ulysses_status ulysses_halo_backward(ulysses_context *c, const ulysses_batch *b,
                                         const ulysses_halo_args *a) {
  return GO(uly_halo(H(c), H(b), P(a), 0, uly_clear_error()));
}
API ulysses_status ulysses_halo_workspace(ulysses_context *c, const ulysses_batch *b,
                                          const ulysses_halo_args *a, uint64_t *bytes) {
  return GO(uly_halo_workspace(H(c), H(b), P(a), bytes, uly_clear_error()));
}
API ulysses_status ulysses_loss_reduce(ulysses_context *c, double *sum, int64_t *count,
                                       double *mean) {
  return GO(uly_loss_reduce(H(c), sum, count, mean, uly_clear_error()));
}

API ulysses_status ulysses_attention_forward(ulysses_plan *p, const ulysses_batch *b,
                                             const ulysses_attention_args *a) {
  return GO(uly_attention_forward(H(p), H(b), P(a), uly_clear_error()));
}
API ulysses_status ulysses_attention_backward(ulysses_plan *p, const ulysses_batch *b,
                                              const ulysses_attention_args *a,
                                              const ulysses_attention_grads *g) {
  return GO(uly_attention_backward(H(p), H(b), P(a), P(g), uly_clear_error()));
}
API ulysses_status ulysses_attention_forward_start(ulysses_plan *p, const ulysses_batch *b,
                                                   const ulysses_attention_args *a,
                                                   ulysses_pass **out) {
  return GO(uly_forward_start(H(p), H(b), P(a), out, uly_clear_error()));
}
API ulysses_status ulysses_attention_backward_start(ulysses_plan *p, const ulysses_batch *b,
                                                    const ulysses_attention_args *a,
                                                    const ulysses_attention_grads *g,
                                                    ulysses_pass **out) {
  return GO(uly_backward_start(H(p), H(b), P(a), P(g), out, uly_clear_error()));
}
API ulysses_status ulysses_pass_send(ulysses_pass *x, int32_t tensor) {
  return GO(uly_pass_send(H(x), tensor, uly_clear_error()));
}
API ulysses_status ulysses_pass_attend(ulysses_pass *x) {
  return GO(uly_pass_attend(H(x), uly_clear_error()));
}
API ulysses_status ulysses_pass_wait(ulysses_pass *x, int32_t tensor) {
  return GO(uly_pass_wait(H(x), tensor, uly_clear_error()));
}
API ulysses_status ulysses_pass_cancel(ulysses_pass *x) {
  return GO(uly_pass_cancel(H(x), uly_clear_error()));
}
API ulysses_status ulysses_block_mask(const ulysses_block_pattern *p, int64_t heads, int64_t blocks,
                                      uint8_t *mask) {
  return GO(uly_block_mask(P(p), heads, blocks, mask, uly_clear_error()));
}
API ulysses_status ulysses_local_forward(ulysses_plan *p, const ulysses_batch *b,
                                         const ulysses_attention_args *a, ulysses_local_attention f,
                                         void *user) {
  return GO(uly_local_forward(H(p), H(b), P(a), P(f), H(user), uly_clear_error()));
}
API ulysses_status ulysses_local_backward(ulysses_plan *p, const ulysses_batch *b,
                                          const ulysses_attention_args *a,
                                          const ulysses_attention_grads *g,
                                          ulysses_local_attention f, void *user) {
  return GO(uly_local_backward(H(p), H(b), P(a), P(g), P(f), H(user), uly_clear_error()));
}
API ulysses_status ulysses_local_sizes(const ulysses_plan *p, const ulysses_batch *b,
                                       ulysses_sizes *out) {
  return GO(uly_local_sizes(H(p), H(b), out, uly_clear_error()));
}

API ulysses_status ulysses_attention_layer_sizes(const ulysses_plan *p, const ulysses_batch *b,
                                                 const ulysses_attention_layer_args *a,
                                                 ulysses_sizes *out) {
  return GO(uly_attention_layer_sizes(H(p), H(b), P(a), out, uly_clear_error()));
}
API ulysses_status ulysses_attention_layer_forward(ulysses_plan *p, const ulysses_batch *b,
                                                   const ulysses_attention_layer_args *a) {
  return GO(uly_attention_layer_forward(H(p), H(b), P(a), uly_clear_error()));
}
API ulysses_status ulysses_attention_layer_backward(ulysses_plan *p, const ulysses_batch *b,
                                                    const ulysses_attention_layer_args *a,
                                                    const ulysses_attention_layer_grads *g) {
  return GO(uly_attention_layer_backward(H(p), H(b), P(a), P(g), uly_clear_error()));
}
