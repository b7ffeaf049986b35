package main

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strconv"
	"unsafe"

	"ulysses/comm"
	"ulysses/sp"
)

// batch holds the lengths and documents of a set of sequences on a context, which owns it. In the
// bodies of calls, the batch is called both, and b is the sp.Batch that the plan uses.
type batch struct {
	ctx        *context
	handle     uintptr
	selfBatch  *sp.Batch // queries and keys have the same lengths
	crossBatch *sp.Batch // keys have the lengths of kv_*; nil if the description has none
	flatBatch  *sp.Batch // selfBatch without a ring, for the gated delta rule; nil with ULYSSES_ZIGZAG
	number     int64     // see plan.number
	selfID     identity  // of selfBatch
	crossID    identity  // of crossBatch
}

// int64s returns a copy of a list of the caller.
func int64s(p *int64, n int64) []int64 {
	if p == nil {
		return nil
	}
	return slices.Clone(unsafe.Slice(p, n))
}

// batchLists are copies of the lists of a description.
type batchLists struct {
	cuSeqlens, kvCuSeqlens, positions []int64
}

// readLists copies the lists of a description that checkBatch has checked. It is called before the
// ranks communicate: if one of them is in unreadable memory, all ranks return the error.
func (c *context) readLists(d *cBatchDesc) (l batchLists, err error) {
	rows := d.rows
	if d.seq > 0 {
		x, err := c.placed(d, d.seq)
		if err != nil {
			return l, err
		}
		rows = x.Rows()
	}
	l.positions = int64s(d.positions, d.batch*rows)
	if d.docs > 0 {
		l.cuSeqlens, l.kvCuSeqlens = int64s(d.cu_seqlens, d.docs+1), int64s(d.kv_cu_seqlens, d.docs+1)
	}
	return l, nil
}

// maxDocs limits the host memory of tables of documents.
const maxDocs = int64(1) << 24

// checkBatch checks a description of a batch without communication.
func checkBatch(op string, d *cBatchDesc, c *context) error {
	switch {
	case d.flags&^flagZigzag != 0:
		return invalid("%s: flags is %#x; the only flag is ULYSSES_ZIGZAG", op, d.flags)
	case d.flags&flagZigzag != 0 && (d.seq == 0 || d.kv_seq == 0 && d.kv_rows > 0):
		return invalid("%s: ULYSSES_ZIGZAG is set and a length is given by rows; set seq, and kv_seq for other lengths of keys: the flag decides which rows a rank has",
			op)
	case d.batch < 1 || d.seq < 0 || d.rows < 0 || d.kv_seq < 0 || d.kv_rows < 0 || d.docs < 0:
		return invalid("%s: batch is %d, seq %d, rows %d, kv_seq %d, kv_rows %d and docs %d; give 1 or more for batch, and 0 or more for the others",
			op, d.batch, d.seq, d.rows, d.kv_seq, d.kv_rows, d.docs)
	case max(d.batch, d.seq, d.rows, d.kv_seq, d.kv_rows) > maxTokens ||
		d.batch > maxTokens/max(1, d.seq, d.rows, d.kv_seq, d.kv_rows):
		return invalid("%s: batch is %d, seq %d, rows %d, kv_seq %d and kv_rows %d; at most 2^40 tokens are possible",
			op, d.batch, d.seq, d.rows, d.kv_seq, d.kv_rows)
	case max(d.batch, d.docs) > maxDocs:
		return invalid("%s: batch is %d and docs %d; at most 2^24 are possible", op, d.batch, d.docs)
	case d.docs > 0 && d.cu_seqlens == nil:
		return invalid("%s: docs is %d and cu_seqlens is NULL; give the starts of the documents", op, d.docs)
	case d.docs == 0 && (d.cu_seqlens != nil || d.kv_cu_seqlens != nil):
		return invalid("%s: cu_seqlens or kv_cu_seqlens is given and docs is 0; set docs to the number of documents",
			op)
	case d.seq > 0 && d.docs > d.batch*d.seq:
		return invalid("%s: docs is %d and the batch has %d tokens; every document has at least one", op, d.docs,
			d.batch*d.seq)
	}
	for _, n := range [...]struct {
		name      string
		seq, rows int64
	}{{"", d.seq, d.rows}, {"kv_", d.kv_seq, d.kv_rows}} {
		if n.seq == 0 || n.rows == 0 {
			continue
		}
		x, err := c.placed(d, n.seq)
		if err != nil {
			return err
		}
		if n.rows != x.Rows() {
			return invalid(
				"%s: %[2]srows is %[5]d, and with %[2]sseq %[3]d this rank has %[4]d rows; set one of the two to 0", op,
				n.name, n.seq, x.Rows(), n.rows)
		}
	}
	return nil
}

