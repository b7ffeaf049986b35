package main

import (
	"cmp"
	"strconv"
	"unsafe"

	"ulysses/comm"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// Ranks agree on errors in arguments. Before it sends tensors, every collective call makes one
// small all-gather over the host's communicator, the agreement. Each rank sends its status and a
// hash of the values that must be equal on all ranks. If a rank has found an error, or if the
// hashes differ, all ranks return one status, so no rank waits for a peer that has left the call.
// The agreement allocates nothing and costs as much as the smallest message. Messages of errors are
// sent only if a rank has found one.

// maxValues is the largest number of values in an agreement. A reshard has the most: the numbers of
// the plan and the batch, n, sum_copies, two values of each tensor, and the type.
const maxValues = 5 + 2*maxReshard

// agreement is the agreement of the current call. The context owns it and uses it for every call.
type agreement struct {
	op     string // the C function
	done   bool   // the ranks have agreed on this call
	values [maxValues]agreedValue
	n      int     // number of values
	send   []int64 // this rank's message; allocated on its own, so that C may read it
	recv   []int64 // the messages of all ranks, in rank order
	counts []int64 // messageWords for each rank
	// created counts the plans, batches, requests and passes of the context. All ranks create them
	// in the same order, so a number stands for the same object on every rank.
	created int64
}

// messageWords is the length of a message: a status and a hash.
const messageWords = 2

// agreedValue is a value that must be equal on all ranks of a call.
type agreedValue struct {
	name  string
	value int64
}

func newAgreement(size int) agreement {
	a := agreement{send: make([]int64, messageWords), recv: make([]int64, messageWords*size),
		counts: make([]int64, size)}
	for i := range a.counts {
		a.counts[i] = messageWords
	}
	return a
}

// requireEqual adds a value that must be equal on all ranks of the current call. More values than
// maxValues are a panic: one that is left out would not be compared.
func (c *context) requireEqual(name string, value int64) {
	a := &c.agreement
	a.values[a.n] = agreedValue{name, value}
	a.n++
}

// requireEqualPresence requires that a tensor is NULL on all ranks or given on all ranks.
func (c *context) requireEqualPresence(name string, p *cTensor) {
	c.requireEqual(name, int64(b2i(p != nil)))
}

// agreed runs the body of a collective call, unless this rank has already found an error. A body
// that sends tensors calls agree before it does so. For other bodies, and after an error, agreed
// calls agree. Therefore every rank agrees exactly once in each call. Collective.
func (c *context) agreed(err error, body func() error) error {
	if err == nil {
		err = guarded(body)
	}
	return c.agree(err)
}

// agree exchanges the messages of the current call: all ranks return an error, or no rank does. If
// the ranks have already agreed on the call, it returns err unchanged. Collective.
func (c *context) agree(err error) error {
	a := &c.agreement
	if a.done || c.comm.Size() == 1 || c.noAgreement {
		return err
	}
	a.done = true
	a.send[0], a.send[1] = int64(status.Of(err)), a.hash()
	recv := tensor.Of(unsafe.Pointer(&a.recv[0]), tensor.I64, int64(len(a.recv)))
	if failed := c.comm.AllGather(nil, recv, tensor.Of(unsafe.Pointer(&a.send[0]), tensor.I64, messageWords),
		a.counts); failed != nil {
		return failed
	}
	refused, differ := false, false
	for i := 0; i < len(a.recv); i += messageWords {
		refused = refused || a.recv[i] != int64(status.OK)
		differ = differ || a.recv[i+1] != a.recv[1]
	}
	switch {
	case refused:
		return comm.Agree(c.comm, err)
	case differ:
		return a.difference(c.comm)
	}
	return nil
}

// agreeAlways is agree for creating a plan or a batch, which ignores ULYSSES_NO_AGREEMENT.
// Collective.
func (c *context) agreeAlways(err error) error {
	if c.noAgreement {
		c.agreement.done = true
		return comm.Agree(c.comm, err)
	}
	return c.agree(err)
}

// hash returns a hash of the function's name and the values.
func (a *agreement) hash() int64 {
	const prime = 1099511628211 // FNV-1a
	h := uint64(14695981039346656037)
	for i := range len(a.op) {
		h = (h ^ uint64(a.op[i])) * prime
	}
	for _, v := range a.values[:a.n] {
		for i := range len(v.name) {
			h = (h ^ uint64(v.name[i])) * prime
		}
		h = (h ^ uint64(v.value)) * prime
		h ^= h >> 29
	}
	return int64(h)
}

// difference returns the error that names the first value that differs between ranks. Collective.
func (a *agreement) difference(c comm.Comm) error {
	if err := comm.Same(c, a.op, comm.Field{Name: "the function that is called", Value: a.op}); err != nil {
		return err
	}
	fields := make([]comm.Field, a.n)
	for i, v := range a.values[:a.n] {
		fields[i] = comm.Field{Name: v.name, Value: strconv.FormatInt(v.value, 10)}
	}
	if err := comm.Same(c, a.op, fields...); err != nil {
		return err
	}
	return status.Errorf(status.Internal,
		"%s: the hashes of the ranks' arguments differ, but no argument does; this is a bug of the library, please report it",
		a.op)
}

// onPlan runs the body of a collective call on a plan and a batch. It enters their context and
// agrees on errors. Collective.
func onPlan(op string, ph, bh uintptr, body func(p *plan, b *batch) error) error {
	p, err := find[plan](op, planKind, ph)
	b, missing := find[batch](op, batchKind, bh)
	var c *context
	switch {
	case p != nil:
		c = p.ctx
	case b != nil:
		c = b.ctx
	default:
		c = onlyContext()
	}
	return c.collective(op, cmp.Or(err, missing), func() error {
		c.requireEqual("the number of the plan", p.number)
		c.requireEqual("the number of the batch", b.number)
		return body(p, b)
	})
}

// onContext is onPlan for a call on a context.
func onContext(op string, ch uintptr, body func(c *context) error) error {
	c, err := find[context](op, contextKind, ch)
	if err != nil {
		c = onlyContext()
	}
	return c.collective(op, err, func() error { return body(c) })
}

// collective enters the context and runs the body of a collective call, in which this rank has
// already found err. If the context is unknown (nil) or in another call, only this rank returns the
// error. Collective.
func (c *context) collective(op string, err error, body func() error) error {
	if c == nil {
		return err
	}
	if busy := c.enter(op); busy != nil {
		return busy
	}
	defer c.leave()
	return c.agreed(err, body)
}

// onlyContext returns the context of several ranks if the process has exactly one, and nil
// otherwise. A collective call with invalid handles must be for this context.
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
