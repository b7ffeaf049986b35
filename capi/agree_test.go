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

// onRanks runs f on n goroutine ranks of one context each, under a watchdog. If a rank waits
// forever, the test names the call.
func onRanks(t *testing.T, n int, flags int32, f func(rank int, ctx uintptr)) {
	t.Helper()
	comms, done := comm.Local(n), make(chan error, n)
	for rank := range n {
		go func() {
			done <- guarded(func() error {
				var ctx uintptr
				o := cOptions{struct_size: uint32(unsafe.Sizeof(cOptions{})), threads: 1, flags: flags}
				if err := newOnComm("a rank", comms[rank], true, p(&o), p(&ctx)); err != nil {
					return err
				}
				f(rank, ctx)
				return nil
			})
		}()
	}
	limit := time.After(time.Minute) // a second is enough
	for range n {
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-limit:
			pprof.Lookup("goroutine").WriteTo(os.Stderr, 1)
			t.Fatal("a rank waits for another that has left")
		}
	}
}

// entry is one collective function: good calls it correctly on this rank, and each call of bad has
// one fault.
type entry struct {
	name string
	good func() error
	bad  map[string]func() error
}

// entries allocates the arguments of a rank's calls and returns all collective functions of the
// header that work on a context.
func entries(t *testing.T, ctx uintptr) []entry {
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
	odd := func(t *cTensor) *cTensor { y := *t; y.byte_offset = 2; return &y }
	bytes := func(t *cTensor) *cTensor { y := *t; y.code, y.bits = 1, 8; return &y }
	on := func(t *cTensor, ndim int32) *cTensor { y := *t; y.ndim = ndim; return &y }
	gpu := func(t *cTensor) *cTensor { y := *t; y.device = onCUDA; return &y }
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
	layered := func(f func(a *cAttentionLayerArgs)) func() error {
		c := layer
		f(&c)
		return func() error { return attentionLayerForward(plan, batch, p(&c)) }
	}
	layerBack := func(f func(a *cAttentionLayerArgs, g *cAttentionLayerGrads)) func() error {
		c, e := layer, layerGrads
		f(&c, &e)
		return func() error { return attentionLayerBackward(plan, batch, p(&c), p(&e)) }
	}
	resharded := func(r cReshardArgs, to bool, f func(r *cReshardArgs)) func() error {
		f(&r)
		return func() error { return reshard(plan, batch, p(&r), to) }
	}
	started := func(r cReshardArgs, to bool, f func(r *cReshardArgs)) func() error {
		f(&r)
		return func() error {
			return wait(func(q *uintptr) error { return reshardStart(plan, batch, p(&r), to, p(q)) })
		}
	}
	haloed := func(forward bool, f func(a *cHaloArgs)) func() error {
		c := halo
		f(&c)
		return func() error { return callHalo(haloName(forward), ctx, batch, p(&c), forward) }
	}
	ruled := func(i int, f func(a *cGDNArgs)) func() error {
		c := deltas[i]
		f(&c)
		return func() error { return gdnForward([]uintptr{states, heads}[i], batch, p(&c)) }
	}
	ruleBack := func(i int, f func(a *cGDNArgs, g *cGDNGrads)) func() error {
		c, e := deltas[i], deltaGrads
		f(&c, &e)
		return func() error { return gdnBackward([]uintptr{states, heads}[i], batch, p(&c), p(&e)) }
	}
	planned := func(f func(d *cAttentionDesc)) func() error {
		c := desc
		f(&c)
		return func() error { var made uintptr; return newPlan(ctx, p(&c), p(&made)) }
	}
	wild := uintptr(1 << 20)
	unreadable := *(*unsafe.Pointer)(p(&wild))
	list := []entry{
		{"ulysses_attention_forward", forward(a), map[string]func() error{
			"no plan":           func() error { return attentionForward(0, batch, p(&a)) },
			"no batch":          func() error { return attentionForward(plan, 0, p(&a)) },
			"a foreign batch":   func() error { return attentionForward(plan, foreign, p(&a)) },
			"a plan of another": func() error { return attentionForward(heads, batch, p(&a)) },
			"no arguments":      func() error { return attentionForward(plan, batch, nil) },
			"unreadable":        func() error { return attentionForward(plan, batch, unreadable) },
			"small workspace":   with(func(a *cAttentionArgs) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			"odd workspace":     with(func(a *cAttentionArgs) { a.workspace, a.workspace_bytes = unsafe.Add(aligned(1<<20), 4), 1<<20-4 }),
			"small saved":       with(func(a *cAttentionArgs) { a.saved_bytes -= 8 }),
			"odd saved":         with(func(a *cAttentionArgs) { a.saved = unsafe.Add(a.saved, 8) }),
			"no q":              with(func(a *cAttentionArgs) { a.q = nil }),
			"another type":      with(func(a *cAttentionArgs) { a.k = bytes(a.k) }),
			"strides":           with(func(a *cAttentionArgs) { a.v = strided(a.v) }),
			"axes":              with(func(a *cAttentionArgs) { a.out = on(a.out, 2) }),
			"on a GPU":          with(func(a *cAttentionArgs) { a.q = gpu(a.q) }),
			"an odd address":    with(func(a *cAttentionArgs) { a.q = odd(a.q) }),
			"overlap":           with(func(a *cAttentionArgs) { a.out = a.q }),
			"sinks":             with(func(a *cAttentionArgs) { a.sinks = a.q }),
			"one lse":           with(func(a *cAttentionArgs) { a.lse = tensorOf(b, n, hq) }),
		}},
		{"ulysses_attention_backward", backward(func(*cAttentionArgs, *cAttentionGrads) {}), map[string]func() error{
			"no gradients":    func() error { return attentionBackward(plan, batch, p(&a), nil) },
			"nothing saved":   backward(func(a *cAttentionArgs, g *cAttentionGrads) { a.saved, a.saved_bytes = nil, 0 }),
			"no dq":           backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.dq = nil }),
			"small workspace": backward(func(a *cAttentionArgs, g *cAttentionGrads) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			"dq over dk":      backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.dk = g.dq }),
			"reserved":        backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.reserved = 1 }),
		}},
		{"ulysses_attention_layer_forward", layered(func(*cAttentionLayerArgs) {}), map[string]func() error{
			"no wq":           layered(func(a *cAttentionLayerArgs) { a.wq = nil }),
			"one norm":        layered(func(a *cAttentionLayerArgs) { a.q_norm = tensorOf(d) }),
			"another y":       layered(func(a *cAttentionLayerArgs) { a.y = a.wq }),
			"small workspace": layered(func(a *cAttentionLayerArgs) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			"hidden":          layered(func(a *cAttentionLayerArgs) { a.hidden = 0 }),
		}},
		{"ulysses_attention_layer_backward", layerBack(func(*cAttentionLayerArgs, *cAttentionLayerGrads) {}), map[string]func() error{
			"no dy":         layerBack(func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) { g.dy = nil }),
			"no such bias":  layerBack(func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) { g.dbq = tensorOf(hq * d) }),
			"nothing saved": layerBack(func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) { a.saved, a.saved_bytes = nil, 0 }),
		}},
		{"ulysses_seq_to_heads", resharded(there, true, func(*cReshardArgs) {}), map[string]func() error{
			"n":               resharded(there, true, func(r *cReshardArgs) { r.n = 0 }),
			"one tensor":      resharded(there, true, func(r *cReshardArgs) { r.n = 1 }),
			"shared":          resharded(there, true, func(r *cReshardArgs) { r.shared = nil }),
			"small workspace": resharded(there, true, func(r *cReshardArgs) { r.workspace, r.workspace_bytes = aligned(64), 8 }),
			"in for out":      resharded(there, true, func(r *cReshardArgs) { r.in, r.out = r.out, r.in }),
		}},
		{"ulysses_heads_to_seq", resharded(back, false, func(*cReshardArgs) {}), map[string]func() error{
			"sum_copies": resharded(back, false, func(r *cReshardArgs) { r.sum_copies = 0 }),
			"no in":      resharded(back, false, func(r *cReshardArgs) { r.in = nil }),
		}},
		{"ulysses_seq_to_heads_start", started(there, true, func(*cReshardArgs) {}), map[string]func() error{
			"no request":      func() error { return reshardStart(plan, batch, p(&there), true, nil) },
			"small workspace": started(there, true, func(r *cReshardArgs) { r.workspace, r.workspace_bytes = aligned(64), 8 }),
			"sum_copies":      started(there, true, func(r *cReshardArgs) { r.sum_copies = 1 }),
		}},
		{"ulysses_heads_to_seq_start", started(back, false, func(*cReshardArgs) {}), map[string]func() error{
			"no out": started(back, false, func(r *cReshardArgs) { r.out = nil }),
		}},
		{"ulysses_halo_forward", haloed(true, func(*cHaloArgs) {}), map[string]func() error{
			"no batch":        func() error { return callHalo("ulysses_halo_forward", ctx, 0, p(&halo), true) },
			"n":               haloed(true, func(a *cHaloArgs) { a.n = 0 }),
			"another n":       haloed(true, func(a *cHaloArgs) { a.n, a.halo = 2, tensorOf(b, 2, hidden) }),
			"small workspace": haloed(true, func(a *cHaloArgs) { a.workspace, a.workspace_bytes = aligned(64), 4 }),
			"no halo":         haloed(true, func(a *cHaloArgs) { a.halo = nil }),
		}},
		{"ulysses_halo_backward", haloed(false, func(*cHaloArgs) {}), map[string]func() error{
			"no x": haloed(false, func(a *cHaloArgs) { a.x = nil }),
		}},
		{"ulysses_loss_reduce", func() error { sum, count = 1, 1; return lossReduce(ctx, p(&sum), p(&count), nil) }, map[string]func() error{
			"no sum": func() error { return lossReduce(ctx, nil, p(&count), nil) },
			"count":  func() error { c := int64(-1); return lossReduce(ctx, p(&sum), p(&c), nil) },
		}},
		{"ulysses_attention_plan", planned(func(*cAttentionDesc) {}), map[string]func() error{
			"no description": func() error { var made uintptr; return newPlan(ctx, nil, p(&made)) },
			"no out":         func() error { return newPlan(ctx, p(&desc), nil) },
			"heads":          planned(func(d *cAttentionDesc) { d.heads = 0 }),
			"head_dim":       planned(func(d *cAttentionDesc) { d.head_dim++ }),
			"kv_heads":       planned(func(d *cAttentionDesc) { d.kv_heads = 3 }),
		}},
		{"ulysses_gdn_plan", func() error { var made uintptr; return newGDNPlan(ctx, p(&rule), p(&made)) }, map[string]func() error{
			"chunk":   func() error { c := rule; c.chunk = 3; var made uintptr; return newGDNPlan(ctx, p(&c), p(&made)) },
			"v_heads": func() error { c := rule; c.v_heads *= 2; var made uintptr; return newGDNPlan(ctx, p(&c), p(&made)) },
		}},
		{"ulysses_batch_create", func() error { var made uintptr; return newBatch(ctx, p(&lengths), p(&made)) }, map[string]func() error{
			"no description": func() error { var made uintptr; return newBatch(ctx, nil, p(&made)) },
			"seq":            func() error { c := lengths; c.seq++; var made uintptr; return newBatch(ctx, p(&c), p(&made)) },
			"docs":           func() error { c := lengths; c.docs = 2; var made uintptr; return newBatch(ctx, p(&c), p(&made)) },
		}},
	}
	for i, name := range []string{"ulysses_gdn_forward", "ulysses_gdn_backward"} {
		for j := range deltas {
			e := entry{name, ruled(j, func(*cGDNArgs) {}), map[string]func() error{
				"no g":            ruled(j, func(a *cGDNArgs) { a.g = nil }),
				"a plan of none":  func() error { return gdnForward(plan, batch, p(&deltas[j])) },
				"one state":       ruled(j, func(a *cGDNArgs) { a.state_out = tensorOf(b, hq, d, d) }),
				"small workspace": ruled(j, func(a *cGDNArgs) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			}}
			if i == 1 {
				e = entry{name, ruleBack(j, func(*cGDNArgs, *cGDNGrads) {}), map[string]func() error{
					"no dg":         ruleBack(j, func(a *cGDNArgs, g *cGDNGrads) { g.dg = nil }),
					"nothing saved": ruleBack(j, func(a *cGDNArgs, g *cGDNGrads) { a.saved, a.saved_bytes = nil, 0 }),
				}}
			}
			list = append(list, e)
		}
	}
	return list
}

