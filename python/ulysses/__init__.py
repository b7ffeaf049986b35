"""Ulysses: attention over sequences that are cut across ranks, from NumPy, PyTorch and transformers.

    ctx = ulysses.Context(MPI.COMM_WORLD)          # mpi4py, torch.distributed's gloo, a host's own functions, or nothing: one rank
    ulysses.use(ctx)
    out = ulysses.attention(q, k, v, causal=True)  # [B, rows, H, D], each rank its rows

The package is ctypes around libulysses.so; docs are in each function. Nothing is printed; failures are exceptions with a sentence.
"""

from ._library import build_info, version
from .attention import Call, attention, attention_backward, attention_forward
from .communicator import MPI, Alone, Callbacks, Communicator, TorchGroup, communicator
from .context import Context, current, use
from .data import Micro, loader, shard, shift_labels
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
    LocalCall,
    LocalTensors,
    attention_layer,
    attention_layer_backward,
    attention_layer_forward,
    local_attention,
    local_attention_backward,
    local_attention_forward,
)
from .plan import Batch, DeltaPlan, Plan, Sequences, shard_rows
from .reshard import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    reduce_sequence_parallel_loss,
)
from .tiled import Whole, tiled_compute, tiles
from .transformers import register_transformers, transformers_attention

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
    "LocalCall",
    "LocalTensors",
    "MPI",
    "Micro",
    "NumericError",
    "OutOfMemory",
    "Plan",
    "Preempted",
    "Sequences",
    "Status",
    "TorchGroup",
    "UlyssesError",
    "Unsupported",
    "Whole",
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
    "gated_delta_rule_backward",
    "gated_delta_rule_forward",
    "gather_heads_scatter_seq",
    "gather_seq_scatter_heads",
    "halo",
    "halo_backward",
    "loader",
    "local_attention",
    "local_attention_backward",
    "local_attention_forward",
    "reduce_sequence_parallel_loss",
    "register_transformers",
    "shard",
    "shard_rows",
    "shift_labels",
    "tiled_compute",
    "tiles",
    "transformers_attention",
    "use",
    "version",
]
