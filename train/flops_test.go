package train

import (
	"fmt"
	"testing"

	"ulysses/model"
	"ulysses/tensor"
	"ulysses/testkit/near"
)

// The model FLOPs of a step count the tokens and pairs of the global batch, of which a rank has a
// share. They are equal on every mesh. The 1 % is for a sequence with two documents: a replica
// estimates the pairs of other replicas from its own sequences.
func TestFlopsOfAStep(t *testing.T) {
	cfg, err := model.ConfigFromMap(tiny["llama"])
	if err != nil {
		t.Fatal(err)
	}
	want := cfg.Flops(4*48, 4*cfg.Pairs(48))
	for _, x := range []struct{ ranks, ulysses int }{{1, 1}, {2, 2}, {2, 1}, {4, 1}, {4, 2}} {
		got := run{model: "llama", ranks: x.ranks, ulysses: x.ulysses, optimizer: "sgd", compute: tensor.F32,
			steps: 2}.train(t)
		for i, flops := range got.flops {
			near.Value(t, fmt.Sprintf("%+v: FLOPs of step %d", x, i+1), flops, want, 0.01*want)
		}
	}
}
