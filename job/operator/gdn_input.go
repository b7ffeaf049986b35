package operator

import (
	"fmt"
	"math"

	"ulysses/gdn"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/sp"
	"ulysses/tensor"
)

// gdnInput is the input of a job of kind "gdn". The tensors are entries of the file; the lists of
// integers are in memory.
type gdnInput struct {
	inputFile
	q, k, v              tensor.Entry // [S, Hk, Dk], [S, Hk, Dk], [S, Hv, Dv]
	g, beta              tensor.Entry // [S, Hv]
	dout                 tensor.Entry // [S, Hv, Dv], optional
	stateIn, dstateOut   tensor.Entry // [documents, Hv, Dk, Dv], optional
	s, hk, hv, dk, dv, n int64        // n documents
	cu, positions        []int64
}

var (
	gdnTensors = []string{"q", "k", "v", "g", "beta", "dout", "state_in", "dstate_out", "cu_seqlens", "position_ids"}
	gdnResults = []string{"out", "state_out", "dq", "dk", "dv", "dg", "dbeta", "dstate_in"}
)

func (in *gdnInput) backward() bool { return in.dout.Name != "" }

func (in *gdnInput) String() string {
	s := fmt.Sprintf("%v, %v, %v", in.q, in.k, in.v)
	if in.backward() {
		s += fmt.Sprintf(", %v", in.dout)
	}
	return s
}

func (in *gdnInput) layer(t *file.GDNTable) gdn.Layer {
	strategy, _ := gdn.ParseStrategy(t.Strategy) // file.Parse has checked it
	return gdn.Layer{KeyHeads: in.hk, ValueHeads: in.hv, KeyDim: in.dk, ValueDim: in.dv, Scale: t.Scale,
		L2Norm: t.QKL2Norm, Chunk: t.Chunk, Strategy: strategy, Tokens: in.s, NoBackward: !in.backward()}
}

func (in *gdnInput) elements() int64 { return in.s * (2*in.hk*in.dk + in.hv*in.dv) }

func (in *gdnInput) spec() sp.BatchSpec {
	return sp.BatchSpec{Batch: 1, Seq: in.s, CuSeqlens: in.cu, Positions: in.positions}
}

// openGDN opens the input and checks the table and the header. It returns an input also with an
// error. writer says that this rank will write the output.
func openGDN(t *file.GDNTable, writer bool) (*gdnInput, error) {
	var f faultList
	if math.IsNaN(t.Scale) || math.IsInf(t.Scale, 0) {
		f.add(status.InvalidConfig, "gdn.scale = %v: not finite; set a number, or 0 for 1/sqrt(Dk)", t.Scale)
	}
	in := &gdnInput{inputFile: openInput(&f, "gdn", t.Input, t.Output, writer)}
	if in.file != nil {
		in.checkHeader(&f)
	}
	return in, f.err()
}

func (in *gdnInput) checkHeader(f *faultList) {
	in.checkNames(f, gdnTensors, gdnResults)
	before := len(f.errs)
	const all = "q, k [S, Hk, Dk], v [S, Hv, Dv], g and beta [S, Hv]"
	heads := func(name, required string) tensor.Entry {
		return in.floats(f, name, required, "tokens", "heads", "features")
	}
	states := func(name string) tensor.Entry {
		return in.floats(f, name, "", "documents", "heads", "key features", "value features")
	}
	in.q, in.k, in.v, in.dout = heads("q", all), heads("k", all), heads("v", all), heads("dout", "")
	in.g, in.beta = in.floats(f, "g", all, "tokens", "heads"), in.floats(f, "beta", all, "tokens", "heads")
	in.stateIn, in.dstateOut = states("state_in"), states("dstate_out")
	if len(f.errs) > before {
		return // the following checks need the shapes
	}
	in.s, in.hk, in.dk = in.q.Shape[0], in.q.Shape[1], in.q.Shape[2]
	in.hv, in.dv = in.v.Shape[1], in.v.Shape[2]
	in.checkShape(f, in.k, "q", in.s, in.hk, in.dk)
	in.checkShape(f, in.g, "v without features", in.s, in.hv)
	in.checkShape(f, in.beta, "v without features", in.s, in.hv)
	in.checkShape(f, in.dout, "the output", in.s, in.hv, in.dv)
	if in.v.Shape[0] != in.s {
		f.add(status.InvalidConfig, "gdn.input: %v and %v: tokens differ; save q and v with the same tokens",
			in.q, in.v)
	}
	if in.hv%in.hk != 0 {
		f.add(status.InvalidConfig,
			"gdn.input: %v and %v: the number of heads of v is not a multiple of the number of heads of q; save whole groups",
			in.q, in.v)
	}
	if in.dstateOut.Name != "" && !in.backward() {
		f.add(status.InvalidConfig, "gdn.input: %v without dout; save dout", in.dstateOut)
	}
	in.cu = in.integers(f, "cu_seqlens", 0, in.s+1)
	in.positions = in.integers(f, "position_ids", in.s, in.s)
}

// checkStates checks the shapes of the states with the documents of the batch.
func (in *gdnInput) checkStates(b *sp.Batch) error {
	var f faultList
	cu, _ := b.Documents()
	in.n = int64(len(cu) - 1)
	for _, e := range []tensor.Entry{in.stateIn, in.dstateOut} {
		in.checkShape(&f, e, "the states of the documents", in.n, in.hv, in.dk, in.dv)
	}
	return f.err()
}

// positiveDecay refuses values of g above 0. g is the logarithm of a decay; above 0 the state grows
// with each token, which is an error of sign in the program that saved the file.
func positiveDecay(g float32) string {
	if g > 0 {
		return "g is the logarithm of a decay, at most 0: save -exp(A_log)·softplus(a + dt_bias)"
	}
	return ""
}

// tooLarge refuses elements of queries and keys whose sum of squares may overflow F32: the norm
// would be Inf, and the normalized vector 0.
func (in *gdnInput) tooLarge(x float32) string {
	if most := math.Sqrt(math.MaxFloat32 / float64(in.dk)); math.Abs(float64(x)) > most {
		return fmt.Sprintf(
			"gdn.qk_l2norm adds the squares of %d features, which overflows F32 above %.3g: scale q and k down, the normalized values stay the same",
			in.dk, most)
	}
	return ""
}
