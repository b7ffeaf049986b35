/* The ABI of ulysses.h 100, printed by capi/generate -record. A header that changes any of it
 * does not compile here. */
#include <stddef.h>
#include "ulysses.h"

#define SAME(what) _Static_assert(what, #what)

SAME(ULYSSES_OK == 0);
SAME(ULYSSES_INVALID_ARGUMENT == 1);
SAME(ULYSSES_INVALID_CONFIG == 2);
SAME(ULYSSES_UNSUPPORTED == 3);
SAME(ULYSSES_OUT_OF_MEMORY == 4);
SAME(ULYSSES_COMM == 5);
SAME(ULYSSES_DEVICE == 6);
SAME(ULYSSES_IO == 7);
SAME(ULYSSES_NUMERIC == 8);
SAME(ULYSSES_INTERNAL == 10);
SAME(ULYSSES_PREEMPTED == 75);

SAME(ULYSSES_F32 == 0x2002);
SAME(ULYSSES_BF16 == 0x1004);
SAME(ULYSSES_F16 == 0x1002);
SAME(ULYSSES_I32 == 0x2000);
SAME(ULYSSES_I64 == 0x4000);
SAME(ULYSSES_U8 == 0x0801);

SAME(ULYSSES_CPU == 1);
SAME(ULYSSES_CUDA == 2);

SAME(ULYSSES_COMM_AUTO == 0);
SAME(ULYSSES_COMM_HOST == 1);
SAME(ULYSSES_COMM_NCCL == 2);
SAME(ULYSSES_COMM_IPC == 3);

uint32_t ulysses_version(void);

const char *ulysses_build_info(void);

const char *ulysses_status_string(ulysses_status);

const char *ulysses_last_error(void);

SAME(offsetof(ulysses_tensor, data) == 0);
SAME(_Generic(((ulysses_tensor *)0)->data, void *: 1, default: 0));
SAME(offsetof(ulysses_tensor, device) == 8);
SAME(_Generic(((ulysses_tensor *)0)->device, int32_t: 1, default: 0));
SAME(offsetof(ulysses_tensor, ordinal) == 12);
SAME(_Generic(((ulysses_tensor *)0)->ordinal, int32_t: 1, default: 0));
SAME(offsetof(ulysses_tensor, ndim) == 16);
SAME(_Generic(((ulysses_tensor *)0)->ndim, int32_t: 1, default: 0));
SAME(offsetof(ulysses_tensor, code) == 20);
SAME(_Generic(((ulysses_tensor *)0)->code, uint8_t: 1, default: 0));
SAME(offsetof(ulysses_tensor, bits) == 21);
SAME(_Generic(((ulysses_tensor *)0)->bits, uint8_t: 1, default: 0));
SAME(offsetof(ulysses_tensor, lanes) == 22);
SAME(_Generic(((ulysses_tensor *)0)->lanes, uint16_t: 1, default: 0));
SAME(offsetof(ulysses_tensor, shape) == 24);
SAME(_Generic(((ulysses_tensor *)0)->shape, int64_t *: 1, default: 0));
SAME(offsetof(ulysses_tensor, strides) == 32);
SAME(_Generic(((ulysses_tensor *)0)->strides, int64_t *: 1, default: 0));
SAME(offsetof(ulysses_tensor, byte_offset) == 40);
SAME(_Generic(((ulysses_tensor *)0)->byte_offset, uint64_t: 1, default: 0));
SAME(sizeof(ulysses_tensor) >= 48);

