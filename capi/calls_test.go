package main

import (
	"testing"
	"unsafe"
)

// The lengths of the calls of rankCalls: one sequence of callSeq tokens, callHeads heads, callKeys
// key heads, callDim features of a head, callHidden features of a token, and callWidth tokens of a
// convolution of callChannels channels.
const callSeq, callHeads, callKeys, callDim, callHidden = 9, 4, 2, 8, 12
const callWidth, callChannels = 3, (2*callKeys + callHeads) * callDim

// rankCalls has the objects and the arguments of the calls that a rank makes in a training step.
// Tests change copies of the arguments. The workspaces are NULL.
type rankCalls struct {
	ctx, plan, batch uintptr
	desc             cAttentionDesc
	rule             cGDNDesc
	lengths          cBatchDesc
	rows             int64 // of this rank
	size             cSizes

	attention      cAttentionArgs
	attentionGrads cAttentionGrads
	layer          cAttentionLayerArgs
	layerGrads     cAttentionLayerGrads
	rules          [2]uintptr // plans of the gated delta rule, by states and by heads
	gdn            [2]cGDNArgs
	gdnGrads       cGDNGrads
	gdnLayers      [2]cGDNLayerArgs // with the plans of rules
	gdnLayerGrads  cGDNLayerGrads
	halo           cHaloArgs
	toHeads, toSeq cReshardArgs
	ins, outs      [2]*cTensor
	shared         [2]int32
}

// newRankCalls creates plans and a batch on a context and allocates the arguments. Collective.
func newRankCalls(t *testing.T, ctx uintptr) *rankCalls {
	r := &rankCalls{ctx: ctx,
		desc: cAttentionDesc{dtype: typeF32, flags: flagCausal, heads: callHeads, kv_heads: callKeys,
			head_dim: callDim},
		rule: cGDNDesc{dtype: typeF32, flags: flagStates | flagGatedNorm, strategy: gdnState, qk_heads: callKeys,
			v_heads: callHeads, qk_dim: callDim, v_dim: callDim, conv_width: callWidth},
		lengths: cBatchDesc{batch: 1, seq: callSeq}}
	r.desc.struct_size, r.rule.struct_size, r.lengths.struct_size = uint32(unsafe.Sizeof(r.desc)),
		uint32(unsafe.Sizeof(r.rule)), uint32(unsafe.Sizeof(r.lengths))
	r.size.struct_size = uint32(unsafe.Sizeof(r.size))
	must(t, newPlan(ctx, p(&r.desc), p(&r.plan)))
	must(t, newGDNPlan(ctx, p(&r.rule), p(&r.rules[0])))
	r.rule.strategy = gdnHeads
	must(t, newGDNPlan(ctx, p(&r.rule), p(&r.rules[1])))
	must(t, newBatch(ctx, p(&r.lengths), p(&r.batch)))
	info := cBatchInfo{struct_size: uint32(unsafe.Sizeof(cBatchInfo{}))}
	must(t, batchQuery(r.batch, p(&info)))
	r.rows = info.rows

	must(t, planSizes(r.plan, r.batch, p(&r.size)))
	r.attention = cAttentionArgs{struct_size: uint32(unsafe.Sizeof(r.attention)), q: r.q(), k: r.k(), v: r.k(),
		out: r.q(), saved: aligned(r.size.saved), saved_bytes: r.size.saved}
	r.attentionGrads = cAttentionGrads{struct_size: uint32(unsafe.Sizeof(r.attentionGrads)), dout: r.q(), dq: r.q(),
		dk: r.k(), dv: r.k()}
	r.reshards()
	r.halo = cHaloArgs{struct_size: uint32(unsafe.Sizeof(r.halo)), n: 3, x: r.x(), halo: tensorOf(1, 3, callHidden)}

	r.layer = cAttentionLayerArgs{struct_size: uint32(unsafe.Sizeof(r.layer)), hidden: callHidden, x: r.x(),
		wq: tensorOf(callHeads*callDim, callHidden), wk: tensorOf(callKeys*callDim, callHidden),
		wv: tensorOf(callKeys*callDim, callHidden), wo: tensorOf(callHidden, callHeads*callDim), y: r.x()}
	r.layerGrads = cAttentionLayerGrads{struct_size: uint32(unsafe.Sizeof(r.layerGrads)), dy: r.x(), dx: r.x(),
		dwq: tensorOf(callHeads*callDim, callHidden)}
	must(t, attentionLayerSizes(r.plan, r.batch, p(&r.layer), p(&r.size)))
	r.layer.saved, r.layer.saved_bytes = aligned(r.size.saved), r.size.saved

	for i := range r.gdn {
		must(t, planSizes(r.rules[i], r.batch, p(&r.size)))
		r.gdn[i] = cGDNArgs{struct_size: uint32(unsafe.Sizeof(r.gdn[i])), q: r.k(), k: r.k(), v: r.q(), g: r.gates(),
			beta: r.gates(), out: r.q(), saved: aligned(r.size.saved), saved_bytes: r.size.saved}
	}
	r.gdnGrads = cGDNGrads{struct_size: uint32(unsafe.Sizeof(r.gdnGrads)), dout: r.q(), dq: r.k(), dk: r.k(), dv: r.q(),
		dg: r.gates(), dbeta: r.gates()}

	for i := range r.gdnLayers {
		must(t, gdnLayerSizes(r.rules[i], r.batch, p(&r.size)))
		r.gdnLayers[i] = cGDNLayerArgs{struct_size: uint32(unsafe.Sizeof(r.gdnLayers[i])), qkv: r.qkv(), a: r.gates(),
			b: r.gates(), conv: tensorOf(callChannels, callWidth), a_log: tensorOf(callHeads),
			dt_bias: tensorOf(callHeads), z: r.q(), norm: tensorOf(callDim), out: r.q(), saved: aligned(r.size.saved),
			saved_bytes: r.size.saved}
	}
	r.gdnLayerGrads = cGDNLayerGrads{struct_size: uint32(unsafe.Sizeof(r.gdnLayerGrads)), dout: r.q(), dqkv: r.qkv(),
		da: r.gates(), db: r.gates(), dz: r.q(), dconv: tensorOf(callChannels, callWidth)}
	return r
}

