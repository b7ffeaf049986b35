package gdn

import (
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// What is checked at each call is what memory safety needs; all else was settled in NewPlan and
// sp.NewBatch.

// operand is a tensor of a call and what it must be.
type operand struct {
	name     string
	t        tensor.Tensor
	dtype    tensor.DType
	dense    bool // all of it, not the last axis alone
	anyLast  bool // not even that
	optional bool
	shape    [4]int64
	dims     int
}

func (o *operand) check(op string) error {
	if o.optional && o.t.IsNil() {
		return nil
	}
	want := tensor.Of(nil, o.dtype, o.shape[:o.dims]...)
	if o.t.DType != o.dtype || o.t.NDim != want.NDim || o.t.Shape != want.Shape {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v: it must be %v", op, o.name, o.t, want)
	}
	if o.dense && !o.t.Contiguous() {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v: it must be dense", op, o.name, o.t)
	}
	if !o.anyLast && o.t.Dim(-1) > 1 && o.t.Stride[o.t.NDim-1] != 1 {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v: its last axis must be dense", op, o.name, o.t)
	}
	return nil
}

// operands of a batch: shapes are filled in from the plan.
type shapes struct {
	p    *Plan
	b    *sp.Batch
	op   string
	docs int64
	err  error
}

func (x *shapes) hold(o operand) {
	if x.err == nil {
		x.err = o.check(x.op)
	}
}

func (x *shapes) keys(name string, t tensor.Tensor) {
	l := &x.p.layer
	x.hold(operand{name: name, t: t, dtype: l.DType, shape: [4]int64{x.b.Batch(), x.b.Rows(), l.KeyHeads, l.KeyDim}, dims: 4})
}

func (x *shapes) values(name string, t tensor.Tensor) {
	l := &x.p.layer
	x.hold(operand{name: name, t: t, dtype: l.DType, shape: [4]int64{x.b.Batch(), x.b.Rows(), l.ValueHeads, l.ValueDim}, dims: 4})
}

func (x *shapes) gate(name string, t tensor.Tensor) {
	x.hold(operand{name: name, t: t, dtype: tensor.F32, anyLast: true, shape: [4]int64{x.b.Batch(), x.b.Rows(), x.p.layer.ValueHeads}, dims: 3})
}

func (x *shapes) state(name string, t tensor.Tensor) {
	l := &x.p.layer
	x.hold(operand{name: name, t: t, dtype: tensor.F32, dense: true, optional: true, shape: [4]int64{x.docs, l.ValueHeads, l.KeyDim, l.ValueDim}, dims: 4})
}

// local is a layer's activation, of n features.
func (x *shapes) local(name string, t tensor.Tensor, n int64) {
	x.hold(operand{name: name, t: t, dtype: x.p.layer.DType, shape: [4]int64{x.b.Batch(), x.b.Rows(), n}, dims: 3})
}

// weight is a layer's, or its gradient; the gates' may be F32 among BF16.
func (x *shapes) weight(name string, t tensor.Tensor, dtype tensor.DType, either bool, shape ...int64) {
	if either && t.DType == tensor.F32 {
		dtype = tensor.F32
	}
	o := operand{name: name, t: t, dtype: dtype, dense: true, dims: len(shape)}
	copy(o.shape[:], shape)
	x.hold(o)
}

// memory holds Saved and Workspace to what a call needs.
func (x *shapes) memory(kind call, saved, workspace tensor.Tensor) {
	if x.err != nil {
		return
	}
	needSaved, needWorkspace := x.p.need(x.p.cutOf(x.b), kind)
	if kind.keep {
		x.err = checkBytes(x.op, "saved", saved, needSaved)
	}
	if x.err == nil {
		x.err = checkBytes(x.op, "workspace", workspace, needWorkspace)
	}
}

func checkBytes(op, name string, t tensor.Tensor, need int64) error {
	if t.IsNil() && need == 0 {
		return nil
	}
	if t.DType != tensor.U8 || t.Numel() < need || !t.Contiguous() {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v: it must be U8 of %d bytes or more, as the plan's sizes say", op, name, t, need)
	}
	return nil
}

// shapesOf refuses a batch of other ranks, and one with keys of their own.
func (p *Plan) shapesOf(op string, b *sp.Batch) (x shapes) {
	x = shapes{p: p, b: b, op: op}
	if int64(b.Rank()) != p.rank || int64(b.Size()) != p.size {
		x.err = status.Errorf(status.InvalidArgument, "%s: a batch of rank %d of %d with a plan of rank %d of %d: make both on one communicator",
			op, b.Rank(), b.Size(), p.rank, p.size)
		return x
	}
	if b.Mixed() {
		x.err = status.Errorf(status.InvalidArgument, "%s: the batch has keys that are not its queries: make one without kv_seq, kv_rows and cu_seqlens_k", op)
		return x
	}
	cu, _ := b.Documents()
	x.docs = int64(len(cu) - 1)
	return x
}

func (p *Plan) checkForward(op string, b *sp.Batch, a *Args, kind call) error {
	x := p.shapesOf(op, b)
	if x.err != nil {
		return x.err
	}
	x.keys("q", a.Q)
	x.keys("k", a.K)
	x.values("v", a.V)
	x.gate("g", a.G)
	x.gate("beta", a.Beta)
	x.values("out", a.Out)
	x.state("state_in", a.StateIn)
	x.state("state_out", a.StateOut)
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}

// kept refuses a backward pass where nothing was saved.
func (x *shapes) kept(saved tensor.Tensor) {
	if x.err == nil && (x.p.layer.NoBackward || saved.IsNil()) {
		x.err = status.Errorf(status.InvalidArgument, "%s: the layer was planned, or its forward called, without a backward: keep what it saves", x.op)
	}
}

func (p *Plan) checkRecompute(op string, b *sp.Batch, a *Args, kind call) error {
	x := p.shapesOf(op, b)
	x.kept(a.Saved)
	if x.err != nil {
		return x.err
	}
	x.values("out", a.Out)
	x.state("state_in", a.StateIn)
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}

func (p *Plan) checkBackward(op string, b *sp.Batch, a *Args, g *Grads, kind call) error {
	x := p.shapesOf(op, b)
	x.kept(a.Saved)
	if x.err != nil {
		return x.err
	}
	x.values("dout", g.DOut)
	x.keys("dq", g.DQ)
	x.keys("dk", g.DK)
	x.values("dv", g.DV)
	x.gate("dg", g.DG)
	x.gate("dbeta", g.DBeta)
	x.state("state_in", a.StateIn)
	x.state("dstate_out", g.DStateOut)
	x.state("dstate_in", g.DStateIn)
	if x.err == nil && !g.DStateIn.IsNil() && a.StateIn.IsNil() {
		x.err = status.Errorf(status.InvalidArgument, "%s: dstate_in without state_in: give the states that forward started from", op)
	}
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}

// layerOf is shapesOf for a plan of a layer.
func (p *Plan) layerOf(op string, b *sp.Batch) shapes {
	x := p.shapesOf(op, b)
	if x.err == nil && p.layer.ConvWidth == 0 {
		x.err = status.Errorf(status.InvalidArgument, "%s: the layer was planned without a convolution: set conv_width", op)
	}
	return x
}

func (x *shapes) weights(a *LayerArgs) {
	l := &x.p.layer
	x.weight("conv", a.Conv, l.DType, false, l.channels(), l.ConvWidth)
	x.weight("a_log", a.ALog, l.DType, true, l.ValueHeads)
	x.weight("dt_bias", a.DtBias, l.DType, true, l.ValueHeads)
}

func (p *Plan) checkLayerForward(op string, b *sp.Batch, a *LayerArgs, kind call) error {
	x := p.layerOf(op, b)
	if x.err != nil {
		return x.err
	}
	x.local("qkv", a.QKV, p.layer.channels())
	x.local("a", a.A, p.layer.ValueHeads)
	x.local("b", a.B, p.layer.ValueHeads)
	x.weights(a)
	x.values("out", a.Out)
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}

func (p *Plan) checkLayerRecompute(op string, b *sp.Batch, a *LayerArgs, kind call) error {
	x := p.layerOf(op, b)
	x.kept(a.Saved)
	if x.err != nil {
		return x.err
	}
	x.weights(a)
	x.values("out", a.Out)
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}

func (p *Plan) checkLayerBackward(op string, b *sp.Batch, a *LayerArgs, g *LayerGrads, kind call) error {
	x := p.layerOf(op, b)
	x.kept(a.Saved)
	if x.err != nil {
		return x.err
	}
	l := &p.layer
	x.weights(a)
	x.values("dout", g.DOut)
	x.local("dqkv", g.DQKV, l.channels())
	x.local("da", g.DA, l.ValueHeads)
	x.local("db", g.DB, l.ValueHeads)
	x.weight("dconv", g.DConv, tensor.F32, false, l.channels(), l.ConvWidth)
	x.weight("da_log", g.DALog, tensor.F32, false, l.ValueHeads)
	x.weight("ddt_bias", g.DDtBias, tensor.F32, false, l.ValueHeads)
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}
