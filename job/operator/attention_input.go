package operator

import (
	"fmt"
	"math"

	"ulysses/device"
	"ulysses/internal/blockmask"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/sp"
	"ulysses/tensor"
)

// attentionInput is the input of a job of kind "attention". The tensors are entries of the file;
// the lists of integers are in memory.
type attentionInput struct {
	inputFile
	q, k, v                tensor.Entry // [Sq, Hq, D], [Sk, Hkv, D], [Sk, Hkv, Dv]
	dout                   tensor.Entry // [Sq, Hq, Dv], optional
	sq, sk, hq, hkv, d, dv int64
	cuQ, cuK, positions    []int64

	// Optional: [Hq] sinks and slopes, U8 [Hq or 1, ⌈Sq/rows⌉, ⌈Sk/columns⌉] and the rows and
	// columns of its blocks
	sinks, alibi, mask tensor.Entry
	block              [2]int64
	pattern            *blockmask.Pattern // of the mask, instead of a tensor; nil = none
	patternName        string
	maskShape          []int64 // of the mask, a tensor's or a pattern's; nil = no mask
	maskBits           []byte  // its elements, after read
}

var (
	attentionTensors = []string{"q", "k", "v", "dout", "cu_seqlens", "cu_seqlens_k", "position_ids", "sinks", "alibi",
		"block_mask"}
	attentionResults = []string{"out", "lse", "dq", "dk", "dv", "dsinks", "dalibi"}
)

func (in *attentionInput) backward() bool { return in.dout.Name != "" }

func (in *attentionInput) String() string {
	s := fmt.Sprintf("%v, %v, %v", in.q, in.k, in.v)
	if in.backward() {
		s += fmt.Sprintf(", %v", in.dout)
	}
	for _, e := range []tensor.Entry{in.sinks, in.alibi, in.mask} {
		if e.Name != "" {
			s += fmt.Sprintf(", %v", e)
		}
	}
	if in.pattern != nil {
		s += fmt.Sprintf(", block mask %s %v", in.patternName, in.maskShape)
	}
	return s
}

func (in *attentionInput) layer(t *file.AttentionTable) sp.Layer {
	l := sp.Layer{Heads: in.hq, KVHeads: in.hkv, Dim: in.d, VDim: in.dv, Causal: t.Causal, Scale: t.Scale,
		NoBackward: !in.backward(), Softcap: t.Softcap, Dropout: t.Dropout, Sinks: in.sinks.Name != "",
		ALiBi: in.alibi.Name != ""}
	if in.maskShape != nil {
		l.BlockRows, l.BlockColumns = t.Block[0], t.Block[1]
	}
	if t.Window != noWindow {
		l.Window = &device.Window{Left: t.Window[0], Right: t.Window[1]}
	}
	return l
}

// noWindow is the value of attention.window for attention without a window.
var noWindow = [2]int64{-1, -1}

func (in *attentionInput) elements() int64 {
	return in.sq*in.hq*in.d + in.sk*in.hkv*(in.d+in.dv)
}

func (in *attentionInput) spec() sp.BatchSpec {
	return sp.BatchSpec{Batch: 1, Seq: in.sq, KVSeq: in.sk, CuSeqlens: in.cuQ, CuSeqlensKV: in.cuK,
		Positions: in.positions}
}

// openAttention opens the input and checks the table and the header. It returns an input also with
// an error. seed is that of random blocks. writer says that this rank will write the output.
func openAttention(t *file.AttentionTable, seed int64, writer bool) (*attentionInput, error) {
	var f faultList
	checkAttentionTable(t, &f)
	in := &attentionInput{inputFile: openInput(&f, "attention", t.Input, t.Output, writer), block: t.Block,
		pattern: blockPattern(t, seed), patternName: t.Pattern.Kind}
	if in.file != nil {
		in.checkHeader(&f)
	}
	return in, f.err()
}

