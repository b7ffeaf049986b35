package job

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/sp"
	"ulysses/tensor"
)

// attentionInput is the input of a job of kind "attention": its header checked, its documents read.
type attentionInput struct {
	file                   *tensor.Safetensors
	q, k, v                tensor.Entry // [Sq, Hq, D], [Sk, Hkv, D], [Sk, Hkv, Dv]
	dout                   tensor.Entry // [Sq, Hq, Dv], optional
	sq, sk, hq, hkv, d, dv int64
	cuQ, cuK, positions    []int64
}

// Tensors of the input beside q, k, v and dout. Results of an earlier run may lie in the file too and are not read.
var (
	documentTensors = []string{"cu_seqlens", "cu_seqlens_k", "position_ids"}
	notBuiltTensors = []string{"sinks", "alibi", "block_mask"}
	resultTensors   = []string{"out", "lse", "dq", "dk", "dv"}
)

func (in *attentionInput) backward() bool { return in.dout.Name != "" }

func (in *attentionInput) String() string {
	s := fmt.Sprintf("%v, %v, %v", in.q, in.k, in.v)
	if in.backward() {
		s += fmt.Sprintf(", %v", in.dout)
	}
	return s
}

func (in *attentionInput) layer(t *AttentionTable) sp.Layer {
	l := sp.Layer{Heads: in.hq, KVHeads: in.hkv, Dim: in.d, VDim: in.dv, Causal: t.Causal, Scale: t.Scale, NoBackward: !in.backward()}
	if t.Window != noWindow {
		l.Window = &device.Window{Left: t.Window[0], Right: t.Window[1]}
	}
	return l
}

func (in *attentionInput) spec() sp.BatchSpec {
	return sp.BatchSpec{Batch: 1, Seq: in.sq, KVSeq: in.sk, CuSeqlens: in.cuQ, CuSeqlensKV: in.cuK, Positions: in.positions}
}

// fault says in which file what package sp refused is.
func (in *attentionInput) fault(err error) error {
	code := status.Of(err)
	if code == status.InvalidArgument {
		code = status.InvalidConfig
	}
	return status.Errorf(code, "attention.input: %s: %w", in.file.Path, err)
}

// faultList gathers errors, so that one run shows all of them.
type faultList struct {
	errs []error
	code status.Code // Unsupported, unless something is plain wrong
}

func (f *faultList) add(code status.Code, format string, args ...any) {
	if len(f.errs) == 0 || f.code == status.Unsupported {
		f.code = code
	}
	f.errs = append(f.errs, fmt.Errorf(format, args...))
}

func (f *faultList) err() error {
	if len(f.errs) == 0 {
		return nil
	}
	err := errors.Join(f.errs...)
	return &status.Error{Code: f.code, Text: err.Error(), Err: err}
}

// openAttention opens the input and checks the table and the header; writer is the rank that will write the output.
func openAttention(t *AttentionTable, writer bool) (*attentionInput, error) {
	var f faultList
	t.refuse(&f)
	if writer {
		checkOutput(&f, t)
	}
	file, err := tensor.OpenSafetensors(t.Input)
	if err != nil {
		f.add(status.Of(err), "attention.input: %w", err)
		return nil, f.err()
	}
	in := &attentionInput{file: file}
	in.checkHeader(&f)
	return in, f.err()
}

// refuse names the options that are not built.
func (t *AttentionTable) refuse(f *faultList) {
	if t.Softcap != 0 {
		f.add(status.Unsupported, "attention.softcap = %v: not built yet: leave it at 0", t.Softcap)
	}
	if t.Dropout != 0 {
		f.add(status.Unsupported, "attention.dropout = %v: not built yet: leave it at 0", t.Dropout)
	}
	if math.IsNaN(t.Scale) || math.IsInf(t.Scale, 0) {
		f.add(status.InvalidConfig, "attention.scale = %v: give a finite number, or 0 for 1/sqrt(D)", t.Scale)
	}
}

// checkOutput finds out before the work whether its result can be written.
func checkOutput(f *faultList, t *AttentionTable) {
	in, err := os.Stat(t.Input)
	if out, err2 := os.Stat(t.Output); err == nil && err2 == nil {
		if os.SameFile(in, out) {
			f.add(status.InvalidConfig, "attention.output: %s is attention.input: name another file", t.Output)
		} else if out.IsDir() {
			f.add(status.IO, "attention.output: %s is a folder: name a file", t.Output)
		}
	}
	probe, err := os.CreateTemp(filepath.Dir(t.Output), ".ulysses.*")
	if err != nil {
		f.add(status.IO, "attention.output: %s cannot be written: %w: make its folder, or name another", t.Output, err)
		return
	}
	probe.Close()
	os.Remove(probe.Name())
}

