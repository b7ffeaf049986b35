package data

import (
	"fmt"
	"math"
	"math/rand"
	"reflect"
	"testing"
)

func TestBalance(t *testing.T) {
	square := func(n int64) float64 { return float64(n) * float64(n) }
	for _, c := range []struct {
		lengths  []int64
		replicas int
		budget   int64
		want     string
	}{
		{[]int64{1, 1, 1, 1}, 1, 4, "[[[0 1 2 3]]]"},
		{[]int64{1, 1, 1, 1}, 4, 100, "[[[0] [1] [2] [3]]]"}, // each replica has a sequence
		{[]int64{4, 4, 4, 4}, 2, 4, "[[[0] [1]] [[3] [2]]]"}, // no two fit
		{[]int64{3, 5, 2, 6}, 2, 8, "[[[2 3] [0 1]]]"},       // the fewest micro-batches
		// by least cost, the last sequence has no room in two micro-batches
		{[]int64{5, 5, 4, 4, 2}, 1, 10, "[[[0 1]] [[2 3 4]]]"},
	} {
		if got := fmt.Sprint(Balance(c.lengths, c.replicas, c.budget, square)); got != c.want {
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
		batches := Balance(lengths, replicas, budget, square)
		seen := make([]bool, len(lengths))
		for _, m := range batches {
			if len(m) != replicas {
				t.Fatal(batches)
			}
			for _, sequences := range m {
				n := int64(0)
				for i, s := range sequences {
					if n += lengths[s]; seen[s] || i > 0 && s <= sequences[i-1] {
						t.Fatal(lengths, batches)
					}
					seen[s] = true
				}
				if n == 0 || n > budget {
					t.Fatalf("%d tokens of %d: %v", n, budget, batches)
				}
			}
		}
		for i, s := range seen {
			if !s {
				t.Fatalf("sequence %d is missing: %v", i, batches)
			}
		}
		// At most 11/9 of the smallest possible number, and one more for each rounding.
		least := max(1, math.Ceil(float64(total)/float64(budget)/float64(replicas)))
		if n := float64(len(batches)); n > 2*least+1 ||
			!reflect.DeepEqual(batches, Balance(lengths, replicas, budget, square)) {
			t.Fatalf("%v micro-batches, at least %v: %v", n, least, batches)
		}
	}
}

// Sequences of equal lengths are assigned once: the lower bound of the micro-batches is exact, for
// any number of sequences that fit into one.
func TestBalanceOfEqualLengths(t *testing.T) {
	for _, each := range []int64{1, 2, 3, 7} {
		lengths, calls := make([]int64, 84), 0
		for i := range lengths {
			lengths[i] = 1000/(each+1) + 1
		}
		batches := Balance(lengths, 2, 1000, func(int64) float64 { calls++; return 1 })
		if want := int(84 / each / 2); len(batches) != want || calls != len(lengths) {
			t.Errorf("%d sequences in each: %d micro-batches, want %d; %d costs of %d sequences", each, len(batches),
				want, calls, len(lengths))
		}
	}
}

// Micro-batches that run at the same time have similar costs.
func TestBalanceCosts(t *testing.T) {
	r := rand.New(rand.NewSource(2))
	lengths := make([]int64, 256)
	for i := range lengths {
		lengths[i] = 1 + int64(1000*math.Pow(r.Float64(), 3))
	}
	cost := func(n int64) float64 { return float64(n)*50 + float64(n)*float64(n) }
	for _, m := range Balance(lengths, 4, 8000, cost) {
		least, most := math.Inf(1), 0.0
		for _, sequences := range m {
			c := 0.0
			for _, s := range sequences {
				c += cost(lengths[s])
			}
			least, most = min(least, c), max(most, c)
		}
		if most > 1.05*least {
			t.Errorf("costs from %v to %v", least, most)
		}
	}
}
