package device

import (
	"reflect"
	"testing"
	"unsafe"

	"ulysses/tensor"
)

// Every tensor of every operation has a tag that says how it is used, and the tables contain every
// tensor and list.
func TestOperands(t *testing.T) {
	for _, o := range Operations {
		tensors, lists := 0, 0
		var count func(x reflect.Type)
		count = func(x reflect.Type) {
			for i := range x.NumField() {
				switch f := x.Field(i); {
				case f.Anonymous:
					count(f.Type)
				case f.Type == tensorType:
					tensors++
				case f.Type.Kind() == reflect.Slice || f.Type.Kind() == reflect.Pointer:
					lists++
				}
			}
		}
		count(o.Args)
		if len(o.Operands) != tensors || len(o.Lists) != lists || o.Size != int64(o.Args.Size()) {
			t.Errorf("%s has %d operands and %d lists, want %d and %d", o.Name, len(o.Operands), len(o.Lists),
				tensors, lists)
		}
		written := false
		for _, p := range o.Operands {
			written = written || p.Out || p.Add
			if !p.In && !p.Out && !p.Add && !p.Scratch {
				t.Errorf("%s.%s is neither read nor written", o.Name, p.Name)
			}
		}
		if !written {
			t.Errorf("%s writes nothing", o.Name)
		}
	}
}

func TestPasses(t *testing.T) {
	x := tensor.Of(nil, tensor.F32, 2, 2)
	passes := func(op Op, args unsafe.Pointer) map[string]int64 {
		m := map[string]int64{}
		for _, p := range Operations[op].Operands {
			if n := p.Passes(args); n > 0 {
				m[p.Name] = n
			}
		}
		return m
	}
	for name, c := range map[string]struct {
		got, want map[string]int64
	}{
		"product": {passes(OpGemm, unsafe.Pointer(&Gemm{A: x, B: x, C: x})),
			map[string]int64{"A": 1, "B": 1, "C": 1}},
		"sum": {passes(OpGemm, unsafe.Pointer(&Gemm{A: x, B: x, C: x, Accumulate: true})),
			map[string]int64{"A": 1, "B": 1, "C": 2}},
		"optimizer": {passes(OpAdamW, unsafe.Pointer(&AdamW{W: x, G: x, M: x, V: x})),
			map[string]int64{"W": 2, "G": 1, "M": 2, "V": 2}},
		"convolution": {passes(OpConv1dForward, unsafe.Pointer(&Conv1d{X: x, Y: x, W: x})),
			map[string]int64{"X": 1, "Y": 1, "W": 1}},
		"gradient": {passes(OpConv1dBackward,
			unsafe.Pointer(&Conv1dGrad{Conv1d: Conv1d{X: x, Y: x, W: x}, DY: x, DX: x, DW: x})),
			map[string]int64{"X": 1, "W": 1, "DY": 1, "DX": 1, "DW": 1}},
		"scratch": {passes(OpDeltaState, unsafe.Pointer(&DeltaState{K: x, State: x, Workspace: x})),
			map[string]int64{"K": 1, "State": 1}},
	} {
		if !reflect.DeepEqual(c.got, c.want) {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}
}

// A copy of arguments has copies of its lists.
func TestClone(t *testing.T) {
	a := &AttentionGrad{Attention: Attention{CuQ: []int64{0, 3}, CuK: []int64{0, 4}, Window: &Window{1, 2}, Scale: 2}}
	b := (*AttentionGrad)(Operations[OpAttentionBackward].Clone(unsafe.Pointer(a)))
	if !reflect.DeepEqual(a, b) {
		t.Errorf("%+v, want %+v", b, a)
	}
	a.CuQ[1], a.Window.Left = 7, 7
	if b.CuQ[1] != 3 || b.Window.Left != 1 || b.KVHead != nil {
		t.Errorf("%+v, %+v: the copy shares its lists", b, b.Window)
	}
	w := &SGD{Decay: []Range{{1, 2}}}
	x := (*SGD)(Operations[OpSGD].Clone(unsafe.Pointer(w)))
	w.Decay[0].Lo = 7
	if len(x.Decay) != 1 || x.Decay[0] != (Range{1, 2}) {
		t.Errorf("%+v", x)
	}
}

// A call passes the number of its operation and its arguments, and allocates nothing.
func TestCalls(t *testing.T) {
	var got Op
	var add Add
	c := NewCalls(func(s Stream, op Op, args unsafe.Pointer) error {
		if got = op; op == OpAdd {
			add = *(*Add)(args)
		}
		return nil
	})
	x, y, z := tensor.Of(nil, tensor.F32, 1), tensor.Of(nil, tensor.F32, 2), tensor.Of(nil, tensor.F32, 3)
	if err := c.Add(nil, x, y, z); err != nil || got != OpAdd || add != (Add{x, y, z}) {
		t.Errorf("%v, %+v, %v", got, add, err)
	}
	g := &Gemm{}
	if n := testing.AllocsPerRun(10, func() {
		_ = c.Add(nil, x, y, z)
		_ = c.Gemm(nil, g)
	}); n != 0 || got != OpGemm {
		t.Errorf("%v allocations", n)
	}
}
