package gdn

import (
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// Calls check what memory safety needs. NewPlan and sp.NewBatch have checked everything else.

// operand is a tensor of a call and its required type, shape and strides. The last axis is dense.
type operand struct {
	name     string
	t        tensor.Tensor
	dtype    tensor.DType
	dense    bool // all axes are dense
	anyLast  bool // any stride of the last axis is allowed
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
		return status.Errorf(status.InvalidArgument, "%s: %s is %v; it must be %v", op, o.name, o.t, want)
	}
	if o.dense && !o.t.Contiguous() {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v; it must be dense", op, o.name, o.t)
	}
	if !o.anyLast && o.t.Dim(-1) > 1 && o.t.Stride[o.t.NDim-1] != 1 {
		return status.Errorf(status.InvalidArgument, "%s: %s is %v; its last axis must be dense", op, o.name, o.t)
	}
	return nil
}

// checker checks the tensors of a call, whose shapes follow from the plan and the batch. err is the
// first error.
type checker struct {
	p    *Plan
	b    *sp.Batch
	op   string
	docs int64
	err  error
}

func (x *checker) check(o operand) {
	if x.err == nil {
		x.err = o.check(x.op)
	}
}

func (x *checker) keys(name string, t tensor.Tensor) {
	l := &x.p.layer
	x.check(operand{name: name, t: t, dtype: l.DType, shape: [4]int64{x.b.Batch(), x.b.Rows(), l.KeyHeads, l.KeyDim},
		dims: 4})
}

func (x *checker) values(name string, t tensor.Tensor) {
	l := &x.p.layer
	x.check(operand{name: name, t: t, dtype: l.DType,
		shape: [4]int64{x.b.Batch(), x.b.Rows(), l.ValueHeads, l.ValueDim}, dims: 4})
}

func (x *checker) gate(name string, t tensor.Tensor) {
	x.check(operand{name: name, t: t, dtype: tensor.F32, anyLast: true,
		shape: [4]int64{x.b.Batch(), x.b.Rows(), x.p.layer.ValueHeads}, dims: 3})
}

func (x *checker) state(name string, t tensor.Tensor) {
	l := &x.p.layer
	x.check(operand{name: name, t: t, dtype: tensor.F32, dense: true, optional: true,
		shape: [4]int64{x.docs, l.ValueHeads, l.KeyDim, l.ValueDim}, dims: 4})
}

// activation checks an activation of a layer, with n features.
func (x *checker) activation(name string, t tensor.Tensor, n int64) {
	x.check(operand{name: name, t: t, dtype: x.p.layer.DType, shape: [4]int64{x.b.Batch(), x.b.Rows(), n}, dims: 3})
}

// weight checks a weight of a layer, or its gradient. With either, F32 is allowed in place of
// dtype.
func (x *checker) weight(name string, t tensor.Tensor, dtype tensor.DType, either bool, shape ...int64) {
	if either && t.DType == tensor.F32 {
		dtype = tensor.F32
	}
	o := operand{name: name, t: t, dtype: dtype, dense: true, dims: len(shape)}
	copy(o.shape[:], shape)
	x.check(o)
}

// memory checks the sizes of Saved and Workspace.
func (x *checker) memory(kind callKind, saved, workspace tensor.Tensor) {
	if x.err != nil {
		return
	}
	if x.p.layer.NoBackward && kind.keep {
		x.err = status.Errorf(status.InvalidArgument, "%s: "+sp.SavedUnused, x.op)
		return
	}
	needSaved, needWorkspace := x.p.callBytes(x.p.layoutOf(x.b), kind)
	if kind.keep {
		x.err = sp.CheckBytes(x.op, "saved", saved, needSaved)
	}
	if x.err == nil {
		x.err = sp.CheckBytes(x.op, "workspace", workspace, needWorkspace)
	}
}

// newChecker returns a checker of a call. Its error is set if the batch is of other ranks, or its
// keys differ from its queries.
func (p *Plan) newChecker(op string, b *sp.Batch) (x checker) {
	x = checker{p: p, b: b, op: op}
	if int64(b.Rank()) != p.rank || int64(b.Size()) != p.size {
		x.err = status.Errorf(status.InvalidArgument,
			"%s: the batch is of rank %d of %d, the plan of rank %d of %d; make both with one communicator",
			op, b.Rank(), b.Size(), p.rank, p.size)
		return x
	}
	if b.Zigzag() {
		x.err = status.Errorf(status.InvalidArgument,
			"%s: the batch is a zigzag, and recurrent states need the tokens in order; make one without zigzag", op)
		return x
	}
	if b.Mixed() {
		x.err = status.Errorf(status.InvalidArgument,
			"%s: the batch has other keys than queries; make one without kv_seq, kv_rows and cu_seqlens_k", op)
		return x
	}
	cu, _ := b.Documents()
	x.docs = int64(len(cu) - 1)
	return x
}

