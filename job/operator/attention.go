package operator

import (
	"unsafe"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/job/file"
	"ulysses/sp"
	"ulysses/tensor"
)

// attentionRun computes attention and its gradients.
type attentionRun struct {
	run
	in    *attentionInput
	plan  *sp.Plan
	seed  int64 // of dropout
	args  sp.Args
	grads sp.Grads
}

func (in *attentionInput) plan(r run, j *file.Job, compute tensor.DType) (operation, error) {
	layer := in.layer(&j.Attention)
	layer.DType, layer.Ring, layer.Gather = compute, r.ring, r.gather
	plan, err := sp.NewPlan(r.dev, r.comm, layer)
	if err != nil {
		return nil, in.fault(err)
	}
	// A device may lack a kernel for an option. Its kernels are the same on all ranks.
	if _, _, err := plan.Kernels(); err != nil {
		return nil, in.fault(err)
	}
	forward, backward := plan.BytesSent(r.batch)
	r.report.Plan, r.report.Formula = plan.String(), forward+plan.LSEBytesSent(r.batch)
	if layer.Gather {
		r.report.Plan += ", all keys at once"
	}
	if in.backward() {
		r.report.Formula += backward
	}
	return &attentionRun{run: r, in: in, plan: plan, seed: j.OperatorSeed()}, nil
}

func (r *attentionRun) layout(arena *device.Arena) error {
	in, b, size, dtype := r.in, r.batch, r.plan.Sizes(r.batch), r.plan.Layer().DType
	a := allocator{arena: arena}
	r.args = sp.Args{
		Q:         a.tensor(dtype, 1, b.Rows(), in.hq, in.d),
		K:         a.tensor(dtype, 1, b.KVRows(), in.hkv, in.d),
		V:         a.tensor(dtype, 1, b.KVRows(), in.hkv, in.dv),
		Out:       a.tensor(dtype, 1, b.Rows(), in.hq, in.dv),
		LSE:       a.tensor(tensor.F32, 1, b.Rows(), in.hq),
		Workspace: a.tensor(tensor.U8, size.Workspace),
	}
	heads := func(e tensor.Entry) (x tensor.Tensor) {
		if e.Name != "" {
			x = a.tensor(tensor.F32, in.hq)
		}
		return x
	}
	r.args.Sinks, r.args.Slopes, r.args.Seed = heads(in.sinks), heads(in.alibi), r.seed
	if in.maskShape != nil {
		r.args.BlockMask = a.tensor(tensor.U8, in.maskShape...)
	}
	if in.backward() {
		r.args.Saved = a.tensor(tensor.U8, size.Saved)
		// The backward pass reads Saved and not q, k and v, so the gradients use the memory of
		// these.
		r.grads = sp.Grads{DOut: a.tensor(dtype, 1, b.Rows(), in.hq, in.dv), DQ: r.args.Q, DK: r.args.K, DV: r.args.V,
			DSinks: heads(in.sinks), DSlopes: heads(in.alibi)}
	}
	return a.err
}

func (r *attentionRun) tokens() int64 { return r.in.sq }

func (r *attentionRun) scratch() (saved, workspace tensor.Tensor) {
	return r.args.Saved, r.args.Workspace
}

func (r *attentionRun) read() error {
	in, b := r.in, r.batch
	for _, x := range []struct {
		dst   tensor.Tensor
		entry tensor.Entry
		lo    int64
	}{{r.args.Q, in.q, b.Lo()}, {r.args.K, in.k, b.KVLo()}, {r.args.V, in.v, b.KVLo()},
		{r.grads.DOut, in.dout, b.Lo()}} {
		if x.dst.IsNil() {
			continue
		}
		if err := r.load(x.dst, x.entry, x.lo*x.entry.Shape[1]*x.entry.Shape[2], nil); err != nil {
			return err
		}
	}
	for _, x := range []struct {
		dst   tensor.Tensor
		entry tensor.Entry
	}{{r.args.Sinks, in.sinks}, {r.args.Slopes, in.alibi}} {
		if err := r.load(x.dst, x.entry, 0, nil); err != nil {
			return err
		}
	}
	if in.maskShape == nil {
		return nil
	}
	bits := make([]byte, r.args.BlockMask.Numel())
	if err := in.fillMask(bits); err != nil {
		return err
	}
	in.maskBits = bits
	host := tensor.Of(unsafe.Pointer(unsafe.SliceData(bits)), tensor.U8, int64(len(bits)))
	if err := r.dev.Copy(r.stream, r.args.BlockMask.View(int64(len(bits))), host); err != nil {
		return err
	}
	return r.stream.Sync()
}

// sum adds the ranks' terms of the gradients of sinks and slopes.
func (r *attentionRun) sum() error {
	for _, t := range []tensor.Tensor{r.grads.DSinks, r.grads.DSlopes} {
		if t.IsNil() {
			continue
		}
		if err := r.comm.AllReduce(r.stream, t, comm.Sum); err != nil {
			return err
		}
	}
	return r.stream.Sync()
}

func (r *attentionRun) compute() error {
	err := r.plan.Forward(r.stream, r.batch, &r.args)
	if err == nil && r.in.backward() {
		err = r.plan.Backward(r.stream, r.batch, &r.args, &r.grads)
	}
	return err
}

func (r *attentionRun) results() []shardedTensor {
	in := r.in
	results := []shardedTensor{
		{"out", r.args.Out, []int64{in.sq, in.hq, in.dv}},
		{"lse", r.args.LSE, []int64{in.sq, in.hq}},
	}
	if in.backward() {
		results = append(results,
			shardedTensor{"dq", r.grads.DQ, []int64{in.sq, in.hq, in.d}},
			shardedTensor{"dk", r.grads.DK, []int64{in.sk, in.hkv, in.d}},
			shardedTensor{"dv", r.grads.DV, []int64{in.sk, in.hkv, in.dv}})
	}
	for _, g := range []struct {
		name string
		t    tensor.Tensor
	}{{"dsinks", r.grads.DSinks}, {"dalibi", r.grads.DSlopes}} {
		if !g.t.IsNil() { // whole on every rank, of which each writes a shard
			lo, hi := comm.Shard(in.hq, int64(r.comm.Size()), int64(r.comm.Rank()))
			results = append(results, shardedTensor{g.name, g.t.Slice(0, lo, hi), []int64{in.hq}})
		}
	}
	return results
}

func (r *attentionRun) seesKey(token, head int64) bool {
	in := r.in
	cuQ, cuK := r.batch.Documents()
	lo, hi := visibleKeys(token, cuQ, cuK, r.plan.Layer())
	if in.maskShape == nil || lo >= hi {
		return lo < hi
	}
	if in.maskShape[0] == 1 {
		head = 0
	}
	columns := in.maskShape[2]
	row := in.maskBits[(head*in.maskShape[1]+token/in.block[0])*columns:][:columns]
	for c := lo / in.block[1]; c*in.block[1] < hi; c++ {
		if row[c] != 0 {
			return true
		}
	}
	return false
}
