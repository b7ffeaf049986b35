package main

import (
	"unsafe"

	"ulysses/tensor"
)

// What a forward pass saves carries a tag, and a backward pass refuses memory whose tag is of
// another plan or batch, or none. On the CPU the tag is the first tagBytes of the memory, which the
// sizes count. On a GPU reading it would wait for the device: there the context remembers of which
// plans and batches a forward pass has saved anything, which finds saved memory that no such pass
// can have written.
//
// A tag stands for what a plan and a batch are and not for which they are: saved memory may be
// moved and offloaded, and a plan or batch made anew like the old one reads it.

const (
	tagBytes = 64                         // keeps the alignment of what follows
	tagMagic = uint64(0x3165766173796c75) // "ulysave1"
)

// The calls that save.
const (
	savesAttention = iota + 1
	savesLocal
	savesLayer
	savesDelta
)

// identity is a hash that is continued word by word.
type identity uint64

func (h identity) with(x int64) identity {
	h = (h ^ identity(uint64(x))) * 0x9e3779b97f4a7c15
	return h ^ h>>29
}

func (h identity) withAll(list []int64) identity {
	h = h.with(int64(len(list)))
	for _, x := range list {
		h = h.with(x)
	}
	return h
}

func (h identity) withText(text string) identity {
	for i := range len(text) {
		h = h.with(int64(text[i]))
	}
	return h
}

// saving is the saved memory of the call under way.
type saving struct {
	tag  *[tagBytes / 8]uint64 // nil on a GPU, and where the call brings no saved memory
	id   identity
	with bool  // the call brings saved memory
	have int64 // bytes of it
	plan *plan // of attention or the gated delta rule, with its batch: see explain
	b    *batch
}

// tagged is the bytes of saved memory with its tag.
func (c *context) tagged(saved int64) int64 {
	if saved == 0 || c.place != onCPU {
		return saved
	}
	return saved + tagBytes
}

// untagged takes the tag off the saved memory of the call under way.
func (c *context) untagged(op string, saved tensor.Tensor) (tensor.Tensor, error) {
	c.saving = saving{with: !saved.IsNil()}
	if c.saving.with {
		c.saving.have = saved.Numel()
	}
	if saved.IsNil() || c.place != onCPU {
		return saved, nil
	}
	if saved.Numel() < tagBytes {
		return tensor.Tensor{}, invalid("%s: saved has %d bytes: the query of sizes says how many are needed", op, saved.Numel())
	}
	c.saving.tag = (*[tagBytes / 8]uint64)(saved.Data)
	return c.bytes(unsafe.Add(saved.Data, tagBytes), saved.Numel()-tagBytes), nil
}

// saves says what the call under way saves, or reads: of a plan and a batch, and what the call has
// beyond them.
func (c *context) saves(kind int64, p *plan, b *batch, more int64) {
	if kind == savesAttention || kind == savesDelta {
		c.saving.plan, c.saving.b = p, b
	}
	id := p.identity.with(kind).with(int64(c.comm.Rank())).with(int64(c.comm.Size())).with(more)
	if p.cross {
		c.saving.id = id.with(int64(b.crossedID))
	} else {
		c.saving.id = id.with(int64(b.ownID))
	}
}

// savedSize refuses saved memory that is too small, in bytes that include the tag; t is without.
func (c *context) savedSize(op string, t tensor.Tensor, need int64) error {
	if t.Numel() < need {
		return invalid("%s: saved has %d bytes, %d are needed: the query of sizes says so beforehand", op, c.saving.have, c.tagged(need))
	}
	return nil
}

// explain puts a refusal of saved memory, whose bytes packages below count without the tag, into
// the caller's numbers.
func (c *context) explain(err error) error {
	s := &c.saving
	if err == nil || !s.with || s.plan == nil {
		return err
	}
	b, unfit := s.plan.batchOf(c.ballot.op, s.b)
	if unfit != nil {
		return err
	}
	if need := c.tagged(s.plan.sizesOf(b).Saved); s.have < need {
		return invalid("%s: saved has %d bytes, %d are needed: the query of sizes says so beforehand", c.ballot.op, s.have, need)
	}
	return err
}

// seal tags what a forward pass has saved.
func (c *context) seal(err error) error {
	s := &c.saving
	if err != nil || !s.with {
		return err
	}
	if s.tag != nil {
		*s.tag = [tagBytes / 8]uint64{tagMagic, uint64(s.id), ^uint64(s.id)}
	} else if !c.kept[s.id] {
		c.kept[s.id] = true
	}
	return nil
}

// sealed refuses saved memory that no forward pass of the plan and the batch has written.
func (c *context) sealed(op string) error {
	s := &c.saving
	switch {
	case !s.with:
		return nil // refused for that
	case s.tag == nil && c.kept[s.id], s.tag != nil && s.tag[0] == tagMagic && s.tag[1] == uint64(s.id) && s.tag[2] == ^uint64(s.id):
		return nil
	case s.tag != nil && (s.tag[0] != tagMagic || s.tag[1] != ^s.tag[2]):
		return invalid("%s: saved has not been written by a forward call, or was written over since: pass the memory that the forward call got as saved", op)
	}
	return invalid("%s: saved is of a forward call with another plan, batch or layer: pass the plan and the batch of that call", op)
}