func (in *attentionInput) checkHeader(f *faultList) {
	known := slices.Concat([]string{"q", "k", "v", "dout"}, documentTensors)
	for _, e := range in.file.Entries() {
		switch {
		case slices.Contains(notBuiltTensors, e.Name):
			f.add(status.Unsupported, "attention.input: tensor %v: %s is not built yet: take it out", e, e.Name)
		case !slices.Contains(known, e.Name) && !slices.Contains(resultTensors, e.Name):
			f.add(status.InvalidConfig, "attention.input: tensor %v: unknown: the names are %s", e, strings.Join(known, ", "))
		}
	}
	before := len(f.errs)
	in.q, in.k, in.v = in.heads(f, "q", true), in.heads(f, "k", true), in.heads(f, "v", true)
	in.dout = in.heads(f, "dout", false)
	if len(f.errs) > before {
		return // what follows compares their shapes
	}
	in.sq, in.hq, in.d = in.q.Shape[0], in.q.Shape[1], in.q.Shape[2]
	in.sk, in.hkv, in.dv = in.k.Shape[0], in.k.Shape[1], in.v.Shape[2]
	if in.k.Shape[2] != in.d {
		f.add(status.InvalidConfig, "attention.input: %v and %v: heads of q and k must be as wide", in.q, in.k)
	}
	if in.v.Shape[0] != in.sk || in.v.Shape[1] != in.hkv {
		f.add(status.InvalidConfig, "attention.input: %v and %v: k and v must have as many rows and heads", in.k, in.v)
	}
	if in.hq%in.hkv != 0 {
		f.add(status.InvalidConfig, "attention.input: %v and %v: the heads of q must be a multiple of those of k", in.q, in.k)
	}
	if want := []int64{in.sq, in.hq, in.dv}; in.backward() && !slices.Equal(in.dout.Shape, want) {
		f.add(status.InvalidConfig, "attention.input: %v: it has the shape of the output, %v", in.dout, want)
	}
	in.cuQ = in.integers(f, "cu_seqlens", 0)
	in.cuK = in.integers(f, "cu_seqlens_k", 0)
	in.positions = in.integers(f, "position_ids", in.sq)
}

// noWindow is attention.window where every key is seen that other masks leave.
var noWindow = [2]int64{-1, -1}

// heads finds a tensor of three axes, none empty, in a type that widens to f32 exactly.
func (in *attentionInput) heads(f *faultList, name string, required bool) tensor.Entry {
	e, ok := in.file.Entry(name)
	switch {
	case !ok && required:
		f.add(status.InvalidConfig, "attention.input: %s has no tensor %s: save q [Sq, Hq, D], k [Sk, Hkv, D] and v [Sk, Hkv, Dv]", in.file.Path, name)
	case !ok:
	case e.DType != tensor.F32 && e.DType != tensor.BF16 && e.DType != tensor.F16:
		f.add(status.InvalidConfig, "attention.input: tensor %v: save it as F32, BF16 or F16", e)
	case len(e.Shape) != 3 || e.Numel() == 0:
		f.add(status.InvalidConfig, "attention.input: tensor %v: it must have three axes, [rows, heads, features], none of them empty", e)
	}
	return e
}

// integers reads an optional list; length 0 = any.
func (in *attentionInput) integers(f *faultList, name string, length int64) []int64 {
	e, ok := in.file.Entry(name)
	if !ok {
		return nil
	}
	if e.DType != tensor.I32 && e.DType != tensor.I64 {
		f.add(status.InvalidConfig, "attention.input: tensor %v: save it as I32 or I64", e)
		return nil
	}
	if len(e.Shape) != 1 || length > 0 && e.Shape[0] != length || e.Shape[0] > max(in.sq, in.sk)+1 {
		f.add(status.InvalidConfig, "attention.input: tensor %v: it must be a list%s", e,
			map[bool]string{true: fmt.Sprintf(" of %d, one for each row of q", length), false: ": each document's start, then the end"}[length > 0])
		return nil
	}
	x := make([]int64, e.Shape[0])
	if err := in.file.ReadInt64(e, 0, x); err != nil {
		f.add(status.Of(err), "attention.input: %w", err)
		return nil
	}
	return x
}

// read fills values with the elements of e from start on, and refuses NaN and infinity.
func (in *attentionInput) read(e tensor.Entry, start int64, values []float32) error {
	if err := in.file.ReadFloat32(e, start, values); err != nil {
		return err
	}
	for i, v := range values {
		if v-v != 0 { // NaN and the infinities alone
			at := start + int64(i)
			row := e.Shape[1] * e.Shape[2]
			return status.Errorf(status.Numeric, "attention.input: %s: %s[%d, %d, %d] is %v: save finite numbers",
				in.file.Path, e.Name, at/row, at%row/e.Shape[2], at%e.Shape[2], v)
		}
	}
	return nil
}
