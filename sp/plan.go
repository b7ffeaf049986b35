// Package sp implements Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509). Each
// rank holds a slice of the tokens of all heads. One all-to-all re-shards q, k and v to all tokens
// of a slice of the heads. Any local attention runs there. A second all-to-all restores token
// sharding.
//
// NewPlan is called once for a kind of layer, NewBatch once for the lengths and documents of a
// batch. Forward and Backward run in memory of the caller and allocate nothing. The numbers of
// heads, tokens and ranks are arbitrary: a rank may hold fewer heads or tokens than its neighbor,
// or none, and still takes part in every all-to-all. Key heads whose query heads lie on several
// ranks are sent to each of these ranks, and their gradients are summed in rank order.
//
// The attention of a head runs over the whole sequence on one rank, so results are bitwise equal to
// the results of one rank. The exceptions are dk and dv of a key head whose query heads lie on
// several ranks: they are sums of the ranks' partial gradients in rank order, bitwise reproducible,
// and equal to one rank's gradients within rounding.
package sp

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"ulysses/comm"
	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// span is a range [lo, hi) of heads or of rows.
type span struct{ lo, hi int64 }

func (s span) n() int64 { return s.hi - s.lo }

// shards cuts n over all ranks.
func shards(n, size int64) []span {
	cut := make([]span, size)
	for r := range cut {
		cut[r].lo, cut[r].hi = comm.Shard(n, size, int64(r))
	}
	return cut
}

// Layer is a kind of attention layer.
type Layer struct {
	Heads, KVHeads int64 // query heads; key heads, which divide them
	Dim, VDim      int64 // features of a query and key head; of a value head
	// of all tensors but the LSE: F32, or BF16 where the device computes in it; 0 = F32
	DType      tensor.DType
	Causal     bool
	Window     *device.Window // of keys that a query sees, beside Causal; nil = unbounded
	Scale      float64        // of q·k; 0 = 1/sqrt(Dim)
	NoBackward bool           // Backward will not be called: nothing is saved
	// Backward repeats to the bit on every device; Kernels says whether the device has kernels for
	// that
	Deterministic bool
}

// Admit gets the result of the checks of a call, before the call's first communication, and returns
// the error of the call. A caller whose ranks agree on refusals sets it. Where it is nil, each rank
// checks alone.
type Admit func(error) error

// Result returns the error of a call whose checks returned err.
func (f Admit) Result(err error) error {
	if f == nil {
		return err
	}
	return f(err)
}

// Plan is a kind of layer on the ranks of a communicator. It serves every layer of that kind and
// every batch, one call at a time.
type Plan struct {
	Admit Admit

	dev        device.Device
	comm       comm.Comm
	layer      Layer // DType and Scale resolved
	rank, size int64
	align      int64
	tokenMajor bool // local copies and blocks on the wire have tokens before heads

	query  []span  // query heads of each rank
	key    []span  // key heads under them: a head may be on several ranks
	owned  []span  // the part of key[r] that no lower rank has
	kvHead []int64 // of this rank: local key head of each local query head

	parts      []part  // tensors of the reshard under way
	send, recv []int64 // elements to and from each rank, of the exchange under way
	// arguments of the operation under way: kept here so that no call allocates
	attention device.Attention
	gradient  device.AttentionGrad // likewise
	rope      device.Rope          // likewise
	lse       device.Allocator     // of the call under way, where the LSE is saved apart
}

