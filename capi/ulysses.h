/* ulysses.h: attention, the gated delta rule and tiled compute for sequence-parallel programs.
 *
 * Each sequence is sharded over the ranks of a group: a rank holds `rows` tokens of each sequence.
 * Before attention, an all-to-all re-shards Q, K and V from tokens to heads, so each rank computes
 * on the whole sequence for a subset of the heads. A second all-to-all restores token sharding
 * (Jacobs et al. 2023, arXiv:2309.14509).
 *
 * C11 and C++17. Link with -lulysses; no other header is needed. A program works in four steps:
 *
 *   1. a context    one rank of one group, on one device
 *   2. plans        one for each kind of layer; a plan serves all layers of its kind
 *   3. batches      one for each set of sequence lengths and documents; a batch serves all plans
 *   4. calls        forward and backward passes with a plan and a batch
 *
 * The following holds for every function. The comment of a function states only what is different
 * or additional.
 *
 * Errors. A function returns a status. If the status is not ULYSSES_OK, the contents of the
 *   outputs are undefined, and ulysses_last_error() returns the message until this thread's next
 *   call. The library never prints, exits or aborts, except as said under Process. An option is
 *   honoured, or it is refused on all ranks when the plan or the batch is made. A collective call
 *   refuses invalid arguments on all ranks. A failure of the device, of the communicator or of a
 *   callback can occur on one rank only: that rank must call ulysses_context_abort, otherwise its
 *   peers wait for `timeout`.
 *
 * Memory. The caller owns tensors, `saved` memory and the workspace that it passes. Outputs must
 *   not overlap each other or an input. The library keeps no pointer after a call, except the
 *   arguments of a request or a pass in progress. An asynchronous call uses its arguments until
 *   `stream` has reached the end of the call. The library's own
 *   streams join `stream`, so a stream-ordered allocator needs no further synchronization.
 *   Asynchronous calls allocate nothing, compile nothing and do not wait for the device, because
 *   making plans and batches does this. There are three exceptions. ULYSSES_COMM_HOST with several
 *   ranks waits until the data to send has left the GPU, and allocates pinned memory for a reshard
 *   or halo larger than all before, and for the first passes and requests that are in progress at
 *   the same time. ULYSSES_COMM_IPC allocates memory for the first such requests. A NULL workspace
 *   may grow, see the next paragraph.
 *
 * Workspace. `workspace` may always be NULL: the call then uses memory of the context. Plans and
 *   batches reserve this memory for attention and the gated delta rule. A layer, a reshard, a halo
 *   or a caller's own attention that needs more than all calls before allocates once, inside the
 *   call. A context with ULYSSES_OWN_WORKSPACES reserves nothing and refuses NULL if the call
 *   needs a workspace.
 *
 * Gradients. Gradients are written, not accumulated, unless a comment says so. If a tensor is
 *   whole on every rank (sinks, alibi), its gradient is this rank's share: the sum over the ranks
 *   is the gradient, as for the weights of the layers around the call. Recurrent states are whole.
 *   Their gradients are complete and equal on every rank.
 *
 * Collective. All ranks of the context must call a collective function, in the same order. Before
 *   data is sent or written, the ranks agree on the call with one small message over the host's
 *   communicator (2.6 us over MPI between two processes of one machine). If one rank finds an
 *   invalid argument, if the ranks call different functions, or if arguments that must be equal
 *   differ, then every rank returns the same status, the message names the rank, and the context
 *   accepts the next call. Four errors are reported on their rank only, because the rank cannot
 *   communicate: an fcomm that is no communicator, a call of a thread from which MPI accepts no
 *   calls, a context that is in another call, and invalid handles in a process that has several
 *   contexts of more than one rank. The peers of this rank wait. ULYSSES_NO_AGREEMENT turns the
 *   agreement off for calls, but not for making plans and batches. If one rank then refuses a
 *   call, its peers wait.
 *
 * Asynchronous. On CUDA, an asynchronous function enqueues its work in the order of `stream` (a
 *   cudaStream_t of the context's GPU; NULL is the legacy default stream, which is PyTorch's 0)
 *   and returns. The current GPU of the calling thread does not change. On the CPU, `stream` has no
 *   effect, and the work is complete when the function returns.
 *
 * Threads. A context, with its plans and batches, may be used by one thread at a time, and by any
 *   thread. With MPI_THREAD_FUNNELED, only the main thread may make collective calls. On CUDA,
 *   where autograd engines call from their own threads, initialize MPI with MPI_THREAD_SERIALIZED
 *   or higher, or set ULYSSES_NO_AGREEMENT. Callbacks run on the calling thread, during the call.
 *   They must not throw, call longjmp, or call functions on the same context.
 *
 * Handles. Contexts, plans, batches, requests and passes are opaque integer handles of pointer
 *   type; do not dereference them. A handle that was destroyed or belongs to another context is
 *   ULYSSES_INVALID_ARGUMENT. Destroying a context destroys all that was made with it.
 *
 * Not implemented. These are declared and return ULYSSES_UNSUPPORTED: SAVE_LESS, nccl_comm,
 *   timeout.
 *
 * Ring. With `ring` R above 1, the ranks of a context are R groups of `ulysses` ranks. During
 *   attention, each group has some rows of the sequence, and its ranks share the heads. Keys and
 *   values move between groups, straight to the groups whose queries see them (Liu et al. 2023,
 *   arXiv:2310.01889). "gathered" lengths are the lengths of a group; without a ring they are whole
 *   sequences. The gated delta rule uses all ranks of the context, whatever its ring is.
 *
 * Signals. During a call, its thread blocks the signals that can have a handler. They are
 *   delivered when the call returns, while it waits in MPI, or while it runs a callback. SIGINT,
 *   SIGTERM, SIGHUP, SIGQUIT and SIGTSTP are not blocked while their action is the default. The
 *   library's own threads handle no signal of the host except SIGCHLD and SIGPROF, which the Go
 *   runtime unblocks: a handler of these two must have SA_ONSTACK and use less than 16 KB of
 *   stack. SIGURG is reserved for the Go runtime. A thread without an alternate signal stack gets
 *   one of 512 KiB at its first call. An access to unreadable memory ends the process with
 *   SIGSEGV, or runs the host's handler. If the library's Go code reads the memory (descriptors),
 *   the call returns ULYSSES_INTERNAL.
 *
 * Process. The library contains a Go runtime: do not call dlclose(). A forked child may continue,
 *   but must not call the library. The runtime ends the process with a message if the system
 *   refuses it address space or a thread: with `ulimit -v`, allow it at least 2 GiB.
 *
 * Floating point. Calls round to nearest and trap no exception, whatever the mode (fenv.h) of the
 *   calling thread is. Callbacks run in the thread's mode, which is the same after a call, with its
 *   exception flags.
 *
 * ABI. Structs begin with struct_size, have no padding and grow only at the end. Zero means the
 *   default. If a struct is larger than this library knows, the additional bytes must be zero.
 *   Arrays hold pointers to structs, never structs. Enumerations are passed as int32_t. The SONAME
 *   holds the major version. */
