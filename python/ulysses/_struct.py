"""The structs and numbers of capi/ulysses.h, one to one. tests/test_header.py compares every size and offset with a C compiler's."""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)

VERSION = 100  # of the header this file mirrors: major*10000 + minor*100 + patch

# dtypes: DLPack's code | bits << 8
F32, BF16, F16, I32, I64, U8 = 0x2002, 0x1004, 0x1002, 0x2000, 0x4000, 0x0801
CPU, CUDA = 1, 2
COMM_AUTO, COMM_HOST, COMM_NCCL, COMM_IPC = 0, 1, 2, 3
CAUSAL, WINDOW, CROSS, SINKS, ALIBI, BLOCK_MASK = 1, 2, 4, 8, 16, 32
QK_L2NORM, DETERMINISTIC, SAVE_LESS, NO_BACKWARD, STATES = 64, 128, 256, 512, 1024
OWN_WORKSPACES, NO_AGREEMENT = 1, 2
GDN_AUTO, GDN_HEADS, GDN_STATE = 0, 1, 2

Log = CFUNCTYPE(None, c_void_p, c_int32, c_char_p)
AllGather = CFUNCTYPE(c_int32, c_void_p, c_void_p, c_void_p, c_int64)
AllToAllV = CFUNCTYPE(c_int32, c_void_p, c_void_p, POINTER(c_int64), c_void_p, POINTER(c_int64))


