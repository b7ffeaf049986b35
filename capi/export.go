package main

/*
#include "ulysses.h"
*/
import "C"

import (
	"encoding/json"
	"strings"
	"unsafe"

	"ulysses/comm"
	"ulysses/cuda"
	"ulysses/internal/notbuilt"
	"ulysses/internal/version"
)

// The functions that gate.c calls. Each runs the body of a call with guarded and writes its error
// to the thread's buffer, t. They return the status.

type handle = C.uintptr_t
type pointer = unsafe.Pointer
type text = *C.char

// uly_register_thread does nothing. The first call of a Go function registers the calling thread
// with the Go runtime; see thread.c.
//
//export uly_register_thread
func uly_register_thread() {}

//export uly_context_create_local
func uly_context_create_local(opts, out pointer, t text) C.int32_t {
	return finish("ulysses_context_create_local", guarded(func() error { return newLocal(opts, out) }), t)
}

//export uly_context_create_mpi
func uly_context_create_mpi(fcomm C.int64_t, opts, out pointer, t text) C.int32_t {
	return finish("ulysses_context_create_mpi", guarded(func() error { return newMPI(int64(fcomm), opts, out) }), t)
}

//export uly_context_create_host
func uly_context_create_host(host, opts, out pointer, t text) C.int32_t {
	return finish("ulysses_context_create_host", guarded(func() error { return newHost(host, opts, out) }), t)
}

//export uly_context_query
func uly_context_query(c handle, out pointer, t text) C.int32_t {
	return finish("ulysses_context_query", guarded(func() error { return contextQuery(uintptr(c), out) }), t)
}

//export uly_context_async_error
func uly_context_async_error(c handle, t text) C.int32_t {
	return finish("ulysses_context_async_error", guarded(func() error { return contextError(uintptr(c)) }), t)
}

//export uly_context_abort
func uly_context_abort(c handle, why C.int32_t, t text) C.int32_t {
	return finish("ulysses_context_abort", guarded(func() error { return contextAbort(uintptr(c), int32(why)) }), t)
}

// destroyNames are the C functions that call uly_destroy.
var destroyNames = map[handleKind]string{contextKind: "ulysses_context_destroy", planKind: "ulysses_plan_destroy",
	batchKind: "ulysses_batch_destroy"}

//export uly_destroy
func uly_destroy(kind C.int32_t, h handle, t text) C.int32_t {
	return finish(destroyNames[handleKind(kind)], guarded(func() error {
		switch handleKind(kind) {
		case contextKind:
			return contextDestroy(uintptr(h))
		case planKind:
			return planDestroy(uintptr(h))
		}
		return batchDestroy(uintptr(h))
	}), t)
}

//export uly_attention_plan
func uly_attention_plan(c handle, desc, out pointer, t text) C.int32_t {
	return finish("ulysses_attention_plan", guarded(func() error { return newPlan(uintptr(c), desc, out) }), t)
}

//export uly_plan_json
func uly_plan_json(p handle, t text) (s *C.char) {
	finish("ulysses_plan_json", guarded(func() (err error) { s, err = planJSON(uintptr(p)); return err }), t)
	return s
}

//export uly_plan_sizes
func uly_plan_sizes(p, b handle, out pointer, t text) C.int32_t {
	return finish("ulysses_plan_sizes", guarded(func() error { return planSizes(uintptr(p), uintptr(b), out) }), t)
}

//export uly_batch_create
func uly_batch_create(c handle, desc, out pointer, t text) C.int32_t {
	return finish("ulysses_batch_create", guarded(func() error { return newBatch(uintptr(c), desc, out) }), t)
}

//export uly_batch_query
func uly_batch_query(b handle, out pointer, t text) C.int32_t {
	return finish("ulysses_batch_query", guarded(func() error { return batchQuery(uintptr(b), out) }), t)
}

//export uly_batch_positions
func uly_batch_positions(b handle, out pointer, t text) C.int32_t {
	return finish("ulysses_batch_positions", guarded(func() error { return batchPositions(uintptr(b), out) }), t)
}

//export uly_block_mask
func uly_block_mask(pattern pointer, heads, blocks C.int64_t, mask pointer, t text) C.int32_t {
	return finish("ulysses_block_mask",
		guarded(func() error { return blockMask(pattern, int64(heads), int64(blocks), mask) }), t)
}

