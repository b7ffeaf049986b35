"""Sequence-parallel attention and gated delta rule for NumPy, PyTorch and transformers.

Each sequence is sharded over the ranks of a group: a rank holds `rows` tokens of each sequence.
Before attention, an all-to-all re-shards Q, K and V from tokens to heads, so each rank computes on
the whole sequence for a subset of the heads. A second all-to-all restores token sharding (Jacobs et
al. 2023, arXiv:2309.14509).

    ctx = ulysses.Context(MPI.COMM_WORLD)  # or a torch.distributed group, or None for one rank
    ulysses.use(ctx)
    out = ulysses.attention(q, k, v, causal=True)  # [B, rows, H, D] on each rank

The following holds for every function:

* Collective functions must be called by all ranks of the context, in the same order. Before data is
  sent, the ranks compare the arguments. If one rank finds an invalid argument, or if arguments that
  must be equal differ, then every rank raises an exception.
* Arrays are NumPy arrays or PyTorch tensors, all of one library. Results are of the same library
  and on the same device. The last axis must be dense, other axes may have any strides.
* Functions that are "differentiable in PyTorch" join their result to autograd's graph.
* Failures are exceptions derived from UlyssesError. Nothing is printed.

The package calls libulysses.so with ctypes, when the first function is called.
"""

from . import patterns
from ._library import build_info, version
from .attention import Call, attention, attention_backward, attention_forward
from .communicator import MPI, Alone, Callbacks, Communicator, TorchGroup, communicator
from .context import Context, current, use
from .data import Micro, loader, local_batch, shard, shift_labels
from .delta_layer import gated_delta_layer
from .errors import (
    CommError,
    DeviceError,
    InputOutputError,
    InternalError,
    InvalidArgument,
    InvalidConfig,
    NumericError,
    OutOfMemory,
    Preempted,
    Status,
    UlyssesError,
    Unsupported,
)
from .gdn import (
    DeltaCall,
    chunk_gated_delta_rule,
    gated_delta_rule_backward,
    gated_delta_rule_forward,
)
from .halo import causal_conv1d, halo, halo_backward
from .layer import (
    LayerCall,
    attention_layer,
    attention_layer_backward,
    attention_layer_forward,
)
from .layout import Layout, shard_rows
from .local import (
    LocalCall,
    LocalTensors,
    local_attention,
    local_attention_backward,
    local_attention_forward,
)
from .options import alibi_slopes
from .parallel_state import ParallelState, sequence_groups
from .plan import Batch, DeltaPlan, Plan
from .projections import async_ulysses_output_projection, async_ulysses_qkv_projection
from .reshard import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    gather_seq_scatter_heads_qkv,
    reduce_sequence_parallel_loss,
)
from .sequences import Sequences
from .tiled import Whole, tiled_compute, tiles
from .tokens import gather_tokens, local_tokens
from .transformers import (
    UlyssesSPAttentionHF,
    register_transformers,
    transformers_attention,
    unregister_transformers,
)

__version__ = "0.1.0"

__all__ = [
    "Alone",
    "Batch",
    "Call",
    "Callbacks",
    "CommError",
    "Communicator",
    "Context",
    "DeltaCall",
    "DeltaPlan",
    "DeviceError",
    "InputOutputError",
    "InternalError",
    "InvalidArgument",
    "InvalidConfig",
    "LayerCall",
    "Layout",
    "LocalCall",
    "LocalTensors",
    "MPI",
    "Micro",
    "NumericError",
    "OutOfMemory",
    "ParallelState",
    "Plan",
    "Preempted",
    "Sequences",
    "Status",
    "TorchGroup",
    "UlyssesError",
    "UlyssesSPAttentionHF",
    "Unsupported",
    "Whole",
    "alibi_slopes",
    "async_ulysses_output_projection",
    "async_ulysses_qkv_projection",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_layer",
    "attention_layer_backward",
    "attention_layer_forward",
    "build_info",
    "causal_conv1d",
    "chunk_gated_delta_rule",
    "communicator",
    "current",
    "gated_delta_layer",
    "gated_delta_rule_backward",
    "gated_delta_rule_forward",
    "gather_heads_scatter_seq",
    "gather_seq_scatter_heads",
    "gather_seq_scatter_heads_qkv",
    "gather_tokens",
    "halo",
    "halo_backward",
    "loader",
    "local_attention",
    "local_attention_backward",
    "local_attention_forward",
    "local_batch",
    "local_tokens",
    "patterns",
    "reduce_sequence_parallel_loss",
    "register_transformers",
    "sequence_groups",
    "shard",
    "shard_rows",
    "shift_labels",
    "tiled_compute",
    "tiles",
    "transformers_attention",
    "unregister_transformers",
    "use",
    "version",
]
