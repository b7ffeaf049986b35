package sp

import (
	"fmt"
	"slices"
	"strconv"

	"ulysses/comm"
	"ulysses/internal/status"
)

// BatchSpec describes the lengths and documents of a global batch. It is equal on all ranks.
//
// Tokens are numbered through all sequences, Batch·Seq in total. Attention does not cross
// documents. They are given by CuSeqlens, by Positions, by both if they agree, or by neither: then
// each sequence is one document.
type BatchSpec struct {
	Batch, Seq int64
	KVSeq      int64 // keys of a sequence, for cross-attention; 0 = Seq
	// CuSeqlens has the document starts, then Batch·Seq. It starts at 0, increases, and has the end
	// of every sequence.
	CuSeqlens []int64
	// the same for Batch·KVSeq keys, with the same number of documents; nil = CuSeqlens
	CuSeqlensKV []int64
	// Positions [Batch·Seq]: a 0 starts a document. The first token of a sequence always starts
	// one. Other jumps do not.
	Positions []int64
	Rows      []int64 // by rank, with the sum Seq; may be 0; nil = by comm.Shard
	KVRows    []int64 // by rank, with the sum KVSeq; nil = Rows if KVSeq is Seq, else by comm.Shard
	// Ring is the number of groups of a ring, for plans with this Layer.Ring; 0 = 1. It divides the
	// number of ranks. Ranks of a group are neighbors: rank = group · (ranks/Ring) + rank in group.
	Ring int64
	// Zigzag divides a sequence into 2·Ring chunks. Group r has chunks r and 2·Ring-1-r, which are
	// divided evenly among its ranks (Rows must be nil). With a causal mask each group then has the
	// same work, and the all-to-alls stay inside of the groups.
	Zigzag bool
	_      struct{}
}

// axis is the sharding of the queries or of the keys of a sequence, with their documents.
type axis struct {
	n      int64   // tokens of a sequence
	rows   []span  // by rank; of a zigzag batch, from the first token to the last one
	tokens layout  // by rank
	cu     []int64 // documents over Batch·n
	// The layouts of attention: groups compute the rows of their ranks, or chunks of a zigzag.
	inOrder, zigzag placement
}

// regroup makes one group of all ranks, with the same tokens on each.
func (x *axis) regroup(rank int64) {
	x.inOrder.attention = x.tokens.grouped(1)
	x.inOrder.exchange = newExchange(x.tokens, x.inOrder.attention, rank)
	x.zigzag = x.inOrder
}

// placement is a layout of attention and how this rank reaches it from the layout of tokens.
type placement struct {
	attention layout // by group of the ring
	*exchange
}

// place computes the layouts of attention.
func (x *axis) place(rank, ring int64, zigzag bool) {
	if zigzag {
		x.tokens = zigzagTokens(x.n, ring, int64(len(x.rows)))
		for r, ranges := range x.tokens {
			if x.rows[r] = (span{}); len(ranges) > 0 {
				x.rows[r] = span{ranges[0].lo, ranges[len(ranges)-1].hi}
			}
		}
	} else {
		x.tokens = contiguous(x.rows)
	}
	x.inOrder.attention = x.tokens.grouped(ring)
	x.inOrder.exchange = newExchange(x.tokens, x.inOrder.attention, rank)
	x.zigzag = x.inOrder
	if ring > 1 && !zigzag {
		x.zigzag.attention = zigzagChunks(x.n, ring)
		x.zigzag.exchange = newExchange(x.tokens, x.zigzag.attention, rank)
	}
}

// Batch has the lengths and documents of a BatchSpec for the ranks of a communicator, after all
// checks. It is read-only and serves every plan on these ranks.
type Batch struct {
	spec          BatchSpec // KVSeq resolved
	rank, size    int64
	queries, keys axis

	// of a batch that is only for computing the largest sizes
	unknownDocuments bool
	placement        int // inOrder or inZigzag; placed = the plan chooses
}

// NewBatch makes a batch for the ranks of c. It sends one small message. A batch that is not
// possible, or differs between ranks, is the same error on all ranks (InvalidArgument). It copies
// the slices of s. Collective over c.
func NewBatch(c comm.Comm, s BatchSpec) (*Batch, error) {
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	err := comm.Same(c, "sp.NewBatch",
		comm.Field{Name: "batch", Value: number(s.Batch)},
		comm.Field{Name: "seq", Value: number(s.Seq)},
		comm.Field{Name: "kv_seq", Value: number(s.KVSeq)},
		comm.List("cu_seqlens", s.CuSeqlens),
		comm.List("cu_seqlens_k", s.CuSeqlensKV),
		comm.List("positions", s.Positions),
		comm.List("rows", s.Rows),
		comm.List("kv_rows", s.KVRows),
		comm.Field{Name: "ring", Value: number(s.Ring)},
		comm.Field{Name: "zigzag", Value: strconv.FormatBool(s.Zigzag)})
	if err != nil {
		return nil, err
	}
	return newBatch(int64(c.Rank()), int64(c.Size()), s)
}

