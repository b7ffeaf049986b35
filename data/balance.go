package data

import (
	"container/heap"
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
	costs := make([]float64, len(lengths))
	least := int(total / budget)
	for i, s := range order {
		each := int(budget / max(1, lengths[s]))
		costs[s], least = cost(lengths[s]), max(least, (i+each)/each)
	}
	for n := max(1, (least+replicas-1)/replicas); n <= most; n++ {
		if b := leastCost(lengths, order, budget, n*replicas, costs); b != nil {
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

// leastCost assigns each sequence to the bin of least cost among the n bins that have room, the
// first of several. It returns nil if a sequence has no room. There are at least n sequences, so no
// bin stays empty.
//
// A bin without room waits until the sequences are short enough. It then has room until it gets
// one, because lengths decrease; each sequence therefore moves at most one bin there and back.
func leastCost(lengths []int64, order []int, budget int64, n int, costs []float64) []bin {
	bins := make([]bin, n)
	open := binHeap{before: func(a, b int) bool {
		return bins[a].cost < bins[b].cost || bins[a].cost == bins[b].cost && a < b
	}}
	waiting := binHeap{before: func(a, b int) bool { return bins[a].tokens < bins[b].tokens }}
	for i := range bins {
		open.bins = append(open.bins, i)
	}
	for _, s := range order {
		for waiting.Len() > 0 && bins[waiting.bins[0]].tokens+lengths[s] <= budget {
			heap.Push(&open, heap.Pop(&waiting))
		}
		for open.Len() > 0 && bins[open.bins[0]].tokens+lengths[s] > budget {
			heap.Push(&waiting, heap.Pop(&open))
		}
		if open.Len() == 0 {
			return nil
		}
		bins[open.bins[0]].add(s, lengths[s], costs[s])
		heap.Fix(&open, 0)
	}
	return bins
}

// binHeap is a heap of bins, the first one by before at its top.
type binHeap struct {
	bins   []int
	before func(a, b int) bool
}

func (h *binHeap) Len() int           { return len(h.bins) }
func (h *binHeap) Less(i, j int) bool { return h.before(h.bins[i], h.bins[j]) }
func (h *binHeap) Swap(i, j int)      { h.bins[i], h.bins[j] = h.bins[j], h.bins[i] }
func (h *binHeap) Push(x any)         { h.bins = append(h.bins, x.(int)) }

func (h *binHeap) Pop() any {
	last := len(h.bins) - 1
	x := h.bins[last]
	h.bins = h.bins[:last]
	return x
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
