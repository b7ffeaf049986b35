package main

/*
#include <stddef.h>
#include "ulysses.h"
*/
import "C"

import (
	"reflect"
	"unsafe"
)

// The structs of ulysses.h with Go's own types, as `go tool cgo -godefs` gives them: bodies and
// tests speak no C. layouts holds them to the header.
type (
	cTensor struct {
		data        unsafe.Pointer
		device      int32
		ordinal     int32
		ndim        int32
		code        uint8
		bits        uint8
		lanes       uint16
		shape       *int64
		strides     *int64
		byte_offset uint64
	}
	cOptions struct {
		struct_size uint32
		device      int32
		ordinal     int32
		threads     int32
		ulysses     int32
		ring        int32
		comm        int32
		timeout     int32
		log         unsafe.Pointer
		log_user    unsafe.Pointer
		nccl_comm   unsafe.Pointer
		flags       int32
		reserved    int32
	}
	cHostComm struct {
		struct_size uint32
		rank        int32
		size        int32
		reserved    int32
		user        unsafe.Pointer
		allgather   unsafe.Pointer
		alltoallv   unsafe.Pointer
	}
	cContextInfo struct {
		struct_size uint32
		rank        int32
		size        int32
		ulysses     int32
		ring        int32
		device      int32
		ordinal     int32
		comm        int32
	}
	cAttention struct {
		struct_size  uint32
		dtype        int32
		flags        int32
		block_q      int32
		block_k      int32
		scale        float32
		softcap      float32
		dropout      float32
		heads        int64
		kv_heads     int64
		head_dim     int64
		v_dim        int64
		window_left  int64
		window_right int64
		max_tokens   int64
	}
	cGDN struct {
		struct_size uint32
		dtype       int32
		flags       int32
		strategy    int32
		chunk       int32
		scale       float32
		qk_heads    int64
		v_heads     int64
		qk_dim      int64
		v_dim       int64
		max_tokens  int64
	}
	cBatch struct {
		struct_size   uint32
		flags         int32
		batch         int64
		seq           int64
		rows          int64
		kv_seq        int64
		kv_rows       int64
		docs          int64
		cu_seqlens    *int64
		kv_cu_seqlens *int64
		positions     *int64
	}
	cBatchInfo struct {
		struct_size      uint32
		ranges           int32
		seq              int64
		rows             int64
		lo               [2]int64
		hi               [2]int64
		max_rows         int64
		gathered_rows    int64
		kv_seq           int64
		kv_rows          int64
		kv_gathered_rows int64
		docs             int64
	}
	cSizes struct {
		struct_size uint32
		reserved    int32
		saved       uint64
		workspace   uint64
		head_lo     int64
		head_hi     int64
		shared_lo   int64
		shared_hi   int64
	}
	cReshard struct {
		struct_size     uint32
		n               int32
		sum_copies      int32
		reserved        int32
		shared          *int32
		in              **cTensor
		out             **cTensor
		workspace       unsafe.Pointer
		workspace_bytes uint64
		stream          unsafe.Pointer
	}
	cHalo struct {
		struct_size     uint32
		reserved        int32
		n               int64
		x               *cTensor
		halo            *cTensor
		workspace       unsafe.Pointer
		workspace_bytes uint64
		stream          unsafe.Pointer
	}
	cArgs struct {
		struct_size     uint32
		reserved        int32
		q               *cTensor
		k               *cTensor
		v               *cTensor
		sinks           *cTensor
		alibi           *cTensor
		block_mask      *cTensor
		out             *cTensor
		lse             *cTensor
		dropout_seed    uint64
		saved           unsafe.Pointer
		saved_bytes     uint64
		workspace       unsafe.Pointer
		workspace_bytes uint64
		stream          unsafe.Pointer
	}
	cGrads struct {
		struct_size uint32
		reserved    int32
		dout        *cTensor
		dq          *cTensor
		dk          *cTensor
		dv          *cTensor
		dsinks      *cTensor
	}
	cLayer struct {
		struct_size     uint32
		eps             float32
		hidden          int64
		x               *cTensor
		wq              *cTensor
		wk              *cTensor
		wv              *cTensor
		wo              *cTensor
		bq              *cTensor
		bk              *cTensor
		bv              *cTensor
		bo              *cTensor
		q_norm          *cTensor
		k_norm          *cTensor
		cos             *cTensor
		sin             *cTensor
		y               *cTensor
		saved           unsafe.Pointer
		saved_bytes     uint64
		workspace       unsafe.Pointer
		workspace_bytes uint64
		stream          unsafe.Pointer
	}
	cLayerGrads struct {
		struct_size uint32
		reserved    int32
		dy          *cTensor
		dx          *cTensor
		dwq         *cTensor
		dwk         *cTensor
		dwv         *cTensor
		dwo         *cTensor
		dbq         *cTensor
		dbk         *cTensor
		dbv         *cTensor
		dbo         *cTensor
		dq_norm     *cTensor
		dk_norm     *cTensor
	}
	cGDNArgs struct {
		struct_size     uint32
		reserved        int32
		q               *cTensor
		k               *cTensor
		v               *cTensor
		g               *cTensor
		beta            *cTensor
		state_in        *cTensor
		out             *cTensor
		state_out       *cTensor
		saved           unsafe.Pointer
		saved_bytes     uint64
		workspace       unsafe.Pointer
		workspace_bytes uint64
		stream          unsafe.Pointer
	}
	cGDNGrads struct {
		struct_size uint32
		reserved    int32
		dout        *cTensor
		dstate_out  *cTensor
		dq          *cTensor
		dk          *cTensor
		dv          *cTensor
		dg          *cTensor
		dbeta       *cTensor
		dstate_in   *cTensor
	}
	cLocalCall struct {
		struct_size uint32
		backward    int32
		head_lo     int64
		head_hi     int64
		kv_head_lo  int64
		kv_head_hi  int64
		q           *cTensor
		k           *cTensor
		v           *cTensor
		out         *cTensor
		dout        *cTensor
		dq          *cTensor
		dk          *cTensor
		dv          *cTensor
		stream      unsafe.Pointer
	}
)