class Struct(ctypes.Structure):
    """A struct that opens with struct_size, which is filled in."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.struct_size = ctypes.sizeof(type(self))


class Tensor(ctypes.Structure):
    """ulysses_tensor: DLPack's DLTensor. Strides in elements."""

    _fields_ = [
        ("data", c_void_p),
        ("device", c_int32),
        ("ordinal", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_T = POINTER(Tensor)


class Options(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("device", c_int32),
        ("ordinal", c_int32),
        ("threads", c_int32),
        ("ulysses", c_int32),
        ("ring", c_int32),
        ("comm", c_int32),
        ("timeout", c_int32),
        ("log", Log),
        ("log_user", c_void_p),
        ("nccl_comm", c_void_p),
        ("flags", c_int32),
        ("reserved", c_int32),
    ]


class HostComm(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("size", c_int32),
        ("reserved", c_int32),
        ("user", c_void_p),
        ("allgather", AllGather),
        ("alltoallv", AllToAllV),
    ]


class ContextInfo(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("rank", c_int32),
        ("size", c_int32),
        ("ulysses", c_int32),
        ("ring", c_int32),
        ("device", c_int32),
        ("ordinal", c_int32),
        ("comm", c_int32),
    ]


class AttentionDesc(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_int32),
        ("flags", c_int32),
        ("block_q", c_int32),
        ("block_k", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("dropout", c_float),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("v_dim", c_int64),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("max_tokens", c_int64),
    ]


class GDNDesc(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_int32),
        ("flags", c_int32),
        ("strategy", c_int32),
        ("chunk", c_int32),
        ("scale", c_float),
        ("qk_heads", c_int64),
        ("v_heads", c_int64),
        ("qk_dim", c_int64),
        ("v_dim", c_int64),
        ("max_tokens", c_int64),
    ]


class BatchDesc(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("flags", c_int32),
        ("batch", c_int64),
        ("seq", c_int64),
        ("rows", c_int64),
        ("kv_seq", c_int64),
        ("kv_rows", c_int64),
        ("docs", c_int64),
        ("cu_seqlens", POINTER(c_int64)),
        ("kv_cu_seqlens", POINTER(c_int64)),
        ("positions", POINTER(c_int64)),
    ]


class BatchInfo(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("ranges", c_int32),
        ("seq", c_int64),
        ("rows", c_int64),
        ("lo", c_int64 * 2),
        ("hi", c_int64 * 2),
        ("max_rows", c_int64),
        ("gathered_rows", c_int64),
        ("kv_seq", c_int64),
        ("kv_rows", c_int64),
        ("kv_gathered_rows", c_int64),
        ("docs", c_int64),
    ]


class Sizes(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("saved", c_uint64),
        ("workspace", c_uint64),
        ("head_lo", c_int64),
        ("head_hi", c_int64),
        ("shared_lo", c_int64),
        ("shared_hi", c_int64),
    ]


class ReshardArgs(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("n", c_int32),
        ("sum_copies", c_int32),
        ("reserved", c_int32),
        ("shared", POINTER(c_int32)),
        ("in", POINTER(_T)),
        ("out", POINTER(_T)),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("stream", c_void_p),
    ]


class AttentionArgs(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("q", _T),
        ("k", _T),
        ("v", _T),
        ("sinks", _T),
        ("alibi", _T),
        ("block_mask", _T),
        ("out", _T),
        ("lse", _T),
        ("dropout_seed", c_uint64),
        ("saved", c_void_p),
        ("saved_bytes", c_uint64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("stream", c_void_p),
    ]


class AttentionGrads(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("dout", _T),
        ("dq", _T),
        ("dk", _T),
        ("dv", _T),
        ("dsinks", _T),
    ]


class HaloArgs(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("n", c_int64),
        ("x", _T),
        ("halo", _T),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("stream", c_void_p),
    ]


class LocalCall(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("backward", c_int32),
        ("head_lo", c_int64),
        ("head_hi", c_int64),
        ("kv_head_lo", c_int64),
        ("kv_head_hi", c_int64),
        ("q", _T),
        ("k", _T),
        ("v", _T),
        ("out", _T),
        ("dout", _T),
        ("dq", _T),
        ("dk", _T),
        ("dv", _T),
        ("stream", c_void_p),
    ]


LocalAttention = CFUNCTYPE(c_int32, c_void_p, POINTER(LocalCall))


class LayerArgs(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("eps", c_float),
        ("hidden", c_int64),
        ("x", _T),
        ("wq", _T),
        ("wk", _T),
        ("wv", _T),
        ("wo", _T),
        ("bq", _T),
        ("bk", _T),
        ("bv", _T),
        ("bo", _T),
        ("q_norm", _T),
        ("k_norm", _T),
        ("cos", _T),
        ("sin", _T),
        ("y", _T),
        ("saved", c_void_p),
        ("saved_bytes", c_uint64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("stream", c_void_p),
    ]


class LayerGrads(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("dy", _T),
        ("dx", _T),
        ("dwq", _T),
        ("dwk", _T),
        ("dwv", _T),
        ("dwo", _T),
        ("dbq", _T),
        ("dbk", _T),
        ("dbv", _T),
        ("dbo", _T),
        ("dq_norm", _T),
        ("dk_norm", _T),
    ]


class GDNArgs(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("q", _T),
        ("k", _T),
        ("v", _T),
        ("g", _T),
        ("beta", _T),
        ("state_in", _T),
        ("out", _T),
        ("state_out", _T),
        ("saved", c_void_p),
        ("saved_bytes", c_uint64),
        ("workspace", c_void_p),
        ("workspace_bytes", c_uint64),
        ("stream", c_void_p),
    ]


class GDNGrads(Struct):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_int32),
        ("dout", _T),
        ("dstate_out", _T),
        ("dq", _T),
        ("dk", _T),
        ("dv", _T),
        ("dg", _T),
        ("dbeta", _T),
        ("dstate_in", _T),
    ]


# What the header calls them.
STRUCTS = {
    "ulysses_tensor": Tensor,
    "ulysses_options": Options,
    "ulysses_host_comm": HostComm,
    "ulysses_context_info": ContextInfo,
    "ulysses_attention_desc": AttentionDesc,
    "ulysses_batch_desc": BatchDesc,
    "ulysses_batch_info": BatchInfo,
    "ulysses_sizes": Sizes,
    "ulysses_reshard_args": ReshardArgs,
    "ulysses_attention_args": AttentionArgs,
    "ulysses_attention_grads": AttentionGrads,
    "ulysses_gdn_desc": GDNDesc,
    "ulysses_gdn_args": GDNArgs,
    "ulysses_gdn_grads": GDNGrads,
    "ulysses_halo_args": HaloArgs,
    "ulysses_attention_layer_args": LayerArgs,
    "ulysses_attention_layer_grads": LayerGrads,
    "ulysses_local_call": LocalCall,
}
NUMBERS = {
    name: value
    for name, value in list(globals().items())
    if name.isupper() and isinstance(value, int)
}

_H = c_void_p  # a handle: context, plan, batch, request
_OUT = POINTER(c_void_p)

# Functions that return a status, and their arguments.
FUNCTIONS = {
    "ulysses_context_create_local": [POINTER(Options), _OUT],
    "ulysses_context_create_mpi": [c_int64, POINTER(Options), _OUT],
    "ulysses_context_create_host": [POINTER(HostComm), POINTER(Options), _OUT],
    "ulysses_context_query": [_H, POINTER(ContextInfo)],
    "ulysses_context_async_error": [_H],
    "ulysses_attention_plan": [_H, POINTER(AttentionDesc), _OUT],
    "ulysses_batch_create": [_H, POINTER(BatchDesc), _OUT],
    "ulysses_batch_query": [_H, POINTER(BatchInfo)],
    "ulysses_batch_positions": [_H, POINTER(c_int64)],
    "ulysses_plan_sizes": [_H, _H, POINTER(Sizes)],
    "ulysses_seq_to_heads": [_H, _H, POINTER(ReshardArgs)],
    "ulysses_heads_to_seq": [_H, _H, POINTER(ReshardArgs)],
    "ulysses_reshard_workspace": [_H, _H, POINTER(ReshardArgs), c_int32, POINTER(c_uint64)],
    "ulysses_seq_to_heads_start": [_H, _H, POINTER(ReshardArgs), _OUT],
    "ulysses_heads_to_seq_start": [_H, _H, POINTER(ReshardArgs), _OUT],
    "ulysses_request_wait": [_H],
    "ulysses_loss_reduce": [
        _H,
        POINTER(ctypes.c_double),
        POINTER(c_int64),
        POINTER(ctypes.c_double),
    ],
    "ulysses_attention_forward": [_H, _H, POINTER(AttentionArgs)],
    "ulysses_attention_backward": [_H, _H, POINTER(AttentionArgs), POINTER(AttentionGrads)],
    "ulysses_halo_forward": [_H, _H, POINTER(HaloArgs)],
    "ulysses_halo_backward": [_H, _H, POINTER(HaloArgs)],
    "ulysses_halo_workspace": [_H, _H, POINTER(HaloArgs), POINTER(c_uint64)],
    "ulysses_local_forward": [_H, _H, POINTER(AttentionArgs), LocalAttention, c_void_p],
    "ulysses_local_backward": [
        _H,
        _H,
        POINTER(AttentionArgs),
        POINTER(AttentionGrads),
        LocalAttention,
        c_void_p,
    ],
    "ulysses_local_sizes": [_H, _H, POINTER(Sizes)],
    "ulysses_attention_layer_sizes": [_H, _H, POINTER(LayerArgs), POINTER(Sizes)],
    "ulysses_attention_layer_forward": [_H, _H, POINTER(LayerArgs)],
    "ulysses_attention_layer_backward": [_H, _H, POINTER(LayerArgs), POINTER(LayerGrads)],
    "ulysses_gdn_plan": [_H, POINTER(GDNDesc), _OUT],
    "ulysses_gdn_forward": [_H, _H, POINTER(GDNArgs)],
    "ulysses_gdn_backward": [_H, _H, POINTER(GDNArgs), POINTER(GDNGrads)],
}
# The others: result, arguments.
OTHERS = {
    "ulysses_version": (c_uint32, []),
    "ulysses_build_info": (c_char_p, []),
    "ulysses_status_string": (c_char_p, [c_int32]),
    "ulysses_last_error": (c_char_p, []),
    "ulysses_plan_json": (c_char_p, [_H]),
    "ulysses_context_abort": (None, [_H, c_int32]),
    "ulysses_context_destroy": (None, [_H]),
    "ulysses_plan_destroy": (None, [_H]),
    "ulysses_batch_destroy": (None, [_H]),
}