//export uly_reshard
func uly_reshard(p, b handle, args pointer, toHeads C.int32_t, t text) C.int32_t {
	return finish(reshardName(toHeads != 0),
		guarded(func() error { return reshard(uintptr(p), uintptr(b), args, toHeads != 0) }), t)
}

//export uly_reshard_start
func uly_reshard_start(p, b handle, args pointer, toHeads C.int32_t, out pointer, t text) C.int32_t {
	return finish(startName(toHeads != 0),
		guarded(func() error { return reshardStart(uintptr(p), uintptr(b), args, toHeads != 0, out) }), t)
}

//export uly_request_wait
func uly_request_wait(r handle, t text) C.int32_t {
	return finish("ulysses_request_wait", guarded(func() error { return requestWait(uintptr(r)) }), t)
}

//export uly_reshard_workspace
func uly_reshard_workspace(p, b handle, args pointer, toHeads C.int32_t, out pointer, t text) C.int32_t {
	return finish("ulysses_reshard_workspace",
		guarded(func() error { return reshardWorkspace(uintptr(p), uintptr(b), args, int32(toHeads), out) }), t)
}

//export uly_halo
func uly_halo(c, b handle, args pointer, forward C.int32_t, t text) C.int32_t {
	op := haloName(forward != 0)
	return finish(op, guarded(func() error { return callHalo(op, uintptr(c), uintptr(b), args, forward != 0) }), t)
}

//export uly_halo_workspace
func uly_halo_workspace(c, b handle, args, out pointer, t text) C.int32_t {
	return finish("ulysses_halo_workspace",
		guarded(func() error { return haloWorkspace(uintptr(c), uintptr(b), args, out) }), t)
}

//export uly_loss_reduce
func uly_loss_reduce(c handle, sum, count, mean pointer, t text) C.int32_t {
	return finish("ulysses_loss_reduce", guarded(func() error { return lossReduce(uintptr(c), sum, count, mean) }), t)
}

//export uly_attention_forward
func uly_attention_forward(p, b handle, args pointer, t text) C.int32_t {
	return finish("ulysses_attention_forward",
		guarded(func() error { return attentionForward(uintptr(p), uintptr(b), args) }), t)
}

//export uly_attention_backward
func uly_attention_backward(p, b handle, args, grads pointer, t text) C.int32_t {
	return finish("ulysses_attention_backward",
		guarded(func() error { return attentionBackward(uintptr(p), uintptr(b), args, grads) }), t)
}

//export uly_forward_start
func uly_forward_start(p, b handle, args, out pointer, t text) C.int32_t {
	return finish("ulysses_attention_forward_start",
		guarded(func() error { return forwardStart(uintptr(p), uintptr(b), args, out) }), t)
}

//export uly_backward_start
func uly_backward_start(p, b handle, args, grads, out pointer, t text) C.int32_t {
	return finish("ulysses_attention_backward_start",
		guarded(func() error { return backwardStart(uintptr(p), uintptr(b), args, grads, out) }), t)
}

//export uly_pass_send
func uly_pass_send(x handle, tensor C.int32_t, t text) C.int32_t {
	return finish("ulysses_pass_send", guarded(func() error { return passSend(uintptr(x), int32(tensor)) }), t)
}

//export uly_pass_attend
func uly_pass_attend(x handle, t text) C.int32_t {
	return finish("ulysses_pass_attend", guarded(func() error { return passAttend(uintptr(x)) }), t)
}

//export uly_pass_wait
func uly_pass_wait(x handle, tensor C.int32_t, t text) C.int32_t {
	return finish("ulysses_pass_wait", guarded(func() error { return passWait(uintptr(x), int32(tensor)) }), t)
}

//export uly_pass_cancel
func uly_pass_cancel(x handle, t text) C.int32_t {
	return finish("ulysses_pass_cancel", guarded(func() error { return passCancel(uintptr(x)) }), t)
}

//export uly_local_forward
func uly_local_forward(p, b handle, args, f pointer, user handle, t text) C.int32_t {
	return finish("ulysses_local_forward",
		guarded(func() error { return localForward(uintptr(p), uintptr(b), args, f, uintptr(user)) }), t)
}

//export uly_local_backward
func uly_local_backward(p, b handle, args, grads, f pointer, user handle, t text) C.int32_t {
	return finish("ulysses_local_backward",
		guarded(func() error { return localBackward(uintptr(p), uintptr(b), args, grads, f, uintptr(user)) }), t)
}

