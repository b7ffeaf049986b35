// Package sp implements Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509). Each
// rank holds a shard of the tokens, with all heads. One all-to-all reshards q, k and v from tokens
// to heads, so that each rank has all tokens of a subset of the heads. Any local attention runs
// there. A second all-to-all restores token sharding.
//
// NewPlan is called once for a kind of layer, NewBatch once for the lengths and documents of a
// batch. Then Forward and Backward run in memory of the caller and allocate nothing. The numbers of
// heads, tokens and ranks are arbitrary: a rank may have fewer heads or tokens than its neighbor,
// or none. It still takes part in every all-to-all. Key heads whose query heads are on several
// ranks are sent to each of these ranks, and their gradients are summed in rank order.
//
// The attention of a head runs over the whole sequence on one rank, so results are bitwise equal to
// the results of one rank. The exceptions are dk and dv of a key head whose query heads are on
// several ranks: they are sums of the ranks' partial gradients in rank order, bitwise reproducible,
// and equal to one rank's gradients within rounding.
//
// In this package, the rows of a rank are its tokens of each sequence: a range [lo, hi).
package sp

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// span is a range [lo, hi) of heads or of tokens.
type span struct{ lo, hi int64 }

func (s span) n() int64 { return s.hi - s.lo }

// shards returns the shard of n that each rank has.
func shards(n, size int64) []span {
	spans := make([]span, size)
	for r := range spans {
		spans[r].lo, spans[r].hi = comm.Shard(n, size, int64(r))
	}
	return spans
}

// Layer is a kind of attention layer. It is equal on all ranks.
type Layer struct {
	Heads, KVHeads int64 // query heads; key heads; Heads is a multiple of KVHeads
	Dim, VDim      int64 // features of a query or key head; of a value head
	// DType is the type of all tensors except the LSE: F32, or BF16 if the device supports it; 0 =
	// F32
	DType   tensor.DType
	Causal  bool
	Window  *device.Window // the keys that a query sees, in addition to Causal; nil = all
	Scale   float64        // of q·k; 0 = 1/sqrt(Dim)
	Softcap float64        // c > 0: a score x becomes c·tanh(x/c); 0 = off
	Dropout float64        // probability that a softmax weight becomes 0; chosen by Args.Seed
	// Calls have Args.Sinks, Args.Slopes (ALiBi) and Args.BlockMask, as in device.Attention.
	// BlockRows and BlockColumns are the queries and keys of a block of the mask; 0 = no mask.
	Sinks, ALiBi            bool
	BlockRows, BlockColumns int64
	// Ring is the number of groups of ranks among which the sequence is divided during attention.
	// The heads are divided among the ranks of a group. 0 = 1: all ranks are one group. It must be
	// that of the batches.
	Ring int64
	// Gather moves keys and values between the groups in one all-to-all at the start, and not in a
	// step for each group while the step before computes. It needs memory for all keys.
	Gather     bool
	NoBackward bool // Backward is not called, and nothing is saved
	// Overlapped makes Reserve count the all-to-alls of Overlap, three of which are in progress.
	Overlapped bool
	// Deterministic makes Backward bitwise reproducible. Kernels reports whether the device has
	// kernels for it.
	Deterministic bool
}

// Admit is called with the result of the checks of a call, before the call's first communication,
// and returns the error of the call. It lets ranks agree on the error. With nil, each rank returns
// its own result.
type Admit func(error) error

// Result returns the error of a call whose checks returned err.
func (f Admit) Result(err error) error {
	if f == nil {
		return err
	}
	return f(err)
}

// Plan is a kind of layer on the ranks of a communicator. It serves every layer of that kind and
// every batch, one call at a time. It does not own the communicator.
type Plan struct {
	Admit Admit

	dev        device.Device
	comm       comm.Comm
	layer      Layer // DType and Scale resolved
	rank, size int64
	ring       int64 // groups of the ring
	align      int64
	tokenMajor bool // in memory, local tensors and blocks of an all-to-all have tokens before heads

	query  []span  // query heads of each rank; the same in each group of the ring
	key    []span  // their key heads; a key head may be on several ranks
	owned  []span  // the heads of key[r] that no lower rank of the group has
	kvHead []int64 // by local query head: its local key head

	tensors    []reshardTensor // of the reshard in progress
	send, recv []int64         // by rank: elements of the all-to-all in progress
	// arguments of the operation in progress, so that no call allocates
	attention device.Attention
	gradient  device.AttentionGrad
	rope      device.Rope
	ringPass  ringPass
	// of the all-to-alls of a ring that fetch keys and return gradients
	fetchCounts, returnCounts ringCounts

	schedule  schedule // of the last batch
	largest   []*Batch // of eachMax, for largestOf
	largestOf extents
	lse       device.Allocator // over SavedLSE
}

