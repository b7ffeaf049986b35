//go:build mpi

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The peak resident memory of a process is the planned memory within 5 % and 200 MiB (for the
// program, MPI, the Go heap and scratch memory of kernels), with kept and recomputed activations,
// and with whole and sharded weights. The MLP is wide, so that the planned memory is much larger
// than the rest.
func TestResidentIsPlanned(t *testing.T) {
	for name, sets := range map[string][]string{
		"everything kept": {"memory.mlp=keep", "memory.qkv=keep", "memory.attention=keep",
			"memory.block_input=keep"},
		"stage 3, recomputed": {"parallel.zero=3", "memory.mlp=recompute", "memory.qkv=recompute",
			"memory.attention=recompute", "memory.block_input=recompute"},
	} {
		t.Run(name, func(t *testing.T) {
			out := t.TempDir()
			file := filepath.Join(out, "status")
			args := append([]string{"parallel.ulysses=2", "train.steps=1", "data.sequence=3072",
				"model.new.intermediate_size=8192", "model.new.num_hidden_layers=2",
				"model.new.max_position_embeddings=4096", "output.model=false", "device.threads=1",
				"tile.mlp=off"}, sets...)
			if code, _, stderr := mpirun(t, "2", []string{"ULYSSES_TEST_STATUS=" + file},
				small(out, args...)...); code != 0 {
				t.Fatalf("exit code %d\n%s", code, stderr)
			}
			text, err := os.ReadFile(filepath.Join(out, "metrics.jsonl"))
			if err != nil {
				t.Fatal(err)
			}
			var record struct {
				Peak int64 `json:"peak_bytes"`
			}
			if err := json.Unmarshal([]byte(strings.SplitN(string(text), "\n", 2)[0]), &record); err != nil ||
				record.Peak < 200<<20 {
				t.Fatalf("planned %d bytes, %v: too little to tell anything", record.Peak, err)
			}
			files, err := filepath.Glob(file + ".*")
			if err != nil || len(files) != 2 {
				t.Fatal(files, err)
			}
			for _, f := range files {
				text, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				most := int64(-1)
				for line := range strings.Lines(string(text)) {
					fmt.Sscanf(line, "VmHWM: %d kB", &most)
				}
				if most <<= 10; most < record.Peak*95/100 || most > record.Peak*105/100+200<<20 {
					t.Errorf("resident at most %d MiB, planned %d MiB", most>>20, record.Peak>>20)
				}
				t.Logf("resident at most %d MiB, planned %d MiB", most>>20, record.Peak>>20)
			}
		})
	}
}
