package data

import (
	"math"
	"math/bits"
	"slices"
	"sort"

	"ulysses/internal/status"
)

// MicroBatch is the whole sequences that one data-parallel replica processes in a pass, back to
// back, the same on every rank of its sequence group. Targets are shifted over the whole sequences,
// so no rank needs tokens of its neighbour.
type MicroBatch struct {
	IDs       []int32 // [tokens]
	Targets   []int32 // [tokens]; the id that follows, or Ignore
	Positions []int32 // [tokens]; as RoPE takes them
	CuSeqlens []int64 // [documents+1]; first token of each document, then the number of tokens
	Valid     int64   // targets that are not Ignore

	scratch [3][]int64
}

// Set is a list of rows with an order.
type Set struct {
	sources   []source
	ends      []int64 // [sources] rows up to and with each source
	rows      int64
	tokens    int64
	documents int64
	longest   int64
	shuffle   bool
	seed      uint64
}

func newSet(sources []source, shuffle bool, seed uint64) *Set {
	s := &Set{sources: sources, shuffle: shuffle, seed: seed}
	for _, x := range sources {
		s.rows += x.rows()
		s.tokens += x.tokens()
		s.documents += x.units()
		s.longest = max(s.longest, x.longest())
		s.ends = append(s.ends, s.rows)
	}
	return s
}

// Placeholder returns a set of one sequence of the given number of tokens, a single document
// without content: for plans that read no data.
func Placeholder(tokens int64) *Set {
	return &Set{rows: 1, tokens: tokens, documents: 1, longest: tokens}
}

// Rows is the number of rows: the size of an epoch.
func (s *Set) Rows() int64 { return s.rows }

// Tokens is the number of tokens in them.
func (s *Set) Tokens() int64 { return s.tokens }

// Documents is the number of documents; the rows of a tokens file count as one each.
func (s *Set) Documents() int64 { return s.documents }

// Longest returns the tokens of the longest sequence. A micro-batch has at most batch times as
// many.
func (s *Set) Longest() int64 { return s.longest }

// Checksum returns a CRC-32C that differs for other data with the same counts. It depends on the
// files only, not on the number of ranks.
func (s *Set) Checksum() uint32 {
	sums := make([]uint32, len(s.sources))
	for i, x := range s.sources {
		sums[i] = x.checksum()
	}
	return checksum(sums)
}

// Steps returns the optimizer steps of the given number of epochs, rounded up, with globalBatch
// sequences per step.
func (s *Set) Steps(epochs float64, globalBatch int64) int64 {
	n := epochs * float64(s.rows) / float64(globalBatch)
	// 1.1 epochs of 10 rows are 11 steps, and 11.000000000000002 in F64
	if whole := math.Round(n); math.Abs(n-whole) < 1e-9*whole {
		n = whole
	}
	return max(1, int64(math.Ceil(n)))
}

// row is the row that number g of an endless training order stands for.
func (s *Set) row(g int64) int64 {
	epoch, i := g/s.rows, g%s.rows
	if s.shuffle {
		i = permute(i, s.rows, s.seed, uint64(epoch))
	}
	return i
}

func (s *Set) locate(row int64) (source, int64) {
	k := sort.Search(len(s.ends), func(k int) bool { return s.ends[k] > row })
	if k > 0 {
		row -= s.ends[k-1]
	}
	return s.sources[k], row
}

// MicroBatch gathers micro step micro of optimizer step step (both from 0) for one replica: of the
// step's global batch of G = replicas·batch·accumulate rows, which begins at row step·G of the
// order, those from micro·replicas·batch + replica·batch on. The order begins anew behind the last
// row. It fills and returns buf, or a new MicroBatch for nil.
func (s *Set) MicroBatch(step, micro, replica, replicas, batch, accumulate int64, buf *MicroBatch) (*MicroBatch, error) {
	if step < 0 || micro < 0 || micro >= accumulate || replica < 0 || replica >= replicas || batch < 1 {
		return nil, status.Errorf(status.InvalidArgument, "data.Set.MicroBatch: step %d, micro step %d of %d, replica %d of %d, batch %d: out of range",
			step, micro, accumulate, replica, replicas, batch)
	}
	first := step*(replicas*batch*accumulate) + (micro*replicas+replica)*batch
	return s.gather(first, first+batch, s.row, buf)
}

// Length is the number of tokens of the row that number g of the training order stands for.
func (s *Set) Length(g int64) (int64, error) {
	src, i := s.locate(s.row(g))
	return src.length(i)
}

// Gather gathers rows of the training order by their numbers, as MicroBatch does.
func (s *Set) Gather(numbers []int64, buf *MicroBatch) (*MicroBatch, error) {
	return s.gather(0, int64(len(numbers)), func(i int64) int64 { return s.row(numbers[i]) }, buf)
}

// Range gathers rows [lo, hi) in the order of the files: what an evaluation reads, each row once.
func (s *Set) Range(lo, hi int64, buf *MicroBatch) (*MicroBatch, error) {
	if lo < 0 || hi <= lo || hi > s.rows {
		return nil, status.Errorf(status.InvalidArgument, "data.Set.Range: rows [%d, %d) of %d: out of range", lo, hi, s.rows)
	}
	return s.gather(lo, hi, func(g int64) int64 { return g }, buf)
}

func (s *Set) gather(lo, hi int64, row func(int64) int64, m *MicroBatch) (*MicroBatch, error) {
	if m == nil {
		m = &MicroBatch{}
	}
	m.IDs, m.Targets, m.Positions, m.CuSeqlens, m.Valid = m.IDs[:0], m.Targets[:0], m.Positions[:0], append(m.CuSeqlens[:0], 0), 0
	for g := lo; g < hi; g++ {
		src, i := s.locate(row(g))
		if err := src.appendRow(m, i); err != nil {
			return nil, err
		}
	}
	for _, t := range m.Targets {
		if t != Ignore {
			m.Valid++
		}
	}
	return m, nil
}

// grow makes room for n more tokens and returns where they go.
func (m *MicroBatch) grow(n int64) (ids, targets, positions []int32) {
	more := func(s *[]int32) []int32 {
		at := len(*s)
		*s = slices.Grow(*s, int(n))[:at+int(n)]
		return (*s)[at:]
	}
	return more(&m.IDs), more(&m.Targets), more(&m.Positions)
}

// permute is a permutation of 0 … n−1 that needs no table: a Feistel network on the next even
// number of bits (Luby & Rackoff 1988), walked until it falls inside. It depends on its arguments
// alone, so all ranks have the same order on every mesh.
func permute(i, n int64, seed, epoch uint64) int64 {
	half := uint((bits.Len64(uint64(n-1)) + 1) / 2)
	mask := uint64(1)<<half - 1
	x := uint64(i)
	for {
		l, r := x>>half, x&mask
		for round := range uint64(6) {
			l, r = r, l^(mix(mix(seed^mix(epoch<<3|round))^r)&mask)
		}
		if x = l<<half | r; x < uint64(n) {
			return int64(x)
		}
	}
}

// mix is the finalizer of SplitMix64 (Steele, Lea & Flood 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
