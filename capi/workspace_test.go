package main

import (
	"strings"
	"testing"
	"unsafe"

	"ulysses/internal/status"
)

// reserved returns the bytes of a context's own workspace.
func reserved(t *testing.T, ctx uintptr) int64 {
	t.Helper()
	c, err := find[context]("test", contextKind, ctx)
	must(t, err)
	if c.ownWorkspace == nil {
		return 0
	}
	return c.ownWorkspace.Bytes()
}

// With ULYSSES_OWN_WORKSPACES a context reserves nothing for a long batch, and refuses NULL by name
// on every call. Any other context reserves the workspace of attention when the batch is made, and
// grows it in the first call that needs more.
func TestWorkspaces(t *testing.T) {
	const s, n, d = 100_000, 8, 64
	desc := cAttentionDesc{struct_size: uint32(unsafe.Sizeof(cAttentionDesc{})), dtype: typeF32, flags: flagCausal,
		heads: n, head_dim: d}
	for _, flags := range []int32{0, flagOwnWorkspaces} {
		o := cOptions{struct_size: uint32(unsafe.Sizeof(cOptions{})), threads: 1, flags: flags}
		var ctx, plan, batch uintptr
		must(t, newLocal(p(&o), p(&ctx)))
		must(t, newPlan(ctx, p(&desc), p(&plan)))
		l := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: 1, seq: s}
		must(t, newBatch(ctx, p(&l), p(&batch)))
		size := cSizes{struct_size: uint32(unsafe.Sizeof(cSizes{}))}
		must(t, planSizes(plan, batch, p(&size)))
		if got := reserved(t, ctx); flags == 0 && got < int64(size.workspace) || flags != 0 && got != 0 ||
			size.workspace < 900e6 {
			t.Errorf("flags %d: %d bytes of workspace are reserved; a call needs %d", flags, got, size.workspace)
		}
		must(t, contextDestroy(ctx))
	}
	t.Run("too large", func(t *testing.T) {
		var ctx, plan uintptr
		must(t, newLocal(nil, p(&ctx)))
		long := desc
		long.max_tokens = 1 << 36 // its workspace is larger than an address space
		err := newPlan(ctx, p(&long), p(&plan))
		refused(t, "a plan of 2^36 tokens", status.OutOfMemory, err)
		if err != nil &&
			!strings.HasSuffix(err.Error(),
				"use more ranks, or set ULYSSES_OWN_WORKSPACES and give each call its workspace") {
			t.Error(err)
		}
		must(t, contextDestroy(ctx))
	})
	for _, flags := range []int32{0, flagOwnWorkspaces} {
		onRanks(t, 2, flags, func(rank int, ctx uintptr) {
			list := collectiveCalls(t, ctx)
			for i := range list {
				e := &list[i]
				err := guarded(e.valid)
				if flags == 0 {
					must(t, err)
					continue
				}
				if strings.HasSuffix(e.name, "_plan") || strings.HasSuffix(e.name, "_create") ||
					strings.HasSuffix(e.name, "loss_reduce") {
					must(t, err)
					continue
				}
				refused(t, e.name+" without a workspace", status.InvalidArgument, err)
				if err != nil &&
					(!strings.Contains(err.Error(),
						"workspace is NULL and the context was created with ULYSSES_OWN_WORKSPACES; give ")) {
					t.Errorf("%s: %v", e.name, err)
				}
			}
			if got := reserved(t, ctx); flags != 0 && got != 0 {
				t.Errorf("%d bytes are reserved with ULYSSES_OWN_WORKSPACES, want 0", got)
			}
		})
	}
}
