package job

import (
	"bytes"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"ulysses/internal/status"
	"ulysses/testkit/near"
)

// Models with experts have the same losses, gradient norms and balancing losses on every mesh, with
// every ZeRO stage, and for every division of the global batch into micro-batches. The first loss,
// and the first loss of the experts' balance, do not even differ in rounding: the forward pass of a
// token is bitwise equal, except in a ring, and sums over tokens are in float64.
func TestExpertsOnMeshes(t *testing.T) {
	for _, x := range []struct {
		golden, coefficient string
		chosen, experts     float64
	}{{"qwen3_moe-adamw-packed", "0.5", 3, 6}, {"mixtral-sgd-plain", "2.0", 2, 7}} {
		path := filepath.Join(goldens, x.golden, "job.toml")
		run := func(t *testing.T, ranks int, sets string) ([]metricsLine, string) {
			out := t.TempDir()
			var stdout, stderr bytes.Buffer
			sets += " train.steps=3 model.override.output_router_logits=true model.override.router_aux_loss_coef=" +
				x.coefficient
			err := Run(Options{Path: path, Sets: append(strings.Fields(sets), "output.dir="+out), Ranks: ranks,
				Verbose: true, Stdout: &stdout, Stderr: &stderr})
			if err != nil {
				t.Fatal(err, stderr.String())
			}
			return readSteps(t, out, 3), stdout.String()
		}
		want, _ := run(t, 1, "parallel.ulysses=1 data.batch=4")
		for _, r := range want {
			// With equal loads it is the number of experts of a token. The maximum is the number
			// of all experts.
			if r.AuxLoss == nil || !(*r.AuxLoss > x.chosen && *r.AuxLoss < x.experts) {
				t.Fatalf("%+v: the loss of balance is not between %v and %v", r, x.chosen, x.experts)
			}
		}
		for _, m := range []struct {
			ranks int
			sets  string
		}{
			{1, "parallel.ulysses=1 data.batch=1 data.accumulate=4"},
			{1, "parallel.ulysses=1 data.batch=2 data.accumulate=2 tile.mlp=7"},
			{2, "parallel.ulysses=2 data.batch=4 parallel.zero=1"},
			{2, "parallel.ulysses=1 parallel.ring=2 data.batch=4 parallel.zero=2"},
			{2, "parallel.ulysses=1 data.batch=2 parallel.zero=3"},
			{4, "parallel.ulysses=4 data.batch=4 parallel.zero=3 memory.mlp=recompute memory.segment=2"},
			{4, "parallel.ulysses=2 parallel.ring=2 data.batch=2 data.accumulate=2 parallel.zero=2"},
			{4, "parallel.ulysses=2 data.batch=2 parallel.zero=3 parallel.overlap=on"},
			{4, "parallel.ulysses=1 data.batch=1 parallel.zero=1 memory.attention=recompute memory.qkv=recompute"},
			{4, "parallel.ulysses=1 parallel.ring=2 data.batch=1 data.accumulate=2"},
			{2, "parallel.ulysses=2 data.batch=4 parallel.experts=2"},
			{2, "parallel.ulysses=1 data.batch=2 parallel.experts=2 parallel.zero=3"},
			{4, "parallel.ulysses=4 data.batch=4 parallel.experts=2 parallel.zero=3 memory.mlp=recompute memory.segment=2"},
			{4, "parallel.ulysses=2 data.batch=2 parallel.experts=4 parallel.zero=2 tile.mlp=7"},
			{4, "parallel.ulysses=2 parallel.ring=2 data.batch=2 data.accumulate=2 parallel.experts=4"},
			{4, "parallel.ulysses=1 data.batch=1 parallel.experts=2 parallel.zero=1 memory.attention=recompute memory.qkv=recompute"},
		} {
			t.Run(fmt.Sprint(x.golden, " ", m.ranks, " ", m.sets), func(t *testing.T) {
				got, report := run(t, m.ranks, m.sets)
				for i, r := range got {
					tolerance := 3e-6
					if i == 0 && !strings.Contains(m.sets, "ring") {
						tolerance = 1e-13
					}
					near.Value(t, fmt.Sprintf("loss of step %d", i+1), r.Loss, want[i].Loss, tolerance*want[i].Loss)
					near.Value(t, fmt.Sprintf("loss of balance of step %d", i+1), *r.AuxLoss, *want[i].AuxLoss,
						max(tolerance, 1e-12)**want[i].AuxLoss)
					near.Value(t, fmt.Sprintf("gradient norm of step %d", i+1), r.GradNorm, want[i].GradNorm,
						2e-5*want[i].GradNorm)
				}
				if m.ranks > 1 && !strings.Contains(report, ": equal") || strings.Contains(report, "NOT EQUAL") {
					t.Errorf("bytes sent are not the formula's: %s", report)
				}
			})
		}
	}
}