SAME(offsetof(ulysses_options, struct_size) == 0);
SAME(_Generic(((ulysses_options *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_options, device) == 4);
SAME(_Generic(((ulysses_options *)0)->device, int32_t: 1, default: 0));
SAME(offsetof(ulysses_options, ordinal) == 8);
SAME(_Generic(((ulysses_options *)0)->ordinal, int32_t: 1, default: 0));
SAME(offsetof(ulysses_options, threads) == 12);
SAME(_Generic(((ulysses_options *)0)->threads, int32_t: 1, default: 0));
SAME(offsetof(ulysses_options, ulysses) == 16);
SAME(_Generic(((ulysses_options *)0)->ulysses, int32_t: 1, default: 0));
SAME(offsetof(ulysses_options, ring) == 20);
SAME(_Generic(((ulysses_options *)0)->ring, int32_t: 1, default: 0));
SAME(offsetof(ulysses_options, comm) == 24);
SAME(_Generic(((ulysses_options *)0)->comm, int32_t: 1, default: 0));
SAME(offsetof(ulysses_options, timeout) == 28);
SAME(_Generic(((ulysses_options *)0)->timeout, int32_t: 1, default: 0));
SAME(offsetof(ulysses_options, log) == 32);
SAME(_Generic(((ulysses_options *)0)->log, void (*)(void *, int32_t, const char *): 1, default: 0));
SAME(offsetof(ulysses_options, log_user) == 40);
SAME(_Generic(((ulysses_options *)0)->log_user, void *: 1, default: 0));
SAME(offsetof(ulysses_options, nccl_comm) == 48);
SAME(_Generic(((ulysses_options *)0)->nccl_comm, void *: 1, default: 0));
SAME(offsetof(ulysses_options, flags) == 56);
SAME(_Generic(((ulysses_options *)0)->flags, int32_t: 1, default: 0));
SAME(offsetof(ulysses_options, reserved) == 60);
SAME(_Generic(((ulysses_options *)0)->reserved, int32_t: 1, default: 0));
SAME(sizeof(ulysses_options) >= 64);

SAME(ULYSSES_OWN_WORKSPACES == 1);
SAME(ULYSSES_NO_AGREEMENT == 2);

SAME(offsetof(ulysses_host_comm, struct_size) == 0);
SAME(_Generic(((ulysses_host_comm *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_host_comm, rank) == 4);
SAME(_Generic(((ulysses_host_comm *)0)->rank, int32_t: 1, default: 0));
SAME(offsetof(ulysses_host_comm, size) == 8);
SAME(_Generic(((ulysses_host_comm *)0)->size, int32_t: 1, default: 0));
SAME(offsetof(ulysses_host_comm, reserved) == 12);
SAME(_Generic(((ulysses_host_comm *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_host_comm, user) == 16);
SAME(_Generic(((ulysses_host_comm *)0)->user, void *: 1, default: 0));
SAME(offsetof(ulysses_host_comm, allgather) == 24);
SAME(_Generic(((ulysses_host_comm *)0)->allgather,
         int32_t (*)(void *, const void *, void *, int64_t): 1,
         default: 0));
SAME(offsetof(ulysses_host_comm, alltoallv) == 32);
SAME(_Generic(((ulysses_host_comm *)0)->alltoallv,
         int32_t (*)(void *, const void *, const int64_t *, void *, const int64_t *): 1,
         default: 0));
SAME(sizeof(ulysses_host_comm) >= 40);

ulysses_status ulysses_context_create_local(const ulysses_options *, ulysses_context **);

ulysses_status ulysses_context_create_mpi(int64_t, const ulysses_options *, ulysses_context **);

ulysses_status ulysses_context_create_host(const ulysses_host_comm *, const ulysses_options *,
                                           ulysses_context **);

SAME(offsetof(ulysses_context_info, struct_size) == 0);
SAME(_Generic(((ulysses_context_info *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_context_info, rank) == 4);
SAME(_Generic(((ulysses_context_info *)0)->rank, int32_t: 1, default: 0));
SAME(offsetof(ulysses_context_info, size) == 8);
SAME(_Generic(((ulysses_context_info *)0)->size, int32_t: 1, default: 0));
SAME(offsetof(ulysses_context_info, ulysses) == 12);
SAME(_Generic(((ulysses_context_info *)0)->ulysses, int32_t: 1, default: 0));
SAME(offsetof(ulysses_context_info, ring) == 16);
SAME(_Generic(((ulysses_context_info *)0)->ring, int32_t: 1, default: 0));
SAME(offsetof(ulysses_context_info, device) == 20);
SAME(_Generic(((ulysses_context_info *)0)->device, int32_t: 1, default: 0));
SAME(offsetof(ulysses_context_info, ordinal) == 24);
SAME(_Generic(((ulysses_context_info *)0)->ordinal, int32_t: 1, default: 0));
SAME(offsetof(ulysses_context_info, comm) == 28);
SAME(_Generic(((ulysses_context_info *)0)->comm, int32_t: 1, default: 0));
SAME(sizeof(ulysses_context_info) >= 32);

ulysses_status ulysses_context_query(const ulysses_context *, ulysses_context_info *);

ulysses_status ulysses_context_async_error(ulysses_context *);

void ulysses_context_abort(ulysses_context *, ulysses_status);

void ulysses_context_destroy(ulysses_context *);

SAME(ULYSSES_CAUSAL == 1);
SAME(ULYSSES_WINDOW == 2);
SAME(ULYSSES_CROSS == 4);
SAME(ULYSSES_SINKS == 8);
SAME(ULYSSES_ALIBI == 16);
SAME(ULYSSES_BLOCK_MASK == 32);
SAME(ULYSSES_QK_L2NORM == 64);
SAME(ULYSSES_DETERMINISTIC == 128);
SAME(ULYSSES_SAVE_LESS == 256);
SAME(ULYSSES_NO_BACKWARD == 512);
SAME(ULYSSES_STATES == 1024);

SAME(offsetof(ulysses_attention_desc, struct_size) == 0);
SAME(_Generic(((ulysses_attention_desc *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, dtype) == 4);
SAME(_Generic(((ulysses_attention_desc *)0)->dtype, int32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, flags) == 8);
SAME(_Generic(((ulysses_attention_desc *)0)->flags, int32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, block_q) == 12);
SAME(_Generic(((ulysses_attention_desc *)0)->block_q, int32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, block_k) == 16);
SAME(_Generic(((ulysses_attention_desc *)0)->block_k, int32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, scale) == 20);
SAME(_Generic(((ulysses_attention_desc *)0)->scale, float: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, softcap) == 24);
SAME(_Generic(((ulysses_attention_desc *)0)->softcap, float: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, dropout) == 28);
SAME(_Generic(((ulysses_attention_desc *)0)->dropout, float: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, heads) == 32);
SAME(_Generic(((ulysses_attention_desc *)0)->heads, int64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, kv_heads) == 40);
SAME(_Generic(((ulysses_attention_desc *)0)->kv_heads, int64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, head_dim) == 48);
SAME(_Generic(((ulysses_attention_desc *)0)->head_dim, int64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, v_dim) == 56);
SAME(_Generic(((ulysses_attention_desc *)0)->v_dim, int64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, window_left) == 64);
SAME(_Generic(((ulysses_attention_desc *)0)->window_left, int64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, window_right) == 72);
SAME(_Generic(((ulysses_attention_desc *)0)->window_right, int64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_desc, max_tokens) == 80);
SAME(_Generic(((ulysses_attention_desc *)0)->max_tokens, int64_t: 1, default: 0));
SAME(sizeof(ulysses_attention_desc) >= 88);

SAME(ULYSSES_GDN_AUTO == 0);
SAME(ULYSSES_GDN_HEADS == 1);
SAME(ULYSSES_GDN_STATE == 2);

SAME(offsetof(ulysses_gdn_desc, struct_size) == 0);
SAME(_Generic(((ulysses_gdn_desc *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, dtype) == 4);
SAME(_Generic(((ulysses_gdn_desc *)0)->dtype, int32_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, flags) == 8);
SAME(_Generic(((ulysses_gdn_desc *)0)->flags, int32_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, strategy) == 12);
SAME(_Generic(((ulysses_gdn_desc *)0)->strategy, int32_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, chunk) == 16);
SAME(_Generic(((ulysses_gdn_desc *)0)->chunk, int32_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, scale) == 20);
SAME(_Generic(((ulysses_gdn_desc *)0)->scale, float: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, qk_heads) == 24);
SAME(_Generic(((ulysses_gdn_desc *)0)->qk_heads, int64_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, v_heads) == 32);
SAME(_Generic(((ulysses_gdn_desc *)0)->v_heads, int64_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, qk_dim) == 40);
SAME(_Generic(((ulysses_gdn_desc *)0)->qk_dim, int64_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, v_dim) == 48);
SAME(_Generic(((ulysses_gdn_desc *)0)->v_dim, int64_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_desc, max_tokens) == 56);
SAME(_Generic(((ulysses_gdn_desc *)0)->max_tokens, int64_t: 1, default: 0));
SAME(sizeof(ulysses_gdn_desc) >= 64);

ulysses_status ulysses_attention_plan(ulysses_context *, const ulysses_attention_desc *,
                                      ulysses_plan **);

ulysses_status ulysses_gdn_plan(ulysses_context *, const ulysses_gdn_desc *, ulysses_plan **);

const char *ulysses_plan_json(const ulysses_plan *);

void ulysses_plan_destroy(ulysses_plan *);

SAME(ULYSSES_ZIGZAG == 1);

SAME(offsetof(ulysses_batch_desc, struct_size) == 0);
SAME(_Generic(((ulysses_batch_desc *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, flags) == 4);
SAME(_Generic(((ulysses_batch_desc *)0)->flags, int32_t: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, batch) == 8);
SAME(_Generic(((ulysses_batch_desc *)0)->batch, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, seq) == 16);
SAME(_Generic(((ulysses_batch_desc *)0)->seq, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, rows) == 24);
SAME(_Generic(((ulysses_batch_desc *)0)->rows, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, kv_seq) == 32);
SAME(_Generic(((ulysses_batch_desc *)0)->kv_seq, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, kv_rows) == 40);
SAME(_Generic(((ulysses_batch_desc *)0)->kv_rows, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, docs) == 48);
SAME(_Generic(((ulysses_batch_desc *)0)->docs, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, cu_seqlens) == 56);
SAME(_Generic(((ulysses_batch_desc *)0)->cu_seqlens, const int64_t *: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, kv_cu_seqlens) == 64);
SAME(_Generic(((ulysses_batch_desc *)0)->kv_cu_seqlens, const int64_t *: 1, default: 0));
SAME(offsetof(ulysses_batch_desc, positions) == 72);
SAME(_Generic(((ulysses_batch_desc *)0)->positions, const int64_t *: 1, default: 0));
SAME(sizeof(ulysses_batch_desc) >= 80);

SAME(offsetof(ulysses_batch_info, struct_size) == 0);
SAME(_Generic(((ulysses_batch_info *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_batch_info, ranges) == 4);
SAME(_Generic(((ulysses_batch_info *)0)->ranges, int32_t: 1, default: 0));
SAME(offsetof(ulysses_batch_info, seq) == 8);
SAME(_Generic(((ulysses_batch_info *)0)->seq, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_info, rows) == 16);
SAME(_Generic(((ulysses_batch_info *)0)->rows, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_info, lo) == 24);
SAME(sizeof(((ulysses_batch_info *)0)->lo) == 16);
SAME(offsetof(ulysses_batch_info, hi) == 40);
SAME(sizeof(((ulysses_batch_info *)0)->hi) == 16);
SAME(offsetof(ulysses_batch_info, max_rows) == 56);
SAME(_Generic(((ulysses_batch_info *)0)->max_rows, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_info, gathered_rows) == 64);
SAME(_Generic(((ulysses_batch_info *)0)->gathered_rows, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_info, kv_seq) == 72);
SAME(_Generic(((ulysses_batch_info *)0)->kv_seq, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_info, kv_rows) == 80);
SAME(_Generic(((ulysses_batch_info *)0)->kv_rows, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_info, kv_gathered_rows) == 88);
SAME(_Generic(((ulysses_batch_info *)0)->kv_gathered_rows, int64_t: 1, default: 0));
SAME(offsetof(ulysses_batch_info, docs) == 96);
SAME(_Generic(((ulysses_batch_info *)0)->docs, int64_t: 1, default: 0));
SAME(sizeof(ulysses_batch_info) >= 104);

ulysses_status ulysses_batch_create(ulysses_context *, const ulysses_batch_desc *,
                                    ulysses_batch **);

ulysses_status ulysses_batch_query(const ulysses_batch *, ulysses_batch_info *);

ulysses_status ulysses_batch_positions(const ulysses_batch *, int64_t *);

void ulysses_batch_destroy(ulysses_batch *);

SAME(offsetof(ulysses_sizes, struct_size) == 0);
SAME(_Generic(((ulysses_sizes *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_sizes, reserved) == 4);
SAME(_Generic(((ulysses_sizes *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_sizes, saved) == 8);
SAME(_Generic(((ulysses_sizes *)0)->saved, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_sizes, workspace) == 16);
SAME(_Generic(((ulysses_sizes *)0)->workspace, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_sizes, head_lo) == 24);
SAME(_Generic(((ulysses_sizes *)0)->head_lo, int64_t: 1, default: 0));
SAME(offsetof(ulysses_sizes, head_hi) == 32);
SAME(_Generic(((ulysses_sizes *)0)->head_hi, int64_t: 1, default: 0));
SAME(offsetof(ulysses_sizes, shared_lo) == 40);
SAME(_Generic(((ulysses_sizes *)0)->shared_lo, int64_t: 1, default: 0));
SAME(offsetof(ulysses_sizes, shared_hi) == 48);
SAME(_Generic(((ulysses_sizes *)0)->shared_hi, int64_t: 1, default: 0));
SAME(sizeof(ulysses_sizes) >= 56);

ulysses_status ulysses_plan_sizes(const ulysses_plan *, const ulysses_batch *, ulysses_sizes *);

SAME(offsetof(ulysses_reshard_args, struct_size) == 0);
SAME(_Generic(((ulysses_reshard_args *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_reshard_args, n) == 4);
SAME(_Generic(((ulysses_reshard_args *)0)->n, int32_t: 1, default: 0));
SAME(offsetof(ulysses_reshard_args, sum_copies) == 8);
SAME(_Generic(((ulysses_reshard_args *)0)->sum_copies, int32_t: 1, default: 0));
SAME(offsetof(ulysses_reshard_args, reserved) == 12);
SAME(_Generic(((ulysses_reshard_args *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_reshard_args, shared) == 16);
SAME(_Generic(((ulysses_reshard_args *)0)->shared, const int32_t *: 1, default: 0));
SAME(offsetof(ulysses_reshard_args, in) == 24);
SAME(_Generic(((ulysses_reshard_args *)0)->in, const ulysses_tensor *const *: 1, default: 0));
SAME(offsetof(ulysses_reshard_args, out) == 32);
SAME(_Generic(((ulysses_reshard_args *)0)->out, ulysses_tensor *const *: 1, default: 0));
SAME(offsetof(ulysses_reshard_args, workspace) == 40);
SAME(_Generic(((ulysses_reshard_args *)0)->workspace, void *: 1, default: 0));
SAME(offsetof(ulysses_reshard_args, workspace_bytes) == 48);
SAME(_Generic(((ulysses_reshard_args *)0)->workspace_bytes, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_reshard_args, stream) == 56);
SAME(_Generic(((ulysses_reshard_args *)0)->stream, void *: 1, default: 0));
SAME(sizeof(ulysses_reshard_args) >= 64);

ulysses_status ulysses_seq_to_heads(ulysses_plan *, const ulysses_batch *,
                                    const ulysses_reshard_args *);

ulysses_status ulysses_heads_to_seq(ulysses_plan *, const ulysses_batch *,
                                    const ulysses_reshard_args *);

ulysses_status ulysses_reshard_workspace(ulysses_plan *, const ulysses_batch *,
                                         const ulysses_reshard_args *, int32_t, uint64_t *);

ulysses_status ulysses_seq_to_heads_start(ulysses_plan *, const ulysses_batch *,
                                          const ulysses_reshard_args *, ulysses_request **);

ulysses_status ulysses_heads_to_seq_start(ulysses_plan *, const ulysses_batch *,
                                          const ulysses_reshard_args *, ulysses_request **);

ulysses_status ulysses_request_wait(ulysses_request *);

SAME(offsetof(ulysses_halo_args, struct_size) == 0);
SAME(_Generic(((ulysses_halo_args *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_halo_args, reserved) == 4);
SAME(_Generic(((ulysses_halo_args *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_halo_args, n) == 8);
SAME(_Generic(((ulysses_halo_args *)0)->n, int64_t: 1, default: 0));
SAME(offsetof(ulysses_halo_args, x) == 16);
SAME(_Generic(((ulysses_halo_args *)0)->x, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_halo_args, halo) == 24);
SAME(_Generic(((ulysses_halo_args *)0)->halo, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_halo_args, workspace) == 32);
SAME(_Generic(((ulysses_halo_args *)0)->workspace, void *: 1, default: 0));
SAME(offsetof(ulysses_halo_args, workspace_bytes) == 40);
SAME(_Generic(((ulysses_halo_args *)0)->workspace_bytes, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_halo_args, stream) == 48);
SAME(_Generic(((ulysses_halo_args *)0)->stream, void *: 1, default: 0));
SAME(sizeof(ulysses_halo_args) >= 56);

ulysses_status ulysses_halo_forward(ulysses_context *, const ulysses_batch *,
                                    const ulysses_halo_args *);

ulysses_status ulysses_halo_backward(ulysses_context *, const ulysses_batch *,
                                     const ulysses_halo_args *);

ulysses_status ulysses_halo_workspace(ulysses_context *, const ulysses_batch *,
                                      const ulysses_halo_args *, uint64_t *);

ulysses_status ulysses_loss_reduce(ulysses_context *, double *, int64_t *, double *);

SAME(offsetof(ulysses_attention_args, struct_size) == 0);
SAME(_Generic(((ulysses_attention_args *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_args, reserved) == 4);
SAME(_Generic(((ulysses_attention_args *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_args, q) == 8);
SAME(_Generic(((ulysses_attention_args *)0)->q, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, k) == 16);
SAME(_Generic(((ulysses_attention_args *)0)->k, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, v) == 24);
SAME(_Generic(((ulysses_attention_args *)0)->v, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, sinks) == 32);
SAME(_Generic(((ulysses_attention_args *)0)->sinks, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, alibi) == 40);
SAME(_Generic(((ulysses_attention_args *)0)->alibi, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, block_mask) == 48);
SAME(_Generic(((ulysses_attention_args *)0)->block_mask, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, out) == 56);
SAME(_Generic(((ulysses_attention_args *)0)->out, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, lse) == 64);
SAME(_Generic(((ulysses_attention_args *)0)->lse, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, dropout_seed) == 72);
SAME(_Generic(((ulysses_attention_args *)0)->dropout_seed, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_args, saved) == 80);
SAME(_Generic(((ulysses_attention_args *)0)->saved, void *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, saved_bytes) == 88);
SAME(_Generic(((ulysses_attention_args *)0)->saved_bytes, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_args, workspace) == 96);
SAME(_Generic(((ulysses_attention_args *)0)->workspace, void *: 1, default: 0));
SAME(offsetof(ulysses_attention_args, workspace_bytes) == 104);
SAME(_Generic(((ulysses_attention_args *)0)->workspace_bytes, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_args, stream) == 112);
SAME(_Generic(((ulysses_attention_args *)0)->stream, void *: 1, default: 0));
SAME(sizeof(ulysses_attention_args) >= 120);

SAME(offsetof(ulysses_attention_grads, struct_size) == 0);
SAME(_Generic(((ulysses_attention_grads *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_grads, reserved) == 4);
SAME(_Generic(((ulysses_attention_grads *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_grads, dout) == 8);
SAME(_Generic(((ulysses_attention_grads *)0)->dout, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_grads, dq) == 16);
SAME(_Generic(((ulysses_attention_grads *)0)->dq, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_grads, dk) == 24);
SAME(_Generic(((ulysses_attention_grads *)0)->dk, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_grads, dv) == 32);
SAME(_Generic(((ulysses_attention_grads *)0)->dv, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_grads, dsinks) == 40);
SAME(_Generic(((ulysses_attention_grads *)0)->dsinks, ulysses_tensor *: 1, default: 0));
SAME(sizeof(ulysses_attention_grads) >= 48);

ulysses_status ulysses_attention_forward(ulysses_plan *, const ulysses_batch *,
                                         const ulysses_attention_args *);

ulysses_status ulysses_attention_backward(ulysses_plan *, const ulysses_batch *,
                                          const ulysses_attention_args *,
                                          const ulysses_attention_grads *);

SAME(offsetof(ulysses_local_call, struct_size) == 0);
SAME(_Generic(((ulysses_local_call *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_local_call, backward) == 4);
SAME(_Generic(((ulysses_local_call *)0)->backward, int32_t: 1, default: 0));
SAME(offsetof(ulysses_local_call, head_lo) == 8);
SAME(_Generic(((ulysses_local_call *)0)->head_lo, int64_t: 1, default: 0));
SAME(offsetof(ulysses_local_call, head_hi) == 16);
SAME(_Generic(((ulysses_local_call *)0)->head_hi, int64_t: 1, default: 0));
SAME(offsetof(ulysses_local_call, kv_head_lo) == 24);
SAME(_Generic(((ulysses_local_call *)0)->kv_head_lo, int64_t: 1, default: 0));
SAME(offsetof(ulysses_local_call, kv_head_hi) == 32);
SAME(_Generic(((ulysses_local_call *)0)->kv_head_hi, int64_t: 1, default: 0));
SAME(offsetof(ulysses_local_call, q) == 40);
SAME(_Generic(((ulysses_local_call *)0)->q, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_local_call, k) == 48);
SAME(_Generic(((ulysses_local_call *)0)->k, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_local_call, v) == 56);
SAME(_Generic(((ulysses_local_call *)0)->v, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_local_call, out) == 64);
SAME(_Generic(((ulysses_local_call *)0)->out, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_local_call, dout) == 72);
SAME(_Generic(((ulysses_local_call *)0)->dout, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_local_call, dq) == 80);
SAME(_Generic(((ulysses_local_call *)0)->dq, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_local_call, dk) == 88);
SAME(_Generic(((ulysses_local_call *)0)->dk, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_local_call, dv) == 96);
SAME(_Generic(((ulysses_local_call *)0)->dv, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_local_call, stream) == 104);
SAME(_Generic(((ulysses_local_call *)0)->stream, void *: 1, default: 0));
SAME(sizeof(ulysses_local_call) >= 112);

SAME(_Generic((ulysses_local_attention)0,
         ulysses_status (*)(void *, const ulysses_local_call *): 1,
         default: 0));

ulysses_status ulysses_local_forward(ulysses_plan *, const ulysses_batch *,
                                     const ulysses_attention_args *, ulysses_local_attention,
                                     void *);

ulysses_status ulysses_local_backward(ulysses_plan *, const ulysses_batch *,
                                      const ulysses_attention_args *,
                                      const ulysses_attention_grads *, ulysses_local_attention,
                                      void *);

ulysses_status ulysses_local_sizes(const ulysses_plan *, const ulysses_batch *, ulysses_sizes *);

SAME(offsetof(ulysses_attention_layer_args, struct_size) == 0);
SAME(_Generic(((ulysses_attention_layer_args *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, eps) == 4);
SAME(_Generic(((ulysses_attention_layer_args *)0)->eps, float: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, hidden) == 8);
SAME(_Generic(((ulysses_attention_layer_args *)0)->hidden, int64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, x) == 16);
SAME(_Generic(((ulysses_attention_layer_args *)0)->x, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, wq) == 24);
SAME(_Generic(((ulysses_attention_layer_args *)0)->wq, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, wk) == 32);
SAME(_Generic(((ulysses_attention_layer_args *)0)->wk, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, wv) == 40);
SAME(_Generic(((ulysses_attention_layer_args *)0)->wv, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, wo) == 48);
SAME(_Generic(((ulysses_attention_layer_args *)0)->wo, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, bq) == 56);
SAME(_Generic(((ulysses_attention_layer_args *)0)->bq, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, bk) == 64);
SAME(_Generic(((ulysses_attention_layer_args *)0)->bk, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, bv) == 72);
SAME(_Generic(((ulysses_attention_layer_args *)0)->bv, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, bo) == 80);
SAME(_Generic(((ulysses_attention_layer_args *)0)->bo, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, q_norm) == 88);
SAME(_Generic(((ulysses_attention_layer_args *)0)->q_norm, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, k_norm) == 96);
SAME(_Generic(((ulysses_attention_layer_args *)0)->k_norm, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, cos) == 104);
SAME(_Generic(((ulysses_attention_layer_args *)0)->cos, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, sin) == 112);
SAME(_Generic(((ulysses_attention_layer_args *)0)->sin, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, y) == 120);
SAME(_Generic(((ulysses_attention_layer_args *)0)->y, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, saved) == 128);
SAME(_Generic(((ulysses_attention_layer_args *)0)->saved, void *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, saved_bytes) == 136);
SAME(_Generic(((ulysses_attention_layer_args *)0)->saved_bytes, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, workspace) == 144);
SAME(_Generic(((ulysses_attention_layer_args *)0)->workspace, void *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, workspace_bytes) == 152);
SAME(_Generic(((ulysses_attention_layer_args *)0)->workspace_bytes, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_args, stream) == 160);
SAME(_Generic(((ulysses_attention_layer_args *)0)->stream, void *: 1, default: 0));
SAME(sizeof(ulysses_attention_layer_args) >= 168);

SAME(offsetof(ulysses_attention_layer_grads, struct_size) == 0);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, reserved) == 4);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dy) == 8);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dy, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dx) == 16);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dx, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dwq) == 24);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dwq, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dwk) == 32);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dwk, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dwv) == 40);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dwv, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dwo) == 48);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dwo, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dbq) == 56);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dbq, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dbk) == 64);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dbk, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dbv) == 72);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dbv, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dbo) == 80);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dbo, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dq_norm) == 88);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dq_norm, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_attention_layer_grads, dk_norm) == 96);
SAME(_Generic(((ulysses_attention_layer_grads *)0)->dk_norm, ulysses_tensor *: 1, default: 0));
SAME(sizeof(ulysses_attention_layer_grads) >= 104);

ulysses_status ulysses_attention_layer_sizes(const ulysses_plan *, const ulysses_batch *,
                                             const ulysses_attention_layer_args *, ulysses_sizes *);

ulysses_status ulysses_attention_layer_forward(ulysses_plan *, const ulysses_batch *,
                                               const ulysses_attention_layer_args *);

ulysses_status ulysses_attention_layer_backward(ulysses_plan *, const ulysses_batch *,
                                                const ulysses_attention_layer_args *,
                                                const ulysses_attention_layer_grads *);

SAME(offsetof(ulysses_gdn_args, struct_size) == 0);
SAME(_Generic(((ulysses_gdn_args *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, reserved) == 4);
SAME(_Generic(((ulysses_gdn_args *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, q) == 8);
SAME(_Generic(((ulysses_gdn_args *)0)->q, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, k) == 16);
SAME(_Generic(((ulysses_gdn_args *)0)->k, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, v) == 24);
SAME(_Generic(((ulysses_gdn_args *)0)->v, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, g) == 32);
SAME(_Generic(((ulysses_gdn_args *)0)->g, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, beta) == 40);
SAME(_Generic(((ulysses_gdn_args *)0)->beta, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, state_in) == 48);
SAME(_Generic(((ulysses_gdn_args *)0)->state_in, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, out) == 56);
SAME(_Generic(((ulysses_gdn_args *)0)->out, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, state_out) == 64);
SAME(_Generic(((ulysses_gdn_args *)0)->state_out, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, saved) == 72);
SAME(_Generic(((ulysses_gdn_args *)0)->saved, void *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, saved_bytes) == 80);
SAME(_Generic(((ulysses_gdn_args *)0)->saved_bytes, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, workspace) == 88);
SAME(_Generic(((ulysses_gdn_args *)0)->workspace, void *: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, workspace_bytes) == 96);
SAME(_Generic(((ulysses_gdn_args *)0)->workspace_bytes, uint64_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_args, stream) == 104);
SAME(_Generic(((ulysses_gdn_args *)0)->stream, void *: 1, default: 0));
SAME(sizeof(ulysses_gdn_args) >= 112);

SAME(offsetof(ulysses_gdn_grads, struct_size) == 0);
SAME(_Generic(((ulysses_gdn_grads *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_grads, reserved) == 4);
SAME(_Generic(((ulysses_gdn_grads *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_gdn_grads, dout) == 8);
SAME(_Generic(((ulysses_gdn_grads *)0)->dout, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_grads, dstate_out) == 16);
SAME(_Generic(((ulysses_gdn_grads *)0)->dstate_out, const ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_grads, dq) == 24);
SAME(_Generic(((ulysses_gdn_grads *)0)->dq, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_grads, dk) == 32);
SAME(_Generic(((ulysses_gdn_grads *)0)->dk, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_grads, dv) == 40);
SAME(_Generic(((ulysses_gdn_grads *)0)->dv, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_grads, dg) == 48);
SAME(_Generic(((ulysses_gdn_grads *)0)->dg, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_grads, dbeta) == 56);
SAME(_Generic(((ulysses_gdn_grads *)0)->dbeta, ulysses_tensor *: 1, default: 0));
SAME(offsetof(ulysses_gdn_grads, dstate_in) == 64);
SAME(_Generic(((ulysses_gdn_grads *)0)->dstate_in, ulysses_tensor *: 1, default: 0));
SAME(sizeof(ulysses_gdn_grads) >= 72);

ulysses_status ulysses_gdn_forward(ulysses_plan *, const ulysses_batch *, const ulysses_gdn_args *);

ulysses_status ulysses_gdn_backward(ulysses_plan *, const ulysses_batch *, const ulysses_gdn_args *,
                                    const ulysses_gdn_grads *);

SAME(offsetof(ulysses_tile, struct_size) == 0);
SAME(_Generic(((ulysses_tile *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_tile, reserved) == 4);
SAME(_Generic(((ulysses_tile *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_tile, index) == 8);
SAME(_Generic(((ulysses_tile *)0)->index, int64_t: 1, default: 0));
SAME(offsetof(ulysses_tile, count) == 16);
SAME(_Generic(((ulysses_tile *)0)->count, int64_t: 1, default: 0));
SAME(offsetof(ulysses_tile, lo) == 24);
SAME(_Generic(((ulysses_tile *)0)->lo, int64_t: 1, default: 0));
SAME(offsetof(ulysses_tile, hi) == 32);
SAME(_Generic(((ulysses_tile *)0)->hi, int64_t: 1, default: 0));
SAME(offsetof(ulysses_tile, stream) == 40);
SAME(_Generic(((ulysses_tile *)0)->stream, void *: 1, default: 0));
SAME(sizeof(ulysses_tile) >= 48);

SAME(_Generic((ulysses_tile_forward)0,
         ulysses_status (*)(void *, const ulysses_tile *, const ulysses_tensor *const *,
                            ulysses_tensor *const *): 1,
         default: 0));

SAME(_Generic((ulysses_tile_backward)0,
         ulysses_status (*)(void *, const ulysses_tile *, const ulysses_tensor *const *,
                            const ulysses_tensor *const *, ulysses_tensor *const *): 1,
         default: 0));

SAME(offsetof(ulysses_tiled_args, struct_size) == 0);
SAME(_Generic(((ulysses_tiled_args *)0)->struct_size, uint32_t: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, n_in) == 4);
SAME(_Generic(((ulysses_tiled_args *)0)->n_in, int32_t: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, n_out) == 8);
SAME(_Generic(((ulysses_tiled_args *)0)->n_out, int32_t: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, reserved) == 12);
SAME(_Generic(((ulysses_tiled_args *)0)->reserved, int32_t: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, in_dim) == 16);
SAME(_Generic(((ulysses_tiled_args *)0)->in_dim, const int32_t *: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, out_dim) == 24);
SAME(_Generic(((ulysses_tiled_args *)0)->out_dim, const int32_t *: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, tile_rows) == 32);
SAME(_Generic(((ulysses_tiled_args *)0)->tile_rows, int64_t: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, max_rows) == 40);
SAME(_Generic(((ulysses_tiled_args *)0)->max_rows, int64_t: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, in) == 48);
SAME(_Generic(((ulysses_tiled_args *)0)->in, const ulysses_tensor *const *: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, out) == 56);
SAME(_Generic(((ulysses_tiled_args *)0)->out, ulysses_tensor *const *: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, dout) == 64);
SAME(_Generic(((ulysses_tiled_args *)0)->dout, const ulysses_tensor *const *: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, din) == 72);
SAME(_Generic(((ulysses_tiled_args *)0)->din, ulysses_tensor *const *: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, forward) == 80);
SAME(_Generic(((ulysses_tiled_args *)0)->forward, ulysses_tile_forward: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, backward) == 88);
SAME(_Generic(((ulysses_tiled_args *)0)->backward, ulysses_tile_backward: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, user) == 96);
SAME(_Generic(((ulysses_tiled_args *)0)->user, void *: 1, default: 0));
SAME(offsetof(ulysses_tiled_args, stream) == 104);
SAME(_Generic(((ulysses_tiled_args *)0)->stream, void *: 1, default: 0));
SAME(sizeof(ulysses_tiled_args) >= 112);

ulysses_status tiled_compute(const ulysses_tiled_args *);

ulysses_status tiled_compute_backward(const ulysses_tiled_args *);
