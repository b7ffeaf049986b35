package operator

import (
	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/job/file"
	"ulysses/sp"
	"ulysses/tensor"
)

// Attention runs a job of kind "attention" on the ranks of c: attention of saved tensors, and
// its gradients if the input has dout, in the compute type; the LSE is F32. With a report beside
// it, an error is about results that are NaN or Inf, and the output is written.
func Attention(d device.Device, c comm.Comm, clk *clock.Clock, compute tensor.DType, t *file.AttentionTable) (*Report, error) {
	r, err := newAttentionRun(d, c, clk, compute, t, c.Rank() == 0)
	if err != nil {
		return nil, err
	}
	return do(r, t.Output, func(err error) error { return err })
}

// newAttentionRun finds the input sound and plans what is done with it; writer is the rank that
// will write the output. Collective.
func newAttentionRun(d device.Device, c comm.Comm, clk *clock.Clock, compute tensor.DType, t *file.AttentionTable, writer bool) (r *attentionRun, err error) {
	in, err := openAttention(t, writer)
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
	plan, err := sp.NewPlan(d, c, layer)
	if err != nil {
		return nil, in.fault(err)
	}
	r = &attentionRun{run: run{in: &in.inputFile, dev: d, comm: c, clock: clk}, in: in, plan: plan, batch: batch}
	forward, backward := plan.BytesSent(batch)
	r.report = Report{Input: in.String(), Plan: plan.String(), Backward: in.backward(), Formula: forward + plan.LSEBytesSent(batch)}
	if in.backward() {
		r.report.Formula += backward
	}
	return r, nil
}

// attentionRun is the job under way, once its input was found sound.
type attentionRun struct {
	run
	in    *attentionInput
	plan  *sp.Plan
	batch *sp.Batch
	args  sp.Args
	grads sp.Grads
}

func (r *attentionRun) layout(a *device.Arena) error {
	in, b, size, dtype := r.in, r.batch, r.plan.Sizes(r.batch), r.plan.Layer().DType
	t := taker{arena: a}
	r.args = sp.Args{
		Q:         t.take(dtype, 1, b.Rows(), in.hq, in.d),
		K:         t.take(dtype, 1, b.KVRows(), in.hkv, in.d),
		V:         t.take(dtype, 1, b.KVRows(), in.hkv, in.dv),
		Out:       t.take(dtype, 1, b.Rows(), in.hq, in.dv),
		LSE:       t.take(tensor.F32, 1, b.Rows(), in.hq),
		Workspace: t.take(tensor.U8, size.Workspace),
	}
	if in.backward() {
		r.args.Saved = t.take(tensor.U8, size.Saved)
		// The backward pass looks at Saved, not at q, k and v again: their gradients take their
		// place.
		r.grads = sp.Grads{DOut: t.take(dtype, 1, b.Rows(), in.hq, in.dv), DQ: r.args.Q, DK: r.args.K, DV: r.args.V}
	}
	return t.err
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

func (r *attentionRun) results() []sharded {
	in := r.in
	items := []sharded{
		{"out", r.args.Out, []int64{in.sq, in.hq, in.dv}, in.sq},
		{"lse", r.args.LSE, []int64{in.sq, in.hq}, in.sq},
	}
	if in.backward() {
		items = append(items,
			sharded{"dq", r.grads.DQ, []int64{in.sq, in.hq, in.d}, in.sq},
			sharded{"dk", r.grads.DK, []int64{in.sk, in.hkv, in.d}, in.sk},
			sharded{"dv", r.grads.DV, []int64{in.sk, in.hkv, in.dv}, in.sk})
	}
	return items
}

func (r *attentionRun) sees(token int64) bool {
	cuQ, cuK := r.batch.Documents()
	return seesKey(token, cuQ, cuK, r.plan.Layer())
}