// placed returns a batch of a description's placement with sequences of a length, without
// documents.
func (c *context) placed(d *cBatchDesc, seq int64) (*sp.Batch, error) {
	return sp.SketchBatch(c.comm.Rank(), c.comm.Size(),
		sp.BatchSpec{Batch: 1, Seq: seq, Ring: c.ring, Zigzag: d.flags&flagZigzag != 0})
}

// gatherRows returns the number of rows of each rank, and their sum. Collective.
func gatherRows(op string, c comm.Comm, rows, batch int64) (all []int64, total int64, err error) {
	blocks, err := comm.GatherBytes(c, binary.LittleEndian.AppendUint64(nil, uint64(rows)))
	if err != nil {
		return nil, 0, err
	}
	for _, p := range blocks {
		n := int64(binary.LittleEndian.Uint64(p))
		all, total = append(all, n), total+n
		if total > maxTokens/batch {
			return nil, 0,
				invalid("%s: the sum of the ranks' rows is %d in %d sequences; at most 2^40 tokens are possible", op,
					total, batch)
		}
	}
	if total == 0 {
		return nil, 0, invalid("%s: no rank has rows; set rows on a rank, or seq", op)
	}
	return all, total, nil
}

// positionsGiven reports whether the ranks have given positions. Ranks without rows do not count.
// Collective.
func positionsGiven(op string, c comm.Comm, positions *int64, rows int64) (bool, error) {
	const absent, given, noRows = 0, 1, 2
	mine := byte(absent)
	switch {
	case rows == 0:
		mine = noRows
	case positions != nil:
		mine = given
	}
	blocks, err := comm.GatherBytes(c, []byte{mine})
	if err != nil {
		return false, err
	}
	rank := [3]int{-1, -1, -1} // the last rank with each value
	for r, p := range blocks {
		rank[p[0]] = r
	}
	if rank[absent] >= 0 && rank[given] >= 0 {
		return false, invalid(
			"%s: positions is NULL on rank %d and given on rank %d; give it on every rank that has rows, or on none",
			op, rank[absent], rank[given])
	}
	return rank[given] >= 0, nil
}

// gatherPositions gathers the ranks' positions [batch, rows] into s.Positions [batch, seq]. rows
// returns the rows of a rank as ranges of a sequence. Positions must count 0, 1, 2, … in each
// document. Other values are refused, because attention would not use them. Collective.
func gatherPositions(op string, c comm.Comm, s *sp.BatchSpec, rows func(rank int) []sp.Range, mine []int64) error {
	var b []byte
	for _, p := range mine {
		b = binary.LittleEndian.AppendUint64(b, uint64(p))
	}
	blocks, err := comm.GatherBytes(c, b)
	if err != nil {
		return err
	}
	s.Positions = make([]int64, s.Batch*s.Seq)
	type source struct {
		rank  int
		index int64 // in the positions of the rank
	}
	from := make([]source, s.Batch*s.Seq)
	for r, p := range blocks {
		at := int64(0)
		for i := range s.Batch {
			for _, span := range rows(r) {
				for t := i*s.Seq + span.Lo; t < i*s.Seq+span.Hi; t++ {
					s.Positions[t], from[t] = int64(binary.LittleEndian.Uint64(p[8*at:])), source{r, at}
					at++
				}
			}
		}
	}
	for t, got := range s.Positions {
		due := int64(0)
		if int64(t)%s.Seq > 0 {
			due = s.Positions[t-1] + 1
		}
		if got != 0 && got != due {
			return invalid(
				"%s: positions[%d] on rank %d (token %d of sequence %d) is %d, and %s is due; positions count 0, 1, 2, ... in each document",
				op, from[t].index, from[t].rank,
				int64(t)%s.Seq, int64(t)/s.Seq, got, allowedPositions(due))
		}
	}
	return nil
}

