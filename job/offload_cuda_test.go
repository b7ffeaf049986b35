package job

import (
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/job/file"
	"ulysses/testkit/cudatest"
)

// On the plug-in, an optimizer in host memory has the losses, gradient norms and weights of one on
// the device: streamed, with the step on the host, and with gradients on the host. The kernels of
// the GPU and of the CPU round alike.
func TestCUDAOffloadedOptimizer(t *testing.T) {
	cudatest.Use(t)
	path := hybridFromScratch(t)
	for _, c := range []struct {
		ranks int
		sets  string
		words []string // of memory.optimizer
	}{
		{1, "device.dtype=bf16", []string{"offload", "host"}},
		{1, "device.dtype=bf16 optimizer.weight_decay=0.1 optimizer.clip=0.5", []string{"host"}},
		{1, "device.dtype=bf16 optimizer.name=sgd optimizer.lr=0.3 optimizer.weight_decay=0.1 optimizer.clip=0.5",
			[]string{"host"}},
		{2, "device.dtype=bf16 parallel.zero=3 memory.gradients=offload data.accumulate=2", []string{"stream", "host"}},
		{4, "device.dtype=f32 parallel.ulysses=2 parallel.ring=2 parallel.zero=2", []string{"host"}},
	} {
		trained := func(sets ...string) (metrics []metricsLine, model []byte, report string) {
			out := t.TempDir()
			report = onCUDA(t, path, c.ranks,
				append(append(strings.Fields(c.sets), "output.dir="+out, "output.model=true", "train.steps=3"),
					sets...)...)
			model, err := os.ReadFile(filepath.Join(out, "model", "model.safetensors"))
			if err != nil {
				t.Fatal(err)
			}
			return readMetrics(t, filepath.Join(out, "metrics.jsonl")), model, report
		}
		want, model, _ := trained("memory.optimizer=device", "memory.gradients=auto")
		for _, word := range c.words {
			got, same, report := trained("memory.optimizer=" + word)
			for i := range want {
				if got[i].Loss != want[i].Loss || got[i].GradNorm != want[i].GradNorm {
					t.Errorf("%s, %s: step %d: loss %v, norm %v; on the device %v, %v", c.sets, word, i+1, got[i].Loss,
						got[i].GradNorm, want[i].Loss, want[i].GradNorm)
				}
			}
			if !slices.Equal(same, model) {
				t.Errorf("%s, %s: the weights differ", c.sets, word)
			}
			where := map[string]string{"stream": "optimizer step: streamed through the device",
				"host": "optimizer step: on the host", "offload": "optimizer step: "}[word]
			states := "moments"
			if strings.Contains(c.sets, "sgd") {
				states = "master weights"
			}
			for _, w := range []string{where, "planned, host of a node with", states} {
				if !strings.Contains(report, w) {
					t.Errorf("%s, %s: no %q in\n%s", c.sets, word, w, report)
				}
			}
			if strings.Contains(report, "gradients, shard (host)") != strings.Contains(c.sets, "gradients=offload") {
				t.Errorf("%s, %s: gradients are not where they should be:\n%s", c.sets, word, report)
			}
		}
	}
	// verify computes on one rank, which has the states of all ranks
	sets := []string{"device.backend=cuda", "memory.optimizer=offload", "memory.gradients=offload", "parallel.zero=2",
		"device.dtype=f32", "output.dir=" + t.TempDir()}
	if err := Verify(Options{Path: path, Sets: sets, Ranks: 2, Stdout: io.Discard, Stderr: io.Discard}); err != nil {
		t.Error(err)
	}
	sets[3] = "parallel.zero=1"
	if err := Verify(Options{Path: path, Sets: sets, Ranks: 2, Stdout: io.Discard, Stderr: io.Discard}); status.Of(
		err) != status.InvalidConfig || !strings.Contains(err.Error(), "set parallel.zero = 2 or 3") {
		t.Errorf("gradients that are not sharded: %v", err)
	}
}

// The job that verify runs on one rank has its optimizer in device memory.
func TestOneRankKeepsTheOptimizerOnTheDevice(t *testing.T) {
	cudatest.Use(t)
	o := Options{Path: hybridFromScratch(t),
		Sets: []string{"device.backend=cuda", "memory.optimizer=host", "memory.gradients=offload", "memory.host=1",
			"output.dir=" + t.TempDir()},
		Ranks: 1, Stdout: io.Discard, Stderr: io.Discard}
	err := onRanks(o, func(e *Env) error {
		one, err := e.onOneRank()
		if err != nil {
			return err
		}
		defaults := file.Default()
		if m := one.Job.Memory; m != defaults.Memory {
			t.Errorf("[memory] is %+v", m)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
