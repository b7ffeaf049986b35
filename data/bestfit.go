package data

import (
	"cmp"
	"slices"
)

// The values of data.packing.
const (
	Split   = "split"    // documents follow one another and are split at the ends of sequences
	BestFit = "best-fit" // only documents that are longer than a sequence are split
)

// A window has the fewest documents that are at least windowDocuments, with tokens for at least
// windowSequences sequences. Documents are packed with documents of their window only, so packing
// takes little time and memory, and a document stays near its neighbors in the order. Space is lost
// at the end of a window, on average half a sequence of windowSequences.
const (
	windowDocuments = 4096
	windowSequences = 64
)

// packBestFit packs the documents of each window by best fit decreasing (H. Ding et al., Fewer
// Truncations Improve Language Modeling, 2024, arXiv:2404.10830; "bfd_split" in TRL). The longest
// document comes first, and each goes to the sequence with the least room that has room for it, or
// begins a new sequence. A document longer than maxLength is split after each maxLength tokens
// first. The sequences of a window, and the documents of a sequence, are in the order of the
// documents.
func (p *packedRange) packBestFit(order func(k int64) int64) {
	var window []span
	documents, tokens := 0, int64(0)
	p.most = 0
	for k := range p.count {
		s := p.document(order(k))
		documents, tokens = documents+1, tokens+s.hi-s.lo
		for ; s.lo < s.hi; s.lo += p.maxLength {
			window = append(window, span{s.lo, min(s.lo+p.maxLength, s.hi)})
		}
		if k+1 == p.count || documents >= windowDocuments && tokens/windowSequences >= p.maxLength {
			p.packWindow(window)
			window, documents, tokens = window[:0], 0, 0
		}
	}
}

// packWindow appends the sequences of a window.
func (p *packedRange) packWindow(window []span) {
	lengths := make([]int64, len(window))
	for i, s := range window {
		lengths[i] = s.hi - s.lo
	}
	for _, sequence := range bestFitDecreasing(lengths, p.maxLength) {
		n := int64(0)
		for _, i := range sequence {
			p.spans = append(p.spans, window[i])
			n += lengths[i]
		}
		p.ends = append(p.ends, int64(len(p.spans)))
		p.most = max(p.most, n)
	}
}

// bestFitDecreasing assigns items of the given lengths to bins of the given size, which no item
// exceeds. The result is the items of each bin in ascending order; bins are in the order of their
// first items. Of equal items the first comes first, and of bins with equal room the oldest is
// taken, so the result depends on the arguments only.
func bestFitDecreasing(lengths []int64, size int64) (bins [][]int) {
	order := make([]int, len(lengths))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(lengths[b], lengths[a]) })
	// the bins that are not full, by ascending room
	type open struct {
		room int64
		bin  int
	}
	before := func(a, b open) int { return cmp.Or(cmp.Compare(a.room, b.room), cmp.Compare(a.bin, b.bin)) }
	var rooms []open
	for _, item := range order {
		n := lengths[item]
		at, _ := slices.BinarySearchFunc(rooms, open{n, 0}, before)
		to := open{size, len(bins)}
		if at < len(rooms) {
			to = rooms[at]
			rooms = slices.Delete(rooms, at, at+1)
		} else {
			bins = append(bins, nil)
		}
		bins[to.bin] = append(bins[to.bin], item)
		if to.room -= n; to.room > 0 {
			at, _ = slices.BinarySearchFunc(rooms, to, before)
			rooms = slices.Insert(rooms, at, to)
		}
	}
	for _, b := range bins {
		slices.Sort(b)
	}
	slices.SortFunc(bins, func(a, b []int) int { return cmp.Compare(a[0], b[0]) })
	return bins
}
