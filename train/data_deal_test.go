package train

import (
	"encoding/json"
	"fmt"
	"math"
	"math/rand"
	"reflect"
	"strings"
	"sync"
	"testing"

	"ulysses/comm"
	"ulysses/internal/clock"
	"ulysses/model"
	"ulysses/tensor"
)

func TestDeal(t *testing.T) {
	square := func(n int64) float64 { return float64(n) * float64(n) }
	for _, c := range []struct {
		lengths  []int64
		replicas int
		budget   int64
		want     string
	}{
		{[]int64{1, 1, 1, 1}, 1, 4, "[[[0 1 2 3]]]"},
		{[]int64{1, 1, 1, 1}, 4, 100, "[[[0] [1] [2] [3]]]"}, // each replica has a row
		{[]int64{4, 4, 4, 4}, 2, 4, "[[[0] [1]] [[3] [2]]]"}, // no two fit
		{[]int64{3, 5, 2, 6}, 2, 8, "[[[2 3] [0 1]]]"},       // the fewest micro steps
		// by least cost the last one has no room in two
		{[]int64{5, 5, 4, 4, 2}, 1, 10, "[[[0 1]] [[2 3 4]]]"},
	} {
		if got := fmt.Sprint(deal(c.lengths, c.replicas, c.budget, square)); got != c.want {
			t.Errorf("%v to %d replicas, %d tokens: %s, want %s", c.lengths, c.replicas, c.budget, got, c.want)
		}
	}
	r := rand.New(rand.NewSource(1))
	for range 2000 {
		replicas, budget := 1+r.Intn(4), int64(1+r.Intn(60))
		lengths := make([]int64, replicas*(1+r.Intn(12)))
		total := int64(0)
		for i := range lengths {
			lengths[i] = 1 + r.Int63n(budget)
			if r.Intn(2) == 0 {
				lengths[i] = 1 + lengths[i]/8
			}
			lengths[i] = min(lengths[i], budget)
			total += lengths[i]
		}
		micros := deal(lengths, replicas, budget, square)
		seen := make([]bool, len(lengths))
		for _, m := range micros {
			if len(m) != replicas {
				t.Fatal(micros)
			}
			for _, rows := range m {
				n := int64(0)
				for i, row := range rows {
					if n += lengths[row]; seen[row] || i > 0 && row <= rows[i-1] {
						t.Fatal(lengths, micros)
					}
					seen[row] = true
				}
				if n == 0 || n > budget {
					t.Fatalf("%d tokens of %d: %v", n, budget, micros)
				}
			}
		}
		for i, s := range seen {
			if !s {
				t.Fatalf("row %d is lost: %v", i, micros)
			}
		}
		// At most 11/9 of what any dealing needs, and one more for each rounding.
		least := max(1, math.Ceil(float64(total)/float64(budget)/float64(replicas)))
		if n := float64(len(micros)); n > 2*least+1 || !reflect.DeepEqual(micros, deal(lengths, replicas, budget, square)) {
			t.Fatalf("%v micro steps, at least %v: %v", n, least, micros)
		}
	}
}

// The costs of micro steps that run side by side are close.
func TestDealBalances(t *testing.T) {
	r := rand.New(rand.NewSource(2))
	lengths := make([]int64, 256)
	for i := range lengths {
		lengths[i] = 1 + int64(1000*math.Pow(r.Float64(), 3))
	}
	cost := func(n int64) float64 { return float64(n)*50 + float64(n)*float64(n) }
	for _, m := range deal(lengths, 4, 8000, cost) {
		least, most := math.Inf(1), 0.0
		for _, rows := range m {
			c := 0.0
			for _, row := range rows {
				c += cost(lengths[row])
			}
			least, most = min(least, c), max(most, c)
		}
		if most > 1.05*least {
			t.Errorf("costs from %v to %v", least, most)
		}
	}
}

// Dealt, a step has the loss and the gradient that it has with a row a micro step, on every mesh;
// and no micro step more tokens than it may.
func TestBudget(t *testing.T) {
	var lines strings.Builder
	r := rand.New(rand.NewSource(3))
	for range 25 {
		line, _ := json.Marshal(map[string]string{"text": strings.Repeat("the cat sat on the log, ", 4)[:1+r.Intn(1+r.Intn(90))]})
		fmt.Fprintf(&lines, "%s\n", line)
	}
	path := file(t, t.TempDir(), "a.jsonl", lines.String())
	trained := func(ranks, ulysses, zero int, budget int64) (o outcome) {
		d := config(64, path)
		d.Pack, d.Shuffle, d.Budget = false, true, budget
		d.Batch, d.Accumulate = 1, 12/int64(ranks/ulysses)
		x := run{model: "llama", ranks: ranks, ulysses: ulysses, optimizer: "sgd", compute: tensor.F32, steps: 4, zero: zero}
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
	for _, c := range [][4]int{{1, 1, 0, 64}, {1, 1, 0, 1000}, {2, 1, 0, 64}, {4, 2, 0, 100}, {4, 2, 3, 130}, {4, 1, 2, 64}, {3, 1, 3, 90}, {4, 4, 1, 70}} {
		got := trained(c[0], c[1], c[2], int64(c[3]))
		if e := worst(got.losses, want.losses); e > 2e-6 {
			t.Errorf("%v: losses %v, want %v", c, got.losses, want.losses)
		}
		most, off := 0.0, 0.0
		for i := range want.weights {
			most, off = max(most, math.Abs(float64(want.weights[i]))), max(off, math.Abs(float64(want.weights[i]-got.weights[i])))
		}
		if !(off <= 1e-6*most) || len(got.weights) != len(want.weights) {
			t.Errorf("%v: weights off by %g of %g", c, off, most)
		}
	}
}

// Memory is planned for the budget, not for batch rows of the longest.
func TestBudgetRows(t *testing.T) {
	path := file(t, t.TempDir(), "a.jsonl", strings.Repeat("{\"text\":\"abcdefgh\"}\n", 40))
	d := config(10, path)
	d.Pack, d.Batch, d.Accumulate, d.Budget = false, 2, 3, 33
	set := open(t, d, EvalConfig{}, 256).Train()
	for _, c := range []struct {
		budget, want int64
		eval         bool
	}{{0, 16, false}, {33, 33, false}, {1000, 48, false}, {33, 33, true}, {1000, 320, true}} {
		d.Budget = c.budget
		err := comm.RunLocal(1, func(host comm.Comm) error {
			mesh, err := comm.NewMesh(host, 1, 1, comm.NewLedger(), clock.New(), nil)
			if err != nil {
				return err
			}
			s := &Setup{Mesh: mesh, Train: set, Data: &d, Model: &model.Model{}}
			if c.eval {
				s.Eval = set
			}
			if got, _ := s.MaxRows(); got != c.want {
				t.Errorf("budget %d, eval %v: %d tokens, want %d", c.budget, c.eval, got, c.want)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}
