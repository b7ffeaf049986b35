/* ulysses.h - attention, gated delta rule and tiled compute over sequences that are cut across ranks. C11, C++17; no other header needed.
 *
 * Four steps:  context (the ranks) -> plan (one kind of layer, made once, serves every layer of that kind)
 *              -> batch (lengths and documents, made once per batch, serves every plan) -> calls.
 * Contract, said once; a function's own comment may only tighten it.
 * errors     Every call returns a status. Unless it is OK, outputs are undefined, and ulysses_last_error() is this thread's text until the thread's next
 *            call. The library never prints, exits or aborts. All ranks refuse a [C] call alike: see [C]. A failure of the device, of the
 *            communicator or of a callback can occur on one rank only: that rank calls ulysses_context_abort, or its peers wait until `timeout`.
 *            An option is honoured, or refused when planning or making the batch, on all ranks alike.
 * memory     The caller owns tensors and `saved`, and `workspace` where it gives one. Outputs overlap nothing. No pointer is kept past the call or,
 *            for [A], past the point `stream` has then reached: inner streams join it, so a stream-ordered allocator needs to know nothing more.
 *            [A] calls allocate nothing, compile nothing and never wait for the device: making plans and batches does all of that. Three exceptions:
 *            COMM_HOST among several ranks waits for what it sends to have left the GPU, and makes pinned memory for reshards and halos larger
 *            than any before; COMM_IPC makes memory for the first requests that are under way at once; a NULL workspace can be made larger (next line).
 * workspace  NULL is always allowed: the call then works in the context's own memory. Plans and batches reserve that memory for attention and the gated
 *            delta rule. A layer, a reshard, a halo or a caller's own attention that needs more than any call before makes it larger in the call,
 *            which allocates once. With ULYSSES_OWN_WORKSPACES the context reserves nothing, and NULL is refused where the bytes are not 0.
 * gradients  are written, not added, unless said. Where a tensor is whole on every rank (sinks), its gradient is this rank's share: the sum over the ranks is
 *            the gradient, as it is for the weights around the call. States are whole with their gradients: those are complete, and the same, on every rank.
 * [C]        Collective: every rank of the context calls it, in one order. Before anything is sent or written the ranks agree: if one rank finds a fault in
 *            its arguments, or if the ranks call different functions or bring arguments that must be equal and are not, then every rank returns the
 *            same status, the text names the rank, and the context serves the next call. The agreement is one small message over the host's
 *            communicator (2.6 us over MPI between two processes of a machine). Two faults are reported on their rank only: a context that is
 *            already in a call, and handles that name nothing if the process has several contexts of more than one rank.
 *            ULYSSES_NO_AGREEMENT skips the agreement in calls (not when plans and batches are made): if one rank then refuses a call,
 *            its peers wait.
 * [A]        Asynchronous on CUDA: enqueues in the order of `stream` (cudaStream_t of the context's GPU; NULL = the legacy default stream, as PyTorch's 0)
 *            and returns; the calling thread's current GPU stays what it was. CPU: done.
 * threads    A context with its plans and batches serves one thread at a time, any thread; at MPI_THREAD_FUNNELED the main thread alone makes [C] calls.
 *            On CUDA, where autograd engines call from threads of their own, start MPI with MPI_THREAD_SERIALIZED or more, or set
 *            ULYSSES_NO_AGREEMENT. Callbacks run on the calling thread, inside the call; they must not throw, longjmp or re-enter the same context.
 * handles    Contexts, plans, batches and requests are numbers in a pointer's clothes: never dereferenced. One that was destroyed, or that belongs to
 *            another context, is INVALID_ARGUMENT. Destroying a context destroys what was made on it.
 * not built  What is declared and not built answers UNSUPPORTED and says so by name: ring > 1, ZIGZAG, SINKS, ALIBI, BLOCK_MASK, SAVE_LESS, softcap,
 *            dropout, nccl_comm, timeout.
 * signals    During a call its thread blocks signals that can have a handler; they arrive when the call returns, or while it waits in MPI or runs a callback.
 *            SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGTSTP are not blocked while their action is the default. Threads of the library take no signals of the
 *            host but SIGCHLD and SIGPROF, which Go's runtime unblocks: a handler of these two needs SA_ONSTACK, and less than 16 KB of stack. SIGURG
 *            belongs to the runtime. A thread without an alternate signal stack gets one of 512 KiB at its first call. Memory that cannot be read ends
 *            the process with SIGSEGV, or in the host's handler of it; where the library's Go code reads it (descriptors), the call returns INTERNAL.
 * process    A Go runtime is loaded: no dlclose(); a forked child may live on but must not call in.
 * ABI        Structs open with struct_size, have no holes and grow only at the tail; zero means default; a tail this library does not know must be
 *            zero. Only pointers to structs are ever in arrays. Enumerations travel as int32_t. The SONAME carries the major version. */