// layouts are the structs as the compiler sees the header, and as they are above. A test compares
// every field's name, place and kind.
var layouts = [...]struct {
	name   string
	c, own reflect.Type
}{
	{"ulysses_tensor", reflect.TypeFor[C.ulysses_tensor](), reflect.TypeFor[cTensor]()},
	{"ulysses_options", reflect.TypeFor[C.ulysses_options](), reflect.TypeFor[cOptions]()},
	{"ulysses_host_comm", reflect.TypeFor[C.ulysses_host_comm](), reflect.TypeFor[cHostComm]()},
	{"ulysses_context_info", reflect.TypeFor[C.ulysses_context_info](), reflect.TypeFor[cContextInfo]()},
	{"ulysses_attention_desc", reflect.TypeFor[C.ulysses_attention_desc](), reflect.TypeFor[cAttention]()},
	{"ulysses_batch_desc", reflect.TypeFor[C.ulysses_batch_desc](), reflect.TypeFor[cBatch]()},
	{"ulysses_batch_info", reflect.TypeFor[C.ulysses_batch_info](), reflect.TypeFor[cBatchInfo]()},
	{"ulysses_sizes", reflect.TypeFor[C.ulysses_sizes](), reflect.TypeFor[cSizes]()},
	{"ulysses_reshard_args", reflect.TypeFor[C.ulysses_reshard_args](), reflect.TypeFor[cReshard]()},
	{"ulysses_halo_args", reflect.TypeFor[C.ulysses_halo_args](), reflect.TypeFor[cHalo]()},
	{"ulysses_attention_args", reflect.TypeFor[C.ulysses_attention_args](), reflect.TypeFor[cArgs]()},
	{"ulysses_attention_grads", reflect.TypeFor[C.ulysses_attention_grads](), reflect.TypeFor[cGrads]()},
	{"ulysses_attention_layer_args", reflect.TypeFor[C.ulysses_attention_layer_args](), reflect.TypeFor[cLayer]()},
	{"ulysses_attention_layer_grads", reflect.TypeFor[C.ulysses_attention_layer_grads](), reflect.TypeFor[cLayerGrads]()},
	{"ulysses_gdn_desc", reflect.TypeFor[C.ulysses_gdn_desc](), reflect.TypeFor[cGDN]()},
	{"ulysses_gdn_args", reflect.TypeFor[C.ulysses_gdn_args](), reflect.TypeFor[cGDNArgs]()},
	{"ulysses_gdn_grads", reflect.TypeFor[C.ulysses_gdn_grads](), reflect.TypeFor[cGDNGrads]()},
	{"ulysses_local_call", reflect.TypeFor[C.ulysses_local_call](), reflect.TypeFor[cLocalCall]()},
}

// Flags of descriptions.
const (
	flagCausal, flagWindow, flagCross           = C.ULYSSES_CAUSAL, C.ULYSSES_WINDOW, C.ULYSSES_CROSS
	flagSinks, flagAlibi, flagBlockMask         = C.ULYSSES_SINKS, C.ULYSSES_ALIBI, C.ULYSSES_BLOCK_MASK
	flagDeterministic, flagSaveLess             = C.ULYSSES_DETERMINISTIC, C.ULYSSES_SAVE_LESS
	flagNoBackward, flagZigzag                  = C.ULYSSES_NO_BACKWARD, C.ULYSSES_ZIGZAG
	flagOwnWorkspaces, flagNoAgreement          = C.ULYSSES_OWN_WORKSPACES, C.ULYSSES_NO_AGREEMENT
	flagL2Norm, flagStates                      = C.ULYSSES_QK_L2NORM, C.ULYSSES_STATES
	gdnAuto, gdnHeads, gdnState                 = C.ULYSSES_GDN_AUTO, C.ULYSSES_GDN_HEADS, C.ULYSSES_GDN_STATE
	typeF32, typeBF16, typeF16, typeI32, typeU8 = C.ULYSSES_F32, C.ULYSSES_BF16, C.ULYSSES_F16, C.ULYSSES_I32, C.ULYSSES_U8
)