// SketchBatch returns the batch that NewBatch makes on a rank of size ranks, without communication.
// It is for computing sizes and predictions of any rank. Not collective.
func SketchBatch(rank, size int, s BatchSpec) (*Batch, error) {
	if rank < 0 || rank >= size {
		return nil, status.Errorf(status.InvalidArgument, "sp.SketchBatch: rank %d of %d ranks; a rank is 0 to size-1",
			rank, size)
	}
	return newBatch(int64(rank), int64(size), s)
}

// newBatch makes the batch of one rank. Its checks have the same result on all ranks.
func newBatch(rank, size int64, s BatchSpec) (*Batch, error) {
	if s.KVSeq == 0 {
		s.KVSeq = s.Seq
	}
	if s.Ring == 0 {
		s.Ring = 1
	}
	if s.Ring < 1 || size%s.Ring != 0 {
		return nil, status.Errorf(status.InvalidArgument,
			"sp.NewBatch: ring is %d with %d ranks; set it to a divisor of the number of ranks", s.Ring, size)
	}
	if s.Zigzag && (s.Rows != nil || s.KVRows != nil) {
		return nil, status.Errorf(status.InvalidArgument,
			"sp.NewBatch: rows are given for a zigzag batch, which divides sequences evenly; leave them out, or set zigzag to false")
	}
	if s.Batch < 1 || s.Seq < 1 || s.KVSeq < 1 {
		return nil, status.Errorf(status.InvalidArgument,
			"sp.NewBatch: batch %d, seq %d, kv_seq %d; set each to 1 or more", s.Batch, s.Seq, s.KVSeq)
	}
	if s.KVRows == nil && s.KVSeq == s.Seq {
		s.KVRows = s.Rows
	}
	b := &Batch{spec: s, rank: rank, size: size, queries: axis{n: s.Seq}, keys: axis{n: s.KVSeq}}
	var err error
	if b.queries.rows, err = splitRows("rows", s.Rows, s.Seq, size); err != nil {
		return nil, err
	}
	if b.keys.rows, err = splitRows("kv_rows", s.KVRows, s.KVSeq, size); err != nil {
		return nil, err
	}
	if err := b.documents(); err != nil {
		return nil, err
	}
	same := s.KVSeq == s.Seq && slices.Equal(b.queries.rows, b.keys.rows)
	b.queries.place(rank, s.Ring, s.Zigzag)
	if k, q := &b.keys, &b.queries; same {
		k.rows, k.tokens, k.inOrder, k.zigzag = q.rows, q.tokens, q.inOrder, q.zigzag
	} else {
		k.place(rank, s.Ring, s.Zigzag)
	}
	// these belong to the caller
	b.spec.CuSeqlens, b.spec.CuSeqlensKV, b.spec.Positions, b.spec.Rows, b.spec.KVRows = nil, nil, nil, nil, nil
	return b, nil
}

// splitRows returns the range of tokens of each rank: as given, or as Shard divides n.
func splitRows(name string, rows []int64, n, size int64) ([]span, error) {
	if rows == nil {
		return shards(n, size), nil
	}
	if int64(len(rows)) != size {
		return nil, status.Errorf(status.InvalidArgument,
			"sp.NewBatch: %s has %d entries for %d ranks; give one for each rank", name, len(rows), size)
	}
	spans, at := make([]span, size), int64(0)
	for r, k := range rows {
		if k < 0 || k > n-at {
			return nil, status.Errorf(status.InvalidArgument,
				"sp.NewBatch: %s: rank %d has %d of %d tokens; the sum over the ranks must be the length of the sequence",
				name, r, k, n)
		}
		spans[r] = span{at, at + k}
		at += k
	}
	if at != n {
		return nil, status.Errorf(status.InvalidArgument,
			"sp.NewBatch: %s have the sum %d, the sequence has %d tokens; assign every token to a rank", name, at, n)
	}
	return spans, nil
}