// NewPlan makes a plan for a layer on the ranks of c. A layer that is not possible, or differs
// between ranks, is the same error on all ranks (InvalidArgument or Unsupported). Collective over
// c.
func NewPlan(d device.Device, c comm.Comm, l Layer) (*Plan, error) {
	info := d.Info()
	if l.DType == tensor.Invalid {
		l.DType = tensor.F32
	}
	fields := []comm.Field{number("heads", l.Heads), number("kv_heads", l.KVHeads), number("dim", l.Dim),
		number("v_dim", l.VDim),
		{Name: "dtype", Value: l.DType.String()}}
	for i := range Options {
		fields = append(fields, Options[i].fields(&l)...)
	}
	err := comm.Same(c, "sp.NewPlan",
		append(fields, comm.Field{Name: "device", Value: info.Kind}, flag("tokens before heads", info.TokenMajor),
			comm.Field{Name: "kernels", Value: info.KernelsIn(l.DType)})...)
	if err != nil {
		return nil, err
	}
	// The layer is equal on all ranks, so this check has the same result on all of them.
	if err := l.check(info, int64(c.Size())); err != nil {
		return nil, err
	}
	p := newPlan(d, c, l, int64(c.Rank()), int64(c.Size()))
	if l.NeedsKernels() {
		_, _, err = p.Kernels()
		if err = comm.Agree(c, err); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// newPlan returns the plan of a rank for a layer that has been checked.
func newPlan(d device.Device, c comm.Comm, l Layer, rank, size int64) *Plan {
	info := d.Info()
	l.Ring = max(1, l.Ring)
	if l.Scale == 0 {
		l.Scale = 1 / math.Sqrt(float64(l.Dim))
	}
	if w := l.Window; w != nil {
		own := *w // the caller may change *w
		if l.Window = &own; w.Left < 0 && w.Right < 0 {
			l.Window = nil
		}
	}
	p := &Plan{dev: d, comm: c, layer: l, rank: rank, size: size, ring: l.Ring, align: max(1, info.Align),
		tokenMajor: info.TokenMajor}
	query := shards(l.Heads, p.size/p.ring)
	key, owned := keyHeads(query, l.Heads/l.KVHeads)
	p.query, p.key, p.owned = slices.Repeat(query, int(p.ring)), slices.Repeat(key, int(p.ring)),
		slices.Repeat(owned, int(p.ring))
	p.send, p.recv = make([]int64, p.size), make([]int64, p.size)
	if p.ring > 1 {
		p.fetchCounts = ringCounts{make([]int64, p.size), make([]int64, p.size)}
		p.returnCounts = ringCounts{make([]int64, p.size), make([]int64, p.size)}
	}
	for h := p.query[p.rank].lo; h < p.query[p.rank].hi; h++ {
		p.kvHead = append(p.kvHead, h/(l.Heads/l.KVHeads)-p.key[p.rank].lo)
	}
	return p
}

// windowText returns a window in the notation of the job file.
func windowText(w *device.Window) string {
	if w == nil {
		return "[-1, -1]"
	}
	return fmt.Sprintf("[%d, %d]", max(-1, w.Left), max(-1, w.Right))
}

func (l Layer) check(info device.Info, ranks int64) error {
	for _, f := range []struct {
		name  string
		value int64
	}{{"heads", l.Heads}, {"kv_heads", l.KVHeads}, {"dim", l.Dim}, {"v_dim", l.VDim}} {
		if f.value <= 0 {
			return status.Errorf(status.InvalidArgument, "sp.NewPlan: %s is %d; set it to 1 or more", f.name, f.value)
		}
	}
	if !slices.Contains(info.Compute, l.DType) {
		return status.Errorf(status.Unsupported, "sp.NewPlan: dtype %v is not supported by device %s; use one of %v",
			l.DType, info.Kind, info.Compute)
	}
	if widest := info.AttentionHead; widest > 0 && max(l.Dim, l.VDim) > widest {
		return status.Errorf(status.Unsupported,
			"sp.NewPlan: dim %d, v_dim %d: attention of device %s supports at most %d features; set device.backend = \"cpu\"",
			l.Dim, l.VDim, info.Kind, widest)
	}
	if l.Heads%l.KVHeads != 0 {
		return status.Errorf(status.InvalidArgument,
			"sp.NewPlan: %d query heads, %d key heads; set heads to a multiple of kv_heads", l.Heads, l.KVHeads)
	}
	if l.Ring < 0 || l.Ring > 0 && ranks%l.Ring != 0 {
		return status.Errorf(status.InvalidArgument,
			"sp.NewPlan: ring is %d with %d ranks; set it to a divisor of the number of ranks", l.Ring, ranks)
	}
	for i := range Options {
		if o := &Options[i]; o.check != nil {
			if err := o.check(&l); err != nil {
				return err
			}
		}
	}
	return nil
}

// keyHeads returns the key heads of each rank's query heads, and which of them no lower rank
// has. A key head has group query heads. Query heads are sharded contiguously, so a rank shares at
// most its lowest key head with lower ranks.
func keyHeads(query []span, group int64) (key, owned []span) {
	key, owned = make([]span, len(query)), make([]span, len(query))
	next := int64(0) // first key head that no lower rank has
	for r, q := range query {
		key[r], owned[r] = span{next, next}, span{next, next}
		if q.n() > 0 {
			key[r] = span{q.lo / group, (q.hi-1)/group + 1}
			owned[r] = span{max(next, key[r].lo), key[r].hi}
			next = key[r].hi
		}
	}
	return key, owned
}

// Layer returns the layer of the plan, with its type and scale resolved.
func (p *Plan) Layer() Layer { return p.layer }

// Heads returns this rank's query heads [lo, hi) and their key heads [kvLo, kvHi).
func (p *Plan) Heads() (lo, hi, kvLo, kvHi int64) {
	q, k := p.query[p.rank], p.key[p.rank]
	return q.lo, q.hi, k.lo, k.hi
}

// Kernels returns the names of the kernels for the layer's forward and backward attention, as far
// as they do not depend on documents. A name is "" if the device has only one kernel or the pass
// does not exist. It is Unsupported, with the reason, if no kernel supports the layer. The result
// is that for all heads, so it is equal on ranks without heads. Not collective.
func (p *Plan) Kernels() (forward, backward string, err error) {
	if d, ok := p.dev.(device.AttentionKernels); ok {
		return p.layer.Kernels(d, p.dev.Info().Place)
	}
	return "", "", nil
}

// Kernels is Plan.Kernels on a device with memory at a place, without a plan.
func (l Layer) Kernels(d device.AttentionKernels, place tensor.Place) (forward, backward string, err error) {
	const rows = 128 // of a sequence of any length
	of := func(t tensor.DType, shape ...int64) tensor.Tensor {
		x := tensor.Of(nil, t, shape...)
		x.Where = place
		return x
	}
	a := device.Attention{Q: of(l.DType, rows, l.Heads, l.Dim), K: of(l.DType, rows, l.KVHeads, l.Dim),
		V: of(l.DType, rows, l.KVHeads, l.VDim), Out: of(l.DType, rows, l.Heads, l.VDim),
		LSE: of(tensor.F32, rows, l.Heads), Causal: l.Causal, Window: l.Window, Scale: l.Scale,
		Deterministic: l.Deterministic}
	l.ask(&a, rows, of)
	if forward, err = d.AttentionKernel(&a, false); err == nil && !l.NoBackward {
		backward, err = d.AttentionKernel(&a, true)
	}
	return forward, backward, err
}

// BytesSent returns the bytes that this rank sends to other ranks in one Forward and one Backward.
// In elements, the all-to-alls between the layouts of tokens and of attention send
//
//	forward   B·Σ_{j≠r} [ n_rj·hq_j·D + m_rj·kv_j·(D+Dv) + n_jr·hq_r·Dv ]
//	backward  B·Σ_{j≠r} [ n_rj·hq_j·Dv + n_jr·hq_r·D + m_jr·kv_r·(D+Dv) ]
//
// with n_ij and m_ij the queries and keys among the tokens of rank i that the group of rank j
// computes (all of them without a ring), hq a rank's query heads and kv their key heads. With a
// ring, both passes also send B·Σ_g k_rg·kv_r·(D+Dv) elements, with k_rg the keys of this rank's
// group that the queries of group g see. Backward then sends F32 gradients of the keys of other
// groups, B·Σ_g k_gr·kv_r·(D+Dv). A forward with the LSE also sends LSEBytesSent.
func (p *Plan) BytesSent(b *Batch) (forward, backward int64) {
	l, me, sch := p.layer, p.rank, p.moves(b)
	q, k := sch.queries, sch.keys
	for j := range p.size {
		if j == me {
			continue
		}
		forward += q.seqRows[j]*p.query[j].n()*l.Dim + k.seqRows[j]*p.key[j].n()*(l.Dim+l.VDim) +
			q.headsRows[j]*p.query[me].n()*l.VDim
		backward += q.seqRows[j]*p.query[j].n()*l.VDim + q.headsRows[j]*p.query[me].n()*l.Dim +
			k.headsRows[j]*p.key[me].n()*(l.Dim+l.VDim)
	}
	bytes, row := b.spec.Batch*l.DType.Size(), p.key[me].n()*(l.Dim+l.VDim)
	sent, returned := sch.rowsMoved()
	forward, backward = (forward+sent*row)*bytes, (backward+sent*row)*bytes
	return forward, backward + returned*row*b.spec.Batch*tensor.F32.Size()
}

// LSEBytesSent returns the bytes that a forward with the LSE sends in addition. The LSE is always
// F32.
func (p *Plan) LSEBytesSent(b *Batch) int64 {
	x, n := p.placed(b).queries, int64(0)
	for j := range p.size {
		if j != p.rank {
			n += x.headsRows[j]
		}
	}
	return n * p.query[p.rank].n() * b.spec.Batch * tensor.F32.Size()
}

// String describes the plan in one line: ranks, heads of each rank, and bytes sent for each token.
func (p *Plan) String() string {
	l, ulysses := p.layer, p.size/p.ring
	copies, sent := int64(0), int64(0)
	for j := range ulysses {
		copies += p.key[j].n()
		sent += p.query[j].n()*(l.Dim+l.VDim) + p.key[j].n()*(l.Dim+l.VDim)
	}
	s := fmt.Sprintf("ulysses %d, query heads %s, key heads %s", ulysses, Counts(sizes(p.query[:ulysses])),
		Counts(sizes(p.key[:ulysses])))
	if p.ring > 1 {
		s = fmt.Sprintf("ring %d × %s", p.ring, s)
	}
	if copies > l.KVHeads {
		s += fmt.Sprintf(" (%d in %d copies)", l.KVHeads, copies)
	}
	// Of a token's elements, the share of one rank stays on it.
	s += fmt.Sprintf(", forward sends %.0f bytes a token",
		float64(sent*l.DType.Size())*float64(ulysses-1)/float64(ulysses))
	if p.ring > 1 {
		s += ", and keys and values to the groups whose queries see them"
	}
	return s
}

// Counts returns how many heads each rank has as text, with runs shortened: "2×3 1".
func Counts(heads []int64) string {
	var b strings.Builder
	for i := 0; i < len(heads); {
		j := i
		for j < len(heads) && heads[j] == heads[i] {
			j++
		}
		if i > 0 {
			b.WriteByte(' ')
		}
		fmt.Fprintf(&b, "%d", heads[i])
		if j-i > 1 {
			fmt.Fprintf(&b, "×%d", j-i)
		}
		i = j
	}
	return b.String()
}

// sizes returns the heads of each span.
func sizes(spans []span) []int64 {
	n := make([]int64, len(spans))
	for i, s := range spans {
		n[i] = s.n()
	}
	return n
}
