package operator

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/job/file"
	"ulysses/tensor"
)

// gdnRun computes the gated delta rule and its gradients.
type gdnRun struct {
	run
	in    *gdnInput
	plan  *gdn.Plan
	args  gdn.Args
	grads gdn.Grads
}

func (in *gdnInput) plan(r run, j *file.Job, compute tensor.DType) (operation, error) {
	if err := comm.Agree(r.comm, in.checkStates(r.batch)); err != nil {
		return nil, err
	}
	layer := in.layer(&j.GDN)
	layer.DType = compute
	plan, err := gdn.NewPlan(r.dev, r.comm, layer)
	if err != nil {
		return nil, in.fault(err)
	}
	g := &gdnRun{run: r, in: in, plan: plan}
	g.report.Plan, g.report.Formula = plan.String(), g.formula()
	return g, nil
}

// formula returns the bytes that this rank sends in all-to-alls.
func (r *gdnRun) formula() int64 {
	forward, backward := r.plan.BytesSent(r.batch)
	stateOut, dstateIn := r.plan.StateBytesSent(r.batch)
	sent := forward + stateOut
	if r.in.backward() {
		sent += backward
		if r.in.stateIn.Name != "" {
			sent += dstateIn
		}
	}
	return sent
}

func (r *gdnRun) layout(arena *device.Arena) error {
	in, rows, size, dtype := r.in, r.batch.Rows(), r.plan.Sizes(r.batch), r.plan.Layer().DType
	a := allocator{arena: arena}
	keys, values := []int64{1, rows, in.hk, in.dk}, []int64{1, rows, in.hv, in.dv}
	gates, states := []int64{1, rows, in.hv}, []int64{in.n, in.hv, in.dk, in.dv}
	r.args = gdn.Args{
		Q: a.tensor(dtype, keys...), K: a.tensor(dtype, keys...), V: a.tensor(dtype, values...),
		Out: a.tensor(dtype, values...), G: a.tensor(tensor.F32, gates...), Beta: a.tensor(tensor.F32, gates...),
		StateOut:  a.tensor(tensor.F32, states...),
		Workspace: a.tensor(tensor.U8, size.Workspace),
	}
	if in.stateIn.Name != "" {
		r.args.StateIn = a.tensor(tensor.F32, states...)
	}
	if !in.backward() {
		return a.err
	}
	r.args.Saved = a.tensor(tensor.U8, size.Saved)
	r.grads = gdn.Grads{
		DOut: a.tensor(dtype, values...),
		DQ:   a.tensor(dtype, keys...), DK: a.tensor(dtype, keys...), DV: a.tensor(dtype, values...),
		DG: a.tensor(tensor.F32, gates...), DBeta: a.tensor(tensor.F32, gates...),
	}
	if in.dstateOut.Name != "" {
		r.grads.DStateOut = a.tensor(tensor.F32, states...)
	}
	if in.stateIn.Name != "" {
		r.grads.DStateIn = a.tensor(tensor.F32, states...)
	}
	return a.err
}

func (r *gdnRun) tokens() int64 { return r.in.s }

func (r *gdnRun) scratch() (saved, workspace tensor.Tensor) { return r.args.Saved, r.args.Workspace }

func (r *gdnRun) read() error {
	in, lo := r.in, r.batch.Lo()
	var tooLarge func(float32) string
	if r.plan.Layer().L2Norm {
		tooLarge = in.tooLarge
	}
	for _, x := range []struct {
		dst     tensor.Tensor
		entry   tensor.Entry
		start   int64
		invalid func(float32) string
	}{
		{r.args.Q, in.q, lo * in.hk * in.dk, tooLarge}, {r.args.K, in.k, lo * in.hk * in.dk, tooLarge},
		{r.args.V, in.v, lo * in.hv * in.dv, nil},
		{r.args.G, in.g, lo * in.hv, positiveDecay}, {r.args.Beta, in.beta, lo * in.hv, nil},
		{r.args.StateIn, in.stateIn, 0, nil},
		{r.grads.DOut, in.dout, lo * in.hv * in.dv, nil}, {r.grads.DStateOut, in.dstateOut, 0, nil},
	} {
		if err := r.load(x.dst, x.entry, x.start, x.invalid); err != nil {
			return err
		}
	}
	return nil
}

func (r *gdnRun) compute() error {
	err := r.plan.Forward(r.stream, r.batch, &r.args)
	if err == nil && r.in.backward() {
		err = r.plan.Backward(r.stream, r.batch, &r.args, &r.grads)
	}
	return err
}

func (r *gdnRun) results() []shardedTensor {
	in := r.in
	results := []shardedTensor{{"out", r.args.Out, []int64{in.s, in.hv, in.dv}}, r.states("state_out", r.args.StateOut)}
	if !in.backward() {
		return results
	}
	keys, gates := []int64{in.s, in.hk, in.dk}, []int64{in.s, in.hv}
	results = append(results, shardedTensor{"dq", r.grads.DQ, keys}, shardedTensor{"dk", r.grads.DK, keys},
		shardedTensor{"dv", r.grads.DV, []int64{in.s, in.hv, in.dv}}, shardedTensor{"dg", r.grads.DG, gates},
		shardedTensor{"dbeta", r.grads.DBeta, gates})
	if !r.grads.DStateIn.IsNil() {
		results = append(results, r.states("dstate_in", r.grads.DStateIn))
	}
	return results
}

// states returns a tensor of states [documents, Hv, Dk, Dv] as sharded. Every rank has all of it
// and writes the states of its share of the documents.
func (r *gdnRun) states(name string, t tensor.Tensor) shardedTensor {
	lo, hi := comm.Shard(r.in.n, r.comm.Size(), r.comm.Rank())
	return shardedTensor{name, t.Slice(0, lo, hi), []int64{r.in.n, r.in.hv, r.in.dk, r.in.dv}}
}
