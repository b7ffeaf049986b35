package job

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/backends"
	"ulysses/comm"
	"ulysses/internal/status"
)

// onNodes opens CPUs whose ranks are on nodes: the first two ranks on one, and so on.
func onNodes(ranksOf func(rank int) int) opener {
	return opener{backends.Open, backends.OpenComm, func(c comm.Comm) ([]int, error) {
		nodes := make([]int, c.Size())
		for r := range nodes {
			nodes[r] = ranksOf(r)
		}
		return nodes, nil
	}}
}

func twoEach(rank int) int { return rank / 2 }

// All-to-alls with two levels change no bit of losses and weights, and the bytes that are counted
// still equal the formulas.
func TestTwoLevelsChangeNothing(t *testing.T) {
	for _, name := range []string{"qwen3-sgd-packed", "qwen3_5-sgd-packed"} {
		for _, sets := range [][]string{{"parallel.ulysses=4"},
			{"parallel.ulysses=2", "parallel.ring=2", "parallel.zero=3"},
			{"parallel.ulysses=4", "parallel.overlap=on"}} {
			var outputs [2]string
			var losses [2][]float64
			var weights [2][]byte
			for i, how := range []string{"off", "on"} {
				losses[i], weights[i], outputs[i] = trainedOn(t, onNodes(twoEach),
					filepath.Join(goldens, name, "job.toml"), 4,
					append([]string{"parallel.two_level=" + how}, sets...)...)
			}
			if !slices.Equal(losses[0], losses[1]) || !bytes.Equal(weights[0], weights[1]) {
				t.Errorf("%s %v: losses %v, with two levels %v; weights are equal: %v", name, sets, losses[0],
					losses[1], bytes.Equal(weights[0], weights[1]))
			}
			if !strings.Contains(outputs[1], "two levels, over 2 nodes of 2 ranks") ||
				strings.Contains(outputs[0], "two levels") {
				t.Errorf("%s %v: the runs say\n%s\n%s", name, sets, outputs[0], outputs[1])
			}
			if !strings.Contains(outputs[1], " bytes sent inside nodes, ") {
				t.Errorf("%s %v: the traffic is not shown:\n%s", name, sets, outputs[1])
			}
		}
	}
}

// Operator jobs also have all-to-alls in two levels.
func TestTwoLevelsOfOperators(t *testing.T) {
	var outputs [2][]byte
	for i, how := range []string{"off", "on"} {
		out := filepath.Join(t.TempDir(), "out.safetensors")
		var stdout, stderr bytes.Buffer
		err := Run(Options{Path: filepath.Join(goldens, "attention-gqa-packed", "job.toml"),
			Sets:  []string{"attention.output=" + out, "parallel.ulysses=4", "parallel.two_level=" + how},
			Ranks: 4, Verbose: true, Stdout: &stdout, Stderr: &stderr, open: onNodes(twoEach)})
		if err != nil {
			t.Fatal(err, stderr.String())
		}
		if strings.Contains(stdout.String()+stderr.String(), "two levels, over 2 nodes of 2 ranks") != (how == "on") {
			t.Errorf("%s: %s%s", how, stdout.String(), stderr.String())
		}
		if outputs[i], err = os.ReadFile(out); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(outputs[0], outputs[1]) {
		t.Error("the results differ")
	}
}

// Nodes with different numbers of ranks are refused, if two levels are asked for.
func TestTwoLevelsAreRefused(t *testing.T) {
	var stdout, stderr bytes.Buffer
	err := Run(Options{Path: filepath.Join(goldens, "qwen3-sgd-packed", "job.toml"),
		Sets:  []string{"output.dir=" + t.TempDir(), "parallel.ulysses=4", "parallel.two_level=on"},
		Ranks: 4, Stdout: &stdout, Stderr: &stderr, open: onNodes(func(rank int) int { return rank / 3 })})
	if status.Of(err) != status.Unsupported ||
		!strings.Contains(err.Error(),
			"parallel.two_level = \"on\": the nodes of a sequence have different numbers of ranks") {
		t.Errorf("%v", err)
	}
}