// checkAttentionTable checks the options of the table.
func checkAttentionTable(t *file.AttentionTable, f *faultList) {
	if math.IsNaN(t.Scale) || math.IsInf(t.Scale, 0) {
		f.add(status.InvalidConfig, "attention.scale = %v: not finite; set a number, or 0 for 1/sqrt(D)", t.Scale)
	}
	if !device.IsSoftcap(t.Softcap) {
		f.add(status.InvalidConfig, "attention.softcap = %v: set a number from %v to %v, or 0 for none", t.Softcap,
			device.MinSoftcap, device.MaxSoftcap)
	}
}

func (in *attentionInput) checkHeader(f *faultList) {
	in.checkNames(f, attentionTensors, attentionResults)
	before := len(f.errs)
	heads := func(name, required string) tensor.Entry {
		return in.floats(f, name, required, "tokens", "heads", "features")
	}
	const all = "q [Sq, Hq, D], k [Sk, Hkv, D] and v [Sk, Hkv, Dv]"
	in.q, in.k, in.v, in.dout = heads("q", all), heads("k", all), heads("v", all), heads("dout", "")
	if len(f.errs) > before {
		return // the following checks need the shapes
	}
	in.sq, in.hq, in.d = in.q.Shape[0], in.q.Shape[1], in.q.Shape[2]
	in.sk, in.hkv, in.dv = in.k.Shape[0], in.k.Shape[1], in.v.Shape[2]
	if in.k.Shape[2] != in.d {
		f.add(status.InvalidConfig,
			"attention.input: %v and %v: the widths of a head differ; save q and k with the same width", in.q, in.k)
	}
	if in.v.Shape[0] != in.sk || in.v.Shape[1] != in.hkv {
		f.add(status.InvalidConfig,
			"attention.input: %v and %v: tokens or heads differ; save k and v with the same tokens and heads",
			in.k, in.v)
	}
	if in.hq%in.hkv != 0 {
		f.add(status.InvalidConfig,
			"attention.input: %v and %v: the number of heads of q is not a multiple of the number of heads of k; save whole groups",
			in.q, in.k)
	}
	in.checkShape(f, in.dout, "the output", in.sq, in.hq, in.dv)
	in.sinks, in.alibi = in.floats(f, "sinks", "", "heads"), in.floats(f, "alibi", "", "heads")
	for _, e := range []tensor.Entry{in.sinks, in.alibi} {
		if len(e.Shape) == 1 {
			in.checkShape(f, e, "one number for each head of q", in.hq)
		}
	}
	if in.pattern != nil {
		in.checkPattern(f)
	} else {
		in.checkMask(f)
	}
	most := max(in.sq, in.sk) + 1
	in.cuQ = in.integers(f, "cu_seqlens", 0, most)
	in.cuK = in.integers(f, "cu_seqlens_k", 0, most)
	in.positions = in.integers(f, "position_ids", in.sq, most)
}

// defaultBlock is the default of attention.block.
var defaultBlock = file.Default().Attention.Block

// checkMask checks the block mask, if there is one.
func (in *attentionInput) checkMask(f *faultList) {
	e, ok := in.file.Entry("block_mask")
	rows, columns := in.block[0], in.block[1]
	if !ok {
		if in.block != defaultBlock {
			f.add(status.InvalidConfig,
				"attention.block = [%d, %d]: %s has no tensor block_mask; save one, set attention.pattern.kind, or remove the key",
				rows, columns, in.file.Path)
		}
		return
	}
	in.mask, in.maskShape = e, e.Shape
	want := []int64{in.hq, (in.sq + rows - 1) / rows, (in.sk + columns - 1) / columns}
	if e.DType != tensor.U8 {
		f.add(status.InvalidConfig,
			"attention.input: tensor %v: the type is not supported; save it as U8, 0 where a block is hidden", e)
	} else if len(e.Shape) != 3 || e.Shape[0] != in.hq && e.Shape[0] != 1 || e.Shape[1] != want[1] ||
		e.Shape[2] != want[2] {
		f.add(status.InvalidConfig,
			"attention.input: tensor %v: wrong shape for attention.block = [%d, %d], %d queries and %d keys; save %v, or 1 instead of %d for one mask of all heads, or set attention.block",
			e, rows, columns, in.sq, in.sk, want, in.hq)
	}
}
