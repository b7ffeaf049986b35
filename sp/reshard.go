package sp

import (
	"slices"

	"ulysses/device"
	"ulysses/internal/status"
	"ulysses/tensor"
)

// part is one tensor of an exchange, in both of its layouts.
type part struct {
	seq   tensor.Tensor // [B, n, H, D]: this rank's rows of all heads
	heads tensor.Tensor // [h, B, S, D]: all rows of this rank's heads
	split []span        // heads of each rank
	rows  []span        // rows of each rank
	// for heads held by several ranks: those of split that no lower rank has; nil = all
	first []span

	// [B·n, R/2]: features are rotated on the way to heads, and back on the way to seq; nil = as
	// they are
	cos, sin tensor.Tensor
	norm     HeadNorm // on the way to heads, before they are rotated
}

// block is the elements of a part that rank i's heads have at rank j's rows.
func (t *part) block(i, j int64) int64 {
	return t.split[i].n() * t.seq.Shape[0] * t.rows[j].n() * t.seq.Shape[3]
}

// mine is this rank's rows of rank j's heads, head-major: [h_j, B, n, D].
func (t *part) mine(heads span) tensor.Tensor {
	return t.seq.Slice(2, heads.lo, heads.hi).Permute(2, 0, 1, 3)
}

// wireElements is what an exchange from sequence to heads sends and receives at this rank; the way
// back is the mirror image.
func (p *Plan) wireElements(parts []part) (send, recv int64) {
	for j := range p.size {
		if j == p.rank {
			continue
		}
		for i := range parts {
			send += parts[i].block(j, p.rank)
			recv += parts[i].block(p.rank, j)
		}
	}
	return send, recv
}

// A block on the wire, one part after the other, lies like the local tensors: [h, B, n, D] in
// memory, so that unpacking it into [h, B, S, D] is h·B runs of n·D elements; with tokens first [B,
// n, h, D], which unpacks into B runs. What a rank sends to itself does not pass the wire.

// seqToHeads fills the parts' heads from their seq in one exchange.
func (p *Plan) seqToHeads(s device.Stream, wire tensor.Tensor, parts []part) error {
	sent, err := p.packSeq(s, wire, parts)
	if err != nil {
		return err
	}
	if err := p.exchange(s, wire, sent, parts[0].seq.DType); err != nil {
		return err
	}
	return p.unpackHeads(s, wire, sent, parts)
}

// packSeq fills the front of the wire, sent elements, and the counts of the exchange.
func (p *Plan) packSeq(s device.Stream, wire tensor.Tensor, parts []part) (sent int64, err error) {
	me := p.rank
	at := int64(0)
	for j := range p.size {
		start := at
		for i := range parts {
			t := &parts[i]
			dst := t.heads.Slice(2, t.rows[me].lo, t.rows[me].hi)
			if j != me {
				dst, at = p.block(wire, at, t, t.split[j].n(), t.rows[me].n())
			}
			if err := p.turn(s, t, dst, t.split[j], t.mine(t.split[j]), false); err != nil {
				return 0, err
			}
		}
		p.send[j] = at - start
	}
	for j := range p.size {
		p.recv[j] = 0
		if j != me {
			for i := range parts {
				p.recv[j] += parts[i].block(me, j)
			}
		}
	}
	return at, nil
}

// unpackHeads reads what came, which lies from element at on.
func (p *Plan) unpackHeads(s device.Stream, wire tensor.Tensor, at int64, parts []part) error {
	me := p.rank
	for j := range p.size {
		for i := range parts {
			t := &parts[i]
			if j == me {
				continue
			}
			var src tensor.Tensor
			src, at = p.block(wire, at, t, t.split[me].n(), t.rows[j].n())
			if err := p.copy(s, t.heads.Slice(2, t.rows[j].lo, t.rows[j].hi), src); err != nil {
				return err
			}
		}
	}
	return nil
}

// headsToSeq fills the parts' seq from their heads in one exchange: the inverse of seqToHeads, and
// its adjoint where first is set, which adds up the copies of a head in rank order.
func (p *Plan) headsToSeq(s device.Stream, wire tensor.Tensor, parts []part) error {
	sent, err := p.packHeads(s, wire, parts)
	if err != nil {
		return err
	}
	if err := p.exchange(s, wire, sent, parts[0].seq.DType); err != nil {
		return err
	}
	return p.unpackSeq(s, wire, sent, parts)
}

// packHeads is packSeq the other way.
func (p *Plan) packHeads(s device.Stream, wire tensor.Tensor, parts []part) (sent int64, err error) {
	me := p.rank
	at := int64(0)
	for j := range p.size {
		start := at
		for i := range parts {
			t := &parts[i]
			if j == me {
				continue
			}
			var dst tensor.Tensor
			dst, at = p.block(wire, at, t, t.split[me].n(), t.rows[j].n())
			if err := p.copy(s, dst, t.heads.Slice(2, t.rows[j].lo, t.rows[j].hi)); err != nil {
				return 0, err
			}
		}
		p.send[j] = at - start
	}
	for j := range p.size {
		p.recv[j] = 0
		if j != me {
			for i := range parts {
				p.recv[j] += parts[i].block(j, me)
			}
		}
	}
	return at, nil
}

