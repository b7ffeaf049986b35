package comm

import "ulysses/tensor"

// Shard returns the contiguous range [lo, hi) of n elements that belongs to rank when n elements
// are split over size ranks. The first n mod size ranks have one element more than the others.
// Tokens, heads and elements of parameters are sharded by this rule.
func Shard[R int | int64](n int64, size, rank R) (lo, hi int64) {
	p, r := int64(size), int64(rank)
	each, more := n/p, n%p
	lo = r*each + min(r, more)
	hi = lo + each
	if r < more {
		hi++
	}
	return lo, hi
}

// rowBytes returns the bytes of one row: a slice of the first axis. An absent tensor has rows of 0
// bytes.
func rowBytes(t tensor.Tensor) int64 {
	if t.IsNil() {
		return 0
	}
	n := t.DType.Size()
	for _, d := range t.Shape[1:max(t.NDim, 1)] {
		n *= d
	}
	return n
}

// total returns the rows of all ranks.
func total(rows []int64) int64 {
	var n int64
	for _, r := range rows {
		n += r
	}
	return n
}

// before returns the rows of the ranks below rank, which is the position of its first row.
func before(rows []int64, rank int) int64 { return total(rows[:rank]) }