func (p *Plan) checkForward(op string, b *sp.Batch, a *Args, kind callKind) error {
	x := p.newChecker(op, b)
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

// requireSaved sets the error if there are no saved activations.
func (x *checker) requireSaved(saved tensor.Tensor) {
	if x.err == nil && (x.p.layer.NoBackward || saved.IsNil()) {
		x.err = status.Errorf(status.InvalidArgument, "%s: "+sp.NoSaved, x.op)
	}
}

func (p *Plan) checkRecompute(op string, b *sp.Batch, a *Args, kind callKind) error {
	x := p.newChecker(op, b)
	x.requireSaved(a.Saved)
	if x.err != nil {
		return x.err
	}
	x.values("out", a.Out)
	x.state("state_in", a.StateIn)
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}

func (p *Plan) checkBackward(op string, b *sp.Batch, a *Args, g *Grads, kind callKind) error {
	x := p.newChecker(op, b)
	x.requireSaved(a.Saved)
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
		x.err = status.Errorf(status.InvalidArgument,
			"%s: dstate_in without state_in; pass the state_in of the forward call", op)
	}
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}

// newLayerChecker is newChecker for calls of a layer.
func (p *Plan) newLayerChecker(op string, b *sp.Batch) checker {
	x := p.newChecker(op, b)
	if x.err == nil && p.layer.ConvWidth == 0 {
		x.err = status.Errorf(status.InvalidArgument, "%s: the plan was made without a convolution; set conv_width", op)
	}
	return x
}

// weights checks the weights of a layer, and the gate of its norm.
func (x *checker) weights(a *LayerArgs) {
	l := &x.p.layer
	x.weight("conv", a.Conv, l.DType, false, l.Channels(), l.ConvWidth)
	x.weight("a_log", a.ALog, l.DType, true, l.ValueHeads)
	x.weight("dt_bias", a.DtBias, l.DType, true, l.ValueHeads)
	if l.GatedNorm {
		x.values("z", a.Z)
		x.weight("norm", a.Norm, l.DType, false, l.ValueDim)
	}
}

func (p *Plan) checkLayerForward(op string, b *sp.Batch, a *LayerArgs, kind callKind) error {
	x := p.newLayerChecker(op, b)
	if x.err != nil {
		return x.err
	}
	x.activation("qkv", a.QKV, p.layer.Channels())
	x.activation("a", a.A, p.layer.ValueHeads)
	x.activation("b", a.B, p.layer.ValueHeads)
	x.weights(a)
	x.values("out", a.Out)
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}

func (p *Plan) checkLayerRecompute(op string, b *sp.Batch, a *LayerArgs, kind callKind) error {
	x := p.newLayerChecker(op, b)
	x.requireSaved(a.Saved)
	if x.err != nil {
		return x.err
	}
	x.weights(a)
	x.values("out", a.Out)
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}

func (p *Plan) checkLayerBackward(op string, b *sp.Batch, a *LayerArgs, g *LayerGrads, kind callKind) error {
	x := p.newLayerChecker(op, b)
	x.requireSaved(a.Saved)
	if x.err != nil {
		return x.err
	}
	l := &p.layer
	x.weights(a)
	x.values("dout", g.DOut)
	x.activation("dqkv", g.DQKV, l.Channels())
	x.activation("da", g.DA, l.ValueHeads)
	x.activation("db", g.DB, l.ValueHeads)
	x.weight("dconv", g.DConv, tensor.F32, false, l.Channels(), l.ConvWidth)
	x.weight("da_log", g.DALog, tensor.F32, false, l.ValueHeads)
	x.weight("ddt_bias", g.DDtBias, tensor.F32, false, l.ValueHeads)
	if l.GatedNorm {
		x.values("dz", g.DZ)
		x.weight("dnorm", g.DNorm, tensor.F32, false, l.ValueDim)
	}
	x.memory(kind, a.Saved, a.Workspace)
	return x.err
}
