package job

import (
	"time"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/clock"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// AttentionReport is what a job of kind "attention" did, for the table at its end. Times are this rank's.
type AttentionReport struct {
	Input    string // shapes, as read
	Plan     string // head split
	Backward bool
	Bytes    int64   // of device memory this rank took
	Seconds  float64 // forward, and backward if there was one
	// SentForward and SentBackward are the bytes this rank's exchanges send by formula, the LSE included.
	SentForward, SentBackward int64
}

// RunAttention runs a job of kind "attention" on the ranks of c, which serves tensors of the host and of the device: attention of saved
// tensors, and its gradients if the input has dout, in the compute type; the LSE is F32. Every rank reads its own rows; rank 0 writes the
// output, whole or not at all. It is collective and fails on all ranks alike.
func RunAttention(d device.Device, c comm.Comm, clk *clock.Clock, compute tensor.DType, t *AttentionTable) (*AttentionReport, error) {
	return runAttentionThen(d, c, clk, compute, t, func(err error) error { return err })
}

// runAttentionThen calls leave at the end, before the memory that was exchanged is given back.
func runAttentionThen(d device.Device, c comm.Comm, clk *clock.Clock, compute tensor.DType, t *AttentionTable, leave func(error) error) (_ *AttentionReport, err error) {
	in, err := openAttention(t, c.Rank() == 0)
	if in != nil {
		defer in.file.Close()
	}
	if err := comm.Agree(c, err); err != nil {
		return nil, err
	}
	layer, spec := in.layer(t), in.spec()
	layer.DType = compute
	batch, err := sp.NewBatch(c, spec)
	if err != nil {
		return nil, in.fault(err)
	}
	plan, err := sp.NewPlan(d, c, layer)
	if err != nil {
		return nil, in.fault(err)
	}
	r := &attentionRun{in: in, dev: d, plan: plan, batch: batch, comm: c, clock: clk}
	if err := comm.Agree(c, r.allocate()); err != nil {
		r.free()
		return nil, err
	}
	defer r.free()
	defer func() { err = leave(err) }()
	clk.Push("read")
	err = comm.Agree(c, r.read())
	clk.Pop()
	if err != nil {
		return nil, err
	}
	report := &AttentionReport{Input: in.String(), Plan: plan.String(), Backward: in.backward(), Bytes: r.arena.Bytes()}
	report.SentForward, report.SentBackward = plan.BytesSent(batch)
	report.SentForward += plan.LSEBytesSent(batch)
	if !in.backward() {
		report.SentBackward = 0
	}
	clk.Push("attention")
	start := time.Now()
	err = r.compute()
	report.Seconds = time.Since(start).Seconds()
	clk.Pop()
	if err != nil {
		return nil, err
	}
	clk.Push("write")
	defer clk.Pop()
	return report, r.write(t.Output)
}

// attentionRun is the job under way, once its input was found sound.
type attentionRun struct {
	in     *attentionInput
	dev    device.Device
	plan   *sp.Plan
	batch  *sp.Batch
	comm   comm.Comm
	clock  *clock.Clock
	stream device.Stream
	arena  *device.Arena
	args   sp.Args
	grads  sp.Grads
}

// pieceBytes is how much of a tensor travels at a time between files, hosts and devices, if that is a row or more.
const pieceBytes = 4 << 20

// allocate takes all memory of the run at once.
func (r *attentionRun) allocate() error {
	d := r.dev
	sketch := device.Sketch(d, "attention")
	if err := r.layout(sketch); err != nil {
		return err
	}
	var err error
	if r.arena, err = device.NewArena(d, "attention", sketch.Peak()); err != nil {
		return status.Errorf(status.Of(err), "%w: use more ranks, so that each holds fewer rows and heads", err)
	}
	if err := r.layout(r.arena); err != nil {
		return err
	}
	r.stream, err = d.NewStream()
	return err
}

func (r *attentionRun) layout(a *device.Arena) (err error) {
	in, b, size := r.in, r.batch, r.plan.Sizes(r.batch)
	take := func(dtype tensor.DType, shape ...int64) (t tensor.Tensor) {
		if err == nil {
			t, err = a.Tensor(dtype, shape...)
		}
		return t
	}
	compute := r.plan.Layer().DType
	r.args = sp.Args{
		Q:         take(compute, 1, b.Rows(), in.hq, in.d),
		K:         take(compute, 1, b.KVRows(), in.hkv, in.d),
		V:         take(compute, 1, b.KVRows(), in.hkv, in.dv),
		Out:       take(compute, 1, b.Rows(), in.hq, in.dv),
		LSE:       take(tensor.F32, 1, b.Rows(), in.hq),
		Workspace: take(tensor.U8, size.Workspace),
	}
	if in.backward() {
		r.args.Saved = take(tensor.U8, size.Saved)
		// The backward pass looks at Saved, not at q, k and v again: their gradients take their place.
		r.grads = sp.Grads{DOut: take(compute, 1, b.Rows(), in.hq, in.dv), DQ: r.args.Q, DK: r.args.K, DV: r.args.V}
	}
	return err
}

func (r *attentionRun) free() {
	if r.stream != nil {
		r.stream.Close()
	}
	if r.arena != nil {
		r.arena.Free()
	}
}

// read fills this rank's rows and refuses numbers that are none.
func (r *attentionRun) read() error {
	in, b := r.in, r.batch
	var piece []float32
	for _, x := range []struct {
		entry tensor.Entry
		dst   tensor.Tensor
		lo    int64
	}{{in.q, r.args.Q, b.Lo()}, {in.k, r.args.K, b.KVLo()}, {in.v, r.args.V, b.KVLo()}, {in.dout, r.grads.DOut, b.Lo()}} {
		if x.dst.IsNil() {
			continue
		}
		start, n := x.lo*x.entry.Shape[1]*x.entry.Shape[2], x.dst.Numel()
		if x.dst.Where == tensor.Host && x.dst.DType == tensor.F32 {
			if err := in.read(x.entry, start, x.dst.Float32s()); err != nil {
				return err
			}
			continue
		}
		if piece == nil {
			piece = make([]float32, pieceBytes/4)
		}
		for lo, flat := int64(0), x.dst.View(n); lo < n; lo += int64(len(piece)) {
			hi := min(lo+int64(len(piece)), n)
			values := piece[:hi-lo]
			if err := in.read(x.entry, start+lo, values); err != nil {
				return err
			}
			if err := r.dev.Copy(r.stream, flat.Slice(0, lo, hi), tensor.OfFloat32(values, hi-lo)); err != nil {
				return err
			}
			if err := r.stream.Sync(); err != nil { // the piece is used again
				return err
			}
		}
	}
	return nil
}

// compute runs the passes. A rank that fails here fails alone, so it ends the job: its peers are waiting in an exchange.
func (r *attentionRun) compute() error {
	err := r.plan.Forward(r.stream, r.batch, &r.args)
	if err == nil && r.in.backward() {
		err = r.plan.Backward(r.stream, r.batch, &r.args, &r.grads)
	}
	if err == nil {
		err = r.stream.Sync()
	}
	if err != nil {
		r.comm.Abort(status.Of(err), err.Error())
	}
	return err
}

// write brings the results to rank 0 and into the file.
func (r *attentionRun) write(path string) error {
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
	return writeSharded(r.comm, r.dev, r.stream, path, map[string]string{"producer": "ulysses"}, items, pieceBytes)
}
