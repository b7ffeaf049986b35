package operator

import (
	"maps"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/sp"
	"ulysses/testkit/ref"
	"ulysses/testkit/tensorfile"
)

// Results of finite input that are NaN or Inf are an error on any number of ranks. The error has
// the first such element and their number in each tensor, and the output is written. An LSE of -Inf
// counts only if the query attends to a key.
func TestResultsThatAreNotFinite(t *testing.T) {
	same := map[string][]int64{"q": {7, 2, 4}, "k": {7, 2, 4}, "v": {7, 2, 4}}
	fewKeys := map[string][]int64{"q": {7, 2, 4}, "k": {3, 2, 4}, "v": {3, 2, 4}}
	backward := maps.Clone(same)
	backward["dout"] = same["q"]
	at := func(token, head, feature int, v float32) func(x []float32) {
		return func(x []float32) { x[(token*2+head)*4+feature] = v }
	}
	for _, x := range []struct {
		name   string
		shapes map[string][]int64
		value  map[string]float32
		spoil  map[string]func(x []float32)
		table  func(t *file.AttentionTable)
		want   []string // one for each tensor; nil = no error
	}{
		{name: "a score above", shapes: same, value: map[string]float32{"v": 1},
			spoil: map[string]func([]float32){"q": at(5, 1, 0, 1e30), "k": at(3, 1, 0, 1e30)},
			want: []string{"out[5, 1, 0] [token, head, feature] is NaN, 4 of its 56 values",
				"lse[5, 1] [token, head] is NaN, 1 of its 14 values"}},
		{name: "all scores below", shapes: same, value: map[string]float32{"q": 1e30, "k": -1e30, "v": 1},
			want: []string{"out[0, 0, 0] [token, head, feature] is NaN, 56 of its 56 values",
				"lse[0, 0] [token, head] is NaN, 14 of its 14 values"}},
		{name: "one score of many below", shapes: same, value: map[string]float32{"q": 1e30, "v": 1},
			spoil: map[string]func([]float32){"k": at(3, 1, 0, -1e30)},
			table: func(t *file.AttentionTable) { t.Causal = false }},
		{name: "gradients", shapes: backward, value: map[string]float32{"k": 1},
			spoil: map[string]func([]float32){"v": at(2, 0, 0, 1e30), "dout": at(6, 0, 0, 1e30)},
			want: []string{"dq[6, 0, 0] [token, head, feature] is NaN, 4 of its 56 values",
				"dk[0, 0, 0] [token, head, feature] is NaN, 28 of its 56 values"}},
		{name: "no key", shapes: fewKeys, value: map[string]float32{"q": 1, "k": 1, "v": 1}},
		{name: "no key, and Inf", shapes: fewKeys, value: map[string]float32{"q": 1, "k": 1, "v": 3e38},
			table: func(t *file.AttentionTable) { t.Causal, t.Window = false, [2]int64{0, 2} },
			want:  []string{"out[3, 0, 0] [token, head, feature] is +Inf, 24 of its 56 values"}},
	} {
		table := attentionTable(tensorfile.Filled(t, x.shapes, x.value, x.spoil), "")
		if x.table != nil {
			x.table(table)
		}
		for _, ranks := range []int{1, 2, 5} {
			table.Output = filepath.Join(t.TempDir(), "out.safetensors")
			err := attend(ranks, table)
			if len(x.want) == 0 && err != nil {
				t.Errorf("%s, %d ranks: %v", x.name, ranks, err)
			} else if len(x.want) > 0 {
				expectError(t, err, status.Numeric, append(x.want, "attention: ", "scale the input down"))
				if err != nil && strings.Count(err.Error(), "values are NaN or Inf") != len(x.want) {
					t.Errorf("%s, %d ranks: %v, want %d tensors", x.name, ranks, err, len(x.want))
				}
			}
			if out, _ := tensorfile.Read(t, table.Output, "out"); len(out) != 7*2*4 {
				t.Errorf("%s: %d values in the output", x.name, len(out))
			}
		}
	}
}

// NaN and Inf in results of the gated delta rule are also an error. Queries whose norm overflows
// would become 0; they are refused.
func TestGDNResultsThatAreNotFinite(t *testing.T) {
	shapes := map[string][]int64{"q": {6, 2, 4}, "k": {6, 2, 4}, "v": {6, 2, 4}, "g": {6, 2}, "beta": {6, 2}}
	value := map[string]float32{"q": 1, "k": 1, "v": 1, "beta": 1}
	for _, x := range []struct {
		name  string
		at    int
		v     float32
		norm  bool
		wrote bool
		want  []string
	}{
		{"v", (3*2+1)*4 + 2, 3e38, false, true,
			[]string{"gdn: out[3, 1, 2] [token, head, feature] is +Inf, ",
				"state_out[0, 1, 0, 2] [document, head, key feature, value feature] is ", "scale the input down"}},
		{"q", (3*2+1)*4 + 2, 1e19, true, false, []string{"q[3, 1, 2] is 1e+19", "squares of 4 features", "9.22e+18"}},
		{"k", (3*2+1)*4 + 2, -1e19, true, false, []string{"k[3, 1, 2] is -1e+19"}},
		{"q", (3*2+1)*4 + 2, 9e18, true, true, nil},
		{"q", (3*2+1)*4 + 2, 1e19, false, true, nil},
	} {
		path := tensorfile.Filled(t, shapes, value,
			map[string]func([]float32){x.name: func(all []float32) { all[x.at] = x.v }})
		for _, ranks := range []int{1, 3} {
			table := gdnTable(path, filepath.Join(t.TempDir(), "out.safetensors"))
			table.QKL2Norm = x.norm
			if err := delta(ranks, table); x.want == nil && err != nil {
				t.Errorf("%s = %g: %v", x.name, x.v, err)
			} else if x.want != nil {
				expectError(t, err, status.Numeric, x.want)
			}
			if _, err := os.Stat(table.Output); (err == nil) != x.wrote {
				t.Errorf("%s = %g: the output: %v", x.name, x.v, err)
			}
		}
	}
}

// visibleKeys agrees with the reference.
func TestVisibleKeys(t *testing.T) {
	cuQ, cuK := []int64{0, 1, 5, 12}, []int64{0, 4, 6, 13}
	for _, causal := range []bool{true, false} {
		for _, left := range []int64{-1, 0, 1, 3, math.MaxInt64} {
			for _, right := range []int64{-1, 0, 1, 3, math.MaxInt64} {
				g := ref.Attention{CuQ: cuQ, CuK: cuK, Causal: causal, Window: &ref.Window{Left: left, Right: right}}
				l := sp.Layer{Causal: causal, Window: &device.Window{Left: left, Right: right}}
				for token := range int64(12) {
					lo, hi := g.Visible(token)
					if first, end := visibleKeys(token, cuQ, cuK, l); (first < end) != (lo < hi) || lo < hi &&
						(first != lo || end != hi) {
						t.Errorf("causal %v, window [%d, %d]: query %d: keys %d to %d, and it sees keys %d to %d",
							causal, left, right, token, first, end, lo, hi)
					}
				}
			}
		}
	}
}
