package main

import (
	"fmt"
	"maps"
	"os"
	"runtime/pprof"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
)

// onRanks runs f on n ranks, which are goroutines with a context each. If a rank does not return,
// the test fails and prints the goroutines.
func onRanks(t *testing.T, n int, flags int32, f func(rank int, ctx uintptr)) {
	t.Helper()
	comms, done := comm.Local(n), make(chan error, n)
	for rank := range n {
		go func() {
			done <- guarded(func() error {
				var ctx uintptr
				o := cOptions{struct_size: uint32(unsafe.Sizeof(cOptions{})), threads: 1, flags: flags}
				if err := newOnComm("onRanks", comms[rank], true, p(&o), p(&ctx)); err != nil {
					return err
				}
				f(rank, ctx)
				return nil
			})
		}()
	}
	limit := time.After(time.Minute) // the calls need less than a second
	for range n {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-limit:
			pprof.Lookup("goroutine").WriteTo(os.Stderr, 1)
			t.Fatal("a rank waits for a rank that has left the call")
		}
	}
}

// collectiveCall is a collective function: a valid call on this rank, and calls with one invalid
// argument, by name.
type collectiveCall struct {
	name    string
	valid   func() error
	invalid map[string]func() error
}

// collectiveCalls allocates the arguments of a rank's calls and returns all collective functions on
// a context that have no callback.
func collectiveCalls(t *testing.T, ctx uintptr) []collectiveCall {
	const b, s, hq, hkv, d, hidden = 1, 9, 4, 2, 8, 12
	desc := cAttentionDesc{struct_size: uint32(unsafe.Sizeof(cAttentionDesc{})), dtype: typeF32, flags: flagCausal, heads: hq, kv_heads: hkv, head_dim: d}
	rule := cGDNDesc{struct_size: uint32(unsafe.Sizeof(cGDNDesc{})), dtype: typeF32, flags: flagStates, strategy: gdnState, qk_heads: hkv, v_heads: hq, qk_dim: d, v_dim: d}
	lengths := cBatchDesc{struct_size: uint32(unsafe.Sizeof(cBatchDesc{})), batch: b, seq: s}
	info := cBatchInfo{struct_size: uint32(unsafe.Sizeof(cBatchInfo{}))}
	size := cSizes{struct_size: uint32(unsafe.Sizeof(cSizes{}))}
	var plan, states, heads, batch, foreign, alone uintptr
	must(t, newPlan(ctx, p(&desc), p(&plan)))
	must(t, newGDNPlan(ctx, p(&rule), p(&states)))
	rule.strategy = gdnHeads
	must(t, newGDNPlan(ctx, p(&rule), p(&heads)))
	must(t, newBatch(ctx, p(&lengths), p(&batch)))
	must(t, batchQuery(batch, p(&info)))
	o := cOptions{struct_size: uint32(unsafe.Sizeof(cOptions{})), threads: 1}
	must(t, newLocal(p(&o), p(&alone)))
	must(t, newBatch(alone, p(&lengths), p(&foreign)))
	n := info.rows
	q := func() *cTensor { return tensorOf(b, n, hq, d) }
	k := func() *cTensor { return tensorOf(b, n, hkv, d) }
	x := func() *cTensor { return tensorOf(b, n, hidden) }

	a := cAttentionArgs{struct_size: uint32(unsafe.Sizeof(cAttentionArgs{})), q: q(), k: k(), v: k(), out: q()}
	must(t, planSizes(plan, batch, p(&size)))
	headLo, headHi, sharedLo, sharedHi := size.head_lo, size.head_hi, size.shared_lo, size.shared_hi
	a.saved, a.saved_bytes = aligned(size.saved), size.saved
	g := cAttentionGrads{struct_size: uint32(unsafe.Sizeof(cAttentionGrads{})), dout: q(), dq: q(), dk: k(), dv: k()}
	layer := cAttentionLayerArgs{struct_size: uint32(unsafe.Sizeof(cAttentionLayerArgs{})), hidden: hidden, x: x(), wq: tensorOf(hq*d, hidden), wk: tensorOf(hkv*d, hidden), wv: tensorOf(hkv*d, hidden),
		wo: tensorOf(hidden, hq*d), y: x()}
	must(t, attentionLayerSizes(plan, batch, p(&layer), p(&size)))
	layer.saved, layer.saved_bytes = aligned(size.saved), size.saved
	layerGrads := cAttentionLayerGrads{struct_size: uint32(unsafe.Sizeof(cAttentionLayerGrads{})), dy: x(), dx: x(), dwq: tensorOf(hq*d, hidden)}
	delta := cGDNArgs{struct_size: uint32(unsafe.Sizeof(cGDNArgs{})), q: k(), k: k(), v: q(), g: tensorOf(b, n, hq), beta: tensorOf(b, n, hq), out: q()}
	deltaGrads := cGDNGrads{struct_size: uint32(unsafe.Sizeof(cGDNGrads{})), dout: q(), dq: k(), dk: k(), dv: q(), dg: tensorOf(b, n, hq), dbeta: tensorOf(b, n, hq)}
	deltas := [2]cGDNArgs{delta, delta}
	for i, rule := range []uintptr{states, heads} {
		must(t, planSizes(rule, batch, p(&size)))
		deltas[i].saved, deltas[i].saved_bytes = aligned(size.saved), size.saved
	}
	ins, outs := [2]*cTensor{q(), k()}, [2]*cTensor{tensorOf(b, s, headHi-headLo, d), tensorOf(b, s, sharedHi-sharedLo, d)}
	shared := [2]int32{0, 1}
	there := cReshardArgs{struct_size: uint32(unsafe.Sizeof(cReshardArgs{})), n: 2, in: &ins[0], out: &outs[0], shared: &shared[0]}
	back := there
	back.in, back.out, back.sum_copies = &outs[0], &ins[0], 1
	halo := cHaloArgs{struct_size: uint32(unsafe.Sizeof(cHaloArgs{})), n: 3, x: x(), halo: tensorOf(b, 3, hidden)}
	sum, count := 1.0, int64(1)
	wait := func(start func(q *uintptr) error) error {
		var request uintptr
		if err := start(&request); err != nil {
			return err
		}
		return requestWait(request)
	}
	unaligned := func(t *cTensor) *cTensor { y := *t; y.byte_offset = 2; return &y }
	asBytes := func(t *cTensor) *cTensor { y := *t; y.code, y.bits = 1, 8; return &y }
	withAxes := func(t *cTensor, ndim int32) *cTensor { y := *t; y.ndim = ndim; return &y }
	onGPU := func(t *cTensor) *cTensor { y := *t; y.device = onCUDA; return &y }
	strided := func(t *cTensor) *cTensor { y := *t; z := [4]int64{0, 0, 0, 1}; y.strides = &z[0]; return &y }
	forward := func(a cAttentionArgs) func() error {
		return func() error { return attentionForward(plan, batch, p(&a)) }
	}
	with := func(f func(a *cAttentionArgs)) func() error { c := a; f(&c); return forward(c) }
	backward := func(f func(a *cAttentionArgs, g *cAttentionGrads)) func() error {
		c, e := a, g
		f(&c, &e)
		return func() error { return attentionBackward(plan, batch, p(&c), p(&e)) }
	}
	layerCalls := func(f func(a *cAttentionLayerArgs)) func() error {
		c := layer
		f(&c)
		return func() error { return attentionLayerForward(plan, batch, p(&c)) }
	}
	layerBackwardCalls := func(f func(a *cAttentionLayerArgs, g *cAttentionLayerGrads)) func() error {
		c, e := layer, layerGrads
		f(&c, &e)
		return func() error { return attentionLayerBackward(plan, batch, p(&c), p(&e)) }
	}
	reshardCalls := func(r cReshardArgs, to bool, f func(r *cReshardArgs)) func() error {
		f(&r)
		return func() error { return reshard(plan, batch, p(&r), to) }
	}
	startCalls := func(r cReshardArgs, to bool, f func(r *cReshardArgs)) func() error {
		f(&r)
		return func() error {
			return wait(func(q *uintptr) error { return reshardStart(plan, batch, p(&r), to, p(q)) })
		}
	}
	haloCalls := func(forward bool, f func(a *cHaloArgs)) func() error {
		c := halo
		f(&c)
		return func() error { return callHalo(haloName(forward), ctx, batch, p(&c), forward) }
	}
	gdnCalls := func(i int, f func(a *cGDNArgs)) func() error {
		c := deltas[i]
		f(&c)
		return func() error { return gdnForward([]uintptr{states, heads}[i], batch, p(&c)) }
	}
	gdnBackwardCalls := func(i int, f func(a *cGDNArgs, g *cGDNGrads)) func() error {
		c, e := deltas[i], deltaGrads
		f(&c, &e)
		return func() error { return gdnBackward([]uintptr{states, heads}[i], batch, p(&c), p(&e)) }
	}
	planCalls := func(f func(d *cAttentionDesc)) func() error {
		c := desc
		f(&c)
		return func() error { var made uintptr; return newPlan(ctx, p(&c), p(&made)) }
	}
	wild := uintptr(1 << 20)
	unreadable := *(*unsafe.Pointer)(p(&wild))
	list := []collectiveCall{
		{"ulysses_attention_forward", forward(a), map[string]func() error{
			"plan is NULL":                 func() error { return attentionForward(0, batch, p(&a)) },
			"batch is NULL":                func() error { return attentionForward(plan, 0, p(&a)) },
			"batch of another context":     func() error { return attentionForward(plan, foreign, p(&a)) },
			"plan of the gated delta rule": func() error { return attentionForward(heads, batch, p(&a)) },
			"args is NULL":                 func() error { return attentionForward(plan, batch, nil) },
			"args is unreadable":           func() error { return attentionForward(plan, batch, unreadable) },
			"small workspace":              with(func(a *cAttentionArgs) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			"unaligned workspace":          with(func(a *cAttentionArgs) { a.workspace, a.workspace_bytes = unsafe.Add(aligned(1<<20), 4), 1<<20-4 }),
			"small saved":                  with(func(a *cAttentionArgs) { a.saved_bytes -= 8 }),
			"unaligned saved":              with(func(a *cAttentionArgs) { a.saved = unsafe.Add(a.saved, 8) }),
			"q is NULL":                    with(func(a *cAttentionArgs) { a.q = nil }),
			"type":                         with(func(a *cAttentionArgs) { a.k = asBytes(a.k) }),
			"strides":                      with(func(a *cAttentionArgs) { a.v = strided(a.v) }),
			"axes":                         with(func(a *cAttentionArgs) { a.out = withAxes(a.out, 2) }),
			"tensor on a GPU":              with(func(a *cAttentionArgs) { a.q = onGPU(a.q) }),
			"unaligned data":               with(func(a *cAttentionArgs) { a.q = unaligned(a.q) }),
			"overlap":                      with(func(a *cAttentionArgs) { a.out = a.q }),
			"sinks":                        with(func(a *cAttentionArgs) { a.sinks = a.q }),
			"lse on one rank":              with(func(a *cAttentionArgs) { a.lse = tensorOf(b, n, hq) }),
		}},
		{"ulysses_attention_backward", backward(func(*cAttentionArgs, *cAttentionGrads) {}), map[string]func() error{
			"grads is NULL":   func() error { return attentionBackward(plan, batch, p(&a), nil) },
			"saved is NULL":   backward(func(a *cAttentionArgs, g *cAttentionGrads) { a.saved, a.saved_bytes = nil, 0 }),
			"dq is NULL":      backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.dq = nil }),
			"small workspace": backward(func(a *cAttentionArgs, g *cAttentionGrads) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			"dq over dk":      backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.dk = g.dq }),
			"reserved":        backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.reserved = 1 }),
		}},
		{"ulysses_attention_layer_forward", layerCalls(func(*cAttentionLayerArgs) {}), map[string]func() error{
			"wq is NULL":            layerCalls(func(a *cAttentionLayerArgs) { a.wq = nil }),
			"q_norm without k_norm": layerCalls(func(a *cAttentionLayerArgs) { a.q_norm = tensorOf(d) }),
			"shape of y":            layerCalls(func(a *cAttentionLayerArgs) { a.y = a.wq }),
			"small workspace":       layerCalls(func(a *cAttentionLayerArgs) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			"hidden":                layerCalls(func(a *cAttentionLayerArgs) { a.hidden = 0 }),
		}},
		{"ulysses_attention_layer_backward", layerBackwardCalls(func(*cAttentionLayerArgs, *cAttentionLayerGrads) {}), map[string]func() error{
			"dy is NULL":                 layerBackwardCalls(func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) { g.dy = nil }),
			"gradient of a missing bias": layerBackwardCalls(func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) { g.dbq = tensorOf(hq * d) }),
			"saved is NULL":              layerBackwardCalls(func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) { a.saved, a.saved_bytes = nil, 0 }),
		}},
		{"ulysses_seq_to_heads", reshardCalls(there, true, func(*cReshardArgs) {}), map[string]func() error{
			"n":                    reshardCalls(there, true, func(r *cReshardArgs) { r.n = 0 }),
			"n on one rank":        reshardCalls(there, true, func(r *cReshardArgs) { r.n = 1 }),
			"shared":               reshardCalls(there, true, func(r *cReshardArgs) { r.shared = nil }),
			"small workspace":      reshardCalls(there, true, func(r *cReshardArgs) { r.workspace, r.workspace_bytes = aligned(64), 8 }),
			"in and out exchanged": reshardCalls(there, true, func(r *cReshardArgs) { r.in, r.out = r.out, r.in }),
		}},
		{"ulysses_heads_to_seq", reshardCalls(back, false, func(*cReshardArgs) {}), map[string]func() error{
			"sum_copies": reshardCalls(back, false, func(r *cReshardArgs) { r.sum_copies = 0 }),
			"in is NULL": reshardCalls(back, false, func(r *cReshardArgs) { r.in = nil }),
		}},
		{"ulysses_seq_to_heads_start", startCalls(there, true, func(*cReshardArgs) {}), map[string]func() error{
			"request is NULL": func() error { return reshardStart(plan, batch, p(&there), true, nil) },
			"small workspace": startCalls(there, true, func(r *cReshardArgs) { r.workspace, r.workspace_bytes = aligned(64), 8 }),
			"sum_copies":      startCalls(there, true, func(r *cReshardArgs) { r.sum_copies = 1 }),
		}},
		{"ulysses_heads_to_seq_start", startCalls(back, false, func(*cReshardArgs) {}), map[string]func() error{
			"out is NULL": startCalls(back, false, func(r *cReshardArgs) { r.out = nil }),
		}},
		{"ulysses_halo_forward", haloCalls(true, func(*cHaloArgs) {}), map[string]func() error{
			"batch is NULL":   func() error { return callHalo("ulysses_halo_forward", ctx, 0, p(&halo), true) },
			"n":               haloCalls(true, func(a *cHaloArgs) { a.n = 0 }),
			"n on one rank":   haloCalls(true, func(a *cHaloArgs) { a.n, a.halo = 2, tensorOf(b, 2, hidden) }),
			"small workspace": haloCalls(true, func(a *cHaloArgs) { a.workspace, a.workspace_bytes = aligned(64), 4 }),
			"halo is NULL":    haloCalls(true, func(a *cHaloArgs) { a.halo = nil }),
		}},
		{"ulysses_halo_backward", haloCalls(false, func(*cHaloArgs) {}), map[string]func() error{
			"x is NULL": haloCalls(false, func(a *cHaloArgs) { a.x = nil }),
		}},
		{"ulysses_loss_reduce", func() error { sum, count = 1, 1; return lossReduce(ctx, p(&sum), p(&count), nil) }, map[string]func() error{
			"sum is NULL": func() error { return lossReduce(ctx, nil, p(&count), nil) },
			"count":       func() error { c := int64(-1); return lossReduce(ctx, p(&sum), p(&c), nil) },
		}},
		{"ulysses_attention_plan", planCalls(func(*cAttentionDesc) {}), map[string]func() error{
			"desc is NULL": func() error { var made uintptr; return newPlan(ctx, nil, p(&made)) },
			"out is NULL":  func() error { return newPlan(ctx, p(&desc), nil) },
			"heads":        planCalls(func(d *cAttentionDesc) { d.heads = 0 }),
			"head_dim":     planCalls(func(d *cAttentionDesc) { d.head_dim++ }),
			"kv_heads":     planCalls(func(d *cAttentionDesc) { d.kv_heads = 3 }),
		}},
		{"ulysses_gdn_plan", func() error { var made uintptr; return newGDNPlan(ctx, p(&rule), p(&made)) }, map[string]func() error{
			"chunk":   func() error { c := rule; c.chunk = 3; var made uintptr; return newGDNPlan(ctx, p(&c), p(&made)) },
			"v_heads": func() error { c := rule; c.v_heads *= 2; var made uintptr; return newGDNPlan(ctx, p(&c), p(&made)) },
		}},
		{"ulysses_batch_create", func() error { var made uintptr; return newBatch(ctx, p(&lengths), p(&made)) }, map[string]func() error{
			"desc is NULL": func() error { var made uintptr; return newBatch(ctx, nil, p(&made)) },
			"seq":          func() error { c := lengths; c.seq++; var made uintptr; return newBatch(ctx, p(&c), p(&made)) },
			"docs":         func() error { c := lengths; c.docs = 2; var made uintptr; return newBatch(ctx, p(&c), p(&made)) },
		}},
	}
	for i, name := range []string{"ulysses_gdn_forward", "ulysses_gdn_backward"} {
		for j := range deltas {
			e := collectiveCall{name, gdnCalls(j, func(*cGDNArgs) {}), map[string]func() error{
				"g is NULL":             gdnCalls(j, func(a *cGDNArgs) { a.g = nil }),
				"plan of attention":     func() error { return gdnForward(plan, batch, p(&deltas[j])) },
				"state_out on one rank": gdnCalls(j, func(a *cGDNArgs) { a.state_out = tensorOf(b, hq, d, d) }),
				"small workspace":       gdnCalls(j, func(a *cGDNArgs) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			}}
			if i == 1 {
				e = collectiveCall{name, gdnBackwardCalls(j, func(*cGDNArgs, *cGDNGrads) {}), map[string]func() error{
					"dg is NULL":    gdnBackwardCalls(j, func(a *cGDNArgs, g *cGDNGrads) { g.dg = nil }),
					"saved is NULL": gdnBackwardCalls(j, func(a *cGDNArgs, g *cGDNGrads) { a.saved, a.saved_bytes = nil, 0 }),
				}}
			}
			list = append(list, e)
		}
	}
	return list
}

