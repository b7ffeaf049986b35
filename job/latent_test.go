package job

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"ulysses/testkit/cudatest"
)

// latentFromScratch is a job that trains a small DeepSeek-V3, whose first layer is dense.
func latentFromScratch(t *testing.T) string {
	t.Helper()
	return fromScratch(t, `
model_type = "deepseek_v3"
vocab_size = 256
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
first_k_dense_replace = 1
n_routed_experts = 4
num_experts_per_tok = 2
n_shared_experts = 1
moe_intermediate_size = 16
n_group = 2
topk_group = 1
num_attention_heads = 3
num_key_value_heads = 3
q_lora_rank = 24
kv_lora_rank = 16
qk_nope_head_dim = 32
qk_rope_head_dim = 16
v_head_dim = 32
initializer_range = 0.1
`, "")
}

// Overlapping projections with all-to-alls changes no bit of losses and weights.
func TestLatentOverlap(t *testing.T) {
	path := latentFromScratch(t)
	for _, memory := range []string{"memory.qkv=keep", "memory.qkv=recompute", "memory.attention=recompute"} {
		for _, ranks := range []int{2, 3} {
			sets := []string{"device.backend=cpu", "parallel.ring=1", fmt.Sprintf("parallel.ulysses=%d", ranks), memory}
			losses, weights := trained(t, path, ranks, append(sets, "parallel.overlap=off")...)
			got, same := trained(t, path, ranks, append(sets, "parallel.overlap=on")...)
			if !slices.Equal(got, losses) || !bytes.Equal(same, weights) {
				t.Errorf("%s, %d ranks: losses %v, without overlap %v; weights are equal: %v", memory, ranks, got, losses,
					bytes.Equal(same, weights))
			}
		}
	}
}

// Steps of latent attention on the CUDA plug-in have the losses of the CPU: within 1e-4 in F32,
// 1e-2 in BF16, in which tensor cores compute heads of 48 features with values of 32.
func TestCUDALatent(t *testing.T) {
	cudatest.Use(t)
	lossesOfCPU(t, latentFromScratch(t), []cudaMesh{{"f32", 1, 1, 1e-4}, {"f32", 4, 2, 1e-4}, {"bf16", 2, 1, 1e-2}})
}
