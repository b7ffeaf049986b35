package data

import (
	"fmt"
	"math"
	"math/bits"
	"sort"

	"ulysses/internal/splitmix"
	"ulysses/internal/status"
)

// Set is a list of sequences and the order in which training reads them. Its methods may not be
// called at the same time from several goroutines, because they share the cache of a Data.
type Set struct {
	sources   []source
	ends      []int64 // [sources] number of sequences up to the end of each source
	sequences int64
	tokens    int64
	cut       int64
	documents int64
	longest   int64
	shuffle   bool
	seed      uint64
	mixture   *mixture // of data.source; nil = one list of files
}

func newSet(sources []source, shuffle bool, seed uint64) *Set {
	s := &Set{sources: sources, shuffle: shuffle, seed: seed}
	for _, x := range sources {
		s.sequences += x.sequences()
		s.tokens += x.tokens()
		s.cut += x.cut()
		s.documents += x.documents()
		s.longest = max(s.longest, x.longest())
		s.ends = append(s.ends, s.sequences)
	}
	return s
}

// Placeholder returns a set of sequences of the given number of tokens, each in that many documents
// without content. It is for plans, which read no data.
func Placeholder(sequences, tokens, documents int64) *Set {
	return &Set{sequences: sequences, tokens: sequences * tokens, documents: sequences * documents, longest: tokens}
}

// conversations reports whether documents are of conversations.
func (s *Set) conversations() bool {
	for _, x := range s.sources {
		switch d := x.(type) {
		case *documentRange:
			if d.chat {
				return true
			}
		case *packedRange:
			if d.chat {
				return true
			}
		}
	}
	return false
}

// Sequences returns the number of sequences, which is the size of an epoch.
func (s *Set) Sequences() int64 { return s.sequences }

// Tokens returns the number of tokens in all sequences.
func (s *Set) Tokens() int64 { return s.tokens }

// Cut returns the number of tokens that no sequence has: without data.pack, the tokens of a
// document after its first data.sequence.
func (s *Set) Cut() int64 { return s.cut }

// Documents returns the number of documents. Each sequence of a .safetensors file counts as one.
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

// Identity returns a text that is the same for sets with the same sequences. Manifests of
// checkpoints contain this text and a resumed run compares it, so its format must not change. In
// this text, "rows" are sequences.
func (s *Set) Identity() string {
	return fmt.Sprintf("%d documents, %d tokens, %d rows of up to %d, checksum %08x", s.documents, s.tokens,
		s.sequences, s.longest, s.Checksum())
}

// Files returns a text like Identity that does not depend on how the documents become sequences.
func (s *Set) Files() string {
	return fmt.Sprintf("%d documents, checksum %08x", s.documents, s.Checksum())
}

// Steps returns the optimizer steps of the given number of epochs, rounded up, with globalBatch
// sequences per step.
func (s *Set) Steps(epochs float64, globalBatch int64) int64 {
	n := epochs * float64(s.sequences) / float64(globalBatch)
	// 1.1 epochs of 10 sequences are 11 steps, but 11.000000000000002 in F64.
	if whole := math.Round(n); math.Abs(n-whole) < 1e-9*whole {
		n = whole
	}
	return max(1, int64(math.Ceil(n)))
}

// MicroBatch reads one micro-batch of one replica. step and microBatch count from 0. The global
// batch of a step is the G = replicas·batch·accumulate sequences from number step·G of the training
// order on; this micro-batch is the batch sequences of it from microBatch·replicas·batch +
// replica·batch on. After the last sequence a new epoch begins. The result is stored in buf, or in
// a new MicroBatch if buf is nil.
func (s *Set) MicroBatch(step, microBatch, replica, replicas, batch, accumulate int64,
	buf *MicroBatch) (*MicroBatch, error) {
	if step < 0 || microBatch < 0 || microBatch >= accumulate || replica < 0 || replica >= replicas || batch < 1 {
		return nil, status.Errorf(status.InvalidArgument,
			"data.Set.MicroBatch: step %d, micro-batch %d of %d, replica %d of %d, batch %d: out of range",
			step, microBatch, accumulate, replica, replicas, batch)
	}
	return s.Ordered(step*(replicas*batch*accumulate)+(microBatch*replicas+replica)*batch, batch, buf)
}