// unpackSeq is unpackHeads the other way; the rows that stay on this rank are copied here.
func (p *Plan) unpackSeq(s device.Stream, wire tensor.Tensor, at int64, parts []part) error {
	me := p.rank
	for j := range p.size {
		for i := range parts {
			t := &parts[i]
			src := t.heads.Slice(2, t.rows[me].lo, t.rows[me].hi)
			if j != me {
				src, at = p.block(wire, at, t, t.split[j].n(), t.rows[me].n())
			}
			if err := p.merge(s, t, j, src); err != nil {
				return err
			}
		}
	}
	for i := range parts {
		if t := &parts[i]; t.first != nil && !t.cos.IsNil() { // copies of a head are added first
			all := t.mine(span{0, t.seq.Shape[2]})
			if err := p.turn(s, t, all, span{}, all, true); err != nil {
				return err
			}
		}
	}
	return nil
}

// merge writes rank j's heads into the rows of t, adding where a lower rank had the head too. src
// is [h_j, B, n, D].
func (p *Plan) merge(s device.Stream, t *part, j int64, src tensor.Tensor) error {
	heads := t.split[j]
	if t.first == nil {
		return p.turn(s, t, t.mine(heads), heads, src, true)
	}
	if heads == t.first[j] {
		return p.copy(s, t.mine(heads), src)
	}
	shared := t.first[j].lo - heads.lo
	if sum := t.mine(span{heads.lo, t.first[j].lo}); sum.Numel() > 0 {
		if err := p.dev.Add(s, sum, sum, src.Slice(0, 0, shared)); err != nil {
			return err
		}
	}
	return p.copy(s, t.mine(t.first[j]), src.Slice(0, shared, heads.n()))
}

// block carves the next block [h, B, n, D] of a part off the wire, at an element offset; it returns
// the offset behind it.
func (p *Plan) block(wire tensor.Tensor, at int64, t *part, heads, rows int64) (tensor.Tensor, int64) {
	c := device.Allocator{Mem: wire, Align: 1, Used: at * t.seq.DType.Size()}
	block := p.take(&c, t.seq.DType, heads, t.seq.Shape[0], rows, t.seq.Shape[3])
	return block, at + block.Numel()
}

func (p *Plan) copy(s device.Stream, dst, src tensor.Tensor) error {
	if src.Numel() == 0 {
		return nil
	}
	return p.dev.Copy(s, dst, src)
}

// turn is copy of these heads with the rotation of the part, if it has one: both are [h, B, n, D],
// n this rank's rows.
func (p *Plan) turn(s device.Stream, t *part, dst tensor.Tensor, heads span, src tensor.Tensor, inverse bool) error {
	if t.cos.IsNil() {
		return p.copy(s, dst, src)
	}
	n := src.Shape[2]
	for b := range src.Shape[1] {
		x, y := src.Select(1, b).Permute(1, 0, 2), dst.Select(1, b).Permute(1, 0, 2) // [n, h, D]
		if x.Numel() == 0 {
			continue
		}
		p.rope = device.Rope{X: x, Y: y, Cos: t.cos.Slice(0, b*n, (b+1)*n), Sin: t.sin.Slice(0, b*n, (b+1)*n), Inverse: inverse}
		if w := t.norm.W; !w.IsNil() && !inverse {
			p.rope.W, p.rope.Eps, p.rope.Centre = w, t.norm.Eps, t.norm.Centre
			p.rope.RStd = t.norm.RStd.Slice(0, b*n, (b+1)*n).Slice(1, heads.lo, heads.hi)
		}
		if err := p.dev.Rope(s, &p.rope); err != nil {
			return err
		}
	}
	return nil
}

// exchange sends the first elements of the wire by p.send and receives behind them by p.recv.
func (p *Plan) exchange(s device.Stream, wire tensor.Tensor, sent int64, dtype tensor.DType) error {
	if p.size == 1 {
		return nil
	}
	received := int64(0)
	for _, n := range p.recv {
		received += n
	}
	src := wire.At(0, dtype, sent)
	dst := wire.At(sent*dtype.Size(), dtype, received)
	return p.comm.AllToAll(s, dst, src, p.recv, p.send)
}