// allowedPositions names the positions that may follow: 0, or the next in the document.
func allowedPositions(due int64) string {
	if due == 0 {
		return "0"
	}
	return strconv.FormatInt(due, 10) + " or 0"
}

func newBatch(h uintptr, desc, out unsafe.Pointer) error {
	const op = "ulysses_batch_create"
	return onContext(op, h, func(c *context) error { return c.createBatch(op, desc, out) })
}

func (c *context) createBatch(op string, desc, out unsafe.Pointer) error {
	d, err := readStruct[cBatchDesc](op, "desc", desc)
	if err == nil {
		err = checkBatch(op, &d, c)
	}
	var lists batchLists
	if err == nil {
		lists, err = c.readLists(&d)
	}
	if err = c.agreeAlways(cmp.Or(clearOut(op, out), err)); err != nil {
		return err
	}
	x := &batch{ctx: c}
	if err := x.create(op, &d, lists); err != nil {
		return err
	}
	for p := range c.plans {
		if err == nil {
			err = p.reserveFor(x)
		}
	}
	if err == nil {
		x.handle, err = register(batchKind, x)
	}
	if err = comm.Agree(c.comm, err); err != nil {
		if x.handle != 0 {
			unregister(x.handle)
		}
		return err
	}
	c.agreement.created++
	x.number, x.selfID, x.crossID = c.agreement.created, identityOf(x.selfBatch), identityOf(x.crossBatch)
	c.batches[x] = true
	*(*uintptr)(out) = x.handle
	return nil
}

// identityOf returns a hash of the rows of every rank and of the documents.
func identityOf(b *sp.Batch) (h identity) {
	if b == nil {
		return 0
	}
	cuQ, cuK := b.Documents()
	h = h.with(b.Batch()).with(b.Seq()).with(b.KVSeq()).with(b.KVLo()).with(b.KVHi()).withAll(cuQ).withAll(cuK)
	h = h.with(b.Ring()).with(int64(b2i(b.Zigzag())))
	for r := range b.Size() {
		lo, hi := b.RankRows(r)
		h = h.with(lo).with(hi)
	}
	return h
}

// create makes selfBatch and crossBatch of a description. All ranks return an error, or no rank
// does. Collective.
func (x *batch) create(op string, d *cBatchDesc, lists batchLists) error {
	c := x.ctx.comm
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	err := comm.Same(c, op, comm.Field{Name: "batch", Value: number(d.batch)},
		comm.Field{Name: "seq", Value: number(d.seq)}, comm.Field{Name: "kv_seq", Value: number(d.kv_seq)},
		comm.Field{Name: "docs", Value: number(d.docs)},
		comm.Field{Name: "flags", Value: number(int64(d.flags))},
		comm.Field{Name: "kv_cu_seqlens given", Value: strconv.FormatBool(d.kv_cu_seqlens != nil)})
	if err != nil {
		return err
	}
	s := sp.BatchSpec{Batch: d.batch, Seq: d.seq, Ring: x.ctx.ring, Zigzag: d.flags&flagZigzag != 0}
	if d.seq == 0 {
		if s.Rows, s.Seq, err = gatherRows(op, c, d.rows, d.batch); err != nil {
			return err
		}
	}
	placed, err := sp.SketchBatch(c.Rank(), c.Size(), s)
	if err != nil {
		return err
	}
	rows := placed.Rows()
	if d.docs > d.batch*s.Seq {
		return invalid("%s: docs is %d and the batch has %d tokens; every document has at least one", op, d.docs,
			d.batch*s.Seq)
	}
	s.CuSeqlens = lists.cuSeqlens
	if given, err := positionsGiven(op, c, d.positions, rows); err != nil {
		return err
	} else if given {
		if err := gatherPositions(op, c, &s, placed.Ranges, lists.positions); err != nil {
			return err
		}
	}
	if x.selfBatch, err = sp.NewBatch(c, s); err != nil {
		return err
	}
	switch {
	case s.Ring == 1 && !s.Zigzag:
		x.flatBatch = x.selfBatch
	case !s.Zigzag:
		flat := s
		flat.Ring = 1
		if x.flatBatch, err = sp.NewBatch(c, flat); err != nil {
			return err
		}
	}
	return x.createCross(op, d, lists, s)
}

