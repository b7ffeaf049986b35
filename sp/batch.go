package sp

import (
	"fmt"
	"slices"
	"strconv"

	"ulysses/comm"
	"ulysses/internal/status"
)

// BatchSpec is the lengths and documents of a batch, given globally: the same on all ranks.
//
// A row of the batch is a sequence; tokens are counted through the rows, Batch·Seq in all.
// Documents never see each other. They are given by CuSeqlens, by Positions, by both if they agree,
// or by neither: one document a row.
type BatchSpec struct {
	Batch, Seq int64
	KVSeq      int64 // keys a row, for cross-attention; 0 = Seq
	// document starts, then Batch·Seq; from 0, increasing, every row's end among them
	CuSeqlens   []int64
	CuSeqlensKV []int64 // the same over Batch·KVSeq keys, as many documents; nil = CuSeqlens
	// [Batch·Seq]: a 0 starts a document, and so does a row's first token; other jumps start
	// nothing
	Positions []int64
	Rows      []int64 // of each rank, Seq in all, any of them 0; nil = cut evenly
	KVRows    []int64 // of keys, KVSeq in all; nil = Rows where KVSeq is Seq, else cut evenly
	_         struct{}
}

// axis is the rows of queries or of keys in one sequence, cut over the ranks.
type axis struct {
	n    int64
	rows []span
	cu   []int64 // documents over Batch·n
}

// Batch is lengths and documents settled for the ranks of a communicator. It is read-only and
// serves every plan on them.
type Batch struct {
	spec          BatchSpec // KVSeq resolved
	rank, size    int64
	queries, keys axis
}

// NewBatch settles a batch for the ranks of c. It is collective, one small message: a batch that
// cannot be, or differs between ranks, is refused on all of them alike (InvalidArgument).
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
		comm.List("kv_rows", s.KVRows))
	if err != nil {
		return nil, err
	}
	return newBatch(int64(c.Rank()), int64(c.Size()), s)
}

// SketchBatch is the batch that NewBatch makes on a rank of size ranks, without asking the others:
// for what is sized, or predicted for any rank, before there is a batch.
func SketchBatch(rank, size int, s BatchSpec) (*Batch, error) {
	if rank < 0 || rank >= size {
		return nil, status.Errorf(status.InvalidArgument, "sp.SketchBatch: rank %d of %d: it must be one of them", rank, size)
	}
	return newBatch(int64(rank), int64(size), s)
}

// newBatch is the part of NewBatch that each rank does by itself, with the same verdict.
func newBatch(rank, size int64, s BatchSpec) (*Batch, error) {
	if s.KVSeq == 0 {
		s.KVSeq = s.Seq
	}
	if s.Batch < 1 || s.Seq < 1 || s.KVSeq < 1 {
		return nil, status.Errorf(status.InvalidArgument,
			"sp.NewBatch: batch %d of %d queries and %d keys: each must be 1 or more", s.Batch, s.Seq, s.KVSeq)
	}
	if s.KVRows == nil && s.KVSeq == s.Seq {
		s.KVRows = s.Rows
	}
	b := &Batch{spec: s, rank: rank, size: size, queries: axis{n: s.Seq}, keys: axis{n: s.KVSeq}}
	var err error
	if b.queries.rows, err = cutRows("rows", s.Rows, s.Seq, size); err != nil {
		return nil, err
	}
	if b.keys.rows, err = cutRows("kv_rows", s.KVRows, s.KVSeq, size); err != nil {
		return nil, err
	}
	if err := b.documents(); err != nil {
		return nil, err
	}
	// the caller's memory
	b.spec.CuSeqlens, b.spec.CuSeqlensKV, b.spec.Positions, b.spec.Rows, b.spec.KVRows = nil, nil, nil, nil, nil
	return b, nil
}

// cutRows cuts n as given, or evenly.
func cutRows(name string, rows []int64, n, size int64) ([]span, error) {
	if rows == nil {
		return shards(n, size), nil
	}
	if int64(len(rows)) != size {
		return nil, status.Errorf(status.InvalidArgument, "sp.NewBatch: %s: %d entries for %d ranks: give one for each", name, len(rows), size)
	}
	cut, at := make([]span, size), int64(0)
	for r, k := range rows {
		if k < 0 || k > n-at {
			return nil, status.Errorf(status.InvalidArgument, "sp.NewBatch: %s: rank %d has %d of %d: they must add up to the sequence", name, r, k, n)
		}
		cut[r] = span{at, at + k}
		at += k
	}
	if at != n {
		return nil, status.Errorf(status.InvalidArgument, "sp.NewBatch: %s add up to %d of %d: give every row to a rank", name, at, n)
	}
	return cut, nil
}

