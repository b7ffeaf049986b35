package train

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand"
	"strings"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/cpu"
	"ulysses/data"
	"ulysses/internal/clock"
	"ulysses/model"
	"ulysses/tensor"
)

// With data.budget, a step has the same loss and gradient as with one sequence in each micro-batch,
// on every mesh.
func TestBudget(t *testing.T) {
	var lines strings.Builder
	r := rand.New(rand.NewSource(3))
	for range 25 {
		line, _ := json.Marshal(
			map[string]string{"text": strings.Repeat("the cat sat on the log, ", 4)[:1+r.Intn(1+r.Intn(90))]})
		fmt.Fprintf(&lines, "%s\n", line)
	}
	path := file(t, t.TempDir(), "a.jsonl", lines.String())
	trained := func(ranks, ulysses, zero int, budget int64) (o outcome) {
		d := config(64, path)
		d.Pack, d.Shuffle, d.Budget = false, true, budget
		d.Batch, d.Accumulate = 1, 12/int64(ranks/ulysses)
		x := run{model: "llama", ranks: ranks, ulysses: ulysses, optimizer: "sgd", compute: tensor.F32, steps: 4,
			zero: zero}
		var mu sync.Mutex
		if err := comm.RunLocal(ranks, func(c comm.Comm) error {
			got, err := x.rank(c, &d)
			if err == nil && c.Rank() == 0 {
				mu.Lock()
				defer mu.Unlock()
				o = got
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return o
	}
	want := trained(1, 1, 0, 0)
	for _, c := range [][4]int{{1, 1, 0, 64}, {1, 1, 0, 1000}, {2, 1, 0, 64}, {4, 2, 0, 100}, {4, 2, 3, 130},
		{4, 1, 2, 64}, {3, 1, 3, 90}, {4, 4, 1, 70}} {
		got := trained(c[0], c[1], c[2], int64(c[3]))
		if e := worst(got.losses, want.losses); !(e <= 2e-6) {
			t.Errorf("%v: losses %v, want %v", c, got.losses, want.losses)
		}
		most, off := 0.0, 0.0
		for i := range want.weights {
			most, off = max(most, math.Abs(float64(want.weights[i]))),
				max(off, math.Abs(float64(want.weights[i]-got.weights[i])))
		}
		if !(off <= 1e-6*most) || len(got.weights) != len(want.weights) {
			t.Errorf("%v: weights off by %g of %g", c, off, most)
		}
	}
}

// Memory is planned for the tokens of data.budget, not for data.batch sequences of the longest
// length.
func TestBudgetTokens(t *testing.T) {
	path := file(t, t.TempDir(), "a.jsonl", strings.Repeat("{\"text\":\"abcdefgh\"}\n", 40))
	d := config(10, path)
	d.Pack, d.Batch, d.Accumulate, d.Budget = false, 2, 3, 33
	opened, err := data.Open(d, data.EvalConfig{}, data.Options{Vocab: 256, Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer opened.Close()
	set := opened.Train()
	for _, c := range []struct {
		budget, want, step int64
		eval               bool
	}{{0, 16, 16, false}, {33, 33, 33, false}, {1000, 48, 48, false}, {33, 33, 33, true}, {1000, 320, 48, true}} {
		d.Budget = c.budget
		err := comm.RunLocal(1, func(host comm.Comm) error {
			mesh, err := comm.NewMesh(host, 1, 1, comm.NewLedger(), clock.New(), nil)
			if err != nil {
				return err
			}
			m, err := newTinyModel(mesh.Seq)
			if err != nil {
				return err
			}
			defer m.Close()
			s := &Setup{Mesh: mesh, Data: Data{Train: set, Config: &d}, Model: m}
			if c.eval {
				s.Data.Evals = []data.NamedSet{{Set: set}}
			}
			if got, _ := s.MaxTokens(); got != c.want || s.PassTokens() != c.step {
				t.Errorf("budget %d, eval %v: %d tokens, %d in a step, want %d and %d", c.budget, c.eval, got,
					s.PassTokens(), c.want, c.step)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// newTinyModel returns a model on the ranks of a sequence, without weights.
func newTinyModel(c comm.Comm) (*model.Model, error) {
	dev, err := cpu.New(cpu.Options{Workers: 1})
	if err != nil {
		return nil, err
	}
	cfg, err := model.ConfigFromMap(tiny["llama"])
	if err != nil {
		return nil, err
	}
	return model.New(dev, c, cfg, model.Options{})
}
