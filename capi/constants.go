package main

/*
#include "ulysses.h"
*/
import "C"

// The constants of ulysses.h by short names.
const (
	flagCausal, flagWindow, flagCross   = C.ULYSSES_CAUSAL, C.ULYSSES_WINDOW, C.ULYSSES_CROSS
	flagSinks, flagAlibi, flagBlockMask = C.ULYSSES_SINKS, C.ULYSSES_ALIBI, C.ULYSSES_BLOCK_MASK
	flagDeterministic, flagSaveLess     = C.ULYSSES_DETERMINISTIC, C.ULYSSES_SAVE_LESS
	flagNoBackward, flagZigzag          = C.ULYSSES_NO_BACKWARD, C.ULYSSES_ZIGZAG
	flagOwnWorkspaces, flagNoAgreement  = C.ULYSSES_OWN_WORKSPACES, C.ULYSSES_NO_AGREEMENT
	flagL2Norm, flagStates              = C.ULYSSES_QK_L2NORM, C.ULYSSES_STATES
	flagGatherKeys, flagOverlap         = C.ULYSSES_GATHER_KEYS, C.ULYSSES_OVERLAP
	flagGatedNorm                       = C.ULYSSES_GATED_NORM
	tensorQ, tensorK, tensorV           = C.ULYSSES_TENSOR_Q, C.ULYSSES_TENSOR_K, C.ULYSSES_TENSOR_V
	gdnAuto, gdnHeads, gdnState         = C.ULYSSES_GDN_AUTO, C.ULYSSES_GDN_HEADS, C.ULYSSES_GDN_STATE
	typeF32, typeBF16, typeF16          = C.ULYSSES_F32, C.ULYSSES_BF16, C.ULYSSES_F16
	typeI32, typeI64, typeU8            = C.ULYSSES_I32, C.ULYSSES_I64, C.ULYSSES_U8
	onCPU, onCUDA                       = C.ULYSSES_CPU, C.ULYSSES_CUDA
)