// NewPlan settles a layer for the ranks of c. It is collective: a layer that cannot be, or differs
// between ranks, is refused on all of them alike (InvalidArgument).
func NewPlan(d device.Device, c comm.Comm, l Layer) (*Plan, error) {
	info := d.Info()
	if l.DType == tensor.Invalid {
		l.DType = tensor.F32
	}
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	err := comm.Same(c, "sp.NewPlan",
		comm.Field{Name: "heads", Value: number(l.Heads)},
		comm.Field{Name: "kv_heads", Value: number(l.KVHeads)},
		comm.Field{Name: "dim", Value: number(l.Dim)},
		comm.Field{Name: "v_dim", Value: number(l.VDim)},
		comm.Field{Name: "dtype", Value: l.DType.String()},
		comm.Field{Name: "causal", Value: strconv.FormatBool(l.Causal)},
		comm.Field{Name: "window", Value: windowText(l.Window)},
		comm.Field{Name: "scale", Value: strconv.FormatFloat(l.Scale, 'g', -1, 64)},
		comm.Field{Name: "no_backward", Value: strconv.FormatBool(l.NoBackward)},
		comm.Field{Name: "deterministic", Value: strconv.FormatBool(l.Deterministic)},
		comm.Field{Name: "device", Value: info.Kind},
		comm.Field{Name: "tokens before heads", Value: strconv.FormatBool(info.TokenMajor)},
		comm.Field{Name: "kernels", Value: info.KernelsIn(l.DType)})
	if err != nil {
		return nil, err
	}
	// The ranks hold the same layer, so each comes to the same verdict by itself.
	if err := l.check(info); err != nil {
		return nil, err
	}
	if l.Scale == 0 {
		l.Scale = 1 / math.Sqrt(float64(l.Dim))
	}
	if w := l.Window; w != nil {
		own := *w // the caller's may change
		if l.Window = &own; w.Left < 0 && w.Right < 0 {
			l.Window = nil
		}
	}
	p := &Plan{dev: d, comm: c, layer: l, rank: int64(c.Rank()), size: int64(c.Size()), align: max(1, info.Align), tokenMajor: info.TokenMajor}
	p.query = shards(l.Heads, p.size)
	p.key, p.owned = keyHeads(p.query, l.Heads/l.KVHeads)
	p.send, p.recv = make([]int64, p.size), make([]int64, p.size)
	for h := p.query[p.rank].lo; h < p.query[p.rank].hi; h++ {
		p.kvHead = append(p.kvHead, h/(l.Heads/l.KVHeads)-p.key[p.rank].lo)
	}
	return p, nil
}

// windowText is a window in the notation of the job file.
func windowText(w *device.Window) string {
	if w == nil {
		return "[-1, -1]"
	}
	return fmt.Sprintf("[%d, %d]", max(-1, w.Left), max(-1, w.Right))
}

func (l Layer) check(info device.Info) error {
	for _, f := range []struct {
		name  string
		value int64
	}{{"heads", l.Heads}, {"kv_heads", l.KVHeads}, {"dim", l.Dim}, {"v_dim", l.VDim}} {
		if f.value <= 0 {
			return status.Errorf(status.InvalidArgument, "sp.NewPlan: %s %d: set it to 1 or more", f.name, f.value)
		}
	}
	if !slices.Contains(info.Compute, l.DType) {
		return status.Errorf(status.Unsupported, "sp.NewPlan: dtype %v: device %s computes in %v", l.DType, info.Kind, info.Compute)
	}
	if widest := info.AttentionHead; widest > 0 && max(l.Dim, l.VDim) > widest {
		return status.Errorf(status.Unsupported, "sp.NewPlan: dim %d, v_dim %d: device %s has attention for heads of %d features at most: use device.backend = \"cpu\"",
			l.Dim, l.VDim, info.Kind, widest)
	}
	if l.Heads%l.KVHeads != 0 {
		return status.Errorf(status.InvalidArgument,
			"sp.NewPlan: %d query heads over %d key heads: the first must be a multiple of the second", l.Heads, l.KVHeads)
	}
	if math.IsNaN(l.Scale) || math.IsInf(l.Scale, 0) {
		return status.Errorf(status.InvalidArgument, "sp.NewPlan: scale %v: set a finite number, or 0 for 1/sqrt(%d)", l.Scale, l.Dim)
	}
	return nil
}

// keyHeads finds the key heads under each rank's query heads, group query heads to a key head, and
// which of them the rank is the first to hold. Query heads are cut contiguously, so a rank shares
// at most its lowest key head with lower ranks.
func keyHeads(query []span, group int64) (key, owned []span) {
	key, owned = make([]span, len(query)), make([]span, len(query))
	held := int64(0)
	for r, q := range query {
		key[r], owned[r] = span{held, held}, span{held, held}
		if q.n() > 0 {
			key[r] = span{q.lo / group, (q.hi-1)/group + 1}
			owned[r] = span{max(held, key[r].lo), key[r].hi}
			held = key[r].hi
		}
	}
	return key, owned
}

