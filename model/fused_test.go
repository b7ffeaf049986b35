package model

import (
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/tensor"
)

// Each row of a paired tensor is in the files once, and the features that the program rotates
// together are neighbours there.
func TestFileRows(t *testing.T) {
	c := configs(t)["glm4"] // heads of 8, of which 4 features are rotated
	var rows []int64
	for row := range 2 * c.HeadDim {
		at := c.fileRow(row)
		if rows = append(rows, at); c.rowOfFile(at) != row {
			t.Errorf("row %d is %d in the file, which is row %d", row, at, c.rowOfFile(at))
		}
	}
	if want := []int64{0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15}; !slices.Equal(rows, want) {
		t.Errorf("rows %v, want %v", rows, want)
	}
}

// A tensor of the files has the rows of its parts, from any element on.
func TestFused(t *testing.T) {
	c := configs(t)["phi3"]
	var tensors []Stored
	next := float32(0)
	for _, name := range []string{"q", "k", "v"} {
		first, rows := next, c.rows("self_attn."+name+"_proj")
		tensors = append(tensors,
			Stored{Name: "model.layers.1.self_attn." + name + "_proj.weight", DType: tensor.F32,
				Shape: []int64{rows, 2},
				Read: func(at int64, dst []float32) error {
					for i := range dst {
						dst[i] = first + float32(at) + float32(i)
					}
					return nil
				}})
		next += float32(2 * rows)
	}
	norm := Stored{Name: "model.layers.1.input_layernorm.weight", Shape: []int64{2}}
	got := c.InFiles(append([]Stored{norm}, tensors...))
	if len(got) != 2 || got[1].Name != "model.layers.1.self_attn.qkv_proj.weight" ||
		!slices.Equal(got[1].Shape, []int64{int64(next) / 2, 2}) {
		t.Fatalf("%+v", got)
	}
	x := make([]float32, int64(next)-3)
	if err := got[1].Read(3, x); err != nil {
		t.Fatal(err)
	}
	for i, v := range x {
		if v != float32(i+3) {
			t.Fatalf("element %d is %v", i+3, v)
		}
	}
}

// Parts of a fused matrix cannot be frozen alone, and have no adapters of their own: one is for the
// matrix.
func TestFusedRefusals(t *testing.T) {
	lora := func(targets ...string) Options { return Options{LoRA: &LoRA{Rank: 2, Alpha: 2, Targets: targets}} }
	for _, c := range []struct {
		family string
		o      Options
		code   status.Code
		want   string
	}{
		{"phi3", Options{Freeze: []string{"*.q_proj.weight"}}, status.InvalidConfig,
			"are one matrix (self_attn.qkv_proj)"},
		{"phi3", Options{Freeze: []string{"*_proj.weight"}}, status.OK, ""},
		{"phi3", lora("q_proj"), status.InvalidConfig,
			`"q_proj" is a part of model.layers.0.self_attn.qkv_proj in the files of this model, for which PEFT has one adapter; name qkv_proj`},
		{"phi3", lora("qkv_proj", "mlp.gate_up_proj"), status.OK, ""},
		{"phi3", lora(AllLinear), status.OK, ""},
		{"glm4", lora("up_proj"), status.InvalidConfig, "name gate_up_proj"},
		{"glm4", lora(AllLinear), status.OK, ""},
	} {
		m := &Model{Config: configs(t)[c.family]}
		b := newBlock(m.Config, 0)
		m.groups = []*Group{{}, {Params: b.params()}, {}}
		err := m.freeze(c.o)
		if status.Of(err) != c.code || c.want != "" && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %+v: %v, want %v and %q", c.family, c.o, err, c.code, c.want)
		}
	}
}