// The golden of Mixtral and of Qwen3-MoE in a ring and with sharded weights.
func TestGoldenExpertsSharded(t *testing.T) {
	for dir, c := range namedGoldens(t, "mixtral-adamw-packed", "qwen3_moe-sgd-packed") {
		for _, sets := range [][]string{{"parallel.ulysses=2", "parallel.ring=2", "parallel.zero=3"},
			{"parallel.ulysses=1", "parallel.ring=4", "parallel.zero=2"},
			{"parallel.zero=1", "tile.mlp=5"}, {"parallel.zero=3", "memory.mlp=offload"},
			{"parallel.experts=4"},
			{"parallel.ulysses=2", "parallel.ring=2", "parallel.experts=2", "parallel.zero=3", "tile.mlp=5"}} {
			trainGolden(t, dir, c, 4, sets...)
		}
	}
}

// The export of a checkpoint is equal to the run's model folder where a folder has other tensors
// than the model: Qwen3-Next's projections of linear attention.
func TestExportFused(t *testing.T) {
	next := `model.new={model_type="qwen3_next", vocab_size=256, hidden_size=24, intermediate_size=20, num_hidden_layers=2, full_attention_interval=2, num_attention_heads=4,
		num_key_value_heads=2, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=5, num_experts=4, num_experts_per_tok=2,
		moe_intermediate_size=12, shared_expert_intermediate_size=10}`
	dir, run := newKept(t, strings.Join(strings.Fields(next), " "), "data.tokenizer=bytes", "data.sequence=40",
		"checkpoint.every=1", "checkpoint.keep=9")
	if _, err := run(2, "train.steps=3", "optimizer.schedule=constant", "parallel.zero=3"); err != nil {
		t.Fatal(err)
	}
	out, folder := filepath.Join(dir, "out"), filepath.Join(dir, "exported")
	exports(t, filepath.Join(out, "checkpoints"), folder, "after step 3")
	alike(t, "fused", folder, filepath.Join(out, "model"))
	names, _ := readWeights(t, filepath.Join(folder, "model.safetensors"))
	if names["model.layers.0.linear_attn.in_proj_qkvz.weight"] == nil ||
		names["model.layers.0.linear_attn.in_proj_qkv.weight"] != nil {
		t.Error("the projections are not fused")
	}
}

// Fields of experts in the wrong place, features that are not built, and adapters of experts are
// refused by name.
func TestExpertsRefused(t *testing.T) {
	path := filepath.Join(goldens, "qwen3_moe-sgd-packed", "job.toml")
	for sets, want := range map[string]string{
		"model.num_experts_per_tok=2":                "num_experts_per_tok: a field of config.json; set it in model.override",
		"train.moe_router_bias_update_rate=0.001":    "not a key of this program; set optimizer.expert_bias_rate, for example to 0.001",
		"optimizer.expert_bias_rate=1":               "optimizer.expert_bias_rate = 1.0: biases are added to probabilities",
		"optimizer.expert_bias_rate=-0.1":            "optimizer.expert_bias_rate = -0.1",
		"lora.rank=2 optimizer.expert_bias_rate=0.1": "a folder of adapters has no biases of experts",
		"model.override.use_expert_bias=true":        "e_score_correction_bias[6] is missing, and config.json says use_expert_bias = true",
		"parallel.ep_size=2":                         "not a key of this program; set parallel.experts to divide the experts among ranks",
		"train.moe_capacity_factor=2":                "limits of an expert's tokens are not built; leave it out",
		"parallel.experts=3":                         "parallel.experts: 3 does not divide the 4 ranks; use parallel.experts = 2 or 4",
		"parallel.experts=8 parallel.ulysses=4":      "parallel.experts = 8: the model has 6 experts, and each rank needs at least one",
		"parallel.experts=-1":                        "parallel.experts = -1",
		"model.override.num_experts_per_tok=9":       "num_experts_per_tok = 9, num_local_experts = 6",
		"lora.rank=2 lora.targets=[\"gate_proj\"]":   "adapters of experts, of routers, and of the other MLPs of qwen2_moe, qwen3_moe, qwen3_next, glm4_moe, ernie4_5_moe, deepseek_v2, deepseek_v3 and glm4_moe_lite are not built",
		"train.freeze=[\"*.experts.3.*\"]":           "freeze the matrices of all experts of a layer or of none",
	} {
		var stderr bytes.Buffer
		ranks := 4
		if strings.Contains(sets, "experts=8") {
			ranks = 8
		}
		err := Run(Options{Path: path, Sets: append(strings.Fields(sets), "output.dir="+t.TempDir()), Ranks: ranks,
			Stdout: &bytes.Buffer{}, Stderr: &stderr})
		if code := status.Of(err); err == nil || code != status.Unsupported && code != status.InvalidConfig ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", sets, err, want)
		}
	}
}
