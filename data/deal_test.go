package data

import (
	"fmt"
	"math"
	"math/rand"
	"reflect"
	"testing"
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
		if got := fmt.Sprint(Deal(c.lengths, c.replicas, c.budget, square)); got != c.want {
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
		micros := Deal(lengths, replicas, budget, square)
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
		if n := float64(len(micros)); n > 2*least+1 || !reflect.DeepEqual(micros, Deal(lengths, replicas, budget, square)) {
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
	for _, m := range Deal(lengths, 4, 8000, cost) {
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