// reshards sets the arguments of a reshard of heads and shared heads, and of its inverse, which
// adds the copies.
func (r *rankCalls) reshards() {
	r.ins = [2]*cTensor{r.q(), r.k()}
	r.outs = [2]*cTensor{tensorOf(1, callSeq, r.size.head_hi-r.size.head_lo, callDim),
		tensorOf(1, callSeq, r.size.shared_hi-r.size.shared_lo, callDim)}
	r.shared = [2]int32{0, 1}
	r.toHeads = cReshardArgs{struct_size: uint32(unsafe.Sizeof(r.toHeads)), n: 2, in: &r.ins[0], out: &r.outs[0],
		shared: &r.shared[0]}
	r.toSeq = r.toHeads
	r.toSeq.in, r.toSeq.out, r.toSeq.sum_copies = &r.outs[0], &r.ins[0], 1
}

// q, k, x, gates, qkv and states return new tensors: queries, keys, tokens, gates of the gated
// delta rule, its q|k|v before the convolution, and recurrent states.
func (r *rankCalls) q() *cTensor      { return tensorOf(1, r.rows, callHeads, callDim) }
func (r *rankCalls) k() *cTensor      { return tensorOf(1, r.rows, callKeys, callDim) }
func (r *rankCalls) x() *cTensor      { return tensorOf(1, r.rows, callHidden) }
func (r *rankCalls) gates() *cTensor  { return tensorOf(1, r.rows, callHeads) }
func (r *rankCalls) qkv() *cTensor    { return tensorOf(1, r.rows, callChannels) }
func (r *rankCalls) states() *cTensor { return tensorOf(1, callHeads, callDim, callDim) }

// collectiveCall is a collective function: a valid call on this rank, and calls with one invalid
// argument, by name.
type collectiveCall struct {
	name    string
	valid   func() error
	invalid map[string]func() error
}

// changed returns a call with a copy of the arguments that change has changed.
func changed[A any](args A, change func(a *A), call func(a *A) error) func() error {
	change(&args)
	return func() error { return call(&args) }
}