// documents sets the documents of queries and keys.
func (b *Batch) documents() error {
	s := b.spec
	given := s.CuSeqlens != nil || s.Positions != nil
	switch {
	case !given && s.CuSeqlensKV != nil:
		return status.Errorf(status.InvalidArgument,
			"sp.NewBatch: cu_seqlens_k is given without cu_seqlens; give cu_seqlens of the queries")
	case !given:
		b.queries.cu, b.keys.cu = rowStarts(s.Batch, s.Seq), rowStarts(s.Batch, s.KVSeq)
		return nil
	}
	if s.CuSeqlens != nil {
		if err := checkCu("cu_seqlens", s.CuSeqlens, s.Batch, s.Seq); err != nil {
			return err
		}
		b.queries.cu = slices.Clone(s.CuSeqlens)
	}
	if s.Positions != nil {
		cu, err := positionStarts(s.Positions, s.Batch, s.Seq)
		if err != nil {
			return err
		}
		if s.CuSeqlens != nil && !slices.Equal(cu, s.CuSeqlens) {
			return status.Errorf(status.InvalidArgument,
				"sp.NewBatch: cu_seqlens and positions disagree: %s; give only one of them, or set positions to 0 where cu_seqlens has an entry",
				disagreement(s.CuSeqlens, cu))
		}
		b.queries.cu = cu
	}
	if s.CuSeqlensKV == nil {
		if s.KVSeq != s.Seq {
			return status.Errorf(status.InvalidArgument,
				"sp.NewBatch: documents are given for %d queries of a sequence, but not for %d keys; give cu_seqlens_k",
				s.Seq, s.KVSeq)
		}
		b.keys.cu = b.queries.cu
		return nil
	}
	if err := checkCu("cu_seqlens_k", s.CuSeqlensKV, s.Batch, s.KVSeq); err != nil {
		return err
	}
	if len(s.CuSeqlensKV) != len(b.queries.cu) {
		return status.Errorf(status.InvalidArgument,
			"sp.NewBatch: %d documents of queries, %d of keys; give the same number in cu_seqlens and cu_seqlens_k",
			len(b.queries.cu)-1, len(s.CuSeqlensKV)-1)
	}
	b.keys.cu = slices.Clone(s.CuSeqlensKV)
	if s.Batch > 1 {
		for i := range b.queries.cu[1:] {
			if q, k := b.queries.cu[i]/s.Seq, b.keys.cu[i]/s.KVSeq; q != k {
				return status.Errorf(status.InvalidArgument,
					"sp.NewBatch: document %d has queries in sequence %d and keys in sequence %d; give both in the same order",
					i, q, k)
			}
		}
	}
	return nil
}

func rowStarts(batch, seq int64) []int64 {
	cu := make([]int64, batch+1)
	for i := range cu {
		cu[i] = int64(i) * seq
	}
	return cu
}

// checkCu checks a list of document starts by the rules of BatchSpec.
func checkCu(name string, cu []int64, batch, seq int64) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "sp.NewBatch: "+name+": "+format, args...)
	}
	total := batch * seq
	if len(cu) < 2 {
		return bad("%d entries; give the start of each document, then the end, %d", len(cu), total)
	}
	if cu[0] != 0 || cu[len(cu)-1] != total {
		return bad("it starts at %d and ends at %d; it must start at 0 and end at %d, the number of tokens", cu[0],
			cu[len(cu)-1], total)
	}
	end := seq // of the current sequence
	for i, at := range cu[1:] {
		if at <= cu[i] {
			return bad("entry %d is %d after %d; entries must increase, because every document has at least one token",
				i+1, at, cu[i])
		}
		if at > end {
			return bad("document %d, tokens %d to %d, crosses the end of a sequence at %d; end the document there", i,
				cu[i], at, end)
		}
		if at == end {
			end += seq
		}
	}
	return nil
}

// positionStarts returns the document starts that positions define.
func positionStarts(positions []int64, batch, seq int64) ([]int64, error) {
	if int64(len(positions)) != batch*seq {
		return nil, status.Errorf(status.InvalidArgument,
			"sp.NewBatch: %d positions for %d tokens; give one for each token of the global batch", len(positions),
			batch*seq)
	}
	var cu []int64
	for i, p := range positions {
		if p < 0 {
			return nil, status.Errorf(status.InvalidArgument,
				"sp.NewBatch: position %d of token %d is negative; positions start at 0", p, i)
		}
		if p == 0 || int64(i)%seq == 0 {
			cu = append(cu, int64(i))
		}
	}
	return append(cu, batch*seq), nil
}

