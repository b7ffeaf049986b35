package cuda

import (
	"bufio"
	"debug/elf"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/tensor"
	"ulysses/testkit/cudatest"
)

// A launch is a line of the emulator about a kernel that it has launched
// (plugin/emulated/counts.h).
type launch struct {
	name, symbol                    string
	grid, threads, shared           int64
	multiplyAdds, bytesIn, bytesOut int64
}

// shaped are the operands of operations on tokens of Llama-8B's shape and of Qwen3.5's linear
// attention. Without run, kernels are launched but do not run.
type shaped struct {
	t      *testing.T
	d      *Device
	s      device.Stream
	alloc  func(tensor.DType, ...int64) tensor.Tensor
	log    string
	path   string
	tokens int64
	dtype  tensor.DType // of activations
}

// newShaped opens the emulated plug-in in the file `path`. Kernels run if run is set.
func newShaped(t *testing.T, path string, tokens int64, run bool) *shaped {
	t.Helper()
	return newShapedOf(t, path, tokens, run, "attention_forward=mma,attention_backward=mma")
}

// newShapedOf is newShaped with selected kernels.
func newShapedOf(t *testing.T, path string, tokens int64, run bool, kernels string) *shaped {
	t.Helper()
	t.Setenv("ULYSSES_CUDA_PLUGIN", path)
	t.Setenv("ULYSSES_EMULATED_MEMORY", "200000000000")
	x := &shaped{t: t, path: path, log: filepath.Join(t.TempDir(), "launches"), tokens: tokens,
		dtype: tensor.BF16}
	if !run {
		t.Setenv("ULYSSES_EMULATED_SKIP", "1")
	}
	x.d, x.s, x.alloc = opened(t, Options{Deterministic: true, Kernels: kernels})
	return x
}

// launches returns the launches of a call.
func (x *shaped) launches(call func() error) []launch {
	x.t.Helper()
	x.t.Setenv("ULYSSES_EMULATED_LAUNCHES", x.log)
	defer x.t.Setenv("ULYSSES_EMULATED_LAUNCHES", "")
	os.Remove(x.log)
	for _, err := range []error{call(), x.s.Sync()} {
		if err != nil {
			x.t.Fatal(err)
		}
	}
	return readLaunches(x.t, x.log, x.path)
}

// readLaunches reads the emulator's file of launches of the plug-in `path`.
func readLaunches(t *testing.T, log, path string) (all []launch) {
	t.Helper()
	f, err := os.Open(log)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols := symbolsOf(t, path)
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var l launch
		var at uint64
		name, rest, _ := strings.Cut(lines.Text(), "\t")
		l.name = name
		if _, err := fmt.Sscanf(rest, "%x %d %d %d %d %d %d", &at, &l.grid, &l.threads, &l.shared, &l.multiplyAdds,
			&l.bytesIn, &l.bytesOut); err != nil {
			t.Fatalf("%q: %v", rest, err)
		}
		if l.symbol = symbols[at]; l.symbol == "" {
			t.Fatalf("no symbol at %#x for %s", at, l.name)
		}
		all = append(all, l)
	}
	return all
}

// symbolsOf returns the functions of a library by their addresses.
func symbolsOf(t *testing.T, path string) map[uint64]string {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	at := map[uint64]string{}
	for _, s := range symbols {
		if elf.ST_TYPE(s.Info) == elf.STT_FUNC {
			at[s.Value] = s.Name
		}
	}
	return at
}

// attention returns calls of attention with some heads of a size, forward and backward.
func (x *shaped) attention(heads, kvHeads, dim int64) (forward, backward func() error) {
	return x.attentionWith(heads, kvHeads, dim, func(*device.Attention) {})
}

