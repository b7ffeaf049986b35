package job

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"
	"testing"
)

// Hybrids have PyTorch's losses, gradient norms and weights on any number of ranks with both
// strategies of linear attention, and send the bytes of the formula.
func TestGoldenHybrids(t *testing.T) {
	for dir, c := range readGoldens(t, "train") {
		if !strings.HasPrefix(c.Name, "qwen3_5") {
			continue
		}
		for _, strategy := range []string{"heads", "state"} {
			for _, ranks := range []int{1, 2, 3, 4} {
				sequence := 0
				if strings.HasSuffix(c.Name, "dp2") { // whose rows are right for two replicas
					if sequence = ranks / 2; ranks%2 != 0 {
						continue
					}
				}
				t.Run(fmt.Sprint(c.Name, " ", strategy, " ", ranks), func(t *testing.T) {
					report := trainGolden(t, dir, c, ranks, "gdn.strategy="+strategy,
						fmt.Sprint("parallel.ulysses=", sequence))
					for _, want := range []string{": equal", "by " + strategy, "linear-attention"} {
						if !strings.Contains(report, want) {
							t.Errorf("the report does not say %q: %s", want, report)
						}
					}
				})
			}
		}
	}
}

// Hybrids have the same losses with sharded weights, which are at different addresses in the two
// halves of a pass.
func TestShardedHybrids(t *testing.T) {
	dir := filepath.Join(goldens, "qwen3_5-adamw-packed")
	c := readGoldens(t, "train")[dir]
	for zero := 1; zero <= 3; zero++ {
		for _, strategy := range []string{"heads", "state"} {
			trainGolden(t, dir, c, 4, "gdn.strategy="+strategy, fmt.Sprint("parallel.zero=", zero))
		}
	}
}

// In a ring, all ranks of a sequence share the heads of linear attention.
func TestHybridsInARing(t *testing.T) {
	dir := filepath.Join(goldens, "qwen3_5-adamw-packed")
	c := readGoldens(t, "train")[dir]
	for _, strategy := range []string{"heads", "state", "auto"} {
		for _, sets := range [][]string{{"parallel.ulysses=2", "parallel.ring=2"},
			{"parallel.ulysses=1", "parallel.ring=4", "parallel.zero=3"}} {
			trainGolden(t, dir, c, 4, append(sets, "gdn.strategy="+strategy)...)
		}
	}
}

// The first step on four ranks is equal to the step on one rank, tensor by tensor.
func TestVerifyHybrids(t *testing.T) {
	for _, strategy := range []string{"heads", "state"} {
		for _, name := range []string{"qwen3_5-sgd-packed", "qwen3_5-tied-sgd-packed"} {
			var stdout, stderr bytes.Buffer
			err := Verify(Options{Path: filepath.Join(goldens, name, "job.toml"), Ranks: 4,
				Sets:    []string{"gdn.strategy=" + strategy, "output.dir=" + t.TempDir()},
				Verbose: true, Stdout: &stdout, Stderr: &stderr})
			if err != nil || !strings.HasPrefix(stdout.String(), "within tolerance: ") ||
				!strings.Contains(stdout.String(), "linear_attn.A_log updated") {
				t.Errorf("%s, %s: %v\n%s%s", name, strategy, err, stdout.String(), stderr.String())
			}
		}
	}
}

// Four replicas with one micro-batch and four ranks with four micro-batches process the same
// tokens. Their losses are equal within 1e-5.
func TestReplicasAndSequenceRanks(t *testing.T) {
	losses := func(sets ...string) (x []float64) {
		out := t.TempDir()
		sets = append(sets, "output.dir="+out, "data.batch=1", "train.steps=8", "output.model=false")
		if err := Run(Options{Path: filepath.Join(goldens, "qwen3_5-adamw-packed", "job.toml"), Ranks: 4, Sets: sets,
			Stdout: io.Discard, Stderr: io.Discard}); err != nil {
			t.Fatal(err)
		}
		for _, r := range readMetrics(t, filepath.Join(out, "metrics.jsonl")) {
			x = append(x, r.Loss)
		}
		return x
	}
	want := losses("parallel.ulysses=1", "data.accumulate=1")
	for _, strategy := range []string{"heads", "state"} {
		got := losses("parallel.ulysses=4", "data.accumulate=4", "gdn.strategy="+strategy)
		for i := range want {
			if d := math.Abs(got[i] - want[i]); len(got) != len(want) || !(d <= 1e-5) {
				t.Errorf("%s, step %d: loss %.7f on four ranks, %.7f on four replicas", strategy, i+1, got[i], want[i])
			}
		}
	}
}

// The example trains, and its output names the strategy.
func TestHybridExample(t *testing.T) {
	var stdout bytes.Buffer
	out := t.TempDir()
	err := Run(Options{Path: "../examples/hybrid.toml", Ranks: 4, Verbose: true, Stdout: &stdout, Stderr: io.Discard,
		Sets: []string{"output.dir=" + out, "output.model=false", "data.sequence=256", "train.steps=12",
			"optimizer.warmup=4", "eval.split=0.0"}})
	if err != nil || !strings.Contains(stdout.String(), "; strategy auto: the smaller number") {
		t.Fatal(err, stdout.String())
	}
	records := readMetrics(t, filepath.Join(out, "metrics.jsonl"))
	if first, last := records[0].Loss, records[len(records)-1].Loss; !(last < first-1.5) {
		t.Errorf("loss %.3f, after %d steps %.3f", first, len(records), last)
	}
}