// disagreement describes the first token at which only one of two lists starts a document.
func disagreement(cu, positions []int64) string {
	for i := range min(len(cu), len(positions)) {
		if a, b := cu[i], positions[i]; a < b {
			return fmt.Sprintf("cu_seqlens starts a document at token %d, positions do not", a)
		} else if b < a {
			return fmt.Sprintf("positions start a document at token %d, cu_seqlens does not", b)
		}
	}
	return fmt.Sprintf("%d and %d entries", len(cu), len(positions))
}

// Batch returns the number of sequences, Seq and KVSeq the queries and keys of each.
func (b *Batch) Batch() int64 { return b.spec.Batch }
func (b *Batch) Seq() int64   { return b.spec.Seq }
func (b *Batch) KVSeq() int64 { return b.spec.KVSeq }

// Lo and Hi bound this rank's queries of each sequence, KVLo and KVHi its keys. A rank of a zigzag
// batch has only some of the rows between them, see Ranges.
func (b *Batch) Lo() int64   { return b.queries.rows[b.rank].lo }
func (b *Batch) Hi() int64   { return b.queries.rows[b.rank].hi }
func (b *Batch) KVLo() int64 { return b.keys.rows[b.rank].lo }
func (b *Batch) KVHi() int64 { return b.keys.rows[b.rank].hi }

// Rows and KVRows are the numbers of this rank's queries and keys of each sequence.
func (b *Batch) Rows() int64   { return rows(b.queries.tokens[b.rank]) }
func (b *Batch) KVRows() int64 { return rows(b.keys.tokens[b.rank]) }

// MostRows returns the largest Rows of all ranks.
func (b *Batch) MostRows() int64 { return b.queries.tokens.most() }

// MostRows returns the largest number of tokens of a rank in a batch of one sequence.
func MostRows(seq, ranks, ring int64, zigzag bool) int64 {
	if zigzag {
		return zigzagTokens(seq, ring, ranks).most()
	}
	return ceil(seq, ranks)
}

// Range is the tokens [Lo, Hi) of a sequence.
type Range struct{ Lo, Hi int64 }

// Ranges returns the queries of each sequence that a rank has, ascending: one range, or two in a
// zigzag batch, or none. KVRanges are its keys.
func (b *Batch) Ranges(rank int) []Range   { return b.queries.ranges(rank) }
func (b *Batch) KVRanges(rank int) []Range { return b.keys.ranges(rank) }

func (x *axis) ranges(rank int) []Range {
	r := make([]Range, len(x.tokens[rank]))
	for i, s := range x.tokens[rank] {
		r[i] = Range{s.lo, s.hi}
	}
	return r
}

// Ring returns the number of groups of the ring, and Zigzag whether their rows are chunks of a
// zigzag.
func (b *Batch) Ring() int64  { return b.spec.Ring }
func (b *Batch) Zigzag() bool { return b.spec.Zigzag }

// OneGroup returns the batch with a ring of 1: the same tokens on the same ranks, for plans without
// a ring.
func (b *Batch) OneGroup() *Batch {
	if b.spec.Ring == 1 {
		return b
	}
	one := *b
	one.spec.Ring = 1
	one.queries.regroup(b.rank)
	one.keys.regroup(b.rank)
	return &one
}

// GroupRows and GroupKVRows are the sums of Rows and KVRows over the ranks of this rank's group.
func (b *Batch) GroupRows() int64   { return rows(b.queries.inOrder.attention[b.group()]) }
func (b *Batch) GroupKVRows() int64 { return rows(b.keys.inOrder.attention[b.group()]) }

// group returns this rank's group of the ring.
func (b *Batch) group() int64 { return b.rank / (b.size / b.spec.Ring) }

// Documents returns the document starts, then the end, over Batch·Seq queries and Batch·KVSeq keys.
// The slices are read-only.
func (b *Batch) Documents() (cuQ, cuK []int64) { return b.queries.cu, b.keys.cu }

// RankRows returns the queries [lo, hi) of each sequence that a rank has; see Lo.
func (b *Batch) RankRows(rank int) (lo, hi int64) {
	return b.queries.rows[rank].lo, b.queries.rows[rank].hi
}

// Mixed reports whether keys differ from queries in number, sharding or documents, as in
// cross-attention.
func (b *Batch) Mixed() bool {
	return b.queries.n != b.keys.n || !slices.Equal(b.queries.rows, b.keys.rows) ||
		!slices.Equal(b.queries.cu, b.keys.cu)
}

// Rank returns this rank.
func (b *Batch) Rank() int { return int(b.rank) }

// Size returns the number of ranks.
func (b *Batch) Size() int { return int(b.size) }