// changedGrads is changed for a backward pass, with arguments and gradients.
func changedGrads[A, G any](args A, grads G, change func(a *A, g *G), call func(a *A, g *G) error) func() error {
	change(&args, &grads)
	return func() error { return call(&args, &grads) }
}

// collectiveCalls returns all collective functions on a context that have no callback. Collective.
func collectiveCalls(t *testing.T, ctx uintptr) (list []collectiveCall) {
	r := newRankCalls(t, ctx)
	list = append(list, r.attentionCalls(t)...)
	list = append(list, r.layerCalls()...)
	list = append(list, r.passCalls()...)
	list = append(list, r.reshardCalls()...)
	list = append(list, r.haloCalls()...)
	list = append(list, r.createCalls()...)
	list = append(list, r.gdnCalls()...)
	return append(list, r.gdnLayerCalls()...)
}

func (r *rankCalls) attentionCalls(t *testing.T) []collectiveCall {
	var alone, foreign uintptr
	o := cOptions{struct_size: uint32(unsafe.Sizeof(cOptions{})), threads: 1}
	must(t, newLocal(p(&o), p(&alone)))
	must(t, newBatch(alone, p(&r.lengths), p(&foreign)))
	wild := uintptr(1 << 20)
	unreadable := *(*unsafe.Pointer)(p(&wild))
	with := func(change func(a *cAttentionArgs)) func() error {
		return changed(r.attention, change, func(a *cAttentionArgs) error {
			return attentionForward(r.plan, r.batch, p(a))
		})
	}
	backward := func(change func(a *cAttentionArgs, g *cAttentionGrads)) func() error {
		return changedGrads(r.attention, r.attentionGrads, change, func(a *cAttentionArgs, g *cAttentionGrads) error {
			return attentionBackward(r.plan, r.batch, p(a), p(g))
		})
	}
	tensor := func(t *cTensor, change func(t *cTensor)) *cTensor { y := *t; change(&y); return &y }
	zeros := [4]int64{0, 0, 0, 1}
	return []collectiveCall{
		{"ulysses_attention_forward", with(func(*cAttentionArgs) {}), map[string]func() error{
			"plan is NULL":             func() error { return attentionForward(0, r.batch, p(&r.attention)) },
			"batch is NULL":            func() error { return attentionForward(r.plan, 0, p(&r.attention)) },
			"batch of another context": func() error { return attentionForward(r.plan, foreign, p(&r.attention)) },
			"plan of the gated delta rule": func() error {
				return attentionForward(r.rules[1], r.batch, p(&r.attention))
			},
			"args is NULL":       func() error { return attentionForward(r.plan, r.batch, nil) },
			"args is unreadable": func() error { return attentionForward(r.plan, r.batch, unreadable) },
			"small workspace": with(func(a *cAttentionArgs) {
				a.workspace, a.workspace_bytes = aligned(64), 64
			}),
			"unaligned workspace": with(func(a *cAttentionArgs) {
				a.workspace, a.workspace_bytes = unsafe.Add(aligned(1<<20), 4), 1<<20-4
			}),
			"small saved":     with(func(a *cAttentionArgs) { a.saved_bytes -= 8 }),
			"unaligned saved": with(func(a *cAttentionArgs) { a.saved = unsafe.Add(a.saved, 8) }),
			"q is NULL":       with(func(a *cAttentionArgs) { a.q = nil }),
			"type": with(func(a *cAttentionArgs) {
				a.k = tensor(a.k, func(t *cTensor) { t.code, t.bits = 1, 8 })
			}),
			"strides": with(func(a *cAttentionArgs) {
				a.v = tensor(a.v, func(t *cTensor) { t.strides = &zeros[0] })
			}),
			"axes": with(func(a *cAttentionArgs) {
				a.out = tensor(a.out, func(t *cTensor) { t.ndim = 2 })
			}),
			"tensor on a GPU": with(func(a *cAttentionArgs) {
				a.q = tensor(a.q, func(t *cTensor) { t.device = onCUDA })
			}),
			"unaligned data": with(func(a *cAttentionArgs) {
				a.q = tensor(a.q, func(t *cTensor) { t.byte_offset = 2 })
			}),
			"overlap":         with(func(a *cAttentionArgs) { a.out = a.q }),
			"sinks":           with(func(a *cAttentionArgs) { a.sinks = a.q }),
			"lse on one rank": with(func(a *cAttentionArgs) { a.lse = r.gates() }),
		}},
		{"ulysses_attention_backward", backward(func(*cAttentionArgs, *cAttentionGrads) {}), map[string]func() error{
			"grads is NULL": func() error { return attentionBackward(r.plan, r.batch, p(&r.attention), nil) },
			"saved is NULL": backward(func(a *cAttentionArgs, g *cAttentionGrads) {
				a.saved, a.saved_bytes = nil, 0
			}),
			"dq is NULL": backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.dq = nil }),
			"small workspace": backward(func(a *cAttentionArgs, g *cAttentionGrads) {
				a.workspace, a.workspace_bytes = aligned(64), 64
			}),
			"dq over dk": backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.dk = g.dq }),
			"reserved":   backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.reserved = 1 }),
		}},
	}
}