#ifndef ULYSSES_H
#define ULYSSES_H
#include <stdint.h>
#include <string.h>
#ifdef __cplusplus
extern "C" {
#endif

/* Version of this header: major*10000 + minor*100 + patch. The SONAME is libulysses.so.<major>. */
#define ULYSSES_VERSION 100u

/* Sets *p to zeros and p->struct_size to its size. Call it on every struct before filling it. */
#define ULYSSES_INIT(p) (memset((p), 0, sizeof *(p)), (void)((p)->struct_size = sizeof *(p)))

/* Result of a call. The program ulysses-mpi exits with the same numbers. */
typedef int32_t ulysses_status;
enum {
  ULYSSES_OK = 0,
  ULYSSES_INVALID_ARGUMENT = 1, /* a shape, type, value or handle is wrong */
  ULYSSES_INVALID_CONFIG = 2,   /* a configuration or data is wrong */
  ULYSSES_UNSUPPORTED = 3,      /* valid, but not implemented here; the message names it */
  ULYSSES_OUT_OF_MEMORY = 4,
  ULYSSES_COMM = 5,      /* the communicator failed, or a peer is late or has failed */
  ULYSSES_DEVICE = 6,    /* the device or its driver failed */
  ULYSSES_IO = 7,        /* a file could not be read or written */
  ULYSSES_NUMERIC = 8,   /* NaN or Inf where a finite number is required */
  ULYSSES_INTERNAL = 10, /* a bug of the library, or descriptors in unreadable memory */
  ULYSSES_PREEMPTED = 75,
};

/* Element types: DLPack's type code | bits << 8. */
enum {
  ULYSSES_F32 = 0x2002,
  ULYSSES_BF16 = 0x1004,
  ULYSSES_F16 = 0x1002,
  ULYSSES_I32 = 0x2000,
  ULYSSES_I64 = 0x4000,
  ULYSSES_U8 = 0x0801,
};

/* Devices: DLPack's numbers. */
enum {
  ULYSSES_CPU = 1,
  ULYSSES_CUDA = 2,
};

/* Transports between GPUs. */
enum {
  ULYSSES_COMM_AUTO = 0,
  ULYSSES_COMM_HOST = 1, /* staged through host memory, over the host's communicator */
  ULYSSES_COMM_NCCL = 2,
  ULYSSES_COMM_IPC = 3, /* direct access to the memory of other processes of this machine */
};

/* Returns the version of the library. If its major version differs from ULYSSES_VERSION, do not
 * call any other function. */
uint32_t ulysses_version(void);

/* Returns a JSON object: "version"; "commit", the commit that the library was built from, or "";
 * "built", the devices that the library supports; "devices", the ones that are usable on this
 * machine; "unusable", the reason for each of the others; "cuda" and "mpi_files", the plug-in
 * files that were found; "mpi", the MPI library in use; "unbuilt", what is not implemented. It
 * does not open a driver. The string is valid until this thread's next call of this function. */
const char *ulysses_build_info(void);

/* Returns a few words for a status, as a constant string. */
const char *ulysses_status_string(ulysses_status);

/* Returns the message of this thread's last failed call: the function, the rank, what is wrong
 * with its values, and what to do. It is "" after a call that succeeded. */
const char *ulysses_last_error(void);

/* Tensor. It has the layout of DLPack's DLTensor, so `&managed->dl_tensor` of any array library is
 * a ulysses_tensor. Strides are in elements; NULL means row-major. A stride of 0 over an extent
 * above 1 is refused: sum().backward() makes such gradients, copy them first. The strides of a
 * tensor with an extent of 0 are not read. The axes are in the order [B, S, H, D]; memory layouts
 * such as S,B,H,D and B,H,S,D are expressed by strides. ndim 3 means B = 1. Floating-point tensors
 * have the dtype of the plan unless a comment says otherwise. */
typedef struct {
  void *data;
  int32_t device, ordinal, ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} ulysses_tensor;

/* Returns a tensor with these fields and byte_offset 0. */
static inline ulysses_tensor ulysses_tensor_of(void *data, int32_t device, int32_t ordinal,
                                               int32_t dtype, int32_t ndim, int64_t *shape,
                                               int64_t *strides) {
  ulysses_tensor t;
  t.data = data;
  t.device = device;
  t.ordinal = ordinal;
  t.ndim = ndim;
  t.code = (uint8_t)(dtype & 255);
  t.bits = (uint8_t)(dtype >> 8);
  t.lanes = 1;
  t.shape = shape;
  t.strides = strides;
  t.byte_offset = 0;
  return t;
}

/* Context: one rank of one sequence-parallel group, that is, of one data-parallel replica, on one
 * device. rank = ring_index*ulysses + ulysses_index, so the ranks of a Ulysses group are
 * consecutive. Reorder the ranks of your communicator for another mesh. Other replicas have their
 * own contexts. */
typedef struct ulysses_context ulysses_context;

/* Flags of a context. */
enum {
  ULYSSES_OWN_WORKSPACES = 1, /* a NULL workspace is refused on all ranks */
  ULYSSES_NO_AGREEMENT = 2,   /* calls are not agreed on; see Collective above */
};

/* Options of a context. All zeros are the defaults. */
typedef struct {
  uint32_t struct_size;
  int32_t device;  /* ULYSSES_CPU or ULYSSES_CUDA; 0 = ULYSSES_CPU */
  int32_t ordinal; /* the index of the GPU among the GPUs that the process sees, from 0 */
  /* CPU threads. 0 = the cores of the calling thread's affinity mask; cores that several ranks of
   * the node may use are divided among them. The ranks of a node together have at most the CPUs
   * that Slurm has given the job there, and that a container may use. */
  int32_t threads;
  int32_t ulysses, ring; /* ranks of a Ulysses group, 0 = size/ring; ranks of a ring, 0 = 1 */
  int32_t comm;          /* ULYSSES_COMM_... */
  int32_t timeout;       /* seconds; 0 = wait as long as the host's communicator does */
  void (*log)(void *user, int32_t level, const char *json_line); /* NULL = no log */
  void *log_user;
  void *nccl_comm; /* an ncclComm_t of the same ranks, to be shared; NULL = create one */
  int32_t flags;   /* ULYSSES_OWN_WORKSPACES, ULYSSES_NO_AGREEMENT */
  int32_t reserved;
} ulysses_options;

/* The collectives of a launcher that is not MPI (torch.distributed, another MPI's mpi4py, UCX).
 * Buffers are in host memory, with the blocks of the ranks contiguous and in rank order. A result
 * other than 0 means failure. allgather is used for agreement, NCCL ids and IPC handles. alltoallv
 * is used for tensors on the CPU and for ULYSSES_COMM_HOST; it may be NULL with NCCL or IPC. */
typedef struct {
  uint32_t struct_size;
  int32_t rank, size, reserved;
  void *user;
  int32_t (*allgather)(void *user, const void *in, void *out, int64_t bytes);
  int32_t (*alltoallv)(void *user, const void *in, const int64_t *in_bytes, void *out,
                       const int64_t *out_bytes);
} ulysses_host_comm;

/* Creates a context of one rank. options NULL = all defaults. */
ulysses_status ulysses_context_create_local(const ulysses_options *, ulysses_context **out);

/* Creates a context on a communicator of the host's MPI, which is duplicated. fcomm is the result
 * of MPI_Comm_c2f() or of mpi4py's comm.py2f(). -1 means MPI_COMM_WORLD; if the host has not
 * initialized MPI, the library then initializes and finalizes it. With -1, a world of one rank is
 * an error if the launcher has started several tasks. Collective. */
ulysses_status ulysses_context_create_mpi(int64_t fcomm, const ulysses_options *,
                                          ulysses_context **out);

/* Creates a context on the host's own collectives. Collective. */
ulysses_status ulysses_context_create_host(const ulysses_host_comm *, const ulysses_options *,
                                           ulysses_context **out);

/* A context's rank, its mesh, its device, and the transport (ULYSSES_COMM_...) of its tensors. */
typedef struct {
  uint32_t struct_size;
  int32_t rank, size, ulysses, ring, device, ordinal, comm;
} ulysses_context_info;

/* Writes the properties of a context. */
ulysses_status ulysses_context_query(const ulysses_context *, ulysses_context_info *out);

/* Returns the first error that occurred on the GPU after an asynchronous call had returned
 * ULYSSES_OK. The error is returned again by every later call. It does not wait for the GPU. */
ulysses_status ulysses_context_async_error(ulysses_context *);

/* Makes the later calls of this rank fail, and the calls of its peers if the communicator can
 * reach them. One rank calls it. Over MPI it ends the job with the exit code `why`; over host
 * callbacks the host must inform the peers. */
void ulysses_context_abort(ulysses_context *, ulysses_status why);

/* Destroys a context and all its plans, batches, requests and passes. It waits for the data that
 * requests and passes in progress send, unless the context was aborted. NULL is allowed. A context
 * may also be left until the process ends. On a thread on which MPI forbids calls (a thread level
 * below MPI_THREAD_SERIALIZED), it only sets ulysses_last_error(), and the context stays valid.
 * Collective. */
void ulysses_context_destroy(ulysses_context *);

/* Flags of a plan. gdn is the gated delta rule. */
enum {
  ULYSSES_CAUSAL = 1, /* aligned bottom-right in each document: the last query sees the last key */
  /* A query aligned to key j sees the keys j-window_left to j+window_right. -1 = unbounded, as in
   * FlashAttention. Both 0 is refused, because fields that were not set are 0; CAUSAL with 0 and -1
   * is the window of the own key. */
  ULYSSES_WINDOW = 2,
  ULYSSES_CROSS = 4,       /* cross-attention: keys have the kv lengths of the batch */
  ULYSSES_SINKS = 8,       /* calls need `sinks` */
  ULYSSES_ALIBI = 16,      /* calls need `alibi` */
  ULYSSES_BLOCK_MASK = 32, /* calls need `block_mask` */
  ULYSSES_QK_L2NORM = 64,  /* gdn: q and k become x*rsqrt(sum of squares + 1e-6) */
  /* Bitwise reproducible. The CPU and gdn always are. On CUDA, the backward pass of attention uses
   * this library's kernels, or the plan is refused. gdn with GDN_HEADS on CUDA is bitwise equal for
   * every number of ranks; without the flag, it is equal up to rounding. */
  ULYSSES_DETERMINISTIC = 128,
  ULYSSES_SAVE_LESS = 256, /* less `saved`: backward reads q, k, v, out, repeats their all-to-all */
  ULYSSES_NO_BACKWARD = 512,
  ULYSSES_STATES = 1024, /* gdn: calls may pass states, and the sizes include them */
  /* With a ring, keys move between groups in one all-to-all at the start, and not in a step for
   * each group while the step before computes. It needs memory for all keys that a rank sees. */
  ULYSSES_GATHER_KEYS = 2048,
  /* Calls of a whole layer send each of q, k and v while the next one is projected, and wait for
   * their gradients one by one, as in an overlapped pass. Results are bitwise equal. It hides
   * communication that proceeds without the calling thread. */
  ULYSSES_OVERLAP = 4096,
  ULYSSES_GATED_NORM = 8192, /* gdn: calls of a layer need `z` and `norm`; it needs conv_width */
};

/* Plan: one kind of layer on the ranks of a context. A plan holds no state of a call, so forward
 * and backward passes of several layers and batches may interleave. */
typedef struct ulysses_plan ulysses_plan;

/* Attention of a plan. The order of the options is: scale, softcap, alibi, masks, softmax with
 * sinks, dropout. max_tokens is the largest batch*seq to reserve memory for; keys count separately.
 * 0 = reserve when batches are made. */
typedef struct {
  uint32_t struct_size;
  int32_t dtype, flags;
  int32_t block_q, block_k; /* queries and keys of a block of block_mask */
  float scale;              /* 0 = 1/sqrt(head_dim) */
  float softcap; /* c from 1e-30 to 1e30: a scaled score x becomes c*tanh(x/c); 0 = off */
  float dropout; /* probability that a softmax weight becomes 0, below 1; 0 = off */
  int64_t heads;
  int64_t kv_heads; /* divides heads; 0 = heads */
  int64_t head_dim;
  int64_t v_dim; /* 0 = head_dim */
  int64_t window_left, window_right, max_tokens;
} ulysses_attention_desc;

/* Methods of the gated delta rule. AUTO chooses the one that sends fewer bytes for max_tokens, and
 * HEADS if max_tokens is 0. ulysses_plan_json names the choice, its reason and the bytes. */
enum {
  ULYSSES_GDN_AUTO = 0,
  ULYSSES_GDN_HEADS = 1, /* all-to-all, as for attention */
  ULYSSES_GDN_STATE = 2, /* tokens stay, recurrent states are passed from rank to rank */
};

/* Gated delta rule of a plan. Its flags are QK_L2NORM, STATES, DETERMINISTIC, NO_BACKWARD and
 * GATED_NORM. A plan with GDN_HEADS also serves reshards: v, g and beta by heads, q and k as shared
 * heads. With conv_width, it also serves ulysses_gdn_layer_forward, and AUTO compares the bytes of
 * the layer. */
typedef struct {
  uint32_t struct_size;
  int32_t dtype, flags;
  int32_t strategy; /* ULYSSES_GDN_... */
  int32_t chunk;    /* tokens of a chunk, 16 to 65536; 0 = the device's default */
  float scale;      /* 0 = 1/sqrt(qk_dim) */
  int64_t qk_heads;
  int64_t v_heads; /* a multiple of qk_heads */
  int64_t qk_dim, v_dim, max_tokens;
  int64_t conv_width; /* tokens of the convolution of a layer, at most 256; 0 = no layer */
} ulysses_gdn_desc;

/* Creates a plan for attention. Collective. */
ulysses_status ulysses_attention_plan(ulysses_context *, const ulysses_attention_desc *,
                                      ulysses_plan **out);

/* Creates a plan for the gated delta rule. Collective. */
ulysses_status ulysses_gdn_plan(ulysses_context *, const ulysses_gdn_desc *, ulysses_plan **out);

/* Returns a JSON object: the method and its reason, the heads of this rank, the kernels, the bytes
 * sent per token. A plan of attention has "ring", the groups of the ring, and "form": "ring" or
 * "all-gather", or "all-to-all" with one group. With max_tokens, "bytes_sent" has the bytes that
 * this rank sends forward and backward for one such sequence. On CUDA, "attention" holds the
 * kernels of the forward and the backward pass that are chosen if the documents of the batch allow
 * them. The string is valid until the plan is destroyed. */
const char *ulysses_plan_json(const ulysses_plan *);

/* Destroys a plan. Not collective. It is allowed between calls, even while work of the plan is
 * still enqueued on a GPU. A plan with a request or a pass in progress is not destroyed, and
 * ulysses_last_error() says so. */
void ulysses_plan_destroy(ulysses_plan *);

/* Batch: the lengths and documents of a set of sequences, for all plans of a context. Make it
 * after the plans that it serves, and keep it until the last backward pass. Making a batch is
 * cheap: it takes one small message and no work of the device, but a new size may compile kernels
 * once. */
typedef struct ulysses_batch ulysses_batch;

/* Flag of a batch: each sequence is divided into 2*ring chunks; ring group r holds chunks r and
 * 2*ring-1-r, of which each of its Ulysses ranks holds an equal share. With a causal mask, the
 * groups then have the same work without moving rows before attention. Without the flag, a plan
 * moves rows if that makes the slowest group faster. Halos and the gated delta rule need
 * consecutive rows and refuse such a batch. */
enum {
  ULYSSES_ZIGZAG = 1,
};

/* Lengths. seq > 0 shards each sequence evenly: the first seq mod size ranks hold one token more.
 * seq = 0 uses each rank's own `rows`, which may be 0, and their sum is the length (not with
 * ZIGZAG). kv_seq and kv_rows are the same for keys, for plans with ULYSSES_CROSS.
 *
 * Documents are given in one of three ways, in host memory, which is copied:
 *   cu_seqlens    [docs+1] starts over batch*seq tokens, equal on all ranks; the end of every
 *                 sequence is among them. kv_cu_seqlens has as many documents. A document has one
 *                 token or more, and one key or more.
 *   positions     [batch, rows] of this rank, NULL if it has no rows: 0, 1, 2, ... in each
 *                 document. Other values are refused.
 *   neither       each sequence is one document.
 * Padding is a document of its own. */
typedef struct {
  uint32_t struct_size;
  int32_t flags;
  int64_t batch, seq, rows, kv_seq, kv_rows, docs;
  const int64_t *cu_seqlens, *kv_cu_seqlens, *positions;
} ulysses_batch_desc;

/* This rank's rows are the tokens [lo[i], hi[i]) for i < ranges, one range after the other. */
typedef struct {
  uint32_t struct_size;
  int32_t ranges;
  int64_t seq, rows, lo[2], hi[2];
  int64_t max_rows;      /* the largest `rows` of all ranks */
  int64_t gathered_rows; /* the sum of `rows` over this rank's Ulysses group */
  int64_t kv_seq, kv_rows, kv_gathered_rows, docs;
} ulysses_batch_info;

/* Creates a batch. Collective. */
ulysses_status ulysses_batch_create(ulysses_context *, const ulysses_batch_desc *,
                                    ulysses_batch **out);

/* Writes the lengths of a batch and this rank's rows. */
ulysses_status ulysses_batch_query(const ulysses_batch *, ulysses_batch_info *out);

/* Writes the position of each of this rank's tokens in its document, [batch, rows] in host memory,
 * for rotary embeddings. */
ulysses_status ulysses_batch_positions(const ulysses_batch *, int64_t *out);

/* Destroys a batch. Not collective. It is allowed between calls, even while work, a request or a
 * pass of the batch is in progress. */
void ulysses_batch_destroy(ulysses_batch *);

/* Bytes of `saved` and `workspace`, and the heads [head_lo, head_hi) and [shared_lo, shared_hi)
 * that this rank computes. `head` counts q and out of attention, and v, g, beta and out of the
 * gated delta rule. `shared` counts k and v of attention, and q and k of the gated delta rule.
 *
 * Alignment is 64 bytes on the CPU and 256 bytes on CUDA. `saved` holds plain bytes and may be
 * moved or offloaded between forward and backward. On the CPU it begins with a tag of 64 bytes,
 * which the sizes include: backward refuses memory that no forward call has written, and memory of
 * another plan, batch, layer or dropout_seed. On CUDA, where reading a tag would wait for the GPU,
 * backward refuses plans and batches for which none of the last 65536 forward calls of the context
 * has saved, and a dropout_seed that none of the last 65536 such calls had. */
typedef struct {
  uint32_t struct_size;
  int32_t reserved;
  uint64_t saved, workspace;
  int64_t head_lo, head_hi, shared_lo, shared_hi;
} ulysses_sizes;

/* Writes the sizes of the calls with a plan and a batch. batch NULL = for max_tokens of the plan:
 * the sizes are sufficient for one evenly sharded sequence of at most max_tokens tokens with any
 * documents, and for the states of one document. Several sequences, own `rows` and more states can
 * need more. */
ulysses_status ulysses_plan_sizes(const ulysses_plan *, const ulysses_batch *, ulysses_sizes *out);

/* Calls.
 *
 * Calls of one context run one after the other on the GPU, whatever their streams are. Where 0
 * bytes are needed, the pointer may be NULL. Peers may write directly into the workspace.
 *
 * ULYSSES_COMM_IPC between processes sends from the context's own memory only, because peers may
 * still map a workspace that the caller frees. The functions that return sizes and workspaces make
 * this memory large enough. Call them before the first call, even if you know the result. */

/* Reshard of n tensors in one all-to-all, n <= 16: [B, rows, H, D] <-> [B, seq, h, D], where h is
 * the number of this rank's heads. With a ring, seq is gathered_rows of the batch. The last axis
 * must be dense. The numbers of rows, heads and ranks need not divide each other, and nothing is
 * padded. All n tensors have the same type, any of ULYSSES_F32 to ULYSSES_U8. sum_copies needs a
 * type that the device computes in. */
typedef struct {
  uint32_t struct_size;
  int32_t n;
  /* heads_to_seq of shared heads: 0 = take one copy, the inverse of seq_to_heads; 1 = add the
   * copies, its backward pass. */
  int32_t sum_copies;
  int32_t reserved;
  const int32_t *shared; /* [n] 1 = shared heads: several ranks may hold a copy; NULL = all 0 */
  const ulysses_tensor *const *in;
  ulysses_tensor *const *out;
  void *workspace;
  uint64_t workspace_bytes;
  void *stream;
} ulysses_reshard_args;

/* Re-shards [B, rows, H, D] to [B, seq, h, D]. Collective, asynchronous. */
ulysses_status ulysses_seq_to_heads(ulysses_plan *, const ulysses_batch *,
                                    const ulysses_reshard_args *);

/* Re-shards [B, seq, h, D] to [B, rows, H, D]: the inverse and the backward pass of
 * ulysses_seq_to_heads. Collective, asynchronous. */
ulysses_status ulysses_heads_to_seq(ulysses_plan *, const ulysses_batch *,
                                    const ulysses_reshard_args *);

/* Writes the workspace bytes of a reshard. to_heads 1 = ulysses_seq_to_heads, 0 =
 * ulysses_heads_to_seq. It reads the shapes of the tensors and not their data. Not collective. */
ulysses_status ulysses_reshard_workspace(ulysses_plan *, const ulysses_batch *,
                                         const ulysses_reshard_args *, int32_t to_heads,
                                         uint64_t *bytes);

/* Request: a reshard in progress. */
typedef struct ulysses_request ulysses_request;

/* Start a reshard and return: the data is packed and sent. Until ulysses_request_wait, do not
 * change `in` and do not use the workspace. workspace NULL = memory of the request, which the
 * context keeps for later requests. A context has at most 16 requests in progress. With one rank,
 * the whole reshard happens here. Collective, asynchronous. */
ulysses_status ulysses_seq_to_heads_start(ulysses_plan *, const ulysses_batch *,
                                          const ulysses_reshard_args *, ulysses_request **out);
ulysses_status ulysses_heads_to_seq_start(ulysses_plan *, const ulysses_batch *,
                                          const ulysses_reshard_args *, ulysses_request **out);

/* Receives and unpacks the data of a request, and destroys the request. Wait for requests in the
 * order in which they were started, which is the same on every rank. If the ranks refuse the call,
 * because a handle is invalid or the ranks wait for different requests, the request stays in
 * progress; after any other error it is destroyed. Collective, asynchronous. */
ulysses_status ulysses_request_wait(ulysses_request *);

/* Halo: the n rows before this rank's rows (n > 0), or the -n rows after them (n < 0), in each
 * sequence. A row is zero if it lies outside the sequence or in another document than this rank's
 * nearest row. n may exceed the rows of a neighbour. x [B, rows, ...] and halo [B, |n|, ...] are
 * dense, F32 or another type that the device computes in.
 *
 * Convolutions and token shifts need halos. A causal convolution over [halo, x] must skip the row
 * j before a token unless the token's position (ulysses_batch_positions) is j or more. Otherwise a
 * document that starts inside this rank's rows reads rows of the document before it. */
typedef struct {
  uint32_t struct_size;
  int32_t reserved;
  int64_t n;
  ulysses_tensor *x, *halo;
  void *workspace; /* ulysses_halo_workspace bytes, or NULL */
  uint64_t workspace_bytes;
  void *stream;
} ulysses_halo_args;

/* Reads x and writes halo. Collective, asynchronous. */
ulysses_status ulysses_halo_forward(ulysses_context *, const ulysses_batch *,
                                    const ulysses_halo_args *);

/* Reads halo, the gradient of the halo, and adds it to x, the gradient of x, on the ranks that the
 * rows came from, in rank order. Collective, asynchronous. */
ulysses_status ulysses_halo_backward(ulysses_context *, const ulysses_batch *,
                                     const ulysses_halo_args *);

/* Writes the workspace bytes of a halo. Not collective. */
ulysses_status ulysses_halo_workspace(ulysses_context *, const ulysses_batch *,
                                      const ulysses_halo_args *, uint64_t *bytes);

/* Reduces the loss of a sequence-parallel group. On input, sum and count are the sum of the losses
 * of this rank's valid tokens and their number. On output they are the sums over the ranks of the
 * group, added in rank order, bitwise equal on every rank. *mean becomes sum/count, or 0 if count
 * is 0; NULL = not wanted. The backward pass needs no communication: the gradient of `mean` with
 * respect to this rank's `sum` is 1/count of the group, or 0 if count is 0. If the weights'
 * gradients are then averaged over the group instead of summed, multiply it by the number of
 * ranks. Collective. */
ulysses_status ulysses_loss_reduce(ulysses_context *, double *sum, int64_t *count, double *mean);

/* Arguments of attention, forward and backward. Backward takes the arguments of the forward call;
 * without ULYSSES_SAVE_LESS it reads `saved` instead of q, k, v and out, which may then be NULL.
 * sinks, alibi and block_mask are whole on every rank, on the device. */
typedef struct {
  uint32_t struct_size;
  int32_t reserved;
  const ulysses_tensor *q; /* [B, rows, H, D] */
  const ulysses_tensor *k; /* [B, rows, Hkv, D] */
  const ulysses_tensor *v; /* [B, rows, Hkv, Dv] */
  /* sinks: the logit of a key without a value, which every query of the head sees. alibi: slopes; a
   * key j positions before the aligned one has the bias -slope*j. [H], F32 or dtype, dense */
  const ulysses_tensor *sinks, *alibi;
  /* 0 hides a block of queries and keys of each sequence, dense */
  const ulysses_tensor *block_mask; /* U8 [H or 1, ceil(seq/block_q), ceil(kv_seq/block_k)] */
  ulysses_tensor *out;              /* [B, rows, H, Dv]; 0 where a query sees no key */
  /* F32 [B, rows, H], natural logarithm of the sum of exponentials; where a query sees no key -inf,
   * or with sinks the sink of its head. NULL = not wanted, and then it is not sent. */
  ulysses_tensor *lse;
  /* With head, query and key, it chooses the dropout, whatever the number of ranks is. Equal on all
   * ranks. Use another one for each layer and step, and the same one in the backward pass, which
   * refuses others. */
  uint64_t dropout_seed;
  void *saved; /* NULL = no backward pass follows */
  uint64_t saved_bytes;
  void *workspace;
  uint64_t workspace_bytes;
  void *stream;
} ulysses_attention_args;

/* Gradients of attention, each of the shape and type of its tensor. dsinks and dalibi may be
 * NULL. */
typedef struct {
  uint32_t struct_size;
  int32_t reserved;
  const ulysses_tensor *dout;
  ulysses_tensor *dq, *dk, *dv, *dsinks, *dalibi;
} ulysses_attention_grads;

/* out = softmax(scale * q k^T) v over the whole sequence. Collective, asynchronous. */
ulysses_status ulysses_attention_forward(ulysses_plan *, const ulysses_batch *,
                                         const ulysses_attention_args *);

/* Writes the gradients of q, k, v, sinks and alibi from dout. Collective, asynchronous. */
ulysses_status ulysses_attention_backward(ulysses_plan *, const ulysses_batch *,
                                          const ulysses_attention_args *,
                                          const ulysses_attention_grads *);

/* Pass: a forward or backward pass of attention in its overlapped form, which is in progress. It
 * sends each of q, k and v in an all-to-all of its own while the host computes the next one:
 *
 *   ulysses_attention_forward_start        ulysses_attention_backward_start: sends dout
 *   project q, ulysses_pass_send(Q)        gradients of the output projection's weights
 *   project k, ulysses_pass_send(K)        ulysses_pass_attend: sends dv, dk and dq
 *   project v, ulysses_pass_send(V)        ulysses_pass_wait(V), gradients of v's weights
 *   ulysses_pass_attend: writes out        ulysses_pass_wait(K), gradients of k's weights
 *                                          ulysses_pass_wait(Q), gradients of q's weights
 *
 * Norms, biases and rotations of q and k belong to their projections. The results and `saved` are
 * bitwise equal to the ones of ulysses_attention_forward and ulysses_attention_backward, and as
 * many bytes are sent; either form of the backward pass fits either form of the forward pass. All
 * options of a plan and all meshes are supported. VeOmni (arXiv:2508.02317) calls this
 * asynchronous Ulysses. For a host's own attention, start reshards instead.
 *
 * The steps have this order on all ranks. A step out of order is ULYSSES_INVALID_ARGUMENT on all
 * ranks; it changes nothing, and the message names the step that is due. The last step destroys
 * the pass, whatever its result is. Other calls on the context, and other passes, may come between
 * the steps; at most 16 passes are in progress. Tensors, `saved` and workspace of the start must
 * stay until the last step. workspace NULL = memory of the pass, which the context keeps for later
 * passes. All steps belong to the `stream` of the start.
 *
 * How much is hidden depends on the transport. NCCL, IPC and staging send while the GPU computes.
 * An MPI library sends large messages during its calls, unless it has a thread or hardware for
 * this. The collectives of ulysses_host_comm are complete when they return, which hides nothing. */
typedef struct ulysses_pass ulysses_pass;

/* The tensors of a step. */
enum {
  ULYSSES_TENSOR_Q = 1,
  ULYSSES_TENSOR_K = 2,
  ULYSSES_TENSOR_V = 3,
};

/* Checks the arguments of a forward pass and starts it. q, k and v need no values yet. Collective,
 * asynchronous. */
ulysses_status ulysses_attention_forward_start(ulysses_plan *, const ulysses_batch *,
                                               const ulysses_attention_args *, ulysses_pass **out);

/* Starts a backward pass and sends dout, which must not change before ulysses_pass_attend.
 * Collective, asynchronous. */
ulysses_status ulysses_attention_backward_start(ulysses_plan *, const ulysses_batch *,
                                                const ulysses_attention_args *,
                                                const ulysses_attention_grads *,
                                                ulysses_pass **out);

/* Starts to send a tensor of a forward pass, ULYSSES_TENSOR_..., in the order Q, K, V. It must not
 * change before ulysses_pass_attend. Collective, asynchronous. */
ulysses_status ulysses_pass_send(ulysses_pass *, int32_t tensor);

/* Computes attention. A forward pass writes out and lse, and ends. A backward pass computes the
 * gradients and starts to send them. Collective, asynchronous. */
ulysses_status ulysses_pass_attend(ulysses_pass *);

/* Writes the gradient of a tensor, in the order V, K, Q. dsinks and dalibi are written before V's.
 * Collective, asynchronous. */
ulysses_status ulysses_pass_wait(ulysses_pass *, int32_t tensor);

/* Ends a pass before its last step: waits for what is being sent, and destroys the pass. What the
 * pass has to write is undefined. Collective, asynchronous. */
ulysses_status ulysses_pass_cancel(ulysses_pass *);

/* Patterns of block masks, with the parameters of DeepSpeed's SparsityConfig classes. Their sources
 * are Child et al. 2019 (arXiv:1904.10509), Zaheer et al. 2020 (arXiv:2007.14062) and Beltagy et
 * al. 2020 (arXiv:2004.05150). */
enum {
  ULYSSES_PATTERN_DENSE = 0,
  ULYSSES_PATTERN_FIXED = 1,                /* local, global, global_patterns, horizontal */
  ULYSSES_PATTERN_VARIABLE = 2,             /* random, windows, globals, global_ends, horizontal */
  ULYSSES_PATTERN_BIGBIRD = 3,              /* random, window, global */
  ULYSSES_PATTERN_BSLONGFORMER = 4,         /* window, globals, global_ends */
  ULYSSES_PATTERN_LOCAL_SLIDING_WINDOW = 5, /* window */
};

/* A pattern of a block mask. Numbers are in blocks; a 0 is the default of the class. A number or
 * list that the pattern does not have is refused. */
typedef struct {
  uint32_t struct_size;
  int32_t pattern;    /* ULYSSES_PATTERN_... */
  int32_t attention;  /* 1 = unidirectional, no block above the diagonal; 2 = bidirectional; 0 = 2,
                       * for a local sliding window 1 */
  int32_t per_head;   /* 1 = each head has its own mask; 0 = all heads have the mask of head 0 */
  int32_t horizontal; /* 1 = the rows of global columns see all blocks */
  int32_t local;      /* blocks of a group that see each other; default 4 */
  int32_t global;     /* global columns of a group; default 1; -1 = none */
  int32_t global_patterns; /* heads choose in turn among so many positions of these; default 1 */
  int32_t window;          /* width of the sliding window; default 3 */
  int32_t random;          /* random columns of a row; default 1 for BigBird, else 0; -1 = none */
  int32_t n_windows, n_globals;
  const int64_t *windows;     /* [n_windows] local windows, the last one repeats; NULL = {4} */
  const int64_t *globals;     /* [n_globals] global columns, or starts of ranges; NULL = {0} */
  const int64_t *global_ends; /* [n_globals] ends of ranges; NULL = single columns */
  /* Random columns are a function of seed, layer, head and row, and of no number of ranks. */
  uint64_t seed;
  int64_t layer;
} ulysses_block_pattern;

/* Writes the mask of a pattern, [heads, blocks, blocks] in host memory: 1 where a block of queries
 * sees a block of keys, else 0. It is `block_mask` of attention over sequences of `blocks` blocks,
 * with block_q = block_k. Give it the heads of all ranks. Not collective. */
ulysses_status ulysses_block_mask(const ulysses_block_pattern *, int64_t heads, int64_t blocks,
                                  uint8_t *mask);

/* The arguments of a caller's own attention: all rows of this rank's heads [head_lo, head_hi), and
 * the key heads [kv_head_lo, kv_head_hi) that belong to them, as in ulysses_plan_sizes. q, out,
 * dout and dq are [B, seq, h, D], k, v, dk and dv are [B, kv_seq, hkv, D]. Read their strides: the
 * device chooses the layout. The tensors are valid during the callback. */
typedef struct {
  uint32_t struct_size;
  int32_t backward; /* 0 = write out; 1 = read q, k, v, out and dout, and write dq, dk, dv */
  int64_t head_lo, head_hi, kv_head_lo, kv_head_hi;
  const ulysses_tensor *q, *k, *v, *out, *dout;
  const ulysses_tensor *dq, *dk, *dv;
  void *stream;
} ulysses_local_call;

/* A caller's own attention. Masks, documents, scale and the other options of the plan are its
 * responsibility. It needs ring 1, because it has all rows of its heads. A rank without
 * heads does not call it. If it does not return ULYSSES_OK, this rank returns its status, after
 * the all-to-alls, so that peers do not wait. */
typedef ulysses_status (*ulysses_local_attention)(void *user, const ulysses_local_call *);

/* Runs `local` between the two all-to-alls of attention. It takes the arguments of
 * ulysses_attention_forward; lse must be NULL. `saved` then holds q, k, v and out; its size is
 * that of ulysses_local_sizes. Collective; asynchronous except for what the callback does. */
ulysses_status ulysses_local_forward(ulysses_plan *, const ulysses_batch *,
                                     const ulysses_attention_args *, ulysses_local_attention local,
                                     void *user);

/* The backward pass of ulysses_local_forward: `local` is called with backward = 1. Collective;
 * asynchronous except for what the callback does. */
ulysses_status ulysses_local_backward(ulysses_plan *, const ulysses_batch *,
                                      const ulysses_attention_args *,
                                      const ulysses_attention_grads *,
                                      ulysses_local_attention local, void *user);

/* Writes the sizes for ulysses_local_forward and ulysses_local_backward. */
ulysses_status ulysses_local_sizes(const ulysses_plan *, const ulysses_batch *, ulysses_sizes *out);

/* Arguments of a whole attention layer, forward and backward. All tensors are dense and of the
 * plan's dtype, except cos and sin. NULL biases, norms and rotation are left out. */
typedef struct {
  uint32_t struct_size;
  float eps; /* of the RMS norms; 0 = 1e-6 */
  int64_t hidden;
  const ulysses_tensor *x; /* [B, rows, hidden]; backward reads it again */
  /* [H*D, hidden], [Hkv*D, hidden], [Hkv*Dv, hidden], [hidden, H*Dv] */
  const ulysses_tensor *wq, *wk, *wv, *wo;
  const ulysses_tensor *bq, *bk, *bv, *bo; /* [H*D], [Hkv*D], [Hkv*Dv], [hidden] */
  const ulysses_tensor *q_norm, *k_norm;   /* [D], RMS norms of the heads; both or neither */
  /* F32 [B*rows, rotary/2], the rotation of this rank's positions, the same for all heads. Feature
   * i is paired with i + rotary/2, as in Hugging Face's models. Both or neither. */
  const ulysses_tensor *cos, *sin;
  ulysses_tensor *y; /* [B, rows, hidden] */
  void *saved;       /* NULL = no backward pass follows */
  uint64_t saved_bytes;
  void *workspace;
  uint64_t workspace_bytes;
  void *stream;
  const ulysses_tensor *sinks, *alibi, *block_mask; /* as in ulysses_attention_args */
  uint64_t dropout_seed;
} ulysses_attention_layer_args;

/* Gradients of the layer. dx is written. The gradients of the weights are F32, of the shape of
 * their weight, and are ADDED to: they are this rank's share, and the caller sums them over the
 * ranks. NULL = not wanted. */
typedef struct {
  uint32_t struct_size;
  int32_t reserved;
  const ulysses_tensor *dy;
  ulysses_tensor *dx, *dwq, *dwk, *dwv, *dwo, *dbq, *dbk, *dbv, *dbo, *dq_norm, *dk_norm;
  ulysses_tensor *dsinks, *dalibi;
} ulysses_attention_layer_grads;

/* Writes the sizes of a layer. Of the arguments it reads hidden, q_norm and cos. */
ulysses_status ulysses_attention_layer_sizes(const ulysses_plan *, const ulysses_batch *,
                                             const ulysses_attention_layer_args *,
                                             ulysses_sizes *out);

/* y = attention(rope(norm(x Wq^T + bq)), rope(norm(x Wk^T + bk)), x Wv^T + bv) Wo^T + bo.
 * Collective, asynchronous. */
ulysses_status ulysses_attention_layer_forward(ulysses_plan *, const ulysses_batch *,
                                               const ulysses_attention_layer_args *);

/* Writes dx and adds to the gradients of the weights. It takes the arguments of the forward call.
 * Collective, asynchronous. */
ulysses_status ulysses_attention_layer_backward(ulysses_plan *, const ulysses_batch *,
                                                const ulysses_attention_layer_args *,
                                                const ulysses_attention_layer_grads *);

/* Arguments of the gated delta rule, forward and backward. Backward takes the arguments of the
 * forward call; it reads only `saved` and state_in, and the other tensors may then be NULL. States
 * need ULYSSES_STATES. They are F32 [docs, Hv, Dk, Dv], dense, one for each document of the batch,
 * whole on every rank. */
typedef struct {
  uint32_t struct_size;
  int32_t reserved;
  const ulysses_tensor *q, *k;    /* [B, rows, Hk, Dk], last axis dense */
  const ulysses_tensor *v;        /* [B, rows, Hv, Dv], last axis dense */
  const ulysses_tensor *g;        /* F32 [B, rows, Hv], natural logarithm of the decay, at most 0 */
  const ulysses_tensor *beta;     /* F32 [B, rows, Hv] */
  const ulysses_tensor *state_in; /* NULL = zeros */
  ulysses_tensor *out;            /* [B, rows, Hv, Dv], last axis dense */
  ulysses_tensor *state_out;      /* NULL = not wanted, and then it is not sent */
  void *saved;                    /* NULL = no backward pass follows */
  uint64_t saved_bytes;
  void *workspace;
  uint64_t workspace_bytes;
  void *stream;
} ulysses_gdn_args;

/* Gradients of the gated delta rule. dstate_out is equal on every rank; NULL = zeros. dstate_in is
 * whole on every rank; NULL = not wanted; it needs state_in. */
typedef struct {
  uint32_t struct_size;
  int32_t reserved;
  const ulysses_tensor *dout, *dstate_out;
  ulysses_tensor *dq, *dk, *dv, *dg, *dbeta, *dstate_in;
} ulysses_gdn_grads;

/* The gated delta rule (Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464). For each token of a
 * document, in order, and each v head, with the state S [Dk, Dv]:
 *
 *   S = exp(g)*S;  u = beta*(v - S^T k);  S = S + k u^T;  out = scale * S^T q
 *
 * ulysses_gdn_layer_forward has the convolution and the gates before it as well. A convolution of
 * the caller gets the rows of other ranks by ulysses_halo_forward; see there for documents.
 * Collective, asynchronous. */
ulysses_status ulysses_gdn_forward(ulysses_plan *, const ulysses_batch *, const ulysses_gdn_args *);

/* Writes the gradients of the gated delta rule. Collective, asynchronous. */
ulysses_status ulysses_gdn_backward(ulysses_plan *, const ulysses_batch *, const ulysses_gdn_args *,
                                    const ulysses_gdn_grads *);

/* Arguments of a whole layer of the gated delta rule between its projections, forward and backward.
 * q|k|v has C = 2*Hk*Dk + Hv*Dv channels. Weights are dense and the same on every rank. Backward
 * takes the arguments of the forward call; it reads `saved`, the weights and z, and qkv, a, b and
 * out may then be NULL. */
typedef struct {
  uint32_t struct_size;
  float eps;                             /* of the norm; 0 = 1e-6 */
  const ulysses_tensor *qkv;             /* [B, rows, C], before the convolution, last axis dense */
  const ulysses_tensor *a, *b;           /* [B, rows, Hv], last axis dense */
  const ulysses_tensor *conv;            /* [C, conv_width] */
  const ulysses_tensor *a_log, *dt_bias; /* [Hv], F32 or dtype */
  const ulysses_tensor *z;    /* [B, rows, Hv, Dv], last axis dense; only with GATED_NORM */
  const ulysses_tensor *norm; /* [Dv]; only with GATED_NORM */
  ulysses_tensor *out;        /* [B, rows, Hv, Dv], last axis dense */
  void *saved;                /* NULL = no backward pass follows */
  uint64_t saved_bytes;
  void *workspace;
  uint64_t workspace_bytes;
  void *stream;
} ulysses_gdn_layer_args;

/* Gradients of the layer. dqkv, da, db and, with GATED_NORM, dz have the shape and type of their
 * tensor and are written. The gradients of the weights are F32, of the shape of their weight, and
 * are ADDED to: they are this rank's share, and the caller sums them over the ranks. NULL = the
 * gradient of a weight is not wanted. */
typedef struct {
  uint32_t struct_size;
  int32_t reserved;
  const ulysses_tensor *dout;
  ulysses_tensor *dqkv, *da, *db, *dz;
  ulysses_tensor *dconv, *da_log, *ddt_bias, *dnorm;
} ulysses_gdn_layer_grads;

/* Writes the sizes of a layer. */
ulysses_status ulysses_gdn_layer_sizes(const ulysses_plan *, const ulysses_batch *,
                                       ulysses_sizes *out);

/* The linear attention layer of Qwen3-Next and Qwen3.5 between its projections. For each token t of
 * a document, channel c and v head h:
 *
 *   y[t,c] = silu(sum over i < W of conv[c,i] * qkv[t-W+1+i,c]), where W is conv_width
 *   q|k|v = y;  g = -exp(a_log[h]) * softplus(a + dt_bias[h]);  beta = sigmoid(b)
 *   o = the gated delta rule of q, k, v, g and beta, see ulysses_gdn_forward
 *   out = o, or with ULYSSES_GATED_NORM o * rsqrt(mean of o^2 + eps) * norm * silu(z)
 *
 * The rows of a convolution are in the document of t; rows on other ranks are received. The state
 * before a document is zero. Gates and states are F32. Collective, asynchronous. */
ulysses_status ulysses_gdn_layer_forward(ulysses_plan *, const ulysses_batch *,
                                         const ulysses_gdn_layer_args *);

/* Writes the gradients of qkv, a, b and z, and adds to the gradients of the weights. Collective,
 * asynchronous. */
ulysses_status ulysses_gdn_layer_backward(ulysses_plan *, const ulysses_batch *,
                                          const ulysses_gdn_layer_args *,
                                          const ulysses_gdn_layer_grads *);

/* Tile: the rows [lo, hi) of a walk over count tiles. */
typedef struct {
  uint32_t struct_size;
  int32_t reserved;
  int64_t index, count, lo, hi;
  void *stream;
} ulysses_tile;

/* Computes one tile. `in` and `out` are the tensors of the call, restricted to the tile's rows.
 * They are valid during the callback. A result other than ULYSSES_OK ends the walk, which returns
 * it. */
typedef ulysses_status (*ulysses_tile_forward)(void *user, const ulysses_tile *,
                                               const ulysses_tensor *const *in,
                                               ulysses_tensor *const *out);

/* Recomputes one tile and writes its gradients. A NULL dout is zero; a NULL din is not wanted. At
 * index == count-1 the gradients of whole tensors are complete. */
typedef ulysses_status (*ulysses_tile_backward)(void *user, const ulysses_tile *,
                                                const ulysses_tensor *const *in,
                                                const ulysses_tensor *const *dout,
                                                ulysses_tensor *const *din);

/* Arguments of tiled compute. in_dim and out_dim give the axis along which each tensor is divided
 * (NULL = axis 0 of all). -1 = the tensor is passed whole. The callback adds to whole outputs and
 * whole gradients, such as losses, counts and gradients of weights; the caller sets them to zero
 * before. At most 32 inputs and 32 outputs. */
typedef struct {
  uint32_t struct_size;
  int32_t n_in, n_out, reserved;
  const int32_t *in_dim, *out_dim;
  int64_t tile_rows; /* 0 = one tile */
  int64_t max_rows;  /* 0 = the rows of the tensors */
  const ulysses_tensor *const *in;
  ulysses_tensor *const *out;
  const ulysses_tensor *const *dout;
  ulysses_tensor *const *din;
  ulysses_tile_forward forward;
  ulysses_tile_backward backward;
  void *user, *stream;
} ulysses_tiled_args;

/* Runs `forward` on n rows tile by tile, in order (Bekman et al. 2025, arXiv:2506.13996). There
 * are count = max(1, ceil(max_rows / tile_rows)) tiles of ceil(n / count) rows, of which the last
 * may be shorter or empty; empty tiles are passed to the callback. With max_rows of
 * ulysses_batch_query, count is equal on all ranks, so callbacks may be collective. The function
 * itself sends, allocates and writes nothing. A loss may compute its backward pass here, with the
 * gradient of its input as an additional output. The name has no prefix because users know the
 * operation by it. */
ulysses_status tiled_compute(const ulysses_tiled_args *);

/* Runs `backward` on the same tiles. */
ulysses_status tiled_compute_backward(const ulysses_tiled_args *);
#ifdef __cplusplus
}
#endif
#endif
