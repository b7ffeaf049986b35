package operator

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/gdn"
	"ulysses/internal/clock"
	"ulysses/job/file"
	"ulysses/sp"
	"ulysses/tensor"
)

// GDN runs a job of kind "gdn" on the ranks of c: the gated delta rule on saved tensors, and its
// gradients if the input has dout, in the compute type; decays, betas and states are F32. With a
// report beside it, an error is what Attention says.
func GDN(d device.Device, c comm.Comm, clk *clock.Clock, compute tensor.DType, t *file.GDNTable) (*Report, error) {
	r, err := newGDNRun(d, c, clk, compute, t, c.Rank() == 0)
	if err != nil {
		return nil, err
	}
	return do(r, t.Output, func(err error) error { return err })
}

// newGDNRun is newAttentionRun's twin.
func newGDNRun(d device.Device, c comm.Comm, clk *clock.Clock, compute tensor.DType, t *file.GDNTable, writer bool) (r *gdnRun, err error) {
	in, err := openGDN(t, writer)
	defer func() {
		if err != nil {
			in.close()
		}
	}()
	if err = comm.Agree(c, err); err == nil {
		err = in.same(c)
	}
	if err != nil {
		return nil, err
	}
	layer := in.layer(t)
	layer.DType = compute
	batch, err := sp.NewBatch(c, in.spec())
	if err != nil {
		return nil, in.fault(err)
	}
	if err := comm.Agree(c, in.documents(batch)); err != nil {
		return nil, err
	}
	plan, err := gdn.NewPlan(d, c, layer)
	if err != nil {
		return nil, in.fault(err)
	}
	r = &gdnRun{run: run{in: &in.inputFile, dev: d, comm: c, clock: clk}, in: in, plan: plan, batch: batch}
	r.report = Report{Input: in.String(), Plan: plan.String(), Backward: in.backward(), Formula: r.formula()}
	return r, nil
}

// gdnRun is the job under way, once its input was found sound.
type gdnRun struct {
	run
	in    *gdnInput
	plan  *gdn.Plan
	batch *sp.Batch
	args  gdn.Args
	grads gdn.Grads
}

// formula is the bytes that this rank sends in all-to-alls.
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

func (r *gdnRun) layout(a *device.Arena) error {
	in, rows, size, dtype := r.in, r.batch.Rows(), r.plan.Sizes(r.batch), r.plan.Layer().DType
	t := taker{arena: a}
	keys, values := []int64{1, rows, in.hk, in.dk}, []int64{1, rows, in.hv, in.dv}
	gates, states := []int64{1, rows, in.hv}, []int64{in.n, in.hv, in.dk, in.dv}
	r.args = gdn.Args{
		Q: t.take(dtype, keys...), K: t.take(dtype, keys...), V: t.take(dtype, values...), Out: t.take(dtype, values...),
		G: t.take(tensor.F32, gates...), Beta: t.take(tensor.F32, gates...),
		StateOut:  t.take(tensor.F32, states...),
		Workspace: t.take(tensor.U8, size.Workspace),
	}
	if in.stateIn.Name != "" {
		r.args.StateIn = t.take(tensor.F32, states...)
	}
	if !in.backward() {
		return t.err
	}
	r.args.Saved = t.take(tensor.U8, size.Saved)
	r.grads = gdn.Grads{
		DOut: t.take(dtype, values...),
		DQ:   t.take(dtype, keys...), DK: t.take(dtype, keys...), DV: t.take(dtype, values...),
		DG: t.take(tensor.F32, gates...), DBeta: t.take(tensor.F32, gates...),
	}
	if in.dstateOut.Name != "" {
		r.grads.DStateOut = t.take(tensor.F32, states...)
	}
	if in.stateIn.Name != "" {
		r.grads.DStateIn = t.take(tensor.F32, states...)
	}
	return t.err
}

func (r *gdnRun) tokens() int64 { return r.in.s }

func (r *gdnRun) scratch() (saved, workspace tensor.Tensor) { return r.args.Saved, r.args.Workspace }

func (r *gdnRun) read() error {
	in, lo := r.in, r.batch.Lo()
	var tooLong func(float32) string
	if r.plan.Layer().L2Norm {
		tooLong = in.tooLong
	}
	for _, x := range []struct {
		dst   tensor.Tensor
		entry tensor.Entry
		start int64
		wrong func(float32) string
	}{
		{r.args.Q, in.q, lo * in.hk * in.dk, tooLong}, {r.args.K, in.k, lo * in.hk * in.dk, tooLong}, {r.args.V, in.v, lo * in.hv * in.dv, nil},
		{r.args.G, in.g, lo * in.hv, notDecay}, {r.args.Beta, in.beta, lo * in.hv, nil}, {r.args.StateIn, in.stateIn, 0, nil},
		{r.grads.DOut, in.dout, lo * in.hv * in.dv, nil}, {r.grads.DStateOut, in.dstateOut, 0, nil},
	} {
		if err := r.load(x.dst, x.entry, x.start, x.wrong); err != nil {
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

func (r *gdnRun) results() []sharded {
	in := r.in
	items := []sharded{{"out", r.args.Out, []int64{in.s, in.hv, in.dv}, in.s}, r.whole("state_out", r.args.StateOut)}
	if !in.backward() {
		return items
	}
	keys, gates := []int64{in.s, in.hk, in.dk}, []int64{in.s, in.hv}
	items = append(items, sharded{"dq", r.grads.DQ, keys, in.s}, sharded{"dk", r.grads.DK, keys, in.s},
		sharded{"dv", r.grads.DV, []int64{in.s, in.hv, in.dv}, in.s}, sharded{"dg", r.grads.DG, gates, in.s}, sharded{"dbeta", r.grads.DBeta, gates, in.s})
	if !r.grads.DStateIn.IsNil() {
		items = append(items, r.whole("dstate_in", r.grads.DStateIn))
	}
	return items
}

// whole is a tensor of states, which every rank has in full: each writes its share of the
// documents.
func (r *gdnRun) whole(name string, t tensor.Tensor) sharded {
	lo, hi := comm.Shard(r.in.n, r.comm.Size(), r.comm.Rank())
	return sharded{name, t.Slice(0, lo, hi), []int64{r.in.n, r.in.hv, r.in.dk, r.in.dv}, r.in.n}
}