func (r *rankCalls) layerCalls() []collectiveCall {
	with := func(change func(a *cAttentionLayerArgs)) func() error {
		return changed(r.layer, change, func(a *cAttentionLayerArgs) error {
			return attentionLayerForward(r.plan, r.batch, p(a))
		})
	}
	backward := func(change func(a *cAttentionLayerArgs, g *cAttentionLayerGrads)) func() error {
		return changedGrads(r.layer, r.layerGrads, change, func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) error {
			return attentionLayerBackward(r.plan, r.batch, p(a), p(g))
		})
	}
	return []collectiveCall{
		{"ulysses_attention_layer_forward", with(func(*cAttentionLayerArgs) {}), map[string]func() error{
			"wq is NULL":            with(func(a *cAttentionLayerArgs) { a.wq = nil }),
			"q_norm without k_norm": with(func(a *cAttentionLayerArgs) { a.q_norm = tensorOf(callDim) }),
			"shape of y":            with(func(a *cAttentionLayerArgs) { a.y = a.wq }),
			"small workspace": with(func(a *cAttentionLayerArgs) {
				a.workspace, a.workspace_bytes = aligned(64), 64
			}),
			"hidden": with(func(a *cAttentionLayerArgs) { a.hidden = 0 }),
			// valid on each rank
			"norms on one rank": with(func(a *cAttentionLayerArgs) {
				a.q_norm, a.k_norm = tensorOf(callDim), tensorOf(callDim)
				a.saved, a.saved_bytes = nil, 0
			}),
			"rotation on one rank": with(func(a *cAttentionLayerArgs) {
				a.cos, a.sin = tensorOf(r.rows, callDim/2), tensorOf(r.rows, callDim/2)
			}),
			"bias on one rank": with(func(a *cAttentionLayerArgs) { a.bo = tensorOf(callHidden) }),
			"eps on one rank":  with(func(a *cAttentionLayerArgs) { a.eps = 1e-5 }),
		}},
		{"ulysses_attention_layer_backward", backward(func(*cAttentionLayerArgs, *cAttentionLayerGrads) {}),
			map[string]func() error{
				"dy is NULL": backward(func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) {
					g.dy = nil
				}),
				"gradient of a missing bias": backward(func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) {
					g.dbq = tensorOf(callHeads * callDim)
				}),
				"saved is NULL": backward(func(a *cAttentionLayerArgs, g *cAttentionLayerGrads) {
					a.saved, a.saved_bytes = nil, 0
				}),
			}},
	}
}

