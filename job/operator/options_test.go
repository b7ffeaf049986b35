package operator

import (
	"fmt"
	"math"
	"path/filepath"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/tensor"
	"ulysses/testkit/near"
	"ulysses/testkit/ref"
	"ulysses/testkit/tensorfile"
)

// The lengths of TestAttentionOptions: tokens, query heads, key heads, features.
const optS, optH, optKV, optD = 14, 4, 2, 8

// optionInput writes the input of a job with a block mask if mask is not nil, and the other
// options by name. It returns the path and all values in float64.
func optionInput(t *testing.T, mask []byte, maskShape []int64, vectors map[string][]float32, cu []int64) (string,
	map[string][]float64) {
	t.Helper()
	values := map[string][]float64{}
	var items []tensor.Item
	add := func(name string, x []float32, shape ...int64) {
		items = append(items, tensor.Item{Name: name, Tensor: tensor.OfFloat32(x, shape...)})
		for _, v := range x {
			values[name] = append(values[name], float64(v))
		}
	}
	for i, name := range []string{"q", "k", "v", "dout"} {
		heads := int64(optH)
		if name == "k" || name == "v" {
			heads = optKV
		}
		x := make([]float32, optS*heads*optD)
		for j := range x {
			x[j] = float32(math.Sin(float64(j*(2*i+3)) + float64(i)))
		}
		add(name, x, optS, heads, optD)
	}
	for name, x := range vectors {
		add(name, x, int64(len(x)))
	}
	if cu != nil {
		items = append(items, tensor.Item{Name: "cu_seqlens", Tensor: tensor.OfInt64(cu, int64(len(cu)))})
	}
	if mask != nil {
		items = append(items,
			tensor.Item{Name: "block_mask", Tensor: tensor.Of(nil, tensor.U8, maskShape...), Write: writeBytes(mask)})
	}
	path := filepath.Join(t.TempDir(), "in.safetensors")
	if err := tensor.WriteSafetensors(path, nil, items); err != nil {
		t.Fatal(err)
	}
	return path, values
}