// attentionWith is attention with options, which set sets.
func (x *shaped) attentionWith(heads, kvHeads, dim int64, set func(a *device.Attention)) (forward,
	backward func() error) {
	t, take := x.tokens, func(heads int64) tensor.Tensor { return x.alloc(x.dtype, x.tokens, heads, dim) }
	cu := []int64{0, t}
	g := device.AttentionGrad{Attention: device.Attention{Q: take(heads), K: take(kvHeads), V: take(kvHeads),
		Out: take(heads), LSE: x.alloc(tensor.F32, heads, t).Permute(1, 0), CuQ: cu, CuK: cu, Causal: true, Scale: 0.1},
		DOut: take(heads), DQ: take(heads), DK: take(kvHeads), DV: take(kvHeads)}
	set(&g.Attention)
	g.Workspace = x.alloc(tensor.U8,
		max(1, x.d.AttentionWorkspace(&g.Attention, false), x.d.AttentionWorkspace(&g.Attention, true)))
	return func() error { return x.d.AttentionForward(x.s, &g.Attention) },
		func() error { return x.d.AttentionBackward(x.s, &g) }
}

// rule returns calls of the gated delta rule, forward and backward.
func (x *shaped) rule(heads, keyHeads, dim int64) (forward, backward func() error) {
	t := x.tokens
	k, v := func() tensor.Tensor { return x.alloc(x.dtype, t, keyHeads, dim) }, func() tensor.Tensor {
		return x.alloc(x.dtype, t, heads, dim)
	}
	gate := func() tensor.Tensor { return x.alloc(tensor.F32, t, heads) }
	g := device.GatedDeltaGrad{GatedDelta: device.GatedDelta{Q: k(), K: k(), V: v(), Out: v(), G: gate(), Beta: gate(),
		Cu: []int64{0, t}, L2Norm: true, Scale: 0.1},
		DOut: v(), DQ: k(), DK: k(), DV: v(), DG: gate(), DBeta: gate()}
	sizes := x.d.GatedDeltaSizes(&g.GatedDelta)
	g.Saved, g.Workspace = x.alloc(tensor.U8, sizes.Saved), x.alloc(tensor.U8, max(sizes.Forward, sizes.Backward))
	return func() error { return x.d.GatedDeltaForward(x.s, &g.GatedDelta) },
		func() error { return x.d.GatedDeltaBackward(x.s, &g) }
}

