package operator

import (
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
	args  sp.Args
	grads sp.Grads
}

func (in *attentionInput) plan(r run, j *file.Job, compute tensor.DType) (operation, error) {
	layer := in.layer(&j.Attention)
	layer.DType = compute
	plan, err := sp.NewPlan(r.dev, r.comm, layer)
	if err != nil {
		return nil, in.fault(err)
	}
	forward, backward := plan.BytesSent(r.batch)
	r.report.Plan, r.report.Formula = plan.String(), forward+plan.LSEBytesSent(r.batch)
	if in.backward() {
		r.report.Formula += backward
	}
	return &attentionRun{run: r, in: in, plan: plan}, nil
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
	if in.backward() {
		r.args.Saved = a.tensor(tensor.U8, size.Saved)
		// The backward pass reads Saved and not q, k and v, so the gradients use the memory of
		// these.
		r.grads = sp.Grads{DOut: a.tensor(dtype, 1, b.Rows(), in.hq, in.dv), DQ: r.args.Q, DK: r.args.K, DV: r.args.V}
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
	}{{r.args.Q, in.q, b.Lo()}, {r.args.K, in.k, b.KVLo()}, {r.args.V, in.v, b.KVLo()}, {r.grads.DOut, in.dout, b.Lo()}} {
		if x.dst.IsNil() {
			continue
		}
		if err := r.load(x.dst, x.entry, x.lo*x.entry.Shape[1]*x.entry.Shape[2], nil); err != nil {
			return err
		}
	}
	return nil
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
	return results
}

func (r *attentionRun) seesKey(token int64) bool {
	cuQ, cuK := r.batch.Documents()
	return seesKey(token, cuQ, cuK, r.plan.Layer())
}
