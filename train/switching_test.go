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
// longer than the model's positions. An evaluation takes the length of each document: its loss is
// the mean of the losses that the documents have alone.
func TestLongestDocumentOfAStep(t *testing.T) {
	tiny["dynamic"] = maps.Clone(tiny["llama"])
	tiny["dynamic"]["max_position_embeddings"] = 16
	tiny["dynamic"]["rope_scaling"] = map[string]any{"rope_type": "dynamic", "factor": 4.0}
	defer delete(tiny, "dynamic")
	dir := t.TempDir()
	trained := func(name string, ranks, ulysses int, lr float64, lengths ...int) outcome {
		var lines strings.Builder
		for _, n := range lengths {
			lines.WriteString(`{"text": "` + strings.Repeat("abcdefg "[n%8:], n)[:n] + "\"}\n")
		}
		dataset := data.Config{Path: []string{file(t, dir, "a.jsonl", lines.String())}, Tokenizer: "bytes",
			TextField: "text", Sequence: 64, Batch: 1, Accumulate: 4 / int64(ranks/ulysses)}
		return run{model: name, ranks: ranks, ulysses: ulysses, optimizer: "adamw", compute: tensor.F32, steps: 3,
			lr: lr}.trainOn(t, dataset)
	}
	short, all := []int{10, 12, 9}, []int{10, 12, 50, 9}
	want := trained("dynamic", 1, 1, 3e-3, all...)
	other := trained("llama", 1, 1, 3e-3, all...)
	if slices.Equal(other.losses, want.losses) || other.eval == want.eval {
		t.Fatalf("losses %v and %v do not depend on the scaling of RoPE", want.losses, want.eval)
	}
	for _, mesh := range [][2]int{{2, 1}, {4, 1}, {4, 2}, {2, 2}} {
		got := trained("dynamic", mesh[0], mesh[1], 3e-3, all...)
		near.Slice(t, "losses", got.losses, want.losses, 1e-5)
		near.Value(t, "loss of the evaluation", got.eval, want.eval, 1e-5)
	}
	// The last byte of a document has no target. At this rate no weight changes.
	const still = 1e-12
	shorts, long := trained("llama", 1, 1, still, short...).eval, trained("dynamic", 1, 1, still, 50).eval
	near.Value(t, "loss of short documents and a long one", trained("dynamic", 1, 1, still, all...).eval,
		(28*shorts+49*long)/(28+49), 1e-5)
}