// operations returns calls by their names, for hidden features and heads of the sizes dims.
func (x *shaped) operations(hidden, heads int64, dims ...int64) map[string]func() error {
	d, s, t := x.d, x.s, x.tokens
	like := func(shape ...int64) tensor.Tensor { return x.alloc(x.dtype, shape...) }
	f32 := func(shape ...int64) tensor.Tensor { return x.alloc(tensor.F32, shape...) }
	calls := map[string]func() error{}
	for _, dim := range dims {
		forward, backward := x.attention(heads, max(1, heads/4), dim)
		calls[fmt.Sprintf("attention %d", dim)], calls[fmt.Sprintf("attention backward %d", dim)] = forward, backward
		forward, backward = x.rule(heads, max(1, heads/2), dim)
		calls[fmt.Sprintf("delta rule %d", dim)], calls[fmt.Sprintf("delta rule backward %d", dim)] = forward, backward
	}
	a, b, c, w, rstd, dw := like(t, hidden), like(t, hidden), like(t, hidden), like(hidden), f32(t), f32(hidden)
	calls["norm"] = func() error {
		return d.RMSNormForward(s, &device.RMSNorm{X: a, W: w, Y: b, RStd: rstd, Eps: 1e-5})
	}
	calls["add and norm"] = func() error {
		return d.AddRMSNorm(s, &device.AddRMSNorm{A: a, B: b, W: w, Sum: c, Y: b, RStd: rstd, Eps: 1e-5})
	}
	calls["norm backward"] = func() error {
		return d.RMSNormBackward(s, &device.RMSNormGrad{X: a, W: w, RStd: rstd, DY: b, DX: c, DW: dw, AddDX: true})
	}
	calls["add"] = func() error { return d.Add(s, c, a, b) }
	q, table := a.Split(1, hidden/128), f32(t, 64)
	calls["rope"] = func() error { return d.Rope(s, &device.Rope{X: q, Y: q, Cos: table, Sin: table}) }
	own, other := b.Split(1, hidden/128), c.Split(1, hidden/128)
	calls["pack"] = func() error { // as for an all-to-all
		return device.Grouped(s, func() error {
			if err := d.Rope(s, &device.Rope{X: q, Y: own, Cos: table, Sin: table}); err != nil {
				return err
			}
			return d.Copy(s, other.Permute(1, 0, 2), q.Permute(1, 0, 2))
		})
	}
	for name, clamped := range map[string]bool{"": false, ", clamped": true} {
		calls["swiglu"+name] = func() error {
			return d.SwiGLUForward(s, &device.SwiGLU{Gate: a, Up: b, Y: c, Clamped: clamped})
		}
		calls["swiglu backward"+name] = func() error {
			return d.SwiGLUBackward(s,
				&device.SwiGLUGrad{Gate: a, Up: b, DY: c, DGate: a, DUp: b, Restore: true, Clamped: clamped})
		}
	}
	rows := min(t, 1024)
	ids, logits, nll := x.alloc(tensor.I32, rows), like(rows, 4*hidden), f32(rows)
	if err := d.Copy(s, ids, tensor.OfInt32(make([]int32, rows), rows)); err != nil { // a target is read as an index
		x.t.Fatal(err)
	}
	calls["cross-entropy"] = func() error {
		return d.CrossEntropy(s,
			&device.CrossEntropy{Logits: logits, Targets: ids, NLL: nll, DLogits: logits, GradScale: 1})
	}
	mixed, filter := like(t, 2*hidden), like(2*hidden, 4)
	conv := device.Conv1d{X: mixed, Y: like(t, 2*hidden), W: filter, Cu: []int64{0, t}}
	calls["conv1d"] = func() error { return d.Conv1dForward(s, &conv) }
	convBack := device.Conv1dGrad{Conv1d: conv, DY: conv.Y, DX: conv.Y, DW: f32(2*hidden, 4)}
	calls["conv1d backward"] = func() error { return d.Conv1dBackward(s, &convBack) }
	in, g, few, dfew := like(t, heads), f32(t, heads), f32(heads), f32(heads)
	calls["delta gates"] = func() error {
		return d.DeltaGatesForward(s, &device.DeltaGates{A: in, B: in, ALog: few, DtBias: few, G: g, Beta: g})
	}
	calls["delta gates backward"] = func() error {
		return d.DeltaGatesBackward(s,
			&device.DeltaGatesGrad{A: in, B: in, ALog: few, DtBias: few, DG: g, DBeta: g, DA: in, DB: in, DALog: dfew,
				DDtBias: dfew})
	}
	v, gate, y, head, stats, dhead := like(t, heads, 128), like(t, heads, 128), like(t, heads, 128), like(128),
		f32(t, heads), f32(128)
	calls["gated norm"] = func() error {
		return d.GatedRMSNormForward(s, &device.GatedRMSNorm{X: v, Gate: gate, Y: y, W: head, RStd: stats, Eps: 1e-6})
	}
	calls["gated norm backward"] = func() error {
		return d.GatedRMSNormBackward(s,
			&device.GatedRMSNormGrad{X: v, Gate: gate, W: head, RStd: stats, DY: y, DX: y, DGate: gate, DW: dhead})
	}
	numbers := x.alloc(tensor.I64, t)
	calls["dropout"] = func() error {
		return d.Dropout(s, &device.Dropout{X: a, Y: b, Tokens: numbers, P: 0.1, Add: true})
	}
	maps.Copy(calls, x.experts(hidden, hidden/2, hidden/32))
	return calls
}

