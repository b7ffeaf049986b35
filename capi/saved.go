package main

import (
	"unsafe"

	"ulysses/tensor"
)

// Tags of saved memory. A backward pass refuses saved memory that no forward pass with the same
// plan and batch has written. On the CPU, saved memory begins with a tag of tagBytes, which the
// sizes include. On a GPU, reading a tag would wait for the device. There, the context remembers
// for which plans and batches one of the last forward passes has saved anything, and with which
// seeds of dropout, so only memory that no such pass can have written is refused, see recentPasses.
//
// A tag stands for the properties of a plan and a batch, not for the objects. Saved memory may be
// moved and offloaded, and a new plan or batch with the same properties can read it.

const (
	tagBytes = 64                         // a multiple of the alignment of saved memory
	tagMagic = uint64(0x3165766173796c75) // "ulysave1"
)

// savedKind is the kind of call that writes saved memory.
type savedKind int64

const (
	attentionSaved savedKind = iota + 1
	localSaved
	layerSaved
	gdnSaved
	gdnLayerSaved
)

// identity is a hash of properties. The methods with… return the hash extended by a value.
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

// savedMemory describes the saved memory of the current call.
type savedMemory struct {
	given bool                  // the call has saved memory
	bytes int64                 // its size, with the tag
	tag   *[tagBytes / 8]uint64 // nil on a GPU, and if the call has no saved memory
	id    identity              // of the call, see identifySaved
	seed  int64                 // of dropout; 0 without it
	drops bool                  // the plan has dropout
	// of attention or the gated delta rule, with its batch: see explainSaved
	plan  *plan
	batch *batch
}

// withTag returns the size of saved memory with its tag.
func (c *context) withTag(saved int64) int64 {
	if saved == 0 || c.deviceType != onCPU {
		return saved
	}
	return saved + tagBytes
}

// splitTag returns the saved memory of the current call without its tag.
func (c *context) splitTag(op string, saved tensor.Tensor) (tensor.Tensor, error) {
	c.saved = savedMemory{given: !saved.IsNil()}
	if c.saved.given {
		c.saved.bytes = saved.Numel()
	}
	if saved.IsNil() || c.deviceType != onCPU {
		return saved, nil
	}
	if saved.Numel() < tagBytes {
		return tensor.Tensor{},
			invalid("%s: saved has %d bytes, too few for any call; ulysses_plan_sizes and the other functions for sizes return how many are needed",
				op, saved.Numel())
	}
	c.saved.tag = (*[tagBytes / 8]uint64)(saved.Data)
	return c.byteTensor(unsafe.Add(saved.Data, tagBytes), saved.Numel()-tagBytes), nil
}

// identifySaved sets the identity of what the current call saves or reads. variant is a property of
// the call that the plan and the batch do not determine.
func (c *context) identifySaved(kind savedKind, p *plan, b *batch, variant int64) {
	if kind == attentionSaved || kind == gdnSaved {
		c.saved.plan, c.saved.batch = p, b
	}
	id := p.identity.with(int64(kind)).with(int64(c.comm.Rank())).with(int64(c.comm.Size())).with(variant)
	if p.cross {
		c.saved.id = id.with(int64(b.crossID))
	} else {
		c.saved.id = id.with(int64(b.selfID))
	}
	if c.saved.drops = (kind == attentionSaved || kind == layerSaved) && p.sp.Layer().Dropout > 0; c.saved.drops {
		c.saved.seed = c.args.Seed
	}
}

// recentPasses remembers the last forward passes on a GPU by their identities. The number of passes
// whose saved memory is in use at a time must be at most maxRecent.
type recentPasses struct {
	ids    []identity       // pass i is at i mod maxRecent
	passes map[identity]int // how many of ids
	n      int              // passes so far
}

const maxRecent = 1 << 16

func (r *recentPasses) add(id identity) {
	if r.passes == nil {
		r.ids, r.passes = make([]identity, 0, maxRecent), map[identity]int{}
	}
	at := r.n % maxRecent
	if r.n++; at == len(r.ids) {
		r.ids = append(r.ids, id)
	} else if oldest := r.ids[at]; r.passes[oldest] == 1 {
		delete(r.passes, oldest)
	} else {
		r.passes[oldest]--
	}
	r.ids[at] = id
	r.passes[id]++
}

func (r *recentPasses) has(id identity) bool { return r.passes[id] > 0 }

// tooSmall returns the error for saved memory with too few bytes.
func tooSmall(op, name string, have, need int64) error {
	return invalid("%s: %s has %d bytes and %d are needed; ask for the size before the call", op, name, have, need)
}

// checkSavedSize refuses saved memory that is too small. saved and need are without the tag; the
// message counts it.
func (c *context) checkSavedSize(op string, saved tensor.Tensor, need int64) error {
	if saved.Numel() < need {
		return tooSmall(op, "saved", c.saved.bytes, c.withTag(need))
	}
	return nil
}

// explainSaved returns err, or the error for saved memory that is too small. Packages sp and gdn
// also refuse such memory, but their messages count the bytes without the tag.
func (c *context) explainSaved(err error) error {
	s := &c.saved
	if err == nil || !s.given || s.plan == nil {
		return err
	}
	op := c.agreement.op
	b, unfit := s.plan.batchOf(op, s.batch)
	if unfit != nil {
		return err
	}
	if need := c.withTag(s.plan.sizesOf(b).Saved); s.bytes < need {
		return tooSmall(op, "saved", s.bytes, need)
	}
	return err
}

// writeTag marks the saved memory of a forward pass that succeeded, and returns err.
func (c *context) writeTag(err error) error {
	s := &c.saved
	if err != nil || !s.given {
		return err
	}
	if s.tag != nil {
		*s.tag = [tagBytes / 8]uint64{tagMagic, uint64(s.id), ^uint64(s.id), uint64(s.seed)}
		return nil
	}
	c.recent.add(s.id)
	if s.drops {
		c.recentSeeds.add(s.id.with(s.seed))
	}
	return nil
}

// checkTag refuses saved memory that no forward pass with the call's identity and seed has written.
func (c *context) checkTag(op string) error {
	s := &c.saved
	const another = "%s: saved is of a forward call with another plan, batch or layer; give the plan and the batch of that call"
	switch {
	case !s.given: // missing memory is refused later
	case s.tag == nil && !c.recent.has(s.id):
		return invalid(another, op)
	case s.tag == nil:
		if s.drops && !c.recentSeeds.has(s.id.with(s.seed)) {
			return invalid(
				"%s: dropout_seed is %d, and no forward call with this plan and batch had it; give the seed of the forward call",
				op, uint64(s.seed))
		}
	case s.tag[0] != tagMagic || s.tag[1] != ^s.tag[2]:
		return invalid("%s: saved has not been written by a forward call, or has been overwritten since; give the memory that the forward call got as saved",
			op)
	case s.tag[1] != uint64(s.id):
		return invalid(another, op)
	case s.drops && s.tag[3] != uint64(s.seed):
		return invalid("%s: dropout_seed is %d, and %d in the forward call that wrote saved; give the seed of the forward call",
			op, uint64(s.seed), s.tag[3])
	}
	return nil
}
