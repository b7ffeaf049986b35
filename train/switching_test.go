package train

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"ulysses/data"
	"ulysses/tensor"
	"ulysses/testkit/near"
)

// With a RoPE whose frequencies depend on the longest document, this is the longest of all replicas
// and micro-batches of the step: a step has the loss of one rank, although one document alone is
// longer than the model's positions. An evaluation takes the length of each document, so it has the
// same loss on every mesh.
func TestLongestDocumentOfAStep(t *testing.T) {
	tiny["dynamic"] = maps.Clone(tiny["llama"])
	tiny["dynamic"]["max_position_embeddings"] = 16
	tiny["dynamic"]["rope_scaling"] = map[string]any{"rope_type": "dynamic", "factor": 4.0}
	defer delete(tiny, "dynamic")
	var lines strings.Builder
	for i, n := range []int{10, 12, 50, 9} {
		lines.WriteString(`{"text": "` + strings.Repeat("abcdefg "[i:], n)[:n] + "\"}\n")
	}
	path := file(t, t.TempDir(), "a.jsonl", lines.String())
	trained := func(name string, ranks, ulysses int) outcome {
		dataset := data.Config{Path: []string{path}, Tokenizer: "bytes", TextField: "text", Sequence: 64, Batch: 1,
			Accumulate: 4 / int64(ranks/ulysses)}
		return run{model: name, ranks: ranks, ulysses: ulysses, optimizer: "adamw", compute: tensor.F32,
			steps: 3}.trainOn(t, dataset)
	}
	want := trained("dynamic", 1, 1)
	if other := trained("llama", 1, 1); slices.Equal(other.losses, want.losses) || other.eval == want.eval {
		t.Fatalf("losses %v and %v do not depend on the scaling of RoPE", want.losses, want.eval)
	}
	for _, mesh := range [][2]int{{2, 1}, {4, 1}, {4, 2}, {2, 2}} {
		got := trained("dynamic", mesh[0], mesh[1])
		near.Slice(t, "losses", got.losses, want.losses, 1e-5)
		near.Value(t, "loss of the evaluation", got.eval, want.eval, 1e-5)
	}
}