// Every collective function that is called from Go (testdata/agree.c has those with a callback)
// gets each kind of fault on one rank. All ranks return one status, the text names the rank at
// fault, and the context serves the next call.
func TestRanksAgreeOnRefusals(t *testing.T) {
	const ranks = 2
	tell := make(chan func(), ranks) // errors of all ranks, reported in one place
	verdicts := make(chan [2]any, ranks)
	go func() {
		for f := range tell {
			f()
		}
	}()
	defer close(tell)
	onRanks(t, ranks, 0, func(rank int, ctx uintptr) {
		list := entries(t, ctx)
		for i := range list {
			e := &list[i]
			must(t, guarded(e.good))
			for _, fault := range sorted(e.bad) {
				for at := range ranks {
					call := e.good
					if rank == at {
						call = e.bad[fault]
					}
					err := guarded(call)
					verdicts <- [2]any{rank, err}
					if rank == 0 {
						a, b := <-verdicts, <-verdicts
						checkVerdicts(t, fmt.Sprintf("%s with %s on rank %d", e.name, fault, at), e.name, at, a[1], b[1])
					}
					must(t, lossReduceOf(ctx)) // and wait until rank 0 has checked
					must(t, guarded(e.good))
				}
			}
		}
	})
}

func checkVerdicts(t *testing.T, what, name string, at int, a, b any) {
	x, _ := a.(error)
	y, _ := b.(error)
	if x == nil || y == nil || status.Of(x) != status.Of(y) {
		t.Errorf("%s: %v and %v", what, x, y)
		return
	}
	for _, err := range []error{x, y} {
		if said := err.Error(); !strings.Contains(said, fmt.Sprint("rank ", at)) {
			t.Errorf("%s: the text does not name the rank: %s", what, said)
		}
	}
}

