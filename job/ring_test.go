package job

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"ulysses/internal/status"
)

// Jobs on a ring have PyTorch's losses and weights: ulysses x ring, with packed documents, more
// ranks than heads, ZeRO, recomputation and linear attention, whose tokens stay in order.
func TestRingGoldens(t *testing.T) {
	for _, m := range []struct {
		name          string
		ranks         int
		ulysses, ring int
		sets          string
	}{
		{"llama-sgd-packed", 2, 1, 2, ""}, {"llama-sgd-packed", 6, 2, 3, "parallel.zero=3"},
		{"qwen2-sgd-plain", 4, 1, 4, "parallel.zero=1"},
		{"qwen3-sgd-packed", 4, 2, 2, "parallel.zero=3"}, {"qwen3-sgd-packed", 4, 2, 2, "memory.qkv=recompute"},
		{"qwen3-adamw-packed", 8, 4, 2, "parallel.zero=2"},
		{"qwen3-sgd-packed", 4, 2, 2, "memory.attention=recompute memory.block_input=keep"},
		{"qwen3-sgd-ignored", 3, 1, 3, "parallel.overlap=on"},
		{"qwen3_5-sgd-packed", 4, 2, 2, "parallel.zero=3"}, {"gemma3-sgd-packed", 4, 2, 2, "parallel.zero=3"},
		{"gemma2-adamw-packed", 2, 1, 2, ""},
		{"gemma2-sgd-plain", 6, 2, 3, "parallel.overlap=on memory.mlp=recompute memory.qkv=recompute"},
		{"gemma3-adamw-dp2", 4, 1, 2, "memory.attention=recompute memory.qkv=recompute"},
		{"qwen3_5-adamw-packed", 2, 1, 2, ""}, {"qwen3_5-sgd-packed", 4, 2, 2, "gdn.strategy=state"},
	} {
		for dir, c := range namedGoldens(t, m.name) {
			t.Run(fmt.Sprintf("%s, %d x %d %s", m.name, m.ulysses, m.ring, m.sets), func(t *testing.T) {
				sets := append([]string{fmt.Sprintf("parallel.ulysses=%d", m.ulysses),
					fmt.Sprintf("parallel.ring=%d", m.ring)}, strings.Fields(m.sets)...)
				trainGolden(t, dir, c, m.ranks, sets...)
				var stderr bytes.Buffer
				o := Options{Path: filepath.Join(dir, c.Job), Sets: append(sets, "output.dir="+t.TempDir()),
					Ranks: m.ranks, Verbose: true, Stdout: io.Discard, Stderr: &stderr}
				if err := Verify(o); err != nil {
					t.Error(err, stderr.String())
				}
			})
		}
	}
}

// The losses of a ring are the losses of one rank, within the rounding of F32.
func TestRingLosses(t *testing.T) {
	path := filepath.Join(goldens, "qwen3-sgd-packed", "job.toml")
	want, _ := trained(t, path, 1, "parallel.ulysses=1")
	for _, m := range []struct {
		ulysses, ring int
		gather        string
	}{{1, 2, "auto"}, {2, 2, "auto"}, {1, 3, "off"}, {1, 3, "on"}, {1, 8, "on"}, {4, 2, "on"}} {
		got, _ := trained(t, path, m.ulysses*m.ring, fmt.Sprintf("parallel.ulysses=%d", m.ulysses),
			fmt.Sprintf("parallel.ring=%d", m.ring), "parallel.gather="+m.gather)
		for i := range want {
			if d := math.Abs(got[i] - want[i]); !(d <= 2e-6*want[i]) {
				t.Errorf("%+v: step %d: loss %v, on one rank %v", m, i+1, got[i], want[i])
			}
		}
	}
}

// The memory of a run is the memory of the rank that plans the most, as a plan says.
func TestMemoryOfLargestRank(t *testing.T) {
	args := []string{planned(t, "llama"), "--set", "parallel.ulysses=1", "--set", "parallel.ring=4", "--set",
		"data.sequence=4095", "--ranks", "4"}
	code, plan, errs := call(append([]string{"plan"}, args...)...)
	if code != status.OK {
		t.Fatal(code, errs)
	}
	code, run, errs := call(append(args, "--set", "train.steps=1", "--verbose")...)
	if code != status.OK {
		t.Fatal(code, errs)
	}
	total := regexp.MustCompile(`\n +planned +(\d+)`)
	if a, b := total.FindStringSubmatch(plan), total.FindStringSubmatch(run); a == nil || b == nil || a[1] != b[1] {
		t.Errorf("planned %q, by the run %q", a, b)
	}
	if x := regexp.MustCompile(`planned for rank (\d), which needs the most`).FindStringSubmatch(run); x == nil ||
		!strings.Contains(run, "memory of rank "+x[1]) {
		t.Errorf("no rank in\n%s", run)
	}
}
