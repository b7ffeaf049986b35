package job

import (
	"fmt"
	"io"
	"math"
	"path/filepath"
	"testing"

	"ulysses/testkit/ref"
	"ulysses/testkit/tensorfile"
)

// Attention with a window is equal to the definition, on the CPU and on a test device, with keys
// that end at the same position as the queries, with documents and gradients.
func TestAttentionWindow(t *testing.T) {
	const rows, hq, hkv, d = 23, 4, 2, 8
	cu := []int64{0, 9, 23}
	in := tensorfile.Small(t,
		map[string][]int64{"q": {rows, hq, d}, "k": {rows, hkv, d}, "v": {rows, hkv, d}, "dout": {rows, hq, d}},
		map[string][]int64{"cu_seqlens": cu})
	var x [4][]float64
	for i, name := range []string{"q", "k", "v", "dout"} {
		values, _ := tensorfile.Read(t, in, name)
		x[i] = ref.Convert[float64](values)
	}
	for _, w := range []struct {
		window [2]int64
		causal bool
	}{{[2]int64{3, 0}, false}, {[2]int64{3, -1}, true}, {[2]int64{-1, 2}, false}, {[2]int64{1, 0}, true},
		{[2]int64{2, 5}, false}, {[2]int64{100, 100}, false}} {
		g := &ref.Attention{Hq: hq, Hkv: hkv, D: d, Dv: d, CuQ: cu, CuK: cu, Causal: w.causal, Scale: 1 / math.Sqrt(d),
			Window: &ref.Window{Left: w.window[0], Right: w.window[1]}}
		out, lse := ref.AttentionForward(g, x[0], x[1], x[2])
		dq, dk, dv := ref.AttentionBackward(g, x[0], x[1], x[2], out, lse, x[3])
		job := filepath.Join(t.TempDir(), "job.toml")
		put(t, job, fmt.Sprintf(
			"kind = \"attention\"\n[attention]\ninput = %q\noutput = \"out\"\ncausal = %v\nwindow = [%d, %d]\n", in,
			w.causal, w.window[0], w.window[1]))
		for _, ranks := range []int{1, 3} {
			for dtype, limit := range map[string]float64{"cpu": 2e-5, "f32": 2e-5, "bf16": 2e-2} {
				file := filepath.Join(t.TempDir(), "out")
				var err error
				if dtype == "cpu" {
					err = Run(Options{Path: job, Sets: []string{"device.backend=cpu", "attention.output=" + file},
						Ranks: ranks, Stdout: io.Discard, Stderr: io.Discard})
				} else {
					_, _, err = runLate(t, Run, job, ranks, dtype, "attention.output="+file)
				}
				if err != nil {
					t.Fatal(err)
				}
				for name, want := range map[string][]float64{"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv} {
					got, _ := tensorfile.Read(t, file, name)
					if e := tensorfile.Relative(got, ref.Convert[float32](want)); !(e <= limit) {
						t.Errorf("window %v, causal %v, %s, %d ranks: %s is off by %.3g", w.window, w.causal, dtype,
							ranks, name, e)
					}
				}
			}
		}
	}
}
