package plan

import (
	"fmt"
	"strings"
	"testing"

	"ulysses/device"
	"ulysses/dryrun"
	"ulysses/job/file"
	"ulysses/model"
	"ulysses/tensor"
)

// The groups of a ring differ in the rows and keys of attention, and all ranks but the first
// receive recurrent states. A plan has the memory of the rank that needs the most.
func TestPlanOfTheHeaviestGroup(t *testing.T) {
	const hybrid = "model_type = \"qwen3_5_text\"\nfull_attention_interval = 2\nhead_dim = 16\nlinear_num_key_heads = 2\nlinear_num_value_heads = 4\n" +
		"linear_key_head_dim = 16\nlinear_value_head_dim = 16\nlinear_conv_kernel_dim = 4\n"
	m := &Machine{Sizes: noSizes{},
		Info: device.Info{Kind: "cpu", Place: tensor.Host, Workers: 1, Align: 64, Compute: []tensor.DType{tensor.F32}},
		Rates: dryrun.Rates{Products: 1e12, Attention: 1e12, Gradient: 1e12, Delta: 1e12, Memory: 1e12, Copies: 1e12,
			Node: 1e12, Network: 1e12, PerNode: 8}}
	inner := 0
	states := strings.NewReplacer("key_head_dim = 16", "key_head_dim = 128", "value_head_dim = 16",
		"value_head_dim = 64").Replace(hybrid)
	for _, family := range []string{"model_type = \"llama\"\n", hybrid, states} {
		for _, mesh := range [][2]int64{{2, 2}, {2, 4}, {2, 5}, {3, 1}, {4, 1}} {
			ulysses, ring := mesh[0], mesh[1]
			for _, memory := range []string{"gather = \"on\"",
				"[memory]\nattention = \"recompute\"\nmlp = \"recompute\""} {
				text := "[parallel]\nzero = 3\n" + memory +
					"\n[model.new]\nvocab_size = 256\nhidden_size = 32\nintermediate_size = 48\nnum_hidden_layers = 2\nnum_attention_heads = 4\n" +
					"num_key_value_heads = 2\n" + family +
					"[data]\npath = [\"a.txt\"]\nsequence = 100\n[gdn]\nstrategy = \"state\"\n"
				j, err := file.Parse([]byte(text), "job.toml", nil, nil)
				if err != nil {
					t.Fatal(err)
				}
				x, err := SubjectOf(j)
				if err != nil {
					t.Fatal(err)
				}
				j.Mesh = file.Mesh{World: ulysses * ring, Ulysses: ulysses, Ring: ring, Replicas: 1, Experts: 1,
					Gather: j.Parallel.Gather == "on"}
				most := int64(0)
				var of []int64
				for rank := range int(j.Mesh.World) {
					f, err := PredictRank(j, m, x, rank, false)
					if err != nil {
						t.Fatal(err)
					}
					of = append(of, model.Bytes(f.Memory))
					most = max(most, of[rank])
					f.Close()
				}
				f, err := Predict(j, m, x, false)
				if err != nil {
					t.Fatal(err)
				}
				if got := model.Bytes(f.Memory); got != most {
					t.Errorf("%s, ulysses %d, ring %d, %s: %d bytes are planned on rank %d; the ranks plan %v",
						fmt.Sprintf("%.20s", family), ulysses, ring, memory, got, f.Rank, of)
				}
				if of[0] < most {
					inner++
				}
				f.Close()
			}
		}
	}
	if inner == 0 {
		t.Error("rank 0 always needs the most memory")
	}
}
