package data

import "ulysses/internal/splitmix"

// mixture is a training order over several sources with weights: of each n sequences, source i has
// about n·weight(i)/Σweight. It is the rule of Megatron-LM's blended data sets: the next sequence
// is from the source that is furthest behind its share, argmax weight·max(n, 1) − drawn, the first
// one of equals. There are no random numbers, so any prefix of the order is the same for longer
// runs, and the state of a resumed run is the number of the next sequence.
//
// Each source has epochs of its own, and in each epoch an order of its own if the set is shuffled.
type mixture struct {
	weights []float64 // their sum is 1
	base    []int64   // number of the first sequence of each source in the set
	size    []int64   // sequences of each source
	// drawn has, for each window of windowSize numbers, the sequences of each source before it
	drawn  [][]int64
	window int64   // the window in choices; -1 = none
	source []int32 // of each number of the window
	index  []int64 // of each number of the window: how many sequences its source had before
}

// windowSize is the count of sequences whose sources are computed at a time.
const windowSize = 4096

func newMixture(weights []float64, sizes []int64) *mixture {
	m := &mixture{base: make([]int64, len(sizes)), size: sizes, drawn: [][]int64{make([]int64, len(sizes))}, window: -1}
	total, n := 0.0, int64(0)
	for i, w := range weights {
		total += w
		m.base[i] = n
		n += sizes[i]
	}
	for _, w := range weights {
		m.weights = append(m.weights, w/total)
	}
	return m
}

// mixtureOf returns the mixture of the tables of data.source, of which each has the given number of
// sources, in order.
func mixtureOf(all []SourceConfig, sources []source, counts []int) *mixture {
	weights, sizes := make([]float64, len(all)), make([]int64, len(all))
	for i, s := range all {
		weights[i] = s.Weight
		for _, x := range sources[:counts[i]] {
			sizes[i] += x.sequences()
		}
		sources = sources[counts[i]:]
	}
	return newMixture(weights, sizes)
}

// at returns the source of a number of the order, and how many sequences the source had before.
func (m *mixture) at(number int64) (source int, index int64) {
	w := number / windowSize
	for k := int64(len(m.drawn)) - 1; k <= w; k++ {
		m.fill(k)
	}
	if m.window != w {
		m.fill(w)
	}
	return int(m.source[number%windowSize]), m.index[number%windowSize]
}

// fill computes a window, whose start is known, and the start of the next one.
func (m *mixture) fill(window int64) {
	drawn := append([]int64(nil), m.drawn[window]...)
	m.window, m.source, m.index = window, m.source[:0], m.index[:0]
	for n := window * windowSize; n < (window+1)*windowSize; n++ {
		best, behind := 0, 0.0
		for i, w := range m.weights {
			if b := w*float64(max(n, 1)) - float64(drawn[i]); i == 0 || b > behind {
				best, behind = i, b
			}
		}
		m.source, m.index = append(m.source, int32(best)), append(m.index, drawn[best])
		drawn[best]++
	}
	if int64(len(m.drawn)) == window+1 {
		m.drawn = append(m.drawn, drawn)
	}
}

// sequence returns the sequence of the set with the given number of the order.
func (m *mixture) sequence(number int64, shuffle bool, seed uint64) int64 {
	i, k := m.at(number)
	epoch, at := k/m.size[i], k%m.size[i]
	if shuffle {
		at = permute(at, m.size[i], splitmix.Mix(seed+uint64(i)+1), uint64(epoch))
	}
	return m.base[i] + at
}
