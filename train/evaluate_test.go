package train

import (
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/tensor"
	"ulysses/testkit/devicetest"
	"ulysses/testkit/fake"
)

// evaluated evaluates documents of the given lengths. It returns the record and the bytes that the
// all-to-alls sent.
func evaluated(t *testing.T, ranks, ulysses, zero int, on *devicetest.Kind, batch int64,
	documents ...int) (r EvalRecord, sent int64) {
	t.Helper()
	dir := t.TempDir()
	var lines strings.Builder
	for i, n := range documents {
		lines.WriteString(`{"text": "` + strings.Repeat(string(rune('a'+i%20)), n) + "\"}\n")
	}
	dataset := config(1600, file(t, dir, "a.jsonl", lines.String()))
	dataset.Pack, dataset.Batch, dataset.Accumulate = false, batch, 2/int64(ranks/ulysses)
	var mu sync.Mutex
	err := comm.RunLocal(ranks, func(host comm.Comm) error {
		x := run{model: "qwen3", ranks: ranks, ulysses: ulysses, optimizer: "adamw", compute: tensor.F32, steps: 1,
			zero: zero, on: on}
		o, err := x.rank(host, &dataset)
		mu.Lock()
		defer mu.Unlock()
		if host.Rank() == 0 {
			r.EvalLoss = Float(o.eval)
		}
		sent += o.evalSent
		return err
	})
	if err != nil {
		t.Fatalf("%d ranks, ulysses %d, zero %d: %v", ranks, ulysses, zero, err)
	}
	return r, sent
}

// Documents that fit on a rank are evaluated by single ranks without all-to-all; longer documents
// by all ranks of a replica. The loss equals the loss of one rank, with every stage, also on the
// test device.
func TestEvaluateAlone(t *testing.T) {
	late := devicetest.Fake("late", fake.Options{})
	short, mixed := []int{320, 130, 400, 3, 260, 390, 60}, []int{1600, 320, 1200, 130, 400, 3, 260, 1590, 60}
	for _, x := range []struct {
		documents []int
		batch     int64
	}{{append(short, 1600), 1}, {mixed, 1}, {mixed[:1], 1}, {short, 4}} {
		want, _ := evaluated(t, 1, 1, 0, nil, x.batch, x.documents...)
		longest := slices.Max(x.documents) * int(x.batch)
		for _, mesh := range [][2]int{{2, 2}, {4, 4}, {4, 2}} {
			for _, zero := range []int{0, 3} {
				for _, on := range []*devicetest.Kind{nil, &late} {
					got, sent := evaluated(t, mesh[0], mesh[1], zero, on, x.batch, x.documents...)
					if !(math.Abs(float64(got.EvalLoss-want.EvalLoss)) < 1e-6) {
						t.Errorf("%v by %v, zero %d: loss %v, want %v", x.documents, mesh, zero, got.EvalLoss,
							want.EvalLoss)
					}
					long := 0
					for _, n := range x.documents {
						if n > longest/mesh[1] {
							long++
						}
					}
					if on == nil && (sent > 0) != (long > 0) {
						t.Errorf("%v by %v, zero %d: %d bytes were sent for %d long documents", x.documents, mesh, zero,
							sent, long)
					}
				}
			}
		}
	}
}
