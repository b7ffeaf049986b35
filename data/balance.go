package data

import (
	"slices"
	"sort"
)

// Balance assigns sequences of the given lengths to micro-batches of several replicas, with at most
// budget tokens each. The result [micro-batch][replica] is the indices of the sequences in
// increasing order. All replicas have the same number of micro-batches, and each micro-batch has at
// least one sequence. No sequence may be longer than budget, and the number of sequences must be a
// multiple of replicas.
//
// The sequences are assigned in order of decreasing length. For an increasing number of
// micro-batches, each sequence goes to the micro-batch of least cost that has room, until all
// sequences fit. If that needs more micro-batches than first-fit, the result of first-fit is used.
//
// The result depends on the arguments only, so all ranks compute the same. Micro-batches of similar
// cost run at the same time, because replicas wait for each other when they reduce gradients; the
// most expensive ones come first.
func Balance(lengths []int64, replicas int, budget int64, cost func(tokens int64) float64) [][][]int64 {
	order := make([]int, len(lengths))
	total := int64(0)
	for i, n := range lengths {
		order[i] = i
		total += n
	}
	sort.SliceStable(order, func(a, b int) bool { return lengths[order[a]] > lengths[order[b]] })
	bins := firstFit(lengths, order, budget)
	most := (len(bins) + replicas - 1) / replicas
	// A lower bound: a bin has at most budget tokens, and at most budget/n of the sequences that
	// have n tokens or more.
	least := int(total / budget)
	for i, s := range order {
		each := int(budget / max(1, lengths[s]))
		least = max(least, (i+each)/each)
	}
	for n := max(1, (least+replicas-1)/replicas); n <= most; n++ {
		if b := leastCost(lengths, order, budget, n*replicas, cost); b != nil {
			return arrange(b, replicas)
		}
	}
	return arrange(divide(bins, most*replicas), replicas)
}

// bin is the sequences of one micro-batch of one replica.
type bin struct {
	sequences []int64
	tokens    int64
	cost      float64
}

// leastCost assigns each sequence to the bin of least cost among the n bins that have room. It
// returns nil if a sequence has no room. There are at least n sequences, so no bin stays empty.
func leastCost(lengths []int64, order []int, budget int64, n int, cost func(int64) float64) []bin {
	bins := make([]bin, n)
	for _, s := range order {
		to := -1
		for i := range bins {
			if bins[i].tokens+lengths[s] <= budget && (to < 0 || bins[i].cost < bins[to].cost) {
				to = i
			}
		}
		if to < 0 {
			return nil
		}
		bins[to].add(s, lengths[s], cost(lengths[s]))
	}
	return bins
}

// firstFit assigns each sequence to the first bin that has room. It needs at most 11/9 of the
// smallest possible number of bins and one more (Johnson 1973).
func firstFit(lengths []int64, order []int, budget int64) (bins []bin) {
	for _, s := range order {
		to := slices.IndexFunc(bins, func(b bin) bool { return b.tokens+lengths[s] <= budget })
		if to < 0 {
			to, bins = len(bins), append(bins, bin{})
		}
		bins[to].add(s, lengths[s], float64(lengths[s]))
	}
	return bins
}

// divide adds bins until there are n. Each new bin gets one sequence of the bin that has the most
// sequences.
func divide(bins []bin, n int) []bin {
	for len(bins) < n {
		from := 0
		for i := range bins {
			if len(bins[i].sequences) > len(bins[from].sequences) {
				from = i
			}
		}
		all := bins[from].sequences
		bins[from].sequences = all[:len(all)-1]
		bins = append(bins, bin{sequences: all[len(all)-1:]})
	}
	return bins
}

func (b *bin) add(sequence int, tokens int64, cost float64) {
	b.sequences = append(b.sequences, int64(sequence))
	b.tokens += tokens
	b.cost += cost
}

// arrange assigns the bins to the replicas, the most expensive first, in alternating direction.
func arrange(bins []bin, replicas int) [][][]int64 {
	sort.SliceStable(bins, func(a, b int) bool { return bins[a].cost > bins[b].cost })
	all := make([][][]int64, 0, len(bins)/replicas)
	for i := range len(bins) / replicas {
		microBatch := make([][]int64, replicas)
		for k := range replicas {
			to := k
			if i%2 == 1 {
				to = replicas - 1 - k
			}
			microBatch[to] = bins[i*replicas+k].sequences
			slices.Sort(microBatch[to])
		}
		all = append(all, microBatch)
	}
	return all
}
