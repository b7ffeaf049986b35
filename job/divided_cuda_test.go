package job

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"ulysses/testkit/cudatest"
	"ulysses/testkit/near"
)

// On the plug-in, models with experts have the losses of the CPU, with experts divided among ranks
// and without, through CUDA IPC and through host memory: Qwen3-MoE with the loss that balances
// experts, and gpt-oss with its biases and its clamped activation.
func TestCUDAExperts(t *testing.T) {
	cudatest.Use(t)
	oss := `model.new={model_type="gpt_oss", vocab_size=256, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
		num_local_experts=5, num_experts_per_tok=2, sliding_window=16, max_position_embeddings=131072}`
	for name, model := range map[string]string{"qwen3_moe": newDividedModel(),
		"gpt_oss": strings.Join(strings.Fields(oss), " ")} {
		dir, run := newKept(t, model, "train.steps=3", "checkpoint.every=0")
		if _, err := run(1, "device.backend=cpu", "device.dtype=f32"); err != nil {
			t.Fatal(err)
		}
		want := losses(t, dir)
		for _, sets := range [][]string{
			{"device.comm=ipc"}, {"device.comm=ipc", "parallel.experts=2", "parallel.zero=3"},
			{"device.comm=mpi", "parallel.experts=4", "parallel.zero=1"},
		} {
			report := onCUDA(t, filepath.Join(dir, "job.toml"), 4,
				append(slices.Clone(sets), model, "train.steps=3", "checkpoint.every=0", "device.dtype=f32",
					"output.overwrite=true")...)
			if !strings.Contains(report, ": equal") {
				t.Errorf("%s %v: bytes sent are not the formula's: %s", name, sets, report)
			}
			near.Slice(t, fmt.Sprintf("%s %v: losses", name, sets), losses(t, dir), want, 2e-4)
		}
	}
}
