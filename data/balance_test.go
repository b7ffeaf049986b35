package data

import (
	"cmp"
	"fmt"
	"math"
	"math/rand"
	"reflect"
	"slices"
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

// leastCost finds the bins that a search through all of them finds.
func TestLeastCost(t *testing.T) {
	r := rand.New(rand.NewSource(3))
	for range 3000 {
		budget, n := int64(1+r.Intn(40)), 1+r.Intn(9)
		lengths, costs, order := make([]int64, n+r.Intn(40)), make([]float64, 0), []int(nil)
		for i := range lengths {
			lengths[i] = r.Int63n(min(budget, 1+r.Int63n(budget))) + r.Int63n(2)
			order, costs = append(order, i), append(costs, float64(r.Intn(1+r.Intn(50))))
		}
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(lengths[b], lengths[a]) })
		want := make([]bin, n)
		for _, s := range order {
			to := -1
			for i := range want {
				if want[i].tokens+lengths[s] <= budget && (to < 0 || want[i].cost < want[to].cost) {
					to = i
				}
			}
			if to < 0 {
				want = nil
				break
			}
			want[to].add(s, lengths[s], costs[s])
		}
		if got := leastCost(lengths, order, budget, n, costs); !reflect.DeepEqual(got, want) {
			t.Fatalf("lengths %v, budget %d, costs %v: %v, want %v", lengths, budget, costs, got, want)
		}
	}
}

// Mixed lengths near a third of the budget need many attempts, each of which must not compare every
// sequence with every micro-batch.
func BenchmarkBalance(b *testing.B) {
	r := rand.New(rand.NewSource(4))
	lengths := make([]int64, 16384)
	for i := range lengths {
		lengths[i] = 2500 + r.Int63n(1200)
	}
	for b.Loop() {
		Balance(lengths, 8, 9000, func(n int64) float64 { return float64(n) * float64(n) })
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