// Layer is what the plan was made for, its type and scale resolved.
func (p *Plan) Layer() Layer { return p.layer }

// Heads gives this rank's query heads [lo, hi) and the key heads [kvLo, kvHi) under them.
func (p *Plan) Heads() (lo, hi, kvLo, kvHi int64) {
	q, k := p.query[p.rank], p.key[p.rank]
	return q.lo, q.hi, k.lo, k.hi
}

// Kernels names the rows of kernels that serve the layer's attention forward and backward, as far
// as they can be told without documents; "" on a device with one row, and for a pass that is not
// made. It is Unsupported, with the reason, where no row serves. Local: the answer is that for all
// heads, so that a rank without any has the same.
func (p *Plan) Kernels() (forward, backward string, err error) {
	d, ok := p.dev.(device.AttentionKernels)
	if !ok {
		return "", "", nil
	}
	l := p.layer
	const rows = 128 // of a sequence: a few of any length
	of := func(dtype tensor.DType, shape ...int64) tensor.Tensor {
		t := tensor.Of(nil, dtype, shape...)
		t.Where = p.dev.Info().Place
		return t
	}
	a := device.Attention{Q: of(l.DType, rows, l.Heads, l.Dim), K: of(l.DType, rows, l.KVHeads, l.Dim), V: of(l.DType, rows, l.KVHeads, l.VDim),
		Out: of(l.DType, rows, l.Heads, l.VDim), LSE: of(tensor.F32, rows, l.Heads),
		Causal: l.Causal, Window: l.Window, Scale: l.Scale, Deterministic: l.Deterministic}
	if forward, err = d.AttentionKernel(&a, false); err == nil && !l.NoBackward {
		backward, err = d.AttentionKernel(&a, true)
	}
	return forward, backward, err
}

// BytesSent is what this rank sends to others in one Forward and one Backward:
//
//	forward   B·Σ_{j≠r} [ n_r·hq_j·D + m_r·kv_j·(D+Dv) + n_j·hq_r·Dv ]
//	backward  B·Σ_{j≠r} [ n_r·hq_j·Dv + n_j·hq_r·D + m_j·kv_r·(D+Dv) ]
//
// elements, with n and m a rank's rows of queries and keys, hq its query heads and kv the key heads
// under them. Asking for the LSE adds LSEBytesSent to the forward.
func (p *Plan) BytesSent(b *Batch) (forward, backward int64) {
	l, me := p.layer, p.rank
	n, m := b.queries.rows[me].n(), b.keys.rows[me].n()
	for j := range p.size {
		if j == me {
			continue
		}
		forward += n*p.query[j].n()*l.Dim + m*p.key[j].n()*(l.Dim+l.VDim) + b.queries.rows[j].n()*p.query[me].n()*l.VDim
		backward += n*p.query[j].n()*l.VDim + b.queries.rows[j].n()*p.query[me].n()*l.Dim +
			b.keys.rows[j].n()*p.key[me].n()*(l.Dim+l.VDim)
	}
	bytes := b.spec.Batch * l.DType.Size()
	return forward * bytes, backward * bytes
}

// LSEBytesSent is what a forward that is asked for the LSE sends on top: it is F32 whatever the
// type.
func (p *Plan) LSEBytesSent(b *Batch) int64 {
	return (b.queries.n - b.queries.rows[p.rank].n()) * p.query[p.rank].n() * b.spec.Batch * tensor.F32.Size()
}

// String says how the plan works, in one line.
func (p *Plan) String() string {
	l := p.layer
	copies, sent := int64(0), int64(0)
	for j := range p.size {
		copies += p.key[j].n()
		sent += p.query[j].n()*(l.Dim+l.VDim) + p.key[j].n()*(l.Dim+l.VDim)
	}
	s := fmt.Sprintf("ulysses %d, query heads %s, key heads %s", p.size, Counts(sizes(p.query)), Counts(sizes(p.key)))
	if copies > l.KVHeads {
		s += fmt.Sprintf(" (%d held %d times)", l.KVHeads, copies)
	}
	// Of what a token's rows hold, the share that stays on its rank is 1/P.
	return s + fmt.Sprintf(", forward sends %.0f bytes a token", float64(sent*l.DType.Size())*float64(p.size-1)/float64(p.size))
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