// One rank calls a collective function with an invalid argument, and the other with valid ones. All
// ranks return the same status, the message names the rank, and the context accepts the next call.
// testdata/agree.c tests the functions with a callback.
func TestRanksAgreeOnRefusals(t *testing.T) {
	const ranks = 2
	results := make(chan error, ranks)
	onRanks(t, ranks, 0, func(rank int, ctx uintptr) {
		list := collectiveCalls(t, ctx)
		for i := range list {
			e := &list[i]
			must(t, guarded(e.valid))
			for _, fault := range sorted(e.invalid) {
				for at := range ranks {
					call := e.valid
					if rank == at {
						call = e.invalid[fault]
					}
					results <- guarded(call)
					if rank == 0 {
						checkRefusals(t, fmt.Sprintf("%s, %s, on rank %d", e.name, fault, at), at, <-results, <-results)
					}
					must(t, lossReduceOf(ctx)) // the other rank waits until rank 0 has checked
					must(t, guarded(e.valid))
				}
			}
		}
	})
}

// checkRefusals checks the results of both ranks for an invalid argument on rank `at`.
func checkRefusals(t *testing.T, what string, at int, x, y error) {
	if x == nil || y == nil || status.Of(x) != status.Of(y) {
		t.Errorf("%s: the ranks return %v and %v, want one status", what, x, y)
		return
	}
	for _, err := range []error{x, y} {
		if text := err.Error(); !strings.Contains(text, fmt.Sprint("rank ", at)) {
			t.Errorf("%s: the message does not name the rank: %s", what, text)
		}
	}
}