// Reshard is n tensors that change layout in one exchange.
type Reshard struct {
	// Seq are [B, rows, H, ·] with this rank's rows of all heads, Heads [B, S, h, ·] with all rows
	// of this rank's heads (Plan.Heads). Any strides with a dense last axis. All have one type.
	Seq, Heads []tensor.Tensor
	// Shared says, for each, that its heads and rows are those of keys; nil = none.
	Shared []bool
	// SumCopies makes HeadsToSeq add up the copies of shared heads that several ranks hold, in rank
	// order: the adjoint of SeqToHeads. Without it the lowest rank's copy is taken: the inverse.
	// F32, or the device's other types of activations, then rounded after each.
	SumCopies bool
	Workspace tensor.Tensor // U8, ReshardWorkspace bytes, aligned to Info.Align
}

// SeqToHeads writes r.Heads from r.Seq. HeadsToSeq writes r.Seq from r.Heads. Each is the other's
// inverse, and its adjoint. Collective.
func (p *Plan) SeqToHeads(s device.Stream, b *Batch, r *Reshard) error {
	parts, err := p.reshardParts("sp.SeqToHeads", b, r, false)
	if err = p.admit(err); err != nil || len(parts) == 0 {
		return err
	}
	return p.seqToHeads(s, bytesOf(r.Workspace), parts)
}

// HeadsToSeq is described at SeqToHeads.
func (p *Plan) HeadsToSeq(s device.Stream, b *Batch, r *Reshard) error {
	parts, err := p.reshardParts("sp.HeadsToSeq", b, r, true)
	if err = p.admit(err); err != nil || len(parts) == 0 {
		return err
	}
	return p.headsToSeq(s, bytesOf(r.Workspace), parts)
}

// bytesOf makes absent memory an empty block.
func bytesOf(t tensor.Tensor) tensor.Tensor {
	if t.IsNil() {
		return tensor.Of(nil, tensor.U8, 0)
	}
	return t
}

// ReshardWorkspace is the bytes that either direction needs; tensors may lack memory, their shapes
// count.
func (p *Plan) ReshardWorkspace(b *Batch, r *Reshard) (int64, error) {
	sketch := *r
	sketch.Workspace = tensor.Tensor{}
	parts, err := p.partsOf("sp.ReshardWorkspace", b, &sketch, false)
	if err != nil || len(parts) == 0 {
		return 0, err
	}
	send, recv := p.wireElements(parts)
	return (send + recv) * parts[0].seq.DType.Size(), nil
}

func (p *Plan) reshardParts(op string, b *Batch, r *Reshard, back bool) ([]part, error) {
	parts, err := p.partsOf(op, b, r, back)
	if err != nil || len(parts) == 0 {
		return nil, err
	}
	send, recv := p.wireElements(parts)
	need := (send + recv) * parts[0].seq.DType.Size()
	return parts, checkBytes(op, "workspace", r.Workspace, need)
}

// partsOf checks the tensors of a reshard and pairs them up.
func (p *Plan) partsOf(op string, b *Batch, r *Reshard, back bool) ([]part, error) {
	if err := p.checkBatch(op, b); err != nil {
		return nil, err
	}
	if len(r.Seq) != len(r.Heads) || (r.Shared != nil && len(r.Shared) != len(r.Seq)) {
		return nil, status.Errorf(status.InvalidArgument, "%s: %d seq tensors, %d heads tensors, %d shared flags: give as many of each",
			op, len(r.Seq), len(r.Heads), len(r.Shared))
	}
	parts := p.parts[:0] // no allocation but the first time
	for i := range r.Seq {
		t := part{seq: r.Seq[i], split: p.query, rows: b.queries.rows}
		h, all, n := p.layer.Heads, b.queries.n, b.Rows()
		shared := r.Shared != nil && r.Shared[i]
		if shared {
			t.split, t.rows, h, all, n = p.key, b.keys.rows, p.layer.KVHeads, b.keys.n, b.KVRows()
		}
		summed := p.dev.Info().Compute
		if t.seq.DType != r.Seq[0].DType || r.Heads[i].DType != r.Seq[0].DType || (r.SumCopies && !slices.Contains(summed, t.seq.DType)) {
			return nil, status.Errorf(status.InvalidArgument, "%s: tensor %d: %v and %v: all need one type, one of %v where copies are summed",
				op, i, t.seq, r.Heads[i], summed)
		}
		d := t.seq.Shape[3]
		if err := checkTensor(op, "seq", t.seq, t.seq.DType, b.spec.Batch, n, h, d); err != nil {
			return nil, err
		}
		if err := checkTensor(op, "heads", r.Heads[i], t.seq.DType, b.spec.Batch, all, t.split[p.rank].n(), d); err != nil {
			return nil, err
		}
		t.heads = r.Heads[i].Permute(2, 0, 1, 3)
		switch {
		case shared && back && r.SumCopies:
			t.first = p.owned
		case shared && back: // only the lowest holder sends
			t.heads = t.heads.Slice(0, p.owned[p.rank].lo-p.key[p.rank].lo, p.key[p.rank].n())
			t.split = p.owned
		}
		parts = append(parts, t)
	}
	p.parts = parts
	return parts, nil
}
