package main

import (
	"strconv"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Ranks agree on refusals. Every collective call has one small all-gather over the host's
// communicator, the ballot, before its first communication of tensors. Each rank sends its status
// and a hash of the arguments that must be equal on all ranks. If a rank has found a fault, or if
// the hashes differ, all ranks return one status, and no rank waits for a peer that has left the
// call. The ballot allocates nothing and costs as much as the smallest message. Error texts are
// sent only after a refusal.

// maxTerms is the largest number of values that must be equal on all ranks of a call.
const maxTerms = 4 + 2*maxReshard

// ballot holds a rank's message for the agreement of the current call.
type ballot struct {
	op    string // of the C function
	cast  bool   // true once the ranks of this call have agreed
	terms [maxTerms]term
	n     int
	mine  []int64 // ballotWords; a separate allocation, so that C may read it
	all   []int64 // of all ranks, in rank order
	rows  []int64 // ballotWords of each rank
	// made counts the plans and batches of the context. All ranks make them in one order, so a
	// number names the same object on every rank.
	made int64
}

// ballotWords is the length of a message: a status and a hash.
const ballotWords = 2

// term is a value that must be equal on all ranks of a call.
type term struct {
	name  string
	value int64
}

func newBallot(size int) ballot {
	b := ballot{mine: make([]int64, ballotWords), all: make([]int64, ballotWords*size), rows: make([]int64, size)}
	for i := range b.rows {
		b.rows[i] = ballotWords
	}
	return b
}

// must adds a value that must be equal on all ranks of the current call.
func (c *context) must(name string, value int64) {
	if b := &c.ballot; b.n < len(b.terms) {
		b.terms[b.n] = term{name, value}
		b.n++
	}
}

// mustGiven is must for a tensor that may be NULL.
func (c *context) mustGiven(name string, p *cTensor) {
	if p != nil {
		c.must(name, 1)
	} else {
		c.must(name, 0)
	}
}

// agreed runs the body of a collective call in which this rank has already found err. If the body
// communicates, it agrees before its first communication; otherwise agreed does it after the body.
// So every rank agrees exactly once, with or without a fault.
func (c *context) agreed(err error, body func() error) error {
	if err == nil {
		err = guarded(body)
	}
	return c.agree(err)
}

// agree compares the ballots: all ranks of the call return an error, or none. After the first
// agreement of a call it returns err unchanged. Collective.
func (c *context) agree(err error) error {
	b := &c.ballot
	if b.cast || c.comm.Size() == 1 || c.unagreed {
		return err
	}
	b.cast = true
	b.mine[0], b.mine[1] = int64(status.Of(err)), b.hash()
	all := tensor.Of(unsafe.Pointer(&b.all[0]), tensor.I64, int64(len(b.all)))
	if failed := c.comm.AllGather(nil, all, tensor.Of(unsafe.Pointer(&b.mine[0]), tensor.I64, ballotWords), b.rows); failed != nil {
		return failed
	}
	refused, differ := false, false
	for i := 0; i < len(b.all); i += ballotWords {
		refused = refused || b.all[i] != int64(status.OK)
		differ = differ || b.all[i+1] != b.all[1]
	}
	switch {
	case refused:
		return comm.Agree(c.comm, err)
	case differ:
		return b.difference(c.comm)
	}
	return nil
}

// settle is agree for making a plan or a batch, which ranks agree on with any flags of the context.
func (c *context) settle(err error) error {
	if c.unagreed {
		c.ballot.cast = true
		return comm.Agree(c.comm, err)
	}
	return c.agree(err)
}

// hash returns a hash of the call's name and its terms.
func (b *ballot) hash() int64 {
	const prime = 1099511628211 // FNV-1a
	h := uint64(14695981039346656037)
	for i := range len(b.op) {
		h = (h ^ uint64(b.op[i])) * prime
	}
	for _, t := range b.terms[:b.n] {
		for i := range len(t.name) {
			h = (h ^ uint64(t.name[i])) * prime
		}
		h = (h ^ uint64(t.value)) * prime
		h ^= h >> 29
	}
	return int64(h)
}

// difference returns the error that names the first term that differs between ranks. Collective.
func (b *ballot) difference(c comm.Comm) error {
	if err := comm.Same(c, b.op, comm.Field{Name: "the function that is called", Value: b.op}); err != nil {
		return err
	}
	fields := make([]comm.Field, b.n)
	for i, t := range b.terms[:b.n] {
		fields[i] = comm.Field{Name: t.name, Value: strconv.FormatInt(t.value, 10)}
	}
	if err := comm.Same(c, b.op, fields...); err != nil {
		return err
	}
	return status.Errorf(status.Internal, "%s: the ranks' calls differ, and no value of them does", b.op)
}

// together enters the context of a collective call on a plan and a batch. c is nil if the context
// is unknown or cannot be entered; the error is then reported on this rank only. Pass any other
// error to agreed.
func together(op string, ph, bh uintptr) (c *context, p *plan, b *batch, err error) {
	p, err = find[plan](op, aPlan, ph)
	b, missing := find[batch](op, aBatch, bh)
	if err == nil {
		err = missing
	}
	switch {
	case p != nil:
		c = p.ctx
	case b != nil:
		c = b.ctx
	default:
		c = onlyContext()
	}
	if c == nil {
		return nil, nil, nil, err
	}
	if busy := c.enter(op); busy != nil {
		return nil, nil, nil, busy
	}
	if p != nil && b != nil {
		c.must("the number of the plan", p.number)
		c.must("the number of the batch", b.number)
	}
	return c, p, b, err
}

// togetherOn is together for a call on a context.
func togetherOn(op string, ch uintptr) (c *context, err error) {
	if c, err = find[context](op, aContext, ch); err != nil {
		if c = onlyContext(); c == nil {
			return nil, err
		}
	}
	if busy := c.enter(op); busy != nil {
		return nil, busy
	}
	return c, err
}

// onlyContext returns the process's context of several ranks if there is exactly one. A call with
// invalid handles can belong to no other.
func onlyContext() (only *context) {
	handles.RLock()
	defer handles.RUnlock()
	for i := range handles.slots {
		c, ok := handles.slots[i].object.(*context)
		if !ok || c.comm.Size() == 1 {
			continue
		}
		if only != nil {
			return nil
		}
		only = c
	}
	return only
}