func lossReduceOf(ctx uintptr) error {
	sum, count := 1.0, int64(1)
	return lossReduce(ctx, p(&sum), p(&count), nil)
}

// Ranks that call different functions get an error that names the functions.
func TestRanksAgreeOnTheFunction(t *testing.T) {
	onRanks(t, 2, 0, func(rank int, ctx uintptr) {
		list := entries(t, ctx)
		err := guarded(list[rank*4].good) // attention and a reshard
		refused(t, "two functions", status.InvalidArgument, err)
		if err != nil && !strings.Contains(err.Error(), "ulysses_attention_forward on rank 0") {
			t.Error(err)
		}
		must(t, lossReduceOf(ctx))
	})
}

// With ULYSSES_NO_AGREEMENT only the rank at fault returns the error.
func TestNoAgreement(t *testing.T) {
	onRanks(t, 2, flagNoAgreement, func(rank int, ctx uintptr) {
		list := entries(t, ctx)
		must(t, guarded(list[0].good))
		if rank == 1 {
			refused(t, "no q", status.InvalidArgument, guarded(list[0].bad["no q"]))
		}
		must(t, guarded(list[0].good))
	})
}

// sorted returns the names of faults, in one order on all ranks.
func sorted(bad map[string]func() error) []string { return slices.Sorted(maps.Keys(bad)) }