// createCross makes crossBatch if a rank's description has lengths of keys. s describes the
// queries. Collective.
func (x *batch) createCross(op string, d *cBatchDesc, lists batchLists, s sp.BatchSpec) error {
	c := x.ctx.comm
	s.KVSeq = d.kv_seq
	if d.kv_seq == 0 {
		blocks, err := comm.GatherBytes(c, binary.LittleEndian.AppendUint64(nil, uint64(d.kv_rows)))
		if err != nil {
			return err
		}
		any := false
		for _, p := range blocks {
			any = any || binary.LittleEndian.Uint64(p) > 0
		}
		if !any && d.kv_cu_seqlens != nil {
			return invalid(
				"%s: kv_cu_seqlens is given and no rank has lengths of keys; set kv_seq or kv_rows, or leave it NULL",
				op)
		}
		if !any {
			return nil
		}
		if s.KVRows, s.KVSeq, err = gatherRows(op, c, d.kv_rows, d.batch); err != nil {
			return err
		}
	} else if s.Rows != nil {
		// The ranks have given their rows of queries. Keys are sharded evenly.
		s.KVRows = nil
		for r := range int64(c.Size()) {
			lo, hi := comm.Shard(d.kv_seq, int64(c.Size()), r)
			s.KVRows = append(s.KVRows, hi-lo)
		}
	}
	s.CuSeqlensKV = lists.kvCuSeqlens
	var err error
	x.crossBatch, err = sp.NewBatch(c, s)
	return err
}

func batchQuery(bh uintptr, out unsafe.Pointer) error {
	const op = "ulysses_batch_query"
	x, err := find[batch](op, batchKind, bh)
	if err != nil {
		return err
	}
	b := x.selfBatch
	cu, _ := b.Documents()
	info := cBatchInfo{ranges: 1, seq: b.Seq(), rows: b.Rows(), gathered_rows: b.GroupRows(), docs: int64(len(cu) - 1)}
	info.lo[0], info.hi[0] = b.Lo(), b.Lo() // of a rank without rows
	for i, s := range b.Ranges(b.Rank()) {
		info.ranges, info.lo[i], info.hi[i] = int32(i+1), s.Lo, s.Hi
	}
	for r := range b.Size() {
		rows := int64(0)
		for _, s := range b.Ranges(r) {
			rows += s.Hi - s.Lo
		}
		info.max_rows = max(info.max_rows, rows)
	}
	k := x.crossBatch
	if k == nil {
		k = b
	}
	info.kv_seq, info.kv_rows, info.kv_gathered_rows = k.KVSeq(), k.KVRows(), k.GroupKVRows()
	return writeStruct(op, "out", out, &info)
}

// batchPositions writes the position of each of this rank's tokens in its document, [batch, rows].
func batchPositions(bh uintptr, out unsafe.Pointer) error {
	const op = "ulysses_batch_positions"
	x, err := find[batch](op, batchKind, bh)
	if err != nil {
		return err
	}
	b := x.selfBatch
	n := b.Batch() * b.Rows()
	if n == 0 {
		return nil
	}
	if out == nil {
		return invalid("%s: out is NULL; give memory for %d int64_t", op, n)
	}
	dst := unsafe.Slice((*int64)(out), n)
	cu, _ := b.Documents()
	doc, k := 0, 0
	for i := range b.Batch() {
		for _, s := range b.Ranges(b.Rank()) {
			for t := i*b.Seq() + s.Lo; t < i*b.Seq()+s.Hi; t++ {
				for cu[doc+1] <= t {
					doc++
				}
				dst[k] = t - cu[doc]
				k++
			}
		}
	}
	return nil
}

func batchDestroy(bh uintptr) error {
	const op = "ulysses_batch_destroy"
	if bh == 0 {
		return nil
	}
	x, err := find[batch](op, batchKind, bh)
	if err != nil {
		return err
	}
	if !x.ctx.mu.TryLock() {
		return invalid("%s: the context is in a call; destroy the batch after it", op)
	}
	defer x.ctx.mu.Unlock() // enter has not stored the current GPU
	delete(x.ctx.batches, x)
	x.release()
	return nil
}

func (b *batch) release() { unregister(b.handle) }