// Sinks, slopes, block masks, windows, soft caps and dropout have the results of the reference on
// every mesh. Results that the ranks add are written once.
func TestAttentionOptions(t *testing.T) {
	sinks, slopes := []float32{0.5, -1.25, 2, 0}, []float32{0.5, 0.25, 0.125, 0.0625}
	mask := make([]byte, optH*5*4)
	for i := range mask {
		mask[i] = byte(i * 3 % 5 % 2)
	}
	for i := range 4 { // the last queries of head 1 see no key
		mask[(1*5+4)*4+i] = 0
	}
	for _, c := range []struct {
		name  string
		table func(a *file.AttentionTable)
		mask  []byte
		shape []int64
		of    map[string][]float32
		cu    []int64
	}{
		{name: "sinks, soft cap", table: func(a *file.AttentionTable) { a.Softcap = 1.5 },
			of: map[string][]float32{"sinks": sinks}},
		{name: "slopes, window, documents", table: func(a *file.AttentionTable) { a.Window = [2]int64{3, 0} },
			of: map[string][]float32{"alibi": slopes}, cu: []int64{0, 5, 14}},
		{name: "dropout, sinks, slopes", table: func(a *file.AttentionTable) { a.Causal, a.Dropout = false, 0.25 },
			of: map[string][]float32{"alibi": slopes, "sinks": sinks}},
		{name: "block mask", table: func(a *file.AttentionTable) { a.Causal, a.Block = false, [2]int64{3, 4} },
			mask: mask, shape: []int64{optH, 5, 4}},
		{name: "dropout with a seed of its own", table: func(a *file.AttentionTable) { a.Dropout, a.Seed = 0.25, 77 }},
		{name: "fixed", table: func(a *file.AttentionTable) {
			a.Causal, a.Block = false, [2]int64{3, 3}
			a.Pattern = file.PatternTable{Kind: "fixed", Local: 2, GlobalPatterns: 2, PerHead: true, Horizontal: true}
		}},
		{name: "variable, causal", table: func(a *file.AttentionTable) {
			a.Block, a.Pattern = [2]int64{2, 2},
				file.PatternTable{Kind: "variable", Windows: []int64{1, 3}, Globals: []int64{0, 3},
					GlobalEnds: []int64{1, 5}}
		}, cu: []int64{0, 5, 14}},
		{name: "bigbird", table: func(a *file.AttentionTable) {
			a.Causal, a.Block, a.Seed, a.Pattern = false, [2]int64{2, 2}, 9,
				file.PatternTable{Kind: "bigbird", PerHead: true, Random: 2, Global: -1, Window: 1}
		}},
		{name: "longformer", table: func(a *file.AttentionTable) {
			a.Causal, a.Block, a.Pattern = false, [2]int64{2, 2},
				file.PatternTable{Kind: "longformer", Globals: []int64{2}}
		}, of: map[string][]float32{"sinks": sinks}},
		{name: "sliding, causal", table: func(a *file.AttentionTable) {
			a.Block, a.Pattern = [2]int64{2, 2}, file.PatternTable{Kind: "sliding"}
		}},
		{name: "one block mask, causal", table: func(a *file.AttentionTable) { a.Block = [2]int64{3, 4} },
			mask: mask[20:40], shape: []int64{1, 5, 4}, cu: []int64{0, 5, 14}},
	} {
		path, x := optionInput(t, c.mask, c.shape, c.of, c.cu)
		j := file.Default()
		j.Kind, j.Attention = "attention", *attentionTable(path, "")
		c.table(&j.Attention)
		a := ref.Attention{Hq: optH, Hkv: optKV, D: optD, Dv: optD, CuQ: []int64{0, optS}, Causal: j.Attention.Causal,
			Scale: 1 / math.Sqrt(optD), Softcap: j.Attention.Softcap, Sinks: x["sinks"], Slopes: x["alibi"],
			Mask: c.mask, QuerySeq: optS, KeySeq: optS, BlockRows: j.Attention.Block[0],
			BlockColumns: j.Attention.Block[1], Dropout: j.Attention.Dropout,
			Seed: j.OperatorSeed()}
		if p := blockPattern(&j.Attention, j.OperatorSeed()); p != nil { // its tests have the masks
			n := (optS + a.BlockRows - 1) / a.BlockRows
			a.Mask = make([]byte, optH*n*n)
			if err := p.Fill(a.Mask, optH, n); err != nil {
				t.Fatal(err)
			}
		}
		if c.cu != nil {
			a.CuQ = c.cu
		}
		a.CuK = a.CuQ
		if w := j.Attention.Window; w != noWindow {
			a.Window = &ref.Window{Left: w[0], Right: w[1]}
		}
		out, lse := ref.AttentionForward(&a, x["q"], x["k"], x["v"])
		g := ref.AttentionGradients(&a, x["q"], x["k"], x["v"], out, lse, x["dout"])
		want := map[string][]float64{"out": out, "dq": g.DQ, "dk": g.DK, "dv": g.DV}
		if a.Sinks != nil {
			want["dsinks"] = g.DSinks
		}
		if a.Slopes != nil {
			want["dalibi"] = g.DSlopes
		}
		for _, mesh := range [][2]int64{{1, 1}, {2, 1}, {3, 1}, {4, 1}, {6, 1}, {2, 2}, {4, 2}, {6, 3}, {4, 4}, {6, -3},
			{4, -4}} {
			name := fmt.Sprintf("%s, %d ranks, ring %d", c.name, mesh[0], mesh[1])
			if j.Mesh.Gather = mesh[1] < 0; j.Mesh.Gather {
				mesh[1] = -mesh[1]
			}
			j.Attention.Output, j.Parallel.Ring = filepath.Join(t.TempDir(), "out.safetensors"), mesh[1]
			if err := onRanks(int(mesh[0]), &j); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			for result, values := range want {
				got, _ := tensorfile.Read(t, j.Attention.Output, result)
				near.Relative(t, name+": "+result, got, values, 2e-5)
			}
			got, _ := tensorfile.Read(t, j.Attention.Output, "lse")
			for i := range lse {
				if math.IsInf(lse[i], -1) && math.IsInf(float64(got[i]), -1) { // a query without keys
					lse[i], got[i] = 0, 0
				} else if lse[i] == 0 && math.IsInf(float64(got[i]), -1) { // the same on a later mesh
					got[i] = 0
				}
			}
			near.Relative(t, name+": lse", got, lse, 2e-5)
		}
	}
}

// A mask with a wrong shape is refused with the shape that it should have.
func TestBlockMaskFaults(t *testing.T) {
	for _, shape := range [][]int64{{2, 5, 4}, {4, 4, 4}, {4, 5, 3}, {4, 20}} {
		n := int64(1)
		for _, d := range shape {
			n *= d
		}
		path, _ := optionInput(t, make([]byte, n), shape, nil, nil)
		table := attentionTable(path, path+".out")
		table.Block = [2]int64{3, 4}
		expectError(t, attend(2, table), status.InvalidConfig,
			[]string{"block_mask U8", "attention.block = [3, 4]", "save [4 5 4], or 1 instead of 4"})
	}
}

// A pattern that is not possible, and one beside a tensor block_mask, is refused with its values.
func TestPatternFaults(t *testing.T) {
	for _, c := range []struct {
		pattern file.PatternTable
		mask    bool
		want    []string
	}{
		{file.PatternTable{Kind: "fixed", Local: 3, Global: 2}, false,
			[]string{"attention.pattern: blockmask: fixed: 3 local blocks are not a multiple of 2 global blocks"}},
		{file.PatternTable{Kind: "bigbird", Random: 8}, false,
			[]string{"bigbird: 8 random blocks in a sequence of 4 blocks; give 0 to 4"}},
		{file.PatternTable{Kind: "fixed", Horizontal: true}, false,
			[]string{"horizontal global attention with a unidirectional mask"}},
		{file.PatternTable{Kind: "longformer"}, true,
			[]string{"attention.pattern.kind = \"longformer\"", "has a tensor block_mask as well"}},
	} {
		var mask []byte
		if c.mask {
			mask = make([]byte, optH*16)
		}
		path, _ := optionInput(t, mask, []int64{optH, 4, 4}, nil, nil)
		table := attentionTable(path, path+".out")
		table.Block, table.Pattern = [2]int64{4, 4}, c.pattern
		expectError(t, attend(2, table), status.InvalidConfig, c.want)
	}
}
