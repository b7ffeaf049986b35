package model

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// A folder of Qwen3-Next has the rows of q, k, v and z by key head, as transformers'
// fix_query_key_value_ordering reads them. Its weights are loaded into q|k|v, b, a and z, and saved
// as they were.
func TestFusedLinearAttention(t *testing.T) {
	cfg := configs(t)["qwen3_next"]
	hk, dk, dv, h := cfg.LinearNumKeyHeads, cfg.LinearKeyHeadDim, cfg.LinearValueHeadDim, cfg.HiddenSize
	group := cfg.LinearNumValueHeads / hk
	onRank(t, cfg, func(r *rank) {
		w := weights(r.Model)
		const layer = "model.layers.0.linear_attn."
		rows := func(name string, lo, n int64) []float32 { return w[layer+name][lo*h : (lo+n)*h] }
		var qkvz, ba []float32
		for i := range hk {
			qkvz = append(qkvz, rows("in_proj_qkv.weight", i*dk, dk)...)
			qkvz = append(qkvz, rows("in_proj_qkv.weight", (hk+i)*dk, dk)...)
			qkvz = append(qkvz, rows("in_proj_qkv.weight", 2*hk*dk+i*group*dv, group*dv)...)
			qkvz = append(qkvz, rows("in_proj_z.weight", i*group*dv, group*dv)...)
			ba = append(append(ba, rows("in_proj_b.weight", i*group, group)...),
				rows("in_proj_a.weight", i*group, group)...)
		}
		var all []tensor.Item
		for _, x := range items(r.Model, tensor.F32) {
			if !strings.Contains(x.Name, ".in_proj_") {
				all = append(all, x)
			}
		}
		all = append(all, tensor.Item{Name: layer + fusedQKVZ, Tensor: tensor.OfFloat32(qkvz, int64(len(qkvz))/h, h)},
			tensor.Item{Name: layer + fusedBA, Tensor: tensor.OfFloat32(ba, int64(len(ba))/h, h)})
		dir := writeFolder(t, cfg, map[string][]tensor.Item{weightsFile: all})
		err := load(t, dir, nil, func(loaded *rank) {
			for _, g := range loaded.Groups() {
				for _, p := range g.Params {
					if !slices.Equal(p.Value.View(p.Numel()).Float32s(), w[p.Name]) {
						t.Errorf("%s differs", p.Name)
					}
				}
			}
			saved := filepath.Join(t.TempDir(), "saved")
			must(loaded.Save(saved, Source{}, loaded.whole))
			f, err := tensor.OpenSafetensors(filepath.Join(saved, weightsFile))
			must(err)
			defer f.Close()
			if len(f.Entries()) != len(all) {
				t.Errorf("%d tensors are saved, want %d", len(f.Entries()), len(all))
			}
			for _, want := range all {
				e, _ := f.Entry(want.Name)
				got := make([]float32, want.Tensor.Numel())
				must(f.ReadFloat32(e, 0, got))
				if !slices.Equal(got, want.Tensor.View(want.Tensor.Numel()).Float32s()) ||
					!slices.Equal(e.Shape, want.Tensor.Dims()) {
					t.Errorf("%s is saved differently", want.Name)
				}
			}
		})
		must(err)
		all[len(all)-1].Tensor = tensor.OfFloat32(ba, int64(len(ba))) // of another shape
		dir = writeFolder(t, cfg, map[string][]tensor.Item{weightsFile: all})
		if err := load(t, dir, nil, nil); status.Of(err) != status.InvalidConfig ||
			!strings.Contains(err.Error(), fusedBA) {
			t.Errorf("another shape: %v", err)
		}
	})
	// What is one tensor on disk is frozen as a whole, and has one adapter.
	dev, err := cpu.New(cpu.Options{Workers: 1})
	must(err)
	defer dev.Close()
	_, err = New(dev, comm.Local(1)[0], cfg, Options{Freeze: []string{"*.in_proj_z.weight"}})
	if status.Of(err) != status.InvalidConfig ||
		!strings.Contains(err.Error(), "are parts of one tensor in a folder of qwen3_next") {
		t.Error(err)
	}
	_, err = New(dev, comm.Local(1)[0], cfg, Options{LoRA: &LoRA{Rank: 2, Alpha: 2, Targets: []string{"in_proj_z"}}})
	if status.Of(err) != status.InvalidConfig || !strings.HasSuffix(err.Error(), "; name in_proj_qkvz") {
		t.Error(err)
	}
	m, err := New(dev, comm.Local(1)[0], cfg,
		Options{LoRA: &LoRA{Rank: 2, Alpha: 2, Targets: []string{"in_proj_qkvz", "in_proj_ba"}}})
	must(err)
	w := m.blocks[0].mixer.(*linearMixer).in.w // q|k|v, b, a, z
	if w[0].adapter.a != w[3].adapter.a || w[1].adapter.b != w[2].adapter.b ||
		w[0].adapter.number == w[1].adapter.number {
		t.Error("the parts of a tensor on disk have adapters of their own, or tensors share one")
	}
}

// Rows of B of the adapter of a fused projection are in the files in the order of the projection's
// rows.
func TestFusedLinearAdapters(t *testing.T) {
	c := configs(t)["qwen3_next"]
	x := c.linearHeads()
	for part, suffix := range fusedParts {
		path, first, total, _ := x.module("model.layers.0.linear_attn." + suffix)
		order := c.rowOrder(path + loraB)
		if order == nil || total != x.total(part < 2) || c.rowOrder(path+loraA) != nil {
			t.Fatalf("%s: order %v of %d rows", path, order, total)
		}
		for row, want := range x.stored(part) {
			at := order.file(first + int64(row))
			if back := order.model(at); at != want || back != first+int64(row) {
				t.Errorf("%s: row %d is %d in the file, want %d, which is row %d", suffix, row, at, want, back)
			}
		}
	}
}
