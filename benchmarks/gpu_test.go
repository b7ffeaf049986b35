package main

import (
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
)

// A suite without a case that --cases selects runs nothing and succeeds, because gpu.py passes the
// same --cases to all suites.
func TestGPUSuitesWithoutCases(t *testing.T) {
	for _, suite := range []string{"gpu_attention", "gpu_masks", "gpu_wgmma", "gpu_layer", "gpu_ops", "gpu_delta",
		"gpu_loss", "gpu_hybrid"} {
		if err := run([]string{suite, "--device", "cpu", "--cases", "no such case", "--repeat", "1", "--warm",
			"1ns"}); err != nil {
			t.Errorf("%s: %v", suite, err)
		}
	}
}

// The suites for GPUs run on the CPU and print lines for all operations, so errors in them are
// found without a GPU.
func TestGPUSuites(t *testing.T) {
	for suite, want := range map[string][]string{
		"gpu_attention": {"forward", "backward"},
		"gpu_masks":     {"forward", "backward"},
		"gpu_wgmma":     {"forward", "backward"},
		"gpu_layer":     {"forward", "backward", "forward+backward"},
		"gpu_ops":       {"memory", "product"},
		"gpu_host":      {"host"},
		"gpu_delta":     {"forward", "backward", "memory"},
		"gpu_loss":      {"forward+backward"},
		"gpu_hybrid":    {"forward", "backward", "forward+backward", "roof"},
	} {
		read, write, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout := os.Stdout
		os.Stdout = write
		ranks := map[bool]string{true: "2", false: "1"}[suite == "gpu_layer"]
		err = run([]string{suite, "--device", "cpu", "--cases", "dry-run", "--repeat", "2", "--warm", "1ns",
			"--ranks", ranks})
		os.Stdout = stdout
		write.Close()
		text, _ := io.ReadAll(read)
		if err != nil {
			t.Fatalf("%s: %v", suite, err)
		}
		seen := map[string]int{}
		for line := range strings.Lines(string(text)) {
			var x struct {
				Case, Op string
				Median   float64 `json:"median_s"`
			}
			if err := json.Unmarshal([]byte(line), &x); err != nil || !(x.Median > 0) {
				t.Errorf("%s: %s%v", suite, line, err)
			}
			seen[x.Op]++
		}
		for _, op := range want {
			if seen[op] == 0 {
				t.Errorf("%s printed no line of %q:\n%s", suite, op, text)
			}
		}
	}
}