func lossReduceOf(ctx uintptr) error {
	sum, count := 1.0, int64(1)
	return lossReduce(ctx, p(&sum), p(&count), nil)
}

// If ranks call different functions, the error names the functions.
func TestRanksAgreeOnTheFunction(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		list := collectiveCalls(t, ctx)
		err := guarded(list[rank*4].valid) // attention on rank 0, a reshard on rank 1
		refused(t, "two functions", status.InvalidArgument, err)
		if err != nil && !strings.Contains(err.Error(), "ulysses_attention_forward on rank 0") {
			t.Error(err)
		}
		must(t, lossReduceOf(ctx))
	})
}

// With ULYSSES_NO_AGREEMENT, only the rank with the invalid argument returns an error.
func TestNoAgreement(t *testing.T) {
	onRanks(t, 2, flagNoAgreement, func(rank int, ctx uintptr) {
		list := collectiveCalls(t, ctx)
		must(t, guarded(list[0].valid))
		if rank == 1 {
			refused(t, "q is NULL", status.InvalidArgument, guarded(list[0].invalid["q is NULL"]))
		}
		must(t, guarded(list[0].valid))
	})
}

// sorted returns the names of the invalid arguments, in the same order on all ranks.
func sorted(bad map[string]func() error) []string { return slices.Sorted(maps.Keys(bad)) }