func (r *rankCalls) passCalls() []collectiveCall {
	with := func(change func(a *cAttentionArgs)) func() error {
		return changed(r.attention, change, func(a *cAttentionArgs) error {
			return overlapped(r.plan, r.batch, a, nil, func() error { return nil })
		})
	}
	backward := func(change func(a *cAttentionArgs, g *cAttentionGrads)) func() error {
		return changedGrads(r.attention, r.attentionGrads, change, func(a *cAttentionArgs, g *cAttentionGrads) error {
			var pass uintptr
			if err := backwardStart(r.plan, r.batch, p(a), p(g), p(&pass)); err != nil {
				return err
			}
			return passCancel(pass)
		})
	}
	return []collectiveCall{
		{"ulysses_attention_forward_start", with(func(*cAttentionArgs) {}), map[string]func() error{
			"pass is NULL":    func() error { return forwardStart(r.plan, r.batch, p(&r.attention), nil) },
			"out is k":        with(func(a *cAttentionArgs) { a.out = a.k }),
			"small workspace": with(func(a *cAttentionArgs) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			"small saved":     with(func(a *cAttentionArgs) { a.saved_bytes -= 8 }),
			"lse on one rank": with(func(a *cAttentionArgs) { a.lse = r.gates() }),
		}},
		{"ulysses_attention_backward_start", backward(func(*cAttentionArgs, *cAttentionGrads) {}),
			map[string]func() error{
				"dv is NULL": backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.dv = nil }),
				"saved is NULL": backward(func(a *cAttentionArgs, g *cAttentionGrads) {
					a.saved, a.saved_bytes = nil, 0
				}),
				"dq over dk": backward(func(a *cAttentionArgs, g *cAttentionGrads) { g.dk = g.dq }),
			}},
	}
}

func (r *rankCalls) reshardCalls() []collectiveCall {
	with := func(args cReshardArgs, toHeads bool, change func(a *cReshardArgs)) func() error {
		return changed(args, change, func(a *cReshardArgs) error { return reshard(r.plan, r.batch, p(a), toHeads) })
	}
	started := func(args cReshardArgs, toHeads bool, change func(a *cReshardArgs)) func() error {
		return changed(args, change, func(a *cReshardArgs) error {
			var request uintptr
			if err := reshardStart(r.plan, r.batch, p(a), toHeads, p(&request)); err != nil {
				return err
			}
			return requestWait(request)
		})
	}
	return []collectiveCall{
		{"ulysses_seq_to_heads", with(r.toHeads, true, func(*cReshardArgs) {}), map[string]func() error{
			"n":             with(r.toHeads, true, func(a *cReshardArgs) { a.n = 0 }),
			"n on one rank": with(r.toHeads, true, func(a *cReshardArgs) { a.n = 1 }),
			"shared":        with(r.toHeads, true, func(a *cReshardArgs) { a.shared = nil }),
			"small workspace": with(r.toHeads, true, func(a *cReshardArgs) {
				a.workspace, a.workspace_bytes = aligned(64), 8
			}),
			"in and out exchanged": with(r.toHeads, true, func(a *cReshardArgs) { a.in, a.out = a.out, a.in }),
		}},
		{"ulysses_heads_to_seq", with(r.toSeq, false, func(*cReshardArgs) {}), map[string]func() error{
			"sum_copies": with(r.toSeq, false, func(a *cReshardArgs) { a.sum_copies = 0 }),
			"in is NULL": with(r.toSeq, false, func(a *cReshardArgs) { a.in = nil }),
		}},
		{"ulysses_seq_to_heads_start", started(r.toHeads, true, func(*cReshardArgs) {}), map[string]func() error{
			"request is NULL": func() error { return reshardStart(r.plan, r.batch, p(&r.toHeads), true, nil) },
			"small workspace": started(r.toHeads, true, func(a *cReshardArgs) {
				a.workspace, a.workspace_bytes = aligned(64), 8
			}),
			"sum_copies": started(r.toHeads, true, func(a *cReshardArgs) { a.sum_copies = 1 }),
		}},
		{"ulysses_heads_to_seq_start", started(r.toSeq, false, func(*cReshardArgs) {}), map[string]func() error{
			"out is NULL": started(r.toSeq, false, func(a *cReshardArgs) { a.out = nil }),
		}},
	}
}