#ifndef ULYSSES_H
#define ULYSSES_H
#include <stdint.h>
#include <string.h>
#ifdef __cplusplus
extern "C" {
#endif
#define ULYSSES_VERSION 100u                                     /* of this header: major*10000 + minor*100 + patch; SONAME libulysses.so.<major> */
#define ULYSSES_INIT(p) (memset((p), 0, sizeof *(p)), (void)((p)->struct_size = (uint32_t)sizeof *(p)))
typedef int32_t ulysses_status;                                  /* the program's exit codes too */
enum { ULYSSES_OK = 0, ULYSSES_INVALID_ARGUMENT = 1, ULYSSES_INVALID_CONFIG = 2, ULYSSES_UNSUPPORTED = 3, ULYSSES_OUT_OF_MEMORY = 4,
       ULYSSES_COMM = 5, ULYSSES_DEVICE = 6, ULYSSES_IO = 7, ULYSSES_NUMERIC = 8, ULYSSES_INTERNAL = 10, ULYSSES_PREEMPTED = 75 };
enum { ULYSSES_F32 = 0x2002, ULYSSES_BF16 = 0x1004, ULYSSES_F16 = 0x1002, ULYSSES_I32 = 0x2000, ULYSSES_I64 = 0x4000,
       ULYSSES_U8 = 0x0801 };                                    /* dtype: DLPack's code | bits << 8 */
enum { ULYSSES_CPU = 1, ULYSSES_CUDA = 2 };                      /* device: DLPack's */
enum { ULYSSES_COMM_AUTO = 0, ULYSSES_COMM_HOST = 1 /* staged through host memory */, ULYSSES_COMM_NCCL = 2, ULYSSES_COMM_IPC = 3 };
uint32_t    ulysses_version(void);                               /* of the library; if its major is unlike the header's, stop */
const char *ulysses_build_info(void);                            /* JSON: version, `built` (devices that there is code for), `devices` (those
                                                                            of them that can be used here), `unusable` (why not the others), the CUDA plug-in's and
                                                                            MPI's files, what is not built. Opens no driver */
const char *ulysses_status_string(ulysses_status);
const char *ulysses_last_error(void);                            /* operation, values, remedy, rank */

/* Tensor: byte for byte DLPack's DLTensor, so `&managed->dl_tensor` of any array library is one. Strides in elements, NULL = row-major; a stride
 * of 0 over an extent above 1 is refused (sum().backward() hands out such gradients: copy them first). A tensor with an extent of 0 may have any
 * strides. Axes are in the order [B, S, H, D] below,
 * layouts S,B,H,D and B,H,S,D being a matter of strides; ndim 3 means B = 1. Floating tensors have the plan's dtype unless said otherwise. */
typedef struct { void *data; int32_t device, ordinal, ndim; uint8_t code, bits; uint16_t lanes; int64_t *shape, *strides;
                 uint64_t byte_offset; } ulysses_tensor;
static inline ulysses_tensor ulysses_tensor_of(void *data, int32_t device, int32_t ordinal, int32_t dtype, int32_t ndim, int64_t *shape,
                                               int64_t *strides)
{   ulysses_tensor t;
    t.data = data; t.device = device; t.ordinal = ordinal; t.ndim = ndim; t.code = (uint8_t)(dtype & 255); t.bits = (uint8_t)(dtype >> 8);
    t.lanes = 1; t.shape = shape; t.strides = strides; t.byte_offset = 0;
    return t; }

/* Context: one rank of one sequence-parallel group, that is, of one data-parallel replica, on one device. rank = ring_index*ulysses +
 * ulysses_index, so Ulysses neighbours are consecutive; order your communicator for another mesh. Other replicas have contexts of their own. */
typedef struct ulysses_context ulysses_context;
typedef struct { uint32_t struct_size; int32_t device, ordinal, threads;  /* device 0 = the CPU; ordinal: the GPU, from 0, of those that
                                            the process sees; threads: the CPU's, 0 = the cores of the calling thread's mask, shared out over
                                            the ranks that the launcher has put on the node */
                 int32_t ulysses, ring, comm, timeout;                   /* ulysses 0 = size/ring, ring 0 = 1; timeout 0 = wait as the host's communicator does */
                 void (*log)(void *user, int32_t level, const char *json_line); void *log_user;     /* NULL = silent */
                 void *nccl_comm;                                         /* the host's ncclComm_t of the same ranks, to be shared; NULL = make one */
                 int32_t flags, reserved; } ulysses_options;              /* flags: ULYSSES_OWN_WORKSPACES, ULYSSES_NO_AGREEMENT */
enum { ULYSSES_OWN_WORKSPACES = 1,    /* every call brings its workspace: the context reserves none, and a NULL workspace is refused on all ranks */
       ULYSSES_NO_AGREEMENT = 2 };    /* calls are not agreed on: see [C] */
/* A launcher of your own (torch.distributed, another MPI's mpi4py, UCX): bytes in host memory, blocks dense in rank order, non-zero = failure.
 * allgather carries agreement, NCCL ids and IPC handles; alltoallv carries tensors on the CPU or staged, and may be NULL over NCCL or IPC. */
typedef struct { uint32_t struct_size; int32_t rank, size, reserved; void *user;
                 int32_t (*allgather)(void *user, const void *in, void *out, int64_t bytes);
                 int32_t (*alltoallv)(void *user, const void *in, const int64_t *in_bytes, void *out, const int64_t *out_bytes); } ulysses_host_comm;
ulysses_status ulysses_context_create_local(const ulysses_options *, ulysses_context **out);                           /* size 1 */
ulysses_status ulysses_context_create_mpi(int64_t fcomm, const ulysses_options *, ulysses_context **out);  /* [C] MPI_Comm_c2f(), comm.py2f();
                       duplicated. -1 = MPI_COMM_WORLD, and then MPI is initialised and finalised here if the host has not done so */
ulysses_status ulysses_context_create_host(const ulysses_host_comm *, const ulysses_options *, ulysses_context **out); /* [C] */
typedef struct { uint32_t struct_size; int32_t rank, size, ulysses, ring, device, ordinal, comm; } ulysses_context_info;
ulysses_status ulysses_context_query(const ulysses_context *, ulysses_context_info *out);
ulysses_status ulysses_context_async_error(ulysses_context *);           /* poll: what went wrong after an [A] call returned OK; sticky */
void           ulysses_context_abort(ulysses_context *, ulysses_status why); /* one rank: peers' calls fail where the communicator can tell them; over MPI
                                                                            this ends the job, code `why`; over host callbacks it is the host's to do */
void           ulysses_context_destroy(ulysses_context *);               /* [C]; NULL allowed; after its plans and batches. May be left to process end */

/* Plans [C]. No state per call: forward and backward of many layers and batches may interleave. A zero kv_heads = heads, v_dim = head_dim,
 * scale = 1/sqrt(head_dim). max_tokens = largest batch*seq to reserve for (keys counted apart); 0 = grow while making batches. */
enum { ULYSSES_CAUSAL = 1,            /* aligned bottom-right in each document: the last query sees the last key */
       ULYSSES_WINDOW = 2,            /* with j the key aligned to query i: keys j-window_left .. j+window_right, -1 = unbounded (FlashAttention's).
                                         Both fields 0 (the query's own key alone) is refused: fields that were not set look like that */
       ULYSSES_CROSS = 4,             /* keys have the batch's kv lengths */
       ULYSSES_SINKS = 8, ULYSSES_ALIBI = 16, ULYSSES_BLOCK_MASK = 32,   /* calls will bring these tensors */
       ULYSSES_QK_L2NORM = 64,        /* gdn: q and k become x*rsqrt(sum of squares + 1e-6) */
       ULYSSES_DETERMINISTIC = 128,   /* bitwise repeatable. CPU: always, and gdn everywhere. CUDA: attention's backward on kernels of ours, or refused here */
       ULYSSES_SAVE_LESS = 256,       /* smaller `saved`: backward reads q, k, v, out again and repeats their exchange */
       ULYSSES_NO_BACKWARD = 512,
       ULYSSES_STATES = 1024 };       /* gdn: calls may bring states; sizes count the memory for that */
typedef struct ulysses_plan ulysses_plan;
typedef struct { uint32_t struct_size; int32_t dtype, flags, block_q, block_k; float scale, softcap, dropout;
                 int64_t heads, kv_heads, head_dim, v_dim, window_left, window_right, max_tokens; } ulysses_attention_desc;
/* Gated delta rule: flags QK_L2NORM, STATES, DETERMINISTIC, NO_BACKWARD; v_heads a multiple of qk_heads. AUTO takes what sends fewer bytes for max_tokens,
 * HEADS where that is 0. ulysses_plan_json says which, why, and the bytes. A plan with HEADS serves the reshards too: v, g, beta by heads, q, k shared. */
enum { ULYSSES_GDN_AUTO = 0, ULYSSES_GDN_HEADS = 1 /* all-to-all */, ULYSSES_GDN_STATE = 2 /* hand the state from rank to rank */ };
typedef struct { uint32_t struct_size; int32_t dtype, flags, strategy, chunk; float scale;  /* chunk 0 = the device's choice; scale 0 = 1/sqrt(qk_dim) */
                 int64_t qk_heads, v_heads, qk_dim, v_dim, max_tokens; } ulysses_gdn_desc;
ulysses_status ulysses_attention_plan(ulysses_context *, const ulysses_attention_desc *, ulysses_plan **out);
ulysses_status ulysses_gdn_plan(ulysses_context *, const ulysses_gdn_desc *, ulysses_plan **out);
const char    *ulysses_plan_json(const ulysses_plan *);                  /* strategy, head split, kernels, bytes sent per token, why; on CUDA "attention": the
                                                                            rows of kernels forward and backward, as far as documents leave them; lives with it */
void           ulysses_plan_destroy(ulysses_plan *);                     /* local; at any time between calls, also with work still enqueued */

/* Batches [C]: cheap (host only, one small message; a new size class may build kernels once), after the plans they are to serve, alive until the
 * last backward. Rows: seq > 0 cuts evenly, the first seq mod size ranks holding one row more; seq = 0 takes each rank's own `rows` (0 allowed)
 * and adds them up (no ZIGZAG). Documents: cu_seqlens [docs+1] over batch*seq, the same on all ranks, every row's end among them; or positions [batch, rows]
 * of this rank (NULL where it has no rows), which count 0, 1, 2, ... in each document: other values are refused; or neither: one per row. Padding is a document of its own. All in host memory, copied. */
enum { ULYSSES_ZIGZAG = 1 };          /* of 2*ring chunks of a row ring group r holds r and 2*ring-1-r, its Ulysses ranks equal pieces of the two */
typedef struct ulysses_batch ulysses_batch;
typedef struct { uint32_t struct_size; int32_t flags; int64_t batch, seq, rows, kv_seq, kv_rows, docs;   /* kv_*: for ULYSSES_CROSS plans, as many docs */
                 const int64_t *cu_seqlens, *kv_cu_seqlens, *positions; } ulysses_batch_desc;
typedef struct { uint32_t struct_size; int32_t ranges; int64_t seq, rows, lo[2], hi[2];      /* this rank's rows: [lo,hi) of each range in turn */
                 int64_t max_rows, gathered_rows, kv_seq, kv_rows, kv_gathered_rows, docs; } ulysses_batch_info; /* max over the ranks; of its Ulysses group */
ulysses_status ulysses_batch_create(ulysses_context *, const ulysses_batch_desc *, ulysses_batch **out);
ulysses_status ulysses_batch_query(const ulysses_batch *, ulysses_batch_info *out);
ulysses_status ulysses_batch_positions(const ulysses_batch *, int64_t *out);                 /* [batch, rows] inside the document, for RoPE */
void           ulysses_batch_destroy(ulysses_batch *);                                       /* local; as ulysses_plan_destroy */

/* Bytes every call of the pair brings, and the heads this rank computes: `heads` = attention's q, out, gdn's v, g, beta, out; `shared` = attention's
 * k, v, gdn's q, k. batch NULL = for max_tokens: enough for one sequence of so many or fewer that is cut evenly, whatever its documents, and for states of
 * one; several sequences, own `rows` and more states can need more. Alignment: 256 bytes on CUDA, 64 on the CPU. `saved` is plain bytes, free to be moved and
 * offloaded. On the CPU it begins with a tag of 64 bytes, which the sizes count: backward refuses memory that no forward call wrote, or one with another
 * plan, batch or layer. On a GPU, where reading a tag would wait for it, backward refuses plans and batches that no forward call has saved for. */
typedef struct { uint32_t struct_size; int32_t reserved; uint64_t saved, workspace; int64_t head_lo, head_hi, shared_lo, shared_hi; } ulysses_sizes;
ulysses_status ulysses_plan_sizes(const ulysses_plan *, const ulysses_batch *, ulysses_sizes *out);

/* Calls, [C][A] each. workspace NULL = the context's own: see `workspace` above; peers may write it directly. 0 bytes may be NULL. Calls of one context
 * follow one another on the GPU, whatever their streams.
 * COMM_IPC between processes exchanges in the context's own memory alone (a workspace that is given may be freed while peers still have it mapped), which the
 * queries of sizes and workspace make large enough: ask before the first call, also where you know the answer.
 * Reshard: n tensors [B, rows, H, D] <-> [B, seq, this rank's h, D] in one exchange, the last axis dense; inverse, and each other's backward. Row
 * counts need not divide: no padding exists. Shared heads may have copies on several ranks: back to rows, sum_copies 0 takes one (inverse), 1 adds them
 * (backward of seq_to_heads). Types: any of the enumeration, one for all n; sum_copies needs one that the device computes in. n <= 16. */
typedef struct { uint32_t struct_size; int32_t n, sum_copies, reserved; const int32_t *shared;   /* [n] 1 = shared heads; NULL = none */
                 const ulysses_tensor *const *in; ulysses_tensor *const *out; void *workspace; uint64_t workspace_bytes; void *stream; } ulysses_reshard_args;
ulysses_status ulysses_seq_to_heads(ulysses_plan *, const ulysses_batch *, const ulysses_reshard_args *);
ulysses_status ulysses_heads_to_seq(ulysses_plan *, const ulysses_batch *, const ulysses_reshard_args *);
ulysses_status ulysses_reshard_workspace(ulysses_plan *, const ulysses_batch *, const ulysses_reshard_args *, int32_t to_heads, uint64_t *bytes); /* local; shapes count, no data */
/* Asynchronous form: start packs and sends, wait receives and unpacks. `in` may be changed after wait alone. workspace is the request's until then;
 * NULL = memory of the request's own, which the context keeps for later requests. At most 16 requests of a context are under way; wait in the order of
 * starting, on every rank alike. wait destroys the request, whatever it returns. On one rank, start does it all. */
typedef struct ulysses_request ulysses_request;
ulysses_status ulysses_seq_to_heads_start(ulysses_plan *, const ulysses_batch *, const ulysses_reshard_args *, ulysses_request **out);
ulysses_status ulysses_heads_to_seq_start(ulysses_plan *, const ulysses_batch *, const ulysses_reshard_args *, ulysses_request **out);
ulysses_status ulysses_request_wait(ulysses_request *);

/* Halo: the n rows before this rank's (n > 0) or the -n rows after (n < 0) in each of the batch's sequences, zero where they belong to another
 * document than this rank's nearest row, or to none. x [B, rows, ...], halo [B, |n|, ...], dense. For convolutions and token shifts. A causal
 * convolution over [halo, x] must skip the row j before a token unless the token's position (ulysses_batch_positions) is j or more: otherwise documents
 * that start inside a rank's rows read rows of the document before. n may exceed a neighbour's rows. forward reads x and writes halo. backward reads
 * halo (the gradient of it) and adds to x (the gradient of x) where the rows
 * came from, lower ranks first. F32 or the context's other types of activations. workspace: NULL, or bytes by query. [C][A] */
typedef struct { uint32_t struct_size; int32_t reserved; int64_t n; ulysses_tensor *x, *halo; void *workspace; uint64_t workspace_bytes; void *stream; } ulysses_halo_args;
ulysses_status ulysses_halo_forward(ulysses_context *, const ulysses_batch *, const ulysses_halo_args *);
ulysses_status ulysses_halo_backward(ulysses_context *, const ulysses_batch *, const ulysses_halo_args *);
ulysses_status ulysses_halo_workspace(ulysses_context *, const ulysses_batch *, const ulysses_halo_args *, uint64_t *bytes);   /* local */

/* Loss of a sequence group. Sums travel, means do not: sum and count are this rank's sum of losses over its valid tokens and their number; they become
 * the group's, added in rank order, the same bits on every rank; *mean (NULL = not wanted) = sum/count, 0 where count is 0. Backward needs no message:
 * the gradient of `mean` by this rank's `sum` is 1/count (of the group), 0 where that is 0. Multiply it by the number of ranks where the weights'
 * gradients are then averaged over the group instead of summed. [C] */
ulysses_status ulysses_loss_reduce(ulysses_context *, double *sum, int64_t *count, double *mean);

/* Attention: q, out [B, rows, H, D], k, v [B, rows, Hkv, D]. sinks, alibi [H] f32 or dtype; block_mask u8 [H or 1, ceil(seq/block_q), ceil(kv_seq/block_k)];
 * these are whole on every rank, on the device. lse f32 [B, rows, H], natural logarithm, NULL = not wanted (its bytes travel). A row with no key has
 * out 0, lse -inf. saved NULL = no backward. Backward takes the same args; without SAVE_LESS q, k, v, out may be NULL by then. */
typedef struct { uint32_t struct_size; int32_t reserved; const ulysses_tensor *q, *k, *v, *sinks, *alibi, *block_mask; ulysses_tensor *out, *lse;
                 uint64_t dropout_seed;                                  /* same mask for any number of ranks */
                 void *saved; uint64_t saved_bytes; void *workspace; uint64_t workspace_bytes; void *stream; } ulysses_attention_args;
typedef struct { uint32_t struct_size; int32_t reserved; const ulysses_tensor *dout; ulysses_tensor *dq, *dk, *dv, *dsinks; } ulysses_attention_grads;
ulysses_status ulysses_attention_forward(ulysses_plan *, const ulysses_batch *, const ulysses_attention_args *);
ulysses_status ulysses_attention_backward(ulysses_plan *, const ulysses_batch *, const ulysses_attention_args *, const ulysses_attention_grads *);

/* A caller's own attention between the two exchanges. Plan and batch say who holds what; `local` gets all rows of this rank's heads, q, out [B, seq, h, D],
 * k, v [B, kv_seq, hkv, D] (dense, or as the device likes them: read the strides; hkv are the key heads under the h, as ulysses_plan_sizes says), and writes
 * out. A rank without heads is not called. Backward gets them again beside dout and writes dq, dk, dv. Masks, documents and scale are the callback's
 * business. Not OK is passed on by this rank after the exchanges have been made, so that its peers need not wait. saved: sizes of
 * ulysses_local_sizes, NULL in forward = no backward; here saved holds q, k, v and out. [C][A], but for what the callback does. */
typedef struct { uint32_t struct_size; int32_t backward; int64_t head_lo, head_hi, kv_head_lo, kv_head_hi; const ulysses_tensor *q, *k, *v, *out, *dout;
                 const ulysses_tensor *dq, *dk, *dv; void *stream; } ulysses_local_call;
typedef ulysses_status (*ulysses_local_attention)(void *user, const ulysses_local_call *);
ulysses_status ulysses_local_forward(ulysses_plan *, const ulysses_batch *, const ulysses_attention_args *, ulysses_local_attention local, void *user);
ulysses_status ulysses_local_backward(ulysses_plan *, const ulysses_batch *, const ulysses_attention_args *, const ulysses_attention_grads *,
                                      ulysses_local_attention local, void *user);
ulysses_status ulysses_local_sizes(const ulysses_plan *, const ulysses_batch *, ulysses_sizes *out);

/* The whole attention layer: y = attention(rope(norm(x.Wq^T + bq)), rope(norm(x.Wk^T + bk)), x.Wv^T + bv).Wo^T + bo.
 * x, y [B, rows, hidden], dense; wq [H*D, hidden], wk [Hkv*D, hidden], wv [Hkv*Dv, hidden], wo [hidden, H*Dv], dense, of the plan's dtype; biases
 * bq, bk, bv, bo [out], NULL = none; q_norm, k_norm [D] (RMS, eps), both or neither; cos, sin f32 [B*rows, rotary/2] of this rank's positions (shared
 * by all heads; halves paired i, i + rotary/2, as Hugging Face does), both or neither = no rotation. eps 0 = 1e-6. Backward takes the same args, x among
 * them; it writes dx and ADDS to the gradients of the weights, f32, NULL = not wanted: this rank's share, to be summed over ranks. saved NULL = no backward.
 * Sizes by ulysses_attention_layer_sizes, which looks at hidden, q_norm and cos alone. */
typedef struct { uint32_t struct_size; float eps; int64_t hidden; const ulysses_tensor *x, *wq, *wk, *wv, *wo, *bq, *bk, *bv, *bo, *q_norm, *k_norm, *cos, *sin;
                 ulysses_tensor *y; void *saved; uint64_t saved_bytes; void *workspace; uint64_t workspace_bytes; void *stream; } ulysses_attention_layer_args;
typedef struct { uint32_t struct_size; int32_t reserved; const ulysses_tensor *dy; ulysses_tensor *dx, *dwq, *dwk, *dwv, *dwo, *dbq, *dbk, *dbv, *dbo,
                 *dq_norm, *dk_norm; } ulysses_attention_layer_grads;
ulysses_status ulysses_attention_layer_sizes(const ulysses_plan *, const ulysses_batch *, const ulysses_attention_layer_args *, ulysses_sizes *out);
ulysses_status ulysses_attention_layer_forward(ulysses_plan *, const ulysses_batch *, const ulysses_attention_layer_args *);
ulysses_status ulysses_attention_layer_backward(ulysses_plan *, const ulysses_batch *, const ulysses_attention_layer_args *,
                                                const ulysses_attention_layer_grads *);

/* Gated delta rule (Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464), token after token of a document, per v head, S [Dk, Dv] being the state:
 * S = exp(g)*S; u = beta*(v - S^T k); S = S + k u^T; out = scale * S^T q.  q, k [B, rows, Hk, Dk], v, out [B, rows, Hv, Dv], last axis dense; g
 * (natural logarithm of the decay, <= 0, however low) and beta f32 [B, rows, Hv], any strides. The convolution before it takes its rows from ulysses_halo_forward, documents apart (see there).
 * States f32 [docs, Hv, Dk, Dv], dense, one for each of the batch's documents, whole on every rank, with ULYSSES_STATES: state_in NULL = zero,
 * state_out NULL = not wanted (their bytes travel). saved NULL = no backward, which takes the same args and reads saved and state_in alone; q, k, v, g,
 * beta, out may be NULL by then. dstate_out NULL = zero, and the same on every rank; dstate_in, whole on every rank, NULL = not wanted, only with state_in. */
typedef struct { uint32_t struct_size; int32_t reserved; const ulysses_tensor *q, *k, *v, *g, *beta, *state_in; ulysses_tensor *out, *state_out;
                 void *saved; uint64_t saved_bytes; void *workspace; uint64_t workspace_bytes; void *stream; } ulysses_gdn_args;
typedef struct { uint32_t struct_size; int32_t reserved; const ulysses_tensor *dout, *dstate_out;
                 ulysses_tensor *dq, *dk, *dv, *dg, *dbeta, *dstate_in; } ulysses_gdn_grads;
ulysses_status ulysses_gdn_forward(ulysses_plan *, const ulysses_batch *, const ulysses_gdn_args *);
ulysses_status ulysses_gdn_backward(ulysses_plan *, const ulysses_batch *, const ulysses_gdn_args *, const ulysses_gdn_grads *);

/* Tiled compute: walks n rows in count = max(1, ceil(max_rows / tile_rows)) tiles of ceil(n / count), the last ones shorter or empty, and calls back for
 * every tile, empty ones too, in order. max_rows from ulysses_batch_query makes count the same on all ranks, so callbacks may be collective.
 * Nothing is sent, allocated or written here. Tensors are cut along in_dim/out_dim (NULL = all 0); a dimension of -1 = passed whole, and then outputs
 * and gradients of it are added to by the callback and zeroed by nobody but you: losses and counts (one each, sums), weights. Views live for the
 * callback. A non-OK return stops the walk and is passed on. Backward recomputes what it needs; a NULL dout is zero, a NULL din not wanted; at
 * index == count-1 whole gradients are complete. A loss may do its backward in the forward walk, its input's gradient being one more output. */
typedef struct { uint32_t struct_size; int32_t reserved; int64_t index, count, lo, hi; void *stream; } ulysses_tile;
typedef ulysses_status (*ulysses_tile_forward)(void *user, const ulysses_tile *, const ulysses_tensor *const *in, ulysses_tensor *const *out);
typedef ulysses_status (*ulysses_tile_backward)(void *user, const ulysses_tile *, const ulysses_tensor *const *in,
                                                const ulysses_tensor *const *dout, ulysses_tensor *const *din);
typedef struct { uint32_t struct_size; int32_t n_in, n_out, reserved; const int32_t *in_dim, *out_dim; int64_t tile_rows, max_rows;  /* 0 = one tile, 0 = n */
                 const ulysses_tensor *const *in; ulysses_tensor *const *out; const ulysses_tensor *const *dout; ulysses_tensor *const *din;
                 ulysses_tile_forward forward; ulysses_tile_backward backward; void *user, *stream; } ulysses_tiled_args;
ulysses_status tiled_compute(const ulysses_tiled_args *);            /* unprefixed because users know it by this name; the only such pair */
ulysses_status tiled_compute_backward(const ulysses_tiled_args *);
#ifdef __cplusplus
}
#endif
#endif
