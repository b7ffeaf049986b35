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
	"strconv"
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
	DType      tensor.DType
	Causal     bool
	Window     *device.Window // the keys that a query sees, in addition to Causal; nil = all
	Scale      float64        // of q·k; 0 = 1/sqrt(Dim)
	NoBackward bool           // Backward is not called, and nothing is saved
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
	align      int64
	tokenMajor bool // in memory, local tensors and blocks of an all-to-all have tokens before heads

	query  []span  // query heads of each rank
	key    []span  // their key heads; a key head may be on several ranks
	owned  []span  // the heads of key[r] that no lower rank has
	kvHead []int64 // by local query head: its local key head

	tensors    []reshardTensor // of the reshard in progress
	send, recv []int64         // by rank: elements of the all-to-all in progress
	// arguments of the operation in progress, so that no call allocates
	attention device.Attention
	gradient  device.AttentionGrad
	rope      device.Rope
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
	// The layer is equal on all ranks, so this check has the same result on all of them.
	if err := l.check(info); err != nil {
		return nil, err
	}
	if l.Scale == 0 {
		l.Scale = 1 / math.Sqrt(float64(l.Dim))
	}
	if w := l.Window; w != nil {
		own := *w // the caller may change *w
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

// windowText returns a window in the notation of the job file.
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
			return status.Errorf(status.InvalidArgument, "sp.NewPlan: %s is %d; set it to 1 or more", f.name, f.value)
		}
	}
	if !slices.Contains(info.Compute, l.DType) {
		return status.Errorf(status.Unsupported, "sp.NewPlan: dtype %v is not supported by device %s; use one of %v", l.DType, info.Kind, info.Compute)
	}
	if widest := info.AttentionHead; widest > 0 && max(l.Dim, l.VDim) > widest {
		return status.Errorf(status.Unsupported, "sp.NewPlan: dim %d, v_dim %d: attention of device %s supports at most %d features; set device.backend = \"cpu\"",
			l.Dim, l.VDim, info.Kind, widest)
	}
	if l.Heads%l.KVHeads != 0 {
		return status.Errorf(status.InvalidArgument,
			"sp.NewPlan: %d query heads, %d key heads; set heads to a multiple of kv_heads", l.Heads, l.KVHeads)
	}
	if math.IsNaN(l.Scale) || math.IsInf(l.Scale, 0) {
		return status.Errorf(status.InvalidArgument, "sp.NewPlan: scale is %v; set a finite number, or 0 for 1/sqrt(%d)", l.Scale, l.Dim)
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
	d, ok := p.dev.(device.AttentionKernels)
	if !ok {
		return "", "", nil
	}
	l := p.layer
	const rows = 128 // of a sequence of any length
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

// BytesSent returns the bytes that this rank sends to other ranks in one Forward and one Backward:
//
//	forward   B·Σ_{j≠r} [ n_r·hq_j·D + m_r·kv_j·(D+Dv) + n_j·hq_r·Dv ]
//	backward  B·Σ_{j≠r} [ n_r·hq_j·Dv + n_j·hq_r·D + m_j·kv_r·(D+Dv) ]
//
// elements, with n and m a rank's tokens of queries and keys, hq its query heads and kv their key
// heads. A forward with the LSE also sends LSEBytesSent.
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

// LSEBytesSent returns the bytes that a forward with the LSE sends in addition. The LSE is always
// F32.
func (p *Plan) LSEBytesSent(b *Batch) int64 {
	return (b.queries.n - b.queries.rows[p.rank].n()) * p.query[p.rank].n() * b.spec.Batch * tensor.F32.Size()
}

// String describes the plan in one line: ranks, heads of each rank, and bytes sent for each token.
func (p *Plan) String() string {
	l := p.layer
	copies, sent := int64(0), int64(0)
	for j := range p.size {
		copies += p.key[j].n()
		sent += p.query[j].n()*(l.Dim+l.VDim) + p.key[j].n()*(l.Dim+l.VDim)
	}
	s := fmt.Sprintf("ulysses %d, query heads %s, key heads %s", p.size, Counts(sizes(p.query)), Counts(sizes(p.key)))
	if copies > l.KVHeads {
		s += fmt.Sprintf(" (%d in %d copies)", l.KVHeads, copies)
	}
	// 1/P of a token's elements stay on its rank.
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