// experts returns calls of the operations of experts, two for each token. All experts get the same
// number of rows.
func (x *shaped) experts(hidden, width, count int64) map[string]func() error {
	const k = 2
	d, s, t := x.d, x.s, x.tokens
	chosen, rows, offsets := make([]int32, t*k), make([]int32, t*k), make([]int32, count+1)
	for i := range chosen {
		chosen[i] = int32(int64(i) % count)
		offsets[chosen[i]+1]++
	}
	for e := range count {
		offsets[e+1] += offsets[e]
	}
	next := slices.Clone(offsets)
	for i, e := range chosen {
		rows[i] = next[e]
		next[e]++
	}
	on := func(values []int32, shape ...int64) tensor.Tensor {
		y := x.alloc(tensor.I32, shape...)
		if err := d.Copy(s, y, tensor.OfInt32(values, shape...)); err != nil {
			x.t.Fatal(err)
		}
		return y
	}
	r := device.Route{Logits: x.alloc(tensor.F32, t, count), Experts: on(chosen, t, k), Rows: on(rows, t, k),
		Weights: x.alloc(tensor.F32, t*k), Offsets: on(offsets, count+1), Normalize: true,
		Sequence: on(make([]int32, t), t), Counts: x.alloc(tensor.F64, 1, count), Sums: x.alloc(tensor.F64, 1, count)}
	own := r // all tokens choose the same experts by its logits, which are 0
	own.Experts, own.Rows, own.Offsets = x.alloc(tensor.I32, t, k), x.alloc(tensor.I32, t, k),
		x.alloc(tensor.I32, count+1)
	b := device.RouteGrad{Probs: r.Logits, Experts: r.Experts, Rows: r.Rows, Weights: r.Weights, DWeights: r.Weights,
		DLogits: x.alloc(x.dtype, t, count), Normalize: true, Sequence: r.Sequence, Counts: r.Counts,
		Scale: x.alloc(tensor.F32, 1)}
	token, in, hiddens, act := x.alloc(x.dtype, t, hidden), x.alloc(x.dtype, t*k, hidden),
		x.alloc(x.dtype, t*k, 2*width), x.alloc(x.dtype, t*k, width)
	up, dup := x.alloc(x.dtype, count, 2*width, hidden), x.alloc(tensor.F32, count, 2*width, hidden)
	bias := x.alloc(x.dtype, count, 2*width)
	grouped := func(a, b, bias, c tensor.Tensor) func() error {
		return func() error {
			return d.GroupedGemm(s, &device.GroupedGemm{A: a, B: b, Bias: bias, C: c, Offsets: r.Offsets})
		}
	}
	weighted := func(clamped bool) func() error {
		return func() error {
			return d.WeightedSwiGLUBackward(s,
				&device.WeightedSwiGLUGrad{Gate: hiddens.Slice(1, 0, width), Up: hiddens.Slice(1, width, 2*width),
					Weights: r.Weights, DY: act, DGate: hiddens.Slice(1, 0, width),
					DUp: hiddens.Slice(1, width, 2*width), DWeights: x.alloc(tensor.F32, t*k), Restore: true,
					Clamped: clamped})
		}
	}
	return map[string]func() error{
		"route":           func() error { return d.RouteForward(s, &own) },
		"route backward":  func() error { return d.RouteBackward(s, &b) },
		"rows of experts": func() error { return d.SpreadRows(s, &device.SpreadRows{X: token, Rows: r.Rows, Y: in}) },
		"sum of experts": func() error {
			return d.CombineRows(s, &device.CombineRows{X: in, Rows: r.Rows, Weights: r.Weights, Y: token})
		},
		"weighted swiglu backward":          weighted(false),
		"weighted swiglu backward, clamped": weighted(true),
		"products of experts":               grouped(in, up.Permute(0, 2, 1), tensor.Tensor{}, hiddens),
		"products of experts, bias":         grouped(in, up.Permute(0, 2, 1), bias, hiddens),
		"products of experts, inputs":       grouped(hiddens, up, tensor.Tensor{}, in),
		"products of experts, weights": func() error {
			return d.GroupedGemmWeights(s, &device.GroupedGemmWeights{A: hiddens, B: in, C: dup, Offsets: r.Offsets})
		},
	}
}

// needEmulated returns the path of the emulated plug-in.
func needEmulated(t *testing.T) string {
	t.Helper()
	path := cudatest.Use(t)
	if !cudatest.Emulated() {
		t.Skip("SKIPPED: the emulated plug-in counts launches")
	}
	return path
}