// documents settles where documents start among queries and keys.
func (b *Batch) documents() error {
	s := b.spec
	given := s.CuSeqlens != nil || s.Positions != nil
	switch {
	case !given && s.CuSeqlensKV != nil:
		return status.Errorf(status.InvalidArgument, "sp.NewBatch: documents of the keys alone: give cu_seqlens of the queries too")
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
				"sp.NewBatch: cu_seqlens and positions disagree: %s: drop one, or start positions at 0 where cu_seqlens has an entry",
				disagreement(s.CuSeqlens, cu))
		}
		b.queries.cu = cu
	}
	if s.CuSeqlensKV == nil {
		if s.KVSeq != s.Seq {
			return status.Errorf(status.InvalidArgument,
				"sp.NewBatch: documents of %d queries a row given, but of %d keys not: give cu_seqlens_k too", s.Seq, s.KVSeq)
		}
		b.keys.cu = b.queries.cu
		return nil
	}
	if err := checkCu("cu_seqlens_k", s.CuSeqlensKV, s.Batch, s.KVSeq); err != nil {
		return err
	}
	if len(s.CuSeqlensKV) != len(b.queries.cu) {
		return status.Errorf(status.InvalidArgument, "sp.NewBatch: %d documents of queries but %d of keys: each needs its keys",
			len(b.queries.cu)-1, len(s.CuSeqlensKV)-1)
	}
	b.keys.cu = slices.Clone(s.CuSeqlensKV)
	if s.Batch > 1 {
		for i := range b.queries.cu[1:] {
			if q, k := b.queries.cu[i]/s.Seq, b.keys.cu[i]/s.KVSeq; q != k {
				return status.Errorf(status.InvalidArgument,
					"sp.NewBatch: document %d has its queries in row %d and its keys in row %d: give both in one order", i, q, k)
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

// checkCu holds one list of document starts against the rules of BatchSpec.
func checkCu(name string, cu []int64, batch, seq int64) error {
	bad := func(format string, args ...any) error {
		return status.Errorf(status.InvalidArgument, "sp.NewBatch: "+name+": "+format, args...)
	}
	total := batch * seq
	if len(cu) < 2 {
		return bad("%d entries: give each document's start, then the end, %d", len(cu), total)
	}
	if cu[0] != 0 || cu[len(cu)-1] != total {
		return bad("runs from %d to %d: it must start at 0 and end at %d, the number of tokens", cu[0], cu[len(cu)-1], total)
	}
	row := seq // end of the row we are in
	for i, at := range cu[1:] {
		if at <= cu[i] {
			return bad("entry %d is %d after %d: entries must increase; leave out empty documents", i+1, at, cu[i])
		}
		if at > row {
			return bad("document %d, tokens %d to %d, crosses the end of a row at %d: cut it there", i, cu[i], at, row)
		}
		if at == row {
			row += seq
		}
	}
	return nil
}

// positionStarts reads documents off positions.
func positionStarts(positions []int64, batch, seq int64) ([]int64, error) {
	if int64(len(positions)) != batch*seq {
		return nil, status.Errorf(status.InvalidArgument,
			"sp.NewBatch: %d positions for %d tokens: give one for each token of the whole batch", len(positions), batch*seq)
	}
	var cu []int64
	for i, p := range positions {
		if p < 0 {
			return nil, status.Errorf(status.InvalidArgument,
				"sp.NewBatch: position %d of token %d is negative: count positions from 0", p, i)
		}
		if p == 0 || int64(i)%seq == 0 {
			cu = append(cu, int64(i))
		}
	}
	return append(cu, batch*seq), nil
}

// disagreement names the first token at which only one of two lists starts a document.
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

// Batch is the number of sequences; Seq and KVSeq the queries and keys in each.
func (b *Batch) Batch() int64 { return b.spec.Batch }
func (b *Batch) Seq() int64   { return b.spec.Seq }
func (b *Batch) KVSeq() int64 { return b.spec.KVSeq }

// Lo and Hi bound the rows of queries that this rank holds of each sequence, KVLo and KVHi those of
// keys; Rows and KVRows count them.
func (b *Batch) Lo() int64     { return b.queries.rows[b.rank].lo }
func (b *Batch) Hi() int64     { return b.queries.rows[b.rank].hi }
func (b *Batch) Rows() int64   { return b.queries.rows[b.rank].n() }
func (b *Batch) KVLo() int64   { return b.keys.rows[b.rank].lo }
func (b *Batch) KVHi() int64   { return b.keys.rows[b.rank].hi }
func (b *Batch) KVRows() int64 { return b.keys.rows[b.rank].n() }

// Documents are the document starts, then the end, over Batch·Seq queries and Batch·KVSeq keys.
// Read-only.
func (b *Batch) Documents() (cuQ, cuK []int64) { return b.queries.cu, b.keys.cu }

// RankRows bounds the rows of queries that a rank holds of each sequence.
func (b *Batch) RankRows(rank int) (lo, hi int64) {
	return b.queries.rows[rank].lo, b.queries.rows[rank].hi
}

// Mixed reports that keys are other rows than queries, or are cut or documented otherwise: a batch
// for cross-attention.
func (b *Batch) Mixed() bool {
	return !slices.Equal(b.queries.rows, b.keys.rows) || !slices.Equal(b.queries.cu, b.keys.cu)
}

// Rank is this rank, Size the number of them.
func (b *Batch) Rank() int { return int(b.rank) }

// Size is described at Rank.
func (b *Batch) Size() int { return int(b.size) }