func (r *rankCalls) haloCalls() []collectiveCall {
	with := func(forward bool, change func(a *cHaloArgs)) func() error {
		return changed(r.halo, change, func(a *cHaloArgs) error {
			return callHalo(haloName(forward), r.ctx, r.batch, p(a), forward)
		})
	}
	tensor := func(t *cTensor, change func(t *cTensor)) *cTensor { change(t); return t }
	bf16 := func(t *cTensor) { t.code, t.bits = 4, 16 }
	sum, count, negative := 1.0, int64(1), int64(-1)
	return []collectiveCall{
		{"ulysses_halo_forward", with(true, func(*cHaloArgs) {}), map[string]func() error{
			"batch is NULL": func() error { return callHalo("ulysses_halo_forward", r.ctx, 0, p(&r.halo), true) },
			"n":             with(true, func(a *cHaloArgs) { a.n = 0 }),
			"n on one rank": with(true, func(a *cHaloArgs) { a.n, a.halo = 2, tensorOf(1, 2, callHidden) }),
			"type on one rank": with(true, func(a *cHaloArgs) {
				a.x, a.halo = tensor(r.x(), bf16), tensor(tensorOf(1, 3, callHidden), bf16)
			}),
			"small workspace": with(true, func(a *cHaloArgs) { a.workspace, a.workspace_bytes = aligned(64), 4 }),
			"halo is NULL":    with(true, func(a *cHaloArgs) { a.halo = nil }),
		}},
		{"ulysses_halo_backward", with(false, func(*cHaloArgs) {}), map[string]func() error{
			"x is NULL": with(false, func(a *cHaloArgs) { a.x = nil }),
		}},
		{"ulysses_loss_reduce", func() error { sum, count = 1, 1; return lossReduce(r.ctx, p(&sum), p(&count), nil) },
			map[string]func() error{
				"sum is NULL": func() error { return lossReduce(r.ctx, nil, p(&count), nil) },
				"count":       func() error { return lossReduce(r.ctx, p(&sum), p(&negative), nil) },
			}},
	}
}

func (r *rankCalls) createCalls() []collectiveCall {
	var made uintptr
	plan := func(change func(d *cAttentionDesc)) func() error {
		return changed(r.desc, change, func(d *cAttentionDesc) error { return newPlan(r.ctx, p(d), p(&made)) })
	}
	rule := func(change func(d *cGDNDesc)) func() error {
		return changed(r.rule, change, func(d *cGDNDesc) error { return newGDNPlan(r.ctx, p(d), p(&made)) })
	}
	batch := func(change func(d *cBatchDesc)) func() error {
		return changed(r.lengths, change, func(d *cBatchDesc) error { return newBatch(r.ctx, p(d), p(&made)) })
	}
	return []collectiveCall{
		{"ulysses_attention_plan", plan(func(*cAttentionDesc) {}), map[string]func() error{
			"desc is NULL": func() error { return newPlan(r.ctx, nil, p(&made)) },
			"out is NULL":  func() error { return newPlan(r.ctx, p(&r.desc), nil) },
			"heads":        plan(func(d *cAttentionDesc) { d.heads = 0 }),
			"head_dim":     plan(func(d *cAttentionDesc) { d.head_dim++ }),
			"kv_heads":     plan(func(d *cAttentionDesc) { d.kv_heads = 3 }),
		}},
		{"ulysses_gdn_plan", rule(func(*cGDNDesc) {}), map[string]func() error{
			"chunk":   rule(func(d *cGDNDesc) { d.chunk = 3 }),
			"v_heads": rule(func(d *cGDNDesc) { d.v_heads *= 2 }),
			"width":   rule(func(d *cGDNDesc) { d.conv_width++ }),
			"norm":    rule(func(d *cGDNDesc) { d.conv_width = 0 }),
		}},
		{"ulysses_batch_create", batch(func(*cBatchDesc) {}), map[string]func() error{
			"desc is NULL": func() error { return newBatch(r.ctx, nil, p(&made)) },
			"seq":          batch(func(d *cBatchDesc) { d.seq++ }),
			"docs":         batch(func(d *cBatchDesc) { d.docs = 2 }),
		}},
	}
}