// Ordered reads n sequences, from the given number of the training order on, into buf, or into a
// new MicroBatch if buf is nil.
func (s *Set) Ordered(first, n int64, buf *MicroBatch) (*MicroBatch, error) {
	return s.read(first, first+n, s.sequence, buf)
}

// Length returns the number of tokens of the sequence with the given number in the training order.
func (s *Set) Length(number int64) (int64, error) {
	src, i := s.locate(s.sequence(number))
	return src.length(i)
}

// Gather reads the sequences with the given numbers of the training order into buf, or into a new
// MicroBatch if buf is nil.
func (s *Set) Gather(numbers []int64, buf *MicroBatch) (*MicroBatch, error) {
	m, err := s.read(0, int64(len(numbers)), func(i int64) int64 { return s.sequence(numbers[i]) }, buf)
	if err != nil || len(numbers) == 0 {
		return m, err
	}
	m.First = numbers[0]
	for i, number := range numbers {
		m.Sequences[i].Number = number
	}
	return m, nil
}

// Range reads sequences [lo, hi) in the order of the files into buf, or into a new MicroBatch if
// buf is nil.
func (s *Set) Range(lo, hi int64, buf *MicroBatch) (*MicroBatch, error) {
	if lo < 0 || hi <= lo || hi > s.sequences {
		return nil, status.Errorf(status.InvalidArgument, "data.Set.Range: sequences [%d, %d) of %d: out of range", lo,
			hi, s.sequences)
	}
	return s.read(lo, hi, func(g int64) int64 { return g }, buf)
}

// read reads sequence(lo) … sequence(hi-1) into m, or into a new MicroBatch if m is nil.
func (s *Set) read(lo, hi int64, sequence func(int64) int64, m *MicroBatch) (*MicroBatch, error) {
	if m == nil {
		m = &MicroBatch{}
	}
	m.reset()
	m.First = lo
	for g := lo; g < hi; g++ {
		src, i := s.locate(sequence(g))
		m.Sequences = append(m.Sequences, Sequence{Number: g, At: int64(len(m.IDs))})
		if err := src.appendSequence(m, i); err != nil {
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

// sequence returns the sequence with the given number in the training order, which has no end: each
// epoch contains all sequences, in an order of its own if the set is shuffled. Sources with weights
// have epochs of their own.
func (s *Set) sequence(number int64) int64 {
	if s.mixture != nil {
		return s.mixture.sequence(number, s.shuffle, s.seed)
	}
	epoch, i := number/s.sequences, number%s.sequences
	if s.shuffle {
		i = permute(i, s.sequences, s.seed, uint64(epoch))
	}
	return i
}

// InOrder returns the set in another training order, in which each epoch has the sequences in the
// order of the files. An evaluation needs each sequence once, which a mixture does not give.
func (s *Set) InOrder() *Set {
	in := *s
	in.shuffle, in.mixture = false, nil
	return &in
}

// locate returns the source that has a sequence, and the sequence's index in this source.
func (s *Set) locate(sequence int64) (source, int64) {
	k := sort.Search(len(s.ends), func(k int) bool { return s.ends[k] > sequence })
	if k > 0 {
		sequence -= s.ends[k-1]
	}
	return s.sources[k], sequence
}

// permute returns the image of i under a permutation of 0 … n−1 that needs no table: a Feistel
// network on the next even number of bits (Luby & Rackoff 1988), repeated until the result is less
// than n. It depends on its arguments alone, so all ranks have the same order on every mesh.
func permute(i, n int64, seed, epoch uint64) int64 {
	half := uint((bits.Len64(uint64(n-1)) + 1) / 2)
	mask := uint64(1)<<half - 1
	x := uint64(i)
	for {
		l, r := x>>half, x&mask
		for round := range uint64(6) {
			l, r = r, l^(splitmix.Mix(splitmix.Mix(seed^splitmix.Mix(epoch<<3|round))^r)&mask)
		}
		if x = l<<half | r; x < uint64(n) {
			return int64(x)
		}
	}
}
