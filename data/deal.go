package data

import (
	"slices"
	"sort"
)

// Deal assigns sequences of the given lengths to micro-batches of several replicas with at most
// budget tokens each. The result is [micro-batch][replica] the indices of sequences in increasing
// order. All replicas have equally many micro-batches, each with at least one sequence. There are
// as few as these rules give: sequences, the longest first, go to the micro-batch of least cost
// that has room, or else to the first one that has room. No sequence may be longer than budget, and
// the number of sequences must be a multiple of replicas.
//
// The result depends on the arguments only, so all ranks compute the same. The most expensive
// micro-batches come first, side by side, because replicas wait for each other when they reduce
// gradients.
func Deal(lengths []int64, replicas int, budget int64, cost func(tokens int64) float64) [][][]int64 {
	order := make([]int, len(lengths))
	total, large := int64(0), 0
	for i, n := range lengths {
		order[i] = i
		total += n
		if n > budget/2 {
			large++
		}
	}
	sort.SliceStable(order, func(a, b int) bool { return lengths[order[a]] > lengths[order[b]] })
	hands := firstFit(lengths, order, budget)
	most := (len(hands) + replicas - 1) / replicas
	// No fewer can work: each takes budget tokens at most, and one of the rows above half of it.
	least := max(1, (int(total/budget)+replicas-1)/replicas, (large+replicas-1)/replicas)
	for n := least; n <= most; n++ {
		if h := leastCost(lengths, order, budget, n*replicas, cost); h != nil {
			return arrange(h, replicas)
		}
	}
	return arrange(topUp(hands, most*replicas), replicas)
}

// hand is the sequences of a micro-batch.
type hand struct {
	rows   []int64
	tokens int64
	cost   float64
}

// leastCost deals into n hands, each row to the one that costs least of those that have room, or
// returns nil where none has. As there are at least n rows, none stays empty.
func leastCost(lengths []int64, order []int, budget int64, n int, cost func(int64) float64) []hand {
	hands := make([]hand, n)
	for _, r := range order {
		to := -1
		for i := range hands {
			if hands[i].tokens+lengths[r] <= budget && (to < 0 || hands[i].cost < hands[to].cost) {
				to = i
			}
		}
		if to < 0 {
			return nil
		}
		hands[to].add(r, lengths[r], cost(lengths[r]))
	}
	return hands
}

// firstFit deals into as few hands as it can: at most 11/9 of the fewest possible and one (Johnson
// 1973).
func firstFit(lengths []int64, order []int, budget int64) (hands []hand) {
	for _, r := range order {
		to := slices.IndexFunc(hands, func(h hand) bool { return h.tokens+lengths[r] <= budget })
		if to < 0 {
			to, hands = len(hands), append(hands, hand{})
		}
		hands[to].add(r, lengths[r], float64(lengths[r]))
	}
	return hands
}

// topUp makes it n hands, whose rows come from those with the most.
func topUp(hands []hand, n int) []hand {
	for len(hands) < n {
		from := 0
		for i := range hands {
			if len(hands[i].rows) > len(hands[from].rows) {
				from = i
			}
		}
		rows := hands[from].rows
		hands[from].rows = rows[:len(rows)-1]
		hands = append(hands, hand{rows: rows[len(rows)-1:]})
	}
	return hands
}

func (h *hand) add(row int, tokens int64, cost float64) {
	h.rows = append(h.rows, int64(row))
	h.tokens += tokens
	h.cost += cost
}

// arrange assigns the hands to the replicas, the most expensive first, in alternating direction.
func arrange(hands []hand, replicas int) [][][]int64 {
	sort.SliceStable(hands, func(a, b int) bool { return hands[a].cost > hands[b].cost })
	micros := make([][][]int64, 0, len(hands)/replicas)
	for i := range len(hands) / replicas {
		micro := make([][]int64, replicas)
		for k := range replicas {
			to := k
			if i%2 == 1 {
				to = replicas - 1 - k
			}
			micro[to] = hands[i*replicas+k].rows
			slices.Sort(micro[to])
		}
		micros = append(micros, micro)
	}
	return micros
}