//export uly_local_sizes
func uly_local_sizes(p, b handle, out pointer, t text) C.int32_t {
	return finish("ulysses_local_sizes", guarded(func() error { return localSizesQuery(uintptr(p), uintptr(b), out) }),
		t)
}

//export uly_attention_layer_sizes
func uly_attention_layer_sizes(p, b handle, args, out pointer, t text) C.int32_t {
	return finish("ulysses_attention_layer_sizes",
		guarded(func() error { return attentionLayerSizes(uintptr(p), uintptr(b), args, out) }), t)
}

//export uly_attention_layer_forward
func uly_attention_layer_forward(p, b handle, args pointer, t text) C.int32_t {
	return finish("ulysses_attention_layer_forward",
		guarded(func() error { return attentionLayerForward(uintptr(p), uintptr(b), args) }), t)
}

//export uly_attention_layer_backward
func uly_attention_layer_backward(p, b handle, args, grads pointer, t text) C.int32_t {
	return finish("ulysses_attention_layer_backward",
		guarded(func() error { return attentionLayerBackward(uintptr(p), uintptr(b), args, grads) }), t)
}

//export uly_gdn_plan
func uly_gdn_plan(c handle, desc, out pointer, t text) C.int32_t {
	return finish("ulysses_gdn_plan", guarded(func() error { return newGDNPlan(uintptr(c), desc, out) }), t)
}

//export uly_gdn_forward
func uly_gdn_forward(p, b handle, args pointer, t text) C.int32_t {
	return finish("ulysses_gdn_forward", guarded(func() error { return gdnForward(uintptr(p), uintptr(b), args) }), t)
}

//export uly_gdn_backward
func uly_gdn_backward(p, b handle, args, grads pointer, t text) C.int32_t {
	return finish("ulysses_gdn_backward",
		guarded(func() error { return gdnBackward(uintptr(p), uintptr(b), args, grads) }), t)
}

//export uly_gdn_layer_sizes
func uly_gdn_layer_sizes(p, b handle, out pointer, t text) C.int32_t {
	return finish("ulysses_gdn_layer_sizes",
		guarded(func() error { return gdnLayerSizes(uintptr(p), uintptr(b), out) }), t)
}

//export uly_gdn_layer_forward
func uly_gdn_layer_forward(p, b handle, args pointer, t text) C.int32_t {
	return finish("ulysses_gdn_layer_forward",
		guarded(func() error { return gdnLayerForward(uintptr(p), uintptr(b), args) }), t)
}

//export uly_gdn_layer_backward
func uly_gdn_layer_backward(p, b handle, args, grads pointer, t text) C.int32_t {
	return finish("ulysses_gdn_layer_backward",
		guarded(func() error { return gdnLayerBackward(uintptr(p), uintptr(b), args, grads) }), t)
}

// devices returns the devices that this library supports or has a plug-in for, the ones on which a
// context can be created, and the reason for each of the others. It looks for the plug-in without
// opening it, because opening starts the driver, which a forked child does not survive.
func devices() (built, usable []string, why map[string]string) {
	built, usable, why = []string{"cpu"}, []string{"cpu"}, map[string]string{}
	path := cuda.Find()
	if path == "" {
		why["cuda"] = "no CUDA plug-in: " + cuda.InstallHint
		return built, usable, why
	}
	if built = append(built, "cuda"); cuda.WhyUnusable(path) == "" {
		usable = append(usable, "cuda")
	} else {
		why["cuda"] = cuda.WhyUnusable(path)
	}
	return built, usable, why
}

// mpiLibrary returns the MPI library in use. The library opens MPI when the host creates the first
// context on an MPI communicator.
func mpiLibrary() string {
	if name := comm.Library(); !strings.HasPrefix(name, "none") {
		return name
	}
	return "none opened"
}

//export uly_build_info
func uly_build_info(out text, room C.int64_t) {
	_ = guarded(func() error {
		built, usable, why := devices()
		b, err := json.Marshal(map[string]any{
			"version": uint32(C.ULYSSES_VERSION), "commit": version.Commit(), "built": built, "devices": usable,
			"unusable": why,
			"cuda":     cuda.Find(), "mpi": mpiLibrary(), "mpi_files": comm.Shims(), "unbuilt": notbuilt.Names()})
		dst := unsafe.Slice((*byte)(unsafe.Pointer(out)), int(room))
		dst[copy(dst[:room-1], b)] = 0
		return err
	})
}