func (r *rankCalls) gdnCalls() (list []collectiveCall) {
	for i := range r.gdn {
		with := func(change func(a *cGDNArgs)) func() error {
			return changed(r.gdn[i], change, func(a *cGDNArgs) error { return gdnForward(r.rules[i], r.batch, p(a)) })
		}
		list = append(list, collectiveCall{"ulysses_gdn_forward", with(func(*cGDNArgs) {}), map[string]func() error{
			"g is NULL":             with(func(a *cGDNArgs) { a.g = nil }),
			"plan of attention":     func() error { return gdnForward(r.plan, r.batch, p(&r.gdn[i])) },
			"state_out on one rank": with(func(a *cGDNArgs) { a.state_out = r.states() }),
			"small workspace":       with(func(a *cGDNArgs) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
		}})
	}
	for i := range r.gdn {
		with := func(change func(a *cGDNArgs, g *cGDNGrads)) func() error {
			return changedGrads(r.gdn[i], r.gdnGrads, change, func(a *cGDNArgs, g *cGDNGrads) error {
				return gdnBackward(r.rules[i], r.batch, p(a), p(g))
			})
		}
		list = append(list,
			collectiveCall{"ulysses_gdn_backward", with(func(*cGDNArgs, *cGDNGrads) {}), map[string]func() error{
				"dg is NULL":    with(func(a *cGDNArgs, g *cGDNGrads) { g.dg = nil }),
				"saved is NULL": with(func(a *cGDNArgs, g *cGDNGrads) { a.saved, a.saved_bytes = nil, 0 }),
			}})
	}
	return list
}

func (r *rankCalls) gdnLayerCalls() (list []collectiveCall) {
	for i := range r.gdnLayers {
		with := func(change func(a *cGDNLayerArgs)) func() error {
			return changed(r.gdnLayers[i], change, func(a *cGDNLayerArgs) error {
				return gdnLayerForward(r.rules[i], r.batch, p(a))
			})
		}
		low := tensorOf(callHeads) // [Hv] of BF16
		low.code, low.bits = 4, 16
		list = append(list,
			collectiveCall{"ulysses_gdn_layer_forward", with(func(*cGDNLayerArgs) {}), map[string]func() error{
				"qkv is NULL":       with(func(a *cGDNLayerArgs) { a.qkv = nil }),
				"z is NULL":         with(func(a *cGDNLayerArgs) { a.z = nil }),
				"plan of attention": func() error { return gdnLayerForward(r.plan, r.batch, p(&r.gdnLayers[i])) },
				"shape of conv":     with(func(a *cGDNLayerArgs) { a.conv = tensorOf(callChannels, callWidth+1) }),
				"type of a_log":     with(func(a *cGDNLayerArgs) { a.a_log = low }),
				"eps":               with(func(a *cGDNLayerArgs) { a.eps = 2 }),
				"eps on one rank":   with(func(a *cGDNLayerArgs) { a.eps = 1e-3 }),
				"out over z":        with(func(a *cGDNLayerArgs) { a.out = a.z }),
				"small saved":       with(func(a *cGDNLayerArgs) { a.saved_bytes -= 64 }),
				"small workspace":   with(func(a *cGDNLayerArgs) { a.workspace, a.workspace_bytes = aligned(64), 64 }),
			}})
	}
	for i := range r.gdnLayers {
		with := func(change func(a *cGDNLayerArgs, g *cGDNLayerGrads)) func() error {
			return changedGrads(r.gdnLayers[i], r.gdnLayerGrads, change,
				func(a *cGDNLayerArgs, g *cGDNLayerGrads) error {
					return gdnLayerBackward(r.rules[i], r.batch, p(a), p(g))
				})
		}
		list = append(list, collectiveCall{"ulysses_gdn_layer_backward", with(func(*cGDNLayerArgs, *cGDNLayerGrads) {}),
			map[string]func() error{
				"dz is NULL": with(func(a *cGDNLayerArgs, g *cGDNLayerGrads) { g.dz = nil }),
				"shape of dconv": with(func(a *cGDNLayerArgs, g *cGDNLayerGrads) {
					g.dconv = tensorOf(callWidth, callChannels)
				}),
				"reserved":      with(func(a *cGDNLayerArgs, g *cGDNLayerGrads) { g.reserved = 1 }),
				"saved is NULL": with(func(a *cGDNLayerArgs, g *cGDNLayerGrads) { a.saved, a.saved_bytes = nil, 0 }),
				"saved of the rule": with(func(a *cGDNLayerArgs, g *cGDNLayerGrads) {
					a.saved, a.saved_bytes = r.gdn[i].saved, r.gdn[i].saved_bytes
				}),
			}})
	}
	return list
}
